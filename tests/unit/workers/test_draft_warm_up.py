"""A draft worker's first proposals are made before it serves: what is done but once is waited for by no stream."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Iterator

import pytest
from stack import start

import draft_worker.server as draft_server
from draft_worker import warm_up
from draft_worker.warm_up import NUM_DRAFT_TOKENS, NUM_PROMPT_TOKENS, SAMPLINGS, WarmUp
from outrider.errors import InvalidArgument, ResourceExhausted
from outrider.lm.build import build_engine
from outrider.lm.engine import Engine
from outrider.lm.interface import LoadedModel
from outrider.lm.loading import load_model
from outrider.settings import DraftWorkerSettings

SETTINGS = DraftWorkerSettings(model="toy:vocab=64,context=64", drafters=("model", "tree"), port=0)


def real(is_simulated: bool = False) -> LoadedModel:
    """The toy, taken for a model that has something to warm."""
    loaded = load_model(SETTINGS)
    return dataclasses.replace(loaded, description=dataclasses.replace(loaded.description, simulated=is_simulated))


@pytest.fixture
def loaded() -> LoadedModel:
    return real()


@pytest.fixture
def engine(loaded: LoadedModel) -> Iterator[Engine]:
    one = build_engine(loaded, SETTINGS)
    one.start()
    yield one
    one.stop()


async def test_each_drafter_proposes_greedily_and_sampled_and_keeps_nothing(
    loaded: LoadedModel, engine: Engine
) -> None:
    num_drafts = await warm_up.warm_up(loaded, engine, SETTINGS)
    assert num_drafts >= len(SETTINGS.drafters) * len(SAMPLINGS) * NUM_DRAFT_TOKENS
    stats = engine.stats()
    assert stats.num_model_calls >= len(SETTINGS.drafters) * len(SAMPLINGS) * NUM_DRAFT_TOKENS
    assert stats.num_rows > NUM_PROMPT_TOKENS
    assert (stats.num_sequences, stats.num_free_blocks) == (0, stats.num_blocks)


async def test_a_model_that_cannot_draft_is_warned_of_and_served(
    loaded: LoadedModel, engine: Engine, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def full(length: int) -> None:
        raise ResourceExhausted("the cache is too small")

    monkeypatch.setattr(engine, "open_sequence", full)
    equipment = WarmUp(SETTINGS)
    equipment.prepare(loaded)
    await equipment.try_out(engine)
    assert "could not be warmed up" in caplog.text
    assert "the cache is too small" in caplog.text


async def test_a_drafter_that_cannot_be_offered_is_refused_in_its_own_words() -> None:
    settings = DraftWorkerSettings(model=SETTINGS.model, drafters=("text",), target_tokenizer="another", port=0)
    with pytest.raises(InvalidArgument, match="text translates between tokenizers"):
        await start(draft_server.serve, settings, loaded=real())


async def test_what_is_simulated_has_nothing_to_warm(engine: Engine) -> None:
    equipment = WarmUp(SETTINGS)
    equipment.prepare(real(is_simulated=True))
    await equipment.try_out(engine)
    assert engine.stats().num_model_calls == 0


async def test_a_draft_worker_is_warm_before_it_serves(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    server = await start(draft_server.serve, SETTINGS, loaded=real())
    try:
        assert "warmed up: " in caplog.text
    finally:
        await server.close()
