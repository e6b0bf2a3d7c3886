"""`/v1/chat/completions`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from coordinator.gateway.api import Api
from coordinator.gateway.fields import Fields
from coordinator.gateway.logprobs import Spelling, chat_logprobs
from coordinator.gateway.messages import read_messages
from outrider.client import Prompt
from outrider.errors import InvalidArgument
from outrider.results import Chunk


class ChatFields(Fields):
    """Beside what both have."""

    messages: Any = None
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class Chat(Api[ChatFields]):
    """A conversation and its next turn."""

    path = "/v1/chat/completions"
    fields = ChatFields
    id_prefix = "chatcmpl-"
    whole_object = "chat.completion"
    chunk_object = "chat.completion.chunk"

    def prompts(self, fields: ChatFields) -> Sequence[Prompt]:
        return [read_messages(fields.messages)]

    def options(self, fields: ChatFields) -> dict[str, Any]:
        options = fields.options()
        limits = {fields.max_tokens, fields.max_completion_tokens} - {None}
        if len(limits) > 1:
            raise InvalidArgument(
                f"max_tokens is {fields.max_tokens} and max_completion_tokens {fields.max_completion_tokens}: give one",
                field="max_completion_tokens",
            )
        if limits:
            (options["max_tokens"],) = limits
        own = ("logprobs", "top_logprobs", "add_generation_prompt", "continue_final_message", "chat_template_kwargs")
        return options | {name: value for name in own if (value := getattr(fields, name)) is not None}

    def logprobs(self, fields: ChatFields, chunk: Chunk, spelling: Spelling, offset: int) -> dict[str, Any]:
        return chat_logprobs(chunk, spelling)

    def join_logprobs(self, parts: Sequence[dict[str, Any]]) -> dict[str, Any]:
        return {"content": [entry for part in parts for entry in part["content"]], "refusal": None}

    def piece(self, text: str, *, is_first: bool) -> dict[str, Any]:
        """The role comes with the first of the text: the wait for it is the wait for the first token."""
        return {"delta": {"role": "assistant", "content": text} if is_first else {"content": text} if text else {}}

    def whole(self, text: str) -> dict[str, Any]:
        return {"message": {"role": "assistant", "content": text, "refusal": None}}
