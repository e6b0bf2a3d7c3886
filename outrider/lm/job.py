"""A program on its way through the engine, and the forward it waits for."""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace
from typing import Generic

import numpy as np

from outrider.lm.interface import Forward, Program, Segment, T
from outrider.lm.kv_cache import Sequence
from outrider.lm.tree import is_chain


class Job(Generic[T]):
    """While it has a forward, its sequence is to hold `total` tokens: those it had, then the forward's own.

    `num_rows` of these are left to compute when it enters the step queue, `num_rows_done` of them are computed. Those
    from `tree_start` on are a tree with these `parents`; `tree` is the same, but empty for a mere chain.
    """

    __slots__ = (
        "chain", "compute_ns", "decision", "finished", "forward", "future", "led_hashes", "logits", "loop",
        "num_before", "num_cached_tokens", "num_chained", "num_logits", "num_rows", "num_rows_done", "parents",
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
        self.total = self.num_before + len(forward.token_ids)
        self.num_logits = forward.num_logits
        self.decision = forward.decision if decides and forward.num_logits else None
        self.num_chained = forward.num_chained if self.decision is not None else 0
        if not forward.parents:
            sequence.parents = ()  # a chain at most, which goes on as a plain text
        self.parents = (*sequence.parents, *forward.parents)
        self.tree_start = self.total - len(self.parents)
        self.tree = () if is_chain(self.parents) else self.parents
        self.num_cached_tokens: int | None = None
        self.chain: list[bytes] | None = None
        self.led_hashes: list[bytes] = []
        self.logits: list[np.ndarray] = []
        self.ready_ns, self.started_ns, self.compute_ns = time.perf_counter_ns(), 0, 0

    def begin(self) -> None:
        """All that the sequence has not computed is to be computed now, maybe for the second time."""
        self.num_rows, self.num_rows_done = self.total - self.sequence.num_computed, 0
        self.logits = []

    @property
    def reach(self) -> int:
        """Places that the forward writes to, up to this one: its tokens and its chained rows."""
        return self.total + self.num_chained

    @property
    def max_cached(self) -> int:
        """Tokens that may come from other sequences: the rows whose logits are wanted are computed, or the last one."""
        return self.total - max(1, self.num_logits)

    def tokens(self, start: int, end: int) -> list[int]:
        """Ids at positions `start` to `end`."""
        assert self.forward is not None
        known = self.sequence.token_ids
        rest = slice(max(start, len(known)) - self.num_before, max(0, end - self.num_before))
        return [*known[start:end], *self.forward.token_ids[rest]]

    def take_up(self, num_computed: int) -> None:
        """The first `num_computed` tokens are in the cache."""
        sequence = self.sequence
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
        start = self.sequence.num_computed
        end = start + num_rows
        num_logits = max(0, end - max(start, self.total - self.num_logits))
        parents = self.tree[: max(0, end - self.tree_start)]
        segment = Segment(start, self.tokens(start, end), self.sequence.blocks, num_logits, parents)
        if self.decision is not None and num_logits == self.num_logits:
            return replace(segment, decision=self.decision, num_chained=self.num_chained)
        return segment
