"""An EAGLE-3 head: one layer that reads the target's hidden states and guesses on from its own (arXiv 2503.01840).

Letters: B sequences, T positions, H hidden size, S = 3 states. The pair at position i is (states of token i, token
i + 1); it guesses token i + 2. A guess j steps further reads the head's own output in place of the states.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn
from transformers import PretrainedConfig

from outrider.distill.batches import Batch
from outrider.distill.target import TargetWeights

NUM_AUX = 3


class RMSNorm(nn.Module):
    """x / rms(x) * weight, in float32."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(x.float(), self.weight.shape, self.weight, self.eps)


class Attention(nn.Module):
    """Queries, keys and values of pairs [.., 2H]; as many key-value heads as query heads, or a token would have to
    pass through the few numbers of a shared value."""

    def __init__(self, hidden_size: int, num_heads: int, head_dim: int, rope_theta: float) -> None:
        super().__init__()
        self.num_heads, self.head_dim, self.rope_theta = num_heads, head_dim, rope_theta
        width = num_heads * head_dim
        self.q_proj = nn.Linear(2 * hidden_size, width, bias=False)
        self.k_proj = nn.Linear(2 * hidden_size, width, bias=False)
        self.v_proj = nn.Linear(2 * hidden_size, width, bias=False)
        self.o_proj = nn.Linear(width, hidden_size, bias=False)

    def project(self, x: torch.Tensor, first: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Queries, keys, values [B, heads, T, D] of x [B, T, 2H] at positions first, first + 1, ..."""
        q, k, v = (
            proj(x).unflatten(-1, (self.num_heads, self.head_dim)).transpose(1, 2)
            for proj in (self.q_proj, self.k_proj, self.v_proj)
        )
        cos, sin = self._angles(first, x.shape[1])
        return _rotate(q, cos, sin), _rotate(k, cos, sin), v

    def _angles(self, first: int, count: int) -> tuple[torch.Tensor, torch.Tensor]:
        exponents = torch.arange(0, self.head_dim, 2).float() / self.head_dim
        angles = torch.arange(first, first + count).float()[:, None] / self.rope_theta**exponents
        angles = torch.cat([angles, angles], -1)
        return angles.cos(), angles.sin()


class MLP(nn.Module):
    """down(silu(gate(x)) * up(x))."""

    def __init__(self, hidden_size: int, intermediate_size: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(hidden_size, intermediate_size, bias=False)
        self.up_proj = nn.Linear(hidden_size, intermediate_size, bias=False)
        self.down_proj = nn.Linear(intermediate_size, hidden_size, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))  # type: ignore[no-any-return]


class MidLayer(nn.Module):
    """The head's one layer; names as in the public checkpoints."""

    def __init__(self, hidden_size: int, intermediate_size: int, attention: Attention, eps: float) -> None:
        super().__init__()
        self.self_attn = attention
        self.mlp = MLP(hidden_size, intermediate_size)
        self.hidden_norm = RMSNorm(hidden_size, eps)
        self.input_layernorm = RMSNorm(hidden_size, eps)
        self.post_attention_layernorm = RMSNorm(hidden_size, eps)


class Eagle3Head(nn.Module):
    """Parameters are named as in the public layout; the embedding is the target's, frozen, and no parameter.

    Every step normalises the three states one by one before `fc`: their scales differ by orders of magnitude, and the
    first token's far more.
    """

    def __init__(self, weights: TargetWeights, draft_ids: torch.Tensor) -> None:
        """draft_ids: int64[V], the draft vocabulary, ascending; the head starts as the target's rows of these."""
        super().__init__()
        config = weights.config
        hidden_size, eps = config.hidden_size, float(getattr(config, "rms_norm_eps", 1e-6))
        num_heads = config.num_attention_heads
        head_dim = getattr(config, "head_dim", None) or hidden_size // num_heads
        self.fc_norm = nn.ModuleList([RMSNorm(hidden_size, eps) for _ in range(NUM_AUX)])
        self.fc = nn.Linear(NUM_AUX * hidden_size, hidden_size, bias=False)
        attention = Attention(hidden_size, num_heads, head_dim, rope_theta(config))
        self.midlayer = MidLayer(hidden_size, config.intermediate_size, attention, eps)
        self.norm = RMSNorm(hidden_size, eps)
        self.norm.weight.data.copy_(weights.norm.float())
        self.lm_head = nn.Linear(hidden_size, len(draft_ids), bias=False)
        self.lm_head.weight.data.copy_(weights.head[draft_ids].float())
        self._embedding = [weights.embedding]  # in a list, so that it is no part of the state

    def fuse(self, states: torch.Tensor) -> torch.Tensor:
        """[.., H] from the target's states [.., >= 3, H]."""
        return self.fc(torch.cat([norm(states[..., i, :]) for i, norm in enumerate(self.fc_norm)], -1))  # type: ignore[no-any-return]

    def hidden(self, batch: Batch, num_steps: int) -> list[torch.Tensor]:
        """`num_steps` tensors [B, T, H]: row m of tensor j, times the head, guesses token m + 1 after j own guesses.

        The unroll of EAGLE-3's training: tokens are the text's own, states are the head's. Rows m <= j are zeros.
        """
        features = self.fuse(batch.states)
        attention = self.midlayer.self_attn
        num_rows = features.shape[1]
        first_keys = first_values = features
        own_keys: list[torch.Tensor] = []
        own_values: list[torch.Tensor] = []
        results = []
        for step in range(num_steps):
            x = self._pairs(features, _shifted(batch.token_ids, step + 1, num_rows))
            q, k, v = attention.project(x, step)
            if step == 0:
                first_keys, first_values = k, v
                attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
            else:
                own_keys.append(k)
                own_values.append(v)
                attended = _attend(q, first_keys, first_values, own_keys, own_values)
            features = self._finish(features, attended)
            results.append(F.pad(self.norm(features), (0, 0, step + 1, 0))[:, :num_rows])
        return results

    def _pairs(self, features: torch.Tensor, token_ids: torch.Tensor) -> torch.Tensor:
        embedded = F.embedding(token_ids, self._embedding[0])
        return torch.cat([self.midlayer.input_layernorm(embedded), self.midlayer.hidden_norm(features)], -1)

    def _finish(self, residual: torch.Tensor, attended: torch.Tensor) -> torch.Tensor:
        layer = self.midlayer
        a = residual + layer.self_attn.o_proj(attended.transpose(1, 2).flatten(2))
        return a + layer.mlp(layer.post_attention_layernorm(a))  # type: ignore[no-any-return]


def rope_theta(config: PretrainedConfig) -> float:
    """Of the target: under `rope_parameters` in newer configs, a value of its own in older ones."""
    parameters = getattr(config, "rope_parameters", None) or {}
    return float(parameters.get("rope_theta") or getattr(config, "rope_theta", None) or 10000.0)


def _attend(
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    own_keys: list[torch.Tensor],
    own_values: list[torch.Tensor],
) -> torch.Tensor:
    """Each start sees the true pairs up to itself, and of the guessed ones those on its own path: all [B, heads, T, D].

    Row i of `own_keys[s]` is the pair that start i guessed at step s + 1.
    """
    num_rows = q.shape[2]
    q = q * q.shape[-1] ** -0.5
    true_scores = (q @ keys.transpose(-1, -2)).float()
    unseen = torch.ones(num_rows, num_rows, dtype=torch.bool).triu(1)
    own_scores = [(q * k).float().sum(-1, keepdim=True) for k in own_keys]
    weights = torch.cat([true_scores.masked_fill(unseen, float("-inf")), *own_scores], -1).softmax(-1).to(values.dtype)
    attended = weights[..., :num_rows] @ values
    for index, own in enumerate(own_values):
        attended = attended + weights[..., num_rows + index, None] * own
    return attended


def _shifted(token_ids: torch.Tensor, count: int, num_rows: int) -> torch.Tensor:
    """[B, num_rows]: ids `count` places later, zeros beyond the end."""
    later = token_ids[:, count : count + num_rows]
    return F.pad(later, (0, num_rows - later.shape[1]))


def _rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    low, high = x.chunk(2, -1)
    return (x * cos + torch.cat([-high, low], -1) * sin).to(x.dtype)
