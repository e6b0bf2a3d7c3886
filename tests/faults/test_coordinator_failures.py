"""Coordinators killed, frozen, cut off and restarted under 32 streams, and all other services restarted too: the client
goes on by itself, every text is the undisturbed one, and workers keep nothing of a coordinator that is gone."""

import asyncio
import random
import signal
from contextlib import AsyncExitStack, asynccontextmanager

import pytest
from accounting import held, num_accounted
from conftest import scaled
from faults.processes import Fleet
from faults.soak.relay import Relay
from stack import in_process_stack

import outrider
from outrider.client import KeepAlive
from outrider.serving.channel import open_channel
from outrider.serving.worker_calls import describe

TARGET = "toy:vocab=24,seed=5,pass_ms=8,blocks=2000"
DRAFT = "toy:vocab=24,seed=5,agreement=0.9,pass_ms=1,blocks=2000"
COMMON = {"drain_grace_s": 0.6, "log_level": "warning"}
QUICK_PINGS = {"ping_interval_ms": 500, "ping_timeout_ms": 1000}
PATIENT = outrider.Resume(patience_s=240.0, max_losses=1000)
"""A machine may be slow; what a restart costs is not what is tested."""
GRACE_S = 240.0
"""As for patience: a restart comes once the old one has ended by itself."""
COORDINATORS = ("coordinator-0", "coordinator-1")
NUM_STREAMS = 32
LENGTH = 240
REQUESTS = [
    {"temperature": 0.0, "num_speculative_tokens": 3, "drafter": "model"},
    {"temperature": 1.0, "seed": 9, "num_speculative_tokens": 4, "drafter": "model"},
    {"temperature": 1.0, "seed": 4, "top_p": 0.9},
    {"temperature": 0.0, "num_speculative_tokens": 0, "presence_penalty": 0.5},
]


class Pairs(Fleet):
    """Two of each role."""

    @property
    def coordinators(self):
        return [self.children[name].address for name in COORDINATORS]


@asynccontextmanager
async def running_fleet(**worker):
    async with Pairs.running(**COMMON) as fleet:
        started = [(role, model, i) for role, model in (("target", TARGET), ("draft", DRAFT)) for i in (0, 1)]
        addresses = await asyncio.gather(
            *(fleet.start(f"{role}-{i}", f"{role}-worker", model=model, **worker) for role, model, i in started)
        )
        workers = {"target_workers": ",".join(addresses[:2]), "draft_workers": ",".join(addresses[2:])}
        await asyncio.gather(*(fleet.start(name, "coordinator", **workers) for name in COORDINATORS))
        await healthy(fleet)
        yield fleet


async def healthy(fleet):
    """Until every coordinator sees every worker."""
    for address in fleet.coordinators:
        async with outrider.Client(address) as client, asyncio.timeout(240):
            while sum(w.healthy for w in (await client.server_info()).workers) < 4:
                await asyncio.sleep(0.05)


async def nothing_held(address):
    """Until no worker has a session or a block of anybody's, as this coordinator sees them."""
    async with outrider.Client(address) as client, asyncio.timeout(240):
        while held((await client.server_info()).workers):
            await asyncio.sleep(0.1)


async def undisturbed(client):
    """Prompts, and ids of their texts."""
    prompts = [[number % 24, 3] for number in range(NUM_STREAMS)]
    texts, num_drafted = [], 0
    answers = await asyncio.gather(*(client.complete(p, **options_of(n)) for n, p in enumerate(prompts)))
    for answer in answers:
        texts.append(answer.token_ids)
        num_drafted += answer.speculation.num_draft_tokens
    assert num_drafted > 0, "INCONCLUSIVE"
    return prompts, texts


def options_of(number):
    return {"max_tokens": LENGTH, **REQUESTS[number % len(REQUESTS)]}


async def text_of(client, prompt, options, begun=None):
    """Ids, and how often it was resumed; what its end tells is that of the whole text."""
    ids = ()
    async for event in client.generate(prompt, **options):
        if isinstance(event, outrider.Chunk):
            ids += event.token_ids
            if begun is not None and len(ids) > 5:
                begun.set()
        elif isinstance(event, outrider.Complete):
            assert num_accounted(event.speculation) == len(ids) == event.usage.completion_tokens
            return ids, event.num_resumes
    raise AssertionError("a stream ended without `complete`")


async def begun_streams(client, prompts):
    """Tasks of all, each past its first tokens."""
    begun = [asyncio.Event() for _ in prompts]
    running = [
        asyncio.create_task(text_of(client, prompt, options_of(number), begun[number]))
        for number, prompt in enumerate(prompts)
    ]
    await asyncio.gather(*(one.wait() for one in begun))
    return running


@pytest.mark.slow
async def test_a_coordinator_is_killed_with_32_open_streams():
    rng = random.Random(1)
    async with running_fleet() as fleet, outrider.Client(fleet.coordinators, resume=PATIENT) as client:
        prompts, texts = await undisturbed(client)
        for _ in range(scaled(20, at_least=1)):
            killed = rng.choice(COORDINATORS)
            running = await begun_streams(client, prompts)
            await asyncio.sleep(rng.random() * 0.05)
            fleet.signal(killed, signal.SIGKILL)
            answers = await asyncio.gather(*running)
            assert [ids for ids, _ in answers] == texts
            num_resumed = sum(num_resumes > 0 for _, num_resumes in answers)
            assert num_resumed > 0, "INCONCLUSIVE: the streams had ended"
            await fleet.restart(killed, GRACE_S)
            await healthy(fleet)
            await nothing_held(fleet.coordinators[0])


@pytest.mark.slow
async def test_the_only_coordinator_is_killed_and_comes_back():
    """One address: streams wait for the next process there."""
    async with running_fleet() as fleet, outrider.Client(fleet.coordinators[0], resume=PATIENT) as client:
        prompts, texts = await undisturbed(client)
        running = await begun_streams(client, prompts)
        fleet.signal("coordinator-0", signal.SIGKILL)
        await fleet.restart("coordinator-0", GRACE_S)
        answers = await asyncio.gather(*running)
        assert [ids for ids, _ in answers] == texts
        assert any(num_resumes for _, num_resumes in answers), "INCONCLUSIVE: the streams had ended"
        await nothing_held(fleet.coordinators[1])


@pytest.mark.slow
async def test_every_role_is_restarted_under_32_streams_and_no_request_fails():
    async with running_fleet() as fleet, outrider.Client(fleet.coordinators, resume=PATIENT) as client:
        prompts, texts = await undisturbed(client)
        done, num_ended, num_resumed = asyncio.Event(), 0, 0

        async def keep_asking(number):
            nonlocal num_ended, num_resumed
            while not done.is_set():
                ids, num_resumes = await text_of(client, prompts[number], options_of(number))
                assert ids == texts[number], number
                num_ended, num_resumed = num_ended + 1, num_resumed + (num_resumes > 0)

        asking = [asyncio.create_task(keep_asking(number)) for number in range(NUM_STREAMS)]
        for _ in range(scaled(5, at_least=1)):
            for name in list(fleet.children):
                await fleet.restart(name, GRACE_S)
                await healthy(fleet)
                assert not any(task.done() for task in asking), [task for task in asking if task.done()]
        done.set()
        await asyncio.gather(*asking)
        assert num_ended > NUM_STREAMS, "INCONCLUSIVE"
        assert num_resumed > 0, "INCONCLUSIVE: no stream outlasted a grace"
        await nothing_held(fleet.coordinators[0])


@pytest.mark.slow
async def test_a_frozen_coordinator_loses_its_streams_and_workers_keep_nothing_of_it():
    pings = KeepAlive(interval_ms=1000, timeout_ms=1000)
    async with running_fleet(**QUICK_PINGS) as fleet:
        async with outrider.Client(fleet.coordinators, resume=PATIENT, keep_alive=pings) as client:
            prompts, texts = await undisturbed(client)
            running = await begun_streams(client, prompts)
            fleet.signal("coordinator-0", signal.SIGSTOP)
            answers = await asyncio.gather(*running)
            assert [ids for ids, _ in answers] == texts
            assert any(num_resumes for _, num_resumes in answers), "INCONCLUSIVE"
            await nothing_held(fleet.coordinators[1])  # while it is frozen still
            fleet.signal("coordinator-0", signal.SIGCONT)
            await healthy(fleet)
            async with outrider.Client(fleet.coordinators[0]) as thawed:
                assert (await thawed.complete(prompts[0], **options_of(0))).token_ids == texts[0]
                async with asyncio.timeout(240):
                    while (await thawed.server_info()).num_requests_running:
                        await asyncio.sleep(0.05)
            await nothing_held(fleet.coordinators[1])


@pytest.mark.parametrize("role", ["target", "draft"])
async def test_a_worker_frees_the_session_of_a_coordinator_that_is_cut_off_without_a_word(role):
    slow = "toy:vocab=24,seed=5,pass_ms=20"
    async with AsyncExitStack() as cleanup:
        behind = await cleanup.enter_async_context(in_process_stack(slow, slow, worker=QUICK_PINGS))
        worker = (behind.target if role == "target" else behind.draft)[0]
        relay = await cleanup.enter_async_context(Relay(worker.address))
        over_relay = {f"{role}_workers": (relay.address,), "peer_timeout_s": 600.0}
        cut_off = await cleanup.enter_async_context(in_process_stack(slow, slow, coordinator=over_relay))
        channel = await cleanup.enter_async_context(open_channel(worker.address))
        client = await cleanup.enter_async_context(outrider.Client(cut_off.address, resume=None))
        stream = client.generate([1, 2], max_tokens=4000, num_speculative_tokens=2, drafter="model", temperature=0.0)
        drafted = 0
        while not drafted:
            event = await anext(stream)
            drafted += event.num_draft_tokens if isinstance(event, outrider.Chunk) else 0
        assert (await describe(channel, without_tokenizer=True, timeout_s=60)).capacity.num_sessions == 1
        relay.fall_silent()
        async with asyncio.timeout(120):
            while (now := (await describe(channel, without_tokenizer=True, timeout_s=60)).capacity).num_sessions:
                await asyncio.sleep(0.05)
        assert now.num_free_blocks == now.num_blocks
        await stream.aclose()
