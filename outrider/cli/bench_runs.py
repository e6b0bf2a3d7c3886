"""Timed answers from services of the bench's own: what every figure of `outrider bench` is made of.

Draft and target worker are processes of their own, always.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from outrider.cli.connect import connect
from outrider.cli.console import err
from outrider.cli.measure import Timed
from outrider.cli.prompts import for_model
from outrider.cli.stack import Stack, local_stack, small_worker
from outrider.client import Client, GenerateOptions, Prompt
from outrider.errors import OutriderError
from outrider.lm.timing import expected_ms
from outrider.results import Chunk, Gathering
from outrider.server_info import CacheCounters, ModelInfo
from outrider.settings import CoordinatorSettings, TargetWorkerSettings

if TYPE_CHECKING:
    from outrider.serving.worker_calls import WorkerDescription

PLAIN: GenerateOptions = {"num_speculative_tokens": 0}
NEUTRAL: GenerateOptions = {
    "ignore_eos": True,
    "report_steps": True,
    "seed": 1,
    "top_k": 0,
    "top_p": 1.0,
    "min_p": 0.0,
    "repetition_penalty": 1.0,
}
"""The model's own law whatever its generation defaults are, and answers of full length."""


@dataclass(frozen=True, slots=True)
class Cell:
    """One kind of prompts at one temperature. `workload` is `mixed` or one of prompts.WORKLOADS."""

    workload: str
    temperature: float
    texts: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Bench:
    """Running services, and the options that all requests share.

    speculation: options of the speculative ones; without `num_speculative_tokens`, γ is adaptive.
    """

    stack: Stack
    client: Client
    info: ModelInfo
    common: GenerateOptions
    speculation: GenerateOptions

    def prompts(self, cell: Cell) -> list[Prompt]:
        return for_model(list(cell.texts), self.info, kind=cell.workload)

    async def time(self, prompt: Prompt, cell: Cell, options: GenerateOptions) -> Timed:
        """The answer and when it came, as a caller sees it.

        Every request is a tenant of its own, so that its prompt is computed anew: no run profits from the one before.
        """
        tenant = {CoordinatorSettings().trusted_tenant_header: f"bench-{secrets.token_hex(8)}"}
        async with connect(self.stack.address, metadata=tenant) as client:
            await client.model_info()  # the connection is there before the clock starts
            return await self._time(client, prompt, cell, options)

    async def _time(self, client: Client, prompt: Prompt, cell: Cell, options: GenerateOptions) -> Timed:
        begin = time.perf_counter()
        arrivals: list[float] = []
        answer = Gathering()
        asked: GenerateOptions = {**self.common, "temperature": cell.temperature, **options}
        async for event in client.generate(prompt, **asked):
            if isinstance(event, Chunk):
                arrivals.append(time.perf_counter() - begin)
            answer.take(event)
            if answer.completion is not None and arrivals:
                return Timed(answer.completion, arrivals[0], arrivals[-1])
        raise OutriderError("the stream ended without an answer")

    async def time_together(
        self, prompts: list[Prompt], cell: Cell, options: GenerateOptions, concurrency: int
    ) -> tuple[list[Timed], float]:
        """All answers, `concurrency` of them at once, and the seconds from the first request to the last token."""
        places = asyncio.Semaphore(concurrency)

        async def one(prompt: Prompt) -> Timed:
            async with places:
                return await self.time(prompt, cell, options)

        begin = time.perf_counter()
        runs = await asyncio.gather(*(one(prompt) for prompt in prompts))
        return runs, time.perf_counter() - begin

    async def memory(self) -> dict[str, dict[str, int]]:
        """Per role: resident bytes of the process, and bytes of weights."""
        workers = (await self.client.server_info()).workers
        weights = {f"{worker.role}-worker": worker.weight_bytes for worker in workers}
        return {
            role: {"resident_bytes": size, "weight_bytes": weights.get(role, 0)}
            for role, size in self.stack.resident_bytes().items()
        }

    async def worker_timings(self) -> list[dict[str, Any]]:
        """Per worker: role, model, and its own lines of what a pass costs (see `outrider.lm.timing`)."""
        found = []
        for told in await self._descriptions():
            timings = [asdict(timing) for timing in told.timings]
            found.append({"role": told.role, "model": told.model.model, "timings": timings})
        return found

    async def draft_pass_ms(self, num_context_tokens: float) -> float:
        """By the draft worker's own account, of one stream and one draft; 0 where there is none."""
        for told in await self._descriptions():
            if told.role == "draft":
                return expected_ms(told.timings, num_rows=1, num_context_tokens=num_context_tokens) or 0.0
        return 0.0

    async def heads(self) -> list[str]:
        """Drafters inside the target, as requests name them."""
        return [drafter.name for told in await self._descriptions() for drafter in told.target_drafters]

    async def cache_counters(self, role: str) -> CacheCounters:
        """Of the `draft` or `target` worker, as of now."""
        (told,) = (told for told in await self._descriptions() if told.role == role)
        return told.cache_counters

    async def _descriptions(self) -> list[WorkerDescription]:
        """What the workers themselves tell: the coordinator knows what they told up to a second ago."""
        from outrider.serving.channel import open_channel
        from outrider.serving.worker_calls import describe

        found = []
        for role, child in self.stack.processes.items():
            if role != "coordinator":
                async with open_channel(child.address) as channel:
                    found.append(await describe(channel, without_tokenizer=True, timeout_s=10.0))
        return found


@asynccontextmanager
async def bench_services(
    settings: TargetWorkerSettings,
    draft: str | None,
    common: GenerateOptions,
    speculation: GenerateOptions,
    *,
    draft_worker: Mapping[str, Any] | None = None,
    **target_worker: Any,
) -> AsyncIterator[Bench]:
    """Starts the three services for the target that `settings` names, workers with the settings given for each."""
    err.print("[dim]starting the services...[/]")
    workers: dict[str, Any] = {
        "target_worker": small_worker(settings.model, dtype=settings.dtype, heads=settings.heads, **target_worker),
        "draft_worker": small_worker(draft, dtype=settings.dtype, **(draft_worker or {})),
    }
    async with local_stack(settings.model, draft, **workers) as stack, connect(stack.address) as client:
        yield Bench(stack, client, await client.model_info(), common, speculation)
