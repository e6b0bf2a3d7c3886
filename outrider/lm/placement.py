"""Which jobs may be computed: those whose every row has a cache block. Whose blocks go when there are too few.

A job takes computed blocks of its prefix from the cache and blocks to write to for the rest. One whose prefix is being
computed by another job waits for that, so that choices of one prompt compute it once. When blocks are short, sequences
give up what they do not need yet; then those that have been idle for `idle_grace_s` are evicted, the longest idle
first; then those of lower priority or, of the same priority, younger ones, the last in rank first. An evicted sequence
keeps its ids and is computed again when its turn comes.

The first in rank of the waiting jobs can evict all others but those before it, which are running or will be idle; alone
it fits. So it is never stuck for good, and neither is the next.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from outrider.lm.job import Job
from outrider.lm.kv_cache import Sequence
from outrider.lm.scheduler import StepQueue
from outrider.lm.sequence_cache import SequenceCache


class Placement:
    """Belongs to the engine's thread; `place` is called between passes only."""

    def __init__(
        self,
        cache: SequenceCache,
        queue: StepQueue[Job[Any]],
        idle_grace_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.num_preemptions = 0
        """Sequences evicted while a forward of theirs waited or was half done."""
        self.num_idle_evictions = 0
        self.num_cached_tokens = 0
        """Tokens of forwards that came from the prefix cache."""
        self._cache = cache
        self._queue = queue
        self._idle_grace_s = idle_grace_s
        self._clock = clock
        self._waiting: list[Job[Any]] = []
        self._leaders: dict[bytes, Job[Any]] = {}
        """Per block hash the queued job that is about to compute that block."""

    def __bool__(self) -> bool:
        """Whether jobs wait here."""
        return bool(self._waiting)

    def add(self, job: Job[Any]) -> None:
        """A job with a new forward."""
        self._waiting.append(job)

    def leave(self, job: Job[Any]) -> None:
        """The job's forward is computed, or never will be."""
        for digest in job.led_hashes:
            if self._leaders.get(digest) is job:
                del self._leaders[digest]
        job.led_hashes = []

    def place(self) -> None:
        """Moves the jobs that can be computed to the step queue, the first in rank first."""
        jobs, self._waiting = sorted(self._waiting, key=lambda job: job.sequence.rank), []
        self._cache.settle(job.sequence for job in jobs)
        for job in jobs:
            if not job.finished and not self._place(job):
                self._waiting.append(job)

    def _place(self, job: Job[Any]) -> bool:
        if not self._use_cached(job):
            return False
        sequence, cache = job.sequence, self._cache
        num_missing = cache.reserve(sequence, job.reach)
        if num_missing:
            cache.reclaim_spare()
            num_missing = cache.reserve(sequence, job.reach)
        if num_missing:
            victims = self._victims(sequence, num_missing) if not job.is_background else []
            for victim in victims:
                self._evict(victim)
            if not victims or cache.reserve(sequence, job.reach):
                return False
        job.begin()
        self._queue.add(job)
        if job.chain and not job.is_background:
            job.led_hashes = job.chain[sequence.num_computed // cache.block_size :]
            for digest in job.led_hashes:
                self._leaders.setdefault(digest, job)
        return True

    def _use_cached(self, job: Job[Any]) -> bool:
        """Takes up what is computed already. False: the next block is being computed by another job."""
        sequence, size = job.sequence, self._cache.block_size
        start, num_final = sequence.num_computed // size, min(sequence.committed_length, job.tree_start)
        if sequence.num_computed % size == 0 and num_final // size > start:
            if job.chain is None:
                job.chain = self._cache.chain(sequence, job.tokens(0, num_final), num_final)
            missing = self._cache.first_missing(job.chain, start)
            if missing < len(job.chain) and missing * size < job.max_cached:
                leader = self._leaders.get(job.chain[missing])
                if leader is not None and leader is not job:
                    return False
            self._cache.adopt(sequence, job.chain, job.max_cached)
            job.take_up(sequence.num_computed)
        if job.num_cached_tokens is None:
            job.num_cached_tokens = max(0, sequence.num_computed - job.num_before)
            self.num_cached_tokens += job.num_cached_tokens
        return True

    def _victims(self, requester: Sequence, num_missing: int) -> list[Sequence]:
        """As few as give `num_missing` blocks, in the order told above; none if all together would not."""
        now = self._clock()
        others = [s for s in self._cache.holders() if s is not requester]
        idle = [s for s in others if s.pending is None and now - s.last_used_s >= self._idle_grace_s]
        idle.sort(key=lambda s: s.last_used_s)
        behind = sorted((s for s in others if s not in idle and s.rank > requester.rank), key=lambda s: s.rank)
        victims: list[Sequence] = []
        for sequence in [*idle, *reversed(behind)]:
            victims.append(sequence)
            if self._cache.num_freed_by(victims) >= num_missing:
                return victims
        return []

    def _evict(self, sequence: Sequence) -> None:
        job = sequence.pending
        if job is None:
            self.num_idle_evictions += 1
        else:
            self.num_preemptions += 1
            if self._queue.remove(job):
                self.leave(job)
                self._waiting.append(job)
        self._cache.evict(sequence)
