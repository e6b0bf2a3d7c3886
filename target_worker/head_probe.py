"""Trying heads out before anybody is served: the target writes a little, the heads guess it, and are timed."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from outrider.drafting.proposal import Proposal
from outrider.lm.engine import Engine
from outrider.lm.heads import PROMPTS, ProbeText
from outrider.lm.heads.probe import NUM_TOKENS
from outrider.lm.interface import Forward, LoadedModel, Program, SequenceHandle, run_program
from outrider.sampling.params import SamplingParams, StoppingParams
from outrider.serving.messages import Opening
from outrider.serving.session_log import SessionLog
from target_worker.head_drafter import HeldHead

TIMED_DRAFTS = 4
NUM_TIMINGS = 5


async def try_out(heads: Sequence[HeldHead], loaded: LoadedModel, engine: Engine) -> None:
    """Calibrates and times each. Raises FailedPrecondition on one that was made for another model."""
    states = tuple(sorted({state for head in heads for state in head.states}))
    prompts = prompts_of(loaded, engine.model.context_length // 2)
    num_tokens = min(-(-NUM_TOKENS // len(prompts)), engine.model.context_length // 2)
    texts = await asyncio.gather(*(_written(engine, loaded, ids, num_tokens, states) for ids in prompts))
    for head in heads:
        await engine.run(_calibrate(head, loaded, states, texts))


async def _written(
    engine: Engine, loaded: LoadedModel, prompt_ids: list[int], num_tokens: int, states: tuple[int, ...]
) -> ProbeText:
    sequence = await engine.open_sequence(len(prompt_ids) + num_tokens)
    try:
        return await engine.run(_write(sequence, loaded, prompt_ids, num_tokens, states))
    finally:
        engine.close_sequence(sequence)


def _write(
    sequence: SequenceHandle, loaded: LoadedModel, prompt_ids: list[int], num_tokens: int, states: tuple[int, ...]
) -> Program[ProbeText]:
    """A greedy text of that length: it is not ended, since what is measured needs its length."""
    ids, rows = list(prompt_ids), list(prompt_ids)
    while True:
        result = yield Forward(sequence, rows, num_logits=1)
        row = result.logits[-1].copy()
        row[list(loaded.description.eos_token_ids)] = -np.inf
        ids.append(int(row.argmax()))
        if len(ids) == len(prompt_ids) + num_tokens:
            return ProbeText(ids, len(prompt_ids), sequence.features(0, len(ids) - 1, states))
        rows = ids[-1:]


def _calibrate(head: HeldHead, loaded: LoadedModel, kept: tuple[int, ...], texts: Sequence[ProbeText]) -> Program[None]:
    """On the engine's thread, where the head will run."""
    head.calibrate([ProbeText(t.token_ids, t.num_prompt_tokens, _of(t.features, kept, head.states)) for t in texts])
    longest = max(texts, key=lambda text: len(text.token_ids))
    head.told(*_timed(head, loaded, longest, kept))
    return
    yield


def _of(features: Any, kept: tuple[int, ...], states: tuple[int, ...]) -> Any:
    """[n, len(states) * H] of [n, len(kept) * H]."""
    by_state = features.unflatten(-1, (len(kept), -1))
    return by_state[:, [kept.index(state) for state in states]].flatten(1)


class _WrittenSequence:
    """A text as a session's cache would hold it."""

    def __init__(self, text: ProbeText, kept: tuple[int, ...]) -> None:
        self._text, self._kept = text, kept
        self.token_ids = list(text.token_ids[:-1])
        self.num_computed = len(self.token_ids)

    def features(self, start: int, end: int, states: Sequence[int]) -> Any:
        return _of(self._text.features[start:end], self._kept, tuple(states))


def _timed(head: HeldHead, loaded: LoadedModel, text: ProbeText, kept: tuple[int, ...]) -> tuple[float, float]:
    """(ms of a round's first draft, ms of each further one), the least of some, drawn ones."""
    opening = Opening(
        epoch=0,
        prompt_ids=text.token_ids,
        sampling=SamplingParams(),
        stopping=StoppingParams(max_tokens=2 * TIMED_DRAFTS),
    )
    log = SessionLog(opening, vocab_size=loaded.description.vocab_size)
    sequence: Any = _WrittenSequence(text, kept)
    drafter = head.for_session(log, sequence)

    def ms(num_draft_tokens: int) -> tuple[float, Proposal]:
        started_ns = time.perf_counter_ns()
        proposal = run_program(drafter.propose(num_draft_tokens), None)
        return (time.perf_counter_ns() - started_ns) / 1e6, proposal

    ms(TIMED_DRAFTS)  # reads the text; the ones to come read its last token again, as rounds do
    first = min(ms(1)[0] for _ in range(NUM_TIMINGS))
    times, proposals = zip(*(ms(TIMED_DRAFTS) for _ in range(NUM_TIMINGS)), strict=True)
    num_further = max(1, len(proposals[0]) - 1)
    return first, max(0.0, (min(times) - first) / num_further)


def prompts_of(loaded: LoadedModel, max_tokens: int) -> list[list[int]]:
    """In the model's own chat format where it has one."""
    tokenizer, found = loaded.tokenizer, []
    for prompt in PROMPTS:
        if loaded.description.chat_template:
            turns = [{"role": "user", "content": prompt}]
            text = tokenizer.apply_chat_template(turns, add_generation_prompt=True, tokenize=False)
            ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        else:
            ids = tokenizer(prompt)["input_ids"]
        found.append([token_id for token_id in ids if token_id < loaded.description.vocab_size][:max_tokens])
    return found
