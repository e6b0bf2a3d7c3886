"""A running coordinator and its workers, as `outrider doctor` looks at them: who can be reached, how far away, and by
which clock; and whether the settings of TLS and tokens would let a server start."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from importlib.metadata import version

from outrider.cli.check import Check
from outrider.cli.connect import connect
from outrider.cli.console import describe_failure
from outrider.errors import OutriderError
from outrider.server_info import ServerInfo, Worker
from outrider.serving.channel import is_loopback
from outrider.serving.tls import fleet_dialer, server_credentials
from outrider.serving.tokens import FleetTokens, TenantTokens
from outrider.settings import CoordinatorSettings, ListenerSettings, ServerSettings

TIMEOUT_S = 10.0
MAX_CLOCK_OFFSET_MS = 1000.0
"""Tokens and certificates end by the clock, and logs are put in order by it."""


def check_coordinator(address: str) -> tuple[list[Check], ServerInfo | None]:
    """And what it told, where it could be reached."""
    try:
        return asyncio.run(_check_coordinator(address))
    except OutriderError as error:
        fix = "`outrider up`, another --address, or OUTRIDER_TOKEN_FILE and OUTRIDER_TLS_CA where it asks for them"
        return [Check("fail", f"coordinator {address}", describe_failure(error)[0], fix)], None


async def _check_coordinator(address: str) -> tuple[list[Check], ServerInfo]:
    async with connect(address, timeout_s=TIMEOUT_S) as client:
        await client.server_info()  # the connection is there before the clock is read
        asked_s, begin = time.time(), time.perf_counter()
        info = await client.server_info()
        took_ms = 1000 * (time.perf_counter() - begin)
    offset_ms = 1000 * (info.unix_time_s - asked_s) - took_ms / 2 if info.unix_time_s else None
    return [*_of_coordinator(address, info, took_ms, offset_ms), *map(check_worker, info.workers)], info


def _of_coordinator(address: str, info: ServerInfo, took_ms: float, offset_ms: float | None) -> Iterator[Check]:
    name, theirs, ours = f"coordinator {address}", info.versions.get("outrider", "unknown"), version("outrider")
    detail = f"{theirs}, answers in {took_ms:.1f} ms{_clock(offset_ms)}, up {info.uptime_s:.0f} s, "
    detail += f"{info.num_requests_running} running, {info.num_requests_waiting} waiting"
    if info.draining:
        yield Check("warn", name, f"{detail}; it drains", "none if it is being stopped; else start another")
    elif _is_off(offset_ms):
        yield Check("warn", name, detail, "set both clocks (NTP): tokens and certificates end by them")
    elif theirs != ours:
        yield Check("warn", name, f"{detail}; here is {ours}", "install the same release on both")
    else:
        yield Check("ok", name, detail)
    if not any(worker.role == "target" and worker.healthy for worker in info.workers):
        yield Check("fail", "targets", "no healthy target worker: nothing can be served", "mend or start one")


def check_worker(worker: Worker) -> Check:
    """As its coordinator sees it."""
    name = f"{worker.role} worker {worker.address}"
    if not worker.healthy:
        fix = "look at its log, and whether the coordinator reaches that address; a draft worker costs speed only"
        return Check("fail" if worker.role == "target" else "warn", name, worker.detail or "not healthy", fix)
    capacity = worker.capacity
    used = f", cache {1 - capacity.num_free_blocks / capacity.num_blocks:.0%} used" if capacity.num_blocks else ""
    detail = f"{worker.model}, {worker.network_ms:.1f} ms away{_clock(worker.clock_offset_ms)}, "
    detail += f"{worker.num_sessions} streams{used}"
    if _is_off(worker.clock_offset_ms):
        return Check("warn", name, detail, "set its clock (NTP): its log cannot be put beside others'")
    if worker.detail:
        return Check("warn", name, f"{detail}; {worker.detail}", "none if it passes; else look at its log")
    return Check("ok", name, detail)


def check_security(role: str, settings: ListenerSettings) -> Check:
    """That the files of TLS and tokens can be read, and that nobody is let in by mistake."""
    name, held = f"access to the {role}", []
    if not isinstance(settings, ServerSettings):  # the gateway
        return Check("ok", name, "as its coordinator's tokens say")
    try:
        server_credentials(settings, lambda: None)
        fleet_dialer(settings)
        held += ["TLS"] if settings.tls_cert else []
        held += ["callers' certificates"] if settings.tls_client_ca else []
        if settings.fleet_token_file:
            FleetTokens(settings.fleet_token_file)
            held.append("fleet token")
        if isinstance(settings, CoordinatorSettings) and settings.tokens_file:
            TenantTokens(settings.tokens_file)
            held.append("callers' tokens")
    except OutriderError as error:
        return Check("fail", name, describe_failure(error, type(settings))[0], "mend the file, or its setting")
    detail = f"{settings.host}: {', '.join(held) or 'neither TLS nor tokens'}"
    tokens = "tokens_file" if isinstance(settings, CoordinatorSettings) else "fleet_token_file"
    knows_callers = bool(settings.tls_client_ca or getattr(settings, tokens))
    if knows_callers or is_loopback(settings.host):
        if knows_callers and not settings.tls_cert and not is_loopback(settings.host):
            return Check("warn", name, f"{detail}; tokens go in plaintext", "give --tls-cert and --tls-key too")
        return Check("ok", name, detail)
    if settings.insecure:
        return Check(
            "warn", name, f"{detail}, insecure is set", "none if the network keeps others out; else SECURITY.md"
        )
    fix = f"give --{tokens.replace('_', '-')} or --tls-client-ca (SECURITY.md), or --insecure"
    return Check("fail", name, f"{detail}: it would refuse to start", fix)


def _clock(offset_ms: float | None) -> str:
    return "" if offset_ms is None else f", clock {offset_ms:+.0f} ms"


def _is_off(offset_ms: float | None) -> bool:
    return offset_ms is not None and abs(offset_ms) > MAX_CLOCK_OFFSET_MS
