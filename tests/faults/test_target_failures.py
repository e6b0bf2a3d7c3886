"""Target workers killed and frozen at random moments, as real processes: every text is the undisturbed one.

And a request that kills the workers that compute it fails alone, after the second.
"""

from __future__ import annotations

import asyncio
import random
import signal
import urllib.request
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from accounting import held
from conftest import scaled
from faults.processes import Fleet
from faults.texts import LENGTH, PATIENCE_S, Text, healthy
from ports import free_port

import outrider
from outrider.errors import OutriderError
from outrider.lm.toy import ToyModel, parse_toy

TOY = "toy:vocab=24,seed=5,order=3,blocks=600"
TARGET, DRAFT = f"{TOY},pass_ms=3", f"{TOY},agreement=0.9,pass_ms=1"
COMMON = {"drain_grace_s": 1.0, "log_level": "error"}
REQUESTS: list[dict[str, Any]] = [
    {"temperature": 0.0, "num_speculative_tokens": 3, "drafter": "model"},
    {"temperature": 1.0, "seed": 9, "num_speculative_tokens": 4, "drafter": "model"},
    {"temperature": 1.0, "seed": 4},
    {"temperature": 0.0, "num_speculative_tokens": 0},
    {"temperature": 0.0},
    {"temperature": 1.0, "seed": 7, "num_speculative_tokens": 2},
]
LOST = "outrider_target_failovers_total"


class TargetFleet(Fleet):
    """Targets, a draft worker, and a coordinator with metrics."""

    metrics_port = 0

    async def metrics(self) -> dict[str, float]:
        """Of the coordinator, by name and labels."""
        url = f"http://127.0.0.1:{self.metrics_port}/metrics"
        text = (await asyncio.to_thread(lambda: urllib.request.urlopen(url).read())).decode()
        lines = (line.rpartition(" ") for line in text.splitlines() if line.startswith("outrider_"))
        return {name: float(value) for name, _, value in lines}


@asynccontextmanager
async def fleet(
    num_targets: int, target: str = TARGET, *, draft: bool = True, **coordinator: Any
) -> AsyncIterator[tuple[TargetFleet, outrider.Client]]:
    async with TargetFleet.running(**COMMON) as running:
        starts = [running.start(f"target-{i}", "target-worker", model=target) for i in range(num_targets)]
        if draft:
            starts.append(running.start("draft", "draft-worker", model=DRAFT))
        addresses = await asyncio.gather(*starts)
        workers = {
            "target_workers": ",".join(addresses[:num_targets]),
            "draft_workers": ",".join(addresses[num_targets:]),
        }
        running.metrics_port = free_port()
        address = await running.start(
            "coordinator",
            "coordinator",
            **{**workers, "target_wait_s": PATIENCE_S, **coordinator},
            metrics_port=running.metrics_port,
        )
        async with outrider.Client(address) as client:
            await healthy(client, num_targets + draft)
            yield running, client


async def nothing_held(client: outrider.Client) -> None:
    """No session and no block on any worker that answers."""
    async with asyncio.timeout(PATIENCE_S):
        while True:
            workers = [w for w in (await client.server_info()).workers if w.healthy]
            if workers and not held(workers):
                return
            await asyncio.sleep(0.05)


async def undisturbed(client: outrider.Client) -> list[list[int]]:
    texts = [Text([i, i + 1], options) for i, options in enumerate(REQUESTS)]
    await asyncio.gather(*(text.run(client) for text in texts))
    assert sum(text.num_draft_tokens for text in texts) > 0, "INCONCLUSIVE"
    return [text.ids for text in texts]


def percentile(metrics: dict[str, float], name: str, share: float) -> str:
    """Of a histogram: the bucket that holds it."""
    buckets = {key: n for key, n in metrics.items() if key.startswith(f"{name}_bucket")}
    found = [(float(key.partition('le="')[2].partition('"')[0]), n) for key, n in buckets.items()]
    total = max((n for _, n in found), default=0.0)
    return next((f"<= {bound:g} s" for bound, n in sorted(found) if total and n >= share * total), "none")


def counted(metrics: dict[str, float], name: str, **labels: str) -> float:
    wanted = [f'{key}="{value}"' for key, value in labels.items()]
    return sum(n for key, n in metrics.items() if key.startswith(f"{name}{{") and all(part in key for part in wanted))


@pytest.mark.slow
async def test_every_text_is_whole_whenever_a_target_is_killed(capsys: pytest.CaptureFixture[str]) -> None:
    rng, num_kills, num_hit = random.Random(3), scaled(200, at_least=4), 0
    async with fleet(2) as (running, client):
        whole = await undisturbed(client)

        async def stream(number: int) -> None:
            """One text after the other, for as long as workers are killed."""
            while num_killed < num_kills:
                text = current[number] = Text([number, number + 1], REQUESTS[number])
                assert await asyncio.wait_for(text.run(client), PATIENCE_S) == whole[number]

        num_killed, current = 0, dict[int, Text]()
        streams = [asyncio.create_task(stream(number)) for number in range(len(REQUESTS))]
        try:
            while num_killed < num_kills:
                await asyncio.sleep(rng.random() * 0.2)
                name = rng.choice(("target-0", "target-1"))
                busy = {w.address for w in (await client.server_info()).workers if w.num_sessions}
                num_hit += running.children[name].address in busy
                running.signal(name, signal.SIGKILL)
                await running.restart(name)
                await healthy(client, 3)
                past = [(text, min(LENGTH, len(text.ids) + 5)) for text in current.values()]
                await asyncio.gather(*(text.reaches(length) for text, length in past))
                num_killed += 1
                for task in streams:
                    if task.done():
                        task.result()
        finally:
            num_killed = num_kills
            await asyncio.gather(*streams)
        assert num_hit > 0, "INCONCLUSIVE: no worker had a stream when it was killed"
        metrics = await running.metrics()
        assert counted(metrics, LOST, cause="died") > 0
        assert counted(metrics, "outrider_target_recoveries_total") > 0
        assert counted(metrics, "outrider_poisoned_requests_total") == 0
        assert counted(metrics, "outrider_request_failure_total") == 0
        await nothing_held(client)
    with capsys.disabled():
        detection = percentile(metrics, "outrider_target_detection_seconds", 0.99)
        recovery = percentile(metrics, "outrider_target_recovery_seconds", 0.99)
        print(f"\n{num_kills} kills, {num_hit} of a busy worker; p99 of detection {detection}, of recovery {recovery}")


@pytest.mark.slow
@pytest.mark.parametrize("num_targets", [1, 2])
async def test_streams_of_a_frozen_target_move_or_wait_and_leave_nothing_behind(
    num_targets: int, capsys: pytest.CaptureFixture[str]
) -> None:
    async with fleet(num_targets, peer_timeout_s=2.0) as (running, client):
        whole = await undisturbed(client)
        for round_number in range(scaled(10, at_least=1)):
            texts = [Text([i, i + 1], options) for i, options in enumerate(REQUESTS)]
            tasks = [asyncio.create_task(text.run(client)) for text in texts]
            await asyncio.gather(*(text.reaches(10) for text in texts))
            workers = (await client.server_info()).workers
            busy = max((w for w in workers if w.role == "target"), key=lambda w: w.num_sessions).address
            name = running.at(busy)
            running.signal(name, signal.SIGSTOP)
            async with asyncio.timeout(PATIENCE_S):
                while counted(await running.metrics(), LOST, cause="silent") <= round_number:
                    await asyncio.sleep(0.05)
            if num_targets == 1:
                running.signal(name, signal.SIGCONT)
            assert await asyncio.wait_for(asyncio.gather(*tasks), PATIENCE_S) == whole
            running.signal(name, signal.SIGCONT)
            await healthy(client, num_targets + 1)
            await nothing_held(client)
        metrics = await running.metrics()
        assert counted(metrics, "outrider_poisoned_requests_total") == 0
    with capsys.disabled():
        print(f"\nfrozen: p99 of detection {percentile(metrics, 'outrider_target_detection_seconds', 0.99)}")


DEADLY = 17
"""The id that kills the target that computes it."""
SHUNNED: dict[str, Any] = {"temperature": 0.0, "logit_bias": {DEADLY: -100.0}}


def deadly_prompt() -> list[int]:
    """One whose greedy text comes to the deadly id after some time."""
    model = ToyModel(parse_toy(TOY))
    for first in range(24):
        ids = [first, 1, 2]
        while len(ids) < 120:
            ids.append(int(model.logits_for(ids).argmax()))
        if DEADLY in ids and ids.index(DEADLY) > 20:
            return ids[:3]
    raise AssertionError("no prompt leads there")


@pytest.mark.slow
async def test_a_request_that_kills_two_targets_fails_alone_and_no_third_is_lost() -> None:
    """It kills with its prompt, in the middle of a run, or as a draft; nine streams share its workers with it."""
    cases = [([3, DEADLY, 4], 0), (deadly_prompt(), 0), (deadly_prompt(), 3)] * scaled(10, at_least=1)
    async with fleet(3, f"{TARGET},dies_on={DEADLY}") as (running, client):
        texts = [Text([i, i + 1], {**SHUNNED, "num_speculative_tokens": i % 3}) for i in range(9)]
        whole = await asyncio.gather(*(text.run(client) for text in texts))
        for prompt, gamma in cases:
            bystanders = [Text(text.prompt, text.options) for text in texts]
            tasks = [asyncio.create_task(text.run(client)) for text in bystanders]
            await asyncio.gather(*(text.reaches(10) for text in bystanders))
            poison = Text(prompt, {"temperature": 0.0, "num_speculative_tokens": gamma})
            with pytest.raises(OutriderError) as failure:
                await asyncio.wait_for(poison.run(client), PATIENCE_S)
            assert (failure.value.status, failure.value.reason) == ("INTERNAL", "POISONED_REQUEST")
            assert await asyncio.wait_for(asyncio.gather(*tasks), PATIENCE_S) == whole
            dead = running.dead
            assert len(dead) == 2, "two died, and no third"
            await asyncio.gather(*(running.restart(name) for name in dead))
            await healthy(client, 4)
        metrics = await running.metrics()
        assert counted(metrics, "outrider_poisoned_requests_total") == len(cases)
        assert counted(metrics, "outrider_request_failure_total") == len(cases)
        await nothing_held(client)
