"""Files that are no heads, or heads for another model, or damaged: refused, naming the file and what is wrong."""

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from head_checkpoints import (
    HIDDEN,
    PADDED,
    VOCAB,
    Eagle,
    Tensors,
    eagle1_weights,
    eagle3_weights,
    llama_config,
    tiny_target,
    write_bin,
    write_original,
    write_safetensors,
    write_speculators,
)

from outrider.errors import InvalidArgument
from outrider.lm.heads import load_head

SPEC = Eagle()
CONFIG = llama_config(SPEC) | {"draft_vocab_size": 96}


def refused(path: Path, **changes: Any) -> str:
    with pytest.raises(InvalidArgument) as refusal:
        load_head(path, tiny_target(**changes))
    assert refusal.value.field == "heads"
    return refusal.value.message


def changed(folder: Path, change: dict[str, Any], config: dict[str, Any] | None = None) -> Path:
    """An EAGLE-3 head with tensors replaced, added, or (None) left out."""
    weights = {key: value for key, value in (eagle3_weights(SPEC) | change).items() if value is not None}
    merged = {key: value for key, value in (CONFIG | (config or {})).items() if value != "absent"}
    return write_bin(folder, merged, weights)


class Code:
    """Unpickling it makes a folder."""

    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (self.path,)


@pytest.mark.parametrize("name", ["pytorch_model.bin", "medusa_lm_head.pt"])
def test_code_in_a_pickle_is_not_run(tmp_path: Path, name: str) -> None:
    trap = tmp_path / "was run"
    torch.save({"fc.weight": torch.ones(2), "layers.0.x": Code(str(trap))}, tmp_path / name)
    said = refused(tmp_path)
    assert name in said
    assert "may be code" in said
    assert not trap.exists()
    torch.load(tmp_path / name, weights_only=False)  # the trap would have worked
    assert trap.exists()


@pytest.mark.parametrize("kept", [0.0, 0.3, 0.9, 0.999])
@pytest.mark.parametrize("kind", ["bin", "safetensors"])
def test_file_cut_short(tmp_path: Path, kind: str, kept: float) -> None:
    write = write_bin if kind == "bin" else write_safetensors
    file = write(tmp_path, CONFIG, eagle3_weights(SPEC)) / (
        "pytorch_model.bin" if kind == "bin" else "model.safetensors"
    )
    file.write_bytes(file.read_bytes()[: int(kept * file.stat().st_size)])
    said = refused(tmp_path)
    assert str(file) in said
    assert "cut short or damaged" in said


@pytest.mark.parametrize("name", ["model.safetensors", "pytorch_model.bin", "medusa_lm_head.pt"])
def test_file_of_something_else(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_bytes(b"<html>not found</html>" * 50)
    assert str(tmp_path / name) in refused(tmp_path)
    (tmp_path / name).write_bytes(b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n")
    assert "git lfs pull" in refused(tmp_path)


def test_damaged_header(tmp_path: Path) -> None:
    file = write_safetensors(tmp_path, CONFIG, eagle3_weights(SPEC)) / "model.safetensors"
    data = bytearray(file.read_bytes())
    data[20:60] = b"#" * 40
    file.write_bytes(data)
    assert "cut short or damaged" in refused(tmp_path)


def test_folder_without_a_head(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{}")
    assert f"{tmp_path} holds no head" in refused(tmp_path)
    assert "there is no file or folder" in refused(tmp_path / "nowhere")


def test_other_contents(tmp_path: Path) -> None:
    torch.save([torch.ones(2)], tmp_path / "pytorch_model.bin")
    assert "no plain table of tensors" in refused(tmp_path)
    torch.save({"state_dict": {"a": torch.ones(2)}}, tmp_path / "pytorch_model.bin")
    assert "no plain table of tensors" in refused(tmp_path)
    torch.save({"model.layers.0.mlp.up_proj.weight": torch.ones(2)}, tmp_path / "pytorch_model.bin")
    said = refused(tmp_path)
    assert "no head of a kind known here (Medusa, EAGLE-1/2, EAGLE-3)" in said
    assert "model.layers.0.mlp.up_proj.weight" in said


def test_config(tmp_path: Path) -> None:
    write_original(tmp_path, SPEC)
    (tmp_path / "config.json").write_text("{")
    assert "cannot read" in refused(tmp_path)
    (tmp_path / "config.json").unlink()
    assert "config.json is missing" in refused(tmp_path)


@pytest.mark.parametrize("kind", ["peagle", "dflash", "dspark", "mtp", "eagle"])
def test_other_kinds_of_speculators_by_name(tmp_path: Path, kind: str) -> None:
    write_speculators(tmp_path, SPEC, speculators_model_type=kind)
    assert f"speculators_model_type {kind!r} is not supported" in refused(tmp_path)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"fc.weight": None}, "fc.weight is missing"),
        ({"norm.weight": None}, "norm.weight [64] is missing"),
        ({"midlayer.hidden_norm.weight": None}, "midlayer.hidden_norm.weight [64] is missing"),
        ({"midlayer.self_attn.v_proj.weight": None}, "midlayer.self_attn.v_proj.weight [32, 128] is missing"),
        ({"lm_head.weight": None}, "lm_head.weight [96, 64] is missing"),
        ({"d2t": None, "t2d": None}, "d2t [96] is missing"),
        ({"midlayer.input_layernorm.weight": torch.ones(65)}, "input_layernorm.weight should be [64] and is [65]"),
        ({"midlayer.self_attn.q_proj.weight": torch.ones(64, 64)}, "q_proj.weight should be [64, 128] and is [64, 64]"),
        ({"fc.weight": torch.ones(64, 100)}, "fc.weight should be [64, states * 64] and is [64, 100]"),
        ({"midlayer.mlp.down_proj.weight": torch.ones(96, 64)}, "down_proj.weight should be [64, 96] and is [96, 64]"),
        ({"lm_head.weight": torch.ones(95, 64)}, "lm_head.weight should be [96, 64] and is [95, 64]"),
        ({"embed_tokens.weight": torch.ones(9, 64)}, "embed_tokens.weight should be"),
        ({"midlayer.self_attn.q_norm.weight": torch.ones(16)}, "k_norm.weight [16] is missing"),
        ({"fc.bias": torch.ones(64)}, "unexpected fc.bias [64]"),
        ({"midlayer.extra.weight": torch.ones(2)}, "unexpected midlayer.extra.weight [2]"),
        ({"norm.weight": torch.full((64,), torch.nan)}, "norm.weight holds numbers that are not finite"),
        (
            {"norm.weight": torch.ones(64, dtype=torch.int8)},
            "norm.weight is of torch.int8: quantised heads are not read",
        ),
        ({"t2d": torch.ones(77)}, "t2d should be [250] or [256] and is [77]"),
    ],
)
def test_keys_and_shapes(tmp_path: Path, change: dict[str, Any], said: str) -> None:
    message = refused(changed(tmp_path, change))
    assert said in message
    assert "pytorch_model.bin" in message


def test_keys_that_nobody_needs_are_let_pass(tmp_path: Path) -> None:
    load_head(changed(tmp_path, {"midlayer.self_attn.rotary_emb.inv_freq": torch.ones(8)}), tiny_target())


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"hidden_size": "absent"}, "hidden_size is None, a whole number above 0 is needed"),
        ({"num_attention_heads": 0}, "num_attention_heads is 0"),
        ({"num_key_value_heads": 3}, "is no attention"),
        ({"vocab_size": 32000}, "vocab_size is 32000, the target tiny has 256"),
        ({"target_hidden_size": 128}, "made for a target of hidden size 128, tiny has 64"),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "rotary scaling 'yarn' is not supported"),
        ({"num_aux_hidden_states": 4}, "fc.weight should be [64, states * 64] for 4 states and is [64, 192]"),
        ({"fc_norm": True}, "fc_norm.0.weight [64] is missing"),
        ({"norm_before_fc": True}, "input_norm.weight [192] is missing"),
        ({"bias": True}, "fc.bias [64] is missing"),
        ({"num_hidden_layers": 2}, "layers.1.input_layernorm.weight [64] is missing"),
        ({"draft_vocab_size": 90}, "d2t should be [90] and is [96]"),
        ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 5]}}, "names layers [2, 6]"),
        ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 5, 20]}}, "inputs of layers 0 to 7"),
        ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": "1,5,6"}}, "not a list of layers"),
        ({"eagle_config": "yes"}, "config.json or a tensor is of no form known here"),
        ({"rope_scaling": {"type": "linear"}}, "config.json or a tensor is of no form known here (KeyError: 'factor')"),
    ],
)
def test_config_that_does_not_go_with_the_file_or_the_target(tmp_path: Path, config: dict[str, Any], said: str) -> None:
    assert said in refused(changed(tmp_path, {}, config))


def test_norms_that_the_config_denies(tmp_path: Path) -> None:
    folder = changed(tmp_path, {"input_norm.weight": torch.ones(192)}, {"norm_before_fc": False})
    assert "unexpected input_norm.weight [192]" in refused(folder)


def test_layers_that_a_small_target_lacks(tmp_path: Path) -> None:
    assert "names no layers" in refused(write_original(tmp_path, SPEC), num_layers=5)


def d2t_of(ids: torch.Tensor) -> torch.Tensor:
    return ids - torch.arange(len(ids))


def test_draft_vocabulary(tmp_path: Path) -> None:
    ids = SPEC.draft_ids
    repeated = ids.clone()
    repeated[5] = repeated[4]
    beyond = ids.clone()
    beyond[-1] = PADDED
    for name, d2t, t2d, said in [
        ("absolute", ids, True, "d2t and t2d disagree: t2d marks 96 ids, the offsets of d2t lead to 96, not all of "),
        ("absolute", ids, True, "d2t seems to hold ids and not offsets"),
        ("repeated", d2t_of(repeated), False, f"d2t leads to id {int(ids[4])} more than once"),
        ("beyond", d2t_of(beyond), False, "d2t leads to id 256, the target has ids 0 to 255"),
        ("below", d2t_of(ids - 1), False, "d2t leads to id -1"),
        ("float", d2t_of(ids).float(), True, "d2t should be int64 and is torch.float32"),
    ]:
        marks: Tensors = {"d2t": d2t} | ({} if t2d else {"t2d": None})  # type: ignore[dict-item]
        assert said in refused(changed(tmp_path / name, marks))
    marked = torch.zeros(PADDED, dtype=torch.bool).index_fill_(0, ids[:-1], True)
    assert "t2d marks 95 ids" in refused(changed(tmp_path / "t2d", {"t2d": marked}))
    lost = changed(
        tmp_path / "lost", {"d2t": None, "lm_head.weight": torch.ones(PADDED, HIDDEN)}, {"draft_vocab_size": None}
    )
    assert "d2t is missing, and t2d leaves ids out" in refused(lost)
    assert load_head(changed(tmp_path / "good", {"t2d": None}), tiny_target()).draft_ids is not None
    assert VOCAB - 1 in ids


@pytest.mark.parametrize(
    ("change", "config", "said"),
    [
        ({"fc.bias": None}, {}, "fc.bias [64] is missing"),
        ({}, {"bias": False}, "unexpected fc.bias [64]"),
        ({"layers.0.input_layernorm.weight": torch.ones(64)}, {}, "unexpected layers.0.input_layernorm.weight [64]"),
        ({"embed_layernorm.weight": torch.ones(64)}, {}, "unexpected embed_layernorm.weight [64]"),
        ({"lm_head.weight": torch.ones(256, 64)}, {}, "unexpected lm_head.weight [256, 64]"),
        ({"fc.weight": torch.ones(64, 64)}, {}, "fc.weight should be [64, 128] and is [64, 64]"),
        ({}, {"hidden_size": 32}, "hidden_size is 32, the target's states have 64"),
    ],
)
def test_eagle1(tmp_path: Path, change: dict[str, Any], config: dict[str, Any], said: str) -> None:
    weights = {key: value for key, value in (eagle1_weights(SPEC) | change).items() if value is not None}
    assert said in refused(write_bin(tmp_path, llama_config(SPEC) | config, weights))


def test_one_key_in_two_files(tmp_path: Path) -> None:
    weights = eagle3_weights(SPEC)
    write_safetensors(tmp_path, CONFIG, weights)
    (tmp_path / "model.safetensors").rename(tmp_path / "model-00001.safetensors")
    write_safetensors(tmp_path, CONFIG, {"norm.weight": weights["norm.weight"]})
    assert "norm.weight is in" in refused(tmp_path)
    assert json.loads((tmp_path / "config.json").read_text()) == CONFIG
