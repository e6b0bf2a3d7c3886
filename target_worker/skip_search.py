"""Which layers to leave out for drafting, by measurement: the ones that turn the stream least, as many as pay best.

How little a layer does to the residual stream (the cosine of what goes in and what comes out, as in ShortGPT, arXiv
2403.03853) is read from one pass per text. How often the rest then still says the target's next token is measured for
several numbers of layers, on text of the target's own.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from outrider.errors import InvalidArgument
from outrider.lm.engine import Engine
from outrider.lm.interface import Forward, LanguageModel, Program
from outrider.lm.states import feature_model

NUM_TOKENS = 200
"""To be written in all, shared among the prompts."""
SHARES = (1 / 6, 1 / 4, 1 / 3, 5 / 12, 1 / 2)
"""Of the layers, to be tried out."""
MAX_DRAFTS = 6
BLOCK_SIZE, MAX_ROWS = 16, 512

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Skipping:
    """Without `layers` the target says its own next token with this frequency; `speedup` is what follows from it and
    from the number of layers, for the best number of drafts."""

    layers: tuple[int, ...]
    agreement: float
    num_tokens: int
    speedup: float


@dataclass(frozen=True, slots=True)
class _Text:
    token_ids: list[int]
    num_prompt_tokens: int


def search(model: LanguageModel, prompts: Sequence[Sequence[int]]) -> list[Skipping]:
    """All that were tried, the best first. Before the engine that serves takes the model; leaves it to keep no states
    and to leave out no layers. Raises InvalidArgument for a model whose layers cannot be left out."""
    keeping: Any = feature_model(model)
    if not hasattr(model, "skip_layers") or keeping.num_layers < 3:
        raise InvalidArgument("heads: this model cannot leave out layers", field="heads")
    num_layers = keeping.num_layers
    num_tokens = min(-(-NUM_TOKENS // len(prompts)), model.context_length // 2)
    longest = max(map(len, prompts)) + num_tokens
    num_blocks = len(prompts) * -(-longest // BLOCK_SIZE)

    def engine() -> Engine:
        return Engine(
            model, num_blocks=num_blocks, block_size=BLOCK_SIZE, max_batch_tokens=MAX_ROWS, max_waiting_sessions=0
        )

    keeping.keep_features(range(num_layers))
    texts, turns = asyncio.run(_write(engine(), prompts, num_tokens, num_layers))
    keeping.keep_features(())
    order = [int(layer) for layer in np.argsort(turns, kind="stable") + 1]
    tried = []
    for count in sorted({max(1, round(share * num_layers)) for share in SHARES}):
        layers = tuple(sorted(order[: min(count, len(order))]))
        keeping.skip_layers(layers)
        num_right, num_said = asyncio.run(_agreement(engine(), texts))
        agreement = num_right / num_said
        tried.append(Skipping(layers, agreement, num_said, speedup(agreement, 1 - len(layers) / num_layers)))
        log.info("without layers %s: agreement %.3f, expected speedup %.2f", layers, agreement, tried[-1].speedup)
    keeping.skip_layers(())
    return sorted(tried, key=lambda one: -one.speedup)


def speedup(agreement: float, cost: float) -> float:
    """Tokens per pass of the target over what they cost in passes, with drafts that stand independently of each other
    and cost `cost` passes each; for the best number of drafts."""
    lengths = np.cumsum(agreement ** np.arange(MAX_DRAFTS + 1))
    return float((lengths[1:] / (1 + cost * np.arange(1, MAX_DRAFTS + 1))).max())


async def _write(
    engine: Engine, prompts: Sequence[Sequence[int]], num_tokens: int, num_layers: int
) -> tuple[list[_Text], np.ndarray]:
    """Greedy texts, and 1 - cosine over layers 1 to num_layers - 2: the first and the last are never left out."""
    engine.start()
    try:
        sequences = [await engine.open_sequence(len(ids) + num_tokens) for ids in prompts]
        written = await asyncio.gather(
            *(engine.run(_write_one(s, ids, num_tokens, num_layers)) for s, ids in zip(sequences, prompts, strict=True))
        )
    finally:
        engine.stop()
    return [text for text, _ in written], np.mean([turns for _, turns in written], 0)


def _write_one(
    sequence: Any, prompt: Sequence[int], num_tokens: int, num_layers: int
) -> Program[tuple[_Text, np.ndarray]]:
    ids = list(prompt)
    rows: Sequence[int] = prompt
    for _ in range(num_tokens):
        result = yield Forward(sequence, rows)
        ids.append(int(result.logits[-1].argmax()))
        rows = ids[-1:]
    states = np.asarray(sequence.features(len(prompt), len(ids) - 1, tuple(range(num_layers))).float().cpu())
    states = states.reshape(len(states), num_layers, -1)
    states /= np.linalg.norm(states, axis=-1, keepdims=True)
    turns = 1 - (states[:, 1:-1] * states[:, 2:]).sum(-1).mean(0)
    return _Text(ids, len(prompt)), turns


async def _agreement(engine: Engine, texts: Sequence[_Text]) -> tuple[int, int]:
    """(tokens the target said that it also says without the layers, all that it said)."""
    engine.start()
    try:
        sequences = [await engine.open_sequence(len(text.token_ids), skips=True) for text in texts]
        counts = await asyncio.gather(*(engine.run(_agree(s, text)) for s, text in zip(sequences, texts, strict=True)))
    finally:
        engine.stop()
    return sum(counts), sum(len(text.token_ids) - text.num_prompt_tokens for text in texts)


def _agree(sequence: Any, text: _Text) -> Program[int]:
    said = text.token_ids[text.num_prompt_tokens :]
    result = yield Forward(sequence, text.token_ids[:-1], num_logits=len(said))
    return int((result.logits.argmax(-1) == said).sum())
