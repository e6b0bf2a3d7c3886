"""Medusa heads from every public layout against the formula."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from head_checkpoints import HIDDEN, LM_HEAD, PADDED, VOCAB, Tensors, random, tiny_target, write_safetensors
from safetensors.torch import save_file

from outrider.errors import InvalidArgument
from outrider.lm.heads import HeadTarget, MedusaHead, load_head

TOKEN_MAP = torch.tensor([9, 2, 100, 249, 31])
"""Ids as they stand, in no order."""


def residual(head: int, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
    seed = 1000 + 100 * head + 10 * layer
    return random(HIDDEN, HIDDEN, seed=seed), random(HIDDEN, seed=seed + 1)


def output(head: int, rows: int = PADDED) -> torch.Tensor:
    return random(rows, HIDDEN, seed=2000 + head)


def formula(x: torch.Tensor, head: int, num_layers: int, out: torch.Tensor, *, bias: bool = True) -> torch.Tensor:
    for layer in range(num_layers):
        a, b = residual(head, layer)
        x = x + F.silu(a @ x + (b if bias else 0))
    return out @ x


def original(num_heads: int, num_layers: int = 1, *, outputs: bool = True) -> Tensors:
    made = {}
    for i in range(num_heads):
        for j in range(num_layers):
            made[f"{i}.{j}.linear.weight"], made[f"{i}.{j}.linear.bias"] = residual(i, j)
        if outputs:
            made[f"{i}.{num_layers}.weight"] = output(i)
    return made


def of_vllm(num_heads: int, num_layers: int = 1, rows: int = PADDED, *, bias: bool = False) -> Tensors:
    made = {}
    for i in range(num_heads):
        for j in range(num_layers):
            weight, own_bias = residual(i, j)
            made[f"blocks.{i}.layers.{j}.weight"] = weight
            if bias:
                made[f"blocks.{i}.layers.{j}.bias"] = own_bias
        made[f"lm_heads.{i}.weight"] = output(i, rows)
    return made


def medusa(path: Path, **changes: Any) -> MedusaHead:
    head = load_head(path, tiny_target(**changes))
    assert isinstance(head, MedusaHead)
    assert (head.kind, head.states) == ("medusa", (-1,))
    return head


def check(head: MedusaHead, expected: list[torch.Tensor], x: torch.Tensor) -> None:
    got = head.logits(x)
    assert got.shape == (len(expected), len(expected[0]))
    torch.testing.assert_close(got, torch.stack(expected), rtol=1e-4, atol=1e-3)
    torch.testing.assert_close(head.logits(x, 1), got[:1], rtol=1e-4, atol=1e-3)


X = random(HIDDEN, seed=50, scale=1.0)


@pytest.mark.parametrize("num_layers", [1, 2])
@pytest.mark.parametrize("file", ["medusa_lm_head.pt", "medusa_lm_head.safetensors"])
def test_first_layout_whatever_count_its_config_tells(tmp_path: Path, num_layers: int, file: str) -> None:
    weights = original(3, num_layers)
    if file.endswith(".pt"):
        torch.save(weights, tmp_path / file)
    else:
        save_file(weights, tmp_path / file)
    (tmp_path / "config.json").write_text('{"medusa_num_heads": 2, "medusa_num_layers": 1}')
    head = medusa(tmp_path)
    assert head.draft_ids is None
    check(head, [formula(X, i, num_layers, output(i))[:VOCAB] for i in range(3)], X)
    one_file = load_head(tmp_path / file, tiny_target())
    assert isinstance(one_file, MedusaHead)
    assert torch.equal(one_file.logits(X), head.logits(X))


def test_without_output_heads_all_share_the_targets(tmp_path: Path) -> None:
    head = medusa(write_safetensors(tmp_path, {}, original(2, outputs=False)))
    check(head, [formula(X, i, 1, LM_HEAD)[:VOCAB] for i in range(2)], X)
    assert "output head of the target" in head.layout


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("prefix", ["", "medusa_heads."])
def test_layout_of_vllm(tmp_path: Path, bias: bool, prefix: str) -> None:
    weights = {prefix + key: value for key, value in of_vllm(2, 2, bias=bias).items()}
    config = {"model_type": "medusa", "num_heads": 5, "num_hidden_layers": 2, "medusa_fc_bias": bias}
    head = medusa(write_safetensors(tmp_path, config, weights))
    check(head, [formula(X, i, 2, output(i), bias=bias)[:VOCAB] for i in range(2)], X)


def test_token_map_is_absolute(tmp_path: Path) -> None:
    weights = of_vllm(2, rows=5) | {"token_map": TOKEN_MAP}
    head = medusa(write_safetensors(tmp_path, {"truncated_vocab_size": 5}, weights))
    assert head.draft_ids is not None
    assert head.draft_ids.tolist() == TOKEN_MAP.tolist()
    check(head, [formula(X, i, 1, output(i, 5), bias=False) for i in range(2)], X)


def test_one_output_head_for_all(tmp_path: Path) -> None:
    weights = {k: v for k, v in of_vllm(3).items() if not k.startswith("lm_heads")} | {"lm_head.weight": output(0)}
    head = medusa(write_safetensors(tmp_path / "a", {}, weights))
    check(head, [formula(X, i, 1, output(0), bias=False)[:VOCAB] for i in range(3)], X)
    del weights["lm_head.weight"]
    weights["token_map"] = TOKEN_MAP
    head = medusa(write_safetensors(tmp_path / "b", {"original_lm_head": True}, weights))
    check(head, [formula(X, i, 1, LM_HEAD[TOKEN_MAP], bias=False) for i in range(3)], X)
    with pytest.raises(InvalidArgument, match=r"lm_heads.0.weight \[5, 64\] is missing"):
        medusa(write_safetensors(tmp_path / "c", {}, weights))


def full_model(folder: Path, weights: Tensors, **more: torch.Tensor) -> Path:
    heads = {f"medusa_head.{key}": value for key, value in original(2).items()}
    return write_safetensors(folder, {"medusa_num_heads": 2}, weights | heads | more)


def test_full_model_serves_only_itself(tmp_path: Path) -> None:
    base = {"model.embed_tokens.weight": random(4, 4, seed=1), "model.norm.weight": torch.ones(4)}
    target = write_safetensors(tmp_path / "target", {"model_type": "llama"}, base)
    same = full_model(tmp_path / "same", base)
    expected = [formula(X, i, 1, output(i))[:VOCAB] for i in range(2)]
    check(medusa(same, folder=target), expected, X)
    check(medusa(same, folder=same), expected, X)
    with pytest.raises(
        InvalidArgument, match="full model with Medusa heads for itself, and the target tiny has no folder"
    ):
        medusa(same)
    tuned = full_model(tmp_path / "tuned", base | {"model.norm.weight": torch.full((4,), 1.01)})
    with pytest.raises(InvalidArgument, match=r"not the target tiny: model\.norm\.weight differs"):
        medusa(tuned, folder=target)
    larger = full_model(tmp_path / "larger", base | {"model.layers.0.x": torch.ones(2)})
    with pytest.raises(InvalidArgument, match=r"only one of them has \['model\.layers\.0\.x'\]"):
        medusa(larger, folder=target)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"1.0.linear.weight": None}, r"medusa_lm_head\.pt: 1\.0\.linear\.weight \[64, 64\] is missing"),
        ({"1.0.linear.bias": None}, r"1\.0\.linear\.bias \[64\] is missing"),
        ({"2.1.weight": None}, r"2\.1\.weight \[250, 64\] or \[256, 64\] is missing"),
        ({"0.1.weight": torch.ones(99, 64)}, r"0\.1\.weight should be \[250, 64\] or \[256, 64\] and is \[99, 64\]"),
        ({"0.0.linear.weight": torch.ones(32, 32)}, r"0\.0\.linear\.weight should be \[64, 64\] and is \[32, 32\]"),
        ({"extra.weight": torch.ones(3)}, r"unexpected extra\.weight \[3\]"),
        ({"1.1.weight": torch.full((256, 64), torch.inf)}, r"1\.1\.weight holds numbers that are not finite"),
    ],
)
def test_what_does_not_fit_is_refused_by_key_and_shape(
    tmp_path: Path, change: dict[str, torch.Tensor | None], said: str
) -> None:
    weights = {key: value for key, value in (original(3) | change).items() if value is not None}
    torch.save(weights, tmp_path / "medusa_lm_head.pt")
    with pytest.raises(InvalidArgument, match=said) as refusal:
        load_head(tmp_path, tiny_target())
    assert refusal.value.field == "heads"


@pytest.mark.parametrize(
    ("token_map", "said"),
    [
        ([1, 2, 3, 3, 4], "token_map leads to id 3 more than once"),
        ([1, 2, 3, 4, 256], "token_map leads to id 256, the target has ids 0 to 255"),
        ([1, 2, 3], r"lm_heads\.0\.weight should be \[3, 64\] and is \[5, 64\]"),
    ],
)
def test_wrong_token_map_is_refused(tmp_path: Path, token_map: list[int], said: str) -> None:
    weights = of_vllm(1, rows=5) | {"token_map": torch.tensor(token_map)}
    with pytest.raises(InvalidArgument, match=said):
        load_head(write_safetensors(tmp_path, {}, weights), tiny_target())


def test_a_target_gives_its_matrices_as_they_are(tmp_path: Path) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=64, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, vocab_size=PADDED
    )
    model = LlamaForCausalLM(config).eval()
    target = HeadTarget.of(model, name="llama", vocab_size=VOCAB)
    head = load_head(write_safetensors(tmp_path, {}, original(1, outputs=False)), target)
    assert isinstance(head, MedusaHead)
    check(head, [formula(X, 0, 1, model.lm_head.weight.detach())[:VOCAB]], X)
