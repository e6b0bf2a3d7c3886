"""The draft side of a stream. Losing it, or waiting too long for it, costs speed and is counted; never an error."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass
from typing import Protocol

from coordinator.branches import Foretold
from coordinator.draft_link import DraftLate, DraftLink
from coordinator.gamma.policy import HIT, LATE, MISS, Candidate, Choice
from coordinator.stream import Stream
from outrider.drafting.ratio_stop import Judged
from outrider.errors import DRAINING, OutriderError, Unavailable
from outrider.results import DraftRounds
from outrider.serving.messages import DraftOpening, Verdict
from outrider.serving.session_calls import SealedProposal

OPEN_WAIT_S = 0.25
"""Once per opening, a round waits this long for the session to have its place."""
FIRST_WAIT_S = 1.0
MIN_WAIT_S = 0.25
WAIT_FACTOR = 4.0
"""A proposal may take this multiple of what the last ones took."""
REOPEN_AFTER_S = 1.0
MAX_REOPEN_AFTER_S = 30.0
MAX_PATIENCE_TOKENS = 16
SESSION_LOST = "SESSION_LOST"
"""The reason of a session that idled past its lease: nothing failed."""


@dataclass(frozen=True, slots=True)
class Drafted:
    """`wait_ms` is time lost to a proposal that did not come. `ahead`: HIT, LATE or MISS where branches were wanted in
    the round before; LATE: after `branch_wait_ms`. `build_ms`: what the worker took for the branches that came last."""

    proposal: SealedProposal
    network_ms: float = 0.0
    wait_ms: float = 0.0
    ahead: str = ""
    branch_wait_ms: float = 0.0
    build_ms: float = 0.0


class WaitLimit(Protocol):
    """What the last proposals of a drafter took; shared by the streams of one draft worker."""

    def add(self, value: float) -> None: ...

    def value(self, default: float = 0.0) -> float: ...


class DraftPool(Protocol):
    """Where links come from."""

    def connect_draft(self, stream: Stream) -> DraftLink | None:
        """A link to the least loaded healthy worker that offers the request's drafter; None when there is none."""

    def disconnect(self, link: DraftLink, error: Exception | None = None) -> None:
        """The link is not used any more; `error` is why, when it failed."""

    def draft_candidates(self, link: DraftLink) -> tuple[Candidate, ...]:
        """Drafters that the worker offers."""

    def proposal_ms(self, link: DraftLink) -> WaitLimit:
        """Per drafted token plus one, of this worker."""

    def count_round(self, link: DraftLink, round: DraftRounds) -> None:
        """A round that asked this worker: the worker's are added up."""


class DraftSide:
    """Opens in the background, proposes in time or not at all, and opens anew some time after a loss."""

    def __init__(self, stream: Stream, pool: DraftPool, max_q_entries: int, elsewhere: tuple[str, ...] = ()) -> None:
        """`elsewhere`: drafters that run in the coordinator or inside a target, which no draft worker is asked for."""
        self._stream = stream
        self._pool = pool
        self._elsewhere = elsewhere
        self._max_q_entries = max_q_entries
        self._link: DraftLink | None = None
        self._opening: asyncio.Task[None] | None = None
        self._waited_for_opening = False
        self._epoch = 0
        self._reopen_after_s = REOPEN_AFTER_S
        self._next_opening_at = 0.0
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
        if not self.wanted:
            return
        link = self._pool.connect_draft(self._stream)
        if link is not None:
            self._link, self._waited_for_opening = link, False
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
        is_expected = self._branches_for == self._num_looks
        self._branches_for = self._num_looks + 1 if choice.ahead else 0
        branch = link.branch(choice.drafter, choice.ahead)
        if branch is not None:
            self._count_dropped(link)
            return Drafted(branch, ahead=HIT, build_ms=link.last_build_ms)
        history = self._pool.proposal_ms(link)
        num_units = 1 + choice.num_draft_tokens
        expected_s = history.value(0.0) * num_units / 1000
        wait_s = max(MIN_WAIT_S, WAIT_FACTOR * expected_s) if expected_s else FIRST_WAIT_S
        started = time.perf_counter()
        num_hits = link.ahead_counts.num_hits
        try:
            proposal = await link.propose(
                choice.num_draft_tokens, choice.drafter, wait_s, choice.tree_width, choice.ahead, choice.price
            )
        except DraftLate:
            elapsed_ms = 1000 * (time.perf_counter() - started)
            # so that a worker that has become slower is waited for again, some rounds on
            history.add(elapsed_ms / num_units)
            return Drafted(SealedProposal(), wait_ms=elapsed_ms)
        except OutriderError as error:
            self._lose(error)
            return Drafted(SealedProposal(), wait_ms=1000 * (time.perf_counter() - started))
        elapsed_ms = 1000 * (time.perf_counter() - started)
        self._count_dropped(link)
        if link.ahead_counts.num_hits > num_hits:
            return Drafted(proposal, ahead=LATE, branch_wait_ms=elapsed_ms, build_ms=link.last_build_ms)
        if proposal.num_draft_tokens == choice.num_draft_tokens or choice.price is not None:
            history.add(elapsed_ms / (1 + proposal.num_draft_tokens))
        ahead = MISS if is_expected else ""
        link.ahead_counts.num_misses += is_expected
        return Drafted(proposal, max(0.0, elapsed_ms - (proposal.queue_us + proposal.compute_us) / 1000), ahead=ahead)

    def judge(self, verdict: Verdict, num_drafts: int) -> None:
        """How the target found the first `num_drafts` drafts, the worker's: it will be told with the next message."""
        if self._link is not None and num_drafts and not verdict.proposal_fault:
            self._link.judged = Judged(verdict.header.prefix_hash, verdict.soft_acceptances[:num_drafts])

    def count(self, drafted: Drafted, num_drafts: int, num_accepted: int, round_ms: float) -> None:
        """A round that asked the worker, once it is over; `num_drafts` of its drafts were verified. One that lost the
        worker is counted as a failure, not here."""
        if self._link is not None:
            wait_ms = drafted.wait_ms + (0.0 if drafted.ahead == HIT else drafted.proposal.queue_us / 1000)
            num_accepted = min(num_accepted, num_drafts)
            self._pool.count_round(self._link, DraftRounds(1, round_ms, wait_ms, num_drafts, num_accepted))

    async def foretold(self) -> Foretold:
        """The likeliest outcome of the round that is being verified, once the worker has told it. May be cancelled;
        raises OutriderError when the worker is lost, which the next look will find as well."""
        if self._link is None:
            raise Unavailable("the draft worker was lost with its proposal")
        return await self._link.foretold()

    def use(self, branch: SealedProposal, choice: Choice) -> Drafted:
        """A branch that the target has already. The worker, if it is still there, is told and drafts ahead of it."""
        self._num_looks += 1
        self._branches_for = self._num_looks + 1 if choice.ahead else 0
        link = self._link
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
        if self._link is None:
            if time.perf_counter() >= self._next_opening_at:
                self._next_opening_at = time.perf_counter() + self._reopen_after_s
                self.open_soon()
            if self._link is None:
                return "no-draft-worker"
        link = self._link
        try:
            if self._opening is not None:
                await self._wait_opening(self._opening)
                if self._opening is not None and not self._opening.done():
                    return "draft-opening"
                self._opening.result()
                self._opening = None
            if not link.reaches(self._stream.log.length):
                return "draft-context-full"
            return link.lacks_features() if link.ready() else "draft-late"
        except OutriderError as error:
            self._lose(error)
            return "draft-lost"

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

    def _lose(self, error: OutriderError) -> None:
        if error.reason not in (SESSION_LOST, DRAINING):
            self._stream.statistics.num_draft_failures += 1
        # a worker that leaves says so in peace: another one is asked at once
        self._next_opening_at = time.perf_counter() + (0.0 if error.reason == DRAINING else self._reopen_after_s)
        self._reopen_after_s = min(2 * self._reopen_after_s, MAX_REOPEN_AFTER_S)
        self.close(error)

    def _count_dropped(self, link: DraftLink) -> None:
        self._stream.statistics.num_dropped_proposals += link.take_num_dropped()
