"""A request of the public service, from the options that users know by name; and what resumes it."""

from __future__ import annotations

import difflib
import json
from collections.abc import Mapping, Sequence
from typing import Any, TypedDict

from outrider.errors import InvalidArgument
from outrider.progress import Progress
from outrider.sampling.params import MAX_CHOICES, AcceptanceRule
from outrider.v1 import generation_pb2

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
    record: bool
    # structured output
    json_schema: str | Mapping[str, Any]
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
    model_fingerprint: str
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
_FORMS = generation_pb2.StructuredOutput.DESCRIPTOR.oneofs_by_name["constraint"].fields


def build_request(prompt: Prompt, options: GenerateOptions) -> generation_pb2.GenerateRequest:
    """The request. Raises TypeError for an unknown option, InvalidArgument for a value that its field cannot hold, and
    for more choices than a request may have: the caller keeps a place for each."""
    unknown = options.keys() - GenerateOptions.__annotations__.keys()
    if unknown:
        name = min(unknown)
        near = difflib.get_close_matches(name, GenerateOptions.__annotations__, 1)
        raise TypeError(f"unknown option {name!r}" + (f"; did you mean {near[0]!r}?" if near else ""))
    _check_one_form(options)
    if not hasattr(prompt, "__len__") or not hasattr(prompt, "__getitem__") or isinstance(prompt, bytes | Mapping):
        raise InvalidArgument(
            f"prompt is of type {type(prompt).__name__}, must be a text, a list of token ids or a list of messages",
            field="prompt",
        )
    request = generation_pb2.GenerateRequest()
    if isinstance(prompt, str):
        assign(request, "text", prompt, path="text")
    elif len(prompt) and isinstance(prompt[0], Mapping):
        request.chat.CopyFrom(chat_prompt(prompt))  # type: ignore[arg-type]
    else:
        request.token_ids.SetInParent()
        assign(request.token_ids, "ids", prompt, path="token_ids.ids")
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
            value = to_json(value)
        if name == "json_schema" and isinstance(value, Mapping):
            value = to_json(value, "structured_output.json_schema")
        target: Any = getattr(request, section) if section else request
        if name == "allowed_token_ids":
            target.allowed_token_ids.SetInParent()
            assign(target.allowed_token_ids, "ids", value, path="sampling.allowed_token_ids")
            continue
        assign(target, name, value, path=f"{section}.{name}" if section else name)
    if request.output.HasField("n") and not 1 <= request.output.n <= MAX_CHOICES:
        raise InvalidArgument(
            f"output.n is {request.output.n}, must be from 1 to {MAX_CHOICES}", field="output.n", reason="OUT_OF_RANGE"
        )
    return request


def resuming_request(request: generation_pb2.GenerateRequest, progress: Progress) -> generation_pb2.GenerateRequest:
    """The same request, for what `progress` lacks: one choice from its ids on, or all where there are no ids yet."""
    if (started := progress.started) is None:
        return request  # nobody has begun with it
    again = generation_pb2.GenerateRequest()
    again.CopyFrom(request)
    again.request_id, again.model = started.request_id, started.model
    again.model_fingerprint, again.prompt_hash = started.model_fingerprint, started.prompt_hash
    again.sampling.seed = started.seed
    again.speculation.acceptance = int(started.acceptance)  # type: ignore[assignment]
    if started.max_tokens:  # which another coordinator's default may not be
        again.stopping.max_tokens = started.max_tokens
    if len(progress.choices) == 1:
        (choice,) = progress.choices
        again.output.n = 1
        again.resume_choice = request.resume_choice + choice.index
        again.resume_token_ids[:] = choice.token_ids
        if choice.index or choice.token_ids:
            again.output.ClearField("prompt_logprobs")
    return again


def _check_one_form(options: Mapping[str, Any]) -> None:
    """The wire has room for one, and would keep the last."""
    given = [field.name for field in _FORMS if options.get(field.name) is not None]
    if len(given) > 1:
        raise InvalidArgument(
            f"{given[0]} and {given[1]} both give the text a form: give one", field=f"structured_output.{given[1]}"
        )


def _acceptance(value: Any) -> int:
    if isinstance(value, str):
        if value.upper() not in AcceptanceRule.__members__:
            rules = ", ".join(rule.name.lower() for rule in AcceptanceRule)
            raise InvalidArgument(f"acceptance is {value!r}, must be one of {rules}", field="speculation.acceptance")
        return AcceptanceRule[value.upper()]
    return value


def to_json(value: Any, field: str = "chat.chat_template_kwargs") -> str:
    """Of a chat template's variables, or of a schema. Raises InvalidArgument."""
    try:
        return json.dumps(value, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise InvalidArgument(f"{field} cannot be written as JSON: {error}", field=field) from None


def chat_prompt(messages: Sequence[Message]) -> generation_pb2.ChatPrompt:
    """A conversation. Raises InvalidArgument naming the turn."""
    prompt = generation_pb2.ChatPrompt()
    for index, message in enumerate(messages):
        path = f"chat.messages[{index}]"
        if not isinstance(message, Mapping) or message.keys() != {"role", "content"}:
            others = (
                ", ".join(sorted(map(str, set(message) - {"role", "content"}))) if isinstance(message, Mapping) else ""
            )
            told = f": leave out {others:.80}" if others else ""
            raise InvalidArgument(f"{path} must have exactly the keys role and content{told}", field=path)
        added = prompt.messages.add()
        assign(added, "role", message["role"], path=f"{path}.role")
        assign(added, "content", message["content"], path=f"{path}.content")
    return prompt


def assign(message: Any, name: str, value: Any, *, path: str) -> None:
    """`message.name = value`, lists and maps as well. Raises InvalidArgument for what the field cannot hold."""
    try:
        if isinstance(value, Mapping):
            getattr(message, name).update(value)
        elif isinstance(value, Sequence) and not isinstance(value, str | bytes):
            getattr(message, name).extend(value)
        else:
            setattr(message, name, value)
    except (TypeError, ValueError, AttributeError, OverflowError) as error:
        raise InvalidArgument(f"{path} cannot be {shown(value)}: {error}", field=path) from None


def shown(value: Any) -> str:
    """For a message: as much of it as fits there."""
    try:
        return f"{value!r:.80}"
    except ValueError:  # Python does not write out integers of thousands of digits
        return f"such a {type(value).__name__}"
