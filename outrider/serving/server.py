"""One grpc.aio server for all three services: health, reflection, refusal with details, drain.

A servicer is any object with one method per RPC of its service. Unary answers come from a coroutine, streamed ones from
an async generator, which is closed deterministically whatever ends the call. Methods raise `OutriderError`; whatever
else they raise reaches the client as INTERNAL without a trace.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import threading
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Mapping, Sequence
from typing import Any

import grpc
from google.protobuf import message as protobuf_message
from google.protobuf import message_factory
from google.protobuf.descriptor import MethodDescriptor, ServiceDescriptor
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from outrider.errors import DRAINING, STARTING, Internal, InvalidArgument, OutriderError, Unavailable
from outrider.serving.access import HANDSHAKE_TIMEOUT_MS, Access
from outrider.serving.channel import MAX_MESSAGE_BYTES, ping_options
from outrider.serving.json_logs import JsonFormatter
from outrider.serving.request_context import CURRENT, received
from outrider.serving.status import from_rpc_error, to_status
from outrider.serving.tls import server_credentials
from outrider.settings import ServerSettings

log = logging.getLogger(__name__)

TEXT_FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"
LOGGED_PACKAGES = ("outrider", "coordinator", "draft_worker", "target_worker")

SERVER_OPTIONS: tuple[tuple[str, int], ...] = (
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    # Clients ping every 20 s during a long prefill; the default answers that with GOAWAY. A machine that stood still
    # reads several pings at once.
    ("grpc.http2.min_recv_ping_interval_without_data_ms", 1_000),
    ("grpc.keepalive_permit_without_calls", 1),
    # Pings go on however silent a stream is; see `server_options`.
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.server_handshake_timeout_ms", HANDSHAKE_TIMEOUT_MS),
    # Two processes on one port would share its streams at random.
    ("grpc.so_reuseport", 0),
)
RETRY_DELAY_S = 1.0
MAX_PENDING_S = 600
HANDOVER_SHARE = 0.2
MAX_HANDOVER_S = 5.0
"""The last part of the grace: so much of it, or less where it is long."""
_SERVING = health_pb2.HealthCheckResponse.SERVING
_NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


def server_options(settings: ServerSettings) -> list[tuple[str, int]]:
    """With the pings that find a peer which froze, or was cut off without a word: its streams end as if it had closed
    them, whatever they wait for. Calls that nobody has looked at yet are bounded as those at work are: from 1,000 on,
    or after 30 s, gRPC would cancel them without a word."""
    pending = {
        "grpc.server.max_pending_requests": settings.max_concurrent_calls,
        "grpc.server.max_pending_requests_hard_limit": settings.max_concurrent_calls,
        "grpc.server_max_unrequested_time_in_server": MAX_PENDING_S,
    }
    pings = ping_options(settings.ping_interval_ms, settings.ping_timeout_ms)
    return [*SERVER_OPTIONS, *pings.items(), *pending.items()]


def parse_or_refuse(message_type: Any, data: bytes) -> Any:
    """Raises InvalidArgument on bytes that are not such a message. (The stock deserializer would answer INTERNAL.)"""
    try:
        return message_type.FromString(data)
    except protobuf_message.DecodeError:
        name = message_type.DESCRIPTOR.full_name
        raise InvalidArgument(f"the request is not a valid {name}", reason="UNDECODABLE_REQUEST") from None


class Server:
    """A listening server. It refuses calls until `open` brings the servicers, and again once it drains."""

    def __init__(
        self, settings: ServerSettings, services: Sequence[ServiceDescriptor], access: Access | None = None
    ) -> None:
        self.settings = settings
        self.access = access or Access()
        self.port = 0
        self.health_port: int | None = None
        self.draining = False
        self._names = [service.full_name for service in services]
        self._servicers: Mapping[str, Any] = {}
        self._num_streams = 0
        self._no_streams = asyncio.Event()
        self._no_streams.set()
        self._health = health.aio.HealthServicer()
        self._server = grpc.aio.server(
            options=server_options(settings), maximum_concurrent_rpcs=settings.max_concurrent_calls
        )
        for service in services:
            handlers = {method.name: self._handler(method) for method in service.methods}
            self._server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service.full_name, handlers),))
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)
        if settings.reflection:
            names = [*self._names, health.SERVICE_NAME, reflection.SERVICE_NAME]
            reflection.enable_server_reflection(names, self._server)
        self._health_server: grpc.aio.Server | None = None
        if settings.health_port is not None:
            self._health_server = grpc.aio.server(options=SERVER_OPTIONS)
            health_pb2_grpc.add_HealthServicer_to_server(self._health, self._health_server)

    async def listen(self) -> None:
        """Binds and starts, NOT_SERVING. Raises Unavailable naming the address when it is taken, InvalidArgument for
        TLS files that are no good."""
        await self._set_health(_NOT_SERVING)
        settings = self.settings
        credentials = server_credentials(settings, self.access.on_handshake)
        self.port = _bind(self._server, f"{settings.host}:{settings.port}", "--port", credentials)
        if self._health_server is not None:
            self.health_port = _bind(
                self._health_server, f"{settings.host}:{settings.health_port}", "--health-port", None
            )
            await self._health_server.start()
        await self._server.start()

    async def open(self, servicers: Mapping[str, Any]) -> None:
        """Takes calls from now on: `servicers` by full service name. SERVING."""
        missing = [name for name in self._names if name not in servicers]
        assert not missing, f"no servicer for {missing}"
        self._servicers = servicers
        await self._set_health(_SERVING)

    async def set_serving(self, name: str, serving: bool) -> None:
        """Readiness of one service (a coordinator without a target worker is not ready)."""
        await self._health.set(name, _SERVING if serving else _NOT_SERVING)

    async def set_serving_all(self, name: str, serving: bool) -> None:
        """The same, and of the server as a whole."""
        for each in ("", name):
            await self.set_serving(each, serving)

    async def drain(self, hand_over: Callable[[float], None] = lambda within_s: None) -> None:
        """NOT_SERVING, wait for balancers, refuse new streams, let running ones end within the grace, stop.

        `hand_over` is called where some still run when the last part of the grace begins, with its length: it ends each
        behind its last whole step, with a status from which its caller goes on elsewhere. Not without any grace:
        everything is cut off then.
        """
        await self._health.enter_graceful_shutdown()
        await asyncio.sleep(self.settings.drain_delay_s)
        self.draining = True
        within_s = min(MAX_HANDOVER_S, HANDOVER_SHARE * self.settings.drain_grace_s)
        if not await self._streams_end(self.settings.drain_grace_s - within_s) and within_s:
            hand_over(within_s)
            await self._streams_end(within_s)
        await self._stop(0.2)

    async def _streams_end(self, within_s: float) -> bool:
        """Whether all have, in this time."""
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._no_streams.wait(), within_s)
        return self._no_streams.is_set()

    async def close(self) -> None:
        """Stops at once: what still runs is cancelled."""
        await self._stop(None)

    async def _stop(self, grace_s: float | None) -> None:
        await self._server.stop(grace_s)
        if self._health_server is not None:
            await self._health_server.stop(None)

    def refuse_if_draining(self) -> None:
        """Raises Unavailable with a retry delay once the drain has begun: for work inside a stream that begins anew."""
        if self.draining:
            raise Unavailable("the server is draining", reason=DRAINING, retry_delay_s=RETRY_DELAY_S)

    async def _set_health(self, status: Any) -> None:
        for name in ("", *self._names):
            await self._health.set(name, status)

    def _servicer(self, name: str) -> Any:
        if name not in self._servicers:
            raise Unavailable("the server is still starting", reason=STARTING, retry_delay_s=RETRY_DELAY_S)
        return self._servicers[name]

    def _handler(self, method: MethodDescriptor) -> grpc.RpcMethodHandler:
        request_type = message_factory.GetMessageClass(method.input_type)
        response_type = message_factory.GetMessageClass(method.output_type)
        service_name = method.containing_service.full_name

        def implementation() -> Callable[..., Any]:
            return getattr(self._servicer(service_name), method.name)

        async def answer_once(data: bytes, context: Any) -> Any:
            async with _errors_to_status(method.full_name, context):
                self.access.admit(service_name, method.name, context)
                return await implementation()(parse_or_refuse(request_type, data), context)

        async def answer_stream(data: Any, context: Any) -> None:
            CURRENT.set(received(context.invocation_metadata()))
            self._num_streams += 1
            self._no_streams.clear()
            try:
                async with _errors_to_status(method.full_name, context):
                    self.access.admit(service_name, method.name, context)
                    self.refuse_if_draining()
                    parse = _parse_each if method.client_streaming else parse_or_refuse
                    request = parse(request_type, data)
                    async with contextlib.aclosing(implementation()(request, context)) as responses:
                        async for response in responses:
                            try:
                                await context.write(response)
                            except grpc.aio.InternalError:
                                return  # it could not go out: the caller is gone, and gRPC has not said so yet
            finally:
                self._num_streams -= 1
                if not self._num_streams:
                    self._no_streams.set()

        # No request deserializer: raw bytes arrive, so that a failure to parse is ours to answer.
        serialize = response_type.SerializeToString
        if method.client_streaming and method.server_streaming:
            return grpc.stream_stream_rpc_method_handler(answer_stream, None, serialize)
        if method.server_streaming:
            return grpc.unary_stream_rpc_method_handler(answer_stream, None, serialize)
        assert not method.client_streaming, f"{method.full_name}: no service of ours has this kind"
        return grpc.unary_unary_rpc_method_handler(answer_once, None, serialize)


async def _parse_each(message_type: Any, chunks: AsyncIterator[bytes]) -> AsyncIterator[Any]:
    async for data in chunks:
        yield parse_or_refuse(message_type, data)


@contextlib.asynccontextmanager
async def _errors_to_status(method: str, context: Any) -> AsyncIterator[None]:
    try:
        yield
    except OutriderError as error:
        await context.abort_with_status(to_status(error))
    except grpc.aio.AioRpcError as error:
        await context.abort_with_status(to_status(from_rpc_error(error)))
    except (grpc.aio.AbortError, grpc.aio.UsageError):
        raise
    except Exception:
        log.exception("%s failed", method)
        await context.abort_with_status(to_status(Internal("internal error; the server's log has its cause")))


def _bind(server: grpc.aio.Server, address: str, flag: str, credentials: grpc.ServerCredentials | None) -> int:
    """The port."""
    try:
        if credentials is None:
            return server.add_insecure_port(address)
        return server.add_secure_port(address, credentials)
    except RuntimeError:
        raise Unavailable(f"cannot listen on {address}: is another process there? Choose another {flag}") from None


@contextlib.asynccontextmanager
async def running_server(
    settings: ServerSettings, services: Sequence[ServiceDescriptor], access: Access | None = None
) -> AsyncIterator[Server]:
    """A listening server that is stopped when the block ends. Drain first where streams should end in peace."""
    server = Server(settings, services, access)
    try:
        await server.listen()
        yield server
    finally:
        await server.close()


@contextlib.contextmanager
def stop_on_signals(stop: asyncio.Event) -> Iterator[None]:
    """SIGTERM and SIGINT set `stop`; a second one is left to the default action, so that a stuck drain can be ended.

    Off the main thread (a server inside an actor) signals are the host's business, and only `stop` counts.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    loop = asyncio.get_running_loop()

    def restore() -> None:
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.remove_signal_handler(number)

    def on_signal() -> None:
        stop.set()
        restore()

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, on_signal)
    try:
        yield
    finally:
        restore()


def configure_logging(level: str, log_format: str = "text") -> None:
    """Logs to stderr from `level` on, unless the process has its own logging. Of libraries, warnings. log_format: text
    or json."""
    handler = logging.StreamHandler()
    handler.setFormatter(JsonFormatter() if log_format == "json" else logging.Formatter(TEXT_FORMAT))
    logging.basicConfig(handlers=[handler])
    logging.captureWarnings(log_format == "json")
    for package in LOGGED_PACKAGES:
        logging.getLogger(package).setLevel(level.upper())


def run(main: Coroutine[Any, Any, None]) -> None:
    """Runs a server's coroutine to its end, on uvloop where it is installed."""
    try:
        from uvloop import run as run_loop
    except ImportError:
        from asyncio import run as run_loop  # type: ignore[assignment]
    run_loop(main)
