"""EAGLE heads from their public checkpoints, and from those that `outrider distill --kind eagle3` writes.

EAGLE-1/2: `fc`, `layers.N` of which the first has no input norm. EAGLE-3: `fc`, `midlayer` (original, SpecForge, ours)
or `layers.N` (speculators), `norm`, `lm_head`, and `d2t`, which holds offsets: logit i is of id i + d2t[i].
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

from outrider.lm.heads.checkpoint import Checkpoint, fault
from outrider.lm.heads.conventions import LAST_STATE_ONLY, eagle3_conventions, flag
from outrider.lm.heads.eagle import EagleHead, HeadLayer
from outrider.lm.heads.packing import pack
from outrider.lm.heads.rope import RotaryTable, inverse_frequencies
from outrider.lm.heads.target import Embedding, HeadTarget, Projection
from outrider.lm.heads.vocabulary import DraftVocabulary, matches_embedding, read_d2t

Config = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class _Sizes:
    """As config.json states them."""

    hidden: int
    target_hidden: int
    intermediate: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab: int
    epsilon: float


def load_eagle(checkpoint: Checkpoint, target: HeadTarget, dtype: torch.dtype) -> EagleHead:
    """An EAGLE-1/2 head. Raises InvalidArgument naming file and key for whatever does not fit."""
    config = _required_config(checkpoint)
    sizes = _sizes(checkpoint, config, target)
    if sizes.hidden != target.hidden_size:
        raise fault(f"{checkpoint.where}: hidden_size is {sizes.hidden}, the target's states have {target.hidden_size}")
    weights = _Weights(checkpoint, sizes, dtype, target.device)
    fc_bias = config.get("bias", True)  # as its training code reads it: absent means true
    head = EagleHead(
        kind="eagle",
        layout="eagle",
        embedding=_embedding(checkpoint, sizes, target, dtype),
        fc=weights.linear(["fc"], [sizes.hidden], 2 * sizes.hidden, bias=fc_bias),
        feature_norms=(),
        hidden_norm=None,
        layers=tuple(weights.layer(f"layers.{i}", sizes.hidden, has_input_norm=i > 0) for i in range(sizes.num_layers)),
        norm=None,
        lm_head=target.project,
        draft_ids=None,
        conventions=LAST_STATE_ONLY,
        convention=LAST_STATE_ONLY[0],
        feature_width=sizes.hidden,
        **weights.common(config),
    )
    checkpoint.finish()
    return head


def load_eagle3(
    checkpoint: Checkpoint, target: HeadTarget, dtype: torch.dtype, states: Sequence[int] | None = None
) -> EagleHead:
    """An EAGLE-3 head. states: inputs of the target's layers to read instead of those its config leads to.

    Raises InvalidArgument naming file and key for whatever does not fit.
    """
    config = _required_config(checkpoint)
    layout = eagle3_layout(checkpoint, config)
    if layout == "speculators":
        config = {**(config.get("transformer_layer_config") or {}), **config}
    sizes = _sizes(checkpoint, config, target)
    if sizes.target_hidden != target.hidden_size:
        raise fault(
            f"{checkpoint.where}: made for a target of hidden size {sizes.target_hidden}, "
            f"{target.name} has {target.hidden_size}"
        )
    weights = _Weights(checkpoint, sizes, dtype, target.device)
    num_states = _num_states(checkpoint, config, sizes)
    conventions = eagle3_conventions(config, layout, num_states, target.num_layers, states)
    first = "midlayer" if any(key.startswith("midlayer.") for key in checkpoint.keys) else "layers.0"
    width = num_states * sizes.target_hidden
    vocabulary = read_d2t(checkpoint, config, target)
    head = EagleHead(
        kind="eagle3",
        layout=layout,
        embedding=_embedding(checkpoint, sizes, target, dtype),
        fc=weights.linear(["fc"], [sizes.hidden], width, bias=bool(config.get("bias", False))),
        feature_norms=_feature_norms(config, weights, checkpoint, num_states, sizes.target_hidden),
        hidden_norm=weights.norm(f"{first}.hidden_norm"),
        layers=tuple(
            weights.layer(first if i == 0 else f"layers.{i}", sizes.hidden * (2 if i == 0 else 1), has_input_norm=True)
            for i in range(sizes.num_layers)
        ),
        norm=weights.norm("norm"),
        lm_head=_lm_head(checkpoint, sizes, target, weights, vocabulary),
        draft_ids=vocabulary.draft_ids,
        conventions=conventions,
        convention=conventions[0],
        feature_width=width,
        **weights.common(config),
    )
    checkpoint.finish()
    return head


def eagle3_layout(checkpoint: Checkpoint, config: Config) -> str:
    """ "speculators", "outrider", "specforge" (says how it is to be read) or "original"."""
    if "speculators_model_type" in config:
        return "speculators"
    if "outrider" in config:
        return "outrider"
    return "specforge" if "eagle_config" in config else "original"


class _Weights:
    """Takes a head's weights by their names, packed."""

    def __init__(self, checkpoint: Checkpoint, sizes: _Sizes, dtype: torch.dtype, device: torch.device) -> None:
        self._checkpoint, self._sizes, self._dtype, self._device = checkpoint, sizes, dtype, device
        self.num_parameters = 0

    def linear(self, names: Sequence[str], outs: Sequence[int], width: int, *, bias: bool | None = None) -> Any:
        """Layers of one input, [out, width] each, as one. bias: None: where the file has one."""
        parts = []
        for name, out in zip(names, outs, strict=True):
            weight = self._checkpoint.take(f"{name}.weight", (out, width))
            key = f"{name}.bias"
            has_bias = key in self._checkpoint if bias is None else bias
            parts.append((weight, self._checkpoint.take(key, (out,)) if has_bias else None))
        return self.pack(parts)

    def pack(self, parts: list[tuple[torch.Tensor, torch.Tensor | None]]) -> Any:
        """Counts them."""
        self.num_parameters += sum(w.numel() + (0 if b is None else b.numel()) for w, b in parts)
        return pack(parts, self._dtype, self._device)

    def norm(self, name: str, size: int = 0) -> torch.Tensor:
        """[size]; 0: the hidden size."""
        weight = self._checkpoint.take(f"{name}.weight", (size or self._sizes.hidden,))
        self.num_parameters += weight.numel()
        return weight.to(self._device, self._dtype)

    def layer(self, name: str, width: int, *, has_input_norm: bool) -> HeadLayer:
        """width: of the attention's input."""
        sizes = self._sizes
        heads, kv = sizes.num_heads * sizes.head_dim, sizes.num_kv_heads * sizes.head_dim
        attention, mlp = f"{name}.self_attn", f"{name}.mlp"
        has_head_norms = any(f"{attention}.{n}_norm.weight" in self._checkpoint for n in "qk")
        q_norm, k_norm = (self.norm(f"{attention}.{n}_norm", sizes.head_dim) if has_head_norms else None for n in "qk")
        return HeadLayer(
            input_norm=self.norm(f"{name}.input_layernorm") if has_input_norm else None,
            qkv=self.linear([f"{attention}.{p}_proj" for p in "qkv"], [heads, kv, kv], width),
            q_norm=q_norm,
            k_norm=k_norm,
            o=self.linear([f"{attention}.o_proj"], [sizes.hidden], heads),
            mlp_norm=self.norm(f"{name}.post_attention_layernorm"),
            gate_up=self.linear([f"{mlp}.gate_proj", f"{mlp}.up_proj"], [sizes.intermediate] * 2, sizes.hidden),
            down=self.linear([f"{mlp}.down_proj"], [sizes.hidden], sizes.intermediate),
        )

    def common(self, config: Config) -> dict[str, Any]:
        """Fields that both kinds fill alike, once all weights are taken."""
        sizes = self._sizes
        return {
            "name": self._checkpoint.path.resolve().name,
            "hidden_size": sizes.hidden,
            "num_heads": sizes.num_heads,
            "num_kv_heads": sizes.num_kv_heads,
            "head_dim": sizes.head_dim,
            "epsilon": sizes.epsilon,
            "dtype": self._dtype,
            "device": self._device,
            "rotary": RotaryTable(inverse_frequencies(config, sizes.head_dim), self._device),
            "num_parameters": self.num_parameters,
        }


def _required_config(checkpoint: Checkpoint) -> dict[str, Any]:
    if not checkpoint.config:
        raise fault(f"{checkpoint.folder}: config.json is missing, which tells the sizes of an EAGLE head")
    return checkpoint.config


def _sizes(checkpoint: Checkpoint, config: Config, target: HeadTarget) -> _Sizes:
    where = checkpoint.folder / "config.json"
    if config.get("hidden_act", "silu") != "silu":
        raise fault(f"{where}: hidden_act is {config['hidden_act']!r}, only silu is computed here")

    def number(name: str, default: int | None = None) -> int:
        value = config.get(name)
        value = default if value is None else value
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise fault(f"{where}: {name} is {value!r}, a whole number above 0 is needed")
        return value

    hidden, num_heads = number("hidden_size"), number("num_attention_heads")
    num_kv_heads = number("num_key_value_heads", num_heads)
    head_dim = number("head_dim", hidden // num_heads)
    vocab = number("vocab_size", target.padded_vocab_size)
    if vocab not in (target.vocab_size, target.padded_vocab_size):
        raise fault(
            f"{where}: vocab_size is {vocab}, the target {target.name} has {target.padded_vocab_size}: "
            "the head was made for another model"
        )
    if num_heads % num_kv_heads or head_dim % 2:
        raise fault(f"{where}: {num_heads} heads of {head_dim} on {num_kv_heads} key-value heads is no attention")
    return _Sizes(
        hidden=hidden,
        target_hidden=number("target_hidden_size", hidden),
        intermediate=number("intermediate_size"),
        num_layers=number("num_hidden_layers", 1),
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        vocab=vocab,
        epsilon=float(config.get("rms_norm_eps", 1e-6)),
    )


def _num_states(checkpoint: Checkpoint, config: Config, sizes: _Sizes) -> int:
    """By the width of fc, which the config's own count, where it has one, must agree with."""
    shape = checkpoint.shape("fc.weight")
    stated = config.get("num_aux_hidden_states")
    num_states = shape[-1] // sizes.target_hidden if stated is None else int(stated)
    if num_states < 1 or shape != (sizes.hidden, num_states * sizes.target_hidden):
        raise fault(
            f"{checkpoint.where}: fc.weight should be [{sizes.hidden}, states * {sizes.target_hidden}]"
            f"{'' if stated is None else f' for {stated} states'} and is {list(shape)}"
        )
    return num_states


def _feature_norms(
    config: Config, weights: _Weights, checkpoint: Checkpoint, num_states: int, size: int
) -> tuple[torch.Tensor, ...]:
    """By the flags; where a flag is not stated, by what the file holds."""
    named = [f"fc_norm.{i}" for i in range(num_states)]
    older = ["aux_norm_low", "aux_norm_mid", "aux_norm_high"]
    one_by_one = older if "aux_norm_low.weight" in checkpoint and num_states == len(older) else named
    if _wanted(flag(config, "fc_norm", "use_aux_norm"), f"{one_by_one[0]}.weight" in checkpoint):
        return tuple(weights.norm(name, size) for name in one_by_one)
    if _wanted(flag(config, "norm_before_fc"), "input_norm.weight" in checkpoint):
        return (weights.norm("input_norm", num_states * size),)
    return ()


def _wanted(stated: bool | None, is_there: bool) -> bool:
    return is_there if stated is None else stated


def _embedding(checkpoint: Checkpoint, sizes: _Sizes, target: HeadTarget, dtype: torch.dtype) -> Embedding:
    """The file's own where it differs from the target's."""
    shapes = [(rows, sizes.hidden) for rows in {sizes.vocab, target.vocab_size, target.padded_vocab_size}]
    own = checkpoint.optional("embed_tokens.weight", *shapes)
    if own is not None and not matches_embedding(own, target, dtype):
        weight = own.to(target.device, dtype)
        return lambda token_ids: F.embedding(token_ids, weight)
    if sizes.hidden != target.hidden_size:
        raise fault(
            f"{checkpoint.where}: embed_tokens.weight {list(shapes[0])} is missing: the target's own, of "
            f"{target.hidden_size}, does not fit"
        )
    return target.embedding


def _lm_head(
    checkpoint: Checkpoint, sizes: _Sizes, target: HeadTarget, weights: _Weights, vocabulary: DraftVocabulary
) -> Projection:
    """The file's own rows; where it has none and guesses all ids, the target's."""
    if vocabulary.draft_ids is None and "lm_head.weight" not in checkpoint:
        if sizes.hidden != target.hidden_size:
            raise fault(
                f"{checkpoint.where}: lm_head.weight [{sizes.vocab}, {sizes.hidden}] is missing: the target's own, of "
                f"{target.hidden_size}, does not fit"
            )
        return target.project
    if vocabulary.draft_ids is None:
        shapes = [(rows, sizes.hidden) for rows in sorted({target.vocab_size, target.padded_vocab_size})]
    else:
        shapes = [(vocabulary.num_rows, sizes.hidden)]
    own = vocabulary.cut(checkpoint.take("lm_head.weight", *shapes), target.vocab_size)
    linear = weights.pack([(own, None)])
    return lambda hidden: linear(hidden).float()
