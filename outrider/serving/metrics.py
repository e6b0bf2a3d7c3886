"""Numbers for Prometheus at http://metrics_host:metrics_port/metrics: a registry per server, vLLM's names, our prefix.

Everything is counted and read on the server's event loop, so that one scrape sees whole rounds and nothing needs a
lock.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import platform
from collections.abc import AsyncIterator, Callable, Iterable
from importlib.metadata import version

from prometheus_client import CollectorRegistry, Gauge, Info, ProcessCollector, disable_created_metrics
from prometheus_client.exposition import choose_encoder
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from outrider.errors import InvalidArgument, Unavailable
from outrider.serving.channel import is_loopback
from outrider.settings import ListenerSettings

log = logging.getLogger(__name__)

PREFIX = "outrider_"
PATH = "/metrics"
MAX_REQUEST_BYTES = 16_384
REQUEST_TIMEOUT_S = 5.0
LOOPBACK = "127.0.0.1"

# A start time beside every counter: nobody reads it, and it doubles what a scrape carries.
disable_created_metrics()


def new_registry(role: str) -> CollectorRegistry:
    """A registry that tells who this is (`outrider_build_info`) and what the process takes (`process_*`)."""
    registry = CollectorRegistry(auto_describe=True)
    ProcessCollector(registry=registry)
    build = Info(f"{PREFIX}build", "Versions; always 1.", registry=registry)
    build.info({"role": role, "version": version("outrider"), "python": platform.python_version()})
    tasks = Gauge(
        f"{PREFIX}event_loop_tasks", "Tasks that are not done: of calls, sessions, watches.", registry=registry
    )
    tasks.set_function(_num_tasks)
    return registry


def _num_tasks() -> int:
    """Of the loop that is scraped; 0 where there is none."""
    try:
        return len(asyncio.all_tasks())
    except RuntimeError:
        return 0


class Reading(Collector):
    """Families that are made when they are asked for, from state that is kept anyway."""

    def __init__(self, read: Callable[[], Iterable[Metric]]) -> None:
        self._read = read

    def collect(self) -> Iterable[Metric]:
        return self._read()


def metrics_host(settings: ListenerSettings) -> str:
    """Where /metrics listens: beyond loopback only where that is asked for, since TLS and tokens do not guard it."""
    return settings.metrics_host or (settings.host if is_loopback(settings.host) else LOOPBACK)


@contextlib.asynccontextmanager
async def metrics_endpoint(settings: ListenerSettings, registry: CollectorRegistry) -> AsyncIterator[int | None]:
    """Serves `registry` until the block ends. Yields the port; None where `metrics_port` is unset.

    Raises Unavailable naming the address when it is taken, InvalidArgument for an address without a port.
    """
    if settings.metrics_port is None:
        if settings.metrics_host:
            raise InvalidArgument(
                f"metrics_host is {settings.metrics_host!r}, but nothing listens there: give --metrics-port too",
                field="metrics_host",
            )
        yield None
        return
    host = metrics_host(settings)
    address = f"{host}:{settings.metrics_port}"
    try:
        listening = await asyncio.start_server(
            lambda reader, writer: _answer(registry, reader, writer),
            host.strip("[]"),
            settings.metrics_port,
            limit=MAX_REQUEST_BYTES,
        )
    except OSError as error:
        reason = error.strerror or str(error)
        raise Unavailable(f"cannot serve metrics on {address}: {reason}; choose another --metrics-port") from None
    port = listening.sockets[0].getsockname()[1]
    is_closed = not settings.metrics_host and host != settings.host
    log.info(
        "metrics at http://%s:%d%s%s", host, port, PATH,
        ", for this machine alone: --metrics-host opens them to others" if is_closed else "",
    )  # fmt: skip
    try:
        yield port
    finally:
        listening.close()


async def _answer(registry: CollectorRegistry, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """One request a connection: scrapes are seconds apart."""
    try:
        with contextlib.suppress(TimeoutError, ConnectionError, asyncio.IncompleteReadError, asyncio.LimitOverrunError):
            async with asyncio.timeout(REQUEST_TIMEOUT_S):
                request = await reader.readuntil(b"\r\n\r\n")
                writer.write(_response(registry, request.decode("latin-1")))
                await writer.drain()
    finally:
        writer.close()


def _response(registry: CollectorRegistry, request: str) -> bytes:
    first, *headers = request.split("\r\n")
    method, _, target = first.partition(" ")
    path = target.partition(" ")[0].partition("?")[0]
    if method not in ("GET", "HEAD") or path != PATH:
        status = "404 Not Found" if method in ("GET", "HEAD") else "405 Method Not Allowed"
        return _http(status, "text/plain; charset=utf-8", f"GET {PATH}\n".encode(), method)
    accept = next((line.partition(":")[2] for line in headers if line.lower().startswith("accept:")), "")
    try:
        encode, content_type = choose_encoder(accept)
        body = encode(registry)
    except Exception:
        log.exception("a scrape failed")
        return _http(
            "500 Internal Server Error", "text/plain; charset=utf-8", b"the server's log has the cause\n", method
        )
    return _http("200 OK", content_type, body, method)


def _http(status: str, content_type: str, body: bytes, method: str) -> bytes:
    head = (
        f"HTTP/1.1 {status}\r\nContent-Type: {content_type}\r\nContent-Length: {len(body)}\r\nConnection: close\r\n\r\n"
    )
    return head.encode() + (b"" if method == "HEAD" else body)
