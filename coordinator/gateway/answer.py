"""From the events of a request to the JSON of its answer, whole or piece by piece."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import AsyncGenerator, AsyncIterator, Sequence, Set
from typing import Any

from coordinator.gateway.api import Api
from coordinator.gateway.calls import Told
from coordinator.gateway.fields import Fields
from coordinator.gateway.logprobs import Spelling, Spellings
from coordinator.gateway.usage import metrics_of, usage, usage_of
from outrider.client import Client
from outrider.results import Chunk, Complete, Started

Json = dict[str, Any]


class Answer:
    """Of one request. Choices are numbered through all prompts, as OpenAI does it: those of the first one first."""

    def __init__(
        self,
        api: Api[Any],
        fields: Fields,
        client: Client,
        spellings: Spellings,
        *,
        request_id: str,
        echoes: Sequence[str],
    ) -> None:
        """echoes: for each prompt what its texts begin with."""
        self._api = api
        self._fields = fields
        self._client = client
        self._spellings = spellings
        self._id = api.id_prefix + request_id
        self._created = int(time.time())
        self._num_prompts = len(echoes)
        self._num_choices = fields.n or 1
        self._started: dict[int, Started] = {}
        repeated = (echo for echo in echoes for _ in range(self._num_choices))
        stop_ids = frozenset(fields.stop_token_ids or ())
        self._choices = [_Choice(index, echo, stop_ids) for index, echo in enumerate(repeated)]

    async def whole(self, told: AsyncIterator[Told]) -> Json:
        """Once it is complete."""
        texts = [choice.echo for choice in self._choices]
        logprobs: list[list[Json]] = [[] for _ in self._choices]
        steps: list[list[Json]] = [[] for _ in self._choices]
        async for prompt, event in told:
            choice = self._take(prompt, event)
            if choice is not None and isinstance(event, Chunk):
                texts[choice.index] += event.text
                details = await self._details(choice, prompt, event)
                logprobs[choice.index] += details["logprobs"]
                steps[choice.index] += details["steps"]
        choices = []
        for choice in self._choices:
            parts = logprobs[choice.index]
            told_of: Json = {"logprobs": self._api.join_logprobs(parts) if parts else None}
            if self._fields.report_steps:
                told_of["steps"] = steps[choice.index]
            if self._num_prompts > 1:
                told_of["outrider"] = self._outrider(choice.index // self._num_choices)
            choices.append({"index": choice.index, **self._api.whole(texts[choice.index]), **told_of, **choice.end()})
        return {
            **self._head(self._api.whole_object, 0),
            "choices": choices,
            "usage": self._usage(),
            "metrics": self._metrics(),
            "outrider": self._outrider(0),
        }

    async def pieces(self, told: AsyncIterator[Told]) -> AsyncGenerator[Json, None]:
        """As they come. The last one is about usage, where that was asked for."""
        continuous = self._fields.stream_options is not None and self._fields.stream_options.continuous_usage_stats
        async for prompt, event in told:
            choice = self._take(prompt, event)
            match event:
                case Chunk() if choice is not None:
                    details = await self._details(choice, prompt, event)
                    is_first, choice.is_new = choice.is_new, False
                    if not (event.text or is_first or continuous or details["logprobs"] or details["steps"]):
                        continue
                    text = choice.echo + event.text if is_first else event.text
                    piece = {"index": choice.index, **self._api.piece(text, is_first=is_first)}
                    piece["logprobs"] = details["logprobs"][0] if details["logprobs"] else None
                    piece["finish_reason"] = None
                    if self._fields.report_steps:
                        piece["steps"] = details["steps"]
                case Complete() if choice is not None:
                    is_first, choice.is_new = choice.is_new, False
                    text = choice.echo if is_first else ""
                    piece = {"index": choice.index, **self._api.piece(text, is_first=is_first)}
                    piece |= {"logprobs": None, **choice.end()}
                case _:
                    continue
            answer = {**self._head(self._api.chunk_object, prompt), "choices": [piece]}
            if is_first:
                answer["outrider"] = self._outrider(prompt)
            if self._fields.wants_usage or continuous:
                answer["usage"] = self._usage_so_far(prompt, choice) if continuous else None
            yield answer
        if self._fields.wants_usage:
            yield {
                **self._head(self._api.chunk_object, 0),
                "choices": [],
                "usage": self._usage(),
                "metrics": self._metrics(),
            }

    def _take(self, prompt: int, event: Any) -> _Choice | None:
        """The choice that the event is of; None: of none."""
        if isinstance(event, Started):
            self._started[prompt] = event
        if not isinstance(event, Chunk | Complete):
            return None
        choice = self._choices[prompt * self._num_choices + event.index]
        if isinstance(event, Complete):
            choice.complete = event
        else:
            choice.num_tokens += len(event.token_ids)
            if self._fields.report_steps:
                choice.chunks.append(event)
        return choice

    async def _details(self, choice: _Choice, prompt: int, chunk: Chunk) -> dict[str, list[Json]]:
        """Of the chunk's tokens, what was asked for."""
        details: dict[str, list[Json]] = {"logprobs": [], "steps": []}
        if chunk.logprobs is None and not self._fields.report_steps:
            return details
        started = self._started[prompt]
        spelling = await self._spellings.of(chunk, self._client, started.model, started.model_fingerprint)
        if chunk.logprobs is not None:
            details["logprobs"].append(self._api.logprobs(self._fields, chunk, spelling, choice.offset))
            choice.offset += sum(len(spelling[token_id].decode(errors="replace")) for token_id in chunk.token_ids)
        if self._fields.report_steps:
            details["steps"].append(_step(chunk, spelling))
        return details

    def _head(self, kind: str, prompt: int) -> Json:
        started = self._started[prompt]
        return {
            "id": self._id,
            "object": kind,
            "created": self._created,
            "model": started.model,
            "system_fingerprint": started.model_fingerprint,
        }

    def _outrider(self, prompt: int) -> Json:
        """What says the prompt's text again: with a seed and the COUPLED rule, whatever drafts."""
        started = self._started[prompt]
        return {
            "request_id": started.request_id,
            "seed": started.seed,
            "acceptance": str(started.acceptance),
            "drafter": started.drafter,
            "num_speculative_tokens": started.num_speculative_tokens,
            "max_speculative_tokens": started.max_speculative_tokens,
            "max_tokens": started.max_tokens,
        }

    def _ends(self) -> list[Complete]:
        return [choice.complete for choice in self._choices if choice.complete is not None]

    def _usage(self) -> Json:
        ends, n = self._ends(), self._num_choices
        return usage_of([ends[first : first + n] for first in range(0, len(ends), n)])

    def _usage_so_far(self, prompt: int, choice: _Choice) -> Json:
        """Of one choice. What was cached is known at its end."""
        cached = choice.complete.usage.cached_tokens if choice.complete is not None else None
        return usage(self._started[prompt].num_prompt_tokens, choice.num_tokens, cached)

    def _metrics(self) -> Json:
        chunks = [chunk for choice in self._choices for chunk in choice.chunks]
        num_spec_tokens = max(started.max_speculative_tokens for started in self._started.values())
        return metrics_of(self._ends(), chunks, num_spec_tokens)


class _Choice:
    """What is known of one choice so far."""

    def __init__(self, index: int, echo: str, stop_ids: Set[int]) -> None:
        """stop_ids: those that the request gave."""
        self.index = index
        self.echo = echo
        self._stop_ids = stop_ids
        self.is_new = True
        self.offset = 0
        self.num_tokens = 0
        self.chunks: list[Chunk] = []
        self.complete: Complete | None = None

    def end(self) -> Json:
        """stop_reason: vLLM's word for the stop string or the id that was met; null at an end of the model's own."""
        assert self.complete is not None
        met = self.complete.matched_stop
        is_told = isinstance(met, str) or met in self._stop_ids
        return {"finish_reason": self.complete.finish_reason, "stop_reason": met if is_told else None}


def _step(chunk: Chunk, spelling: Spelling) -> Json:
    """One round and its tokens. `bytes` make up the text; the `text` of a part of a code point is U+FFFD."""
    tokens = [
        {
            "id": token_id,
            "text": spelling[token_id].decode(errors="replace"),
            "bytes": list(spelling[token_id]),
            "origin": str(origin),
        }
        for token_id, origin in zip(chunk.token_ids, chunk.origins, strict=True)
    ]
    step: Json = {"tokens": tokens, "num_draft_tokens": chunk.num_draft_tokens}
    if chunk.step is not None:
        told = dataclasses.asdict(chunk.step)
        step |= told | {"cause": str(chunk.step.cause), "soft_acceptances": list(chunk.step.soft_acceptances)}
    return step
