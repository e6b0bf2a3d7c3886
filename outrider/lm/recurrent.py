"""Models that remember a text as a state instead of keys and values: refused by name, before a weight is read.

A rejected draft is undone by forgetting its keys and values. A recurrent state has taken the draft in and cannot give
it back, and a block cache has no place for it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from outrider.errors import InvalidArgument

MODEL_TYPES = (
    "bailing_hybrid",
    "bamba",
    "falcon_h1",
    "falcon_mamba",
    "hymba",
    "jamba",
    "kimi_linear",
    "mamba",
    "mamba2",
    "minimax",
    "minimax_text_01",
    "nemotron_h",
    "olmo_hybrid",
    "plamo2",
    "qwen3_5",
    "qwen3_5_moe",
    "qwen3_5_moe_text",
    "qwen3_5_text",
    "qwen3_next",
    "recurrent_gemma",
    "retnet",
    "rwkv",
    "rwkv5",
    "rwkv6",
    "rwkv7",
    "xlstm",
    "zamba",
    "zamba2",
)
"""All or some layers of these are recurrent whatever else their config says."""

_LAYER_FIELDS = ("layer_types", "layers_block_type", "block_types", "_block_types", "hybrid_override_pattern")
_RECURRENT_LAYERS = ("conv", "hybrid", "linear_attention", "lightning", "mamba", "mamba2", "recurrent", "rwkv", "mlstm")


def refuse_recurrent(config: Mapping[str, Any]) -> None:
    """Raises InvalidArgument, naming the model type and the layers, unless attention is all that remembers.

    config: what a config.json holds; fields that are not there say nothing.
    """
    for part in _parts(config):
        model_type = str(part.get("model_type", ""))
        kinds = sorted(set(_layer_kinds(part)))
        if model_type in MODEL_TYPES or kinds:
            layers = f"layers of type {', '.join(kinds)}" if kinds else "recurrent or linear-attention layers"
            raise InvalidArgument(
                f"model type {model_type or config.get('model_type')!r} cannot be served: it has {layers}, whose "
                "state cannot take a rejected draft back. Choose a model whose layers are all attention, such as "
                "Llama, Qwen 2 or 3, Mistral, Gemma or Phi",
                field="model",
            )


def _parts(config: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    yield config
    text = config.get("text_config")
    if isinstance(text, Mapping):
        yield text


def _layer_kinds(config: Mapping[str, Any]) -> Iterator[str]:
    for field in _LAYER_FIELDS:
        value = config.get(field)
        if isinstance(value, str) and "M" in value:  # NemotronH writes a letter for each layer
            yield "mamba"
        elif isinstance(value, list):
            yield from (kind for kind in map(str, value) if kind in _RECURRENT_LAYERS)
