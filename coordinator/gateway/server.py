"""The gateway's process: listens, serves, drains."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import math
import socket
from collections.abc import Callable, Iterator

try:
    import uvicorn
except ModuleNotFoundError as missing:
    from outrider.errors import FailedPrecondition

    raise FailedPrecondition("the gateway needs starlette and uvicorn: pip install 'outrider[gateway]'") from missing

from coordinator.gateway.app import build_app
from coordinator.gateway.connection import PatientConnection
from coordinator.gateway.service import Gateway
from coordinator.gateway.watch import watch
from outrider.client import Client
from outrider.errors import InvalidArgument, Unavailable
from outrider.serving.access import BY_TOKEN_ALONE, refuse_to_be_open
from outrider.serving.channel import is_loopback
from outrider.serving.metrics import metrics_endpoint
from outrider.serving.server import configure_logging, stop_on_signals
from outrider.serving.tls import TLS, https_context
from outrider.settings import GatewaySettings

log = logging.getLogger(__name__)

BACKLOG = 2048
LAST_WORDS_S = 2.0
"""After the grace, for the ends of what was cut off to be sent."""


async def serve(
    settings: GatewaySettings,
    *,
    stop: asyncio.Event | None = None,
    on_ready: Callable[[int], None] | None = None,
) -> None:
    """Serves until `stop` is set or SIGTERM or SIGINT comes, then drains and returns: `/health` says so for
    `drain_delay_s`, then nothing more is accepted, and what runs has `drain_grace_s` to end.

    Coordinators need not be there yet: `/health` tells. Raises Unavailable naming the address when it is taken,
    InvalidArgument for files of TLS that are no good, or where anyone could read what passes. Where anyone can call,
    coordinators are told so, and go by tokens alone.
    """
    configure_logging(settings.log_level, settings.log_format)
    stop = stop or asyncio.Event()
    if not settings.coordinators:
        raise InvalidArgument("coordinators is empty: give host:port of at least one", field="coordinators")
    refuse_to_be_open(settings, is_guarded=bool(settings.tls_cert), remedy="Set tls_cert and tls_key")
    context = https_context(settings)
    tls = TLS(settings.tls_ca, settings.tls_cert, settings.tls_key) if settings.tls_ca else None
    told = {} if settings.insecure or is_loopback(settings.host) else dict([BY_TOKEN_ALONE])
    with stop_on_signals(stop), _listening(settings) as listener:
        async with Client(settings.coordinators, tls=tls, metadata=told) as client:
            gateway = Gateway.over(client, settings)
            connection = functools.partial(
                PatientConnection,
                max_pause_s=settings.max_client_pause_s,
                metrics=gateway.metrics,
                is_tls=context is not None,
            )
            config = uvicorn.Config(
                build_app(gateway),
                http=connection,  # type: ignore[arg-type]
                log_config=None,
                access_log=False,
                server_header=False,
                lifespan="off",
                proxy_headers=False,
                timeout_graceful_shutdown=math.ceil(settings.drain_grace_s + LAST_WORDS_S),
            )
            config.load()
            config.ssl = context
            server = _Server(config)
            async with metrics_endpoint(settings, gateway.registry):
                serving = asyncio.create_task(server.serve(sockets=[listener]))
                watching = asyncio.create_task(watch(client))
                try:
                    await _until(serving, lambda: server.started)
                    if on_ready is not None:
                        on_ready(listener.getsockname()[1])
                    stopped = asyncio.create_task(stop.wait())
                    await asyncio.wait({serving, stopped}, return_when=asyncio.FIRST_COMPLETED)
                    stopped.cancel()
                    await _drain(gateway, settings)
                finally:
                    watching.cancel()
                    server.should_exit = True
                    await serving


async def _drain(gateway: Gateway, settings: GatewaySettings) -> None:
    """Until uvicorn, told to end, waits for what is left."""
    gateway.running.ends_soon = True
    await asyncio.sleep(settings.drain_delay_s)
    gateway.bodies.end_within(settings.drain_grace_s)
    gateway.running.end_within(settings.drain_grace_s)


async def _until(serving: asyncio.Task[None], is_so: Callable[[], bool]) -> None:
    while not is_so():
        if serving.done():
            serving.result()
            raise Unavailable("the HTTP server ended before it served")
        await asyncio.sleep(0.005)


@contextlib.contextmanager
def _listening(settings: GatewaySettings) -> Iterator[socket.socket]:
    """Raises Unavailable naming the address when it is taken."""
    host = settings.host.strip("[]")
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, settings.port, type=socket.SOCK_STREAM)[0]
        listener = socket.socket(family, kind, protocol)
    except OSError as error:
        raise Unavailable(f"cannot listen on {settings.host}:{settings.port}: {error.strerror or error}") from None
    with listener:
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(address)
            listener.listen(BACKLOG)
        except OSError as error:
            reason = error.strerror or str(error)
            raise Unavailable(
                f"cannot listen on {settings.host}:{settings.port}: {reason}; choose another --port"
            ) from None
        yield listener


class _Server(uvicorn.Server):
    """Signals are ours."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield
