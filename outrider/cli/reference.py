"""The target's own distributions, computed in this process by fresh forwards of whole prefixes: no service, no cache
reuse, no draft. What `outrider verify` holds the services' tokens against, and the plain loop that bench compares with.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from outrider.cli.console import progress
from outrider.lm.build import build_engine
from outrider.lm.interface import Forward, ForwardResult, LoadedModel, PackedBatch, Program, Segment
from outrider.lm.loading import load_model
from outrider.sampling.distribution import distribution, greedy_token
from outrider.sampling.history import History
from outrider.sampling.params import SamplingParams, StoppingParams
from outrider.settings import TargetWorkerSettings

_BLOCK_SIZE = 16
_NUM_BLOCKS = 256
_ENDLESS = StoppingParams(max_tokens=1 << 20)


def load_target(settings: TargetWorkerSettings) -> LoadedModel:
    """Loads the model with a progress bar on stderr."""
    with progress(f"loading {settings.model}") as report:
        return load_model(settings, on_progress=report)


class Reference:
    """Distributions of the target under fixed sampling parameters."""

    def __init__(self, loaded: LoadedModel, params: SamplingParams) -> None:
        self._model = loaded.model
        self._params = params
        self._lock = threading.Lock()
        self._model.allocate_cache(_NUM_BLOCKS, _BLOCK_SIZE)

    def distributions(self, prompt_ids: Sequence[int], output_ids: Sequence[int]) -> list[np.ndarray]:
        """p of each output token given all before it: float64[V] each, by one forward over the whole prefix."""
        ids = [*prompt_ids, *output_ids[:-1]]
        blocks = range(-(-len(ids) // _BLOCK_SIZE))
        batch = PackedBatch((Segment(0, ids, blocks, num_logits=len(output_ids)),))
        with self._lock:  # a model is called from one thread at a time
            logits = self._model.forward(batch)
        return [
            distribution(row, self._params, _ENDLESS, History(prompt_ids, output_ids[:index]))
            for index, row in enumerate(logits)
        ]


class PlainLoop:
    """Greedy decoding on an engine of our own: the pace that the service's plain decoding is measured against."""

    def __init__(self, loaded: LoadedModel, settings: TargetWorkerSettings) -> None:
        self._engine = build_engine(loaded, settings)

    async def __aenter__(self) -> PlainLoop:
        self._engine.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        self._engine.stop()

    async def decode(
        self, prompt_ids: Sequence[int], num_tokens: int, params: SamplingParams
    ) -> tuple[list[int], float]:
        """(token ids, seconds from the request to the last token)."""
        started = time.perf_counter()
        sequence = await self._engine.open_sequence(len(prompt_ids) + num_tokens + 1)
        try:
            token_ids = await self._engine.run(_decode(sequence, prompt_ids, num_tokens, params))
        finally:
            self._engine.close_sequence(sequence)
        return token_ids, time.perf_counter() - started


def _decode(sequence: Any, prompt_ids: Sequence[int], num_tokens: int, params: SamplingParams) -> Program[list[int]]:
    history, ids = History(prompt_ids), list(prompt_ids)
    token_ids: list[int] = []
    for _ in range(num_tokens):
        result: ForwardResult = yield Forward(sequence, ids)
        token_ids.append(greedy_token(result.logits[-1], params, _ENDLESS, history))
        history.push(token_ids[-1])
        ids = token_ids[-1:]
    return token_ids
