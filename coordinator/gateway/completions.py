"""`/v1/completions`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from coordinator.gateway.api import Api
from coordinator.gateway.fields import Fields
from coordinator.gateway.logprobs import Spelling, completion_logprobs
from outrider.client import Client, Prompt
from outrider.errors import InvalidArgument
from outrider.results import Chunk

MAX_PROMPTS = 64


class CompletionFields(Fields):
    """Beside what both have. logprobs: that many alternatives for each token. echo: texts begin with their prompts."""

    prompt: Any = None
    logprobs: int | None = None
    echo: bool | None = None


class Completions(Api[CompletionFields]):
    """Texts, or lists of ids, and how they go on."""

    path = "/v1/completions"
    fields = CompletionFields
    id_prefix = "cmpl-"
    whole_object = "text_completion"
    chunk_object = "text_completion"

    def prompts(self, fields: CompletionFields) -> Sequence[Prompt]:
        given = fields.prompt
        several = isinstance(given, list) and given and not _are_ids(given)
        prompts = given if several else [given]
        if not all((isinstance(one, str) and one) or (one and _are_ids(one)) for one in prompts):
            raise InvalidArgument(
                "prompt must be a string that is not empty, a list of token ids, or a list of either", field="prompt"
            )
        if len(prompts) > MAX_PROMPTS:
            raise InvalidArgument(f"prompt has {len(prompts)} prompts, at most {MAX_PROMPTS} are taken", field="prompt")
        return prompts

    async def echoes(self, fields: CompletionFields, prompts: Sequence[Any], client: Client) -> Sequence[str]:
        if not fields.echo:
            return await super().echoes(fields, prompts, client)
        options: dict[str, Any] = {
            "model": fields.model or "",
            "skip_special_tokens": fields.skip_special_tokens is not False,
        }
        return [one if isinstance(one, str) else await client.detokenize(one, **options) for one in prompts]

    def options(self, fields: CompletionFields) -> dict[str, Any]:
        options = fields.options()
        if fields.echo and fields.logprobs is not None:
            raise InvalidArgument(
                "echo and logprobs are not supported together here: leave one out",
                field="echo",
                reason="UNSUPPORTED_PARAMETER",
            )
        if fields.logprobs is not None:
            options |= {"logprobs": True, "top_logprobs": fields.logprobs}
        return options

    def logprobs(self, fields: CompletionFields, chunk: Chunk, spelling: Spelling, offset: int) -> dict[str, Any]:
        return completion_logprobs(chunk, spelling, offset)

    def join_logprobs(self, parts: Sequence[dict[str, Any]]) -> dict[str, Any]:
        joined: dict[str, Any] = {}
        for name, first in parts[0].items():
            joined[name] = first if first is None else [value for part in parts for value in part[name]]
        return joined

    def piece(self, text: str, *, is_first: bool) -> dict[str, Any]:
        return {"text": text}

    def whole(self, text: str) -> dict[str, Any]:
        return {"text": text}


def _are_ids(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(one, int) and not isinstance(one, bool) for one in value)
