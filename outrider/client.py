"""The async client.

    async with outrider.Client("localhost:50050") as client:
        async for event in client.chat([{"role": "user", "content": "Hello"}], temperature=0):
            if isinstance(event, outrider.Chunk):
                print(event.text, end="")

Results are the dataclasses of `outrider.results`; failures are `outrider.errors`. A stream whose coordinator is lost
goes on at another one, or at the same one once it is back: what was delivered stays, and nobody can tell the rest from
an undisturbed one (see `outrider.resume`). With `resume=None` the first failure is the caller's, who resumes with
`resume_token_ids`, and `seed`, `acceptance`, `prompt_hash`, `model_fingerprint` and `max_tokens` of the `Started`.

gRPC does not live through a fork: once a process has made a call, its forked children get a RuntimeError from every
client's. Start processes by spawn, `multiprocessing.get_context("spawn")`, or make the first call after the fork.
"""

from __future__ import annotations

import copy
import math
from collections.abc import AsyncGenerator, Awaitable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from functools import partial
from typing import Any, Unpack

import grpc.aio

from outrider import results, server_info
from outrider.audit.record import StreamRecord
from outrider.errors import DeadlineExceeded, InvalidArgument, NotFound, OutriderError, Unavailable, Unimplemented
from outrider.results import Completion, Event, Gathering
from outrider.resume import Mend, Resume, about_coordinator, mend
from outrider.sampling.params import AcceptanceRule
from outrider.server_info import Activity, ModelInfo, ServerInfo
from outrider.serving.call_metadata import checked_metadata
from outrider.serving.channel import CLIENT_OPTIONS, ping_options
from outrider.serving.client_span import client_span
from outrider.serving.endpoints import Connection, Endpoints
from outrider.serving.read_results import name_of, no_message, read_speculation, read_step, read_stream_status
from outrider.serving.records import record_from_pb
from outrider.serving.resuming import ResumingCall
from outrider.serving.same_names import read
from outrider.serving.status import from_rpc_error, is_from_transport
from outrider.serving.tls import TLS, Dialer, open_named
from outrider.serving.tokens import NO_TOKEN, TokenSource, bearer_metadata
from outrider.serving.unreachable import why_unreachable
from outrider.serving.write_request import (
    GenerateOptions,
    Message,
    Prompt,
    assign,
    build_request,
    chat_prompt,
    shown,
    to_json,
)
from outrider.v1 import generation_pb2, generation_pb2_grpc, record_pb2, worker_pb2

__all__ = ["TLS", "Client", "GenerateOptions", "KeepAlive", "Message", "Prompt", "Resume", "build_request"]
ON_BY_DEFAULT = Resume()
GENERATE = "outrider.v1.GenerationService/Generate"
MAX_TIMEOUT_S = 1e9
"""gRPC counts nanoseconds since 1970 in 64 bits, and takes what is beyond for long ago."""


@dataclass(frozen=True, slots=True)
class KeepAlive:
    """Pings that find a dead connection while a stream is silent."""

    interval_ms: int = 20_000
    """Time between pings; servers refuse less than 10 s."""
    timeout_ms: int = 10_000
    """A ping not answered for this long ends the connection."""


class Client:
    """Connections to coordinators of one service; use it as an async context manager, or `close()` it."""

    def __init__(
        self,
        address: str | Sequence[str],
        *,
        timeout_s: float | None = None,
        keep_alive: KeepAlive | None = None,
        metadata: Mapping[str, str] | None = None,
        resume: Resume | None = ON_BY_DEFAULT,
        tls: TLS | None = None,
        token: str | TokenSource | None = None,
    ) -> None:
        """`address` is host:port; several, in a sequence or with commas between, are coordinators over the same
        workers, and dns:///HOST:PORT stands for all behind a name. `timeout_s` is the deadline of calls that give none
        (None or infinity: no deadline; otherwise above 0, 1e9 at most), tries and waits included; `metadata` goes with
        every call: keys in lower case, values of printable ASCII. `resume`: what is done about losses; None: nothing.
        `tls`: None for plaintext. `token`: what the coordinators know the caller by, or what gives it before each
        call. Neither is read from the environment: no token goes where nobody said so. Raises InvalidArgument for an
        address that is none, a timeout or metadata that cannot be, or files of TLS that are no good."""
        given = address.split(",") if isinstance(address, str) else address
        addresses = [one.strip() for one in given]
        if not addresses:
            raise InvalidArgument("address is empty: give host:port of a coordinator", field="address")
        self.address = ",".join(addresses)
        self._timeout_s = _checked_timeout(timeout_s)
        self._metadata = checked_metadata(metadata or {})
        self._resume = resume
        keep_alive = keep_alive or KeepAlive()
        pings = ping_options(keep_alive.interval_ms, keep_alive.timeout_ms)
        options = list((dict(CLIENT_OPTIONS) | pings).items())
        self._token = token
        self._is_by_tls = tls is not None
        dialer = Dialer(tls, options)
        open_channel = partial(dialer.open, server_name="") if tls is None else open_named(dialer, addresses)
        self._endpoints = Endpoints(addresses, open_channel, version=lambda: dialer.version)

    def with_metadata(self, metadata: Mapping[str, str]) -> Client:
        """The same client over the same connections, whose calls carry `metadata` too. Close the first one. Raises
        InvalidArgument for metadata that cannot be."""
        other = copy.copy(self)
        other._metadata = checked_metadata({**dict(self._metadata), **metadata})
        return other

    def _call_metadata(self) -> tuple[tuple[str, str], ...]:
        token = self._token() if callable(self._token) else self._token
        return self._metadata if token is None else (*self._metadata, *bearer_metadata(token))

    async def __aenter__(self) -> Client:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Ends the connections and every stream on them."""
        await self._endpoints.close()

    def generate(self, prompt: Prompt, **options: Unpack[GenerateOptions]) -> AsyncGenerator[Event, None]:
        """Streams `Started`, `PromptLogprobs` if asked for, then `Chunk`s, then one `Complete` per choice.

        prompt: plain text, token ids, or chat messages ({"role", "content"}). Leaving the loop early (`aclose`)
        cancels the request. Raises outrider.errors; an unknown option is a TypeError.
        """
        timeout_s = _checked_timeout(options.get("timeout_s", self._timeout_s))
        return self._stream(build_request(prompt, options), timeout_s)

    async def _stream(
        self, request: generation_pb2.GenerateRequest, timeout_s: float | None
    ) -> AsyncGenerator[Event, None]:
        with client_span(GENERATE, self._metadata) as trace_metadata:
            call = ResumingCall(
                self._endpoints,
                request,
                self._resume,
                timeout_s=timeout_s,
                metadata=lambda: (*self._call_metadata(), *trace_metadata),
                to_error=partial(self._error, timeout_s=timeout_s),
            )
            async with aclosing(call.events()) as events:
                async for event in events:
                    yield event

    def chat(self, messages: Sequence[Message], **options: Unpack[GenerateOptions]) -> AsyncGenerator[Event, None]:
        """`generate` for a conversation."""
        return self.generate(list(messages), **options)

    async def complete(self, prompt: Prompt, **options: Unpack[GenerateOptions]) -> Completion:
        """The whole answer of one choice, once it is there."""
        if options.get("n") not in (None, 1):
            raise InvalidArgument("complete() gives one choice: leave out n, or use generate()", field="output.n")
        answer = Gathering()
        async for event in self.generate(prompt, **options):
            answer.take(event)
            if answer.completion is not None:
                return answer.completion
        raise OutriderError(f"{self.address} ended the stream without `started` and `complete`")

    async def model_info(self, model: str = "") -> ModelInfo:
        """Limits, defaults and pairing of a served model; empty: the only one."""
        request = _filled(generation_pb2.GetModelInfoRequest(), model=model)
        reply = await self._call("GetModelInfo", request)
        return read(
            ModelInfo,
            reply,
            generation_defaults=read(server_info.GenerationDefaults, reply.generation_defaults),
            acceptance_rules=tuple(rule for rule in AcceptanceRule if rule in reply.acceptance_rules),
        )

    async def server_info(self) -> ServerInfo:
        """The coordinator, its workers and their health."""
        reply = await self._call("GetServerInfo", generation_pb2.GetServerInfoRequest())
        workers = (
            read(
                server_info.Worker,
                worker,
                role=name_of(worker_pb2.WorkerRole, worker.role, "WORKER_ROLE_"),
                capacity=read(server_info.Capacity, worker.capacity),
                numerics=read(server_info.Numerics, worker.numerics, environment=dict(worker.numerics.environment)),
                cache_counters=read(server_info.CacheCounters, worker.cache_counters),
                draft_rounds=read(server_info.DraftRounds, worker.draft_rounds),
                versions=dict(worker.versions),
            )
            for worker in reply.workers
        )
        return read(
            ServerInfo,
            reply,
            workers=tuple(workers),
            versions=dict(reply.versions),
            model_aliases=dict(reply.model_aliases),
        )

    async def trace(self, request_id: str) -> tuple[results.StreamTrace, ...]:
        """The rounds of a request that has ended or runs, a trace for each choice. Raises NotFound once the coordinator
        keeps them no longer. Of a text that was resumed each coordinator has its own part: told is the first found."""
        request = _filled(generation_pb2.GetTraceRequest(), request_id=request_id)
        reply = await self._call("GetTrace", request, or_elsewhere=NotFound)
        return tuple(
            results.StreamTrace(stream.index, tuple(map(read_step, stream.steps)), stream.num_left_out)
            for stream in reply.streams
        )

    async def activity(self, *, max_streams: int = 0) -> Activity:
        """What the coordinator does: streams of the caller's tenant that wait or run, `max_streams` at most (0: as many
        as it tells unasked), and the counts of all since its start. Raises Unimplemented where it is older than this
        call."""
        request = generation_pb2.ListStreamsRequest()
        assign(request, "max_streams", max_streams, path="max_streams")
        reply = await self._call("ListStreams", request)
        return read(
            Activity,
            reply,
            streams=tuple(map(read_stream_status, reply.streams)),
            models={totals.model: read_speculation(totals.speculation) for totals in reply.models},
        )

    async def records(self, request_id: str) -> tuple[StreamRecord, ...]:
        """What is recorded of a request that has ended or runs: each choice, and each part of a text that was resumed.
        Raises NotFound where the coordinators keep nothing of it; told is the first that does."""
        found: list[StreamRecord] = []
        num_streams = 1
        while len(found) < num_streams:
            request = _filled(record_pb2.GetRecordRequest(stream_index=len(found)), request_id=request_id)
            reply = await self._call("GetRecord", request, or_elsewhere=NotFound)
            found.append(record_from_pb(reply.stream))
            num_streams = reply.num_streams
        return tuple(found)

    async def tokenize(
        self,
        prompt: str | Sequence[Message],
        *,
        model: str = "",
        add_generation_prompt: bool | None = None,
        continue_final_message: bool = False,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> list[int]:
        """Ids of a text or of a conversation, as `generate` would use them; the options are a conversation's."""
        request = _filled(generation_pb2.TokenizeRequest(), model=model)
        if isinstance(prompt, str):
            assign(request, "text", prompt, path="text")
        else:
            request.chat.CopyFrom(chat_prompt(prompt))
            request.chat.continue_final_message = continue_final_message
            if add_generation_prompt is not None:
                request.chat.add_generation_prompt = add_generation_prompt
            if chat_template_kwargs is not None:
                request.chat.chat_template_kwargs = to_json(chat_template_kwargs)
        return list((await self._call("Tokenize", request)).token_ids)

    async def detokenize(self, token_ids: Sequence[int], *, model: str = "", skip_special_tokens: bool = True) -> str:
        """Text of ids; an unfinished code point becomes U+FFFD."""
        request = _filled(generation_pb2.DetokenizeRequest(), model=model, skip_special_tokens=skip_special_tokens)
        assign(request, "token_ids", token_ids, path="token_ids")
        return (await self._call("Detokenize", request)).text

    async def token_bytes(self, token_ids: Sequence[int], *, model: str = "") -> list[bytes]:
        """What each token writes, special ones too; one may be part of a code point. Raises Unimplemented where the
        coordinator is older than this call."""
        request = _filled(generation_pb2.DetokenizeRequest(each_token=True), model=model)
        assign(request, "token_ids", token_ids, path="token_ids")
        told = list((await self._call("Detokenize", request)).token_bytes)
        if len(told) != len(token_ids):
            raise Unimplemented(f"{self.address} cannot tell the bytes of each token: it runs an older release")
        return told

    async def _call(self, method: str, request: Any, *, or_elsewhere: type[OutriderError] | None = None) -> Any:
        """One answer, from the first coordinator that can be reached; or that does not say `or_elsewhere`."""
        tried: set[str] = set()
        while True:
            async with self._endpoints.connection(tried) as connection:
                stub = generation_pb2_grpc.GenerationServiceStub(connection.channel)
                try:
                    reply: Awaitable[Any] = getattr(stub, method)(
                        request, timeout=self._timeout_s, metadata=self._call_metadata()
                    )
                    if (answer := await reply) is None:
                        raise no_message()
                    self._endpoints.answered(connection)
                    return answer
                except grpc.aio.AioRpcError as failure:
                    error = self._error(failure, self._timeout_s)
                    mends = or_elsewhere is not None and isinstance(error, or_elsewhere)
                    mends |= self._mends(failure, error, connection)
                    tried.add(connection.address)
                    if self._resume is None or not mends or len(tried) >= len(self._endpoints):
                        raise error from None

    def _mends(self, failure: grpc.aio.AioRpcError, error: OutriderError, connection: Connection) -> bool:
        """Whether another coordinator may answer what this one did not."""
        is_bare = is_from_transport(failure)
        if about_coordinator(error, is_bare=is_bare):
            self._endpoints.failed(connection)
        return mend(error, is_bare=is_bare, is_accepted=False, is_known=False) is not Mend.NOTHING

    def _error(self, error: grpc.aio.AioRpcError, timeout_s: float | None) -> OutriderError:
        failure = from_rpc_error(error)
        message = failure.message
        if is_from_transport(error) and isinstance(failure, Unavailable):
            message = why_unreachable(self.address, message, by_tls=self._is_by_tls) or message
        elif isinstance(failure, DeadlineExceeded) and timeout_s is not None:
            what = f"{self.address} did not finish" if is_from_transport(error) else message
            message = f"{what} (timeout_s is {timeout_s:g})"
        elif failure.reason == NO_TOKEN:
            message = 'no token: give the client token="...", or token=outrider.token_from_file(PATH)'
        failure.message, failure.args = message, (message,)
        return failure


def _filled(request: Any, **fields: Any) -> Any:
    """With these fields, but for those that are None. Raises InvalidArgument."""
    for name, value in fields.items():
        if value is not None:
            assign(request, name, value, path=name)
    return request


def _checked_timeout(timeout_s: float | None) -> float | None:
    """None where there is no deadline."""
    if timeout_s is None or timeout_s == math.inf:
        return None
    if not 0 < timeout_s <= MAX_TIMEOUT_S:
        raise InvalidArgument(
            f"timeout_s is {shown(timeout_s)}, must be above 0 and at most {MAX_TIMEOUT_S:g}; None and infinity mean "
            "no deadline",
            field="timeout_s",
        )
    return timeout_s
