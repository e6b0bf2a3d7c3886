"""Heads as their papers' formulas read: float32, the whole sequence anew for every guess, nothing kept."""

import torch
import torch.nn.functional as F
from head_checkpoints import EMBEDDING, LM_HEAD, VOCAB, Eagle, Tensors


def norm(x: torch.Tensor, weight: torch.Tensor, epsilon: float) -> torch.Tensor:
    return x / (x.square().mean(-1, keepdim=True) + epsilon).sqrt() * weight


def turned(x: torch.Tensor, theta: float) -> torch.Tensor:
    """x [n, heads, D]: number pairs (i, i + D/2) as complex ones, multiplied by e^(i t theta^(-2i/D))."""
    half = x.shape[-1] // 2
    numbers = torch.complex(x[..., :half], x[..., half:])
    angles = torch.outer(torch.arange(len(x)).double(), theta ** -(torch.arange(half).double() / half))
    result = numbers * torch.polar(torch.ones_like(angles), angles)[:, None].to(numbers.dtype)
    return torch.cat([result.real, result.imag], -1)


def layer(weights: Tensors, name: str, head: Eagle, x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
    """[n, H]: attention over x plus residual, then the MLP."""

    def linear(part: str, rows: torch.Tensor) -> torch.Tensor:
        bias = weights.get(f"{name}.{part}.bias")
        return rows @ weights[f"{name}.{part}.weight"].T + (0 if bias is None else bias)

    n = len(x)
    q = linear("self_attn.q_proj", x).view(n, head.num_heads, head.head_dim)
    k = linear("self_attn.k_proj", x).view(n, head.num_kv_heads, head.head_dim)
    v = linear("self_attn.v_proj", x).view(n, head.num_kv_heads, head.head_dim)
    if head.head_norms:
        q = norm(q, weights[f"{name}.self_attn.q_norm.weight"], head.epsilon)
        k = norm(k, weights[f"{name}.self_attn.k_norm.weight"], head.epsilon)
    q, k = turned(q, head.theta), turned(k, head.theta)
    rows = []
    for i in range(n):
        parts = []
        for h in range(head.num_heads):
            kv = h // (head.num_heads // head.num_kv_heads)
            scores = k[: i + 1, kv] @ q[i, h] / head.head_dim**0.5
            parts.append(scores.softmax(0) @ v[: i + 1, kv])
        rows.append(torch.cat(parts))
    a = residual + linear("self_attn.o_proj", torch.stack(rows))
    x = norm(a, weights[f"{name}.post_attention_layernorm.weight"], head.epsilon)
    return a + linear("mlp.down_proj", F.silu(linear("mlp.gate_proj", x)) * linear("mlp.up_proj", x))


def later_layer(weights: Tensors, name: str, head: Eagle, x: torch.Tensor) -> torch.Tensor:
    """A plain Llama layer."""
    return layer(weights, name, head, norm(x, weights[f"{name}.input_layernorm.weight"], head.epsilon), x)


def eagle3(weights: Tensors, head: Eagle, first: str, features: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """[V'] after the last id: pairs of features [n, 3H] with the first n ids, then of own outputs with the others."""
    if head.feature_norm == "all":
        features = norm(features, weights["input_norm.weight"], head.epsilon)
    if head.feature_norm == "each":
        parts = features.chunk(head.num_states, -1)
        features = torch.cat([norm(p, weights[f"fc_norm.{i}.weight"], head.epsilon) for i, p in enumerate(parts)], -1)
    g = features @ weights["fc.weight"].T
    table = weights.get("embed_tokens.weight", EMBEDDING)
    while True:
        e = norm(table[ids[: len(g)]], weights[f"{first}.input_layernorm.weight"], head.epsilon)
        normed = norm(g, weights[f"{first}.hidden_norm.weight"], head.epsilon)
        a = layer(weights, first, head, torch.cat([e, normed], -1), normed if head.norm_residual else g)
        for i in range(1, head.num_layers):
            a = later_layer(weights, f"layers.{i}", head, a)
        last = norm(a[-1], weights["norm.weight"], head.epsilon)
        if len(g) == len(ids):
            return (weights["lm_head.weight"] @ last)[: VOCAB if head.draft_vocab is None else head.draft_vocab]
        g = torch.cat([g, (last if head.feeds_normed else a[-1])[None]])


def eagle1(weights: Tensors, head: Eagle, features: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """[V] after the last id, as `eagle3`."""
    f = features
    while True:
        h = torch.cat([EMBEDDING[ids[: len(f)]], f], -1) @ weights["fc.weight"].T + weights.get("fc.bias", 0)
        h = layer(weights, "layers.0", head, h, h)
        for i in range(1, head.num_layers):
            h = later_layer(weights, f"layers.{i}", head, h)
        if len(f) == len(ids):
            return (LM_HEAD @ h[-1])[:VOCAB]
        f = torch.cat([f, h[-1:]])
