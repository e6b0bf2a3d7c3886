"""A GenerationService in this process without workers: real gRPC, a toy's true distributions, and faults on demand.

Its step records claim drafts that nobody made; it stands in for a coordinator where a test needs a lie.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from outrider.errors import OutriderError
from outrider.lm.interface import LoadedModel, PackedBatch, Segment
from outrider.lm.toy import load_toy
from outrider.sampling.distribution import coupled_token, distribution, draw, greedy_token
from outrider.sampling.history import History
from outrider.sampling.noise import Noise
from outrider.sampling.params import AcceptanceRule, SamplingParams, StoppingParams
from outrider.serving.server import running_server
from outrider.settings import CoordinatorSettings
from outrider.v1 import common_pb2, generation_pb2

TOY = "toy:vocab=16,seed=3,scale=1"
_NO_STOP = StoppingParams(max_tokens=1 << 20)
_SERVICE = generation_pb2.DESCRIPTOR.services_by_name["GenerationService"]


@dataclass
class FakeGeneration:
    """Answers with tokens of the toy's law. Faults:

    bias: moves this much probability from the likeliest token to the next. drafts: drafts that each round claims.
    broken_greedy, broken_coupled: speculative texts differ from plain ones in their last token.
    """

    bias: float = 0.0
    drafts: int = 2
    broken_greedy: bool = False
    broken_coupled: bool = False
    error: OutriderError | None = None
    requests: list[generation_pb2.GenerateRequest] = field(default_factory=list)
    metadata: list[dict[str, str]] = field(default_factory=list)
    deadlines: list[float | None] = field(default_factory=list)
    cancelled: asyncio.Event = field(default_factory=asyncio.Event)
    loaded: LoadedModel = field(default_factory=lambda: load_toy(TOY))

    def __post_init__(self) -> None:
        self.loaded.model.allocate_cache(64, 16)

    async def Generate(self, request: Any, context: Any) -> AsyncIterator[Any]:
        self.requests.append(request)
        self.metadata.append(dict(context.invocation_metadata()))
        self.deadlines.append(context.time_remaining())
        if self.error is not None:
            raise self.error
        finished = False
        try:
            async for response in self._answer(request):
                yield response
            finished = True
        finally:
            if not finished:
                self.cancelled.set()

    async def _answer(self, request: Any) -> AsyncIterator[Any]:
        rule = AcceptanceRule(request.speculation.acceptance or AcceptanceRule.BLOCK)
        prompt_ids = list(request.token_ids.ids) or [1, 2, 3]
        seed, gamma = request.sampling.seed, request.speculation.num_speculative_tokens
        started = generation_pb2.GenerateStarted(
            request_id=request.request_id or "made", seed=seed, acceptance=int(rule), prompt_hash=7,
            num_prompt_tokens=len(prompt_ids), model=TOY,
        )  # fmt: skip
        yield generation_pb2.GenerateResponse(started=started)
        params = SamplingParams(temperature=request.sampling.temperature, seed=seed, acceptance=rule)
        token_ids = self._tokens(prompt_ids, request.stopping.max_tokens or 8, params, speculative=gamma > 0)
        drafts = self.drafts if gamma else 0
        for first in [0, *range(1, len(token_ids), drafts + 1)]:
            width = drafts + 1 if first else 1
            ids = token_ids[first : first + width]
            num_drafts = drafts if first else 0
            yield generation_pb2.GenerateResponse(chunk=self._chunk(ids, num_drafts))
        stats = generation_pb2.SpeculationStats(num_draft_tokens=drafts, num_spec_steps=1)
        usage = generation_pb2.Usage(prompt_tokens=len(prompt_ids), completion_tokens=len(token_ids))
        complete = generation_pb2.GenerateComplete(
            finish_reason=common_pb2.FINISH_REASON_LENGTH, usage=usage, speculation=stats
        )
        yield generation_pb2.GenerateResponse(complete=complete)

    def _chunk(self, ids: list[int], num_drafts: int) -> Any:
        accepted = min(num_drafts, len(ids))
        origins = [common_pb2.TOKEN_ORIGIN_ACCEPTED] * accepted
        origins += [common_pb2.TOKEN_ORIGIN_PLAIN] * (len(ids) - accepted)
        step = generation_pb2.StepRecord(num_draft_tokens=num_drafts, num_accepted_draft_tokens=accepted)
        text = "".join(chr(97 + token_id) for token_id in ids)
        return generation_pb2.GenerateChunk(token_ids=ids, text=text, origins=origins, step=step)

    def _tokens(
        self, prompt_ids: list[int], num_tokens: int, params: SamplingParams, *, speculative: bool
    ) -> list[int]:
        rng = np.random.default_rng([params.seed, int(params.acceptance)])
        token_ids: list[int] = []
        for _ in range(num_tokens):
            ids, history = [*prompt_ids, *token_ids], History(prompt_ids, token_ids)
            batch = PackedBatch((Segment(0, ids, range(-(-len(ids) // 16)), 1),))
            (row,) = self.loaded.model.forward(batch)
            if params.greedy:
                token_ids.append(greedy_token(row, params, _NO_STOP, history))
            elif params.acceptance is AcceptanceRule.COUPLED and not self.bias:
                token_ids.append(coupled_token(row, params, _NO_STOP, history, Noise(params.seed, 0), len(ids)))
            else:
                p = distribution(row, params, _NO_STOP, history)
                best, second = np.argsort(-p)[:2]
                moved = min(self.bias, p[best])
                p[best], p[second] = p[best] - moved, p[second] + moved
                token_ids.append(draw(p, rng.random()))
        broken = self.broken_greedy if params.greedy else self.broken_coupled and num_tokens > 8
        if speculative and broken:
            token_ids[-1] = (token_ids[-1] + 1) % 16
        return token_ids

    async def GetModelInfo(self, request: Any, context: Any) -> Any:
        description = self.loaded.description
        return generation_pb2.GetModelInfoResponse(
            model=TOY, model_fingerprint=description.model_fingerprint, vocab_size=16, context_length=4096,
            drafters=["model"], acceptance_rules=[1, 2, 3], max_speculative_tokens=8, simulated=True,
            generation_defaults={"temperature": 0.0},
        )  # fmt: skip

    async def GetServerInfo(self, request: Any, context: Any) -> Any:
        worker = generation_pb2.WorkerStatus(role=2, address="here:1", healthy=True, weight_bytes=5)
        return generation_pb2.GetServerInfoResponse(versions={"python": "3"}, models=[TOY], workers=[worker])

    async def Tokenize(self, request: Any, context: Any) -> Any:
        text = request.text or "".join(message.content for message in request.chat.messages)
        return generation_pb2.TokenizeResponse(token_ids=[ord(char) for char in text])

    async def Detokenize(self, request: Any, context: Any) -> Any:
        return generation_pb2.DetokenizeResponse(text="".join(map(chr, request.token_ids)))


@asynccontextmanager
async def serving(service: FakeGeneration) -> AsyncIterator[str]:
    """host:port of a server of `service`."""
    async with running_server(CoordinatorSettings(port=0), [_SERVICE]) as server:
        await server.open({_SERVICE.full_name: service})
        yield f"127.0.0.1:{server.port}"
