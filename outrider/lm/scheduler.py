"""What the next step computes: running streams first, prefills in the room that is left, nobody waits for ever.

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


J = TypeVar("J", bound=Job)

MAX_CATCH_UP_ROWS = 16
"""A forward with this few rows counts as a running stream even where it wants logits of its last row only."""

PREFILL_PATIENCE = 3
"""Steps that full batches of running streams may pass over a waiting prefill before it goes first once."""


class StepQueue(Generic[J]):
    """Ready jobs. `pick` says how many rows of which go into a step; a job stays until its last row is picked."""

    def __init__(self, max_batch_tokens: int) -> None:
        self.max_batch_tokens = max_batch_tokens
        self._running: deque[J] = deque()
        self._prefills: deque[J] = deque()
        self._num_steps_passed_over = 0

    def __bool__(self) -> bool:
        return bool(self._running or self._prefills)

    def add(self, job: J) -> None:
        """A verification or decode wants logits of (nearly) all its rows and fits a step whole; the rest is prefill."""
        is_running = job.num_rows <= min(self.max_batch_tokens, max(MAX_CATCH_UP_ROWS, job.num_logits))
        (self._running if is_running else self._prefills).append(job)

    def remove(self, job: J) -> bool:
        """Takes a job out again; False when it is not here."""
        for queue in (self._running, self._prefills):
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
        picked: list[tuple[J, int]] = []
        prefill_first = self._num_steps_passed_over >= PREFILL_PATIENCE
        budget = self.max_batch_tokens
        if prefill_first:
            budget = self._take_prefills(picked, budget)
        budget = self._take_running(picked, budget)
        if not prefill_first:
            left = self._take_prefills(picked, budget)
            if self._prefills and left == budget:
                self._num_steps_passed_over += 1
                return picked
        self._num_steps_passed_over = 0
        return picked

    def _take_running(self, picked: list[tuple[J, int]], budget: int) -> int:
        while self._running and self._running[0].num_rows <= budget:
            job = self._running.popleft()
            if not job.finished:
                picked.append((job, job.num_rows))
                budget -= job.num_rows
        return budget

    def _take_prefills(self, picked: list[tuple[J, int]], budget: int) -> int:
        while self._prefills and budget > 0:
            job = self._prefills[0]
            num_left = job.num_rows - job.num_rows_done
            if job.finished or num_left <= budget:
                self._prefills.popleft()
            if not job.finished:
                picked.append((job, min(num_left, budget)))
                budget -= min(num_left, budget)
        return budget

    @staticmethod
    def _prune(queue: deque[J]) -> None:
        while queue and queue[0].finished:
            queue.popleft()
