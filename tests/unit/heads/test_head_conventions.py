"""What a checkpoint leaves open: which ways of reading are offered, the likeliest first."""

from pathlib import Path
from typing import Any

import pytest
import torch
from head_checkpoints import HIDDEN, Eagle, eagle3_weights, llama_config, tiny_target, write_safetensors
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from outrider.lm.heads import Convention, EagleHead, feature_states, load_head
from outrider.lm.heads.conventions import eagle3_conventions
from outrider.lm.heads.rope import RotaryTable, inverse_frequencies, rotate


def listed(layout: str, ids: list[int] | None, **config: Any) -> list[Convention]:
    stated = {"eagle_config": {"eagle_aux_hidden_state_layer_ids": ids}} | config
    return list(eagle3_conventions(stated, layout, 3, 8, None))


@pytest.mark.parametrize(
    ("layout", "ids", "expected"),
    [
        ("original", None, [(2, 4, 5)]),
        ("specforge", None, [(2, 4, 5)]),
        ("speculators", None, [(2, 4, 5)]),
        ("specforge", [1, 3, 4], [(2, 4, 5), (1, 3, 4)]),
        ("specforge", [2, 4, 5], [(2, 4, 5), (3, 5, 6)]),
        ("specforge", [0, 3, 5], [(1, 4, 6), (0, 3, 5)]),
        ("speculators", [2, 4, 5], [(2, 4, 5), (3, 5, 6)]),
        ("speculators", [1, 3, 4], [(1, 3, 4), (2, 4, 5)]),
        ("specforge", [3, 5, 7], [(3, 5, 7)]),  # the output of layer 7 is the input of none
    ],
)
def test_layers_by_inputs_or_by_outputs(layout: str, ids: list[int] | None, expected: list[tuple[int, ...]]) -> None:
    found = listed(layout, ids, norm_before_residual=False)
    assert [c.states for c in found] == expected
    assert not any(c.norm_residual or c.feeds_normed for c in found)


def test_layers_at_the_top_of_the_config_and_a_users_own() -> None:
    config = {"eagle_aux_hidden_state_layer_ids": [2, 3, 6], "norm_before_residual": True}
    assert eagle3_conventions(config, "speculators", 3, 8, None)[0] == Convention((2, 3, 6), norm_residual=True)
    assert eagle3_conventions(config, "speculators", 3, 8, [0, 1, 7]) == (Convention((0, 1, 7), norm_residual=True),)


def test_missing_flags_that_readers_fill_differently_are_open() -> None:
    assert [c.norm_residual for c in listed("speculators", None)] == [True, False]
    assert [c.norm_residual for c in listed("specforge", None)] == [False]
    assert [c.norm_residual for c in listed("specforge", None, norm_before_residual=True)] == [True]
    assert [c.feeds_normed for c in listed("speculators", None, norm_before_residual=True, norm_output=True)] == [True]
    assert [c.feeds_normed for c in listed("specforge", None, norm_output=True)] == [False, True]
    assert [c.feeds_normed for c in listed("specforge", None, norm_output=False)] == [False]


def test_our_own_heads_say_it(tmp_path: Path) -> None:
    spec = Eagle()
    about = {"kind": "eagle3", "state_layers": [1, 4, 7], "target_fingerprints": {"float32": "f" * 8}}
    config = llama_config(spec) | {"draft_vocab_size": 96, "norm_output": False, "outrider": about}
    head = load_head(write_safetensors(tmp_path, config, eagle3_weights(spec)), tiny_target())
    assert head.conventions == (Convention((1, 4, 7)),)
    assert feature_states(head) == (1, 4, 7)


def test_states_of_all_ways_are_asked_for(tmp_path: Path) -> None:
    spec = Eagle()
    config = llama_config(spec) | {
        "draft_vocab_size": 96,
        "eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 3, 4]},
    }
    folder = write_safetensors(tmp_path, config, eagle3_weights(spec))
    head = load_head(folder, tiny_target())
    assert feature_states(head) == (1, 2, 3, 4, 5)
    assert load_head(folder, tiny_target(), states=[0, 3, 7]).states == (0, 3, 7)
    other = head.reading(head.conventions[1])
    assert (head.states, other.states) == ((2, 4, 5), (1, 3, 4))
    assert isinstance(head, EagleHead)
    assert isinstance(other, EagleHead)
    assert other.layers is head.layers


def base_of(config: dict[str, Any]) -> float:
    """theta of a head of width 4: its second frequency is theta^(-1/2)."""
    return float(inverse_frequencies(config, 4)[1] ** -2)


def test_rotary_base_is_the_heads_own() -> None:
    assert base_of({}) == pytest.approx(10000)
    assert base_of({"rope_theta": None}) == pytest.approx(10000)
    assert base_of({"rope_theta": 500000.0}) == pytest.approx(500000)
    assert base_of({"rope_parameters": {"rope_type": "default", "rope_theta": 1234.0}}) == pytest.approx(1234)
    assert base_of({"rope_theta": 99.0, "rope_parameters": {"rope_theta": 1234.0}}) == pytest.approx(1234)
    assert base_of({"rope_theta": 99.0, "rope_scaling": None}) == pytest.approx(99)


@pytest.mark.parametrize(
    "scaling",
    [
        {"rope_type": "linear", "factor": 4.0},
        {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 512,
        },
    ],
)
def test_scaled_rotary_frequencies_are_those_of_transformers(scaling: dict[str, Any]) -> None:
    config = LlamaConfig(
        hidden_size=64,
        num_attention_heads=1,
        max_position_embeddings=4096,
        rope_parameters={"rope_theta": 5000.0, **scaling},
    )
    expected, factor = ROPE_INIT_FUNCTIONS[scaling["rope_type"]](config, torch.device("cpu"))
    assert factor == 1
    found = inverse_frequencies({"rope_theta": 5000.0, "rope_scaling": scaling}, HIDDEN)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=0)
    old = dict(scaling)
    old["type"] = old.pop("rope_type")
    assert torch.equal(inverse_frequencies({"rope_theta": 5000.0, "rope_scaling": old}, HIDDEN), found)


def test_a_table_reaches_any_position() -> None:
    frequencies = inverse_frequencies({}, 8)
    table = RotaryTable(frequencies, torch.device("cpu"))
    x = torch.ones(3, 1, 8)
    turned = rotate(x, *table.rows(5000, 5003))
    angle = (torch.tensor([5000.0, 5001.0, 5002.0])[:, None] * frequencies)[:, None]
    torch.testing.assert_close(turned[..., :4], angle.cos() - angle.sin())
    torch.testing.assert_close(turned[..., 4:], angle.cos() + angle.sin())
