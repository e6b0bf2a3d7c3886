"""The target side of a stream: one link, and another one where it breaks and another worker can take over.

The log decides where a stream goes on: a session on another worker begins with all that is committed, in a new epoch,
and is asked what the lost one was asked, the same drafts included. So the round is decided by the same coins, and
whether its verdict was lost says nothing about what comes instead of it. What the old session still says is not read.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
from collections.abc import AsyncGenerator, Awaitable, Callable, Collection
from contextlib import aclosing
from typing import Protocol

from coordinator.failover import DEADLY, FAILED, SILENT, Failover, cause_of
from coordinator.gamma.policy import Candidate, Choice
from coordinator.session_errors import in_request_terms
from coordinator.standby import Standby
from coordinator.stream import Stream
from coordinator.suspicion import Death, RequestSuspicion, Suspicion, trial_tokens
from coordinator.target_link import BAD_VERDICT, TargetLink, Timed
from coordinator.verdict_check import fault_of, prompt_fault_of
from outrider.errors import Internal, OutriderError, Unavailable
from outrider.median import Median
from outrider.serving.messages import TargetOpening
from outrider.serving.session_calls import SealedProposal

MIN_NETWORK_MS, MIN_ROUND_TRIPS = 2.0, 3
"""Of a round trip, as the median of at least so many: from here on it is hidden."""
ASK_AGAIN_S = 0.25
"""Whether a silent worker lives."""
NO_DRAFTS: tuple[str, int, tuple[int, ...]] = ("", 0, ())


class TargetPool(Protocol):
    """Where links come from."""

    def connect_target(self, stream: Stream, avoid: frozenset[str], standby: str = "", drafter: str = "") -> TargetLink:
        """A link to the best healthy worker not in `avoid`; that at `standby` has the text computed, and one that has
        `drafter` goes on with a run. Raises Unavailable when there is none."""

    async def without_guilt(self, deaths: Collection[Death]) -> set[str]:
        """Incarnations of those that answer after all, or that another stream is known to have killed."""

    def num_other_deaths(self, incarnations: Collection[str]) -> int:
        """Workers lost of late, besides these, that no stream is known to have killed."""

    def killed(self, incarnations: Collection[str]) -> None:
        """A request has killed these."""

    def trial_begins(self, link: TargetLink) -> int:
        """A suspect's turn has come there. Its number."""

    def is_trial_over(self, link: TargetLink, number: int) -> bool:
        """Whether another suspect's turn has come there since."""

    def disconnect(self, link: TargetLink, error: Exception | None = None) -> None:
        """The link is not used any more; `error` is why, when it failed."""

    def target_candidates(self, link: TargetLink) -> tuple[Candidate, ...]:
        """Drafters inside that worker."""

    def next_change(self) -> asyncio.Event:
        """Set once the health of any worker may have changed."""


class TargetSide:
    """Opens, asks, and asks elsewhere. Errors that another worker would repeat go to the client.

    Where no worker can go on, a stream waits: until its client's deadline, or for `wait_s` where it has none. Then
    Unavailable is raised, or ResourceExhausted if they all are full, at once for a stream that has not begun; Internal
    once the stream itself is found to kill its workers.
    """

    def __init__(
        self,
        stream: Stream,
        pool: TargetPool,
        wait_s: float = 0.0,
        standby: Standby | None = None,
        suspicion: Suspicion | None = None,
    ) -> None:
        """suspicion: of the stream, as one of its request's."""
        self._stream = stream
        self._pool = pool
        self._wait_s = wait_s
        self._standby = standby
        self._link: TargetLink | None = None
        self._failover = Failover()
        self._suspicion = suspicion or RequestSuspicion().of_stream()
        self._trial = 0
        """Number of its last one, on the worker where it was held."""
        self._epoch = 0
        self._network = Median()
        self._run_is_stopped = False
        self._run_drafter = ""
        self._token_ms = 0.0
        """In a run."""
        self._has_begun = False

    @property
    def candidates(self) -> tuple[Candidate, ...]:
        """Drafters of the worker that has the stream now, the request's choice considered."""
        if self._link is None or not self._stream.request.max_draft_tokens:
            return ()
        named = self._stream.request.drafter
        return tuple(c for c in self._pool.target_candidates(self._link) if named in ("", c.name))

    @property
    def numerics_fingerprint(self) -> str:
        """Of the worker that gave the last verdict; empty: not known."""
        return self._link.numerics_fingerprint if self._link is not None else ""

    async def open(self) -> Timed:
        """The first token, from the first worker that gives it. Raises Unavailable at once when there is none now."""
        self._link = self._pool.connect_target(self._stream, frozenset())
        try:
            timed = self._checked(self._link, await self._link.open(self._opening()))
        except OutriderError as error:
            await self._lose(self._link, error)
            return await self._answer(lambda link: link.verify(SealedProposal()))
        return self._came(timed)

    @property
    def pipelines(self) -> bool:
        """Whether the way to the worker is so long that a round is better sent before the verdict of the one before."""
        if self._link is None or self._link.sends_features or len(self._network) < MIN_ROUND_TRIPS:
            return False
        return self._network.value() >= MIN_NETWORK_MS

    def verify_next(self, base_length: int, prefix_hash: int, token_id: int, proposal: SealedProposal) -> None:
        """See `TargetLink.verify_next`."""
        if self._link is not None:
            self._link.verify_next(base_length, prefix_hash, token_id, proposal)

    async def verify(self, proposal: SealedProposal) -> Timed:
        self._run_drafter = ""
        timed = await self._answer(lambda link: link.verify(proposal))
        if not (timed.is_pipelined or timed.is_recovery):
            self._network.add(timed.network_ms)
        return timed

    async def decode(self, choice: Choice) -> AsyncGenerator[Timed, None]:
        """Step by step, with drafts of the worker's own where the choice names one of its drafters. A worker that takes
        over goes on with what is left of the run."""
        self._run_is_stopped, num_left = False, choice.credit_tokens
        self._run_drafter = choice.drafter if choice.num_draft_tokens else ""
        while num_left > 0:
            link = await self._at_hand(trial_tokens(num_left, self._token_ms))
            is_told = not self._run_is_stopped
            try:
                async with aclosing(link.decode(num_left, *self._own_drafts(choice, link))) as verdicts:
                    async for timed in verdicts:
                        self._checked(link, timed)
                        num_committed = len(timed.verdict.committed_ids)
                        num_left -= num_committed
                        self._token_ms = timed.work_ms / max(1, num_committed)
                        if not is_told:
                            is_told = True
                            await self.stop_decoding()
                        yield self._came(timed)
            except OutriderError as error:
                await self._lose(link, error)
            else:
                self._suspicion.cleared()
                return

    async def stop_decoding(self) -> None:
        """The running `decode` ends with the token in flight."""
        self._run_is_stopped = True
        if self._link is not None:
            with contextlib.suppress(OutriderError):  # whoever reads the next verdict finds out, behind those that came
                await self._link.stop_decoding()

    def close(self) -> None:
        """Frees the session, and that on the standby. Harmless when repeated."""
        if self._standby is not None:
            self._standby.close()
        if self._link is not None:
            link, self._link = self._link, None
            self._pool.disconnect(link)
            link.close()
        self._suspicion.interrupted()

    async def _answer(self, question: Callable[[TargetLink], Awaitable[Timed]]) -> Timed:
        """Of the worker at hand, or of the first other one that lives to give it."""
        while True:
            link = await self._at_hand()
            try:
                timed = self._checked(link, await question(link))
            except OutriderError as error:
                await self._lose(link, error)
            else:
                return self._came(timed)

    async def _at_hand(self, num_tokens: int = 1) -> TargetLink:
        """The link; a new one where it was lost, for a question that is answered by so many tokens."""
        while self._link is None:
            self._link = link = await self._connected()
            if self._standby is not None:
                self._standby.make_way(link.address)
            num_suspect_tokens = num_tokens if self._suspicion.is_suspect else 0
            if num_suspect_tokens:
                await self._suspicion.take_turn()
                if self._suspicion.request.is_convicted:
                    raise self._poisoned("another choice of the request was the last to be tried")
            try:
                await link.open_deferred(self._opening(num_suspect_tokens))
            except OutriderError as error:
                await self._lose(link, error)
            else:
                self._suspicion.on_trial(num_suspect_tokens)
                if num_suspect_tokens:
                    self._trial = self._pool.trial_begins(link)
        return self._link

    async def _connected(self) -> TargetLink:
        """A link to another worker, or to the same one where there is no other. Waits for one to come back."""
        failover = self._failover
        is_new_and_refused = failover.was_only_full and not self._has_begun
        pause_s = 0.0 if is_new_and_refused else failover.pause_s()
        standby = self._standby.address if self._standby is not None else ""
        deadline = self._stream.deadline if self._stream.has_client_deadline else None
        try:
            async with asyncio.timeout_at(failover.gives_up_at(self._wait_s, deadline)):
                if pause_s:
                    await asyncio.sleep(pause_s)
                while True:
                    change = self._pool.next_change()
                    try:
                        avoid = frozenset(failover.failed)
                        return self._pool.connect_target(self._stream, avoid, standby, self._run_drafter)
                    except Unavailable:
                        if is_new_and_refused:  # its client is better told at once than kept waiting
                            raise failover.gave_up(_now()) from None
                        if not failover.failed:
                            await change.wait()
                        failover.failed.clear()
        except TimeoutError:
            raise failover.gave_up(_now()) from None

    def _checked(self, link: TargetLink, timed: Timed) -> Timed:
        """Raises Unavailable: another worker may give one that can be."""
        fault = fault_of(timed.verdict, self._stream) or prompt_fault_of(timed.prompt_logprobs, self._stream)
        if fault:
            raise Unavailable(
                f"target worker {link.address} gave a verdict that cannot be: {fault}", reason=BAD_VERDICT
            )
        return timed

    def _came(self, timed: Timed) -> Timed:
        self._has_begun = True
        self._suspicion.answered(len(timed.verdict.committed_ids))
        if self._standby is not None and self._link is not None:
            self._standby.follow(self._link.address)
        recovery_s = self._failover.recovered(_now())
        if recovery_s is None:
            return timed
        self._stream.statistics.count_recovery(recovery_s)
        return dataclasses.replace(timed, is_recovery=True)

    async def _lose(self, link: TargetLink, error: OutriderError) -> None:
        """Raises what the client should see where no other worker is to be asked."""
        cause, statistics = cause_of(error), self._stream.statistics
        suspicion, is_guilty = self._suspicion, False
        if cause in DEADLY and link.was_asked:
            is_guilty = await self._is_guilty_of(link, cause)
        if not is_guilty:
            suspicion.interrupted()
        if cause:
            statistics.count_loss(cause, link.unheard_s)
        self._link = None
        self._pool.disconnect(link, error)
        link.close()
        if not cause:
            raise in_request_terms(error)
        if is_guilty:
            self._pool.killed({death.incarnation for death in suspicion.request.gone})
            suspicion.request.is_convicted = True
            statistics.count_poisoned()
            raise self._poisoned(f"the last one: {error.message}")
        self._failover.lost(error, cause, link.address, _now())

    async def _is_guilty_of(self, link: TargetLink, cause: str) -> bool:
        """Whether the stream has killed the worker that it is lost with."""
        suspicion, request = self._suspicion, self._suspicion.request
        if self._pool.is_trial_over(link, self._trial):
            suspicion.interrupted()  # it had all its tokens there, although not all were heard of
        suspicion.died(self._stream.log.length, Death(link.incarnation, link.address, cause == FAILED, cause == SILENT))
        accused_at = _now()
        while suspicion.is_accused:
            request.absolved(await self._pool.without_guilt(request.gone))
            if _now() >= accused_at + suspicion.doubt_s:
                break
            await asyncio.sleep(ASK_AGAIN_S)
        return suspicion.is_accused and not suspicion.is_spared(self._pool.num_other_deaths(request.present_at))

    def _poisoned(self, what: str) -> Internal:
        return Internal(
            "target workers died or failed one after another while they computed this request, no other is asked; "
            f"{what}",
            reason="POISONED_REQUEST",
        )

    def _own_drafts(self, choice: Choice, link: TargetLink) -> tuple[str, int, tuple[int, ...]]:
        """What the worker is to draft at every step; nothing where it has not the drafter that the lost one had."""
        if not choice.num_draft_tokens:
            return NO_DRAFTS
        if self._epoch > 1 and choice.drafter not in [c.name for c in self._pool.target_candidates(link)]:
            return NO_DRAFTS
        name = choice.candidate.asked_as if choice.candidate is not None else choice.drafter
        return name, choice.num_draft_tokens, choice.shape

    def _opening(self, num_suspect_tokens: int = 0) -> TargetOpening:
        self._epoch += 1
        request = self._stream.request
        return TargetOpening(
            **self._stream.opening_fields(self._epoch),
            logprobs=request.logprobs,
            top_logprobs=request.top_logprobs,
            max_draft_tokens=request.max_draft_tokens,
            priority=request.priority,
            prompt_logprobs=request.prompt_logprobs if self._stream.wants_prompt_logprobs else None,
            num_suspect_tokens=num_suspect_tokens,
            has_fresh_seed=request.has_fresh_seed and self._epoch == 1 and not self._stream.log.output_ids,
            tells_drafted=self._stream.recorder is not None and not request.sampling.decides_by_match,
        )


def _now() -> float:
    return asyncio.get_running_loop().time()
