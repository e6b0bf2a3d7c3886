"""A target that drafts with its own layers, on the engine: what is computed is counted, what is told was measured."""

import asyncio
import dataclasses

import pytest

torch = pytest.importorskip("torch")

from exit_toys import EXIT_LAYER, NUM_LAYERS, TinyTarget  # noqa: E402
from session_loops import PROMPT, RULES  # noqa: E402

from outrider.errors import FailedPrecondition, InvalidArgument  # noqa: E402
from outrider.lm.adapter import TransformersModel  # noqa: E402
from outrider.lm.engine import Engine  # noqa: E402
from outrider.lm.interface import LoadedModel, ModelDescription  # noqa: E402
from outrider.sampling.params import Finish, StoppingParams  # noqa: E402
from outrider.serving.messages import TargetOpening  # noqa: E402
from target_worker.exit_drafter import HeldExit  # noqa: E402
from target_worker.self_probe import try_out  # noqa: E402
from target_worker.session import TargetSession  # noqa: E402
from target_worker.skip_drafter import HeldSkip  # noqa: E402
from target_worker.skip_search import search, speedup  # noqa: E402

VOCAB_SIZE, MAX_TOKENS = 16, 20


def model():
    return TransformersModel(TinyTarget(VOCAB_SIZE).model, vocab_size=VOCAB_SIZE, context_length=256)


def loaded(own):
    return LoadedModel(own, ModelDescription("tiny", "", "", VOCAB_SIZE, 256))


async def engine_of(own):
    engine = Engine(own, num_blocks=64, block_size=4, max_batch_tokens=64, max_waiting_sessions=4)
    engine.start()
    return engine


async def stream(engine, sampling, gamma=0, held=None):
    """Verdicts of one stream, and the session."""
    opening = TargetOpening(
        epoch=1,
        prompt_ids=PROMPT,
        max_draft_tokens=8,
        sampling=sampling,
        stopping=StoppingParams(max_tokens=MAX_TOKENS),
    )
    limits = dict(vocab_size=VOCAB_SIZE, context_length=256, max_draft_tokens=8)
    session = TargetSession(opening, **limits, drafters={"own": held} if held else {})
    session.sequence = await engine.open_sequence(session.reserved_length)
    try:
        verdicts = [await engine.run(session.open())]
        while session.finish is Finish.NONE:
            verdicts.append(await engine.run(session.verify(session.log.header, num_draft_tokens=gamma)))
            assert not verdicts[-1].proposal_fault
    finally:
        session.close()
        engine.close_sequence(session.sequence)
    return verdicts


def text_of(verdicts):
    return [token_id for verdict in verdicts for token_id in verdict.committed_ids]


def exit_parts():
    own = model()
    own.exit_after(EXIT_LAYER)
    return own, HeldExit("own", "folder", TinyTarget(VOCAB_SIZE).adapter(range(1, 15)), VOCAB_SIZE)


def skip_parts():
    own = model()
    return own, HeldSkip("own", (2,), own)


@pytest.mark.parametrize("rule", ["greedy", "coupled"])
@pytest.mark.parametrize("parts", [exit_parts, skip_parts])
def test_text_is_that_of_plain_decoding(parts, rule):
    async def main():
        own, held = parts()
        engine = await engine_of(own)
        if isinstance(held, HeldSkip):
            held.attach(engine)
        try:
            plain = await stream(engine, RULES[rule])
            together = await asyncio.gather(*(stream(engine, RULES[rule], gamma, held) for gamma in (1, 3, 4)))
            for _ in range(100):  # second sequences are given back on the event loop
                if engine.stats().num_sequences == 0:
                    break
                await asyncio.sleep(0.01)
            return plain, together, engine.stats()
        finally:
            engine.stop()

    plain, together, stats = asyncio.run(main())
    for verdicts in together:
        assert text_of(verdicts) == text_of(plain)
        assert sum(verdict.num_draft_tokens for verdict in verdicts) > 0, "INCONCLUSIVE"
    assert sum(v.num_accepted for verdicts in together for v in verdicts) > 0, "INCONCLUSIVE"
    assert (stats.num_sequences, stats.num_free_blocks) == (0, stats.num_blocks)


@pytest.mark.parametrize("gamma", [1, 4])
def test_drafting_early_computes_no_layer_twice(gamma):
    """Rows times layers: as many as the passes of the rounds alone have, drafts included."""

    async def main():
        own, held = exit_parts()
        engine = await engine_of(own)
        try:
            return await stream(engine, RULES["greedy"], gamma, held), engine.stats()
        finally:
            engine.stop()

    verdicts, stats = asyncio.run(main())
    num_drafted = sum(verdict.num_draft_tokens for verdict in verdicts)
    assert num_drafted > 0, "INCONCLUSIVE"
    num_rows = len(PROMPT) + (len(verdicts) - 1) + num_drafted
    assert stats.num_layer_rows == num_rows * NUM_LAYERS


@pytest.mark.parametrize("parts", [exit_parts, skip_parts])
def test_what_is_told_was_measured(parts):
    async def main():
        own, held = parts()
        engine = await engine_of(own)
        if isinstance(held, HeldSkip):
            held.attach(engine)
        try:
            return held, await try_out(held, loaded(own), engine, [PROMPT, (5, 6)])
        finally:
            engine.stop()

    held, told = asyncio.run(main())
    assert told["num_probe_tokens"] > 10
    assert 0 <= told["agreement"] <= 1
    assert told["first_draft_ms"] > 0
    assert dataclasses.replace(held.description, **told).agreement == told["agreement"]


def test_one_that_cannot_draft_is_refused_at_start():
    class Broken:
        description = exit_parts()[1].description

        def for_session(self, log, sequence):
            raise RuntimeError("no weights")

    async def main():
        engine = await engine_of(model())
        try:
            await try_out(Broken(), loaded(engine.model), engine, [PROMPT])
        finally:
            engine.stop()

    with pytest.raises(FailedPrecondition, match="no weights"):
        asyncio.run(main())


def test_the_search_takes_what_pays_best_of_what_it_measured():
    own = model()
    tried = search(own, [PROMPT, (7, 8, 9)])
    assert len(tried) >= 2
    for one in tried:
        assert set(one.layers) <= set(range(1, NUM_LAYERS - 1))
        assert one.num_tokens == 200
        assert one.speedup == speedup(one.agreement, 1 - len(one.layers) / NUM_LAYERS)
    assert [one.speedup for one in tried] == sorted((one.speedup for one in tried), reverse=True)
    for one in tried:
        assert one.agreement == naive_agreement(one.layers), one


def test_layers_that_are_not_there_are_refused():
    with pytest.raises(InvalidArgument, match="layers") as error:
        HeldSkip("own", (NUM_LAYERS,), model())
    assert error.value.field == "heads"


def test_speedup_by_hand():
    assert speedup(0.0, 0.5) == pytest.approx(1 / 1.5)
    assert speedup(1.0, 0.5) == pytest.approx(7 / 4)
    assert speedup(0.5, 0.25) == pytest.approx(max(1.5 / 1.25, 1.75 / 1.5, 1.875 / 1.75))


@torch.inference_mode()
def naive_agreement(layers):
    """With transformers' own modules, the layers taken out of the list."""
    whole, without = TinyTarget(VOCAB_SIZE).model, TinyTarget(VOCAB_SIZE).model
    kept = [layer for index, layer in enumerate(without.model.layers) if index not in layers]
    without.model.layers = torch.nn.ModuleList(kept)
    without.config.num_hidden_layers = len(kept)
    num_right = 0
    for prompt in (PROMPT, (7, 8, 9)):
        ids = list(prompt)
        for _ in range(100):
            ids.append(int(whole(input_ids=torch.tensor([ids])).logits[0, -1].argmax()))
        guesses = without(input_ids=torch.tensor([ids[:-1]]), use_cache=False).logits[0].argmax(-1)
        num_right += int((guesses[len(prompt) - 1 :] == torch.tensor(ids[len(prompt) :])).sum())
    return num_right / 200
