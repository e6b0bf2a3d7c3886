"""A draft worker's first proposals, made before anybody is served: what a process does but once, it does while it
loads, and no stream waits for it."""

from __future__ import annotations

import logging
import time

from draft_worker.session import DraftSession
from draft_worker.text_drafter import NAME as TEXT
from outrider.errors import OutriderError
from outrider.lm.engine import Engine
from outrider.lm.interface import LoadedModel
from outrider.sampling.params import SamplingParams, StoppingParams
from outrider.serving.equipment import Equipment
from outrider.serving.messages import DraftOpening
from outrider.settings import DraftWorkerSettings

log = logging.getLogger(__name__)

NUM_PROMPT_TOKENS = 32
NUM_DRAFT_TOKENS = 3
SAMPLINGS = (SamplingParams(temperature=0.0), SamplingParams())


class WarmUp(Equipment):
    """Of a worker with a draft model. A simulated model has nothing to warm."""

    def __init__(self, settings: DraftWorkerSettings) -> None:
        self._settings = settings
        self._loaded: LoadedModel | None = None

    def prepare(self, loaded: LoadedModel) -> None:
        self._loaded = loaded

    async def try_out(self, engine: Engine) -> None:
        """A model that cannot draft now is warned of, and served: it costs speed only."""
        assert self._loaded is not None, "prepared first"
        if self._loaded.description.simulated:
            return
        started = time.perf_counter()
        try:
            num_drafts = await warm_up(self._loaded, engine, self._settings)
        except OutriderError as error:
            log.warning("the draft model could not be warmed up, first drafts may come late: %s", error)
            return
        log.info("warmed up: %d drafts in %.1f s", num_drafts, time.perf_counter() - started)


async def warm_up(loaded: LoadedModel, engine: Engine, settings: DraftWorkerSettings) -> int:
    """A session of each drafter, greedy and sampled: a prompt's pass, then a proposal. How many drafts were made.
    Raises OutriderError."""
    about = loaded.description
    num_prompt_tokens = max(1, min(NUM_PROMPT_TOKENS, about.context_length // 2))
    num_drafts = 0
    for drafter in settings.drafters:
        if drafter == TEXT and loaded.translator is None:
            continue  # the worker is about to refuse it
        for sampling in SAMPLINGS:
            opening = DraftOpening(
                epoch=1,
                prompt_ids=[(1 + 7 * place) % about.vocab_size for place in range(num_prompt_tokens)],
                sampling=sampling,
                stopping=StoppingParams(max_tokens=2 * NUM_DRAFT_TOKENS),
                drafter=drafter,
            )
            session = DraftSession.of(opening, loaded, settings)
            sequence = await engine.open_sequence(session.reserved_length)
            try:
                session.sequence = sequence
                await engine.run(session.prefill())
                wanted = min(NUM_DRAFT_TOKENS, settings.max_draft_tokens)
                proposal = await engine.run(session.advance(session.log.header, (), wanted))
            finally:
                engine.close_sequence(sequence)
            num_drafts += len(proposal) if proposal is not None else 0
    return num_drafts
