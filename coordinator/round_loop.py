"""The life of a stream: first token from the prefill, then rounds of draft, verify, commit, until the text ends."""

from __future__ import annotations

import asyncio
import dataclasses
import time
from collections.abc import Callable

from coordinator.drafting import NO_DRAFT_WORKER, Drafted, DraftSide
from coordinator.gamma.policy import HIT, LATE, Choice, GammaPolicy, RoundReport
from coordinator.local_drafts import LocalDrafts
from coordinator.outbox import Outbox
from coordinator.statistics import Drafting
from coordinator.stream import Stream
from coordinator.target_link import Timed
from coordinator.traces import CAUSES
from coordinator.verifying import TargetSide
from outrider.drafting.guess import Guess
from outrider.errors import OutriderError
from outrider.results import GammaCause, Step
from outrider.sampling.noise import hash_ids
from outrider.sampling.params import Origin
from outrider.serving.messages import Header
from outrider.serving.session_calls import SealedProposal, continued, own_drafts

NOTHING = Drafted(SealedProposal())


class RoundLoop:
    """Drives one stream. `run` returns when it has finished; whatever ends it, both sides must be closed after."""

    def __init__(
        self,
        stream: Stream,
        target: TargetSide,
        draft: DraftSide,
        local: LocalDrafts,
        policy: GammaPolicy,
        outbox: Outbox,
        arrived: float,
        keep_step: Callable[[int, Step], None] = lambda choice, step: None,
    ) -> None:
        """arrived: the request, in `time.perf_counter`. keep_step: gets a record of each round where any are wanted."""
        self._keep_step = keep_step
        self._stream = stream
        self._target = target
        self._draft = draft
        self._local = local
        self._policy = policy
        self._outbox = outbox
        self._arrived = arrived
        self._sent: tuple[Header, Choice, SealedProposal] | None = None
        """The round that was sent to the target before the verdict of the one before, and what it is on top of."""

    async def run(self) -> None:
        stream = self._stream
        if not stream.finished:
            self._draft.open_soon()
            await asyncio.gather(self._first_token(), self._local.prepare())
        while not stream.finished:
            credit = await self._outbox.room(stream.choice)
            if self._sent is not None and self._sent[0] == stream.log.header(0):
                # though the worker may be lost by now: it may have decided the round, and over these drafts
                await self._round(*self._sent[1:])
                continue
            choice = await self._choose(credit)
            if choice.is_run:
                await self._run(choice)
            else:
                await self._round(choice)
        stream.statistics.outlooks = self._policy.outlooks()
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
        credit = min(credit, self._stream.num_remaining_tokens)
        if not self._stream.request.max_draft_tokens:
            return self._policy.choose(0, credit, ())
        guesses, inside = self._local.guesses(self._room), self._target.candidates
        if not self._draft.wanted:
            return self._policy.choose(self._room, credit, inside, guesses)
        ready, why_not = await self._draft.ready()
        if ready:
            return self._policy.choose(self._room, credit, (*self._draft.candidates, *inside), guesses)
        choice = self._policy.choose(self._room, min(credit, self._draft.patience_tokens), inside, guesses)
        # nobody is missed where none is there and others were weighed: plain decoding may have been best
        is_chosen = choice.candidate is not None or (why_not == NO_DRAFT_WORKER and (inside or guesses))
        return choice if is_chosen else dataclasses.replace(choice, reason=why_not)

    @property
    def _room(self) -> int:
        """Drafts that the next round may carry: none for the last token of the stream."""
        return min(self._stream.request.max_draft_tokens, self._stream.num_remaining_tokens - 1)

    async def _drafts(self, choice: Choice) -> tuple[Drafted, str, int]:
        """What to verify, and which local drafter made how many of the last drafts: all of them where it was chosen, or
        where the chosen drafter came too late; or those that go on after a chain of the chosen one."""
        guesses = {guess.drafter: guess for guess in self._local.guesses(self._room)}
        if choice.tree is not None:
            return Drafted(self._local.seal_tree(choice.tree)), choice.drafter, len(choice.tree)
        if choice.drafter in guesses:
            guess = guesses[choice.drafter].cut(choice.num_draft_tokens)
            return Drafted(self._local.seal(guess)), choice.drafter, len(guess)
        drafted = await self._draft.propose(choice)
        chain, num_drafted = drafted.proposal, drafted.proposal.num_draft_tokens
        if drafted.wait_ms and guesses:
            guess = max(guesses.values(), key=Guess.expected_accepted).cut(choice.num_draft_tokens)
            return dataclasses.replace(drafted, proposal=self._local.seal(guess)), guess.drafter, len(guess)
        if num_drafted < choice.num_draft_tokens or chain.is_tree or num_drafted >= self._room:
            return drafted, "", 0
        guess = self._local.continuation(chain.token_ids, self._room - num_drafted)
        guess = guess.cut(self._policy.num_continued(choice, num_drafted, guess))
        if not guess:
            return drafted, "", 0
        return dataclasses.replace(drafted, proposal=continued(chain, guess.token_ids)), guess.drafter, len(guess)

    async def _verify(self, proposal: SealedProposal, choice: Choice) -> Timed:
        """While the verdict is on its way, the round after it is sent for the likeliest outcome, as soon as its branch
        is there. Which one that is was decided before anybody looked at what was drawn in it."""
        self._sent = None
        if not (choice.ahead and self._target.pipelines):
            return await self._target.verify(proposal)
        sending = asyncio.create_task(self._send_next(proposal, choice))
        try:
            timed = await self._target.verify(proposal)
        finally:
            sending.cancel()  # it sends at once or not at all
            (fault,) = await asyncio.gather(sending, return_exceptions=True)
        if isinstance(fault, Exception) and not isinstance(fault, OutriderError):
            raise fault  # a draft worker that is lost is found by the next look
        return timed

    async def _send_next(self, proposal: SealedProposal, choice: Choice) -> None:
        base, outcome = self._stream.log.header(0), await self._draft.foretold()
        ids = (*proposal.token_ids[: outcome.num_accepted], outcome.token_id)
        if len(ids) <= outcome.num_accepted or hash_ids(ids, base.prefix_hash) != outcome.prefix_hash:
            return  # no outcome of this round
        after = Header(base.epoch, base.base_length + len(ids), outcome.prefix_hash)
        sent = dataclasses.replace(choice, num_draft_tokens=outcome.branch.num_draft_tokens)
        self._sent = after, sent, outcome.branch
        self._stream.statistics.ahead.num_pipelined += 1
        self._target.verify_next(after.base_length, after.prefix_hash, outcome.token_id, outcome.branch)

    async def _round(self, choice: Choice, sent: SealedProposal | None = None) -> None:
        """Draft, verify, commit. sent: the drafts that the target has already."""
        started = time.perf_counter()
        if sent is None:
            drafted, local_drafter, num_local = await self._drafts(choice)
        else:
            drafted, local_drafter, num_local = self._draft.use(sent, choice), "", 0
            self._stream.statistics.ahead.num_pipelined_used += 1
        timed = await self._verify(drafted.proposal, choice)
        round_ms = 1000 * (time.perf_counter() - started)
        verdict = timed.verdict
        if verdict.proposal_fault:
            self._stream.statistics.num_dropped_proposals += 1
        if num_local < drafted.proposal.num_draft_tokens:
            self._draft.verified(verdict)
        # what the target cut off were the last drafts
        num_local = max(0, num_local - (drafted.proposal.num_draft_tokens - verdict.num_draft_tokens))
        reason = drafted.why_none or choice.reason
        by = Drafting(choice.drafter, reason, local_drafter, num_local, choice.expected_tokens_per_s, round_ms)
        num_accepted = self._commit(timed, choice, round_ms, drafted, by)
        if choice.drafter not in ("", local_drafter):
            self._draft.count(drafted, verdict.num_draft_tokens - num_local, num_accepted, round_ms)
        if choice.price is not None:
            self._draft.judge(verdict, verdict.num_draft_tokens - num_local)
        if timed.is_recovery:
            return
        if drafted.ahead in (HIT, LATE):  # it is as long as it was wanted to be a round ago
            choice = dataclasses.replace(choice, num_draft_tokens=drafted.proposal.num_draft_tokens)
        self._policy.observe(
            RoundReport(
                choice=choice,
                is_local=choice.drafter == local_drafter != "",
                num_draft_tokens=verdict.num_draft_tokens,
                num_local=num_local,
                num_accepted=num_accepted,
                num_committed=len(verdict.committed_ids),
                soft_acceptances=verdict.soft_acceptances,
                parents=() if verdict.proposal_fault else drafted.proposal.parents,
                ended=self._stream.finished,
                draft_ms=drafted.proposal.draft_ms,
                draft_network_ms=drafted.network_ms,
                verify_ms=timed.queue_ms + timed.work_ms,
                verify_network_ms=timed.network_ms,
                wait_ms=drafted.wait_ms,
                round_ms=round_ms,
                draft_queue_ms=drafted.proposal.queue_ms,
                draft_catch_up_ms=drafted.catch_up_ms,
                num_ingested_tokens=drafted.proposal.num_ingested_tokens,
                verify_queue_ms=timed.queue_ms,
                target=timed.target,
                num_batch_rows=verdict.num_batch_rows,
                ahead=drafted.ahead,
                branch_wait_ms=drafted.branch_wait_ms,
                branch_build_ms=drafted.build_ms,
            )
        )

    async def _run(self, choice: Choice) -> None:
        """The target goes on by itself, plainly or with drafts of its own, without a round trip for each step."""
        started = time.perf_counter()
        num_tokens, verify_ms, queue_ms, network_ms, interrupted = 0, 0.0, 0.0, 0.0, False
        num_rows, target, was_lost = 0, "", False
        async for timed in self._target.decode(choice):
            num_wanted = min(choice.num_draft_tokens, self._room, choice.credit_tokens - num_tokens - 1)
            if num_wanted > 0:
                self._own_step(timed, dataclasses.replace(choice, num_draft_tokens=num_wanted), not num_tokens)
            else:
                self._commit(timed, choice, timed.elapsed_ms)
            num_tokens += len(timed.verdict.committed_ids)
            verify_ms += timed.queue_ms + timed.work_ms
            queue_ms += timed.queue_ms
            network_ms = network_ms or timed.network_ms
            num_rows, target = num_rows + timed.verdict.num_batch_rows, timed.target
            was_lost |= timed.is_recovery
            if self._stream.finished:
                break
            if not interrupted and self._policy.interrupts(self._local.guesses(self._room)):
                interrupted = True
                await self._target.stop_decoding()
        if choice.num_draft_tokens or was_lost:
            return  # each step was reported; or it took a prefill
        self._policy.observe(
            RoundReport(
                choice=choice,
                num_committed=num_tokens,
                ended=self._stream.finished,
                verify_ms=verify_ms,
                verify_network_ms=network_ms,
                round_ms=1000 * (time.perf_counter() - started),
                verify_queue_ms=queue_ms,
                target=target,
                num_batch_rows=num_rows / max(1, num_tokens),
            )
        )

    def _own_step(self, timed: Timed, choice: Choice, is_first: bool) -> None:
        """A step of a run that the target has drafted for."""
        verdict = timed.verdict
        drafted = Drafted(own_drafts(verdict, choice.drafter))
        if verdict.proposal_fault:
            self._stream.statistics.num_draft_failures += 1
        num_accepted = self._commit(timed, choice, timed.elapsed_ms, drafted)
        if timed.is_recovery:
            return
        self._policy.observe(
            RoundReport(
                choice=choice,
                num_draft_tokens=verdict.num_draft_tokens,
                num_accepted=num_accepted,
                num_committed=len(verdict.committed_ids),
                soft_acceptances=verdict.soft_acceptances,
                parents=drafted.proposal.parents,
                ended=self._stream.finished,
                draft_ms=timed.draft_ms,
                verify_ms=timed.queue_ms + timed.work_ms,
                verify_network_ms=timed.network_ms if is_first else 0.0,
                round_ms=timed.elapsed_ms,
                verify_queue_ms=timed.queue_ms,
                target=timed.target,
                num_batch_rows=verdict.num_batch_rows,
            )
        )

    def _commit(
        self,
        timed: Timed,
        choice: Choice,
        round_ms: float,
        drafted: Drafted = NOTHING,
        by: Drafting | None = None,
    ) -> int:
        """Log, text and statistics move to the verdict's end together; the client gets one chunk. Returns the number of
        accepted drafts."""
        proposal = drafted.proposal
        by = by or Drafting(
            choice.drafter,
            choice.reason,
            expected_tokens_per_s=choice.expected_tokens_per_s,
            round_ms=round_ms,
        )
        verdict, statistics = timed.verdict, self._stream.statistics
        network_ms = timed.network_ms + drafted.network_ms
        draft_ms = proposal.draft_ms + drafted.branch_wait_ms + drafted.wait_ms
        statistics.draft_ms += draft_ms
        statistics.verify_ms += timed.work_ms
        statistics.network_ms += network_ms
        statistics.num_proposal_bytes += 2 * proposal.num_bytes
        committing = time.perf_counter()
        if verdict.row_choices and not proposal.is_tree:
            self._local.learn(verdict.header.base_length, proposal.token_ids, verdict.row_choices)
        if self._stream.recorder is not None:
            self._stream.recorder.add(verdict, proposal, self._target.numerics_fingerprint)
        chunk = self._stream.commit(verdict, by=by)
        self._local.committed(() if proposal.is_tree else proposal.token_ids, verdict)
        if self._stream.keeps_steps:
            price = choice.price
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
                reason=by.reason,
                sampling_ms=timed.sampling_ms,
                emit_ms=1000 * (time.perf_counter() - committing),
                ahead=drafted.ahead,
                cause=CAUSES.get(by.reason, GammaCause.UNSPECIFIED),
                soft_acceptances=verdict.soft_acceptances,
                price_tokens_per_ms=price.tokens_per_ms if price is not None else 0.0,
                row_price_tokens=price.row_tokens if price is not None else 0.0,
                draft_queue_ms=proposal.queue_ms,
                draft_network_ms=drafted.network_ms,
                start_ms=1000 * (committing - self._arrived) - round_ms,
                num_tokens=len(chunk.token_ids),
            )
            self._keep_step(self._stream.choice, step)
            if self._stream.request.report_steps:
                chunk = dataclasses.replace(chunk, step=step)
        self._outbox.put(chunk)
        return verdict.num_accepted
