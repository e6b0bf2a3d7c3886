"""The fleet on a real Ray of one node: placed, used through the coordinator, killed, restarted, refused with a reason.

The GPU and the labels are declared, not real: Ray's resources are logical. The workers run toy models.
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Iterator
from dataclasses import dataclass

import pytest

pytest.importorskip("ray")

from deploy.ray.config import Fleet, Pool
from deploy.ray.fleet import PlacementError, RayFleet, WorkerFailed, free_port
from deploy.ray.local import local_coordinator, local_ray, wait_workers
from outrider import Client, Completion

pytestmark = pytest.mark.slow

TOY = "toy:vocab=64,agreement=0.8,seed=1"
POOL = "outrider.dev/pool"
DRAFTS = Pool(
    name="draft",
    role="draft",
    replicas=2,
    num_cpus=0.25,
    num_gpus=0.5,
    label_selector={POOL: "in(draft,any)"},
    settings={"model": TOY, "device": "cpu"},
)
TARGETS = Pool(name="target", role="target", num_cpus=0.25, resources={"large": 1}, settings={"model": TOY})


@dataclass(frozen=True)
class Running:
    fleet: Fleet
    placed: RayFleet
    port: int


@pytest.fixture(scope="module", autouse=True)
def cluster() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_AUTH_MODE", "disabled")
        with local_ray({POOL: "any"}, num_cpus=2, num_gpus=1, resources={"large": 1}):
            yield


@pytest.fixture(scope="module")
def running() -> Iterator[Running]:
    port = free_port()
    fleet = Fleet(coordinators=(f"127.0.0.1:{port}",), pools=(DRAFTS, TARGETS))
    placed = RayFleet.place(fleet)
    try:
        placed.wait_serving(placement_timeout_s=240, ready_timeout_s=240)
        yield Running(fleet, placed, port)
    finally:
        placed.stop()


async def complete(client: Client) -> Completion:
    return await client.complete([1, 2, 3], max_tokens=32, temperature=0.0, ignore_eos=True, num_speculative_tokens=3)


async def test_workers_serve_through_the_coordinator_and_again_after_their_process_was_killed(running: Running) -> None:
    before = running.placed.statuses()
    assert sorted(before) == ["draft-0", "draft-1", "target-0"]
    assert len({status.address for status in before.values()}) == 3
    async with local_coordinator(running.port) as address, Client(address, timeout_s=240) as client:
        await wait_workers(client, lambda workers: len(workers) == 3, timeout_s=240)
        first = await complete(client)
        assert first.usage.completion_tokens == 32
        assert first.speculation.num_draft_tokens > 0, "inconclusive: nothing was drafted"

        for name in ("draft-0", "target-0"):
            os.kill(before[name].pid, signal.SIGKILL)
        for name in ("draft-0", "target-0"):
            again = await asyncio.to_thread(running.placed.wait_restarted, before[name], timeout_s=240)
            assert again.address == before[name].address
            assert again.pid != before[name].pid
        assert running.placed.statuses()["draft-1"] == before["draft-1"]

        info = await wait_workers(client, lambda workers: len(workers) == 3, timeout_s=240)
        assert {worker.address for worker in info.workers} == {status.address for status in before.values()}
        second = await complete(client)
        assert second.token_ids == first.token_ids
        assert second.speculation.num_draft_tokens > 0, "inconclusive: nothing was drafted"


def test_find_gives_the_same_actors(running: Running) -> None:
    assert RayFleet.find(running.fleet).statuses() == running.placed.statuses()


@pytest.mark.parametrize(
    ("demand", "reason"),
    [
        ({"label_selector": {POOL: "large"}}, f"no node matches the label selector {POOL} = 'large'.* = any"),
        ({"label_selector": {"zone": "a"}}, "zone = 'a' .no node carries zone"),
        ({"num_gpus": 8}, "GPU: 8 needed on one node, the largest matching node has 1"),
        ({"resources": {"fast-link": 1}}, "fast-link: 1 needed on one node, the largest matching node has 0"),
    ],
)
def test_what_fits_nowhere_is_reported_with_what_lacks(demand: dict, reason: str) -> None:
    pool = Pool(name="homeless", role="target", settings={"model": TOY, "device": "cpu"}, **demand)
    placed = RayFleet.place(Fleet(coordinators=("127.0.0.1:1",), pools=(pool,)))
    try:
        with pytest.raises(PlacementError, match=f"homeless-0: .*{reason}"):
            placed.wait_serving(placement_timeout_s=1, ready_timeout_s=1)
    finally:
        placed.kill()


def test_worker_that_cannot_start_says_why() -> None:
    pool = Pool(name="broken", role="target", num_cpus=0, settings={"model": "toy:nonsense=1"})
    placed = RayFleet.place(Fleet(coordinators=("127.0.0.1:1",), pools=(pool,)))
    try:
        with pytest.raises(WorkerFailed, match="nonsense"):
            placed.wait_serving(placement_timeout_s=30, ready_timeout_s=240)
    finally:
        placed.kill()
