"""The spans of one stream: waiting, then a span a round with one for each of its parts. Made of the rounds' records."""

from __future__ import annotations

import time

from coordinator.round_parts import RoundClock
from coordinator.stream import Stream
from coordinator.traces import KeepStep
from outrider.results import Step
from outrider.serving.request_context import CURRENT, RequestContext
from outrider.serving.tracing import Attributes, Part

QUEUE, ROUND, DELIVER = "queue", "round", "deliver"


class StreamTrace:
    """Of the request at hand, if it is recorded; sessions that are opened in its task hang on it. Made once the stream
    has its place."""

    def __init__(self, stream: Stream) -> None:
        current = CURRENT.get()
        self._stream = stream
        self._recording = None
        self.keeps: tuple[KeepStep, ...] = ()
        """What is to be told of each round: nothing, where nobody records it."""
        if current.recording is None:
            return
        self._arrived_ns = current.recording.start_ns
        self._recording = recording = current.recording.child("stream", self._arrived_ns)
        CURRENT.set(RequestContext(current.request_id, recording.context, recording))
        self._clock = RoundClock(stream.statistics.queue_ms)
        recording.add(self._part(QUEUE, 0.0, stream.statistics.queue_ms))
        self.keeps = (self._keep,)

    def ended(self) -> None:
        """Whatever ended it."""
        if self._recording is None:
            return
        stream, now_ns = self._stream, time.time_ns()
        # from the last round on
        self._recording.add(Part(DELIVER, min(self._at_ns(self._clock.at_ms), now_ns), now_ns))
        told = stream.statistics.speculation()
        self._recording.end(
            {
                "outrider.choice": stream.choice,
                "gen_ai.response.finish_reasons": stream.finish.name.lower(),
                "gen_ai.usage.output_tokens": len(stream.log.output_ids),
                "outrider.num_spec_steps": told.num_spec_steps,
                "outrider.draft_acceptance_rate": told.draft_acceptance_rate,
                "outrider.mean_acceptance_length": told.mean_acceptance_length,
            },
            end_ns=now_ns,
        )

    def _keep(self, choice: int, step: Step) -> None:
        start_ms = self._clock.at_ms
        parts = [self._part(*timed) for timed in self._clock.lay(step)]
        about: Attributes = {
            "outrider.drafter": step.drafter,
            "outrider.reason": step.reason,
            "outrider.num_draft_tokens": step.num_draft_tokens,
            "outrider.num_accepted_draft_tokens": step.num_accepted_draft_tokens,
            "outrider.num_tokens": step.num_tokens,
            "outrider.ahead": step.ahead,
        }
        assert self._recording is not None
        self._recording.add(Part(ROUND, self._at_ns(start_ms), self._at_ns(self._clock.at_ms), about, parts))

    def _part(self, name: str, start_ms: float, end_ms: float) -> Part:
        return Part(name, self._at_ns(start_ms), self._at_ns(end_ms))

    def _at_ns(self, ms: float) -> int:
        return self._arrived_ns + round(1e6 * ms)
