"""EAGLE heads: a layer or few that go on from the target's states (EAGLE-1/2: arXiv 2401.15077, 2406.16858; EAGLE-3:
arXiv 2503.01840). The forward is a plain loop over few rows, built to be cheap at one.

A pair is the target's state at position t and the id of token t + 1; the head guesses token t + 2. Pairs of the
target's own states are kept; guesses go on from the head's own output, and their keys and values are thrown away.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from outrider.errors import Internal
from outrider.lm.heads.conventions import Convention
from outrider.lm.heads.kv import HeadCache
from outrider.lm.heads.packing import Linear
from outrider.lm.heads.rope import RotaryTable, rotate
from outrider.lm.heads.target import Embedding, Projection
from outrider.lm.tree import Tree

EXTEND_ROWS = 64
"""Pairs computed at once: bounds the scores of a long prompt."""


@dataclass(frozen=True, slots=True)
class HeadLayer:
    """Norms are weights [H] or, of single heads, [D]. input_norm: of the embedding in an EAGLE-3 head's first layer, of
    the residual in layers after it; None in EAGLE-1's first. qkv and gate_up are one product each."""

    input_norm: torch.Tensor | None
    qkv: Linear
    q_norm: torch.Tensor | None
    k_norm: torch.Tensor | None
    o: Linear
    mlp_norm: torch.Tensor
    gate_up: Linear
    down: Linear


@dataclass(frozen=True, slots=True)
class Branches:
    """Where n rows stand that are no chain. unseen: bool[n, m], of the last m places of the cache, the rows' own among
    them; places before are seen by all."""

    positions: list[int]
    unseen: torch.Tensor


@dataclass(frozen=True, slots=True)
class EagleHead:
    """A head ready to run; `eagle_loading.py` makes it. Shared by all sessions: what one keeps is in its context.

    kind: "eagle" (EAGLE-1 and 2) or "eagle3". layout: which checkpoint format it came in. feature_width: numbers in a
    feature, len(states) * hidden size of the target. draft_ids: int64[dV], the id of each logit; None: all ids in
    order. conventions: the ways to read it, of which `convention` is in force. lm_head gives float32.
    """

    kind: str
    name: str
    layout: str
    hidden_size: int
    feature_width: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    epsilon: float
    dtype: torch.dtype
    device: torch.device
    embedding: Embedding
    fc: Linear
    feature_norms: tuple[torch.Tensor, ...]
    """None of them; one over the whole feature; or one for each of its states."""
    hidden_norm: torch.Tensor | None
    layers: tuple[HeadLayer, ...]
    norm: torch.Tensor | None
    lm_head: Projection
    draft_ids: torch.Tensor | None
    rotary: RotaryTable
    conventions: tuple[Convention, ...]
    convention: Convention
    num_parameters: int

    @property
    def states(self) -> tuple[int, ...]:
        """The target's states that make up a feature, in this order."""
        return self.convention.states

    def reading(self, convention: Convention) -> EagleHead:
        """The same weights, read in another of `conventions`."""
        return dataclasses.replace(self, convention=convention)

    def new_context(self) -> EagleContext:
        """For one session."""
        return EagleContext(self)

    def fuse(self, features: torch.Tensor) -> torch.Tensor:
        """[n, H] from the target's features [n, feature_width]."""
        features = features.to(self.device, self.dtype)
        if self.kind == "eagle":
            return features
        parts = features.chunk(max(1, len(self.feature_norms)), -1)
        if self.feature_norms:
            parts = tuple(self._normal(p, w) for p, w in zip(parts, self.feature_norms, strict=True))
        fused: torch.Tensor = self.fc(torch.cat(parts, -1))
        return fused

    def run(
        self, states: torch.Tensor, token_ids: torch.Tensor, cache: HeadCache, branches: Branches | None = None
    ) -> torch.Tensor:
        """[n, H], the last layer's output, for pairs of states [n, H] and int64[n] ids; appends them to the cache, as a
        chain unless told which branches they are."""
        start, end = cache.grow(len(token_ids))
        x, residual = self._pairs(states, self.embedding(token_ids).to(self.dtype))
        for number, layer in enumerate(self.layers):
            if number:
                residual, x = x, self._normal(x, layer.input_norm)
            x = residual + layer.o(self._attend(number, layer, x, cache, start, end, branches))
            gate, up = layer.gate_up(self._normal(x, layer.mlp_norm)).chunk(2, -1)
            x = x + layer.down(F.silu(gate).mul_(up))
        return x

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """float32[n, V'] of the last layer's output."""
        return self.lm_head(hidden if self.norm is None else self._normal(hidden, self.norm))

    def fed_back(self, hidden: torch.Tensor) -> torch.Tensor:
        """What stands for the target's state in a guess that goes on from this output."""
        return self._normal(hidden, self.norm) if self.convention.feeds_normed else hidden

    def _pairs(self, states: torch.Tensor, embedded: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The first layer's input and its residual."""
        if self.hidden_norm is None:
            x = self.fc(torch.cat([embedded, states], -1))
            return x, x
        normed = self._normal(states, self.hidden_norm)
        x = torch.cat([self._normal(embedded, self.layers[0].input_norm), normed], -1)
        return x, normed if self.convention.norm_residual else states

    def _attend(
        self,
        number: int,
        layer: HeadLayer,
        x: torch.Tensor,
        cache: HeadCache,
        start: int,
        end: int,
        branches: Branches | None,
    ) -> torch.Tensor:
        """[n, heads * D] of rows at places start to end - 1, each seeing all before it, or what its branch may."""
        num_rows, groups = end - start, self.num_heads // self.num_kv_heads
        rows = layer.qkv(x).to(cache.dtype).view(num_rows, -1, self.head_dim)
        query, key, value = rows.split([self.num_heads, self.num_kv_heads, self.num_kv_heads], 1)
        if layer.q_norm is not None:
            query, key = self._normal(query, layer.q_norm), self._normal(key, layer.k_norm)
        turned = self.rotary.rows(start, end) if branches is None else self.rotary.at(branches.positions)
        query = rotate(query, *turned).view(num_rows, self.num_kv_heads, groups, self.head_dim).permute(1, 2, 0, 3)
        keys, values = cache.write(number, rotate(key, *turned).to(cache.dtype), value)
        query = query.to(cache.dtype).reshape(self.num_kv_heads, groups * num_rows, self.head_dim)
        scores = torch.bmm(query, keys.transpose(1, 2)).float().mul_(self.head_dim**-0.5)  # [kv, groups * n, end]
        unseen = branches.unseen if branches is not None else None
        if unseen is None and num_rows > 1:
            unseen = torch.ones(num_rows, num_rows, dtype=torch.bool, device=x.device).triu(1)
        if unseen is not None:
            scores.view(-1, num_rows, end)[..., end - unseen.shape[1] :].masked_fill_(unseen, float("-inf"))
        mixed = torch.bmm(scores.softmax(-1).to(cache.dtype), values)
        mixed = mixed.view(self.num_heads, num_rows, self.head_dim).transpose(0, 1)
        return mixed.reshape(num_rows, -1).to(self.dtype)

    def _normal(self, x: torch.Tensor, weight: torch.Tensor | None) -> torch.Tensor:
        assert weight is not None
        return F.rms_norm(x, weight.shape, weight.to(x.dtype), self.epsilon)


class EagleContext:
    """What one session's head has read. Used by one thread at a time.

    length: pairs kept, those of positions 0, 1, ... Guesses made by `step` or `branch` follow them until `extend`,
    `discard` or `truncate` forgets them; the two do not mix.
    """

    def __init__(self, head: EagleHead) -> None:
        self._head = head
        self._cache = HeadCache(len(head.layers), head.num_kv_heads, head.head_dim, head.dtype, head.device)
        self._last: torch.Tensor | None = None
        self._kept_last: torch.Tensor | None = None
        self._branch_states: torch.Tensor | None = None
        self._branch_parents: list[int] = []
        self.length = 0

    def bytes_for(self, length: int) -> int:
        """Held at most once so many pairs, guesses among them, were read."""
        return self._cache.bytes_for(length)

    def extend(self, features: torch.Tensor, next_ids: torch.Tensor) -> torch.Tensor:
        """float32[V']: the guess for the token after the last pair.

        features: [n, W], the target's, of positions length, length + 1, ...; next_ids: int64[n], the tokens one
        position after each; n > 0. These pairs are kept.
        """
        hidden = self._extend(features, next_ids)
        with torch.inference_mode():
            return self._head.logits(hidden[-1:])[0]

    def extend_rows(self, features: torch.Tensor, next_ids: torch.Tensor) -> torch.Tensor:
        """float32[n, V']: as `extend`, the guess after every pair."""
        hidden = self._extend(features, next_ids)
        with torch.inference_mode():
            return self._head.logits(hidden)

    @torch.inference_mode()
    def step(self, token_id: int) -> torch.Tensor:
        """float32[V']: the guess for the token after `token_id`, which follows what was guessed or kept last."""
        if self._last is None:
            raise Internal("a head's step needs a pair read since its context was made or cut")
        token = torch.tensor([token_id], device=self._head.device)
        hidden = self._head.run(self._last, token, self._cache)
        self._last = self._head.fed_back(hidden)
        return self._head.logits(hidden)[0]

    @torch.inference_mode()
    def branch(self, token_ids: Sequence[int], parents: Sequence[int]) -> torch.Tensor:
        """float32[n, V']: the guesses after n tokens of a tree, run at once.

        parents: the token that each follows, by its number among all branched from these pairs; -1: it follows the last
        pair. Each sees the kept pairs, its ancestors and itself.
        """
        if self._kept_last is None:
            raise Internal("a head's branches need a pair read since its context was made or cut")
        head, first = self._head, len(self._branch_parents)
        if not all(-1 <= parent < first for parent in parents) or self._cache.length != self.length + first:
            raise Internal(f"branches follow one of the {first} before them or the last pair, and no steps")
        known = self._kept_last if self._branch_states is None else torch.cat([self._kept_last, self._branch_states])
        states = known[[parent + 1 for parent in parents]]
        self._branch_parents += parents
        tree = Tree.of(self.length, self._branch_parents)
        unseen = torch.from_numpy(~tree.sees[first:]).to(head.device)
        branches = Branches(tree.positions[first:].tolist(), unseen)
        tokens = torch.tensor(token_ids, dtype=torch.int64, device=head.device)
        hidden = head.run(states, tokens, self._cache, branches)
        fed_back = head.fed_back(hidden)
        self._branch_states = fed_back if self._branch_states is None else torch.cat([self._branch_states, fed_back])
        return head.logits(hidden)

    def discard(self) -> None:
        """Forgets guesses: `step` and `branch` go on from the last pair again."""
        self._cache.length = self.length
        self._last = self._kept_last
        self._forget_branches()

    def _forget_branches(self) -> None:
        self._branch_states = None
        self._branch_parents.clear()

    def truncate(self, length: int) -> None:
        """Keeps the first `length` pairs, at most those there are. An `extend` comes next unless nothing was cut."""
        if not 0 <= length <= self.length:
            raise Internal(f"a head's context of {self.length} pairs cannot be cut to {length}")
        if length < self.length:
            self.length, self._kept_last = length, None
        self.discard()

    @torch.inference_mode()
    def _extend(self, features: torch.Tensor, next_ids: torch.Tensor) -> torch.Tensor:
        head = self._head
        if not len(next_ids) or features.shape != (len(next_ids), head.feature_width):
            raise Internal(
                f"features should be [{len(next_ids)}, {head.feature_width}] for {len(next_ids)} ids and are "
                f"{list(features.shape)}"
            )
        self._cache.length = self.length
        next_ids = next_ids.to(head.device)
        hidden = torch.cat(
            [
                head.run(head.fuse(part), ids, self._cache)
                for part, ids in zip(features.split(EXTEND_ROWS), next_ids.split(EXTEND_ROWS), strict=True)
            ]
        )
        self.length = self._cache.length
        self._last = self._kept_last = head.fed_back(hidden[-1:])
        self._forget_branches()
        return hidden
