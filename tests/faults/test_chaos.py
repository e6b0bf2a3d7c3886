"""Real processes frozen, thawed, killed and started again at random moments while streams run.

Every stream gives its undisturbed text (greedy, COUPLED), or UNAVAILABLE when no target answers, and then its rest when
it is resumed. Nothing hangs, no text ends early, every token is accounted for.
"""

import asyncio
import random
import signal
from contextlib import asynccontextmanager, suppress

import pytest
from accounting import held, num_accounted
from conftest import scaled
from faults.processes import Fleet

import outrider
from outrider.errors import OutriderError, Unavailable

TARGET = "toy:vocab=24,seed=5,pass_ms=3,blocks=600"
DRAFT = "toy:vocab=24,seed=5,agreement=0.9,pass_ms=1,blocks=600"
COMMON = {"drain_grace_s": 1.0, "heartbeat_ms": 100}
PEER_TIMEOUT_S = 1.0
TARGETS = ("target-0", "target-1")
PATIENCE_S = 60.0
REQUESTS = [
    {"temperature": 0.0, "num_speculative_tokens": 3, "drafter": "model"},
    {"temperature": 1.0, "seed": 9, "num_speculative_tokens": 4, "drafter": "model"},
    {"temperature": 1.0, "seed": 4},
    {"temperature": 0.0, "num_speculative_tokens": 0},
]
LENGTH = 150


@asynccontextmanager
async def services():
    """Two targets, a draft worker and a coordinator; (the fleet, the coordinator's address)."""
    async with Fleet.running(**COMMON) as fleet:
        targets = await asyncio.gather(*(fleet.start(name, "target-worker", model=TARGET) for name in TARGETS))
        draft = await fleet.start("draft", "draft-worker", model=DRAFT)
        workers = {"target_workers": ",".join(targets), "draft_workers": draft, "peer_timeout_s": PEER_TIMEOUT_S}
        yield fleet, await fleet.start("coordinator", "coordinator", **workers)


async def text_of(client, prompt, options):
    """Ids of a stream that ended with `complete`; the error of one that failed."""
    ids, completed = [], False
    try:
        async with asyncio.timeout(PATIENCE_S):
            async for event in client.generate(prompt, max_tokens=LENGTH, **options):
                if isinstance(event, outrider.Chunk):
                    ids += event.token_ids
                elif isinstance(event, outrider.Complete):
                    completed = True
                    assert num_accounted(event.speculation) == len(ids) == event.usage.completion_tokens
    except OutriderError as error:
        return ids, error
    assert completed
    return ids, None


async def healthy(client):
    async with asyncio.timeout(PATIENCE_S):
        while True:
            with suppress(Unavailable):  # a coordinator that has just come back is found at the next try
                workers = (await client.server_info()).workers
                if len(workers) == 3 and all(w.healthy for w in workers):
                    return
            await asyncio.sleep(0.05)


async def no_sessions(client):
    async with asyncio.timeout(PATIENCE_S):
        while held((await client.server_info()).workers):
            await asyncio.sleep(0.2)


async def disturb(rng, fleet):
    """One fault, and its end."""
    kind = rng.choice(("freeze_target", "freeze_draft", "freeze_both_targets", "freeze_coordinator", "kill_target",
                       "kill_draft", "freeze_long"))  # fmt: skip
    await asyncio.sleep(rng.random() * 0.3)
    names = {
        "freeze_target": [rng.choice(TARGETS)],
        "freeze_long": [rng.choice(("target-0", "target-1", "draft"))],
        "freeze_draft": ["draft"],
        "freeze_both_targets": [*TARGETS],
        "freeze_coordinator": ["coordinator"],
        "kill_target": [rng.choice(TARGETS)],
        "kill_draft": ["draft"],
    }[kind]
    if kind.startswith("kill"):
        fleet.signal(names[0], signal.SIGKILL)
        await asyncio.sleep(rng.random() * 0.3)
        await fleet.restart(names[0])
        return kind
    for name in names:
        fleet.signal(name, signal.SIGSTOP)
    await asyncio.sleep(3 * PEER_TIMEOUT_S if kind != "freeze_coordinator" and rng.random() < 0.5 else rng.random())
    for name in names:
        fleet.signal(name, signal.SIGCONT)
    return kind


async def undisturbed(client):
    """Prompts and their texts."""
    prompts = [[i, i + 1] for i in range(len(REQUESTS))]
    texts, num_drafted = [], 0
    for prompt, options in zip(prompts, REQUESTS, strict=True):
        answer = await client.complete(prompt, max_tokens=LENGTH, **options)
        texts.append(list(answer.token_ids))
        num_drafted += answer.speculation.num_draft_tokens
    assert num_drafted > 0, "INCONCLUSIVE"
    return prompts, texts


async def kill_the_coordinator(client, fleet):
    """Every client is told; the workers free what they held for it; the next coordinator serves."""
    begun = asyncio.Event()

    async def stream(options):
        async for event in client.generate([1, 2], max_tokens=2000, **options):
            if isinstance(event, outrider.Chunk):
                begun.set()
            assert not isinstance(event, outrider.Complete), "INCONCLUSIVE: the text ended before the kill"

    running = [asyncio.create_task(stream(options)) for options in REQUESTS]
    await asyncio.wait_for(begun.wait(), PATIENCE_S)
    fleet.signal("coordinator", signal.SIGKILL)
    for task in running:
        with pytest.raises(OutriderError) as failure:
            await asyncio.wait_for(task, PATIENCE_S)
        assert failure.value.status == "UNAVAILABLE"
    await fleet.restart("coordinator")
    await healthy(client)
    await no_sessions(client)
    answer = await client.complete([1, 2], max_tokens=40, num_speculative_tokens=3)
    assert answer.speculation.num_draft_tokens > 0


@pytest.mark.slow
async def test_streams_survive_or_fail_honestly():
    rng = random.Random(2)
    num_whole = 0
    async with services() as (fleet, address), outrider.Client(address, resume=None) as client:
        await healthy(client)
        prompts, texts = await undisturbed(client)
        for round_number in range(scaled(20, at_least=2)):
            running = [asyncio.create_task(text_of(client, p, o)) for p, o in zip(prompts, REQUESTS, strict=True)]
            where = f"round {round_number}, {await disturb(rng, fleet)}"
            answers = [await task for task in running]
            await healthy(client)
            for (ids, error), prompt, options, whole in zip(answers, prompts, REQUESTS, texts, strict=True):
                num_whole += error is None
                if error is not None:
                    assert error.status == "UNAVAILABLE", f"{where}: {error.status} {error}"
                    rest = await client.complete(prompt, max_tokens=LENGTH, resume_token_ids=ids, **options)
                    ids += rest.token_ids
                assert ids == whole, where
        assert num_whole > 0
        await no_sessions(client)
        await kill_the_coordinator(client, fleet)
