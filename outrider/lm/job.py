"""A program on its way through the engine, and the forward it waits for."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence as SequenceOf
from dataclasses import replace
from typing import Generic

import numpy as np

from outrider.lm.interface import Forward, Program, Segment, T
from outrider.lm.kv_cache import Sequence
from outrider.lm.tree import is_chain


class Job(Generic[T]):
    """While it has a forward, its sequence is to hold `total` tokens: those it had, then the forward's own.

    `num_rows` of these are left to compute when it enters the step queue, `num_rows_done` of them are computed. Those
    from `tree_start` on are a tree with these `parents`; `tree` is the same, but empty for a mere chain. Of an early
    forward those from `num_before` on, `early_ids` first, are to have their first layers computed only.
    """

    __slots__ = (
        "chain", "compute_ns", "decision", "finished", "forward", "future", "ids", "is_early", "led_hashes", "logits",
        "loop", "num_before", "num_cached_tokens", "num_chained", "num_logits", "num_rows", "num_rows_done", "parents",
        "program", "ready_ns", "sequence", "started_ns", "total", "tree", "tree_start",
    )  # fmt: skip

    def __init__(self, program: Program[T], loop: asyncio.AbstractEventLoop) -> None:
        self.program = program
        self.loop = loop
        self.future: asyncio.Future[T] = loop.create_future()
        self.finished = False
        self.forward: Forward | None = None
        self.num_rows = self.num_rows_done = self.num_logits = 0

    def wants(self, forward: Forward, *, decides: bool = False) -> None:
        """The program asked for a forward. decides: whether the model can make its decision."""
        self.forward = forward
        sequence = forward.sequence
        assert isinstance(sequence, Sequence)
        self.sequence = sequence
        self.num_before = sequence.length
        self.is_early = forward.num_layers > 0
        self.ids = [*sequence.early_ids, *forward.token_ids] if self.is_early else forward.token_ids
        self.total = self.num_before + len(self.ids)
        self.num_logits = forward.num_logits
        self.decision = forward.decision if decides and forward.num_logits else None
        self.num_chained = forward.num_chained if self.decision is not None else 0
        if not forward.parents:
            sequence.parents = ()  # a chain at most, which goes on as a plain text
        self.parents = (*sequence.parents, *forward.parents)
        self.tree_start = self.num_before if self.is_early else self.total - len(self.parents)
        if self.is_early:  # a forward that went on from early rows may have been dropped: they are nobody's then
            sequence.early_end = min(sequence.early_end, self.num_before + len(sequence.early_ids))
        else:
            num_same = _num_same(sequence.early_ids, forward.token_ids[: max(0, self.tree_start - self.num_before)])
            sequence.early_ids, sequence.early_end = [], min(sequence.early_end, self.num_before + num_same)
        self.tree = () if is_chain(self.parents) else self.parents
        self.num_cached_tokens: int | None = None
        self.chain: list[bytes] | None = None
        self.led_hashes: list[bytes] = []
        self.logits: list[np.ndarray] = []
        self.ready_ns, self.started_ns, self.compute_ns = time.perf_counter_ns(), 0, 0

    def begin(self) -> None:
        """All that the sequence has not computed is to be computed now, maybe for the second time."""
        self.num_rows, self.num_rows_done = self.total - self.start, 0
        self.logits = []

    @property
    def is_background(self) -> bool:
        """Whether every other job goes first."""
        return self.forward is not None and self.forward.background

    @property
    def start(self) -> int:
        """Place of the next row to compute."""
        return max(self.sequence.num_computed, self.sequence.early_end if self.is_early else 0)

    @property
    def reach(self) -> int:
        """Places that the forward writes to, up to this one: its tokens and its chained rows."""
        return self.total + self.num_chained

    @property
    def max_cached(self) -> int:
        """Tokens that may come from other sequences: the rows whose logits are wanted are computed, or the last one."""
        return self.num_before if self.is_early else self.total - max(1, self.num_logits)

    def tokens(self, start: int, end: int) -> list[int]:
        """Ids at positions `start` to `end`."""
        known = self.sequence.token_ids
        rest = slice(max(start, len(known)) - self.num_before, max(0, end - self.num_before))
        return [*known[start:end], *self.ids[rest]]

    def take_up(self, num_computed: int) -> None:
        """The first `num_computed` tokens are in the cache."""
        sequence = self.sequence
        if self.is_early and num_computed > self.num_before:
            end = max(num_computed, self.num_before + len(sequence.early_ids))
            sequence.early_ids, sequence.early_end = self.tokens(self.num_before, end), num_computed
            sequence.num_computed = self.num_before
            return
        if num_computed > sequence.length:
            sequence.token_ids.extend(self.tokens(sequence.length, num_computed))
            sequence.parents = self.parents[: max(0, num_computed - self.tree_start)]
        sequence.num_computed = num_computed

    def take_up_chained(self, token_ids: list[int]) -> None:
        """The model went on with these, which are in the cache too."""
        self.sequence.token_ids.extend(token_ids)
        self.sequence.num_computed += len(token_ids)

    def segment(self, num_rows: int) -> Segment:
        """The next `num_rows` rows. Logits are those of the forward's last rows, in whichever chunk these fall."""
        sequence, start = self.sequence, self.start
        end = start + num_rows
        num_logits = max(0, end - max(start, self.total - self.num_logits))
        parents = self.tree[: max(0, end - self.tree_start)]
        segment = Segment(
            start,
            self.tokens(start, end),
            sequence.blocks,
            num_logits,
            () if self.is_early else parents,
            num_kept=0 if self.is_early else max(0, min(end, sequence.early_end) - start),
            num_early=max(0, end - max(start, self.num_before)) if self.is_early else 0,
            skips=sequence.skips,
        )
        if self.decision is not None and num_logits == self.num_logits:
            return replace(segment, decision=self.decision, num_chained=self.num_chained)
        return segment


def _num_same(a: SequenceOf[int], b: SequenceOf[int]) -> int:
    """Length of their common beginning."""
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
