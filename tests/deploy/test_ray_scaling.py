"""The reconciler's two halves, by their properties: how many workers a load wants, and what is done about it."""

from __future__ import annotations

import dataclasses

import pytest
from conftest import scaled
from hypothesis import given, settings
from hypothesis import strategies as st

from deploy.ray.config import Pool, Scaling
from deploy.ray.load import Load, LoadWindow
from deploy.ray.reconcile import Action, Drain, End, Observed, Phase, Start, plan
from deploy.ray.scaling import PoolScaler, need
from outrider.server_info import CacheCounters, Capacity, DraftRounds, Numerics, ServerInfo, Worker

SCALING = Scaling(up_delay_s=10, down_delay_s=60)
GRACE_S = 30.0
many = settings(max_examples=scaled(500, 50), deadline=None)


def pool(role: str = "target", low: int = 1, start: int = 2, high: int = 6) -> Pool:
    return Pool(
        name="p", role=role, min_replicas=low, replicas=start, max_replicas=high, settings={"model": "toy:vocab=8"}
    )


loads = st.builds(
    Load,
    num_serving=st.integers(1, 8),
    num_waiting=st.integers(0, 50),
    num_sessions=st.integers(0, 200),
    usage=st.floats(0, 1),
    draft_wait=st.none() | st.floats(0, 1),
    accepted_drafts=st.floats(0, 5),
)
roles = st.sampled_from(["draft", "target"])


# how many


@pytest.mark.parametrize(
    ("role", "load", "wanted", "why"),
    [
        ("target", Load(2, num_sessions=8, usage=0.7), 2, "70% of their room"),
        ("target", Load(2, num_waiting=1, num_sessions=8, usage=1.0), 3, "waiting for a place: 1"),
        ("target", Load(2, num_waiting=12, num_sessions=8, usage=1.0), 4, "waiting for a place: 12"),  # at most twice
        (
            "target",
            Load(4, num_waiting=5, num_sessions=8, usage=0.9),
            7,
            "waiting for a place: 5",
        ),  # 2 a worker, 13 in all
        ("target", Load(2, num_sessions=8, usage=0.95), 3, "95% of their room"),
        ("target", Load(4, num_sessions=4, usage=0.2), 2, "20% of their room"),
        ("target", Load(1), 1, "0% of their room"),
        ("draft", Load(2, num_sessions=8, usage=0.2, draft_wait=0.05, accepted_drafts=2.0), 2, "5% of their time"),
        ("draft", Load(2, num_sessions=8, usage=0.2, draft_wait=0.15, accepted_drafts=2.0), 3, "15% of their time"),
        ("draft", Load(2, num_sessions=8, usage=0.2, draft_wait=0.9, accepted_drafts=2.0), 4, "90% of their time"),
        ("draft", Load(2, num_sessions=8, usage=0.2, draft_wait=0.01, accepted_drafts=2.0), 1, "1% of their time"),
        ("draft", Load(2, num_sessions=8, usage=0.8, draft_wait=0.01, accepted_drafts=2.0), 2, "1% of their time"),
        ("draft", Load(2, num_sessions=8, usage=0.2, draft_wait=0.9, accepted_drafts=0.1), 0, "0.10 drafts a round"),
        ("draft", Load(2, num_sessions=8, usage=0.2), 0, "no stream asks"),
        ("draft", Load(2, 3, num_sessions=6, draft_wait=0.0, accepted_drafts=1.0), 3, "waiting for a place: 3"),
    ],
)
def test_need(role: str, load: Load, wanted: int, why: str) -> None:
    number, reason = need(role, load, SCALING)
    assert number == wanted
    assert why in reason


@many
@given(roles, loads)
def test_need_never_more_than_doubles_and_grows_where_somebody_waits(role: str, load: Load) -> None:
    number, reason = need(role, load, SCALING)
    assert 0 <= number <= 2 * load.num_serving
    assert reason
    if role == "target":
        assert number >= 1
        assert number > load.num_serving or not load.num_waiting


@many
@given(roles, loads, st.floats(0, 1), st.integers(0, 20))
def test_more_load_never_wants_fewer(role: str, load: Load, usage: float, num_waiting: int) -> None:
    busier = dataclasses.replace(load, usage=max(load.usage, usage), num_waiting=load.num_waiting + num_waiting)
    assert need(role, busier, SCALING)[0] >= need(role, load, SCALING)[0]


@many
@given(st.integers(1, 8), st.floats(0, 1))
def test_a_pool_of_the_needed_size_neither_grows_nor_shrinks(num_serving: int, usage: float) -> None:
    """Hysteresis: once the same load is shared out among them."""
    number, _ = need("target", Load(num_serving, usage=usage), SCALING)
    again, _ = need("target", Load(number, usage=usage * num_serving / number), SCALING)
    assert again == number


@many
@given(roles, st.lists(st.tuples(st.integers(1, 30), st.none() | loads), max_size=60))
def test_the_wanted_number_keeps_its_bounds_and_its_pace(role: str, readings: list[tuple[int, Load | None]]) -> None:
    scaler, now, changed_at = PoolScaler(pool(role), SCALING), 0.0, -float("inf")
    for after_s, load in readings:
        now, before = now + after_s, scaler.wanted
        wanted = scaler.read(now, load)
        assert 1 <= wanted <= 6
        if wanted == before:
            continue
        assert load is not None
        assert scaler.reason
        if wanted > before:
            assert load.num_serving >= before, "what was added last has not come yet"
            assert now - changed_at >= SCALING.up_delay_s
        else:
            assert wanted == before - 1
            assert now - changed_at >= SCALING.down_delay_s
        changed_at = now


def test_need_must_last_before_anything_changes() -> None:
    scaler, crowded, idle = PoolScaler(pool(), SCALING), Load(2, 5, 8, 1.0), Load(2, 0, 1, 0.1)
    assert [scaler.read(t, crowded) for t in (0, 5, 9)] == [2, 2, 2]
    assert scaler.read(9.5, dataclasses.replace(crowded, num_waiting=0, usage=0.7)) == 2  # it passed
    assert [scaler.read(t, crowded) for t in (10, 15, 19)] == [2, 2, 2]
    assert scaler.read(20, crowded) == 4
    assert scaler.read(40, crowded) == 4, "two serve, the others have not come yet"
    # less is needed at once, one worker a time
    assert [scaler.read(t, idle) for t in (41, 90, 100, 101, 130, 189, 190, 191)] == [4, 4, 4, 3, 3, 3, 2, 2]
    assert scaler.reason == "10% of their room is taken"


def test_a_gap_in_what_is_known_begins_anew() -> None:
    scaler, idle = PoolScaler(pool(), SCALING), Load(2, 0, 1, 0.1)
    for unknown in (None, Load(0)):
        start = 1000.0 if unknown is None else 2000.0
        assert [scaler.read(start + t, idle) for t in (0, 59)] == [2, 2]
        assert scaler.read(start + 59.5, unknown) == 2
        assert [scaler.read(start + t, idle) for t in (60, 119)] == [2, 2]
        scaler.read(start + 119.5, None)


def test_a_fixed_pool_stays_as_it_is() -> None:
    scaler = PoolScaler(pool(low=2, start=2, high=2), SCALING)
    assert {scaler.read(t, Load(2, 50, 8, 1.0)) for t in range(100)} == {2}


# what coordinators tell


def told_worker(address: str, role: str = "target", *, healthy: bool = True, **values: object) -> Worker:
    sizes = {"num_blocks": 10, "num_free_blocks": 10, "num_sessions": 0, "num_waiting": 0}
    rounds = {name: values.pop(name) for name in list(values) if name in DraftRounds.__dataclass_fields__}
    names = Capacity.__dataclass_fields__
    given = {worker_field.name: None for worker_field in dataclasses.fields(Worker)}
    return Worker(
        **{
            **given,
            "role": role,
            "address": address,
            "healthy": healthy,
            "capacity": Capacity(**{**dict.fromkeys(names, 0), **sizes, **values}),
            "numerics": Numerics(**dict.fromkeys(Numerics.__dataclass_fields__)),
            "cache_counters": CacheCounters(),
            "draft_rounds": DraftRounds(**rounds),
        }
    )


def told(*workers: Worker, num_waiting: int = 0) -> ServerInfo:
    return ServerInfo((), workers, 0, num_waiting, 0.0, False)


def test_load_is_that_of_all_coordinators_streams() -> None:
    window = LoadWindow(60)
    busy = told_worker("t:1", num_sessions=6, num_waiting=2, num_free_blocks=0)
    window.add(
        0,
        {
            # the second has not asked it for a while, and does not reach one that the first does
            "a": told(busy, told_worker("t:2", num_sessions=2, num_free_blocks=6), num_waiting=3),
            "b": told(told_worker("t:1", num_sessions=5), told_worker("t:2", healthy=False), num_waiting=1),
        },
    )
    assert window.load("target", {"t:1", "t:2"}) == Load(2, num_waiting=2 + 4, num_sessions=6, usage=0.7)
    assert window.load("target", {"t:1"}) == Load(1, num_waiting=2 + 3, num_sessions=4, usage=1.0)
    assert window.load("target", {"gone:1"}).num_serving == 0
    assert window.num_sessions("t:1") == 6


@pytest.mark.parametrize(
    ("taken", "usage"),
    [
        ({"num_free_blocks": 4}, 0.6),
        ({"num_promised_blocks": 14, "max_promised_blocks": 20}, 0.7),
        ({"num_promised_blocks": 14, "max_promised_blocks": 20, "num_free_blocks": 1}, 0.9),
        ({"num_sessions": 8, "num_waiting": 4, "max_batch_tokens": 8}, 0.5),
        ({"num_promised_blocks": 30, "max_promised_blocks": 20}, 1.0),
        ({}, 0.0),
    ],
)
def test_usage_is_that_of_what_is_scarcest(taken: dict[str, int], usage: float) -> None:
    window = LoadWindow(60)
    window.add(0, {"a": told(told_worker("t:1", **taken))})
    assert window.load("target", {"t:1"}).usage == pytest.approx(usage)


def test_draft_wait_and_acceptance_are_those_of_the_window() -> None:
    window = LoadWindow(60)

    def rounds(address: str, number: int, wait_ms: float, accepted: int) -> Worker:
        return told_worker(
            address,
            "draft",
            num_rounds=number,
            round_ms=10.0 * number,
            wait_ms=wait_ms,
            num_draft_tokens=4 * number,
            num_accepted_draft_tokens=accepted,
        )

    window.add(0, {"a": told(rounds("d:1", 100, 900.0, 400)), "b": told(rounds("d:2", 50, 0.0, 0))})
    assert window.load("draft", {"d:1", "d:2"}).draft_wait is None, "what was before is not known to be of now"
    window.add(30, {"a": told(rounds("d:1", 110, 920.0, 410)), "b": told(rounds("d:2", 60, 0.0, 30))})
    assert window.load("draft", {"d:1"}) == Load(1, 0, 0, 0.0, draft_wait=0.2, accepted_drafts=1.0)
    assert window.load("draft", {"d:1", "d:2"}).draft_wait == pytest.approx(0.1)
    assert window.load("draft", {"d:1", "d:2"}).accepted_drafts == pytest.approx(2.0)
    # a coordinator that was started again counts from nothing, one that comes back has counted on
    window.add(80, {"a": told(rounds("d:1", 10, 0.0, 10))})
    window.add(91, {"a": told(rounds("d:1", 20, 50.0, 10)), "b": told(rounds("d:2", 99, 900.0, 99))})
    assert window.load("draft", {"d:1"}) == Load(1, 0, 0, 0.0, draft_wait=0.25, accepted_drafts=0.5)
    assert window.load("draft", {"d:2"}).draft_wait is None


# what is done


phases = st.sampled_from(Phase)
workers = st.lists(
    st.builds(
        Observed,
        index=st.integers(0, 7),
        phase=phases,
        num_sessions=st.integers(0, 3),
        leaving_s=st.none() | st.floats(0, 60),
    ),
    unique_by=lambda worker: worker.index,
)


def kept(seen: list[Observed], actions: list[Action]) -> list[Observed]:
    """Workers that nobody sends away."""
    gone = {action.index for action in actions if isinstance(action, Drain | End)}
    alive = (Phase.PENDING, Phase.STARTING, Phase.SERVING)
    return [w for w in seen if not w.leaves and w.phase in alive and w.index not in gone]


@many
@given(st.integers(1, 8), workers)
def test_plan_keeps_the_wanted_number_and_harms_no_stream(wanted: int, seen: list[Observed]) -> None:
    actions = plan(wanted, seen, max_workers=8, grace_s=GRACE_S)
    by_index = {worker.index: worker for worker in seen}
    assert len({action.index for action in actions}) == len(actions), "one thing at a time to each worker"
    stay = kept(seen, actions)
    starts = [action for action in actions if isinstance(action, Start)]
    assert len(stay) <= wanted
    assert len(stay) + len(starts) == min(wanted, len(stay) + 8 - len(seen))
    assert not {action.index for action in starts} & by_index.keys(), "its name and port are still taken"

    serving = [w for w in seen if w.phase is Phase.SERVING and not w.leaves]
    assert len([w for w in stay if w.phase is Phase.SERVING]) == min(wanted, len(serving))
    for action in actions:
        worker = by_index.get(action.index)
        if isinstance(action, End) and worker is not None and worker.phase in (Phase.SERVING, Phase.DRAINING):
            assert worker.leaving_s is not None
            assert worker.leaving_s > GRACE_S, "only a drain that takes too long is cut off"
        if isinstance(action, Drain) and worker is not None and not worker.leaves and worker.phase is Phase.SERVING:
            spared = [w for w in stay if w.phase is Phase.SERVING]
            assert all(w.num_sessions >= worker.num_sessions for w in spared), "the idlest go first"


@many
@given(st.integers(1, 8), workers, st.data())
def test_the_fleet_comes_to_rest_at_the_wanted_number(wanted: int, seen: list[Observed], data: st.DataObject) -> None:
    """Whatever is there, if actions are carried out, now and then one not, and workers go their way."""
    fleet = {worker.index: worker for worker in seen}
    for turn in range(30):
        actions = plan(wanted, list(fleet.values()), max_workers=8, grace_s=GRACE_S)
        for index, worker in list(fleet.items()):  # on they go
            match worker.phase:
                case Phase.PENDING:
                    fleet[index] = dataclasses.replace(worker, phase=Phase.STARTING)
                case Phase.STARTING:
                    fleet[index] = dataclasses.replace(worker, phase=Phase.SERVING)
                case Phase.DRAINING:
                    fleet[index] = dataclasses.replace(worker, phase=Phase.DRAINED, num_sessions=0)
                case Phase.ENDING:
                    del fleet[index]
        for action in actions:
            if turn < 10 and data.draw(st.booleans()):
                continue  # lost on the way
            match action:
                case Start(index):
                    fleet[index] = Observed(index, Phase.PENDING)
                case Drain(index) if index in fleet:
                    fleet[index] = dataclasses.replace(fleet[index], phase=Phase.DRAINING, leaving_s=0.0)
                case End(index) if index in fleet:
                    fleet[index] = dataclasses.replace(fleet[index], phase=Phase.ENDING)
    assert [worker.phase for worker in fleet.values()] == [Phase.SERVING] * wanted
    assert not plan(wanted, list(fleet.values()), max_workers=8, grace_s=GRACE_S)


def test_no_worker_is_started_while_failing_ones_are_given_time() -> None:
    seen = [Observed(0, Phase.SERVING), Observed(1, Phase.FAILED)]
    assert plan(2, seen, max_workers=4, grace_s=GRACE_S, may_start=False) == [End(1)]
    assert plan(2, seen, max_workers=4, grace_s=GRACE_S) == [End(1), Start(2)]
