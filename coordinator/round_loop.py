"""The life of a stream: first token from the prefill, then rounds of draft, verify, commit, until the text ends."""

from __future__ import annotations

import dataclasses
import time

from coordinator.drafting import DraftSide
from coordinator.gamma.policy import Choice, GammaPolicy, RoundReport
from coordinator.links import Timed
from coordinator.outbox import Outbox
from coordinator.stream import Stream
from coordinator.verifying import TargetLost, TargetSide
from outrider.results import Step
from outrider.sampling.params import Origin
from outrider.serving.session_calls import SealedProposal

PLAIN = Choice("", 0, "plain")


class RoundLoop:
    """Drives one stream. `run` returns when it has finished; whatever ends it, both sides must be closed after."""

    def __init__(
        self, stream: Stream, target: TargetSide, draft: DraftSide, policy: GammaPolicy, outbox: Outbox, arrived: float
    ) -> None:
        self._stream = stream
        self._target = target
        self._draft = draft
        self._policy = policy
        self._outbox = outbox
        self._arrived = arrived

    async def run(self) -> None:
        stream = self._stream
        if not stream.finished:
            self._draft.open_soon()
            await self._first_token()
        while not stream.finished:
            credit = await self._outbox.room(stream.choice)
            choice = await self._choose(credit)
            if choice.num_draft_tokens:
                await self._round(choice)
            else:
                await self._plain_run(choice)
        self._outbox.put(stream.complete(1000 * (time.perf_counter() - self._arrived)))

    async def _first_token(self) -> None:
        await self._outbox.room(self._stream.choice)
        timed = await self._target.open()
        for told in timed.prompt_logprobs:
            self._outbox.put(told)
        statistics = self._stream.statistics
        statistics.queue_ms += timed.queue_ms
        statistics.prefill_ms = timed.verdict.compute_us / 1000
        statistics.num_cached_tokens = timed.verdict.num_cached_tokens
        statistics.time_to_first_token_ms = 1000 * (time.perf_counter() - self._arrived)
        self._commit(timed, Choice("", 0, "prefill"), timed.elapsed_ms)

    async def _choose(self, credit: int) -> Choice:
        """The policy's choice of what can be done now: no draft after the last token, none from a worker that owes."""
        max_draft_tokens = min(self._stream.request.max_draft_tokens, self._stream.num_remaining_tokens - 1)
        credit = min(credit, self._stream.num_remaining_tokens)
        if not self._stream.request.max_draft_tokens:
            return self._policy.choose(0, credit, ())
        ready, reason = await self._draft.ready()
        if not ready:
            return Choice("", 0, reason, min(credit, self._draft.patience_tokens))
        return self._policy.choose(max_draft_tokens, credit, self._draft.drafters)

    async def _round(self, choice: Choice) -> None:
        """Draft, verify, commit."""
        started = time.perf_counter()
        drafted = await self._draft.propose(choice)
        try:
            timed = await self._target.verify(drafted.proposal)
        except TargetLost as lost:
            timed, choice = await self._target.reopen(lost), PLAIN
        round_ms = 1000 * (time.perf_counter() - started)
        verdict = timed.verdict
        if verdict.proposal_fault:
            self._stream.statistics.num_dropped_proposals += 1
        num_accepted = self._commit(timed, choice, round_ms, drafted.proposal, drafted.network_ms)
        self._policy.observe(
            RoundReport(
                choice=choice,
                num_draft_tokens=verdict.num_draft_tokens,
                num_accepted=num_accepted,
                num_committed=len(verdict.committed_ids),
                ended=self._stream.finished,
                draft_ms=(drafted.proposal.queue_us + drafted.proposal.compute_us) / 1000,
                draft_network_ms=drafted.network_ms,
                verify_ms=timed.queue_ms + timed.work_ms,
                verify_network_ms=timed.network_ms,
                wait_ms=drafted.wait_ms,
                round_ms=round_ms,
            )
        )

    async def _plain_run(self, choice: Choice) -> None:
        """The target decodes by itself, token by token, without a draft call and without a round trip per token."""
        started = time.perf_counter()
        num_tokens, verify_ms, network_ms = 0, 0.0, 0.0
        try:
            async for timed in self._target.decode(choice.credit_tokens):
                self._commit(timed, choice, timed.elapsed_ms)
                num_tokens += 1
                verify_ms += timed.queue_ms + timed.work_ms
                network_ms = network_ms or timed.network_ms
                if self._stream.finished:
                    break
        except TargetLost as lost:
            self._commit(await self._target.reopen(lost), PLAIN, 0.0)
        self._policy.observe(
            RoundReport(
                choice=choice,
                num_committed=num_tokens,
                ended=self._stream.finished,
                verify_ms=verify_ms,
                verify_network_ms=network_ms,
                round_ms=1000 * (time.perf_counter() - started),
            )
        )

    def _commit(
        self,
        timed: Timed,
        choice: Choice,
        round_ms: float,
        proposal: SealedProposal | None = None,
        draft_network_ms: float = 0.0,
    ) -> int:
        """Log, text and statistics move to the verdict's end together; the client gets one chunk. Returns the number of
        accepted drafts."""
        proposal = proposal or SealedProposal()
        verdict, statistics = timed.verdict, self._stream.statistics
        draft_ms = (proposal.queue_us + proposal.compute_us) / 1000
        network_ms = timed.network_ms + draft_network_ms
        statistics.draft_ms += draft_ms
        statistics.verify_ms += timed.work_ms
        statistics.network_ms += network_ms
        statistics.num_proposal_bytes += 2 * proposal.num_bytes
        committing = time.perf_counter()
        chunk = self._stream.commit(verdict, drafter=proposal.drafter or choice.drafter)
        if self._stream.request.report_steps:
            step = Step(
                num_draft_tokens_wanted=choice.num_draft_tokens,
                num_draft_tokens=verdict.num_draft_tokens,
                num_accepted_draft_tokens=chunk.origins.count(Origin.ACCEPTED),
                drafter=proposal.drafter,
                draft_ms=draft_ms,
                verify_ms=timed.work_ms,
                network_ms=network_ms,
                queue_ms=timed.queue_ms,
                round_ms=round_ms,
                reason=choice.reason,
                sampling_ms=timed.sampling_ms,
                emit_ms=1000 * (time.perf_counter() - committing),
            )
            chunk = dataclasses.replace(chunk, step=step)
        self._outbox.put(chunk)
        return verdict.num_accepted
