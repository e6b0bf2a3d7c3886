"""The layers of Llama-like models as a plain loop: the transformers modules' sums in fewer and larger operations.

A pass over few rows costs what it reads plus what each operation costs to start, some microseconds in every layer:
queries and keys are turned together, norms are one operation, sums are added in place. The modules stay the slow twin
in tests, and serve whatever does not fit.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from transformers import PreTrainedModel

from outrider.lm.attention import AttentionPlan, paged_attention
from outrider.lm.cpu_linear import JointPart, PackedLinear
from outrider.lm.features import FeatureStore
from outrider.lm.interface import LAST_HIDDEN
from outrider.lm.rounded_linears import ROUNDED
from outrider.lm.routes import Route

MODELS = ("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")
Linear = Any
"""A packed or rounded layer, or several as one: from the modules' `joint.packed`."""


@dataclass(frozen=True, slots=True)
class _Layer:
    """Weights are packed ones of their projections, and vectors of norms."""

    input_norm: torch.Tensor
    qkv: Linear
    q_norm: torch.Tensor | None
    k_norm: torch.Tensor | None
    o: Linear
    attention_norm: torch.Tensor
    gate_up: Linear
    down: Linear
    scaling: float
    window: int | None


class DecoderLoop:
    """A model of `MODELS` whose linear layers are packed (cpu_linear.py) or rounded (rounded_linears.py)."""

    def __init__(self, model: PreTrainedModel) -> None:
        """model: as `fits` allows. Weights are shared with it."""
        base: Any = model.model
        config: Any = model.config
        self._embedding, self._rotary, self._norm = base.embed_tokens, base.rotary_emb, base.norm.weight
        self._head: Any = model.get_output_embeddings()
        self._epsilon: float = config.rms_norm_eps
        self._num_heads, self._num_kv_heads = config.num_attention_heads, config.num_key_value_heads
        self._layers = [_layer(config, layer) for layer in base.layers]

    def __call__(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        logit_rows: torch.Tensor,
        plan: AttentionPlan,
        route: Route,
        features: FeatureStore | None = None,
    ) -> torch.Tensor:
        """[1, L, V] for int64[1, N] ids and positions and int64[L] rows, as the model's own forward.

        route: the layers to run. features: gets the states that it keeps; has the one that the route starts from.
        """
        states = () if features is None else features.states
        if features is None or not route.start:
            x = self._embedding(token_ids)[0]
        else:
            x = features.kept(route.start, token_ids.shape[1])
        cosines, sines = self._rotary(x, positions)
        half = cosines.shape[-1] // 2
        cosines, sines = cosines[0][:, None], sines[0][:, None]  # [N, 1, D]
        turned = (cosines, -sines[..., :half], sines[..., half:])
        for number in route.layers:
            layer = self._layers[number]
            if features is not None and number in states:
                features.write(number, x)
            attended = self._attend(number, layer, self._normal(x, layer.input_norm), turned, plan)
            x = x + layer.o(attended)
            gate, up = layer.gate_up(self._normal(x, layer.attention_norm)).chunk(2, -1)
            x += layer.down(F.silu(gate).mul_(up))
        if features is not None and route.end in states:
            features.write(route.end, self._normal(x, self._norm) if route.end == LAST_HIDDEN else x)
        logits: torch.Tensor = self._head(self._normal(x[logit_rows], self._norm))
        return logits[None]

    def _normal(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(x, weight.shape, weight, self._epsilon)

    def _attend(
        self, number: int, layer: _Layer, x: torch.Tensor, turned: tuple[torch.Tensor, ...], plan: AttentionPlan
    ) -> torch.Tensor:
        """[N, H * E]."""
        num_rows, num_both = x.shape[0], self._num_heads + self._num_kv_heads
        heads = layer.qkv(x).view(num_rows, num_both + self._num_kv_heads, -1)
        both, value = heads[:, :num_both], heads[:, num_both:]
        if layer.q_norm is not None and layer.k_norm is not None:
            query, key = both.split([self._num_heads, self._num_kv_heads], 1)
            both = torch.cat([self._normal(query, layer.q_norm), self._normal(key, layer.k_norm)], 1)
        query, key = _turn(both, *turned).transpose(0, 1)[None].split([self._num_heads, self._num_kv_heads], 1)
        value = value.transpose(0, 1)[None]
        return paged_attention(plan, number, query, key, value, layer.scaling, layer.window)[0].flatten(1)


def decoder_loop(model: PreTrainedModel) -> DecoderLoop | None:
    """The model's loop; None where it is of another kind, or its layers were changed or not packed."""
    if type(model).__name__ not in MODELS or model.config.hidden_act != "silu":
        return None
    base: Any = model.model
    if any(m._forward_hooks or m._forward_pre_hooks for m in model.modules()):
        return None
    return DecoderLoop(model) if all(_fits(layer) for layer in base.layers) else None


def _fits(layer: Any) -> bool:
    attention, mlp = layer.self_attn, layer.mlp
    joint = (attention.q_proj, attention.k_proj, attention.v_proj, mlp.gate_proj, mlp.up_proj)
    return all(type(part) is JointPart for part in joint) and all(
        type(part) in (PackedLinear, *ROUNDED) for part in (attention.o_proj, mlp.down_proj)
    )


def _layer(config: Any, layer: Any) -> _Layer:
    attention, mlp = layer.self_attn, layer.mlp
    window = getattr(attention, "sliding_window", None)
    if type(attention).__name__.startswith("Mistral"):
        window = getattr(config, "sliding_window", None)
    return _Layer(
        input_norm=layer.input_layernorm.weight,
        qkv=attention.q_proj.joint.packed,
        q_norm=attention.q_norm.weight if hasattr(attention, "q_norm") else None,
        k_norm=attention.k_norm.weight if hasattr(attention, "k_norm") else None,
        o=attention.o_proj,
        attention_norm=layer.post_attention_layernorm.weight,
        gate_up=mlp.gate_proj.joint.packed,
        down=mlp.down_proj,
        scaling=attention.scaling,
        window=window,
    )


def _turn(x: torch.Tensor, cosines: torch.Tensor, minus_sines: torch.Tensor, sines: torch.Tensor) -> torch.Tensor:
    """[N, heads, D], each pair of halves turned by its row's angles."""
    half = x.shape[-1] // 2
    turned = x * cosines
    turned[..., :half].addcmul_(x[..., half:], minus_sines)
    turned[..., half:].addcmul_(x[..., :half], sines)
    return turned
