"""The fleet on a real Ray of one node: placed, used through the coordinator, killed, scaled, drained, refused.

The GPUs, the kind of card and the labels are declared, not real: Ray's resources are logical. Workers run toy models.
"""

from __future__ import annotations

import asyncio
import os
import re
import signal
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest

pytest.importorskip("ray")

import ray
from conftest import SCALE

from deploy.ray.actors import WorkerStatus
from deploy.ray.config import Fleet, Pool, Scaling
from deploy.ray.controller import Controller
from deploy.ray.coordinators import Coordinators
from deploy.ray.fleet import PlacementError, RayFleet, WorkerFailed, free_port
from deploy.ray.local import local_coordinator, local_ray, wait_workers
from deploy.ray.reconcile import Phase
from outrider import Chunk, Client, Complete

pytestmark = pytest.mark.slow

TIMEOUT_S = 240.0
POOL = "outrider.dev/pool"
TOY = "toy:vocab=64,agreement=0.8,seed=1,pass_ms=8"
NUM_TOKENS = 150
PLACES = 4
"""Streams of that length that fit on a target at once."""
BLOCKS = PLACES * 10 + 2
DRAFTS = Pool(
    name="draft",
    role="draft",
    replicas=2,
    num_cpus=0.1,
    num_gpus=0.5,
    accelerator_type="L4",
    label_selector={POOL: "in(draft,any)"},
    settings={"model": TOY, "device": "cpu", "insecure": True},
)
TARGETS = Pool(
    name="target",
    role="target",
    min_replicas=1,
    replicas=2,
    max_replicas=3,
    num_cpus=0.1,
    resources={"large": 1},
    settings={"model": f"{TOY},blocks={BLOCKS}", "cache_overcommit": 1.0, "insecure": True},
)
UP = Scaling(up_delay_s=0, down_delay_s=1e9, min_usage=0.8, max_usage=0.9)
DOWN = UP.model_copy(update={"down_delay_s": 0.0})


@pytest.fixture(scope="module", autouse=True)
def cluster() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_AUTH_MODE", "disabled")
        resources = {"large": 3, "accelerator_type:L4": 1}
        with local_ray({POOL: "any"}, num_cpus=2, num_gpus=1, resources=resources):
            yield


@dataclass(frozen=True)
class Running:
    fleet: Fleet
    placed: RayFleet
    port: int


@pytest.fixture(scope="module")
def running() -> Iterator[Running]:
    """Two drafts and two targets that serve, for coordinators at `port`; at the end nothing of them is left."""
    port = free_port()
    fleet = Fleet(coordinators=(f"127.0.0.1:{port}",), pools=(DRAFTS, TARGETS))
    placed = RayFleet.place(fleet)
    try:
        placed.wait_serving(placement_timeout_s=TIMEOUT_S, ready_timeout_s=TIMEOUT_S)
        yield Running(fleet, placed, port)
        pids = [status.pid for status in placed.statuses().values() if status is not None]
        assert len(pids) > 1
    finally:
        placed.stop()
    nothing_is_left(pids)


def nothing_is_left(pids: list[int]) -> None:
    """Of actors and their names, placement groups, processes, resources."""
    assert ray.util.list_named_actors(all_namespaces=True) == []
    assert all(group["state"] == "REMOVED" for group in ray.util.placement_group_table().values())
    wait_until(lambda: not any(map(is_alive, pids)) and ray.available_resources() == ray.cluster_resources())


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + TIMEOUT_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.1)


def is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


@asynccontextmanager
async def service(running: Running) -> AsyncIterator[Client]:
    """A coordinator that all workers have registered with. Leases outlast a busy machine's pauses."""
    coordinator = local_coordinator(running.port, lease_ms=60_000)
    async with coordinator as address, Client(address, timeout_s=TIMEOUT_S) as client:
        await all_registered(running, client)
        yield client


async def all_registered(running: Running, client: Client) -> None:
    expected = {status.address for status in running.placed.statuses().values() if status is not None}
    await wait_workers(client, lambda workers: {w.address for w in workers} == expected, timeout_s=TIMEOUT_S)


async def complete(client: Client, first: int, begun: asyncio.Event | None = None) -> tuple[int, ...]:
    """A greedy text. begun: set once the client has its first drafted tokens."""
    ids: list[int] = []
    async for event in client.generate(
        [first, 2, 3], max_tokens=NUM_TOKENS, temperature=0.0, ignore_eos=True, num_speculative_tokens=3
    ):
        if isinstance(event, Chunk):
            ids += event.token_ids
            if begun is not None and len(ids) > 8:
                begun.set()
        elif isinstance(event, Complete):
            assert event.speculation.num_draft_tokens > 0, "inconclusive: nothing was drafted"
    assert len(ids) == NUM_TOKENS
    return tuple(ids)


class Streams:
    """Running texts."""

    def __init__(self, client: Client, number: int) -> None:
        self._begun = [asyncio.Event() for _ in range(number)]
        self._tasks = [asyncio.create_task(complete(client, i, begun)) for i, begun in enumerate(self._begun)]

    async def wait_begun(self) -> None:
        """All have drafted tokens; raises where one failed before."""
        waits = asyncio.gather(*(begun.wait() for begun in self._begun))
        await asyncio.wait({waits, *self._tasks}, return_when=asyncio.FIRST_COMPLETED)
        assert waits.done(), "inconclusive: a text ended before all had begun"

    async def texts(self) -> list[tuple[int, ...]]:
        return await asyncio.gather(*self._tasks)


async def num_sessions(client: Client) -> dict[str, int]:
    """By address."""
    return {worker.address: worker.num_sessions for worker in (await client.server_info()).workers}


async def test_a_killed_process_serves_again_at_its_address_and_texts_across_it_are_equal(running: Running) -> None:
    before = running.placed.statuses()
    assert sorted(before) == ["draft-0", "draft-1", "target-0", "target-1"]
    assert len({status.address for status in before.values()}) == 4
    assert len({status.pid for status in before.values()}) == 4
    async with service(running) as client:
        expected = await Streams(client, 4).texts()
        streams = Streams(client, 4)
        await streams.wait_begun()
        held = await num_sessions(client)
        for name in ("draft-0", "target-0"):
            assert held[before[name].address] > 0, "inconclusive: nobody had a stream there"
            os.kill(before[name].pid, signal.SIGKILL)
        assert await streams.texts() == expected
        for name in ("draft-0", "target-0"):
            again = await asyncio.to_thread(running.placed.wait_restarted, before[name], timeout_s=TIMEOUT_S)
            assert again.address == before[name].address
            assert again.pid != before[name].pid
        for name in ("draft-1", "target-1"):
            assert running.placed.statuses()[name] == before[name]
        await all_registered(running, client)
        assert await Streams(client, 4).texts() == expected
        async with asyncio.timeout(TIMEOUT_S):  # workers are asked now and then
            while any(worker.capacity.num_sessions for worker in (await client.server_info()).workers):
                await asyncio.sleep(0.1)


async def test_targets_follow_their_load_up_and_down_and_no_stream_is_lost(running: Running) -> None:
    said: list[str] = []
    coordinators = Coordinators(running.fleet.coordinators)
    async with service(running) as client:
        expected = await Streams(client, PLACES).texts()

        async def step_until(done: Callable[[dict[str, Phase]], bool], num_streams: int, scaling: Scaling) -> None:
            """Under so many streams at any time, all texts as expected."""
            keeper = Controller(
                running.fleet.model_copy(update={"scaling": scaling}), running.placed, coordinators.ask, said.append
            )
            enough = asyncio.Event()

            async def stream(number: int) -> None:
                while not enough.is_set():
                    assert await complete(client, number) == expected[number]

            async with asyncio.timeout(TIMEOUT_S), asyncio.TaskGroup() as streams:
                for i in range(num_streams):
                    streams.create_task(stream(i % len(expected)))
                addresses = {w.status.address for w in running.placed.workers(TARGETS) if w.status is not None}
                while not all([(await num_sessions(client))[address] for address in addresses]):
                    await asyncio.sleep(0.05)
                while not done({worker.name: worker.phase for worker in running.placed.workers(TARGETS)}):
                    await keeper.step()
                    await asyncio.sleep(0.05)
                enough.set()

        # more than fit on two
        await step_until(lambda phases: phases.get("target-2") is Phase.SERVING, 3 * PLACES, UP)
        assert any(line.startswith("target: 2 -> 3 workers: streams waiting for a place: ") for line in said), said
        await all_registered(running, client)

        # as many as fit on one, each of the three with one of them
        pids = {worker.name: worker.status.pid for worker in running.placed.workers(TARGETS) if worker.status}
        await step_until(lambda phases: list(phases.values()) == [Phase.SERVING], 3, DOWN)
        (left,) = running.placed.workers(TARGETS)
        assert sum(line.endswith(" drains") for line in said) == 2
        ended = [pid for name, pid in pids.items() if name != left.name]
        assert len(ended) == 2
        await asyncio.to_thread(wait_until, lambda: not any(map(is_alive, ended)))
    await coordinators.close()


def test_find_gives_the_same_actors(running: Running) -> None:
    assert RayFleet.find(running.fleet).statuses() == running.placed.statuses()


def small(**demand: Any) -> Fleet:
    values: dict[str, Any] = {"settings": {"model": TOY, "device": "cpu"}, "num_cpus": 0, **demand}
    values["settings"] = {"insecure": True, **values["settings"]}
    return Fleet(coordinators=("127.0.0.1:1",), pools=(Pool(name="other", role="target", **values),))


@pytest.mark.parametrize(
    ("demand", "reason"),
    [
        ({"label_selector": {POOL: "large"}}, f"no node matches the label selector {POOL} = 'large'.* = any"),
        ({"label_selector": {"zone": "a"}}, "zone = 'a' .no node carries zone"),
        ({"num_gpus": 8}, "GPU: 8 needed on one node, the largest matching node has 1"),
        ({"accelerator_type": "H100"}, "no matching node has an accelerator H100 .the cluster has L4"),
        ({"resources": {"fast-link": 1}}, "fast-link: 1 needed on one node, the largest matching node has 0"),
        ({"num_gpus": 2, "settings": {"model": TOY, "device": "cpu", "tensor_parallel": 2}}, "GPU: 2 needed on one"),
    ],
)
def test_what_fits_nowhere_is_reported_with_what_lacks(demand: dict[str, Any], reason: str) -> None:
    placed = RayFleet.place(small(**demand))
    try:
        with pytest.raises(PlacementError, match=f"other-0: .*{reason}"):
            placed.wait_serving(placement_timeout_s=0.5, ready_timeout_s=1)
    finally:
        placed.kill()
    assert not placed.workers()


@pytest.mark.parametrize(
    ("demand", "reason"),
    [
        ({"settings": {"model": "toy:nonsense=1"}}, "nonsense"),
        (  # its placement group has a place: it gets as far as its model, which cannot be split
            {
                "settings": {"model": TOY, "tensor_parallel": 2},
                "resources": {"large": 1},
                "accelerator_type": "L4",
                "label_selector": {POOL: "any"},
            },
            "a toy has nothing to split",
        ),
    ],
)
def test_worker_that_cannot_start_says_why(demand: dict[str, Any], reason: str) -> None:
    placed = RayFleet.place(small(**demand))
    try:
        with pytest.raises(WorkerFailed, match=reason):
            placed.wait_serving(placement_timeout_s=TIMEOUT_S, ready_timeout_s=TIMEOUT_S)
    finally:
        placed.kill()


def test_detached_workers_stay_until_they_are_found_and_stopped() -> None:
    fleet = small(replicas=2)
    status = RayFleet.place(fleet, detached=True).wait_serving(placement_timeout_s=TIMEOUT_S, ready_timeout_s=TIMEOUT_S)
    again = RayFleet.place(fleet, detached=True)
    assert again.statuses() == status
    again.stop(adopted=False)
    found = RayFleet.find(small())  # of a file that wants fewer by now
    assert found.statuses() == status
    found.stop()
    assert RayFleet.find(fleet).statuses() == {}
    nothing_of(status)


@pytest.mark.skipif(SCALE < 1, reason="four loads of torch take too long for `make test`")
def test_ranks_keep_their_place_while_they_are_started_again(tmp_path: Path) -> None:
    """A real model, tiny, on two ranks of the CPU. Their place is counted in `large`, as cards would be."""
    import tiny_heads

    model = {"model": str(tiny_heads.write_target(tmp_path / "target")), "tensor_parallel": 2, "num_threads": 1}
    placed = RayFleet.place(small(resources={"large": 2}, settings=model))
    try:
        before = placed.wait_serving(placement_timeout_s=TIMEOUT_S, ready_timeout_s=TIMEOUT_S)["other-0"]
        ranks = [child.pid for child in psutil.Process(before.pid).children()]
        assert len(ranks) == 1
        free = ray.available_resources().get("large", 0.0)
        os.kill(before.pid, signal.SIGKILL)
        wait_until(lambda: not is_alive(before.pid))
        assert ray.available_resources().get("large", 0.0) == free, "somebody else could have taken it"
        again = placed.wait_restarted(before, timeout_s=TIMEOUT_S)
        assert again.address == before.address
        wait_until(lambda: not any(map(is_alive, ranks)))
    finally:
        placed.stop()
    nothing_of({"other-0": again})


def nothing_of(statuses: Mapping[str, WorkerStatus]) -> None:
    """Is left."""
    assert not {actor["name"] for actor in ray.util.list_named_actors(all_namespaces=True)} & statuses.keys()
    groups = ray.util.placement_group_table().values()
    assert all(group["state"] == "REMOVED" for group in groups if group["name"] in statuses)
    wait_until(lambda: not any(is_alive(status.pid) for status in statuses.values()))


async def test_outrider_ray_up_places_keeps_and_drains(tmp_path: Path) -> None:
    file = tmp_path / "fleet.toml"
    file.write_text(
        f'coordinators = ["127.0.0.1:1"]\n[[pools]]\nname = "other"\nrole = "target"\nnum_cpus = 0\nmax_replicas = 2\n'
        f'settings = {{ model = "{TOY}", insecure = true }}\n'
    )
    address = ray.get_runtime_context().gcs_address
    command = [sys.executable, "-m", "outrider.cli", "ray", "up", str(file), f"--address={address}"]
    driver = await asyncio.create_subprocess_exec(*command, stderr=asyncio.subprocess.PIPE)
    try:
        async with asyncio.timeout(TIMEOUT_S):
            assert driver.stderr is not None
            told = ""
            while "no answer from" not in told or "serves at" not in told:
                line = (await driver.stderr.readline()).decode()
                assert line, told
                told += line
            driver.terminate()
            told += (await driver.stderr.read()).decode()
            assert await driver.wait() == 0, told
    finally:
        if driver.returncode is None:
            driver.kill()
            await driver.wait()
    (pid,) = map(int, re.findall(r"other-0 serves at \S+ \(pid (\d+)\)", told))
    assert "draining" in told
    assert "other-0" not in {actor["name"] for actor in ray.util.list_named_actors(all_namespaces=True)}
    await asyncio.to_thread(wait_until, lambda: not is_alive(pid))
