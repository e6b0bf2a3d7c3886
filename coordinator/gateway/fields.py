"""What a request may say, field by field: OpenAI's names, vLLM's where it has more, and how to speculate.

Every field is passed on, or refused by its name; one that OpenAI's API has and this service has not may be there with
the value that asks for nothing, as clients send it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from coordinator.checks import within
from coordinator.gateway.errors import unsupported
from coordinator.gateway.structured import structured_options
from outrider.errors import InvalidArgument
from outrider.sampling.params import MAX_CHOICES

F = TypeVar("F", bound="Fields")
MAX_ID_DIGITS = 20
"""More than any id has: Python reads no number of thousands."""
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "tools": ([],),
    "tool_choice": ("none",),
    "functions": ([],),
    "function_call": ("none",),
    "parallel_tool_calls": (True, False),
    "modalities": (["text"],),
    "store": (False,),
    "metadata": ({},),
    "service_tier": ("auto", "default"),
    "echo": (False,),
    "suffix": ("",),
    "best_of": (),
    "use_beam_search": (False,),
    "length_penalty": (1.0,),
    "spaces_between_special_tokens": (True,),
    "include_reasoning": (True, False),
    "reasoning_effort": (),
    "verbosity": ("medium",),
    "detokenize": (True,),
    "return_token_ids": (False,),
    "return_tokens_as_token_ids": (False,),
    "add_special_tokens": (),
    "truncate_prompt_tokens": (),
    "prompt_logprobs": (),
}
"""Fields that are not supported, with the values that ask for nothing: null in any, and in `best_of` that of `n`."""
_LABELS = ("user", "safety_identifier", "prompt_cache_key")
"""They tell an operator who asked, and change no answer: taken, and not passed on."""
_PASSED_ON = (
    "model", "request_id", "priority",
    "temperature", "top_p", "top_k", "min_p", "seed", "repetition_penalty", "presence_penalty", "frequency_penalty",
    "allowed_token_ids", "bad_words", "max_tokens", "min_tokens", "stop", "stop_token_ids", "ignore_eos",
    "include_stop_str_in_output", "skip_special_tokens", "n",
    "num_speculative_tokens", "max_speculative_tokens", "drafter", "acceptance", "report_steps",
)  # fmt: skip
"""To `outrider.Client`, under the same names."""


class StreamOptions(BaseModel):
    """Of a streamed answer. continuous_usage_stats: every chunk tells the usage so far."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    include_usage: bool = False
    continuous_usage_stats: bool = False


class Fields(BaseModel):
    """What both APIs have. Absent: the model's own default. Ranges are the coordinator's to check, but for `n`: choices
    are made room for here."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    model: str | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    n: int | None = None
    seed: int | None = Field(None, ge=0, lt=2**64)
    stop: list[str] | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    response_format: dict[str, Any] | None = None

    # as vLLM calls them
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    min_tokens: int | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    allowed_token_ids: list[int] | None = None
    bad_words: list[str] | None = None
    priority: int | None = None
    request_id: str | None = None
    structured_outputs: dict[str, Any] | None = None
    guided_json: str | dict[str, Any] | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None

    # speed only, and the rule, which decides what a seed promises
    num_speculative_tokens: int | None = None
    max_speculative_tokens: int | None = None
    drafter: str | None = None
    acceptance: str | None = None
    report_steps: bool | None = None

    @field_validator("stop", mode="before")
    @classmethod
    def _one_stop_is_a_list_too(cls, value: Any) -> Any:
        return [value] if isinstance(value, str) else value

    @property
    def wants_usage(self) -> bool:
        return self.stream_options is not None and self.stream_options.include_usage

    def options(self) -> dict[str, Any]:
        """Of `outrider.Client.generate`. Raises InvalidArgument."""
        options = {name: value for name in _PASSED_ON if (value := getattr(self, name)) is not None}
        if self.n is not None:
            within("n", self.n, 1, MAX_CHOICES)
        if self.logit_bias is not None:
            options["logit_bias"] = _logit_bias(self.logit_bias)
        if self.top_k == -1:  # vLLM's word for all
            options["top_k"] = 0
        return options | self.structured()[1]

    def structured(self) -> tuple[str, dict[str, Any]]:
        """The field that gives the form of the text, and what it comes to."""
        names = (
            "response_format",
            "structured_outputs",
            "guided_json",
            "guided_regex",
            "guided_choice",
            "guided_grammar",
        )
        return structured_options({name: value for name in names if (value := getattr(self, name)) is not None})


def parse(fields: type[F], body: Mapping[str, Any]) -> F:
    """Raises InvalidArgument naming the field and what is wrong with it."""
    asked: dict[str, Any] = {}
    for name, value in body.items():
        if value is None:
            continue
        if name in fields.model_fields:
            asked[name] = value
        elif name in _LABELS:
            if not isinstance(value, str):
                raise InvalidArgument(f"{name} must be a string", field=name)
        elif name not in _NEUTRAL:
            raise unsupported(name[:80], fields.model_fields)
        elif not (value in _NEUTRAL[name] or (name == "best_of" and value == (body.get("n") or 1))):
            raise unsupported(name)
    try:
        parsed = fields.model_validate(asked)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False)[0]
        name = _path(first["loc"])
        if first["type"] == "extra_forbidden":
            raise unsupported(name, StreamOptions.model_fields) from None
        raise InvalidArgument(f"{name} is wrong: {first['msg']}", field=name, reason="INVALID_TYPE") from None
    if parsed.stream_options is not None and not parsed.stream:
        raise InvalidArgument("stream_options needs stream: true", field="stream_options")
    return parsed


def _path(location: tuple[int | str, ...]) -> str:
    path = ""
    for step in location:
        path += f"[{step}]" if isinstance(step, int) else f".{step}" if path else step
    return path


def _logit_bias(bias: Mapping[str, float]) -> dict[int, float]:
    for token_id in bias:
        if not (token_id.isascii() and token_id.isdecimal() and len(token_id) <= MAX_ID_DIGITS):
            raise InvalidArgument(f"logit_bias: {token_id!r:.40} is no token id", field="logit_bias")
    ids = {int(token_id): value for token_id, value in bias.items()}
    if len(ids) < len(bias):
        raise InvalidArgument("logit_bias gives an id twice", field="logit_bias")
    return ids
