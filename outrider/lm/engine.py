"""The engine: one thread that runs every session's program and packs what is ready into one model call a step.

The event loop hands programs over and gets answers back; it never waits for a model. Cache blocks are promised when a
sequence opens, taken when it has a forward and freed when it closes, but never while a forward that writes to them is
in flight.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any

import numpy as np

from outrider.errors import PASS_FAILED, Aborted, Internal, Unavailable
from outrider.lm.admission import Admission, post, settle
from outrider.lm.engine_health import EngineHealth
from outrider.lm.engine_stats import EngineStats
from outrider.lm.forwards import fault_of, split_logits
from outrider.lm.interface import Forward, ForwardResult, LanguageModel, PackedBatch, Program, Segment, SegmentResult, T
from outrider.lm.job import Job
from outrider.lm.kv_cache import Sequence
from outrider.lm.placement import Placement
from outrider.lm.prefill_share import PrefillShare
from outrider.lm.scheduler import StepQueue
from outrider.lm.sequence_cache import SequenceCache
from outrider.lm.timing import TimingModel

log = logging.getLogger(__name__)

SWITCH_INTERVAL_S = 0.0005
DEFAULT_IDLE_GRACE_S = 1.0
MAX_WAIT_FOR_BLOCKS_S = 0.05
"""Jobs that wait for blocks look for idle sequences this often while there is nothing to compute."""


class Engine:
    """Runs programs over one model. `start` it, `await open_sequence` and `run` on an event loop, `stop` it.

    max_batch_tokens: most rows of one model call. max_waiting_sessions: opens that may wait for blocks.
    cache_namespace: whatever decides keys and values besides ids and tenant. overcommit: blocks promised to open
    sequences, as a multiple of those there are. idle_grace_s: a sequence without a forward for this long may lose its
    blocks to any other, and is computed again when it has one. prefill_rows: see `StepQueue`; a
    `PrefillShare` is followed, and told of every step.
    """

    def __init__(
        self,
        model: LanguageModel,
        *,
        num_blocks: int,
        block_size: int,
        max_batch_tokens: int,
        max_waiting_sessions: int,
        cache_namespace: str = "",
        overcommit: float = 1.0,
        idle_grace_s: float = DEFAULT_IDLE_GRACE_S,
        prefill_rows: int | PrefillShare | None = None,
    ) -> None:
        self.model = model
        self.timing = TimingModel()
        self.health = EngineHealth()
        self._decides = hasattr(model, "forward_deciding")
        self.block_size = block_size
        self._cache = SequenceCache(num_blocks, block_size, model.copy_block, cache_namespace, model.move_slots)
        read_features = getattr(model, "read_features", None)
        self._admission = Admission(self._cache, model.context_length, max_waiting_sessions, overcommit, read_features)
        self._share = prefill_rows if isinstance(prefill_rows, PrefillShare) else None
        rows = prefill_rows.rows if isinstance(prefill_rows, PrefillShare) else prefill_rows
        self._queue: StepQueue[Job[Any]] = StepQueue(max_batch_tokens, rows)
        self._placement = Placement(self._cache, self._queue, idle_grace_s)
        self._jobs: set[Job[Any]] = set()
        self._thread: threading.Thread | None = None
        # One lock for what both sides touch: arrivals, counters, and which forward is pending on which sequence.
        self._wake = threading.Condition(threading.Lock())
        self._arrivals: deque[Callable[[], None]] = deque()
        self._stopping = False
        self._num_sequences = 0
        self._num_steps = self._num_model_calls = self._num_rows = self._num_padding_rows = 0
        model.allocate_cache(num_blocks, block_size)

    # The event loop's side.

    def start(self) -> None:
        """Starts the engine's thread."""
        # A thread that wakes waits for the interpreter lock until the running one yields it: 5 ms by default, which is
        # more than a whole round may cost beyond model time. Python code runs on both threads here all the time.
        sys.setswitchinterval(min(sys.getswitchinterval(), SWITCH_INTERVAL_S))
        self._thread = threading.Thread(target=self._serve, name="outrider-engine", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Ends the thread after the pass in flight; whatever still waits fails with Aborted. Idempotent."""
        self._admission.stop()
        with self._wake:
            self._stopping = True
            self._wake.notify()
        if self._thread is not None:
            self._thread.join()

    async def open_sequence(
        self, max_length: int, tenant: str = "", priority: int = 0, *, skips: bool = False
    ) -> Sequence:
        """An empty sequence for `max_length` tokens; waits its turn (by priority, then in order) for blocks.

        Computed blocks are shared within a tenant only. Of lower priority, then younger, sequences are preempted first;
        a lower number goes first. skips: all its forwards leave out the layers that the model was told to skip.
        Raises InvalidArgument when it could never fit, ResourceExhausted with a retry delay when the queue is full.
        """
        if skips and not getattr(self.model, "skipped_layers", ()):
            raise Internal("a sequence that skips layers, but the model was told of none")
        sequence = await self._admission.open(max_length, tenant, priority, skips)
        with self._wake:
            self._num_sequences += 1
        return sequence

    def close_sequence(self, sequence: Sequence) -> None:
        """Frees the sequence's blocks, at once or when the pass that writes to them is over. Idempotent, any thread.

        A program whose forward is pending on it is dropped with Aborted; so is one that asks for a forward later.
        """
        with self._wake:
            if sequence.closed:
                return
            sequence.closed = True
            self._num_sequences -= 1
            if sequence.pending is not None:
                self._arrivals.append(functools.partial(self._drop_closed, sequence))
                self._wake.notify()
                return
        self._admission.release(sequence)
        with self._wake:
            self._wake.notify()

    async def run(self, program: Program[T]) -> T:
        """Runs a program on the engine's thread and gives what it returns; its exceptions are raised here.

        Cancelling closes the generator at the next boundary, never during a pass. Raises Unavailable when a pass
        failed, Internal when the program asked for something impossible, Aborted when its sequence was closed or the
        engine stopped.
        """
        job = Job(program, asyncio.get_running_loop())
        self._hand_over(functools.partial(self._start_job, job))
        try:
            return await job.future
        except asyncio.CancelledError:
            with self._wake:
                self._arrivals.append(functools.partial(self._drop, job, None))
                self._wake.notify()
            raise

    def stats(self) -> EngineStats:
        """A consistent snapshot."""
        with self._wake:
            return EngineStats(
                num_steps=self._num_steps,
                num_model_calls=self._num_model_calls,
                num_rows=self._num_rows,
                num_padding_rows=self._num_padding_rows,
                num_free_blocks=self._cache.num_free_blocks,
                num_blocks=self._cache.num_blocks,
                num_sequences=self._num_sequences,
                num_waiting=self._admission.num_waiting,
                num_cached_blocks=self._cache.num_cached_blocks,
                num_cached_tokens=self._placement.num_cached_tokens,
                num_copied_blocks=self._cache.num_copied_blocks,
                num_preemptions=self._placement.num_preemptions,
                num_idle_evictions=self._placement.num_idle_evictions,
                num_layer_rows=getattr(self.model, "num_layer_rows", 0),
                num_promised_blocks=self._admission.num_promised_blocks,
                max_promised_blocks=self._admission.max_promised_blocks,
            )

    def check_integrity(self, sequences: list[Sequence]) -> None:
        """Raises Internal unless exactly the blocks of `sequences` are taken, and all others are free or cached."""
        self._cache.check_integrity(sequences)

    # The engine thread's side.

    def _serve(self) -> None:
        error: Exception = Aborted("the engine stopped")
        try:
            while self._wait_for_work():
                self._step()
        except Exception as fault:
            log.exception("the engine failed")
            error = Unavailable(f"the engine failed: {type(fault).__name__}: {fault}", reason=PASS_FAILED)
            self.health.ended(error.message)
            self._admission.stop()
        with self._wake:
            self._stopping = True
        self._take_arrivals()
        for job in list(self._jobs):
            self._drop(job, error)

    def _wait_for_work(self) -> bool:
        """Sleeps until there is something to compute; False when the engine stops."""
        while not self._stopping:
            self._take_arrivals()
            self._placement.place()
            if self._queue:
                return True
            with self._wake:
                if self._placement and not (self._arrivals or self._stopping):
                    self._wake.wait(MAX_WAIT_FOR_BLOCKS_S)
                else:
                    self._wake.wait_for(lambda: self._arrivals or self._stopping)
        return False

    def _take_arrivals(self) -> None:
        """New programs start, cancelled and closed ones end: only here, between passes."""
        with self._wake:
            arrivals, self._arrivals = self._arrivals, deque()
        for arrival in arrivals:
            arrival()

    def _step(self) -> None:
        """One model call over all that is ready."""
        if self._share is not None:
            num_prompts = self._queue.num_prefills
            self._share.weigh(num_prompts, self._num_sequences - num_prompts)
            self._queue.prefill_rows, self._queue.prefill_paused = self._share.step_rows, self._share.is_in_debt
        self._queue.streams_open = self._num_sequences > self._queue.num_prefills
        picked = self._queue.pick()
        if not picked:
            return
        num_prefill_rows = self._queue.num_prefill_rows
        batch = PackedBatch(tuple(job.segment(num_rows) for job, num_rows in picked))
        started_ns = time.perf_counter_ns()
        self.health.begins()
        try:
            results = self._forward(batch)
        except Exception as error:
            self.health.failed()
            log.exception("a model pass over %d rows failed", batch.num_rows)
            text = f"the model pass failed: {type(error).__name__}: {error}"
            for job, _ in picked:
                self._drop(job, Unavailable(text, reason=PASS_FAILED))
            return
        self.health.passed()
        compute_ns = time.perf_counter_ns() - started_ns
        for (job, num_rows), segment, result in zip(picked, batch.segments, results, strict=True):
            job.started_ns = job.started_ns or started_ns
            job.compute_ns += compute_ns
            self._hand_back(job, num_rows, segment, result, batch.num_rows)
        if any(s.num_chained or s.num_kept or s.num_early or s.skips for s in batch.segments):
            return  # its time is that of several passes, or of a part of one
        ms = (time.perf_counter_ns() - started_ns) / 1e6
        self.timing.observe(batch, ms)
        if self._share is not None:
            self._share.observe(batch.num_rows - num_prefill_rows, num_prefill_rows, ms)

    def _forward(self, batch: PackedBatch) -> list[SegmentResult]:
        model: Any = self.model
        num_computed_before = getattr(model, "num_rows_computed", 0)
        if any(s.decision is not None for s in batch.segments):
            results = model.forward_deciding(batch)
        else:
            results = split_logits(model.forward(batch), batch, model.vocab_size)
        num_rows = batch.num_rows + sum(len(r.decided) - 1 for r in results if r.decided is not None)
        num_computed = getattr(model, "num_rows_computed", num_rows) - num_computed_before
        with self._wake:
            self._num_steps += 1
            self._num_model_calls += 1
            self._num_rows += num_rows
            self._num_padding_rows += num_computed - num_rows
        return results

    def _hand_back(
        self, job: Job[Any], num_rows: int, segment: Segment, segment_result: SegmentResult, batch_rows: int
    ) -> None:
        """The chunk is in the cache; after a forward's last chunk its program goes on, maybe to its next forward."""
        assert job.forward is not None
        sequence = job.sequence
        job.num_rows_done += num_rows
        logits, decided = segment_result.logits, segment_result.decided
        if segment.num_logits and logits is not None:
            job.logits.append(logits)
        with self._wake:
            job.take_up(segment.num_cached_tokens + num_rows)
            if decided is not None:
                job.take_up_chained([int(line[0]) for line in decided[:-1]])
            self._cache.publish(sequence)
            if sequence.closed:
                # _drop_closed is already on its way here; do not let the program see a forward it may not build on.
                return
            if job.num_rows_done < job.num_rows:
                if logits is not None and len(job.logits) and job.logits[-1] is logits:
                    job.logits[-1] = logits.copy()  # the model may reuse its buffer in the next chunk
                return
            sequence.pending = None
            sequence.last_used_s = time.monotonic()
        self._placement.leave(job)
        parts = job.logits
        none = np.empty((0, self.model.vocab_size), np.float32)
        whole = parts[0] if len(parts) == 1 else np.concatenate(parts) if parts else none
        result = ForwardResult(
            logits=whole,
            queue_us=(job.started_ns - job.ready_ns) // 1000,
            compute_us=job.compute_ns // 1000,
            num_batch_rows=batch_rows,
            num_cached_tokens=job.num_cached_tokens or 0,
            decided=decided,
        )
        job.forward = None
        self._advance(job, functools.partial(job.program.send, result))

    def _start_job(self, job: Job[Any]) -> None:
        self._jobs.add(job)
        self._advance(job, functools.partial(next, job.program))

    def _advance(self, job: Job[Any], resume: Callable[[], Forward]) -> None:
        """Lets the program run to its next yield, its return or its exception."""
        try:
            forward = resume()
        except StopIteration as stop:
            self._finish(job, stop.value, None)
        except BaseException as error:
            self._finish(job, None, error)
        else:
            self._accept(job, forward)

    def _accept(self, job: Job[Any], forward: Forward) -> None:
        error: Exception | None = fault_of(forward, self.model.vocab_size, getattr(self.model, "exit_layer", 0))
        if error is None:
            sequence: Any = forward.sequence
            with self._wake:
                if sequence.closed:
                    error = Aborted("the sequence was closed")
                elif sequence.pending is not None:
                    error = Internal("two programs asked for a forward of one sequence at once")
                else:
                    sequence.pending = job
        if error is not None:
            self._drop(job, error)
            return
        job.wants(forward, decides=self._decides)
        self._placement.add(job)

    def _drop(self, job: Job[Any], error: Exception | None) -> None:
        """Closes the program at this boundary, and fails its awaiter with `error` unless that is gone (None)."""
        if job.finished:
            return
        try:
            job.program.close()
        except Exception:
            log.exception("a program failed while it was closed")
        if job.forward is not None:
            sequence = job.sequence
            self._placement.leave(job)
            with self._wake:
                sequence.pending = None
                is_closed = sequence.closed
            if is_closed:
                self._admission.release(sequence)
        self._finish(job, None, error)

    def _drop_closed(self, sequence: Sequence) -> None:
        if sequence.pending is not None:
            self._drop(sequence.pending, Aborted("the sequence was closed"))

    def _finish(self, job: Job[Any], result: Any, error: BaseException | None) -> None:
        job.finished = True
        self._jobs.discard(job)
        post(job.loop, settle, job.future, result, error)

    def _hand_over(self, arrival: Callable[[], None]) -> None:
        with self._wake:
            if self._stopping or self._thread is None:
                raise Unavailable("the engine is not running", retry_delay_s=1.0)
            self._arrivals.append(arrival)
            self._wake.notify()
