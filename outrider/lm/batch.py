"""A packed batch as flat arrays: what a model's pass needs to know of each row. Nothing is padded.

N rows in all, S segments, L rows that want logits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from outrider.lm.interface import PackedBatch, Segment
from outrider.lm.tree import Tree, is_chain


@dataclass(frozen=True, slots=True)
class Span:
    """One segment's rows `start` to `end` of the pass, and the cache slots of its whole context, those rows included.

    num_context_tokens = cached tokens + rows; the last of these are `tree`'s nodes, if there is one. `first_slot` is
    set when the context lies in one run of slots; otherwise `slots` (int64[num_context_tokens]) lists them in order.
    """

    start: int
    end: int
    num_context_tokens: int
    first_slot: int | None
    slots: np.ndarray | None
    tree: Tree | None = None

    @property
    def num_before(self) -> int:
        """Tokens of the context before its rows."""
        return self.num_context_tokens - (self.end - self.start)

    @property
    def first_position(self) -> int:
        """The lowest one among its rows."""
        return self.num_before if self.tree is None else int(self.row_positions().min())

    def row_positions(self) -> np.ndarray:
        """int64[rows]: each row's position in its text."""
        if self.tree is None:
            return np.arange(self.num_before, self.num_context_tokens)
        return self.positions()[self.num_before :]

    def positions(self) -> np.ndarray:
        """int64[num_context_tokens]: each token's position in its text; its place in the context unless in a tree."""
        if self.tree is None:
            return np.arange(self.num_context_tokens)
        return np.concatenate([np.arange(self.tree.start), self.tree.positions])

    def slots_at(self, places: np.ndarray) -> np.ndarray:
        """Slots of the tokens at these places of the context."""
        return places + self.first_slot if self.slots is None else self.slots[places]


@dataclass(frozen=True, slots=True)
class FlatBatch:
    """token_ids, positions, slots: int64[N]; logit_rows: int64[L] into the N rows; spans: S of them."""

    token_ids: np.ndarray
    positions: np.ndarray
    slots: np.ndarray
    logit_rows: np.ndarray
    spans: tuple[Span, ...]


def flatten(batch: PackedBatch, block_size: int) -> FlatBatch:
    """All segments back to back, in order."""
    token_ids, positions, slots, logit_rows, spans = [], [], [], [], []
    start = 0
    for segment in batch.segments:
        end = start + len(segment.token_ids)
        span = _span(segment, start, end, block_size)
        token_ids.append(np.asarray(segment.token_ids, np.int64))
        positions.append(span.row_positions())
        slots.append(_row_slots(span, segment.num_cached_tokens))
        logit_rows.append(np.arange(end - segment.num_logits, end))
        spans.append(span)
        start = end
    return FlatBatch(
        np.concatenate(token_ids),
        np.concatenate(positions),
        np.concatenate(slots),
        np.concatenate(logit_rows),
        tuple(spans),
    )


def split(batch: PackedBatch, row_counts: Sequence[int]) -> list[PackedBatch]:
    """The same rows as batches of these counts, to be computed one after the other; a segment may be cut.

    row_counts: sums to the batch's rows.
    """
    if len(row_counts) == 1:
        return [batch]
    batches: list[PackedBatch] = []
    left = list(reversed(batch.segments))
    for count in row_counts:
        part: list[Segment] = []
        while count:
            segment = left.pop()
            if len(segment.token_ids) > count:
                segment, rest = _cut(segment, count)
                left.append(rest)
            part.append(segment)
            count -= len(segment.token_ids)
        batches.append(PackedBatch(tuple(part)))
    return batches


def _cut(segment: Segment, num_rows: int) -> tuple[Segment, Segment]:
    """Its first `num_rows` rows, and the rest, which finds them cached."""
    num_left = len(segment.token_ids) - num_rows
    num_logits = max(0, segment.num_logits - num_left)
    parents = segment.parents[: max(0, len(segment.parents) - num_left)]
    first = replace(segment, token_ids=segment.token_ids[:num_rows], num_logits=num_logits, parents=parents)
    rest = replace(
        segment,
        num_cached_tokens=segment.num_cached_tokens + num_rows,
        token_ids=segment.token_ids[num_rows:],
        num_logits=segment.num_logits - num_logits,
    )
    return first, rest


def _span(segment: Segment, start: int, end: int, block_size: int) -> Span:
    num_context_tokens = segment.num_cached_tokens + end - start
    num_blocks = -(-num_context_tokens // block_size)
    if num_blocks > len(segment.block_table):
        raise ValueError(f"{num_context_tokens} tokens do not fit {len(segment.block_table)} blocks of {block_size}")
    parents = segment.parents
    tree = None if is_chain(parents) else Tree.of(num_context_tokens - len(parents), parents)
    blocks = np.asarray(segment.block_table[:num_blocks], np.int64)
    if bool((blocks[1:] - blocks[:-1] == 1).all()):
        return Span(start, end, num_context_tokens, int(blocks[0]) * block_size, None, tree)
    slots = (blocks[:, None] * block_size + np.arange(block_size)).reshape(-1)[:num_context_tokens]
    return Span(start, end, num_context_tokens, None, slots, tree)


def _row_slots(span: Span, num_cached_tokens: int) -> np.ndarray:
    if span.slots is not None:
        return span.slots[num_cached_tokens:]
    assert span.first_slot is not None
    return np.arange(span.first_slot + num_cached_tokens, span.first_slot + span.num_context_tokens)
