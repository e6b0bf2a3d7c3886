"""The driver's loop over a fleet that only pretends: what it starts, drains and ends, and what it says."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from dataclasses import dataclass, field

import pytest

pytest.importorskip("ray")

from test_ray_scaling import told, told_worker

from deploy.ray.actors import WorkerStatus
from deploy.ray.config import Fleet, Pool, Scaling
from deploy.ray.controller import MAX_RETRY_S, PATIENCE_S, RETRY_S, Controller
from deploy.ray.fleet import Placed, grace_s_of
from deploy.ray.reconcile import Phase
from outrider.server_info import ServerInfo

TARGETS = Pool(name="t", role="target", replicas=2, min_replicas=1, max_replicas=3, settings={"model": "toy:vocab=8"})
FLEET = Fleet(coordinators=("c:1",), pools=(TARGETS,), scaling=Scaling(up_delay_s=0, down_delay_s=0))
QUICK = FLEET.model_copy(update={"scaling": Scaling(interval_s=0.001)})
LATER = {Phase.PENDING: Phase.STARTING, Phase.STARTING: Phase.SERVING, Phase.DRAINING: Phase.DRAINED}


@dataclass
class FakeFleet:
    """Workers that come up, drain and go, one phase a look, unless they are `stuck` in theirs."""

    fleet: Fleet = FLEET
    placed: dict[str, Placed] = field(default_factory=dict)
    done: list[str] = field(default_factory=list)
    stuck: dict[str, Phase] = field(default_factory=dict)
    num_started: int = 0

    def look(self) -> list[Placed]:
        lost = []
        for worker in self.workers():
            if worker.ending:
                del self.placed[worker.name]
                continue
            if self.stuck.get(worker.name) is Phase.ENDING:
                del self.placed[worker.name]
                lost.append(worker)
                continue
            at = worker.phase
            self.show(worker, self.stuck.get(worker.name, LATER.get(at, at)))
        return lost

    def show(self, worker: Placed, phase: Phase) -> None:
        if phase is not Phase.PENDING:
            failure = "Traceback: bad model" if phase is Phase.FAILED else ""
            worker.status = WorkerStatus(worker.name, f"{worker.name}:1", worker.port, phase, failure)

    def workers(self, pool: Pool | None = None) -> list[Placed]:
        return list(self.placed.values())

    def lacks(self, workers: Iterable[Placed]) -> list[str]:
        return [f"{worker.name}: no GPU" for worker in workers]

    def start(self, pool: Pool, index: int) -> None:
        self.num_started += 1
        name = f"t-{index}"
        self.placed[name] = Placed(name, pool, index, actor=None, port=1000 + self.num_started)
        self.done.append(f"start {name}")

    def drain(self, worker: Placed) -> None:
        self.done.append(f"drain {worker.name}")
        if self.stuck.get(worker.name) is not Phase.SERVING:
            self.show(worker, Phase.DRAINING)

    def end(self, worker: Placed) -> None:
        self.done.append(f"end {worker.name}")
        worker.ending = True


class Rig:
    """A controller in a world whose clock the test turns."""

    def __init__(self) -> None:
        self.fake, self.said, self.now = FakeFleet(), [], 0.0
        self.info: ServerInfo | None = None
        self.controller = Controller(FLEET, self.fake, self.ask, self.said.append, clock=lambda: self.now)

    async def ask(self) -> tuple[dict[str, ServerInfo], list[str]]:
        return ({"c:1": self.info}, []) if self.info is not None else ({}, ["c:1: not there"])

    def load(self, num_sessions: int, num_waiting: int = 0, usage: float = 0.7) -> None:
        """On each worker that serves, and in the coordinator."""
        own = [w for w in self.fake.workers() if w.phase is Phase.SERVING]
        num_free = round(10 * (1 - usage))
        workers = (told_worker(f"{w.name}:1", num_sessions=num_sessions, num_free_blocks=num_free) for w in own)
        self.info = told(*workers, num_waiting=num_waiting)

    async def step(self, seconds: float = 1.0) -> list[str]:
        """What was done in a step."""
        self.now += seconds
        self.fake.done.clear()
        await self.controller.step()
        return list(self.fake.done)

    async def settle(self) -> None:
        for _ in range(4):
            await self.step()


async def test_a_pool_grows_by_what_waits_and_shrinks_by_draining() -> None:
    rig = Rig()
    assert await rig.step() == ["start t-0", "start t-1"]
    await rig.settle()
    assert [worker.phase for worker in rig.fake.workers()] == [Phase.SERVING] * 2
    assert rig.said[0] == "no answer from c:1: not there"
    assert rig.said[1:] == ["t-0 serves at t-0:1 (pid 1001)", "t-1 serves at t-1:1 (pid 1002)"]

    rig.load(num_sessions=4, num_waiting=2, usage=1.0)
    assert await rig.step() == ["start t-2"]
    assert "t: 2 -> 3 workers: streams waiting for a place: 2" in rig.said
    await rig.settle()
    rig.load(num_sessions=1, usage=0.1)
    assert await rig.step() == ["drain t-2"]
    assert await rig.step() == ["end t-2", "drain t-1"]
    assert await rig.step() == ["end t-1"]
    await rig.settle()
    assert [worker.name for worker in rig.fake.workers()] == ["t-0"], "one stays, however idle"
    assert rig.said[-4:] == [
        "t: 2 -> 1 workers: 10% of their room is taken",
        "t-1 drains",
        "t-2 has ended",
        "t-1 has ended",
    ]


async def test_without_word_of_a_coordinator_nothing_is_scaled_but_what_was_lost_is_replaced() -> None:
    rig = Rig()
    await rig.settle()
    rig.fake.stuck["t-1"] = Phase.ENDING
    assert await rig.step() == []
    assert rig.said[-1].startswith("t-1 ended: ")
    del rig.fake.stuck["t-1"]
    assert await rig.step(RETRY_S) == ["start t-1"]


async def test_a_drain_that_was_not_heard_is_asked_for_again_and_cut_off_at_last() -> None:
    rig = Rig()
    await rig.settle()
    rig.load(num_sessions=1, usage=0.1)
    rig.fake.stuck["t-1"] = Phase.SERVING
    assert await rig.step() == ["drain t-1"]
    assert await rig.step() == ["drain t-1"]
    assert rig.said.count("t-1 drains") == 1
    assert await rig.step(grace_s_of(TARGETS)) == ["end t-1"]
    # its name begins anew
    del rig.fake.stuck["t-1"]
    await rig.step()
    rig.load(num_sessions=4, num_waiting=4, usage=1.0)
    assert await rig.step() == ["start t-1"]
    await rig.settle()
    assert {worker.name: worker.phase for worker in rig.fake.workers()} == dict.fromkeys(["t-0", "t-1"], Phase.SERVING)


async def test_workers_that_fail_to_start_are_replaced_less_and_less_often() -> None:
    rig = Rig()
    rig.fake.stuck["t-1"] = Phase.FAILED
    await rig.step()
    delay_s, delays = RETRY_S, []
    while not delays or delays[-1] < MAX_RETRY_S:
        assert await rig.step() == ["end t-1"]
        assert "t-1 on t-1:1 cannot serve:\nTraceback: bad model" in rig.said[-1]
        assert rig.said[-1].endswith(f"Another one in {delay_s:g} s.")
        delays.append(delay_s)
        assert await rig.step(delay_s - 0.5) == []
        assert await rig.step(0.5) == ["start t-1"]
        delay_s = min(2 * delay_s, MAX_RETRY_S)
    del rig.fake.stuck["t-1"]
    await rig.settle()
    rig.fake.stuck["t-1"] = Phase.FAILED
    await rig.step()
    assert rig.said[-1].endswith(f"Another one in {RETRY_S:g} s."), "all served meanwhile"


async def test_who_has_no_place_is_told_once_with_what_lacks() -> None:
    rig = Rig()
    rig.fake.stuck["t-1"] = Phase.PENDING
    await rig.settle()
    assert not [line for line in rig.said if "no place" in line]
    for _ in range(3):
        await rig.step(PATIENCE_S)
    assert [line for line in rig.said if "no place" in line] == ["no place yet for t-1: no GPU"]


async def test_a_new_driver_keeps_what_an_earlier_one_found_the_need_for() -> None:
    rig = Rig()
    await rig.settle()
    rig.fake.start(TARGETS, 2)
    await rig.settle()
    assert [worker.name for worker in rig.fake.workers()] == ["t-0", "t-1"], "nobody wanted it"
    rig.fake.start(TARGETS, 2)
    rig.controller = Controller(FLEET, rig.fake, rig.ask, rig.said.append, clock=lambda: rig.now)
    await rig.settle()
    assert [worker.name for worker in rig.fake.workers()] == ["t-0", "t-1", "t-2"]


async def test_a_look_that_fails_drains_nobody_and_is_repeated() -> None:
    rig, stop, looks = Rig(), asyncio.Event(), 0
    rig.controller = Controller(QUICK, rig.fake, rig.ask, rig.said.append, clock=lambda: rig.now)
    look = rig.fake.look

    def failing() -> list[Placed]:
        nonlocal looks
        looks += 1
        if looks < 4:
            raise ConnectionError("no head node")
        stop.set()
        return look()

    rig.fake.look = failing
    await rig.controller.run(stop)
    assert rig.said.count("ConnectionError: no head node; looking again") == 1
    assert rig.fake.done == ["start t-0", "start t-1"]


async def test_a_restarted_worker_is_told() -> None:
    rig = Rig()
    await rig.settle()
    rig.fake.placed["t-0"].port = 77
    await rig.step()
    assert rig.said[-1] == "t-0 serves again at t-0:1 (pid 77)"
