"""How long a stream waits for a proposal, and how long it leaves a worker alone that it has lost."""

from __future__ import annotations

import asyncio
import time
from types import SimpleNamespace
from typing import Any

import pytest

from coordinator import drafting
from coordinator.draft_link import DraftLate
from coordinator.draft_losses import Avoided
from coordinator.drafting import FIRST_WAIT_S, MIN_WAIT_S, WAIT_FACTOR, DraftSide
from coordinator.fleet.breaker import BreakerLimits, Circuit, CircuitBreaker
from coordinator.fleet.standing import Conduct, Standing
from coordinator.gamma.policy import Choice
from outrider.drafting.proposal import MAX_STEP_ROWS
from outrider.median import Median
from outrider.sampling.params import Origin
from outrider.serving.messages import Header, Verdict
from outrider.serving.session_calls import SealedProposal


def side(verify_ms: float = 0.0) -> DraftSide:
    counts = SimpleNamespace(num_dropped_proposals=0)
    stream: Any = SimpleNamespace(request=SimpleNamespace(max_draft_tokens=8, drafter=""), statistics=counts)
    pool: Any = SimpleNamespace()
    one = DraftSide(stream, pool, 64)
    for _ in range(3 if verify_ms else 0):
        verdict = Verdict(
            header=Header(1, 3, 0), committed_ids=(1,), origins=(Origin.PLAIN,), compute_us=round(1000 * verify_ms)
        )
        one.verified(verdict)
    return one


def choice(num_draft_tokens: int = 4, max_wait_ms: float = 0.0) -> Choice:
    return Choice("model", num_draft_tokens, "best", max_wait_ms=max_wait_ms)


def test_what_nobody_knows_anything_of_is_waited_for_a_while() -> None:
    assert side()._wait_s(choice(), 0.0) == FIRST_WAIT_S
    assert side()._wait_s(choice(), 0.5) == WAIT_FACTOR * 0.5


@pytest.mark.parametrize(
    ("verify_ms", "expected_s", "wait_s"), [(100.0, 0.3, 0.7), (1000.0, 0.1, 0.4), (1.0, 0.002, MIN_WAIT_S)]
)
def test_no_longer_than_drafts_can_save(verify_ms: float, expected_s: float, wait_s: float) -> None:
    """By then the round would have been better off plain; and no longer than proposals ever take."""
    assert side(verify_ms)._wait_s(choice(), expected_s) == pytest.approx(wait_s)


def test_no_longer_than_the_choice_says_that_they_are_worth() -> None:
    one = side(100.0)
    assert one._wait_s(choice(max_wait_ms=250.0), 0.3) == 0.25
    assert one._wait_s(choice(max_wait_ms=5000.0), 0.3) == WAIT_FACTOR * 0.3
    assert one._wait_s(choice(max_wait_ms=1.0), 0.3) == MIN_WAIT_S


class Link:
    """What `propose` asks of a session. proposal: None: it never comes."""

    address, is_cut, ahead_counts = "worker", False, SimpleNamespace(num_hits=0, num_misses=0)

    def __init__(
        self, *, num_behind: int, has_proposed: bool, proposal: SealedProposal | None = None, lasts_s: float = 0.0
    ) -> None:
        self.num_behind, self.has_proposed, self.lasts_s = num_behind, has_proposed, lasts_s
        self.wait_s = 0.0
        self.conduct = Conduct(Standing())
        self._proposal = proposal

    def take_num_dropped(self) -> int:
        return 0

    def branch(self, *_: Any) -> None:
        pass

    async def propose(self, num_draft_tokens: int, drafter: str, wait_s: float, *_: Any) -> Any:
        self.wait_s = wait_s
        if self._proposal is None:
            await asyncio.sleep(self.lasts_s)
            raise DraftLate
        await asyncio.sleep(0.02)
        return self._proposal


@pytest.mark.parametrize(
    ("num_behind", "catch_up_s"), [(3, 0.0), (MAX_STEP_ROWS - 1, 0.0), (100, 0.5)], ids=["level", "a round", "a run"]
)
async def test_a_drafter_that_lacks_a_plain_run_is_given_the_time_to_compute_it(
    num_behind: int, catch_up_s: float
) -> None:
    one, link = side(), Link(num_behind=num_behind, has_proposed=True)
    drafted, history = await propose(one, link)
    assert drafted.wait_ms > 0
    assert link.wait_s == pytest.approx(WAIT_FACTOR * 0.2 + catch_up_s)
    assert len(history) == 2, "it has become slower"


async def test_how_long_a_prompt_takes_says_nothing_of_how_long_drafts_do() -> None:
    _, history = await propose(side(), Link(num_behind=0, has_proposed=False))
    assert len(history) == 1


async def test_a_first_proposal_that_is_late_does_not_open_the_circuit_alone_and_two_streams_do() -> None:
    standing = Standing("worker", CircuitBreaker(BreakerLimits(0.02, 60.0)))
    for circuit in (Circuit.CLOSED, Circuit.OPEN):
        link = Link(num_behind=0, has_proposed=False, lasts_s=0.6)
        link.conduct = Conduct(standing)
        drafted, _ = await propose(side(), link)
        assert drafted.wait_ms >= 600
        assert standing.breaker.circuit(time.monotonic()) is circuit
    assert "a first proposal had not come after" in standing.fault(time.monotonic())


@pytest.mark.parametrize(
    ("num_behind", "has_proposed", "is_believed"), [(0, True, False), (0, False, True), (MAX_STEP_ROWS, True, True)]
)
async def test_who_was_level_is_not_believed_to_have_come_level(
    num_behind: int, has_proposed: bool, is_believed: bool
) -> None:
    """Or what a worker calls so could be as slow as it likes, and be asked again."""
    proposal = SealedProposal(4, "model", compute_us=1000, catch_up_us=15_000)
    drafted, _ = await propose(side(), Link(num_behind=num_behind, has_proposed=has_proposed, proposal=proposal))
    assert drafted.catch_up_ms == (15.0 if is_believed else 0.0)


async def propose(one: DraftSide, link: Any) -> tuple[Any, Median]:
    """What came, and what is known then of proposals: 40 ms a draft and one more; a token that is lacking takes 5."""
    history, catch_up = Median(), Median()
    history.add(40.0)
    catch_up.add(5.0)
    one._link = link
    one._pool = SimpleNamespace(  # type: ignore[assignment]
        proposal_ms=lambda _: history, catch_up_ms=lambda _: catch_up, num_streams=lambda _: 1
    )
    return await one.propose(choice()), history


def test_a_worker_is_left_alone_for_longer_after_each_loss() -> None:
    avoided = Avoided(1.0, 4.0)
    for number, meant_s in enumerate((1, 2, 4, 4, 4)):
        now = 100.0 * number
        avoided.lost("a", now)
        assert avoided.at(now + 0.74 * meant_s) == {"a"}
        assert avoided.at(now + 1.26 * meant_s) == set()
    avoided.lost("b", 1000.0)
    assert avoided.at(1000.0 + 0.74 * drafting.REOPEN_AFTER_S) == {"b"}, "each for itself"
