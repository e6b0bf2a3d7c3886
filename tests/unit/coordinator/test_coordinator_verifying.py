"""Moving between target workers: who is tried again, what is asked there, who is a suspect, and when it is enough."""

from __future__ import annotations

import asyncio
import dataclasses
from collections import Counter
from typing import Any

import pytest

import coordinator.failover as failover
from coordinator.failover import MAX_FORGOTTEN
from coordinator.fleet.deaths import Deaths
from coordinator.gamma.policy import Candidate, Choice
from coordinator.peer import WORKER_LOST, WORKER_SILENT
from coordinator.request import ResolvedRequest
from coordinator.stream import Stream
from coordinator.suspicion import CLOSE_TOKENS, MAX_CLOSE_DEATHS, TRIAL_TOKENS
from coordinator.target_link import Timed
from coordinator.text.tokenizer import ToyCodec
from coordinator.verifying import TargetSide
from outrider.errors import DRAINING, Aborted, Internal, InvalidArgument, OutriderError, ResourceExhausted, Unavailable
from outrider.sampling.noise import hash_ids
from outrider.sampling.params import Origin, SamplingParams, StoppingParams
from outrider.serving.messages import TargetOpening, Verdict
from outrider.serving.session_calls import SealedProposal

REQUEST = ResolvedRequest(
    request_id="r",
    model="toy",
    prompt_ids=(1, 2),
    prompt_hash=hash_ids((1, 2)),
    sampling=SamplingParams(),
    stopping=StoppingParams(1000),
    max_speculative_tokens=4,
)
DIED = Unavailable("gone", reason=WORKER_LOST)
SILENT = Unavailable("silent", reason=WORKER_SILENT)
DRAINS = Unavailable("drains", reason=DRAINING)
FULL = ResourceExhausted("full", retry_delay_s=0.01)
FORGOTTEN = Aborted("its lease", reason="SESSION_LOST")
DRAFTS = SealedProposal(3, "model")


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(failover, "FIRST_PAUSE_S", 1e-4)
    monkeypatch.setattr(failover, "MAX_PAUSE_S", 1e-3)


class Link:
    """A worker that fails at what its pool says, when it says so."""

    sends_features = is_verifying = False
    unheard_s = 0.1

    def __init__(self, pool: Pool, address: str) -> None:
        self.pool, self.address, self.closed, self.was_asked = pool, address, False, False
        self.incarnation = f"process at {address}"

    async def open(self, opening: TargetOpening) -> Timed:
        self._opened(opening, "opens")
        return self._token()

    async def open_deferred(self, opening: TargetOpening) -> None:
        self._opened(opening, "waits")

    async def verify(self, proposal: SealedProposal) -> Timed:
        self.pool.questions.append((self.address, proposal.num_draft_tokens))
        self._fails("computes", was_asked=True)
        return self._token()

    async def decode(self, credit_tokens: int, drafter: str, num_drafts: int, parents: tuple[int, ...]) -> Any:
        self.pool.questions.append((self.address, credit_tokens, drafter, num_drafts))
        for _ in range(credit_tokens):
            self._fails("computes", was_asked=True)
            yield self._token()

    async def stop_decoding(self) -> None:
        self.pool.questions.append((self.address, "stop"))
        self._fails("stops")

    def _opened(self, opening: TargetOpening, moment: str) -> None:
        self.epoch = opening.epoch
        self.pool.openings.append((self.address, opening.epoch, tuple(opening.committed_ids)))
        self.pool.suspected.append(opening.num_suspect_tokens)
        self._fails(moment)

    def _fails(self, moment: str, *, was_asked: bool = False) -> None:
        error = self.pool.error_at(self.address, moment)
        if error is not None:
            self.was_asked = was_asked
            raise error

    def _token(self) -> Timed:
        header = self.pool.stream.log.header(self.epoch)
        return Timed(Verdict(header=header, committed_ids=(3,), origins=(Origin.PLAIN,)), 1.0)

    def close(self) -> None:
        self.closed = True


class Pool:
    """Addresses in order of preference. `faults`: what happens at (address, moment), the first first."""

    def __init__(self, stream: Stream, *addresses: str) -> None:
        self.stream, self.addresses = stream, list(addresses)
        self.faults: dict[tuple[str, str], list[OutriderError]] = {}
        self.openings: list[Any] = []
        self.suspected: list[int] = []
        self.questions: list[Any] = []
        self.drafters: dict[str, tuple[str, ...]] = {}
        self.errors: list[Any] = []
        self.num_open = 0
        self.dies = True
        self.deaths = Deaths()
        self.changed = asyncio.Event()

    def error_at(self, address: str, moment: str) -> OutriderError | None:
        pending = self.faults.get((address, moment)) or [None]  # type: ignore[list-item]
        return pending.pop(0)

    def connect_target(self, stream: Stream, avoid: frozenset[str], standby: str = "", drafter: str = "") -> Any:
        for address in sorted(self.addresses, key=lambda a: drafter not in ("", *self.drafters.get(a, ()))):
            if address not in avoid:
                self.num_open += 1
                return Link(self, address)
        raise Unavailable("nobody left")

    async def has_died(self, link: Any) -> bool:
        return self.dies

    def num_other_deaths(self, incarnations: Any) -> int:
        return self.deaths.num_besides(incarnations)

    def killed(self, incarnations: Any) -> None:
        self.deaths.explained(incarnations)

    def disconnect(self, link: Any, error: Exception | None = None) -> None:
        if error in (DIED, SILENT):
            self.deaths.lost(link.incarnation)
        self.num_open -= 1
        self.errors.append(error)

    def target_candidates(self, link: Any) -> tuple[Candidate, ...]:
        return tuple(Candidate(name) for name in self.drafters.get(link.address, ()))

    def next_change(self) -> asyncio.Event:
        return self.changed

    def comes(self, address: str) -> None:
        self.addresses.append(address)
        self.changed, changed = asyncio.Event(), self.changed
        changed.set()


class Counts:
    """Of what a meter is told."""

    def __init__(self) -> None:
        self.causes: Counter[str] = Counter()
        self.num_recoveries = self.num_poisoned = 0

    def round(self, *_: Any) -> None: ...

    def lost_target(self, cause: str, unheard_s: float) -> None:
        assert unheard_s == 0.1
        self.causes[cause] += 1

    def recovered(self, after_s: float) -> None:
        assert after_s >= 0
        self.num_recoveries += 1

    def poisoned(self) -> None:
        self.num_poisoned += 1


def make(*addresses: str, wait_s: float = 30.0) -> tuple[TargetSide, Pool, Stream, Counts]:
    stream = Stream(dataclasses.replace(REQUEST), 0, ToyCodec(94))
    pool, counts = Pool(stream, *addresses), Counts()
    stream.statistics.observer = counts
    return TargetSide(stream, pool, wait_s), pool, stream, counts


async def begun(*addresses: str, wait_s: float = 30.0) -> tuple[TargetSide, Pool, Stream, Counts]:
    """With its first token."""
    side, pool, stream, counts = make(*addresses, wait_s=wait_s)
    stream.commit((await side.open()).verdict)
    return side, pool, stream, counts


async def test_another_worker_is_asked_the_same_from_the_log_and_says_that_it_took_a_prefill() -> None:
    side, pool, stream, counts = await begun("a", "b")
    pool.faults["a", "computes"] = [DIED]
    timed = await side.verify(DRAFTS)
    assert pool.questions == [("a", 3), ("b", 3)], "the very same drafts"
    assert [(address, epoch) for address, epoch, _ in pool.openings] == [("a", 1), ("b", 2)]
    assert pool.openings[-1][2] == tuple(stream.log.output_ids), "an opening holds all that is committed"
    assert timed.is_recovery
    assert not (await side.verify(DRAFTS)).is_recovery
    assert (counts.causes, counts.num_recoveries) == ({"died": 1}, 1)
    side.close()
    assert pool.num_open == 0


async def test_a_worker_that_failed_is_tried_again_once_another_has_given_a_token() -> None:
    side, pool, _, _ = await begun("a", "b")
    pool.faults["a", "computes"] = [DRAINS]
    pool.faults["b", "computes"] = [DRAINS]
    await side.verify(DRAFTS)
    assert [address for address, _, _ in pool.openings] == ["a", "b", "a"]


async def test_the_first_token_is_asked_for_elsewhere_too() -> None:
    side, pool, stream, _ = make("a", "b")
    pool.faults["a", "opens"] = [DIED]
    timed = await side.open()
    assert pool.openings == [("a", 1, ()), ("b", 2, ())]
    assert timed.is_recovery
    assert timed.verdict.header == stream.log.header(2)


async def test_no_worker_at_all_is_told_at_once() -> None:
    side, _, _, _ = make()
    with pytest.raises(Unavailable, match="nobody left"):
        await side.open()
    side.close()


async def test_a_run_goes_on_with_what_is_left_of_it() -> None:
    side, pool, stream, _ = await begun("a", "b")
    pool.faults["a", "computes"] = [None, None, DIED]  # type: ignore[list-item]
    async for timed in side.decode(Choice("", 0, "off", credit_tokens=5)):
        stream.commit(timed.verdict)
    assert len(stream.log.output_ids) == 1 + 5
    assert pool.questions == [("a", 5, "", 0), ("b", 3, "", 0)]


async def test_a_run_that_was_told_to_end_is_told_so_again_behind_its_next_token() -> None:
    side, pool, stream, _ = await begun("a", "b")
    pool.faults["a", "computes"] = [None, DIED]  # type: ignore[list-item]
    pool.faults["a", "stops"] = [DIED]
    async for timed in side.decode(Choice("", 0, "off", credit_tokens=9)):
        stream.commit(timed.verdict)
        if len(stream.log.output_ids) == 2:
            await side.stop_decoding()
        if len(stream.log.output_ids) == 3:
            break
    assert pool.questions == [("a", 9, "", 0), ("a", "stop"), ("b", 8, "", 0), ("b", "stop")]


async def test_drafts_of_its_own_are_asked_of_a_worker_that_has_the_drafter() -> None:
    for offered, asked in ((("eagle",), ("b", 4, "eagle", 3)), ((), ("b", 4, "", 0))):
        side, pool, stream, _ = await begun("a", "b")
        pool.drafters = {"a": ("eagle",), "b": offered}
        pool.faults["a", "computes"] = [DIED]
        async for timed in side.decode(Choice("eagle", 3, "best", credit_tokens=4)):
            stream.commit(timed.verdict)
        assert pool.questions == [("a", 4, "eagle", 3), asked]


async def test_a_run_with_drafts_of_its_own_goes_to_a_worker_that_makes_the_same_ones() -> None:
    side, pool, stream, _ = await begun("a", "b", "c")
    pool.drafters = {"a": ("eagle",), "c": ("eagle",)}
    pool.faults["a", "computes"] = [DIED]
    async for timed in side.decode(Choice("eagle", 3, "best", credit_tokens=4)):
        stream.commit(timed.verdict)
    assert pool.questions == [("a", 4, "eagle", 3), ("c", 4, "eagle", 3)]
    pool.faults["c", "computes"] = [DIED]
    await side.verify(DRAFTS)
    assert pool.questions[-1] == ("a", 3), "drafts that come along are asked about anywhere"


async def test_what_another_worker_would_say_too_goes_to_the_client() -> None:
    side, pool, _, counts = await begun("a", "b")
    pool.faults["a", "computes"] = [InvalidArgument("no", field="x")]
    with pytest.raises(InvalidArgument):
        await side.verify(DRAFTS)
    assert len(pool.openings) == 1
    assert not counts.causes
    side.close()
    assert pool.num_open == 0


async def test_a_session_that_is_gone_is_opened_on_the_same_worker_a_few_times() -> None:
    side, pool, _, counts = await begun("a", "b")
    for _ in range(2 * MAX_FORGOTTEN):
        pool.faults["a", "computes"] = [FORGOTTEN]
        await side.verify(DRAFTS)
    assert {address for address, _, _ in pool.openings} == {"a"}
    pool.faults["a", "computes"] = [FORGOTTEN] * (MAX_FORGOTTEN + 1)
    with pytest.raises(Aborted):
        await side.verify(DRAFTS)
    assert not any(pool.suspected)
    assert set(counts.causes) == {"session"}


async def test_full_workers_are_asked_again_until_there_is_room() -> None:
    side, pool, _, counts = await begun("a", "b")
    pool.faults["a", "computes"] = [DRAINS]
    pool.faults["b", "computes"] = [FULL] * 3
    pool.faults["a", "waits"] = [DRAINS] * 3
    await side.verify(DRAFTS)
    assert counts.causes["full"] == 3


async def test_a_stream_that_finds_all_workers_full_is_told_so_at_once_unless_it_has_begun() -> None:
    side, pool, _, _ = make("a", "b")
    pool.faults = {("a", "opens"): [FULL], ("b", "waits"): [FULL], ("b", "computes"): [FULL]}
    with pytest.raises(ResourceExhausted):
        await asyncio.wait_for(side.open(), 20)
    assert [address for address, _, _ in pool.openings] == ["a", "b"]

    side, pool, _, _ = await begun("a", wait_s=0.1)
    pool.faults["a", "computes"] = [FULL] * 10_000
    with pytest.raises(ResourceExhausted):
        await side.verify(DRAFTS)
    assert len(pool.openings) > 1, "it was asked again"


async def test_a_stream_without_any_worker_waits_for_one_and_goes_on() -> None:
    side, pool, stream, _ = await begun("a")
    pool.faults["a", "computes"] = [DIED]
    pool.addresses.clear()
    waiting = asyncio.create_task(side.verify(DRAFTS))
    await asyncio.sleep(0.01)
    assert not waiting.done()
    pool.comes("c")
    await waiting
    assert pool.questions == [("a", 3), ("c", 3)]
    assert pool.openings[-1][2] == tuple(stream.log.output_ids)


@pytest.mark.parametrize("has_client_deadline", [False, True])
async def test_it_waits_for_a_bounded_time_or_until_just_before_its_deadline(has_client_deadline: bool) -> None:
    side, pool, stream, _ = await begun("a", wait_s=1e6 if has_client_deadline else 0.02)
    now = asyncio.get_running_loop().time()
    stream.deadline, stream.has_client_deadline = now + (0.05 if has_client_deadline else 1e6), has_client_deadline
    pool.faults["a", "computes"] = [DIED]
    pool.addresses.clear()
    with pytest.raises(Unavailable, match="gone") as failure:
        await side.verify(DRAFTS)
    assert failure.value.reason == "NO_TARGET_WORKER"
    assert failure.value.retry_delay_s
    assert pool.num_open == 0
    if has_client_deadline:
        assert failover.Failover().gives_up_at(1e6, now + 100) <= now + 100 - failover.LAST_WORDS_S


async def test_a_stream_that_is_there_when_two_workers_die_fails_alone_only_if_it_had_its_turn() -> None:
    side, pool, _, counts = await begun("a", "b", "c")
    pool.faults["a", "computes"] = [DIED]
    pool.faults["b", "computes"] = [SILENT]
    with pytest.raises(Internal, match="one after another") as failure:
        await side.verify(DRAFTS)
    assert failure.value.reason == "POISONED_REQUEST"
    assert pool.questions == [("a", 3), ("b", 3)], "no third worker"
    assert pool.suspected == [0, 1]
    assert (counts.causes, counts.num_poisoned) == ({"died": 1, "silent": 1}, 1)
    side.close()
    assert pool.num_open == 0


async def test_a_worker_that_still_answers_was_not_killed() -> None:
    side, pool, _, counts = await begun("a", "b", "c")
    pool.dies = False
    pool.faults["a", "computes"] = [DIED]
    pool.faults["b", "computes"] = [DIED]
    await side.verify(DRAFTS)
    assert pool.questions == [("a", 3), ("b", 3), ("c", 3)]
    assert pool.suspected == [0, 1, 1]
    assert not counts.num_poisoned


async def test_where_workers_die_anyway_a_suspect_is_tried_alone_once_more_and_no_further_time() -> None:
    side, pool, _, counts = await begun("a", "b", "c", "d")
    pool.deaths.lost("one that computed others")
    for address in "ab":
        pool.faults[address, "computes"] = [DIED]
    await side.verify(DRAFTS)
    assert pool.questions == [("a", 3), ("b", 3), ("c", 3)]
    assert pool.suspected == [0, 1, 1], "alone"
    assert not counts.num_poisoned

    side, pool, _, counts = await begun("a", "b", "c", "d")
    pool.deaths.lost("one that computed others")
    for address in "abc":
        pool.faults[address, "computes"] = [DIED]
    with pytest.raises(Internal) as failure:
        await side.verify(DRAFTS)
    assert failure.value.reason == "POISONED_REQUEST"
    assert pool.questions == [("a", 3), ("b", 3), ("c", 3)], "no fourth worker"
    assert counts.num_poisoned == 1


async def test_a_stream_that_comes_again_is_not_spared_for_the_workers_that_it_has_killed_before() -> None:
    side, pool, _, _ = await begun("a", "b")
    for address in "ab":
        pool.faults[address, "computes"] = [DIED]
    with pytest.raises(Internal):
        await side.verify(DRAFTS)
    pool.deaths.lost("process at b")  # as a probe finds it, later
    again, other, _, _ = await begun("c", "d", "e")
    other.deaths = pool.deaths
    for address in "cd":
        other.faults[address, "computes"] = [DIED]
    with pytest.raises(Internal):
        await again.verify(DRAFTS)
    assert other.questions == [("c", 3), ("d", 3)]


async def test_a_suspect_that_waits_for_its_turn_when_the_next_worker_dies_is_no_worse() -> None:
    side, pool, _, counts = await begun("a", "b", "c")
    pool.faults["a", "computes"] = [DIED]
    pool.faults["b", "waits"] = [DIED]
    await side.verify(DRAFTS)
    assert pool.questions == [("a", 3), ("c", 3)]
    assert pool.suspected == [0, 1, 1], "and is a suspect still"
    assert not counts.num_poisoned


async def test_a_suspect_is_cleared_by_the_tokens_that_were_being_decided() -> None:
    side, pool, stream, _ = await begun("a", "b", "c")
    for _ in range(3):  # whichever worker it is on dies, a token later each time
        for address in ("a", "b", "c"):
            pool.faults[address, "computes"] = []
        pool.faults[pool.openings[-1][0], "computes"] = [DIED]
        stream.commit((await side.verify(DRAFTS)).verdict)
    assert pool.suspected == [0, 1, 1, 1]


async def test_a_worker_that_was_asked_nothing_when_it_died_makes_no_suspect() -> None:
    side, pool, _, _ = await begun("a", "b", "c")
    for cause in (DRAINS, FULL, Unavailable("stops", reason="WORKER_STOPPED")):
        pool.faults[pool.openings[-1][0], "computes"] = [cause]
        await side.verify(DRAFTS)
    pool.faults[pool.openings[-1][0], "stops"] = [DIED]
    await side.stop_decoding()
    assert not any(pool.suspected)


async def test_a_run_is_on_trial_for_as_many_tokens_as_its_dead_worker_may_have_decided_unheard() -> None:
    side, pool, stream, _ = await begun("a", "b", "c")
    pool.faults["a", "computes"] = [DIED]
    pool.faults["b", "computes"] = [*[None] * (TRIAL_TOKENS - 1), DIED]  # type: ignore[list-item]
    with pytest.raises(Internal):
        async for timed in side.decode(Choice("", 0, "off", credit_tokens=50)):
            stream.commit(timed.verdict)
    assert pool.suspected == [0, TRIAL_TOKENS]

    side, pool, stream, _ = await begun("a", "b", "c")
    pool.faults["a", "computes"] = [DIED]
    pool.faults["b", "computes"] = [*[None] * TRIAL_TOKENS, DIED]  # type: ignore[list-item]
    async for timed in side.decode(Choice("", 0, "off", credit_tokens=50)):
        stream.commit(timed.verdict)
    assert len(stream.log.output_ids) == 51


async def test_a_stream_that_kills_its_workers_a_token_apart_does_not_go_round_for_ever() -> None:
    side, pool, stream, _ = await begun("a", "b")

    async def lose() -> None:
        pool.faults = {(pool.openings[-1][0], "computes"): [DIED]}
        stream.commit((await side.verify(DRAFTS)).verdict)

    for _ in range(MAX_CLOSE_DEATHS):
        await lose()
    with pytest.raises(Internal):
        await lose()
    assert len(pool.openings) == 1 + MAX_CLOSE_DEATHS


async def test_a_stream_with_tokens_between_outlives_any_number_of_workers() -> None:
    side, pool, stream, counts = await begun("a", "b")
    for _ in range(3 * MAX_CLOSE_DEATHS):
        pool.faults = {(pool.openings[-1][0], "computes"): [DIED]}
        for _ in range(CLOSE_TOKENS):
            stream.commit((await side.verify(DRAFTS)).verdict)
    assert counts.num_recoveries == 3 * MAX_CLOSE_DEATHS
    assert not counts.num_poisoned
