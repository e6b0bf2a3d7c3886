"""EAGLE heads from every public layout against the formulas, and what a context keeps."""

import random as pyrandom
from dataclasses import replace
from pathlib import Path

import naive_heads
import pytest
import torch
from conftest import scaled
from head_checkpoints import (
    EMBEDDING,
    HIDDEN,
    LM_HEAD,
    VOCAB,
    Eagle,
    eagle1_weights,
    eagle3_weights,
    llama_config,
    random,
    tiny_target,
    write_bin,
    write_original,
    write_safetensors,
    write_specforge,
    write_speculators,
)

from outrider.errors import Internal
from outrider.lm.heads import EagleHead, load_head


def close(got: torch.Tensor, expected: torch.Tensor, tolerance: float = 1e-4) -> None:
    """Beside the largest number: states of a head without norms grow from guess to guess."""
    torch.testing.assert_close(got, expected, rtol=0, atol=tolerance * max(1.0, float(expected.abs().max())))


def text(length: int, width: int, seed: int = 5) -> tuple[torch.Tensor, torch.Tensor]:
    """Features [length, width] and ids: one more than pairs with features."""
    ids = torch.randint(VOCAB, (length,), generator=torch.Generator().manual_seed(seed))
    return random(length, width, seed=seed, scale=1.0), ids


def eagle(folder: Path, **options: object) -> EagleHead:
    head = load_head(folder, tiny_target(), **options)  # type: ignore[arg-type]
    assert isinstance(head, EagleHead)
    return head


def check_against_formulas(head: EagleHead, expected) -> None:  # type: ignore[no-untyped-def]
    """Every guess of an extend, a few steps on their own, and an extend after them."""
    features, ids = text(9, head.feature_width)
    context = head.new_context()
    rows = context.extend_rows(features[:5], ids[:5])
    for i in range(5):
        close(rows[i], expected(features[: i + 1], ids[: i + 1]))
    for end in range(6, 9):
        close(context.step(int(ids[end - 1])), expected(features[:5], ids[:end]))
    close(context.extend(features[5:7], ids[5:7]), expected(features[:7], ids[:7]))
    close(context.step(int(ids[7])), expected(features[:7], ids[:8]))
    assert context.length == 7


def check_eagle3(head: EagleHead, spec: Eagle, first: str = "midlayer") -> None:
    weights = eagle3_weights(spec, first)
    check_against_formulas(head, lambda f, ids: naive_heads.eagle3(weights, spec, first, f, ids))
    assert head.kind == "eagle3"
    if spec.draft_vocab is None:
        assert head.draft_ids is None
    else:
        assert head.draft_ids is not None
        assert head.draft_ids.tolist() == spec.draft_ids.tolist()


def test_original_eagle3(tmp_path: Path) -> None:
    spec = Eagle()
    head = eagle(write_original(tmp_path, spec))
    assert head.states == (2, 4, 5)
    assert len(head.conventions) == 1
    check_eagle3(head, spec)


def test_specforge_says_the_same_as_original_where_layers_and_flags_agree(tmp_path: Path) -> None:
    spec = Eagle()
    one, other = eagle(write_original(tmp_path / "a", spec)), eagle(write_specforge(tmp_path / "b", spec, [1, 3, 4]))
    assert one.states == other.states == (2, 4, 5)
    features, ids = text(6, one.feature_width)
    assert torch.equal(one.new_context().extend(features, ids), other.new_context().extend(features, ids))
    check_eagle3(other, spec)


@pytest.mark.parametrize("num_layers", [1, 2])
@pytest.mark.parametrize("feature_norm", ["", "all", "each"])
@pytest.mark.parametrize(("norm_residual", "feeds_normed"), [(False, False), (True, False), (False, True)])
def test_speculators_flags(
    tmp_path: Path, num_layers: int, feature_norm: str, norm_residual: bool, feeds_normed: bool
) -> None:
    spec = Eagle(
        num_layers=num_layers,
        feature_norm=feature_norm,
        norm_residual=norm_residual,
        feeds_normed=feeds_normed,
        theta=5000.0,
    )
    head = eagle(write_speculators(tmp_path, spec, [2, 4, 5]))
    assert head.layout == "speculators"
    assert head.states == (2, 4, 5)
    check_eagle3(head, spec, "layers.0")


@pytest.mark.parametrize(
    "spec",
    [
        Eagle(head_norms=True, num_kv_heads=4),
        Eagle(attention_bias=True, num_kv_heads=1),
        Eagle(head_dim=24),  # heads wider than the hidden size
        Eagle(num_states=2, draft_vocab=None),
        Eagle(hidden=48, num_heads=3, num_kv_heads=3, theta=777.0),  # narrower than its target
    ],
    ids=["head norms", "attention bias", "head_dim", "two states, all ids", "target_hidden_size"],
)
def test_specforge_variants(tmp_path: Path, spec: Eagle) -> None:
    head = eagle(write_specforge(tmp_path, spec, [1, 3, 4][: spec.num_states]))
    assert head.feature_width == spec.num_states * HIDDEN
    check_eagle3(head, spec)


def test_flags_of_eagle_config_and_older_names_of_norms(tmp_path: Path) -> None:
    spec = Eagle(feature_norm="each")
    check_eagle3(eagle(write_specforge(tmp_path / "a", spec, [1, 3, 4], fc_norm=True)), spec)
    weights = eagle3_weights(spec)
    for i, name in enumerate(("low", "mid", "high")):
        weights[f"aux_norm_{name}.weight"] = weights.pop(f"fc_norm.{i}.weight")
    config = llama_config(spec) | {"draft_vocab_size": 96, "use_aux_norm": True}
    check_eagle3(eagle(write_safetensors(tmp_path / "b", config, weights)), spec)


def test_lm_head_of_the_target_where_the_file_has_none(tmp_path: Path) -> None:
    spec = Eagle(draft_vocab=None)
    weights = eagle3_weights(spec)
    del weights["lm_head.weight"]
    head = eagle(write_bin(tmp_path, llama_config(spec) | {"draft_vocab_size": None}, weights))
    weights["lm_head.weight"] = LM_HEAD
    check_against_formulas(head, lambda f, ids: naive_heads.eagle3(weights, spec, "midlayer", f, ids))


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("num_layers", [1, 2])
@pytest.mark.parametrize("own_embedding", [True, False])
def test_eagle1(tmp_path: Path, bias: bool, num_layers: int, own_embedding: bool) -> None:
    spec = Eagle(num_layers=num_layers, theta=500000.0)
    weights = eagle1_weights(spec, bias=bias)
    config = llama_config(spec) | {"rope_theta": 500000.0, **({} if bias else {"bias": False})}
    stored = weights | ({"embed_tokens.weight": EMBEDDING} if own_embedding else {})
    head = eagle(write_bin(tmp_path, config, stored))
    assert (head.kind, head.states, head.draft_ids) == ("eagle", (-1,), None)
    check_against_formulas(head, lambda f, ids: naive_heads.eagle1(weights, spec, f, ids))


def test_embedding_is_shared_where_it_is_the_targets_and_kept_where_not(tmp_path: Path) -> None:
    spec, target = Eagle(), tiny_target()
    shared = load_head(write_speculators(tmp_path / "a", spec), target)
    assert isinstance(shared, EagleHead)
    assert shared.embedding is target.embedding
    weights = eagle3_weights(spec) | {"embed_tokens.weight": random(256, HIDDEN, seed=77)}
    own = eagle(write_safetensors(tmp_path / "b", llama_config(spec) | {"draft_vocab_size": 96}, weights))
    check_against_formulas(own, lambda f, ids: naive_heads.eagle3(weights, spec, "midlayer", f, ids))


def test_ids_of_padding_are_never_guessed(tmp_path: Path) -> None:
    """A draft vocabulary may hold ids that the target's matrices have and its tokenizer has not."""
    spec = Eagle(draft_vocab=None)
    ids = torch.tensor([3, 7, VOCAB - 1, VOCAB, VOCAB + 3])
    weights = eagle3_weights(spec) | {"lm_head.weight": random(5, HIDDEN, seed=3), "d2t": ids - torch.arange(5)}
    head = eagle(write_safetensors(tmp_path, llama_config(spec) | {"draft_vocab_size": 5}, weights))
    assert head.draft_ids is not None
    assert head.draft_ids.tolist() == [3, 7, VOCAB - 1]
    features, tokens = text(2, head.feature_width)
    expected = naive_heads.eagle3(weights, replace(spec, draft_vocab=5), "midlayer", features, tokens)[:3]
    close(head.new_context().extend(features, tokens), expected)


@pytest.mark.parametrize("kind", ["eagle", "eagle3"])
def test_any_history_gives_what_a_fresh_context_gives(tmp_path: Path, kind: str) -> None:
    """Extends of any size, steps, discards and cuts in any order: only pairs and guesses kept decide."""
    spec = Eagle(num_layers=2)
    if kind == "eagle":
        head = eagle(write_bin(tmp_path, llama_config(spec), eagle1_weights(spec)))
    else:
        head = eagle(write_specforge(tmp_path, spec, [1, 3, 4]))
    features, ids = text(300, head.feature_width)
    for seed in range(scaled(40, at_least=6)):
        rng = pyrandom.Random(seed)
        context, guessed = head.new_context(), None  # None: no guess can be made before an extend
        for _ in range(12):
            length = context.length
            action = rng.choice(["extend", "extend", "step", "step", "discard", "truncate"])
            got = None
            if action == "extend":
                end = min(300, length + rng.choice([1, 2, 5, 90]))
                if end > length:
                    got, guessed = context.extend(features[length:end], ids[length:end]), []
            elif action == "step" and guessed is not None:
                guessed.append(rng.randrange(VOCAB))
                got = context.step(guessed[-1])
            elif action == "discard":
                context.discard()
                guessed = guessed if guessed is None else []
            elif action == "truncate":
                cut = rng.randint(0, length)
                context.truncate(cut)
                guessed = [] if cut == length and guessed is not None else None
                assert context.length == cut
            if got is not None:
                assert guessed is not None
                fresh = head.new_context()
                expected = fresh.extend(features[: context.length], ids[: context.length])
                for token in guessed:
                    expected = fresh.step(token)
                close(got, expected)


def test_misuse_of_a_context_is_told(tmp_path: Path) -> None:
    head = eagle(write_original(tmp_path, Eagle()))
    features, ids = text(3, head.feature_width)
    context = head.new_context()
    with pytest.raises(Internal, match="pair"):
        context.step(1)
    with pytest.raises(Internal, match="features"):
        context.extend(features[:, 1:], ids)
    with pytest.raises(Internal, match="features"):
        context.extend(features[:2], ids)
    context.extend(features, ids)
    with pytest.raises(Internal, match="cut"):
        context.truncate(4)
    context.truncate(2)
    with pytest.raises(Internal, match="pair"):
        context.step(1)


def test_bfloat16_guesses_as_float32_does(tmp_path: Path) -> None:
    folder = write_specforge(tmp_path, Eagle(), [1, 3, 4])
    precise, rounded = eagle(folder), eagle(folder, dtype=torch.bfloat16)
    features, ids = text(20, precise.feature_width)
    one, other = precise.new_context(), rounded.new_context()
    first, second = one.extend(features, ids), other.extend(features, ids)
    assert second.dtype == torch.float32
    close(first, second, 0.05)
    close(one.step(5), other.step(5), 0.05)
