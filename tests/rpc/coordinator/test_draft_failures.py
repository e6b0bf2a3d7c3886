"""Draft workers that die, hang, flap and talk nonsense: another one adopts their streams, texts stay, and all is told.

Real services in this process; the faults are simulated by a proxy before a real draft worker, or by ending a real one.
"""

from __future__ import annotations

import asyncio
import dataclasses
import io
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import pytest
from accounting import held, num_accounted
from faults.rogue import RogueDraft, rogue_draft
from ports import free_port
from rich.console import Console
from scraping import scrape, total
from stack import Server, in_process_stack, start
from waiting import until

import draft_worker.server as draft_server
from coordinator import drafting
from coordinator.draft_link import DraftLink
from coordinator.gamma.fixed import FixedGamma
from coordinator.gamma.policy import Choice
from outrider import results
from outrider.cli.generate import why_nobody_drafts
from outrider.cli.top_view import Look, render, summarise
from outrider.client import Client
from outrider.drafting.ratio_stop import Price
from outrider.lm.toy_head import STATES
from outrider.serving.session_calls import SealedProposal
from outrider.settings import DraftWorkerSettings

TARGET = "toy:vocab=48,seed=5,pass_ms=2"
DRAFT = "toy:vocab=48,seed=5,agreement=0.9"
RULES: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "coupled": {"temperature": 1.0, "seed": 4},
}
SAMPLED = {"temperature": 1.0, "acceptance": "block"}
ALONE = {"local_drafters": ()}
"""Nobody guesses beside draft workers."""


async def busy_draft(client: Client) -> str:
    """Address of the draft worker that has the stream."""
    workers = (await client.server_info()).workers
    return next(w.address for w in workers if w.role == "draft" and w.num_sessions)


async def nothing_left(client: Client) -> None:
    """Until no stream is held anywhere; what a worker said last that is gone does not count."""

    async def none() -> bool:
        workers = (await client.server_info()).workers
        return not any(w.num_sessions for w in workers) and not held(w for w in workers if w.healthy)

    await until(none)


@asynccontextmanager
async def two_drafts(
    draft: dict[str, Any] | None = None, target: dict[str, Any] | None = None, **coordinator: Any
) -> AsyncIterator[tuple[Client, dict[str, Server], int]]:
    """A client, two draft workers by address, and the port of the coordinator's metrics."""
    async with AsyncExitStack() as cleanup:
        drafts = {}
        for _ in range(2):
            values = {"model": DRAFT, "port": 0, "log_level": "warning", "drain_grace_s": 0, **(draft or {})}
            server = await start(draft_server.serve, DraftWorkerSettings(**values))
            drafts[server.address] = server
            cleanup.push_async_callback(server.close)
        port = free_port()
        values = {**ALONE, "draft_workers": tuple(drafts), "metrics_port": port, **coordinator}
        stack = await cleanup.enter_async_context(
            in_process_stack(TARGET, None, coordinator=values, target_worker=target)
        )
        yield await cleanup.enter_async_context(Client(stack.address)), drafts, port


async def until_adopted(
    client: Client,
    port: int,
    request: dict[str, Any],
    lose: Callable[[], Any] | None = None,
    *,
    is_ahead: bool = False,
) -> None:
    """A long stream, from its first drafts over the loss of its worker until another one drafts for it. lose: awaited
    once the first one does; None: that fails by itself. is_ahead: and until a branch was used. The text is the plain
    one."""
    token_ids: list[int] = []
    num_drafted = num_afterwards = 0
    is_used = not is_ahead
    stream = client.generate("ABC", report_steps=True, max_tokens=3500, timeout_s=120, **request)
    async for event in stream:
        if not isinstance(event, results.Chunk):
            continue
        assert event.step is not None
        token_ids += event.token_ids
        is_used |= event.step.ahead == "hit"
        if not event.step.num_draft_tokens:
            continue
        num_drafted += 1
        if lose is not None and num_drafted == 10:
            await lose()
            lose = None
        elif num_afterwards or (lose is None and total(await scrape(port), "draft_worker_adoptions_total")):
            num_afterwards += 1
            if num_afterwards >= 10 and is_used:
                break
    else:
        assert is_used, "INCONCLUSIVE: no branch was used"
        pytest.fail(f"nobody has adopted the stream, {num_drafted} rounds had drafts")
    await stream.aclose()  # type: ignore[attr-defined]
    plain = await client.complete("ABC", max_tokens=len(token_ids), **{**request, "num_speculative_tokens": 0})
    assert tuple(token_ids) == plain.token_ids


@pytest.mark.parametrize("draft_ahead", ["off", "on"])
@pytest.mark.parametrize("rule", RULES)
async def test_another_worker_adopts_the_stream(rule: str, draft_ahead: str) -> None:
    async with two_drafts(draft_ahead=draft_ahead) as (client, drafts, port):
        lost: list[str] = []

        async def lose() -> None:
            lost.append(await busy_draft(client))
            await drafts[lost[0]].close()

        request = {**RULES[rule], "num_speculative_tokens": 3, "drafter": "model"}
        await until_adopted(client, port, request, lose, is_ahead=draft_ahead == "on")
        (other,) = set(drafts) - set(lost)
        samples = await scrape(port)
        assert total(samples, "draft_worker_adoptions_total", worker=other) == 1
        assert total(samples, "draft_worker_adoptions_total", worker=lost[0]) == 0
        assert total(samples, "draft_worker_circuit") == 0, "one death is no flapping"
        await nothing_left(client)


async def test_the_head_of_another_worker_gets_all_states_again() -> None:
    """The one that adopts the stream has not seen any of them."""
    head = {"model": "", "head": "toy:agreement=0.9", "target": TARGET}
    sends = {"features": tuple(str(state) for state in STATES)}
    async with two_drafts(head, sends) as (client, drafts, port):

        async def lose() -> None:
            await drafts[await busy_draft(client)].close()

        request = {"temperature": 0.0, "num_speculative_tokens": 3, "drafter": "toy-head"}
        await until_adopted(client, port, request, lose)
        await nothing_left(client)


@asynccontextmanager
async def rogue_and_honest(rogue: dict[str, Any], **coordinator: Any) -> AsyncIterator[tuple[Client, RogueDraft, int]]:
    """A coordinator with a lying draft worker and, where `has_honest`, one that does not lie."""
    async with AsyncExitStack() as cleanup:
        honest = await cleanup.enter_async_context(in_process_stack(TARGET, DRAFT))
        address, servicer = await cleanup.enter_async_context(rogue_draft(honest.draft[0].address, seed=1, **rogue))
        port = free_port()
        values = {**ALONE, "draft_workers": (address,), "metrics_port": port, **coordinator}
        stack = await cleanup.enter_async_context(in_process_stack(TARGET, None, coordinator=values))
        yield await cleanup.enter_async_context(Client(stack.address)), servicer, port


WRONG = [
    ("torn_q", "block"),
    ("too_many", "greedy"),
    ("ids_out_of_range", "block"),
    ("stale_hash", "greedy"),
    ("out_of_step_lie", "greedy"),
]


@pytest.mark.parametrize(("fault", "rule"), WRONG)
async def test_who_proposes_nonsense_is_asked_no_more(fault: str, rule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(drafting, "MIN_WAIT_S", 0.02)
    monkeypatch.setattr(drafting, "FIRST_WAIT_S", 0.02)
    monkeypatch.setattr(drafting, "REOPEN_AFTER_S", 0.01)
    monkeypatch.setattr(drafting, "MAX_REOPEN_AFTER_S", 0.02)
    monkeypatch.setattr(drafting, "LOOK_AGAIN_S", 0.02)
    async with rogue_and_honest({"faults": (fault,)}) as (client, rogue, port):
        options = {**(RULES["greedy"] if rule == "greedy" else SAMPLED), "max_tokens": 200}
        plain = await client.complete("ABC", num_speculative_tokens=0, **options)
        request = {"num_speculative_tokens": 3, "drafter": "model", **options}
        answer = await client.complete("ABC", **request)
        assert rule != "greedy" or answer.token_ids == plain.token_ids
        assert len(answer.token_ids) == 200
        bad = total(await scrape(port), "draft_worker_bad_proposals_total")
        assert bad >= 3, f"INCONCLUSIVE: {rogue.counts}"
        assert total(await scrape(port), "draft_worker_quarantined") == 1
        worker = next(w for w in (await client.server_info()).workers if w.role == "draft")
        assert not worker.healthy
        assert "bad proposals" in worker.detail
        asked = dict(rogue.counts)
        again = await client.complete("ABC", **request)
        assert rogue.counts == asked, "it was asked again"
        assert again.speculation.num_draft_tokens == 0
        rogue.incarnation, rogue.faults = "another process", ("none",)
        async with asyncio.timeout(30):
            while not next(w for w in (await client.server_info()).workers if w.role == "draft").healthy:
                await asyncio.sleep(0.02)
        healed = await client.complete("ABC", **request)
        assert rule != "greedy" or healed.token_ids == plain.token_ids
        assert healed.speculation.num_draft_tokens > 0, "another process at its address begins anew"
        assert total(await scrape(port), "draft_worker_quarantined") == 0
        assert total(await scrape(port), "draft_worker_bad_proposals_total") == bad


async def test_a_circuit_that_is_open_lets_nobody_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every proposal is late. Two streams find out; after them nobody asks, until one tries."""
    monkeypatch.setattr(drafting, "FIRST_WAIT_S", 0.3)
    monkeypatch.setattr(drafting, "MIN_WAIT_S", 0.3)
    silence = {"faults": ("silence",), "silence_s": 300.0}
    async with rogue_and_honest(silence, draft_breaker_share=0.001, draft_breaker_max_open_s=600.0) as (
        client,
        rogue,
        port,
    ):
        request = {**RULES["greedy"], "max_tokens": 60, "num_speculative_tokens": 3, "drafter": "model"}
        plain = await client.complete("ABC", **{**request, "num_speculative_tokens": 0})
        for _ in range(2):
            assert (await client.complete("ABC", **request)).token_ids == plain.token_ids
        samples = await scrape(port)
        assert total(samples, "draft_worker_circuit") == 2
        assert total(samples, "draft_worker_circuit_openings_total") == 1
        asked = sum(rogue.counts.values())
        assert asked == 2
        answers = await asyncio.gather(*(client.complete("ABC", report_steps=True, **request) for _ in range(4)))
        assert sum(rogue.counts.values()) == asked, "it was asked again"
        for answer in answers:
            assert answer.token_ids == plain.token_ids
            assert answer.speculation.num_draft_tokens == 0
            reasons = {chunk.step.reason for chunk in answer.chunks if chunk.step is not None}
            assert reasons <= {"prefill", "no-draft-worker"}
        info = await client.server_info()
        worker = next(w for w in info.workers if w.role == "draft")
        assert worker.healthy
        assert "circuit open" in worker.detail
        assert "a first proposal had not come after" in worker.detail
        told = await why_nobody_drafts(client)
        assert told.startswith("a draft worker is connected, but could not be asked (")
        assert f"{worker.address}: circuit open, left alone for" in told
        look = Look(0.0, info, None)
        shown = Console(width=300, record=True, file=io.StringIO())
        shown.print(render(summarise("here", None, look), look, 300))
        assert "left alone for" in shown.export_text()


async def test_a_stream_at_a_worker_that_hangs_goes_to_another_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its heart beats on, and its proposal never comes: nobody waits for it twice."""
    monkeypatch.setattr(drafting, "MOVE_AFTER_S", 0.05)
    real, calls = draft_server.DraftServicer.Session, 0

    async def hanging(servicer: Any, requests: Any, context: Any) -> AsyncIterator[Any]:
        nonlocal calls
        calls += 1
        hangs, num_proposals = calls == 1, 0
        async for response in real(servicer, requests, context):
            num_proposals += response.WhichOneof("message") == "proposal"
            if not (hangs and num_proposals > 5 and response.WhichOneof("message") == "proposal"):
                yield response

    monkeypatch.setattr(draft_server.DraftServicer, "Session", hanging)
    async with two_drafts() as (client, _, port):
        request = {**RULES["greedy"], "num_speculative_tokens": 3, "drafter": "model"}
        await until_adopted(client, port, request)
        assert total(await scrape(port), "draft_worker_adoptions_total") >= 1
        await nothing_left(client)


async def test_sampled_streams_use_the_drafts_that_were_told_before_a_worker_dies(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Chains that may end early, of a draft worker that dies over the third draft of each third chain."""
    for name in ("REOPEN_AFTER_S", "MAX_REOPEN_AFTER_S", "LOOK_AGAIN_S"):
        monkeypatch.setattr(drafting, name, 0.01)
    chosen, real, cuts = FixedGamma.choose, draft_server.DraftServicer.Session, []

    def priced(self: FixedGamma, *args: Any) -> Choice:
        choice = chosen(self, *args)
        return choice if choice.candidate is None else dataclasses.replace(choice, price=Price(0.0))

    async def dying(servicer: Any, requests: Any, context: Any) -> AsyncIterator[Any]:
        num_proposals = num_drawn = 0
        async for response in real(servicer, requests, context):
            num_proposals += response.WhichOneof("message") == "proposal"
            num_drawn = num_drawn + 1 if response.WhichOneof("message") == "drawn" else 0
            yield response
            if num_proposals == 2 and num_drawn == 2:
                raise RuntimeError("dies over its third draft")

    def cut(link: DraftLink, num_draft_tokens: int) -> SealedProposal:
        cuts.append(found := cut_before(link, num_draft_tokens))
        return found

    cut_before = DraftLink._cut
    monkeypatch.setattr(FixedGamma, "choose", priced)
    monkeypatch.setattr(DraftLink, "_cut", cut)
    monkeypatch.setattr(draft_server.DraftServicer, "Session", dying)
    async with in_process_stack(TARGET, DRAFT, coordinator=ALONE) as stack, Client(stack.address) as client:
        answer = await client.complete("ABC", max_tokens=300, drafter="model", num_speculative_tokens=4, **SAMPLED)
    spec = answer.speculation
    assert len(answer.token_ids) == 300
    assert spec.num_draft_failures > 0, "INCONCLUSIVE: no worker died over a draft"
    assert any(found.num_draft_tokens == 2 for found in cuts), "INCONCLUSIVE: nothing was told before a death"
    assert spec.gamma_histogram[2] > 0, "what was told was not verified"
    assert num_accounted(spec) == 300
