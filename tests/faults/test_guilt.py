"""Who is to blame for dead workers, as real processes: what did not die counts for nothing, and a request for one.

Where workers only stood still, were cut off, or were killed by what others asked, no stream that was there fails. And a
request takes two targets at most, and two draft workers in a row, however many choices it has.
"""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from conftest import scaled
from faults.processes import Fleet
from faults.soak.relay import Relay
from faults.texts import PATIENCE_S, Text, healthy

import outrider
from outrider.errors import OutriderError

TOY = "toy:vocab=24,seed=5,order=3,blocks=600"
DEADLY = 17
PLAIN: dict[str, Any] = {"temperature": 0.0, "num_speculative_tokens": 0}
SHUNNED = {**PLAIN, "logit_bias": {DEADLY: -100.0}}


@asynccontextmanager
async def fleet(target: str, num_targets: int, draft: str = "", num_drafts: int = 0) -> AsyncIterator[Any]:
    """Each target behind a relay. (fleet, relays, client)."""
    async with Fleet.running(drain_grace_s=1.0, log_level="error") as running:
        relays = [
            Relay(await running.start(f"target-{number}", "target-worker", model=target))
            for number in range(num_targets)
        ]
        drafts = [await running.start(f"draft-{number}", "draft-worker", model=draft) for number in range(num_drafts)]
        try:
            addresses = [await relay.start() for relay in relays]
            coordinator = await running.start(
                "coordinator",
                "coordinator",
                target_workers=",".join(addresses),
                draft_workers=",".join(drafts),
                target_wait_s=60,
                peer_timeout_s=2.0,
                local_drafters="",
            )
            async with outrider.Client(coordinator, resume=None) as client:
                await healthy(client, num_targets + num_drafts)
                yield running, relays, client
        finally:
            for relay in relays:
                await relay.close()


async def busy(client: outrider.Client, relays: list[Relay]) -> list[int]:
    """Targets that have streams."""
    places = {relay.address: number for number, relay in enumerate(relays)}
    workers = (await client.server_info()).workers
    return [places[w.address] for w in workers if w.num_sessions and w.address in places]


async def begun(client: outrider.Client, length: int) -> tuple[list[int], Text, asyncio.Task[list[int]]]:
    """A whole text, and the same again, which has come some way."""
    whole, text = await Text([1, 2], PLAIN).run(client, length), Text([1, 2], PLAIN)
    task = asyncio.create_task(text.run(client, length))
    await text.reaches(8)
    return whole, text, task


@pytest.mark.slow
@pytest.mark.parametrize("first", ["frozen", "cut off"])
async def test_a_stream_whose_first_worker_answers_again_outlives_the_death_of_its_second(first: str) -> None:
    async with fleet(f"{TOY},pass_ms=100", 3) as (running, relays, client):
        whole, text, task = await begun(client, 24)
        (lost,) = await busy(client, relays)
        if first == "frozen":
            running.signal(f"target-{lost}", signal.SIGSTOP)
        else:
            relays[lost].cut()
        while (now := await busy(client, relays)) in ([], [lost]):
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.15)  # it is being computed there, as a suspect
        num_tokens = len(text.ids)
        relays[lost].heal()
        running.signal(f"target-{lost}", signal.SIGCONT)
        (second,) = [place for place in now if place != lost]
        running.signal(f"target-{second}", signal.SIGKILL)
        assert await asyncio.wait_for(task, PATIENCE_S) == whole
        assert num_tokens < 24, "INCONCLUSIVE: its text was done when the second one died"
        assert running.dead == [f"target-{second}"]


@pytest.mark.slow
async def test_a_stream_outlives_two_workers_that_stand_still_one_after_the_other() -> None:
    async with fleet(f"{TOY},pass_ms=50", 3) as (running, relays, client):
        whole, _, task = await begun(client, 60)
        frozen: list[int] = []
        while len(frozen) < 2:
            new = [place for place in await busy(client, relays) if place not in frozen]
            for place in new[:1]:
                await asyncio.sleep(0.15)  # it is being computed there, as a suspect the second time
                running.signal(f"target-{place}", signal.SIGSTOP)
                frozen.append(place)
            await asyncio.sleep(0.005)
        await asyncio.sleep(5.0)  # both are found silent, and asked once more, meanwhile
        for place in frozen:
            running.signal(f"target-{place}", signal.SIGCONT)
        assert await asyncio.wait_for(task, PATIENCE_S) == whole


@pytest.mark.slow
@pytest.mark.parametrize("num_choices", [2, 7])
async def test_a_deadly_request_takes_two_targets_however_many_choices_it_has(num_choices: int) -> None:
    async with fleet(f"{TOY},pass_ms=10,dies_on={DEADLY}", 5) as (running, _, client):
        whole = await Text([1, 2], SHUNNED).run(client)
        for temperature in (0.0, 1.0):
            beside = Text([1, 2], SHUNNED)
            task = asyncio.create_task(beside.run(client))
            await beside.reaches(10)
            with pytest.raises(OutriderError) as failure:
                deadly = Text([3, DEADLY, 4], {**PLAIN, "temperature": temperature, "n": num_choices})
                await asyncio.wait_for(deadly.run(client, 9), PATIENCE_S)
            assert (failure.value.status, failure.value.reason) == ("INTERNAL", "POISONED_REQUEST")
            assert await asyncio.wait_for(task, PATIENCE_S) == whole
            gone = running.dead
            assert len(gone) == 2
            await asyncio.gather(*(running.restart(name) for name in gone))
            await healthy(client, 5)


@pytest.mark.slow
async def test_a_slow_stream_outlives_any_number_of_deadly_requests_of_others() -> None:
    async with fleet(f"{TOY},pass_ms=120,dies_on={DEADLY}", 2) as (running, _, client):
        slow = Text([1, 2], SHUNNED)
        task = asyncio.create_task(slow.run(client, 3000))
        for _ in range(scaled(20, at_least=10)):
            await slow.reaches(len(slow.ids) + 2)
            with pytest.raises(OutriderError) as failure:
                deadly = asyncio.create_task(Text([3, DEADLY, 4], PLAIN).run(client, 9))
                while not deadly.done():
                    await asyncio.gather(*(running.restart(name) for name in running.dead))
                    await asyncio.sleep(0.02)
                await deadly
            assert failure.value.reason == "POISONED_REQUEST"
            await asyncio.gather(*(running.restart(name) for name in running.dead))
            await healthy(client, 2)
        assert not task.done(), task.exception()
        num_tokens = len(slow.ids)
        await slow.reaches(num_tokens + 2)
        task.cancel()


@pytest.mark.slow
async def test_a_request_that_kills_draft_workers_goes_on_without_after_the_second() -> None:
    draft = f"{TOY},agreement=0.9,pass_ms=1,dies_on={DEADLY}"
    async with fleet(f"{TOY},pass_ms=5", 1, draft, 4) as (running, _, client):
        whole = await Text([3, DEADLY, 4], PLAIN).run(client, 400)
        asked = {"temperature": 0.0, "num_speculative_tokens": 3, "drafter": "model"}
        assert await Text([3, DEADLY, 4], asked).run(client, 400) == whole
        assert len(running.dead) == 2, "in a text of two seconds; the next one is asked half a minute later"
        shunned = {**asked, "logit_bias": {DEADLY: -100.0}}
        done = await client.complete([1, 2], **shunned, max_tokens=100)
        assert "model" in done.speculation.drafters, "others draft on"
