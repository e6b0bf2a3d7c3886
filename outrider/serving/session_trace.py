"""The spans of one session on a worker, where its request is traced: of each answer, from the times that it carries."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator

from outrider.drafting.proposal import Proposal
from outrider.serving.messages import Branches, Verdict
from outrider.serving.request_context import CURRENT
from outrider.serving.tracing import Attributes, Part, Tracing


class SessionTrace:
    """Of the call at hand. A session is a part of a request's trace, or of none."""

    def __init__(self, tracing: Tracing, method: str) -> None:
        """method: full name of the call."""
        caller = CURRENT.get().trace
        self._recording = tracing.begin(method, caller) if caller is not None else None
        self._num_verdicts = 0

    def verified(self, verdict: Verdict) -> None:
        """A verdict is ready. The first one of a session has the prompt's pass in it."""
        if self._recording is None:
            return
        self._num_verdicts += 1
        steps = (
            ("queue", verdict.queue_us),
            ("draft", verdict.draft_us),
            ("compute", verdict.compute_us),
            ("sampling", verdict.sampling_us),
        )
        about: Attributes = {
            "outrider.num_draft_tokens": verdict.num_draft_tokens,
            "outrider.num_accepted_draft_tokens": verdict.num_accepted,
            "outrider.num_tokens": len(verdict.committed_ids),
            "outrider.num_batch_rows": verdict.num_batch_rows,
            "outrider.num_cached_tokens": verdict.num_cached_tokens,
        }
        self._add("verify" if self._num_verdicts > 1 else "prefill", steps, about)

    def proposed(self, proposal: Proposal | None) -> None:
        """Drafts are ready; None: none were wanted."""
        if self._recording is None or proposal is None:
            return
        about: Attributes = {
            "outrider.drafter": proposal.drafter,
            "outrider.num_draft_tokens": len(proposal),
            "outrider.num_ingested_tokens": proposal.num_ingested_tokens,
        }
        steps = (("catch_up", proposal.catch_up_us), ("queue", proposal.queue_us), ("compute", proposal.compute_us))
        self._add("draft", steps, about)

    def drafted_ahead(self, branches: Branches | None) -> None:
        """Drafts for outcomes not known yet."""
        if self._recording is None or branches is None:
            return
        about = {"outrider.num_branches": len(branches.proposals)}
        self._add("draft_ahead", (("queue", branches.queue_us), ("compute", branches.compute_us)), about)

    @contextlib.contextmanager
    def timed(self, name: str) -> Iterator[None]:
        """The block is a span."""
        start_ns = time.time_ns() if self._recording is not None else 0
        try:
            yield
        finally:
            if self._recording is not None:
                self._recording.add(Part(name, start_ns, time.time_ns()))

    def ended(self) -> None:
        """Whatever ended it."""
        if self._recording is not None:
            self._recording.end()

    def _add(self, name: str, steps: tuple[tuple[str, int], ...], about: Attributes) -> None:
        """What has just ended: `steps` of so many microseconds, one after the other."""
        assert self._recording is not None
        end_ns = time.time_ns()
        start_ns = at_ns = end_ns - 1000 * sum(us for _, us in steps)
        parts = []
        for step, us in steps:
            if us:
                parts.append(Part(step, at_ns, at_ns + 1000 * us))
                at_ns += 1000 * us
        self._recording.add(Part(name, start_ns, end_ns, about, parts))
