"""Sharding one model over ranks: each holds a share of every large weight and of the cache, and runs the same passes.

As in Megatron-LM (Shoeybi et al. 2019, section 3): projections into heads and into the MLP are split by outputs, those
out of them by inputs, whose partial results are summed over the ranks; so a layer needs two sums. Embedding and output
head are split by ids. Key-value heads, each with its query heads, go to ranks whole and need not divide evenly: the
first ranks take one more. Only rank 0 gets logits.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from outrider.errors import InvalidArgument

Share = tuple[int, int]
"""First of a rank's parts, and the first one after them."""

_ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
_MLP = ("gate_proj", "up_proj", "down_proj")


def share(num_parts: int, rank: int, num_ranks: int) -> Share:
    """As even as whole parts allow, the first ranks with one more."""
    each, more = divmod(num_parts, num_ranks)
    start = rank * each + min(rank, more)
    return start, start + each + (rank < more)


class RowParallelLinear(nn.Module):
    """y = sum over ranks of x_r W_r^T, + b: every rank has its own inputs x_r and gets the whole y."""

    def __init__(self, linear: nn.Linear, inputs: Share) -> None:
        super().__init__()
        bias, linear_bias = None, linear.bias
        if linear_bias is not None:
            bias = nn.Parameter(linear_bias.detach().clone(), requires_grad=False)
        self.linear = _linear(linear.weight.detach()[:, slice(*inputs)], None)
        self.bias = bias

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.linear(x).contiguous()
        dist.all_reduce(y)
        return y if self.bias is None else y + self.bias


class ShardedEmbedding(nn.Module):
    """Rows of a share of the ids; the ranks' sum is the lookup."""

    def __init__(self, embedding: nn.Embedding, ids: Share) -> None:
        super().__init__()
        self.start, self.end = ids
        self.weight = nn.Parameter(embedding.weight.detach()[slice(*ids)].clone(), requires_grad=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        is_own = (ids >= self.start) & (ids < self.end)
        rows = F.embedding((ids - self.start).clamp(0, self.end - self.start - 1), self.weight)
        rows = rows * is_own[..., None].to(rows.dtype)
        dist.all_reduce(rows)
        return rows


class ShardedHead(nn.Module):
    """Logits of a share of the ids, gathered on rank 0; other ranks get zeros for the ids that are not theirs.

    A tied head reads the embedding's own share, so that it is held once.
    """

    def __init__(self, head: nn.Linear, num_ids: int, tied: ShardedEmbedding | None) -> None:
        super().__init__()
        rank, num_ranks = dist.get_rank(), dist.get_world_size()
        self.shares = [share(num_ids, r, num_ranks) for r in range(num_ranks)]
        self.rank, self.num_ids = rank, num_ids
        own = slice(*self.shares[rank])
        bias = None if head.bias is None else head.bias.detach()[own]
        self._tied = [tied] if tied is not None else []  # in a list: not a child of its own
        self.linear = None if tied is not None else _linear(head.weight.detach()[own], bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        own = self.linear(x) if self.linear is not None else F.linear(x, self._tied[0].weight)
        width = max(end - start for start, end in self.shares)
        own = F.pad(own, (0, width - own.shape[-1])).contiguous()
        parts = [torch.empty_like(own) for _ in self.shares] if self.rank == 0 else None
        dist.gather(own, parts, dst=0)
        if parts is None:
            return own.new_zeros(*own.shape[:-1], self.num_ids)
        return torch.cat([p[..., : end - start] for p, (start, end) in zip(parts, self.shares, strict=True)], -1)


def shard_model(model: Any) -> None:
    """Leaves this rank's share of a transformers causal LM, in place. The default process group must be up.

    Raises InvalidArgument, naming why, where the model's layers are not those that can be split.
    """
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    config = model.config.get_text_config()
    num_kv_heads = config.num_key_value_heads
    if num_kv_heads < num_ranks:
        raise _refusal(f"the model has {num_kv_heads} key-value heads, which is the most ranks there can be")
    heads = share(num_kv_heads, rank, num_ranks)
    num_layers = 0
    for layer in model.base_model.layers:
        attention, mlp = getattr(layer, "self_attn", None), getattr(layer, "mlp", None)
        if not (_has_linears(attention, _ATTENTION) and _has_linears(mlp, _MLP)):
            raise _refusal(f"{type(layer).__name__} of {type(model).__name__} is no layer that can be split")
        _shard_attention(attention, heads, num_kv_heads)
        _shard_mlp(mlp, rank, num_ranks)
        num_layers += 1
    if num_layers != config.num_hidden_layers:
        raise _refusal(f"{type(model).__name__} has layers elsewhere")
    _shard_vocabulary(model, rank, num_ranks)
    for parameter in model.parameters():
        parameter.data = parameter.data.clone()  # views would keep the whole checkpoint's memory


def _shard_attention(attention: Any, heads: Share, num_kv_heads: int) -> None:
    for name in ("q_proj", "k_proj", "v_proj"):
        linear = getattr(attention, name)
        setattr(attention, name, _outputs(linear, _scaled(heads, linear.out_features // num_kv_heads)))
    out = attention.o_proj
    attention.o_proj = RowParallelLinear(out, _scaled(heads, out.in_features // num_kv_heads))


def _shard_mlp(mlp: Any, rank: int, num_ranks: int) -> None:
    columns = share(mlp.down_proj.in_features, rank, num_ranks)
    mlp.gate_proj, mlp.up_proj = _outputs(mlp.gate_proj, columns), _outputs(mlp.up_proj, columns)
    mlp.down_proj = RowParallelLinear(mlp.down_proj, columns)


def _shard_vocabulary(model: Any, rank: int, num_ranks: int) -> None:
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    if type(embedding) is not nn.Embedding or type(head) is not nn.Linear:
        raise _refusal(f"embedding or head of {type(model).__name__} cannot be split")
    is_tied = head.weight is embedding.weight and head.bias is None
    sharded = ShardedEmbedding(embedding, share(embedding.num_embeddings, rank, num_ranks))
    model.set_input_embeddings(sharded)
    model.set_output_embeddings(ShardedHead(head, head.out_features, sharded if is_tied else None))


def _has_linears(module: Any, names: tuple[str, ...]) -> bool:
    return all(type(getattr(module, name, None)) is nn.Linear for name in names)


def _scaled(parts: Share, size: int) -> Share:
    return parts[0] * size, parts[1] * size


def _outputs(linear: nn.Linear, rows: Share) -> nn.Linear:
    bias = None if linear.bias is None else linear.bias.detach()[slice(*rows)]
    return _linear(linear.weight.detach()[slice(*rows)], bias)


def _linear(weight: torch.Tensor, bias: torch.Tensor | None) -> nn.Linear:
    """A layer over a copy of the given part: the whole one can be freed."""
    linear = nn.Linear(weight.shape[1], weight.shape[0], bias=False, device="meta")
    linear.weight = nn.Parameter(weight.clone(), requires_grad=False)
    if bias is not None:
        linear.bias = nn.Parameter(bias.clone(), requires_grad=False)
    return linear


def _refusal(why: str) -> InvalidArgument:
    return InvalidArgument(f"tensor_parallel: {why}", field="tensor_parallel")
