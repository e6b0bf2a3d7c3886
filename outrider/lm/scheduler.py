"""What the next step computes: running streams and a bounded share of prefill, so that neither waits for the other.
Work in the background is done when there is neither.

Pure: no threads, no clocks. A job is anything with `num_rows`, `num_rows_done`, `num_logits` and `finished`.
"""

from __future__ import annotations

from collections import deque
from typing import Generic, Protocol, TypeVar


class Job(Protocol):
    """A forward as the scheduler sees it."""

    num_rows: int
    num_rows_done: int
    num_logits: int
    finished: bool

    @property
    def is_background(self) -> bool:
        """Whether every other job goes first."""


J = TypeVar("J", bound=Job)

MAX_CATCH_UP_ROWS = 16
"""A forward with this few rows counts as a running stream even where it wants logits of its last row only."""

PREFILL_PATIENCE = 3
"""Steps that full batches of running streams may pass over a waiting prefill before it goes first once."""


STREAM_MEMORY_STEPS = 8
"""Streams count as running this many steps after their last one: between two rounds they wait for drafts."""


class StepQueue(Generic[J]):
    """Ready jobs. `pick` says how many rows of which go into a step; a job stays until its last row is picked.

    prefill_rows: rows of a step that prefills get while streams run, no more and no fewer: fewer would let a prompt
    wait for ever under full load, more would slow the streams down by what they cost. None: whatever streams leave.
    It may be set anew between two picks (prefill_share.py).
    """

    def __init__(self, max_batch_tokens: int, prefill_rows: int | None = None) -> None:
        self.max_batch_tokens = max_batch_tokens
        self.prefill_rows = max_batch_tokens if prefill_rows is None else max(1, min(prefill_rows, max_batch_tokens))
        self.prefill_paused = False
        """Set between two picks: streams that are ready have the next step to themselves."""
        self.streams_open = True
        """Set between two picks: whether any stream beside the waiting prompts may come back at all."""
        self.num_prefill_rows = 0
        """Of the rows picked last, those of prefills."""
        self._has_share = prefill_rows is not None
        self._running: deque[J] = deque()
        self._prefills: deque[J] = deque()
        self._background: deque[J] = deque()
        self._num_steps_passed_over = 0
        self._num_steps_without_streams = STREAM_MEMORY_STEPS

    def __bool__(self) -> bool:
        return bool(self._running or self._prefills or self._background)

    @property
    def num_prefills(self) -> int:
        """Prompts that wait or are being computed."""
        return len(self._prefills)

    def add(self, job: J) -> None:
        """A verification or decode wants logits of (nearly) all its rows and fits a step whole; the rest is prefill."""
        if job.is_background:
            self._background.append(job)
            return
        is_running = job.num_rows <= min(self.max_batch_tokens, max(MAX_CATCH_UP_ROWS, job.num_logits))
        (self._running if is_running else self._prefills).append(job)

    def remove(self, job: J) -> bool:
        """Takes a job out again; False when it is not here."""
        for queue in (self._running, self._prefills, self._background):
            if job in queue:
                queue.remove(job)
                return True
        return False

    def pick(self) -> list[tuple[J, int]]:
        """(job, number of its next rows) for one step, at most `max_batch_tokens` rows together.

        Verifications and decodes are never cut; prefills are, and keep their place. Finished jobs are skipped.
        """
        self._prune(self._running)
        self._prune(self._prefills)
        self._promote()
        picked: list[tuple[J, int]] = []
        if not (self._running or self._prefills):
            self._take_parts(self._background, picked, self.max_batch_tokens)
            self.num_prefill_rows = 0
            return picked
        self._num_steps_without_streams = 0 if self._running else self._num_steps_without_streams + 1
        streams_run = self.streams_open and self._num_steps_without_streams < STREAM_MEMORY_STEPS
        most_prefill = self.prefill_rows if streams_run else self.max_batch_tokens
        budget = self.max_batch_tokens
        self.num_prefill_rows = 0
        if self.prefill_paused and self._running:
            self._take_running(picked, budget)
            return picked
        prefill_first = self._num_steps_passed_over >= PREFILL_PATIENCE
        if prefill_first:
            budget -= self._take_prefills(picked, min(most_prefill, budget))
        reserved = min(self.prefill_rows, self.max_batch_tokens // 2) if self._has_share else 0
        if prefill_first or not self._prefills:
            reserved = 0
        if self._running and self._running[0].num_rows > budget - reserved:
            reserved = 0  # it is never cut, so it takes what is left of this step whole, or nothing
        budget -= self._take_running(picked, budget - reserved)
        if not prefill_first:
            num_taken = self._take_prefills(picked, min(most_prefill, budget))
            if self._prefills and not num_taken:
                self._num_steps_passed_over += 1
                return picked
        self._num_steps_passed_over = 0
        return picked

    def _take_running(self, picked: list[tuple[J, int]], budget: int) -> int:
        """Rows taken, at most `budget`."""
        left = budget
        while self._running and self._running[0].num_rows <= left:
            job = self._running.popleft()
            if not job.finished:
                picked.append((job, job.num_rows))
                left -= job.num_rows
        return budget - left

    def _take_prefills(self, picked: list[tuple[J, int]], budget: int) -> int:
        """Rows taken, at most `budget`."""
        num_taken = self._take_parts(self._prefills, picked, budget)
        self.num_prefill_rows += num_taken
        return num_taken

    @staticmethod
    def _take_parts(queue: deque[J], picked: list[tuple[J, int]], budget: int) -> int:
        """Rows taken, at most `budget`; what is left of a job keeps its place."""
        left = budget
        while queue and left > 0:
            job = queue[0]
            num_rows = min(job.num_rows - job.num_rows_done, left)
            if job.finished or job.num_rows - job.num_rows_done <= left:
                queue.popleft()
            if not job.finished:
                picked.append((job, num_rows))
                left -= num_rows
        return budget - left

    def _promote(self) -> None:
        """Jobs that somebody has begun to wait for are in the background no more."""
        for job in [job for job in self._background if not job.is_background]:
            self._background.remove(job)
            self.add(job)

    @staticmethod
    def _prune(queue: deque[J]) -> None:
        while queue and queue[0].finished:
            queue.popleft()
