"""Tiny heads of random weights, written in every public layout, and the tiny target they are for."""

import json
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import save_file

from outrider.lm.heads import HeadTarget

HIDDEN, LAYERS, VOCAB, PADDED = 64, 8, 250, 256
Tensors = dict[str, torch.Tensor]


def random(*shape: int, seed: int, scale: float = 0.2) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * scale


EMBEDDING = random(PADDED, HIDDEN, seed=1)
LM_HEAD = random(PADDED, HIDDEN, seed=2)


def tiny_target(**changes: Any) -> HeadTarget:
    target = HeadTarget(
        name="tiny",
        hidden_size=HIDDEN,
        num_layers=LAYERS,
        vocab_size=VOCAB,
        padded_vocab_size=PADDED,
        embedding=lambda ids: F.embedding(ids, EMBEDDING),
        lm_head=lambda hidden: hidden @ LM_HEAD.T,
        fingerprint="f" * 8,
    )
    return replace(target, **changes)


@dataclass(frozen=True)
class Eagle:
    """What a synthetic EAGLE head is like."""

    hidden: int = HIDDEN
    target_hidden: int = HIDDEN
    intermediate: int = 96
    num_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 16
    num_layers: int = 1
    num_states: int = 3
    draft_vocab: int | None = 96
    head_norms: bool = False
    attention_bias: bool = False
    feature_norm: str = ""
    """"", "all" (input_norm) or "each" (fc_norm.N)."""
    norm_residual: bool = False
    feeds_normed: bool = False
    theta: float = 10000.0
    epsilon: float = 1e-5
    seed: int = 0
    extra: dict[str, Any] = field(default_factory=dict)

    @property
    def draft_ids(self) -> torch.Tensor:
        """Sorted, the first and the last real id among them."""
        assert self.draft_vocab is not None
        order = torch.randperm(VOCAB - 2, generator=torch.Generator().manual_seed(self.seed + 9)) + 1
        chosen = [0, VOCAB - 1, *order[: self.draft_vocab - 2].tolist()]
        return torch.tensor(sorted(chosen))


def layer_weights(head: Eagle, name: str, width: int, seed: int) -> Tensors:
    """Attention and MLP of one layer whose attention reads [.., width]."""
    q, kv = head.num_heads * head.head_dim, head.num_kv_heads * head.head_dim
    shapes = {
        "self_attn.q_proj": (q, width),
        "self_attn.k_proj": (kv, width),
        "self_attn.v_proj": (kv, width),
        "self_attn.o_proj": (head.hidden, q),
        "mlp.gate_proj": (head.intermediate, head.hidden),
        "mlp.up_proj": (head.intermediate, head.hidden),
        "mlp.down_proj": (head.hidden, head.intermediate),
    }
    made = {f"{name}.{key}.weight": random(*shape, seed=seed + i) for i, (key, shape) in enumerate(shapes.items())}
    made[f"{name}.post_attention_layernorm.weight"] = 1 + random(head.hidden, seed=seed + 20)
    if head.head_norms:
        for i, part in enumerate("qk"):
            made[f"{name}.self_attn.{part}_norm.weight"] = 1 + random(head.head_dim, seed=seed + 21 + i)
    if head.attention_bias:
        for i, (part, size) in enumerate({"q": q, "k": kv, "v": kv}.items()):
            made[f"{name}.self_attn.{part}_proj.bias"] = random(size, seed=seed + 30 + i)
    return made


def eagle1_weights(head: Eagle, *, bias: bool = True) -> Tensors:
    made = {"fc.weight": random(head.hidden, 2 * head.hidden, seed=head.seed + 100)}
    if bias:
        made["fc.bias"] = random(head.hidden, seed=head.seed + 101)
    for i in range(head.num_layers):
        made |= layer_weights(head, f"layers.{i}", head.hidden, head.seed + 200 + 50 * i)
        if i:
            made[f"layers.{i}.input_layernorm.weight"] = 1 + random(head.hidden, seed=head.seed + 230 + 50 * i)
    return made


def eagle3_weights(head: Eagle, first: str = "midlayer") -> Tensors:
    """first: what the first layer is called."""
    seed, width = head.seed, head.num_states * head.target_hidden
    made = {"fc.weight": random(head.hidden, width, seed=seed + 100)}
    made["norm.weight"] = 1 + random(head.hidden, seed=seed + 1)
    for i in range(head.num_layers):
        name = first if i == 0 else f"layers.{i}"
        made |= layer_weights(head, name, head.hidden * (2 if i == 0 else 1), seed + 200 + 50 * i)
        made[f"{name}.input_layernorm.weight"] = 1 + random(head.hidden, seed=seed + 230 + 50 * i)
    made[f"{first}.hidden_norm.weight"] = 1 + random(head.hidden, seed=seed + 2)
    if head.feature_norm == "all":
        made["input_norm.weight"] = 1 + random(width, seed=seed + 3)
    if head.feature_norm == "each":
        for i in range(head.num_states):
            made[f"fc_norm.{i}.weight"] = 1 + random(head.target_hidden, seed=seed + 4 + i)
    if head.hidden != head.target_hidden:
        made["embed_tokens.weight"] = random(PADDED, head.hidden, seed=seed + 8)
    rows = PADDED
    if head.draft_vocab is not None:
        rows = head.draft_vocab
        made["d2t"] = head.draft_ids - torch.arange(rows)
        made["t2d"] = torch.zeros(PADDED, dtype=torch.bool).index_fill_(0, head.draft_ids, True)
    made["lm_head.weight"] = random(rows, head.hidden, seed=seed + 7)
    return made


def llama_config(head: Eagle) -> dict[str, Any]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "hidden_size": head.hidden,
        "intermediate_size": head.intermediate,
        "num_attention_heads": head.num_heads,
        "num_key_value_heads": head.num_kv_heads,
        "head_dim": head.head_dim,
        "num_hidden_layers": head.num_layers,
        "rms_norm_eps": head.epsilon,
        "vocab_size": PADDED,
    }


def write_bin(folder: Path, config: dict[str, Any], tensors: Tensors) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    torch.save(tensors, folder / "pytorch_model.bin")
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def write_safetensors(folder: Path, config: dict[str, Any], tensors: Tensors) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    save_file({key: value.contiguous() for key, value in tensors.items()}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def write_original(folder: Path, head: Eagle) -> Path:
    """As the method's authors publish it: a pickle, no rope_theta, no list of layers."""
    config = llama_config(head) | {"draft_vocab_size": head.draft_vocab} | head.extra
    return write_bin(folder, config, eagle3_weights(head))


def write_specforge(folder: Path, head: Eagle, layer_ids: list[int] | None = None, **flags: Any) -> Path:
    config = llama_config(head) | {
        "architectures": ["LlamaForCausalLMEagle3"],
        "draft_vocab_size": head.draft_vocab,
        "target_hidden_size": head.target_hidden,
        "rope_theta": head.theta,
        "eagle_config": {"eagle_aux_hidden_state_layer_ids": layer_ids, "use_aux_hidden_state": True, **flags},
    }
    return write_safetensors(folder, config | head.extra, eagle3_weights(head))


def write_speculators(folder: Path, head: Eagle, layer_ids: list[int] | None = None, **changes: Any) -> Path:
    layer = llama_config(head) | {"rope_parameters": {"rope_type": "default", "rope_theta": head.theta}}
    config = {
        "architectures": ["Eagle3Speculator"],
        "speculators_model_type": "eagle3",
        "speculators_version": "0.3.0",
        "draft_vocab_size": head.draft_vocab,
        "norm_before_residual": head.norm_residual,
        "norm_before_fc": head.feature_norm == "all",
        "fc_norm": head.feature_norm == "each",
        "norm_output": head.feeds_normed,
        "target_hidden_size": None if head.target_hidden == head.hidden else head.target_hidden,
        "eagle_aux_hidden_state_layer_ids": layer_ids,
        "speculators_config": {"algorithm": "eagle3", "verifier": {"name_or_path": "somewhere/else"}},
        "transformer_layer_config": layer,
    } | changes
    tensors = {"embed_tokens.weight": EMBEDDING.clone()} | eagle3_weights(head, "layers.0")
    return write_safetensors(folder, {k: v for k, v in config.items() if v != "absent"}, tensors)
