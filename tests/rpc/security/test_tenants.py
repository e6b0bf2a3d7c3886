"""Tokens: who is served as which tenant, what each may ask for, and that one sees and takes nothing of another."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
from certificates import Authority
from ports import free_port
from scraping import by_label, scrape, total
from stack import Stack, in_process_stack, start

import coordinator.server
import target_worker.server
from coordinator.tenants import Tenants
from outrider import Chunk, Client, OutriderError
from outrider.errors import InvalidArgument, NotFound, ResourceExhausted, Unauthenticated
from outrider.serving.channel import open_channel
from outrider.serving.status import from_rpc_error
from outrider.serving.tokens import line_for, new_token
from outrider.settings import CoordinatorSettings, TargetWorkerSettings
from outrider.v1 import generation_pb2, generation_pb2_grpc

A, B = new_token(), new_token()
SLOW_TOY = "toy:vocab=16,seed=1,pass_ms=4"
REQUEST: dict[str, Any] = {"temperature": 0, "max_tokens": 8, "num_speculative_tokens": 2, "ignore_eos": True}
LONG = {**REQUEST, "max_tokens": 400, "num_speculative_tokens": 0}


class Files:
    """What the coordinator reads."""

    def __init__(self, folder: Path) -> None:
        self.tokens, self.limits, self.fleet = folder / "tokens", folder / "limits.toml", folder / "fleet"
        self.write(self.tokens, f"{line_for(A, 'a')}\n{line_for(B, 'b')}\n")
        self.write(self.limits, "[default]\n")
        self.write(self.fleet, new_token())

    def write(self, path: Path, text: str) -> None:
        fresh = path.with_suffix(".fresh")
        fresh.write_text(text)
        fresh.rename(path)

    @property
    def settings(self) -> dict[str, Any]:
        return {"tokens_file": str(self.tokens), "tenant_limits_file": str(self.limits)}


@pytest.fixture
def files(tmp_path: Path) -> Files:
    return Files(tmp_path)


SERVICE = generation_pb2.DESCRIPTOR.services_by_name["GenerationService"]


@asynccontextmanager
async def with_tokens(
    files: Files, *models: str, workers: dict[str, Any] | None = None, **coordinator: Any
) -> AsyncIterator[Stack]:
    async with in_process_stack(*models, coordinator={**files.settings, **coordinator}, **(workers or {})) as stack:
        yield stack


def client(stack: Stack, token: str | None, **options: Any) -> Client:
    return Client(stack.address, token=token, **{"timeout_s": 60, "resume": None, **options})


async def test_without_a_valid_token_nothing_is_served_and_each_refusal_is_counted(files: Files) -> None:
    port, reasons = free_port(), Counter[str]()
    async with with_tokens(files, metrics_port=port) as stack:
        async with open_channel(stack.address) as channel:
            stub = generation_pb2_grpc.GenerationServiceStub(channel)
            for metadata, reason in (
                ((), "NO_TOKEN"),
                ((("authorization", f"Bearer {new_token()}"),), "BAD_TOKEN"),
                ((("authorization", f"Basic {A}"),), "BAD_TOKEN"),
                ((("x-outrider-tenant", "a"),), "NO_TOKEN"),
            ):
                for method in SERVICE.methods_by_name:
                    with pytest.raises(grpc.aio.AioRpcError) as refusal:
                        # a request that is no good: were it read, INVALID_ARGUMENT would come
                        call = channel.unary_stream(f"/{SERVICE.full_name}/{method}")
                        await call(b"\xff\xff", metadata=metadata, timeout=20).read()
                    error = from_rpc_error(refusal.value)
                    assert (type(error), error.reason) == (Unauthenticated, reason), method
                    reasons[reason] += 1
            metadata = (("authorization", f"Bearer {A}"), ("x-outrider-tenant", "b"))
            with pytest.raises(grpc.aio.AioRpcError, match="another tenant") as refusal:
                await stub.GetServerInfo(generation_pb2.GetServerInfoRequest(), metadata=metadata, timeout=20)
            assert refusal.value.code() is grpc.StatusCode.PERMISSION_DENIED
        samples = await scrape(port)
        assert by_label(samples, "rpc_refusals_total", "reason") == {**reasons, "TENANT_MISMATCH": 1}
        assert total(samples, "request_failure_total") == 0, "none of them was a request"
        async with client(stack, A, metadata={"x-outrider-tenant": "a"}) as agreed:
            info = await agreed.server_info()
            assert (info.num_requests_running, info.num_requests_waiting) == (0, 0)
            assert (await agreed.complete([1, 2, 3], **REQUEST)).token_ids


async def test_a_client_shows_what_it_was_given_and_nothing_of_the_environment(
    files: Files, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A token that lies about goes to nobody, and the refusal says what a Python program has to do."""
    monkeypatch.setenv("OUTRIDER_TOKEN", A)
    async with with_tokens(files) as stack, client(stack, None) as caller:
        for call in (caller.server_info(), caller.complete([1, 2, 3], **REQUEST)):
            with pytest.raises(Unauthenticated, match=r'token="\.\.\.", or token=outrider\.token_from_file') as caught:
                await call
            assert (caught.value.reason, A in str(caught.value)) == ("NO_TOKEN", False)


async def test_a_token_is_given_before_each_call_and_may_be_withdrawn(files: Files) -> None:
    shown = [A]
    async with with_tokens(files) as stack, Client(stack.address, token=lambda: shown[-1], resume=None) as caller:
        assert (await caller.complete([1, 2, 3], **REQUEST)).token_ids
        fresh = new_token()
        files.write(files.tokens, f"{line_for(fresh, 'a')}\n")
        with pytest.raises(Unauthenticated, match="not known"):
            await caller.complete([1, 2, 3], **REQUEST)
        shown.append(fresh)
        assert (await caller.complete([1, 2, 3], **REQUEST)).token_ids


async def test_workers_serve_and_register_with_the_fleets_token_only(files: Files) -> None:
    fleet = {"fleet_token_file": str(files.fleet)}
    stranger = files.fleet.with_name("stranger")
    files.write(stranger, new_token())
    async with in_process_stack(
        draft=None, coordinator={**files.settings, **fleet}, target_worker=fleet
    ) as stack, client(stack, A) as caller:  # fmt: skip
        assert (await caller.complete([1, 2, 3], **REQUEST)).token_ids
        for tokens, healthy in ((stranger, False), (files.fleet, True)):
            settings = TargetWorkerSettings(
                model="toy:vocab=16,seed=1", port=0, log_level="error", coordinators=(stack.address,),
                fleet_token_file=str(tokens),
            )  # fmt: skip
            worker = await start(target_worker.server.serve, settings)
            for _ in range(3000 if healthy else 10):
                known = {found.address: found for found in (await caller.server_info()).workers}
                if worker.address in known and known[worker.address].healthy:
                    break
                await asyncio.sleep(0.02)
            assert (worker.address in known) == healthy
            await worker.close()
    async with in_process_stack(draft=None, target_worker=fleet, coordinator={"log_level": "error"}) as stack:
        async with client(stack, None) as caller:
            with pytest.raises(OutriderError, match="no token"):
                await caller.complete([1, 2, 3], **REQUEST)


async def test_a_tenant_sees_nothing_of_another(files: Files) -> None:
    """Not its rounds, and not even by the time that a text takes: no cache of either worker has anything for it."""
    prompt, ports = [1 + i % 15 for i in range(64)], [free_port(), free_port()]
    workers = {
        role: {"metrics_port": port} for role, port in zip(("draft_worker", "target_worker"), ports, strict=True)
    }

    async def hits() -> list[float]:
        return [total(await scrape(port), "prefix_cache_hits_total") for port in ports]

    async with with_tokens(files, workers=workers) as stack, client(stack, A) as a, client(stack, B) as b:
        first = await a.complete(prompt, request_id="theirs", **REQUEST)
        assert first.usage.cached_tokens == 0
        assert (await a.complete(prompt, **REQUEST)).usage.cached_tokens > 0, "inconclusive: nothing is cached"
        while not all(own := await hits()):  # a text may be there before a draft worker is
            await a.complete(prompt, **REQUEST)
        assert (await b.complete(prompt, **REQUEST)).usage.cached_tokens == 0
        assert await hits() == own
        assert await a.trace("theirs")
        with pytest.raises(NotFound):
            await b.trace("theirs")


LIMITS = """
[default]
max_output_tokens = 100
[tenants.a]
requests_per_minute = 12
max_streams = 2
max_prompt_tokens = 5
max_output_tokens = 10
"""


async def test_limits_are_named_and_are_one_tenants(files: Files) -> None:
    files.write(files.limits, LIMITS.replace("requests_per_minute = 12\n", ""))
    async with with_tokens(files) as stack, client(stack, A) as a, client(stack, B) as b:
        for change, field in (
            ({"max_tokens": 11}, "stopping.max_tokens"),
            ({"n": 3}, "output.n"),
        ):
            with pytest.raises(InvalidArgument, match="this tenant may have at most") as refusal:
                async for _ in a.generate([1, 2, 3], **{**REQUEST, **change}):
                    pass
            assert (refusal.value.field, refusal.value.reason) == (field, "TENANT_LIMIT")
        with pytest.raises(InvalidArgument, match="token_ids is 6 tokens, this tenant may have at most 5"):
            await a.complete([1] * 6, **REQUEST)
        unsaid = {name: value for name, value in REQUEST.items() if name != "max_tokens"}
        assert len((await a.complete([1, 2], **unsaid)).token_ids) == 10, "its default is what it may have"
        assert len((await b.complete([1] * 6, **{**REQUEST, "max_tokens": 11})).token_ids) == 11
        with pytest.raises(InvalidArgument, match="at most 100"):
            await b.complete([1] * 6, **{**REQUEST, "max_tokens": 101})
        files.write(files.limits, "# none\n")
        assert len((await a.complete([1] * 6, **{**REQUEST, "max_tokens": 11})).token_ids) == 11


async def test_requests_above_the_rate_are_told_when_to_come_back(files: Files) -> None:
    files.write(files.limits, "[tenants.a]\nrequests_per_minute = 12\n")
    async with with_tokens(files) as stack, client(stack, A) as a, client(stack, B) as b:
        many = [a.complete([1, 2, 3], **REQUEST) for _ in range(10)]
        outcomes: list[Any] = await asyncio.gather(*many, return_exceptions=True)
        refused = [error for error in outcomes if isinstance(error, ResourceExhausted)]
        assert 7 <= len(refused) <= 8, "two of twelve at once, one more every five seconds"
        assert all(error.reason == "TENANT_RATE" and 0 < (error.retry_delay_s or 0) <= 5 for error in refused)
        await asyncio.gather(*(b.complete([1, 2, 3], **REQUEST) for _ in range(10)))
        await asyncio.gather(*(a.server_info() for _ in range(20)), *(a.tokenize("!") for _ in range(20)))


async def test_streams_above_the_limit_are_refused_until_one_ends(files: Files) -> None:
    files.write(files.limits, "[tenants.a]\nmax_streams = 2\n")
    async with with_tokens(files, SLOW_TOY, None) as stack, client(stack, A) as a, client(stack, B) as b:
        running = [a.generate([1, 2, 3], **LONG) for _ in range(2)]
        for stream in running:
            await anext(stream)
        with pytest.raises(ResourceExhausted, match="tenant a has 2 streams, at most 2") as refusal:
            await a.complete([1, 2, 3], **REQUEST)
        assert (refusal.value.reason, refusal.value.retry_delay_s) == ("TENANT_STREAMS", 1.0)
        assert (await b.complete([1, 2, 3], **REQUEST)).token_ids
        for stream in running:
            await stream.aclose()
        async with client(stack, A, resume=None) as again:
            while True:  # the server hears of the end a moment later
                try:
                    assert (await again.complete([1, 2, 3], **REQUEST)).token_ids
                    break
                except ResourceExhausted:
                    await asyncio.sleep(0.02)


async def test_a_flood_of_one_tenant_takes_its_own_places(files: Files) -> None:
    """Two places, a queue for ten: A asks for forty texts at once, then B for four. From the first of B's to its last
    they have their turns one after the other, although all of A's were there before."""
    order: list[str] = []
    async with with_tokens(
        files, SLOW_TOY, None, max_running_requests=2, max_waiting_requests=10
    ) as stack, client(stack, A) as a, client(stack, B) as b:  # fmt: skip

        async def text(caller: Client, name: str) -> str:
            started = False
            try:
                async for event in caller.generate([1, 2, 3], **{**REQUEST, "max_tokens": 20}):
                    if isinstance(event, Chunk) and not started:
                        started = True
                        order.append(name)
            except ResourceExhausted:
                return "refused"
            return "served"

        flood = [asyncio.create_task(text(a, "a")) for _ in range(40)]
        while (await b.server_info()).num_requests_waiting < 10:
            await asyncio.sleep(0.005)
        assert await asyncio.gather(*(text(b, "b") for _ in range(4))) == ["served"] * 4
        outcomes = await asyncio.gather(*flood)
    assert "refused" in outcomes, "inconclusive: the queue was never full"
    assert "served" in outcomes
    first, last = order.index("b"), len(order) - order[::-1].index("b")
    assert order[first:last].count("b") == 4
    # their first tokens may change places on the way here, their turns do not
    assert order[first:last].count("a") <= 5, order


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.1.2.3"])
async def test_no_server_is_open_beyond_loopback_unless_told(host: str, files: Files) -> None:
    for serve, settings, remedy in (
        (coordinator.server.serve, CoordinatorSettings(host=host, port=0, log_level="error"), "--tokens-file"),
        (
            target_worker.server.serve,
            TargetWorkerSettings(host=host, port=0, model="toy:vocab=16", log_level="error"),
            "--fleet-token-file",
        ),
    ):
        with pytest.raises(InvalidArgument, match="beyond loopback anyone could call") as refusal:
            await start(serve, settings)
        assert remedy in refusal.value.message
        assert "--insecure" in refusal.value.message


async def test_a_server_listens_everywhere_where_callers_are_known_or_it_is_told_to(
    files: Files, tmp_path: Path
) -> None:
    authority = Authority(tmp_path)
    pair = authority.certify("coordinator")
    shown = {"tls_cert": pair.cert, "tls_key": pair.key}
    with pytest.raises(InvalidArgument, match=r"not it who they are\..*--tls-client-ca"):
        await start(coordinator.server.serve, CoordinatorSettings(host="0.0.0.0", port=0, log_level="error", **shown))
    for change in (
        {"insecure": True},
        {"tokens_file": str(files.tokens)},
        {**shown, "tls_client_ca": authority.ca},
        {**shown, "insecure": True},
    ):
        settings = CoordinatorSettings(host="0.0.0.0", port=0, log_level="error", drain_grace_s=0, **change)
        await (await start(coordinator.server.serve, settings)).close()
    worker = TargetWorkerSettings(
        host="0.0.0.0", port=0, model="toy:vocab=16", log_level="error", fleet_token_file=str(files.fleet)
    )
    await (await start(target_worker.server.serve, worker)).close()


async def test_limits_that_are_no_good_or_about_to_be_written_leave_the_old_ones(files: Files) -> None:
    files.write(files.limits, LIMITS)
    settings = CoordinatorSettings(port=0, **files.settings)
    tenants = Tenants(settings)
    assert (tenants.of("a").max_streams, tenants.of("b").max_output_tokens) == (2, 100)
    for text in ("", "\n", "a = " + "[" * 3000, '[tenants."b c"]\n', "[tenants.a]\nmax_streams = -1"):
        files.write(files.limits, text)
        assert (tenants.of("a").max_streams, tenants.of("b").max_output_tokens) == (2, 100)
    files.write(files.limits, "[tenants.a]\nmax_streams = 3\n")
    assert (tenants.of("a").max_streams, tenants.of("b").max_output_tokens) == (3, None)


async def test_a_bad_limits_file_is_told_by_its_key(files: Files) -> None:
    for text, match in (
        ("[tenants.a]\nmax_stream = 2", r"tenants\.a\.max_stream is unknown: did you mean tenants\.a\.max_streams\?"),
        ("[default]\nmax_stream = 2", r"did you mean default\.max_streams\?"),
        ("[tenants.a]\nfoo = 2", r"foo is unknown: there are requests_per_minute, max_streams, "),
        ("[tenant.a]\nmax_streams = 2", r"tenant is unknown: did you mean tenants\?"),
        ("[tenants.a]\nmax_streams = 0", "max_streams"),
        ("[tenants.a]\nmax_streams = '2'", "max_streams"),
        ("max_streams = 2", "max_streams"),
        ("[tenants", "tenant_limits_file"),
        ("", "tenant_limits_file: is empty"),
        (" \n", "tenant_limits_file: is empty"),
        ('[tenants."team a"]\nmax_streams = 2', "tenants.'team a' can be no tenant's"),
        ("[tenants.a]\nmax_streams = " + "[" * 3000, "nested too deeply"),
        ("[tenants.a]\nmax_streams = " + "9" * 5000, "tenant_limits_file"),
    ):
        files.write(files.limits, text)
        with pytest.raises(InvalidArgument, match=match):
            await start(coordinator.server.serve, CoordinatorSettings(port=0, log_level="error", **files.settings))
