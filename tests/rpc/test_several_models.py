"""Two models behind one coordinator, each with its own draft; names, aliases, and what happens without one."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager

import pytest
from stack import Server, start
from waiting import wait_for_drafts

import draft_worker.server
import target_worker.server
from coordinator import server as coordinator_server
from outrider.client import Client
from outrider.errors import InvalidArgument, NotFound
from outrider.lm.toy import ToyModel, parse_toy
from outrider.settings import CoordinatorSettings, DraftWorkerSettings, TargetWorkerSettings

TOYS = {"red": "toy:vocab=32,seed=1", "blue": "toy:vocab=32,seed=2", "wide": "toy:vocab=48,seed=3"}
"""Red and blue share a tokenizer, so that only the settings can tell which draft is whose."""
PROMPT = [3, 1, 2]
OPTIONS = {"temperature": 0, "num_speculative_tokens": 3, "drafter": "model"}
COMMON = {"port": 0, "drain_grace_s": 2.0, "log_level": "warning"}


@asynccontextmanager
async def several(names: tuple[str, ...], **settings: object) -> AsyncIterator[Server]:
    async with AsyncExitStack() as cleanup:

        async def run(serve: object, values: object) -> Server:
            server = await start(serve, values)
            cleanup.push_async_callback(server.close)
            return server

        targets, drafts = [], []
        for name in names:
            target = TargetWorkerSettings(**COMMON, model=TOYS[name], model_name=name)
            draft = DraftWorkerSettings(**COMMON, model=TOYS[name] + ",agreement=0.9", model_name=f"{name}-draft")
            targets.append(await run(target_worker.server.serve, target))
            drafts.append(await run(draft_worker.server.serve, draft))
        yield await run(
            coordinator_server.serve,
            CoordinatorSettings(
                **COMMON,
                target_workers=tuple(s.address for s in targets),
                draft_workers=tuple(s.address for s in drafts),
                **settings,
            ),
        )


def own_text(name: str, num_tokens: int) -> tuple[int, ...]:
    model, ids = ToyModel(parse_toy(TOYS[name])), list(PROMPT)
    for _ in range(num_tokens):
        ids.append(int(model.logits_for(ids).argmax()))
    return tuple(ids[len(PROMPT) :])


async def test_each_model_gives_its_own_text_with_its_own_draft(monkeypatch: pytest.MonkeyPatch) -> None:
    wait_for_drafts(monkeypatch)
    pairs = ("red=red-draft", "blue=blue-draft")
    async with several(("red", "blue", "wide"), draft_models=pairs) as server, Client(server.address) as client:
        names = ["red", "blue", "wide"] * 3
        answers = await asyncio.gather(
            *(client.complete(PROMPT, model=name, max_tokens=60, **OPTIONS) for name in names)
        )
        for name, answer in zip(names, answers, strict=True):
            assert answer.started.model == name
            assert answer.token_ids == own_text(name, 60)
            # another model's draft agrees about once in a vocabulary
            assert answer.speculation.draft_acceptance_rate > 0.3, name
        for name in ("red", "blue", "wide"):
            info = await client.model_info(name)
            assert (info.model, info.draft_model) == (name, f"{name}-draft")
        info = await client.server_info()
        assert info.models == ("red", "blue", "wide")
        assert all(worker.healthy for worker in info.workers), info.workers


async def test_without_a_name_all_are_named() -> None:
    aliases = ("default=red", "gone=nobody")
    async with several(("red", "wide"), model_aliases=aliases) as server, Client(server.address) as client:
        for call in (client.complete(PROMPT), client.model_info(), client.tokenize("A"), client.detokenize([1])):
            with pytest.raises(InvalidArgument, match=r"one of red, wide, default \(= red\)") as refusal:
                await call
            assert refusal.value.field == "model"
        for name in ("nobody", "gone"):
            with pytest.raises(NotFound, match=rf"'{name}'.*red, wide, default \(= red\)"):
                await client.complete(PROMPT, model=name)


async def test_an_alias_is_the_model_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    wait_for_drafts(monkeypatch)
    aliases = ("default=red", "wide=red", "first=red")
    async with several(("red", "wide"), model_aliases=aliases) as server, Client(server.address) as client:
        answer = await client.complete(PROMPT, model="default", max_tokens=20, **OPTIONS)
        assert answer.started.model == "red"
        assert answer.token_ids == own_text("red", 20)
        assert answer.speculation.num_draft_tokens > 0
        assert (await client.model_info("default")).aliases == ("default", "first")
        assert (await client.model_info("wide")).model == "wide", "a served name is never an alias"
        assert (await client.server_info()).model_aliases == {"default": "red", "first": "red"}


async def test_a_draft_that_no_target_wants_is_told_so() -> None:
    async with several(("red", "blue"), draft_models=("red=red-draft", "blue=red-draft")) as server:
        async with Client(server.address) as client:
            info = await client.server_info()
            (unwanted,) = [worker for worker in info.workers if not worker.healthy]
            assert unwanted.model == "blue-draft"
            assert "NOT_PAIRED" in unwanted.detail


@pytest.mark.parametrize(
    ("settings", "field"),
    [
        ({"model_aliases": ("red",)}, "model_aliases"),
        ({"model_aliases": ("=red",)}, "model_aliases"),
        ({"model_aliases": ("a=red", "a=blue")}, "model_aliases"),
        ({"model_aliases": ("a=b", "b=red")}, "model_aliases"),
        ({"draft_models": ("red",)}, "draft_models"),
        ({"draft_models": ("red=a", "red=b")}, "draft_models"),
    ],
)
async def test_settings_that_name_nothing_are_refused_at_start(settings: dict, field: str) -> None:
    with pytest.raises(InvalidArgument) as refusal:
        await coordinator_server.serve(CoordinatorSettings(**COMMON, **settings))
    assert refusal.value.field == field


async def test_lower_priority_runs_first() -> None:
    """One place: whoever runs next is decided by priority, then by arrival."""
    async with several(("red",), max_running_requests=1) as server, Client(server.address) as client:
        order: list[int] = []

        async def one(number: int, priority: int) -> None:
            await client.complete(PROMPT, max_tokens=3, priority=priority, num_speculative_tokens=0)
            order.append(number)

        running = client.generate(PROMPT, max_tokens=4000, ignore_eos=True, num_speculative_tokens=0)
        for _ in range(2):
            await anext(running)
        waiting = []
        for number, priority in enumerate((5, 0, -2, 0)):
            waiting.append(asyncio.create_task(one(number, priority)))
            while (await client.server_info()).num_requests_waiting <= number:
                await asyncio.sleep(0.01)
        await running.aclose()
        await asyncio.gather(*waiting)
        assert order == [2, 1, 3, 0]
