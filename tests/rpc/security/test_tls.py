"""TLS on every hop: who is served, who is not and with which status, and certificates that change under a fleet."""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
from certificates import DAY, NOW, Authority, Pair
from cryptography import x509
from cryptography.x509.oid import NameOID
from grpc_health.v1 import health_pb2, health_pb2_grpc
from ports import free_port
from stack import Stack, in_process_stack, start

import coordinator.server
import target_worker.server
from outrider import TLS, Chunk, Client
from outrider.errors import InvalidArgument, Unavailable
from outrider.serving.channel import open_channel
from outrider.serving.tls import Dialer
from outrider.settings import CoordinatorSettings, TargetWorkerSettings
from outrider.v1 import worker_pb2, worker_pb2_grpc

TOY = "toy:vocab=16,seed=1"
REQUEST: dict[str, Any] = {"temperature": 0, "max_tokens": 12, "num_speculative_tokens": 3, "ignore_eos": True}


class Fleet:
    """Certificates of each role from one authority, and an authority that nobody trusts."""

    def __init__(self, folder: Path) -> None:
        self.authority = Authority(folder, "fleet")
        self.stranger = Authority(folder, "stranger")
        self.pairs = {role: self.authority.certify(role) for role in ("coordinator", "draft-worker", "target-worker")}

    def settings(self, role: str, *, client_ca: bool = True) -> dict[str, Any]:
        pair, ca = self.pairs[role], self.authority.ca
        own = {"tls_cert": pair.cert, "tls_key": pair.key, "tls_ca": ca}
        return {**own, "tls_client_ca": ca} if client_ca else own

    def client(self, pair: Pair | None = None) -> TLS:
        return TLS(self.authority.ca) if pair is None else TLS(self.authority.ca, pair.cert, pair.key)


@pytest.fixture
def fleet(tmp_path: Path) -> Fleet:
    return Fleet(tmp_path)


@asynccontextmanager
async def secured(fleet: Fleet, **coordinator: Any) -> AsyncIterator[Stack]:
    """mTLS within the fleet, TLS towards clients."""
    async with in_process_stack(
        coordinator={**fleet.settings("coordinator", client_ca=False), **coordinator},
        draft_worker=fleet.settings("draft-worker"),
        target_worker=fleet.settings("target-worker"),
    ) as stack:
        yield stack


async def describe_status(channel: grpc.aio.Channel) -> str:
    stub = worker_pb2_grpc.WorkerServiceStub(channel)
    try:
        await stub.DescribeWorker(worker_pb2.DescribeWorkerRequest(), timeout=20)
    except grpc.aio.AioRpcError as error:
        return error.code().name
    return "OK"


async def test_a_text_over_tls_is_the_text_in_plaintext(fleet: Fleet) -> None:
    async with in_process_stack() as stack, Client(stack.address) as client:
        expected = await client.complete([1, 2, 3], **REQUEST)
    async with secured(fleet) as stack, Client(stack.address, tls=fleet.client()) as client:
        answer = await client.complete([1, 2, 3], **REQUEST)
    assert answer.token_ids == expected.token_ids
    assert answer.speculation.num_draft_tokens > 0


async def counters(port: int) -> dict[str, float]:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(b"GET /metrics HTTP/1.1\r\nHost: localhost\r\n\r\n")
    text = (await reader.read()).decode()
    writer.close()
    found = re.findall(r"(?m)^outrider_(tls_handshakes|connections|rpc_refusals)_total(\{.*\})? (\S+)$", text)
    return {name + labels: float(value) for name, labels, value in found}


async def test_callers_that_a_worker_does_not_know_are_refused_and_counted(fleet: Fleet) -> None:
    """Without a certificate, with a stranger's, an expired one, in plaintext, as another role; then a coordinator."""
    port = free_port()
    settings = TargetWorkerSettings(
        model=TOY, port=0, log_level="warning", metrics_port=port, **fleet.settings("target-worker")
    )
    worker = await start(target_worker.server.serve, settings)
    try:
        for pair in (
            None,
            fleet.stranger.certify("coordinator"),
            fleet.authority.certify("coordinator", until=NOW - DAY),
        ):
            before = await counters(port)
            async with Dialer(fleet.client(pair)).open(worker.address) as channel:
                assert await describe_status(channel) == "UNAVAILABLE"
            after = await counters(port)
            assert after["tls_handshakes"] > before["tls_handshakes"]
            assert after["connections"] == before["connections"] == 0
        before = await counters(port)
        async with open_channel(worker.address) as channel:
            assert await describe_status(channel) == "UNAVAILABLE", "in plaintext"
        after = await counters(port)
        assert after["tls_handshakes"] > before["tls_handshakes"]
        assert after["connections"] == 0
        async with Dialer(fleet.client(fleet.authority.certify("target-worker"))).open(worker.address) as channel:
            assert await describe_status(channel) == "PERMISSION_DENIED"
        labels = '{reason="WRONG_ROLE",service="outrider.v1.WorkerService",status="PERMISSION_DENIED"}'
        assert (await counters(port))["rpc_refusals" + labels] == 1
        async with Dialer(fleet.client(fleet.authority.certify("coordinator"))).open(worker.address) as channel:
            assert await describe_status(channel) == "OK"
        assert (await counters(port))["connections"] == 2
    finally:
        await worker.close()


async def test_a_role_is_a_dns_name_and_no_other_kind(fleet: Fleet) -> None:
    """What people may have certified for themselves opens nothing: neither a worker nor registration."""
    kinds: dict[str, Callable[[str], dict[str, Any]]] = {
        "common name": lambda role: {"common_name": role},
        "URI": lambda role: {"others": [x509.UniformResourceIdentifier(role)]},
        "email": lambda role: {"others": [x509.RFC822Name(role)]},
        "directory": lambda role: {
            "others": [x509.DirectoryName(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, role)]))]
        },
    }

    def alice(**named: Any) -> Dialer:
        return Dialer(fleet.client(fleet.authority.certify("alice", **{"common_name": "alice", **named})))

    async with secured(fleet, **fleet.settings("coordinator")) as stack:
        for kind, named in kinds.items():
            dialer = alice(**named("coordinator"))
            async with dialer.open(stack.target[0].address, "target-worker") as channel:
                assert await describe_status(channel) == "PERMISSION_DENIED", kind
            with pytest.raises(grpc.aio.AioRpcError, match="names alice, localhost"):
                await register(stack.address, worker_pb2.WORKER_ROLE_TARGET, alice(**named("target-worker")))


async def test_a_client_trusts_only_the_authority_and_the_name_that_it_was_told(fleet: Fleet) -> None:
    async with secured(fleet) as stack:
        for tls in (
            None,
            TLS(),
            TLS(fleet.stranger.ca),
            TLS(fleet.authority.ca, server_name="somebody-else"),
        ):
            async with Client(stack.address, tls=tls, timeout_s=20, resume=None) as client:
                with pytest.raises(Unavailable):
                    await client.server_info()
        async with Client(stack.address, tls=TLS(fleet.authority.ca, server_name="coordinator")) as client:
            assert (await client.server_info()).models
        _, _, port = stack.address.rpartition(":")
        async with Client(f"dns:///localhost:{port}", tls=fleet.client(), timeout_s=20) as client:
            assert (await client.server_info()).models, "behind a name, the certificate names it and not the address"


async def test_a_coordinator_does_not_use_workers_that_it_cannot_trust(fleet: Fleet, tmp_path: Path) -> None:
    """A worker of another authority, and a draft worker in a target's place."""
    theirs = Fleet(tmp_path / "other")
    for settings in (theirs.settings("target-worker"), fleet.settings("draft-worker")):
        worker = await start(
            target_worker.server.serve, TargetWorkerSettings(model=TOY, port=0, log_level="error", **settings)
        )
        async with in_process_stack(draft=None, num_targets=0, coordinator={
            **fleet.settings("coordinator", client_ca=False), "target_workers": (worker.address,), "log_level": "error",
        }) as stack:  # fmt: skip
            async with Client(stack.address, tls=fleet.client(), timeout_s=20, resume=None) as client:
                with pytest.raises(Unavailable):
                    await client.complete([1, 2, 3], **REQUEST)
        await worker.close()


async def register(address: str, role: Any, dialer: Dialer) -> None:
    request = worker_pb2.RegisterWorkerRequest(role=role, address="127.0.0.1:1")
    async with dialer.open(address, "coordinator") as channel:
        stub = worker_pb2_grpc.FleetServiceStub(channel)
        await stub.RegisterWorker(request, timeout=20, metadata=dialer.metadata())


async def test_only_workers_register_and_only_as_what_they_are(fleet: Fleet) -> None:
    target, draft = worker_pb2.WORKER_ROLE_TARGET, worker_pb2.WORKER_ROLE_DRAFT
    client = fleet.authority.certify("some-client")
    async with secured(fleet, **fleet.settings("coordinator")) as stack:
        for pair, role, code in (
            (client, target, "PERMISSION_DENIED"),
            (fleet.pairs["draft-worker"], target, "PERMISSION_DENIED"),
            (fleet.pairs["draft-worker"], draft, "OK"),
            (fleet.pairs["target-worker"], draft, "PERMISSION_DENIED"),
            (fleet.pairs["target-worker"], target, "OK"),
        ):
            try:
                await register(stack.address, role, Dialer(fleet.client(pair)))
                status = "OK"
            except grpc.aio.AioRpcError as error:
                status = error.code().name
            assert status == code
    async with secured(fleet) as stack:
        with pytest.raises(grpc.aio.AioRpcError, match="workers cannot register here"):
            await register(stack.address, target, Dialer(fleet.client(fleet.pairs["target-worker"])))


async def test_workers_take_leases_over_tls(fleet: Fleet) -> None:
    mutual = fleet.settings("coordinator")
    async with in_process_stack(draft=None, num_targets=0, coordinator={**mutual, "log_level": "error"}) as stack:
        worker = await start(
            target_worker.server.serve,
            TargetWorkerSettings(
                model=TOY, port=0, log_level="error", coordinators=(stack.address,), **fleet.settings("target-worker")
            ),
        )
        tls = fleet.client(fleet.authority.certify("some-client"))
        async with Client(stack.address, tls=tls, timeout_s=60) as client:
            while not any(worker.healthy for worker in (await client.server_info()).workers):
                await asyncio.sleep(0.02)
            assert (await client.complete([1, 2, 3], max_tokens=4, temperature=0, ignore_eos=True)).token_ids
        await worker.close()


async def test_every_certificate_is_exchanged_under_a_running_stream(fleet: Fleet, tmp_path: Path) -> None:
    """From one authority to another: the text goes on, new calls are served, and who knows only the old one is not."""
    theirs, only = Fleet(tmp_path / "other"), tmp_path / "only.pem"
    old = copy_of(fleet.authority.ca, tmp_path / "old.pem")
    request = {**REQUEST, "max_tokens": 60}
    async with secured(fleet, peer_timeout_s=20.0) as stack:
        async with Client(stack.address, tls=fleet.client(), timeout_s=100) as client:
            expected = await client.complete([1, 2, 3], **request)
            written: list[int] = []
            async for event in client.generate([1, 2, 3], **request):
                if isinstance(event, Chunk):
                    if not written:
                        exchange(fleet, theirs)
                    written += event.token_ids
            assert tuple(written) == tuple(expected.token_ids)
            again = await client.complete([1, 2, 3], **request)
            assert again.token_ids == expected.token_ids
            assert all(worker.healthy for worker in (await client.server_info()).workers)
        async with Client(stack.address, tls=TLS(old), timeout_s=20, resume=None) as client:
            with pytest.raises(Unavailable):
                await client.server_info()
        copy_of(fleet.stranger.ca, only)
        async with Client(stack.address, tls=TLS(str(only)), timeout_s=20, resume=None) as client:
            with pytest.raises(Unavailable):
                await client.server_info()
            copy_of(theirs.authority.ca, only)
            assert (await client.server_info()).models, "the client reads its files again too"


def copy_of(path: str, to: Path) -> str:
    to.write_bytes(Path(path).read_bytes())
    return str(to)


def exchange(fleet: Fleet, theirs: Fleet) -> None:
    """Both authorities are trusted, then every certificate is the other one's."""
    trusted = Path(fleet.authority.ca)
    fresh = trusted.with_suffix(".fresh")
    fresh.write_text(Path(theirs.authority.ca).read_text() + trusted.read_text())
    fresh.rename(trusted)
    for role, pair in fleet.pairs.items():
        pair.replace_by(theirs.pairs[role])


async def test_bad_files_are_told_at_start_and_left_alone_later(fleet: Fleet, tmp_path: Path) -> None:
    good = fleet.settings("target-worker")
    other = fleet.authority.certify("target-worker")
    for change, match in (
        ({"tls_key": ""}, "tls_key is empty"),
        ({"tls_cert": "", "tls_key": ""}, "tls_client_ca needs tls_cert"),
        ({"tls_cert": str(tmp_path / "none.pem")}, r"none\.pem"),
        ({"tls_key": other.key}, "no PEM certificate and its key"),
        ({"tls_client_ca": good["tls_key"]}, "no PEM certificate"),
    ):
        settings = TargetWorkerSettings(model=TOY, port=0, log_level="error", **{**good, **change})
        with pytest.raises(InvalidArgument, match=match):
            await start(target_worker.server.serve, settings)
    worker = await start(target_worker.server.serve, TargetWorkerSettings(model=TOY, port=0, log_level="error", **good))
    copy_of(good["tls_key"], Path(good["tls_cert"]))
    async with Dialer(fleet.client(fleet.pairs["coordinator"])).open(worker.address, "target-worker") as channel:
        assert await describe_status(channel) == "OK"
    await worker.close()


async def test_health_checks_need_no_certificate_at_a_port_of_their_own(fleet: Fleet) -> None:
    port = free_port()
    settings = TargetWorkerSettings(
        model=TOY, port=0, log_level="warning", health_port=port, **fleet.settings("target-worker")
    )
    worker = await start(target_worker.server.serve, settings)
    async with open_channel(f"127.0.0.1:{port}") as channel:
        asked = health_pb2.HealthCheckRequest(service="outrider.v1.TargetService")
        answer = await health_pb2_grpc.HealthStub(channel).Check(asked, timeout=20)
        assert answer.status == health_pb2.HealthCheckResponse.SERVING
        stub = worker_pb2_grpc.WorkerServiceStub(channel)
        with pytest.raises(grpc.aio.AioRpcError) as refusal:
            await stub.DescribeWorker(worker_pb2.DescribeWorkerRequest(), timeout=20)
        assert refusal.value.code() is grpc.StatusCode.UNIMPLEMENTED, "nothing else is served there"
    await worker.close()


async def warned(caplog: pytest.LogCaptureFixture, logger: str) -> str:
    """The first warning of a logger."""
    async with asyncio.timeout(60):
        while True:
            for record in caplog.records:
                if record.name == logger and record.levelno == logging.WARNING:
                    return record.getMessage()
            await asyncio.sleep(0.02)


@pytest.mark.parametrize(
    ("changed", "advice"),
    [
        ({"coordinator": "draft-worker"}, "PERMISSION_DENIED: .*; --tls-cert here must be .* role of this server"),
        ({"coordinator": "fleet_token_file"}, "UNAUTHENTICATED: .*; the first line of the caller's --fleet-token-file"),
        ({"target-worker": "draft-worker"}, "UNAVAILABLE: .*; --tls-cert there must be .* names 'target-worker'"),
        ({"target-worker": "stranger"}, "UNAVAILABLE: .*; --tls-ca here must hold the authority of --tls-cert there"),
    ],
    ids=["role-of-coordinator", "token", "role-of-worker", "authority"],
)
async def test_a_coordinator_warns_of_what_only_a_setting_mends(
    fleet: Fleet, tmp_path: Path, changed: dict[str, str], advice: str, caplog: pytest.LogCaptureFixture
) -> None:
    own = {
        "coordinator": fleet.settings("coordinator", client_ca=False),
        "target-worker": fleet.settings("target-worker"),
    }
    for role, settings in own.items():
        secret = tmp_path / f"{role}-secret"
        secret.write_text(("theirs" if changed.get(role) == "fleet_token_file" else "ours") * 16)
        settings["fleet_token_file"] = str(secret)
        if (shown := changed.get(role)) in ("draft-worker", "stranger"):
            pair = fleet.stranger.certify(role) if shown == "stranger" else fleet.pairs[shown]
            settings |= {"tls_cert": pair.cert, "tls_key": pair.key}
    worker = await start(target_worker.server.serve, TargetWorkerSettings(model=TOY, port=0, **own["target-worker"]))
    values = {"target_workers": (worker.address,), "port": 0, "drain_grace_s": 0}
    try:
        server = await start(coordinator.server.serve, CoordinatorSettings(**values, **own["coordinator"]))
        try:
            told = await warned(caplog, "coordinator.fleet.worker")
            assert re.search(f"target worker {worker.address}: {advice}", told), told
        finally:
            await server.close()
    finally:
        await worker.close()


async def test_a_worker_warns_once_of_a_coordinator_that_will_never_take_it(
    fleet: Fleet, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, logger="outrider.serving.fleet")
    wrong = {**fleet.settings("target-worker", client_ca=False)}
    wrong |= {"tls_cert": fleet.pairs["draft-worker"].cert, "tls_key": fleet.pairs["draft-worker"].key}
    async with in_process_stack(draft=None, num_targets=0, coordinator=fleet.settings("coordinator")) as stack:
        settings = TargetWorkerSettings(model=TOY, port=0, coordinators=(stack.address,), **wrong)
        worker = await start(target_worker.server.serve, settings)
        told = await warned(caplog, "outrider.serving.fleet")
        assert "must name target-worker" in told
        assert told.endswith("; --tls-cert here must be a certificate that names the role of this server")
        async with asyncio.timeout(30):
            while len(lines := [r for r in caplog.records if r.getMessage() == told]) < 3:
                await asyncio.sleep(0.05)
        assert [record.levelname for record in lines[:3]] == ["WARNING", "INFO", "INFO"]
        await worker.close()
