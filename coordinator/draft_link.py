"""What the round loop asks of a draft worker's session: a proposal for a prefix, or what was drafted ahead of it.

A worker that is out of step is sent what it lacks; the log decides, never the worker.
"""

from __future__ import annotations

import asyncio
import dataclasses
import time
from typing import Any

from coordinator.branches import AheadCounts, BranchStore, Foretold
from coordinator.features import FeatureFeed
from coordinator.fleet.standing import Conduct, Standing
from coordinator.log import Log
from coordinator.peer import MAX_RESENDS, Peer
from outrider.drafting.ratio_stop import UNJUDGED, Price
from outrider.errors import Aborted, OutriderError
from outrider.serving import session_calls as wire
from outrider.serving.messages import NO_FEATURES, NOTHING_AHEAD, AheadWish, DraftOpening, FeatureRows, Header

MAX_DRAWN = 64
"""No more drafts are ever wanted."""
MAX_LATE_S = 60.0
"""A proposal that is late for so long will not come."""


class DraftLate(Exception):
    """Nothing of the proposal in time. It will be dropped when it comes; until then nothing more is asked."""


class DraftLink:
    """A session on a draft worker. Every method raises OutriderError once the worker is lost or refuses."""

    def __init__(
        self,
        peer: Peer,
        address: str,
        log: Log,
        features: FeatureFeed,
        counts: AheadCounts | None = None,
        conduct: Conduct | None = None,
    ) -> None:
        """features: what the target tells the worker's drafters. counts: of the stream, of what is drafted ahead.
        conduct: where it is told what the worker does."""
        self.address = address
        self.features = features
        self.ahead_counts = counts or AheadCounts()
        self.branches = BranchStore(self.ahead_counts)
        self.last_build_ms = 0.0
        """What the worker took for the branches that came last, its queue included."""
        self.judged = UNJUDGED
        """How the target found the last proposal: told with the next message."""
        self.conduct = conduct or Conduct(Standing())
        self.is_cut = False
        """Whether the last proposal is what had come of it when its time was up, or the worker was lost."""
        self.vain_wait_s = 0.0
        """How long its last draft was waited for that did not come in time."""
        self.has_proposed = False
        """Whether a proposal has come since the opening: the prompt is computed."""
        self._peer = peer
        self._log = log
        self._max_ahead_tokens = 0
        self._covered: list[Header] = []
        """As `_awaited`, but a branch came before its proposal."""
        self._telling: asyncio.Task[None] | None = None
        self._opening: DraftOpening | None = None
        self._context_length: int | None = None
        self._awaited: list[Header] = []
        """Prefixes that a proposal was asked for and has not come; answers come in order."""
        self._asked_at = 0.0
        self._drawn: list[wire.SealedProposal] = []
        """Drafts of the proposal that was asked for last, as they came one by one."""
        self._drawn_at = 0.0
        self._has_begun = False
        """Whether the worker has begun the proposal that was asked for last."""
        self._sent_length: int | None = None
        """Length of the worker's log once it has read all that was sent; None: it must be opened anew."""
        self._num_dropped = 0
        self._broken: OutriderError | None = None
        """Why nothing more can be had of the session."""

    @property
    def opened(self) -> bool:
        return self._context_length is not None

    @property
    def late_s(self) -> float:
        """How long ago the proposal was asked for that has not come yet; 0: nothing is owed."""
        return time.perf_counter() - self._asked_at if self._awaited else 0.0

    @property
    def num_behind(self) -> int:
        """Committed tokens that the worker was not told yet."""
        return self._log.length - self._sent_length if self._sent_length is not None else 0

    def reaches(self, length: int) -> bool:
        """Whether the worker's context has room for a draft after `length` tokens."""
        return self._context_length is None or length < self._context_length

    async def open(self, opening: DraftOpening) -> None:
        """Sends the opening; `wait_opened` or the first proposal tells how it went."""
        opening = dataclasses.replace(opening, worker_incarnation=self.conduct.incarnation)
        self._opening = opening = self.features.opens(opening)
        self._context_length = None
        self.has_proposed = False
        self._awaited.clear()
        self._covered.clear()
        self.branches.clear()
        self._sent_length = len(opening.prompt_ids) + len(opening.committed_ids)
        self._count_outstanding()
        await self._peer.send(wire.draft_open(opening))

    async def wait_opened(self) -> None:
        while not self.opened:
            self._take(await self._peer.receive())

    def ready(self) -> bool:
        """Whether a proposal can be asked for now: the session is open and owes nothing."""
        while (message := self._peer.receive_now()) is not None:
            self._take(message)
        self._check()
        if self.late_s > MAX_LATE_S:
            raise self._lost(f"owes a proposal for {MAX_LATE_S:g} s", "OVERDUE")
        is_told = self._telling is None or self._telling.done()
        return self.opened and not self._awaited and is_told

    def branch(self, drafter: str, ahead: AheadWish = NOTHING_AHEAD) -> wire.SealedProposal | None:
        """The branch that the log has become, if it was told. The worker learns so, and drafts ahead behind it."""
        if self._sent_length is None:
            return None  # it must begin anew
        found = self.branches.take(self._log.header(0).prefix_hash, drafter)
        if found is not None:
            _, message = self._next_advance(found.num_draft_tokens, drafter, ahead=ahead, has_proposal=True)
            self._telling = self._peer.send_soon(message)  # the target's goes out at once
        return found

    async def foretold(self) -> Foretold:
        """The likeliest outcome of the round on top of the log, once it was told. May be cancelled."""
        while (found := self.branches.likeliest(self._log.length)) is None:
            self._take(await self._peer.receive())
            self._check()
        return found

    async def propose(
        self,
        num_draft_tokens: int,
        drafter: str,
        wait_s: float,
        tree_width: int = 0,
        ahead: AheadWish = NOTHING_AHEAD,
        price: Price | None = None,
    ) -> wire.SealedProposal:
        """Drafts that follow the log, none when nothing fits; or a branch of theirs that comes first, whole. Raises
        DraftLate after `wait_s`.

        With a price the time that sampled drafts take follows from what was drawn, and without one a worker may still
        die over what it drew: to give a proposal up for either would select among draws. So the worker tells each draft
        before it goes on to the next: when a draft comes follows from those before it, and those that came are used,
        whatever happens. An older worker only tells that it has begun, with a price: it is waited for then, and lost if
        that is in vain."""
        self._has_begun, self.is_cut, self.vain_wait_s = False, False, 0.0
        self._drawn.clear()
        try:
            async with asyncio.timeout(wait_s) as limit:
                for _ in range(MAX_RESENDS):
                    expected = await self._advance(num_draft_tokens, drafter, tree_width, ahead, price)
                    proposal = await self._answer(expected, drafter, limit)
                    if proposal is not None:
                        most = max(num_draft_tokens, self._max_ahead_tokens)  # it may be a branch
                        return proposal if self._covered else self._checked(proposal, most)
        except TimeoutError:
            if self._drawn:
                self.vain_wait_s = time.perf_counter() - self._drawn_at
                return self._cut(num_draft_tokens)
            if self._has_begun:
                raise self._lost(f"has begun a proposal and owes it for {MAX_LATE_S:g} s", "OVERDUE") from None
            raise DraftLate from None
        except OutriderError:
            if self._drawn:
                return self._cut(num_draft_tokens)  # the next look finds that the worker is lost
            raise
        self.conduct.bad("stays out of step")
        raise self._lost("stays out of step", "OUT_OF_STEP")

    def _cut(self, num_draft_tokens: int) -> wire.SealedProposal:
        """What has come of the proposal."""
        self.is_cut = True
        return self._checked(wire.joined(self._drawn), num_draft_tokens)

    def _checked(self, proposal: wire.SealedProposal, num_draft_tokens: int) -> wire.SealedProposal:
        """None of it where it is longer than was wanted."""
        if proposal.num_draft_tokens <= num_draft_tokens:
            return proposal
        self._drop(f"{proposal.num_draft_tokens} drafts, {num_draft_tokens} were wanted")
        return wire.SealedProposal()

    def _drop(self, fault: str) -> None:
        """A proposal, or what stands for one, that cannot be right."""
        self._num_dropped += 1
        self.conduct.bad(fault)

    def take_num_dropped(self) -> int:
        """Proposals dropped as stale, malformed or late since the last call."""
        dropped, self._num_dropped = self._num_dropped, 0
        return dropped

    def lacks_features(self) -> str:
        """Why its drafters, which read the target's states, cannot be asked now; empty: they can."""
        return self.features.why_not(self._log.length)

    def close(self) -> None:
        self.features.close()
        self._peer.close()

    async def _advance(
        self, num_draft_tokens: int, drafter: str, tree_width: int, ahead: AheadWish, price: Price | None
    ) -> Header:
        if self._sent_length is None:
            assert self._opening is not None
            committed_ids = tuple(self._log.output_ids)
            await self.open(
                dataclasses.replace(self._opening, epoch=self._opening.epoch + 1, committed_ids=committed_ids)
            )
        # before the await: a write that is cut short by the wait limit may still have gone out
        before, features = self.features.take()
        header, message = self._next_advance(
            num_draft_tokens, drafter, tree_width, ahead, features=features, price=price
        )
        self._awaited.append(header)
        self._asked_at = time.perf_counter()
        self._count_outstanding()
        for part in before:
            await self._peer.send(part)
        await self._peer.send(message)
        return header

    def _next_advance(
        self,
        num_draft_tokens: int,
        drafter: str,
        tree_width: int = 0,
        ahead: AheadWish = NOTHING_AHEAD,
        has_proposal: bool = False,
        features: FeatureRows = NO_FEATURES,
        price: Price | None = None,
    ) -> tuple[Header, Any]:
        """The message that brings the worker to the log as it stands; it is to be sent."""
        assert self._opening is not None
        assert self._sent_length is not None
        header, since = self._log.header(self._opening.epoch), self._log.since(self._sent_length)
        self._sent_length = header.base_length
        self._max_ahead_tokens = max(self._max_ahead_tokens, ahead.num_draft_tokens)
        judged, self.judged = self.judged, UNJUDGED
        return header, wire.draft_advance(
            header, since, num_draft_tokens, drafter, tree_width, features,
            ahead=ahead, has_proposal=has_proposal, price=price, judged=judged,
        )  # fmt: skip

    async def _answer(self, expected: Header, drafter: str, limit: asyncio.Timeout) -> wire.SealedProposal | None:
        """None: the worker was out of step, and the next `_advance` sends what it lacks."""
        while True:
            message = await self._peer.receive()
            if isinstance(message, wire.Proposed) and message.header == expected:
                self._awaited.clear()
                self.has_proposed = True
                self._count_cancelled(message)
                self._count_outstanding()
                self.features.has(message.features_end)
                return wire.joined([*self._drawn, message.proposal]) if self._drawn else message.proposal
            if isinstance(message, wire.Drawn):
                if message.header == expected and len(self._drawn) < MAX_DRAWN:
                    self._drawn.append(message.proposal)
                    self._drawn_at = time.perf_counter()
                continue
            self._take(message)
            self._check()
            if isinstance(message, wire.Begun) and message.header == expected and not self._has_begun:
                self._has_begun = True
                limit.reschedule(asyncio.get_running_loop().time() + MAX_LATE_S)
            if isinstance(message, wire.Lagging):
                self._drawn.clear()
                return None
            if expected.prefix_hash in self.branches:
                branch = self.branches.take(expected.prefix_hash, drafter)
                if branch is not None:
                    self._awaited.remove(expected)
                    self._covered.append(expected)
                    return branch

    def _take(self, message: Any) -> None:
        """A message that no round waits for: the opening's answer, a proposal that is late or foreign, branches."""
        if isinstance(message, wire.Opened):
            self._context_length = message.context_length
        elif isinstance(message, wire.Proposed):
            self.features.has(message.features_end)
            self.has_proposed = True
            self._count_cancelled(message)
            if message.header in self._covered:
                self._covered.remove(message.header)
            elif self._is_foreign(message.header):
                # what it was asked for will not come: answers come in order
                self._drop("a proposal for another text")
                self._broken = self._lost("answers about another text", "OUT_OF_STEP")
            else:
                self._num_dropped += 1
            if message.header in self._awaited:
                self._awaited.remove(message.header)
        elif isinstance(message, wire.Branched):
            self._take_branches(message)
        elif isinstance(message, wire.Lagging):
            del (self._covered or self._awaited)[:1]
            self._sent_length = message.header.base_length if self._fits(message.header) else None
            if self._is_foreign(message.header):
                self.conduct.bad("is at another text")
        self._count_outstanding()

    def _check(self) -> None:
        if self._broken is not None:
            raise self._broken

    def _fits(self, header: Header) -> bool:
        """Of what is or was the log, as the worker was told it last."""
        assert self._opening is not None
        return header.epoch == self._opening.epoch and self._log.holds(header)

    def _is_foreign(self, header: Header) -> bool:
        """Of no text that this session has ever had. Answers of an earlier epoch may still be on their way."""
        assert self._opening is not None
        return header.epoch >= self._opening.epoch and not self._fits(header)

    def _take_branches(self, message: wire.Branched) -> None:
        """Those that were asked for, on top of what is or was the log."""
        self._count_cancelled(message)
        self.last_build_ms = (message.queue_us + message.compute_us) / 1000
        fits = self._fits(message.header)
        kept = {
            prefix_hash: proposal
            for prefix_hash, proposal in message.proposals.items()
            if fits and proposal.num_draft_tokens <= self._max_ahead_tokens
        }
        self._num_dropped += len(message.proposals) - len(kept)
        if len(kept) < len(message.proposals) and (fits or self._is_foreign(message.header)):
            self.conduct.bad("branches that nobody wanted, or of another text")
        outcomes = message.outcomes if len(kept) == len(message.proposals) else ()
        self.branches.add(kept, message.header.base_length, outcomes)

    def _count_cancelled(self, message: wire.Proposed | wire.Branched) -> None:
        self.ahead_counts.num_cancelled_tokens += message.num_cancelled_tokens

    def _count_outstanding(self) -> None:
        self._peer.num_outstanding = len(self._awaited) + len(self._covered) + (not self.opened)

    def _lost(self, what: str, reason: str) -> OutriderError:
        return Aborted(f"draft worker {self.address} {what}", reason=reason, retry_delay_s=0.5)
