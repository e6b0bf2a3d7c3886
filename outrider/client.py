"""The async client.

    async with outrider.Client("localhost:50050") as client:
        async for event in client.chat([{"role": "user", "content": "Hello"}], temperature=0):
            if isinstance(event, outrider.Chunk):
                print(event.text, end="")

Results are the dataclasses of `outrider.results`; failures are `outrider.errors`. Nothing is retried behind the
caller's back: a stream that broke is resumed with `resume_token_ids`, and `seed`, `acceptance` and `prompt_hash` of
its `Started`.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import AsyncGenerator, Awaitable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypedDict, TypeVar, Unpack

import grpc.aio

from outrider import results
from outrider.errors import DeadlineExceeded, InvalidArgument, OutriderError, Unavailable
from outrider.results import Chunk, Complete, Completion, Event, ModelInfo, ServerInfo, Started
from outrider.sampling.params import AcceptanceRule
from outrider.serving.channel import CLIENT_OPTIONS, check_target
from outrider.serving.read_results import read, read_event, read_step
from outrider.serving.status import STATUS_DETAILS, from_rpc_error
from outrider.v1 import generation_pb2, generation_pb2_grpc, worker_pb2

T = TypeVar("T")
Message = Mapping[str, str]
Prompt = str | Sequence[int] | Sequence[Message]


class GenerateOptions(TypedDict, total=False):
    """Every option of a request; absent ones mean the model's defaults. Meanings as in `generation.proto`."""

    # sampling
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    seed: int
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float
    logit_bias: Mapping[int, float]
    allowed_token_ids: Sequence[int]
    bad_words: Sequence[str]
    # stopping
    max_tokens: int
    min_tokens: int
    stop: str | Sequence[str]
    stop_token_ids: Sequence[int]
    ignore_eos: bool
    include_stop_str_in_output: bool
    # output
    logprobs: bool
    top_logprobs: int
    prompt_logprobs: int
    skip_special_tokens: bool
    n: int
    # structured output
    json_schema: str
    regex: str
    grammar: str
    # speculation: never changes the distribution
    num_speculative_tokens: int
    max_speculative_tokens: int
    drafter: str
    acceptance: str | AcceptanceRule
    report_steps: bool
    # a chat prompt
    add_generation_prompt: bool
    continue_final_message: bool
    chat_template_kwargs: Mapping[str, Any]
    # the request itself
    model: str
    request_id: str
    priority: int
    resume_token_ids: Sequence[int]
    resume_choice: int
    prompt_hash: int
    timeout_s: float


_SECTIONS: dict[str, Any] = {
    "sampling": generation_pb2.SamplingOptions,
    "stopping": generation_pb2.StoppingOptions,
    "output": generation_pb2.OutputOptions,
    "structured_output": generation_pb2.StructuredOutput,
    "speculation": generation_pb2.SpeculationOptions,
    "chat": generation_pb2.ChatPrompt,
}
_SECTION_OF = {name: section for section, cls in _SECTIONS.items() for name in cls.DESCRIPTOR.fields_by_name}


@dataclass(frozen=True, slots=True)
class KeepAlive:
    """Pings that find a dead connection while a stream is silent."""

    interval_ms: int = 20_000
    """Time between pings; servers refuse less than 10 s."""
    timeout_ms: int = 10_000
    """A ping not answered for this long ends the connection."""


class Client:
    """A connection to a coordinator; use it as an async context manager, or `close()` it."""

    def __init__(
        self,
        address: str,
        *,
        timeout_s: float | None = None,
        keep_alive: KeepAlive | None = None,
        metadata: Mapping[str, str] | None = None,
    ) -> None:
        """`address` is host:port. `timeout_s` is the deadline of calls that give none (None: no deadline); `metadata`
        goes with every call. Raises InvalidArgument for an address that is none, or a timeout that has passed."""
        check_target(address, "address")
        self.address = address
        self._timeout_s = _checked_timeout(timeout_s)
        self._metadata = tuple((metadata or {}).items())
        keep_alive = keep_alive or KeepAlive()
        pings = {"grpc.keepalive_time_ms": keep_alive.interval_ms, "grpc.keepalive_timeout_ms": keep_alive.timeout_ms}
        self._channel = grpc.aio.insecure_channel(address, options=list((dict(CLIENT_OPTIONS) | pings).items()))
        self._stub = generation_pb2_grpc.GenerationServiceStub(self._channel)

    async def __aenter__(self) -> Client:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Ends the connection and every stream on it."""
        await self._channel.close()

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
        call = self._stub.Generate(request, timeout=timeout_s, metadata=self._metadata)
        try:
            async for response in call:
                yield read_event(response)
        except grpc.aio.AioRpcError as error:
            raise self._error(error, timeout_s) from None
        finally:
            call.cancel()

    def chat(self, messages: Sequence[Message], **options: Unpack[GenerateOptions]) -> AsyncGenerator[Event, None]:
        """`generate` for a conversation."""
        return self.generate(list(messages), **options)

    async def complete(self, prompt: Prompt, **options: Unpack[GenerateOptions]) -> Completion:
        """The whole answer of one choice, once it is there."""
        if options.get("n", 1) != 1:
            raise InvalidArgument("complete() gives one choice; use generate() for n > 1", field="output.n")
        started: Started | None = None
        chunks: list[Chunk] = []
        told: list[results.PromptLogprobs] = []
        async for event in self.generate(prompt, **options):
            match event:
                case Started():
                    started = event
                case results.PromptLogprobs():
                    told.append(event)
                case Chunk():
                    chunks.append(event)
                case Complete() if started is not None:
                    return Completion.join(started, chunks, event, told)
        raise OutriderError(f"{self.address} ended the stream without `started` and `complete`")

    async def model_info(self, model: str = "") -> ModelInfo:
        """Limits, defaults and pairing of a served model; empty: the only one."""
        reply = await self._call(self._stub.GetModelInfo, generation_pb2.GetModelInfoRequest(model=model))
        return read(
            ModelInfo,
            reply,
            generation_defaults=read(results.GenerationDefaults, reply.generation_defaults),
            acceptance_rules=tuple(AcceptanceRule(rule) for rule in reply.acceptance_rules),
        )

    async def server_info(self) -> ServerInfo:
        """The coordinator, its workers and their health."""
        reply = await self._call(self._stub.GetServerInfo, generation_pb2.GetServerInfoRequest())
        workers = (
            read(
                results.Worker,
                worker,
                role=worker_pb2.WorkerRole.Name(worker.role).removeprefix("WORKER_ROLE_").lower(),
                capacity=read(results.Capacity, worker.capacity),
                numerics=read(results.Numerics, worker.numerics, environment=dict(worker.numerics.environment)),
                cache_counters=read(results.CacheCounters, worker.cache_counters),
                draft_rounds=read(results.DraftRounds, worker.draft_rounds),
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
        keeps them no longer."""
        reply = await self._call(self._stub.GetTrace, generation_pb2.GetTraceRequest(request_id=request_id))
        return tuple(
            results.StreamTrace(stream.index, tuple(map(read_step, stream.steps)), stream.num_left_out)
            for stream in reply.streams
        )

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
        request = generation_pb2.TokenizeRequest(model=model)
        if isinstance(prompt, str):
            request.text = prompt
        else:
            request.chat.CopyFrom(_chat_prompt(prompt))
            request.chat.continue_final_message = continue_final_message
            if add_generation_prompt is not None:
                request.chat.add_generation_prompt = add_generation_prompt
            if chat_template_kwargs is not None:
                request.chat.chat_template_kwargs = _json(chat_template_kwargs)
        return list((await self._call(self._stub.Tokenize, request)).token_ids)

    async def detokenize(self, token_ids: Sequence[int], *, model: str = "", skip_special_tokens: bool = True) -> str:
        """Text of ids; an unfinished code point becomes U+FFFD."""
        request = generation_pb2.DetokenizeRequest(model=model, skip_special_tokens=skip_special_tokens)
        _assign(request, "token_ids", token_ids, path="token_ids")
        return (await self._call(self._stub.Detokenize, request)).text

    async def _call(self, method: Any, request: Any) -> Any:
        try:
            reply: Awaitable[Any] = method(request, timeout=self._timeout_s, metadata=self._metadata)
            return await reply
        except grpc.aio.AioRpcError as error:
            raise self._error(error, self._timeout_s) from None

    def _error(self, error: grpc.aio.AioRpcError, timeout_s: float | None) -> OutriderError:
        failure = from_rpc_error(error)
        message = failure.message
        if _is_from_transport(error) and "connect" in message.lower() and isinstance(failure, Unavailable):
            message = f"nothing answers at {self.address}: is a coordinator running there? (`outrider up`)"
        elif isinstance(failure, DeadlineExceeded) and timeout_s is not None:
            what = f"{self.address} did not finish" if _is_from_transport(error) else message
            message = f"{what} (timeout_s is {timeout_s:g})"
        failure.message, failure.args = message, (message,)
        return failure


def _is_from_transport(error: grpc.aio.AioRpcError) -> bool:
    """Servers of ours send details with every error; a bare status is the connection's own."""
    return STATUS_DETAILS not in {key for key, _ in error.trailing_metadata() or ()}


def _checked_timeout(timeout_s: float | None) -> float | None:
    if timeout_s is not None and not timeout_s > 0:
        raise InvalidArgument(f"timeout_s is {timeout_s}, must be above 0", field="timeout_s")
    return timeout_s


def build_request(prompt: Prompt, options: GenerateOptions) -> generation_pb2.GenerateRequest:
    """The request. Raises TypeError for an unknown option, InvalidArgument for a value that its field cannot hold."""
    unknown = options.keys() - GenerateOptions.__annotations__.keys()
    if unknown:
        name = min(unknown)
        near = difflib.get_close_matches(name, GenerateOptions.__annotations__, 1)
        raise TypeError(f"unknown option {name!r}" + (f"; did you mean {near[0]!r}?" if near else ""))
    request = generation_pb2.GenerateRequest()
    if isinstance(prompt, str):
        request.text = prompt
    elif len(prompt) and isinstance(prompt[0], Mapping):
        request.chat.CopyFrom(_chat_prompt(prompt))  # type: ignore[arg-type]
    else:
        request.token_ids.SetInParent()
        _assign(request.token_ids, "ids", prompt, path="token_ids.ids")
    for name, value in options.items():
        if value is None or name == "timeout_s":
            continue
        section = _SECTION_OF.get(name)
        if name == "acceptance":
            value = _acceptance(value)
        if name in ("stop", "bad_words") and isinstance(value, str):
            value = [value]
        if section == "chat" and request.WhichOneof("prompt") != "chat":
            raise InvalidArgument(f"{name} needs a prompt of chat messages", field=f"chat.{name}")
        if name == "chat_template_kwargs":
            value = _json(value)
        target: Any = getattr(request, section) if section else request
        if name == "allowed_token_ids":
            target.allowed_token_ids.SetInParent()
            _assign(target.allowed_token_ids, "ids", value, path="sampling.allowed_token_ids")
            continue
        _assign(target, name, value, path=f"{section}.{name}" if section else name)
    return request


def _acceptance(value: Any) -> int:
    if isinstance(value, str):
        if value.upper() not in AcceptanceRule.__members__:
            rules = ", ".join(rule.name.lower() for rule in AcceptanceRule)
            raise InvalidArgument(f"acceptance is {value!r}, must be one of {rules}", field="speculation.acceptance")
        return AcceptanceRule[value.upper()]
    return value


def _json(kwargs: Any) -> str:
    try:
        return json.dumps(kwargs, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        field = "chat.chat_template_kwargs"
        raise InvalidArgument(f"{field} cannot be written as JSON: {error}", field=field) from None


def _chat_prompt(messages: Sequence[Message]) -> generation_pb2.ChatPrompt:
    prompt = generation_pb2.ChatPrompt()
    for index, message in enumerate(messages):
        path = f"chat.messages[{index}]"
        if not isinstance(message, Mapping) or message.keys() != {"role", "content"}:
            raise InvalidArgument(f"{path} must have exactly the keys role and content", field=path)
        added = prompt.messages.add()
        _assign(added, "role", message["role"], path=f"{path}.role")
        _assign(added, "content", message["content"], path=f"{path}.content")
    return prompt


def _assign(message: Any, name: str, value: Any, *, path: str) -> None:
    try:
        if isinstance(value, Mapping):
            getattr(message, name).update(value)
        elif isinstance(value, Sequence) and not isinstance(value, str | bytes):
            getattr(message, name).extend(value)
        else:
            setattr(message, name, value)
    except (TypeError, ValueError, AttributeError) as error:
        raise InvalidArgument(f"{path} cannot be {value!r:.80}: {error}", field=path) from None
