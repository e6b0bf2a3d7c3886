"""The draft side of a stream. Losing it, or waiting too long for it, costs speed and is counted; never an error."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass
from typing import Protocol

from coordinator.branches import Foretold
from coordinator.draft_link import DraftLate, DraftLink
from coordinator.draft_losses import Avoided, CloseDeaths
from coordinator.fleet.standing import QUARANTINED, Conduct
from coordinator.gamma.policy import HIT, LATE, MISS, Candidate, Choice
from coordinator.peer import FLOODED, NOT_UNDERSTOOD, WORKER_LOST
from coordinator.stream import Stream
from outrider.drafting.proposal import MAX_STEP_ROWS
from outrider.drafting.ratio_stop import Judged
from outrider.errors import DRAINING, OTHER_PROCESS, SESSION_LOST, Aborted, Internal, OutriderError, Unavailable
from outrider.median import Median
from outrider.server_info import DraftRounds
from outrider.serving.messages import DraftOpening, Verdict
from outrider.serving.session_calls import SealedProposal

OPEN_WAIT_S = 0.25
"""Once per opening, a round waits this long for the session to have its place."""
FIRST_WAIT_S = 1.0
MIN_WAIT_S = 0.1
"""However little its drafts can save: machines pause for as long."""
WAIT_FACTOR = 4.0
"""A proposal may take this multiple of what the last ones took, if its drafts can save as much."""
REOPEN_AFTER_S = 1.0
MAX_REOPEN_AFTER_S = 30.0
"""A stream leaves a worker that it has lost alone for so long, twice as long each time."""
MOVE_AFTER_S = 1.0
"""From here on a stream whose proposal is late goes to another worker, if there is one."""
LOOK_AGAIN_S = 1.0
"""Until a stream without a draft worker looks for one again, or one that should leave its own for another."""
MAX_PATIENCE_TOKENS = 16
NO_DRAFT_WORKER = "no-draft-worker"
"""The reason of a round that would have asked one, had there been any, and had nothing else to choose from."""
RESTING = "draft-resting"
"""The same where draft workers died in a row under the stream's request."""
LATE_DRAFT, LOST_DRAFT = "draft-late", "draft-lost"


@dataclass(frozen=True, slots=True)
class Drafted:
    """`wait_ms` is time lost to a proposal that did not come, and why: `why_none`. `ahead`: HIT, LATE or MISS where
    branches were wanted in the round before; LATE: after `branch_wait_ms`. `build_ms`: what the worker took for the
    branches that came last. `catch_up_ms`: of its time, for coming level with a text that it was behind of."""

    proposal: SealedProposal
    network_ms: float = 0.0
    wait_ms: float = 0.0
    why_none: str = ""
    ahead: str = ""
    branch_wait_ms: float = 0.0
    build_ms: float = 0.0
    catch_up_ms: float = 0.0


class WaitLimit(Protocol):
    """What the last proposals of a drafter took; shared by the streams of one draft worker."""

    def add(self, value: float) -> None: ...

    def value(self, default: float = 0.0) -> float: ...


class DraftPool(Protocol):
    """Where links come from."""

    def has_draft(self, stream: Stream, avoid: frozenset[str]) -> bool:
        """Whether `connect_draft` would find a worker."""

    def connect_draft(self, stream: Stream, avoid: frozenset[str] = frozenset()) -> DraftLink | None:
        """A link to the healthy worker not in `avoid` whose proposals should come soonest, of those that offer the
        request's drafter and are not left alone; None when there is none."""

    def disconnect(self, link: DraftLink, error: Exception | None = None) -> None:
        """The link is not used any more; `error` is why, when it failed."""

    def has_died(self, incarnation: str) -> bool:
        """Whether this process was lost and has not answered since."""

    def num_streams(self, link: DraftLink) -> int:
        """On this worker, of this coordinator."""

    def draft_candidates(self, link: DraftLink) -> tuple[Candidate, ...]:
        """Drafters that the worker offers."""

    def proposal_ms(self, link: DraftLink) -> WaitLimit:
        """Per drafted token plus one, of this worker."""

    def catch_up_ms(self, link: DraftLink) -> WaitLimit:
        """Per committed token that a drafter of this worker lacked, behind plain runs."""

    def count_round(self, link: DraftLink, round: DraftRounds) -> None:
        """A round that asked this worker: the worker's are added up."""


class DraftSide:
    """Opens in the background, proposes in time or not at all. After a loss another worker adopts the stream, or the
    same one some time later: in the background too, from the log as it stands, as a new epoch."""

    def __init__(
        self,
        stream: Stream,
        pool: DraftPool,
        max_q_entries: int,
        elsewhere: tuple[str, ...] = (),
        deaths: CloseDeaths | None = None,
    ) -> None:
        """elsewhere: drafters that run in the coordinator or inside a target, which no draft worker is asked for.
        deaths: under the streams of its request."""
        self._stream = stream
        self._pool = pool
        self._elsewhere = elsewhere
        self._max_q_entries = max_q_entries
        self._link: DraftLink | None = None
        self._opening: asyncio.Task[None] | None = None
        self._waited_for_opening = False
        self._epoch = 0
        self._avoided = Avoided(REOPEN_AFTER_S, MAX_REOPEN_AFTER_S)
        self._deaths = deaths or CloseDeaths()
        self._next_opening_at = self._next_move_at = 0.0
        self._verify_ms = Median()
        self._proposer: Conduct | None = None
        """Whose drafts are being verified."""
        self._foreteller: Conduct | None = None
        """The same of those that were sent before their round."""
        self._num_looks = 0
        self._branches_for = 0
        """The look at which branches that were asked for may be used."""
        self.patience_tokens = 1
        """Plain tokens until the next look whether drafts can be had."""

    @property
    def candidates(self) -> tuple[Candidate, ...]:
        """Drafters that can be asked for now, the request's choice considered."""
        if self._link is None:
            return ()
        named, offered = self._stream.request.drafter, self._pool.draft_candidates(self._link)
        return tuple(c for c in offered if c.name == named or not (named or c.name in self._elsewhere))

    @property
    def wanted(self) -> bool:
        """Whether a draft worker may be asked at all: not for a stream without drafts, or of a drafter elsewhere."""
        request = self._stream.request
        return request.max_draft_tokens > 0 and request.drafter not in self._elsewhere

    def open_soon(self) -> None:
        """Begins to open a session, unless the request wants no drafts or nobody offers any."""
        if not self.wanted or self._rests():
            return
        link = self._pool.connect_draft(self._stream, self._avoided.at(time.monotonic()))
        if link is not None:
            # only before the first token it is computed as soon as the target's, so that waiting pays
            self._link, self._waited_for_opening = link, self._num_looks > 0
            self._opening = asyncio.create_task(self._open(link))
            # its failure is read by the next round, if there is one
            self._opening.add_done_callback(lambda task: task.cancelled() or task.exception())

    async def ready(self) -> tuple[bool, str]:
        """Whether a proposal can be asked for now, and why not."""
        self._num_looks += 1
        reason = await self._why_not()
        self.patience_tokens = min(2 * self.patience_tokens, MAX_PATIENCE_TOKENS) if reason else 1
        return not reason, reason

    async def propose(self, choice: Choice) -> Drafted:
        """Drafts for the log as it stands; none after a loss or when they are late. A branch that was told is taken
        whole, whatever its length; nobody has looked at what was drawn."""
        assert self._link is not None
        link = self._link
        self._proposer = link.conduct
        is_expected = self._branches_for == self._num_looks
        self._branches_for = self._num_looks + 1 if choice.ahead else 0
        branch = link.branch(choice.drafter, choice.ahead)
        if branch is not None:
            self._count_dropped(link)
            return Drafted(branch, ahead=HIT, build_ms=link.last_build_ms)
        history = self._pool.proposal_ms(link)
        num_units, num_behind, catch_up = 1 + choice.num_draft_tokens, link.num_behind, self._pool.catch_up_ms(link)
        is_behind, is_first = num_behind >= MAX_STEP_ROWS, not link.has_proposed
        catch_up_s = catch_up.value(0.0) * num_behind / 1000 if is_behind else 0.0
        wait_s = self._wait_s(choice, history.value(0.0) * num_units / 1000) + catch_up_s
        standing = link.conduct.standing
        started = time.perf_counter()
        num_hits = link.ahead_counts.num_hits
        try:
            proposal = await link.propose(
                choice.num_draft_tokens, choice.drafter, wait_s, choice.tree_width, choice.ahead, choice.price
            )
        except DraftLate:
            elapsed_ms = 1000 * (time.perf_counter() - started)
            if not is_first:
                # so that a worker that has become slower is waited for again, some rounds on
                history.add((elapsed_ms - 1000 * catch_up_s) / num_units)
            why = f"{'a first' if is_first else 'a'} proposal had not come after {elapsed_ms:.0f} ms"
            lost_s, num_streams = elapsed_ms / 1000, self._pool.num_streams(link)
            standing.failed(time.monotonic(), why, lost_s, num_streams, is_first)
            return Drafted(SealedProposal(), wait_ms=elapsed_ms, why_none=LATE_DRAFT)
        except OutriderError as error:
            elapsed_ms = 1000 * (time.perf_counter() - started)
            self._lose(error, elapsed_ms / 1000)
            return Drafted(SealedProposal(), wait_ms=elapsed_ms, why_none=LOST_DRAFT)
        elapsed_ms = 1000 * (time.perf_counter() - started)
        network_ms = max(0.0, elapsed_ms - proposal.draft_ms)
        # a worker that was level has nothing to come level with, whatever it says
        catch_up_ms = min(proposal.catch_up_ms, elapsed_ms) if is_behind or is_first else 0.0
        elapsed_ms -= catch_up_ms
        if is_behind and catch_up_ms:
            catch_up.add(catch_up_ms / num_behind)
        self._count_dropped(link)
        if link.is_cut:
            history.add(elapsed_ms / num_units)
            if link.vain_wait_s:
                why = f"the next draft of a proposal had not come after {1000 * link.vain_wait_s:.0f} ms"
                standing.failed(time.monotonic(), why, link.vain_wait_s, self._pool.num_streams(link))
            return Drafted(proposal, network_ms, catch_up_ms=catch_up_ms)
        standing.succeeded(time.monotonic())
        if link.ahead_counts.num_hits > num_hits:
            return Drafted(proposal, ahead=LATE, branch_wait_ms=elapsed_ms, build_ms=link.last_build_ms)
        if proposal.num_draft_tokens == choice.num_draft_tokens or choice.price is not None:
            history.add(elapsed_ms / (1 + proposal.num_draft_tokens))
        ahead = MISS if is_expected else ""
        link.ahead_counts.num_misses += is_expected
        return Drafted(proposal, network_ms, ahead=ahead, catch_up_ms=catch_up_ms)

    def judge(self, verdict: Verdict, num_drafts: int) -> None:
        """How the target found the first `num_drafts` drafts, the worker's: it will be told with the next message."""
        if self._link is not None and num_drafts and not verdict.proposal_fault:
            self._link.judged = Judged(verdict.header.prefix_hash, verdict.soft_acceptances[:num_drafts])

    def count(self, drafted: Drafted, num_drafts: int, num_accepted: int, round_ms: float) -> None:
        """A round that asked the worker, once it is over; `num_drafts` of its drafts were verified. One that lost the
        worker is counted as a failure, not here."""
        if self._link is not None:
            wait_ms = drafted.wait_ms + (0.0 if drafted.ahead == HIT else drafted.proposal.queue_ms)
            num_accepted = min(num_accepted, num_drafts)
            self._pool.count_round(self._link, DraftRounds(1, round_ms, wait_ms, num_drafts, num_accepted))

    def verified(self, verdict: Verdict) -> None:
        """Of a round with drafts of the worker. What is wrong with them is held against it."""
        self._verify_ms.add((verdict.queue_us + verdict.compute_us + verdict.sampling_us) / 1000)
        if self._proposer is not None:
            self._proposer.bad(verdict.proposal_fault) if verdict.proposal_fault else self._proposer.good()

    async def foretold(self) -> Foretold:
        """The likeliest outcome of the round that is being verified, once the worker has told it. May be cancelled;
        raises OutriderError when the worker is lost, which the next look will find as well."""
        link = self._link
        if link is None:
            raise Unavailable("the draft worker was lost with its proposal")
        foretold = await link.foretold()
        self._foreteller = link.conduct
        return foretold

    def use(self, branch: SealedProposal, choice: Choice) -> Drafted:
        """A branch that the target has already. The worker, if it is still there, is told and drafts ahead of it."""
        self._num_looks += 1
        self._branches_for = self._num_looks + 1 if choice.ahead else 0
        self._proposer, link = self._foreteller, self._link
        if link is None:
            return Drafted(branch, ahead=HIT)
        try:
            link.ready()
            link.branch(choice.drafter, choice.ahead)
        except OutriderError as error:
            self._lose(error)
        self._count_dropped(link)
        return Drafted(branch, ahead=HIT, build_ms=link.last_build_ms)

    def close(self, error: Exception | None = None) -> None:
        """Frees the session. Harmless when repeated."""
        if self._opening is not None:
            self._opening.cancel()
            self._opening = None
        if self._link is not None:
            link, self._link = self._link, None
            self._count_dropped(link)
            self._pool.disconnect(link, error)
            link.close()

    async def _why_not(self) -> str:
        now = time.monotonic()
        if self._link is None:
            if now >= self._next_opening_at:
                self._next_opening_at = now + LOOK_AGAIN_S
                self.open_soon()
            if self._link is None:
                return RESTING if self._rests() else NO_DRAFT_WORKER
        link = self._link
        try:
            if self._opening is not None:
                await self._wait_opening(self._opening)
                if self._opening is not None and not self._opening.done():
                    return "draft-opening"
                self._opening.result()
                self._opening = None
                link.conduct.standing.num_adoptions += self._epoch > 1
            if not link.reaches(self._stream.log.length):
                return "draft-context-full"
            is_ready = link.ready()
        except OutriderError as error:
            self._lose(error)
            return LOST_DRAFT
        if not is_ready:
            return "draft-opening" if link.late_s > MOVE_AFTER_S and self._moves(link, now) else LATE_DRAFT
        why_not = link.conduct.standing.why_not(self, now)
        if why_not:
            return "draft-opening" if self._moves(link, now, leaves=why_not == QUARANTINED) else why_not
        return link.lacks_features()

    def _rests(self) -> bool:
        return self._deaths.rests(time.monotonic(), self._pool.has_died)

    def _moves(self, link: DraftLink, now: float, leaves: bool = False) -> bool:
        """Goes to another worker, if there is one. leaves: the one at hand in any case."""
        if not leaves:
            if now < self._next_move_at:
                return False
            self._next_move_at = now + LOOK_AGAIN_S
            if not self._pool.has_draft(self._stream, self._avoided.at(now) | {link.address}):
                return False
        self._avoided.lost(link.address, now)
        self.close()
        self.open_soon()
        return self._link is not None

    async def _wait_opening(self, opening: asyncio.Task[None]) -> None:
        if not self._waited_for_opening:
            self._waited_for_opening = True
            await asyncio.wait({opening}, timeout=OPEN_WAIT_S)

    async def _open(self, link: DraftLink) -> None:
        self._epoch += 1
        request = self._stream.request
        await link.open(
            DraftOpening(
                **self._stream.opening_fields(self._epoch),
                max_q_entries=self._max_q_entries,
                drafter=request.drafter,
            )
        )
        await link.wait_opened()

    def _wait_s(self, choice: Choice, expected_s: float) -> float:
        """How long to wait for a proposal: no longer than its drafts are worth, or where the choice does not say, than
        they can save at most. `expected_s`: what it should take; 0: nobody knows."""
        wait_s = WAIT_FACTOR * expected_s if expected_s else FIRST_WAIT_S
        if choice.max_wait_ms:
            wait_s = min(wait_s, choice.max_wait_ms / 1000)
        elif len(self._verify_ms):
            wait_s = min(wait_s, expected_s + choice.num_draft_tokens * self._verify_ms.value() / 1000)
        return max(MIN_WAIT_S, wait_s)

    def _lose(self, error: OutriderError, lost_s: float = 0.0) -> None:
        """lost_s: what was waited for the worker in vain."""
        link, now = self._link, time.monotonic()
        if link is not None and error.reason == WORKER_LOST:
            self._deaths.died(self._stream.choice, self._stream.log.length, link.conduct.incarnation, now)
        if link is not None and error.reason not in (SESSION_LOST, DRAINING, OTHER_PROCESS):
            self._stream.statistics.num_draft_failures += 1
            if isinstance(error, Unavailable | Aborted | Internal):  # else it refuses this stream, or its time is up
                why = f"it was lost: {error.message[:200]}"
                link.conduct.standing.failed(now, why, lost_s, self._pool.num_streams(link))
            if error.reason in (NOT_UNDERSTOOD, FLOODED):
                link.conduct.bad(error.message)
        if link is not None and error.reason != DRAINING:
            self._avoided.lost(link.address, now)
        self.close(error)
        self._next_opening_at = now  # another one may adopt the stream at once

    def _count_dropped(self, link: DraftLink) -> None:
        self._stream.statistics.num_dropped_proposals += link.take_num_dropped()
