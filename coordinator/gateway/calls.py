"""Events of one HTTP request: a `Generate` for each of its prompts, side by side."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from typing import Any

from outrider.client import Client, Prompt
from outrider.errors import InvalidArgument
from outrider.merging import merged
from outrider.results import Event
from outrider.serving.request_context import MAX_REQUEST_ID_CHARS

Told = tuple[int, Event]
"""Which prompt it is of, and what came."""


def events(client: Client, prompts: Sequence[Prompt], options: Mapping[str, Any]) -> AsyncGenerator[Told, None]:
    """As they come; one that the caller is slow to take holds all. The request id among `options` gets the prompt's
    index behind it where there are several. Raises InvalidArgument for an id that is too long for that; the iterator
    OutriderError: the first failure of any, which ends the others."""
    if len(prompts) == 1:
        return _events_of(0, client, prompts[0], options)
    request_id = options["request_id"]
    max_chars = MAX_REQUEST_ID_CHARS - len(f"-{len(prompts) - 1}")
    if len(request_id) > max_chars:
        raise InvalidArgument(
            f"request_id has {len(request_id)} characters, at most {max_chars} with {len(prompts)} prompts: each has "
            "its index behind it",
            field="request_id",
            reason="BAD_REQUEST_ID",
        )
    return merged(
        _events_of(index, client, prompt, {**options, "request_id": f"{request_id}-{index}"})
        for index, prompt in enumerate(prompts)
    )


async def _events_of(
    index: int, client: Client, prompt: Prompt, options: Mapping[str, Any]
) -> AsyncGenerator[Told, None]:
    async with aclosing(client.generate(prompt, **options)) as events:
        async for event in events:
            yield index, event
