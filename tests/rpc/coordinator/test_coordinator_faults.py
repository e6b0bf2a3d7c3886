"""What the coordinator does when workers die, freeze, come late, or talk nonsense. Real services in this process."""

import asyncio
import random
import threading
from collections.abc import AsyncIterator, Callable
from typing import Any

import grpc
import pytest
from conftest import scaled
from faults.rogue import TRUSTING
from stack import in_process_stack, start
from test_coordinator_generate import no_sessions

import draft_worker.server as draft_server
import target_worker.server as target_server
from coordinator import drafting
from coordinator.peer import Peer
from outrider import results, server_info
from outrider.client import Client
from outrider.errors import OutriderError
from outrider.lm.toy import ToyModel
from outrider.settings import CoordinatorSettings, DraftWorkerSettings, TargetWorkerSettings
from outrider.v1 import common_pb2, draft_pb2, worker_pb2, worker_pb2_grpc

TARGET = "toy:vocab=48,seed=5"
DRAFT = "toy:vocab=48,seed=5,agreement=0.9"
AT_ONCE = {"drain_grace_s": 0.0}
Event = results.Event


async def collect(stream: AsyncIterator[Event], after_tokens: int, act: Callable[[], Any]) -> list[Event]:
    """All events; `act` is awaited once so many tokens have come."""
    events, num_tokens, acted = [], 0, False
    async for event in stream:
        events.append(event)
        num_tokens += len(event.token_ids) if isinstance(event, results.Chunk) else 0
        if num_tokens >= after_tokens and not acted:
            acted = True
            await act()
    assert acted
    return events


def ids(events: list[Event]) -> tuple[int, ...]:
    return tuple(i for event in events if isinstance(event, results.Chunk) for i in event.token_ids)


def completion(events: list[Event]) -> results.Complete:
    assert isinstance(events[-1], results.Complete)
    return events[-1]


@pytest.mark.parametrize("options", [{"temperature": 0.0}, {"temperature": 1.0, "seed": 4}])
async def test_a_stream_goes_on_plain_when_its_draft_worker_dies(options: dict) -> None:
    async with in_process_stack(TARGET + ",pass_ms=2", DRAFT, draft_worker=AT_ONCE) as stack:
        async with Client(stack.address) as client:
            request = {**options, "max_tokens": 800, "num_speculative_tokens": 3, "drafter": "model"}
            whole = await client.complete("ABC", **{**request, "num_speculative_tokens": 0})
            events = await collect(client.generate("ABC", **request), 30, stack.draft[0].close)
            assert ids(events) == whole.token_ids
            spec = completion(events).speculation
            assert spec.num_draft_tokens > 0, "INCONCLUSIVE: nothing was drafted before the death"
            assert spec.num_draft_failures >= 1
            after = await client.complete("ABC", **request)
            assert after.token_ids == whole.token_ids
            assert after.speculation.num_draft_tokens == 0
            worker = next(w for w in (await client.server_info()).workers if w.role == "draft")
            assert not worker.healthy
            assert worker.detail


async def test_drafting_begins_again_when_a_draft_worker_comes_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(drafting, "REOPEN_AFTER_S", 0.1)
    monkeypatch.setattr(drafting, "MAX_REOPEN_AFTER_S", 0.2)
    async with in_process_stack(TARGET + ",pass_ms=3", DRAFT, draft_worker=AT_ONCE) as stack:
        async with Client(stack.address) as client:
            port = stack.draft[0].port

            async def restart() -> None:
                await stack.draft[0].close()
                settings = DraftWorkerSettings(model=DRAFT, port=port, log_level="warning", drain_grace_s=0)
                stack.draft[0] = await start(draft_server.serve, settings)

            options = {"num_speculative_tokens": 2, "drafter": "model", "report_steps": True}
            stream = client.generate("ABC", temperature=0, max_tokens=1500, **options)
            events = await collect(stream, 30, restart)
            steps = [event.step for event in events if isinstance(event, results.Chunk)]
            drafted = [step.num_draft_tokens > 0 for step in steps if step is not None]
            lost = drafted.index(False, 1)
            assert any(drafted[:lost]), "INCONCLUSIVE: nothing was drafted before the death"
            assert any(drafted[lost:]), "drafting must begin again"
            await stack.draft[0].close()


@pytest.mark.parametrize("gamma", [0, 3])
async def test_a_stream_moves_to_another_target_worker_and_its_text_does_not_change(gamma: int) -> None:
    async with in_process_stack(TARGET + ",pass_ms=2", DRAFT, target_worker=AT_ONCE, num_targets=2) as stack:
        async with Client(stack.address) as client:
            request = {"temperature": 1.0, "seed": 9, "max_tokens": 800, "num_speculative_tokens": gamma}
            whole = await client.complete("ABC", **request)

            async def kill_the_busy_one() -> None:
                info = await client.server_info()
                busy = next(w.address for w in info.workers if w.role == "target" and w.num_sessions)
                await next(server for server in stack.target if server.address == busy).close()

            events = await collect(client.generate("ABC", **request), 40, kill_the_busy_one)
            assert ids(events) == whole.token_ids
            assert completion(events).usage.completion_tokens == 800
            await asyncio.sleep(0.1)
            info = await client.server_info()
            assert [w.num_sessions for w in info.workers] == [0, 0, 0]


async def test_without_another_target_the_client_is_told_to_try_again() -> None:
    quick = {"target_wait_s": 0.2}
    async with in_process_stack(TARGET + ",pass_ms=2", DRAFT, target_worker=AT_ONCE, coordinator=quick) as stack:
        async with Client(stack.address, resume=None) as client:
            with pytest.raises(OutriderError) as lost:
                await collect(client.generate("ABC", temperature=0, max_tokens=500), 10, stack.target[0].close)
            assert lost.value.status == "UNAVAILABLE"
            assert lost.value.retry_delay_s is not None
            assert (await client.server_info()).num_requests_running == 0


async def test_a_session_freed_for_idleness_is_opened_again(monkeypatch: pytest.MonkeyPatch) -> None:
    lease = {"session_idle_lease_s": 0.3, "heartbeat_ms": 50}
    buffer = {"emit_buffer_chunks": 2}
    async with in_process_stack(TARGET, DRAFT, worker=lease, coordinator=buffer) as stack:
        async with Client(stack.address) as client:
            request = {"temperature": 0, "max_tokens": 4000, "num_speculative_tokens": 2}
            whole = await client.complete("ABC", **request)
            assert whole.speculation.num_draft_tokens > 0
            stream = client.generate("ABC", **request)
            got: list[int] = []
            while len(got) < 20:
                event = await anext(stream)
                got += event.token_ids if isinstance(event, results.Chunk) else ()
            await asyncio.sleep(1.0)  # a client that reads nothing: its stream pauses, and the leases run out
            events = [event async for event in stream]
            assert (*got, *ids(events)) == whole.token_ids
            assert completion(events).speculation.num_draft_failures == 0


async def test_nan_logits_fail_their_own_request_with_internal() -> None:
    async with in_process_stack(TARGET + ",nan_after=30", DRAFT) as stack, Client(stack.address) as client:
        other = client.generate("AB", temperature=0, max_tokens=20)
        with pytest.raises(OutriderError) as failed:
            await client.complete("ABC", temperature=0, max_tokens=100)
        assert failed.value.status == "INTERNAL"
        assert "NaN" in failed.value.message or "nan" in failed.value.message
        assert isinstance([event async for event in other][-1], results.Complete)
        await no_sessions(client)


async def test_a_draft_of_another_tokenizer_is_named_and_not_used() -> None:
    async with in_process_stack(TARGET, "toy:vocab=40,seed=5") as stack, Client(stack.address) as client:
        draft = next(w for w in (await client.server_info()).workers if w.role == "draft")
        assert not draft.healthy
        assert "FAILED_PRECONDITION VOCAB_MISMATCH" in draft.detail
        answer = await client.complete("ABC", temperature=0, max_tokens=30)
        assert answer.speculation.num_draft_failures == 0
        assert "model" not in answer.speculation.drafters
        assert (await client.model_info()).drafters == ("lookup", "suffix")  # those need no worker


async def test_a_worker_listed_under_the_wrong_role_is_named() -> None:
    async with in_process_stack(TARGET, DRAFT) as stack:
        settings = CoordinatorSettings(port=0, target_workers=(stack.draft[0].address,), log_level="warning")
        import coordinator.server as coordinator_server

        server = await start(coordinator_server.serve, settings)
        async with Client(server.address) as client:
            (worker,) = (await client.server_info()).workers
            assert not worker.healthy
            assert "draft worker, listed as target" in worker.detail
        await server.close()


class Nonsense:
    """A draft worker whose answers are late, stale, doubled, malformed, or out of step, at random."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.kinds: dict[str, int] = {}

    def wrap(self, session: Any) -> Any:
        async def distorted(servicer: Any, requests: Any, context: Any) -> AsyncIterator[Any]:
            async for response in session(servicer, requests, context):
                if response.WhichOneof("message") != "proposal":
                    yield response
                    continue
                for answer in self.distort(response):
                    yield answer

        return distorted

    def distort(self, response: Any) -> list[Any]:
        kind = self.rng.choice(["fine", "fine", "stale", "twice", "id", "counts", "bytes", "lags", "lost-it", "long"])
        self.kinds[kind] = self.kinds.get(kind, 0) + 1
        proposal, header = response.proposal.proposal, response.proposal.header
        changed = draft_pb2.DraftServiceSessionResponse()
        changed.CopyFrom(response)
        if kind == "twice":
            return [response, changed]
        if kind == "stale":
            changed.proposal.header.prefix_hash ^= 1
            return [changed, response]
        if kind == "id" and proposal.token_ids:
            changed.proposal.proposal.token_ids[-1] = 4_000_000_000
            return [changed]
        if kind == "counts" and proposal.q_counts:
            changed.proposal.proposal.q_counts = bytes(len(proposal.q_counts))
            return [changed]
        if kind == "bytes":
            changed.proposal.proposal.q_sizes.append(3)
            return [changed]
        if kind == "long":
            changed.proposal.proposal.token_ids.extend([1] * 30)
            return [changed]
        if kind in ("lags", "lost-it"):
            length = header.base_length if kind == "lags" else 1
            own = common_pb2.SessionHeader(epoch=header.epoch, base_length=length, prefix_hash=header.prefix_hash)
            return [draft_pb2.DraftServiceSessionResponse(out_of_step=common_pb2.OutOfStep(header=own))]
        return [response]


async def test_nonsense_from_a_draft_worker_changes_no_text(monkeypatch: pytest.MonkeyPatch) -> None:
    nonsense = Nonsense(7)
    monkeypatch.setattr(draft_server.DraftServicer, "Session", nonsense.wrap(draft_server.DraftServicer.Session))
    for name in ("REOPEN_AFTER_S", "MAX_REOPEN_AFTER_S", "LOOK_AGAIN_S"):
        monkeypatch.setattr(drafting, name, 0.01)
    async with in_process_stack(TARGET, DRAFT, coordinator=TRUSTING) as stack, Client(stack.address) as client:
        accepted = dropped = 0
        for case in range(scaled(60, at_least=8)):
            options = {"temperature": 0.0} if case % 2 else {"temperature": 1.0, "seed": case}
            prompt = [case % 48, 3, 5]
            plain = await client.complete(prompt, max_tokens=80, num_speculative_tokens=0, **options)
            answer = await client.complete(prompt, max_tokens=80, num_speculative_tokens=1 + case % 5, **options)
            assert answer.token_ids == plain.token_ids
            accepted += answer.speculation.num_accepted_draft_tokens
            dropped += answer.speculation.num_dropped_proposals
        sampled = await client.complete(
            "AB", temperature=1.0, max_tokens=80, num_speculative_tokens=3, acceptance="block"
        )
        assert len(sampled.token_ids) == 80
        assert accepted > 0, "INCONCLUSIVE: no draft got through"
        assert dropped > 0
        assert len(nonsense.kinds) == 9
        await no_sessions(client)


async def test_a_late_proposal_is_dropped_whole_and_the_stream_does_not_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(drafting, "MIN_WAIT_S", 0.02)
    monkeypatch.setattr(drafting, "FIRST_WAIT_S", 0.02)
    real, count = draft_server.DraftServicer.Session, 0

    async def slow(servicer: Any, requests: Any, context: Any) -> AsyncIterator[Any]:
        nonlocal count
        async for response in real(servicer, requests, context):
            if response.WhichOneof("message") == "proposal":
                count += 1
                await asyncio.sleep(0.15 if count % 3 == 0 else 0.0)
            yield response

    monkeypatch.setattr(draft_server.DraftServicer, "Session", slow)
    async with in_process_stack(TARGET + ",pass_ms=2", DRAFT) as stack, Client(stack.address) as client:
        plain = await client.complete("ABC", temperature=0, max_tokens=300, num_speculative_tokens=0)
        answer = await client.complete(
            "ABC", temperature=0, max_tokens=300, num_speculative_tokens=3, report_steps=True
        )
        assert answer.token_ids == plain.token_ids
        assert answer.speculation.num_dropped_proposals > 0
        assert answer.speculation.num_draft_failures == 0
        assert answer.speculation.num_accepted_draft_tokens > 0
        late = [c.step for c in answer.chunks if c.step is not None and c.step.reason == "draft-late"]
        assert any(step.draft_ms >= 19 for step in late), "a round that waited in vain says so, and how long"


@pytest.mark.parametrize("role", ["draft", "target"])
async def test_a_frozen_worker_is_known_within_its_time(role: str, monkeypatch: pytest.MonkeyPatch) -> None:
    server = draft_server.DraftServicer if role == "draft" else target_server.TargetServicer
    real, num_proposals = server.Session, 0

    async def freezing(servicer: Any, requests: Any, context: Any) -> AsyncIterator[Any]:
        nonlocal num_proposals
        async for response in real(servicer, requests, context):
            num_proposals += 1
            if num_proposals > 10:
                await asyncio.sleep(3600)  # no answer, no heartbeat, no end of the stream
            yield response

    monkeypatch.setattr(server, "Session", freezing)
    quick = {"heartbeat_ms": 50, "peer_timeout_s": 0.4, "target_wait_s": 0.2}
    async with (
        in_process_stack(TARGET + ",pass_ms=5", DRAFT, coordinator=quick) as stack,
        Client(stack.address, resume=None) as client,
    ):
        request = client.complete("ABC", temperature=0, max_tokens=200, num_speculative_tokens=2)
        if role == "draft":
            answer = await asyncio.wait_for(request, 20)
            assert len(answer.token_ids) == 200
            assert answer.speculation.num_draft_tokens > 0
            assert answer.speculation.num_draft_failures > 0
        else:
            with pytest.raises(OutriderError, match=r"silent for 0\.4 s") as lost:
                await asyncio.wait_for(request, 20)
            assert lost.value.status == "UNAVAILABLE"


async def test_workers_that_register_themselves_serve_drain_and_are_forgotten() -> None:
    settings = CoordinatorSettings(port=0, lease_ms=300, log_level="warning")
    import coordinator.server as coordinator_server

    server = await start(coordinator_server.serve, settings)
    worker = {"coordinators": (server.address,), "port": 0, "log_level": "warning", "drain_grace_s": 0.0}
    target = await start(target_server.serve, TargetWorkerSettings(model=TARGET, **worker))
    draft = await start(draft_server.serve, DraftWorkerSettings(model=DRAFT, **worker))

    async def until(condition: Callable[[server_info.ServerInfo], bool]) -> None:
        for _ in range(200):
            if condition(await client.server_info()):
                return
            await asyncio.sleep(0.05)
        pytest.fail(str(await client.server_info()))

    async with Client(server.address) as client:
        await until(lambda info: sum(w.healthy for w in info.workers) == 2)
        answer = await client.complete("ABC", temperature=0, max_tokens=30, num_speculative_tokens=2)
        assert answer.speculation.num_draft_tokens > 0
        await draft.close()
        await until(lambda info: [w.role for w in info.workers] == ["target"])
        assert len((await client.complete("ABC", max_tokens=5)).token_ids) == 5
        await target.close()
        await until(lambda info: not info.workers)
    async with grpc.aio.insecure_channel(server.address) as channel:
        fleet = worker_pb2_grpc.FleetServiceStub(channel)
        with pytest.raises(grpc.aio.AioRpcError) as unknown:
            await fleet.RenewWorker(worker_pb2.RenewWorkerRequest(lease_id="nothing"))
        assert unknown.value.code() is grpc.StatusCode.NOT_FOUND
        with pytest.raises(grpc.aio.AioRpcError) as nameless:
            await fleet.RegisterWorker(worker_pb2.RegisterWorkerRequest(address="127.0.0.1:1"))
        assert nameless.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    await server.close()


async def test_a_worker_in_a_long_pass_goes_on_saying_that_it_lives(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its event loop answers while its engine computes, so that however long that takes it is not silent."""
    release, real_forward, real_said = threading.Event(), ToyModel.forward, Peer._said_something
    num_words = 0

    def forward(model: ToyModel, batch: Any) -> Any:
        release.wait(60)
        return real_forward(model, batch)

    def said_something(peer: Peer) -> None:
        nonlocal num_words
        num_words += 1
        if num_words == 12:
            release.set()
        real_said(peer)

    monkeypatch.setattr(ToyModel, "forward", forward)
    monkeypatch.setattr(Peer, "_said_something", said_something)
    async with in_process_stack(TARGET, None, worker={"heartbeat_ms": 20}) as stack, Client(stack.address) as client:
        answer = await client.complete("ABC", temperature=0, max_tokens=3, num_speculative_tokens=0)
        assert len(answer.token_ids) == 3
    assert num_words >= 12, "INCONCLUSIVE: nothing was heard in the pass"


async def test_a_stream_waits_for_its_only_target_to_come_back() -> None:
    model = TARGET + ",pass_ms=2"
    async with in_process_stack(model, DRAFT, target_worker=AT_ONCE) as stack:
        async with Client(stack.address, resume=None) as client:
            request = {"temperature": 1.0, "seed": 9, "max_tokens": 300, "num_speculative_tokens": 2}
            whole = await client.complete("ABC", **request)
            port = stack.target[0].port

            async def restart() -> None:
                await stack.target[0].close()
                settings = TargetWorkerSettings(model=model, port=port, log_level="warning", **AT_ONCE)
                stack.target[0] = await start(target_server.serve, settings)

            assert ids(await collect(client.generate("ABC", **request), 20, restart)) == whole.token_ids
            await no_sessions(client)
            with pytest.raises(OutriderError) as late:
                timed = client.generate("ABC", temperature=0, max_tokens=4000, timeout_s=3.0)
                await collect(timed, 5, stack.target[0].close)
            assert late.value.status in ("UNAVAILABLE", "DEADLINE_EXCEEDED")
            assert (await client.server_info()).num_requests_running == 0
