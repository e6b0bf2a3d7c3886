"""First layers before the others, and layers left out: logits of whole rows stay what they are in any company."""

import copy
from collections import Counter

import numpy as np
import pytest
from conftest import scaled
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st
from tree_histories import PARTIAL_KINDS, STATE_KINDS, History, partial_histories

import outrider.lm  # noqa: F401  # before torch: it says how torch's threads wait
from outrider.lm.toy import ToyModel, parse_toy

torch = pytest.importorskip("torch")

from lm_programs import started  # noqa: E402
from test_decoder_loop import BLOCKS, loop_and_modules, texts  # noqa: E402
from test_decoder_loop import KINDS as LOOP_KINDS  # noqa: E402
from tiny_models import (  # noqa: E402
    CONTEXT_LENGTH,
    FAMILIES,
    VOCAB_SIZE,
    stock_logits,
    stock_states,
    tiny,
    tiny_pair,
)

from outrider.errors import Internal, InvalidArgument  # noqa: E402
from outrider.lm.adapter import TransformersModel  # noqa: E402
from outrider.lm.engine import Engine  # noqa: E402
from outrider.lm.gpu.model import GpuModel  # noqa: E402
from outrider.lm.interface import Forward, PackedBatch, Segment  # noqa: E402
from outrider.lm.ranks import TensorParallelModel  # noqa: E402

SIZES = {"vocab_size": VOCAB_SIZE, "context_length": CONTEXT_LENGTH}
SEED = 3
TOY = parse_toy("toy:vocab=16,order=0,seed=4")
EXIT = 2


def run(make_model, num_histories, check, **checks):
    counts = Counter()

    @seed(SEED)
    @settings(
        max_examples=num_histories,
        deadline=None,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(history=partial_histories, own_seed=st.integers(0, 2**32 - 1))
    def any_history(history, own_seed):
        History(make_model(), check, counts, own_seed, **checks).run(history)

    any_history()
    return counts


class Remembered(dict):
    def __init__(self, compute):
        super().__init__()
        self.compute = compute

    def __missing__(self, text):
        self[text] = self.compute(list(text))
        return self[text]


def test_any_history_of_a_toy():
    """A toy caches a half computed token in another form, and reads its context as it is cached."""
    known = ToyModel(TOY)
    states = Remembered(lambda text: known.features_for(text, (1, 3)))

    def make():
        model = ToyModel(TOY)
        model.exit_after(EXIT)
        model.skip_layers((1,))
        return model

    def check(text, logits):
        assert np.array_equal(logits, known.logits_for(text))

    def check_skipping(text, logits):
        assert np.array_equal(logits, known.logits_for(text, skips=True))

    def check_early(text, row):
        assert np.array_equal(row, known.features_for(text, (EXIT,)))

    def check_states(text, row):
        assert np.array_equal(row, states[tuple(text)])

    counts = run(
        make,
        scaled(1000, at_least=500),
        check,
        check_states=check_states,
        states=(1, 3),
        check_early=check_early,
        check_skipping=check_skipping,
    )
    assert all(counts[kind] for kind in (*STATE_KINDS, *PARTIAL_KINDS)), counts


def without(stock, layers):
    """A stock model that has lost these layers."""
    other = copy.deepcopy(stock)
    kept = [n for n in range(len(stock.model.layers)) if n not in layers]
    other.model.layers = torch.nn.ModuleList([other.model.layers[n] for n in kept])
    other.config.num_hidden_layers = len(kept)
    if getattr(other.config, "layer_types", None):
        other.config.layer_types = [other.config.layer_types[n] for n in kept]
    return other


@pytest.mark.parametrize("family", ["llama", "qwen2_sliding", "gemma2"])
def test_any_history_of_a_model(family):
    ours, stock = tiny_pair(family)
    fewer = without(stock, (1,))
    model = TransformersModel(ours, **SIZES)
    model.exit_after(1)
    model.skip_layers((1,))
    logits = Remembered(lambda text: stock_logits(stock, text)[-1])
    skipping = Remembered(lambda text: stock_logits(fewer, text)[-1])
    states = Remembered(lambda text: stock_states(stock, text, (0, 1, 2, -1))[-1].reshape(4, -1))

    def compare(row, expected):
        assert np.abs(np.asarray(row) - expected).max() < 1e-4

    counts = run(
        lambda: model,
        scaled(60, at_least=6),
        lambda text, row: compare(row, logits[tuple(text)]),
        check_states=lambda text, row: compare(row, states[tuple(text)][[2, 3]].reshape(-1)),
        states=(2, -1),
        check_early=lambda text, row: compare(row, states[tuple(text)][1]),
        check_skipping=lambda text, row: compare(row, skipping[tuple(text)]),
    )
    assert all(counts[kind] for kind in ("early", "went_on", "early_beside_others", "skipping")), counts


def parts_and_whole(model):
    """Logits of three texts, computed in mixed passes of whole, early and half done rows; and as whole ones."""
    first, second, third = texts()
    passes = [
        [Segment(0, first[:7], BLOCKS[0], 1), Segment(0, second[:3], BLOCKS[1], 0, num_early=3)],
        [Segment(7, first[7:8], BLOCKS[0], 0, num_early=1), Segment(0, third[:9], BLOCKS[2], 1)],
        [Segment(8, first[8:10], BLOCKS[0], 0, num_early=2), Segment(0, second[:5], BLOCKS[1], 2, num_kept=3)],
        [
            Segment(7, first[7:11], BLOCKS[0], 4, num_kept=3),
            Segment(5, second[5:6], BLOCKS[1], 1),
            Segment(9, third[9:12], BLOCKS[2], 0, num_early=2),
        ],
        [Segment(10, third[10:12], BLOCKS[2], 2, num_kept=2)],
        [
            Segment(11, first[11:12], BLOCKS[0], 1),
            Segment(6, second[6:9], BLOCKS[1], 3),
            Segment(12, third[12:13], BLOCKS[2], 1),
        ],
    ]
    model.allocate_cache(6, 16)
    logits = [model.forward(PackedBatch(tuple(p))).copy() for p in passes]
    model.allocate_cache(6, 16)
    whole = {}
    for table, text, end in zip(BLOCKS, (first, second, third), (12, 9, 13), strict=True):
        whole[tuple(table)] = model.forward(PackedBatch((Segment(0, text[:end], table, end),))).copy()
    expected = []
    for segments in passes:
        ends = [(s, s.num_cached_tokens + len(s.token_ids)) for s in segments]
        expected.append(np.concatenate([whole[tuple(s.block_table)][end - s.num_logits : end] for s, end in ends]))
    return logits, expected


@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("family", LOOP_KINDS)
def test_mixed_passes_of_the_plain_loop_and_of_modules(family, exact):
    """Under exact numerics to the bit."""
    for model in loop_and_modules(*LOOP_KINDS[family], exact=exact)[:2]:
        model.exit_after(EXIT)
        for logits, expected in zip(*parts_and_whole(model), strict=True):
            assert logits.shape == expected.shape
            if exact:
                assert logits.tobytes() == expected.tobytes()
            assert np.abs(logits - expected).max(initial=0.0) < 1e-3


@pytest.mark.parametrize("family", FAMILIES)
def test_mixed_passes_of_every_family(family):
    model = TransformersModel(tiny_pair(family)[0], **SIZES)
    model.keep_features((0, -1))
    model.exit_after(1)
    for logits, expected in zip(*parts_and_whole(model), strict=True):
        assert np.abs(logits - expected).max(initial=0.0) < 1e-4
    assert not any("forward" in layer.__dict__ for layer in model._model.model.layers)


@pytest.mark.parametrize("is_loop", [True, False])
def test_skipping_rows_are_those_of_a_model_without_these_layers(is_loop):
    loop, modules, weights = loop_and_modules(*FAMILIES["qwen3"])
    model = loop if is_loop else modules
    model.skip_layers((1,))
    model.allocate_cache(6, 16)
    first, second, _ = texts()
    fewer, whole = stock_logits(without(weights, (1,)), first), stock_logits(weights, second)
    for start, end in ((0, 9), (9, 10), (10, 15)):
        logits = model.forward(
            PackedBatch(
                (
                    Segment(start, first[start:end], BLOCKS[0], end - start, skips=True),
                    Segment(start, second[start:end], BLOCKS[1], end - start),
                )
            )
        )
        expected = np.concatenate([fewer[start:end], whole[start:end]])
        assert np.abs(logits - expected).max() < 1e-3


@pytest.mark.parametrize("kind", ["toy", "loop", "modules"])
async def test_drafting_and_verifying_runs_every_layer_once_a_token(kind):
    """And the texts of early rows that were rejected leave no trace."""
    model = ToyModel(TOY) if kind == "toy" else loop_and_modules(*FAMILIES["llama"])[kind == "modules"]
    model.exit_after(EXIT)
    engine = Engine(model, num_blocks=32, block_size=4, max_batch_tokens=32, max_waiting_sessions=0)
    gamma, prompt, last, drafts = 4, [5, 9, 2, 7, 1], 3, [8, 1, 12, 4]
    with started(engine):
        sequence = await engine.open_sequence(40)
        other = await engine.open_sequence(40)

        def plain(ids):
            result = yield Forward(other, ids, gamma + 1)
            return result.logits.copy()

        def speculate(ids):
            yield Forward(sequence, prompt)
            for draft in ([last, 11, 11], [last, *ids[:-1]]):
                sequence.forget_early()
                for number, token in enumerate(draft):
                    yield Forward(sequence, [token], 0, num_layers=EXIT)
                    place = sequence.length + number
                    assert sequence.features(place, place + 1, (EXIT,)).shape == (1, model.hidden_size)
                    assert (sequence.length, len(sequence.early_ids)) == (len(prompt), number + 1)
                if draft[1] == 11:
                    before = engine.stats().num_layer_rows
            result = yield Forward(sequence, [last, *ids], gamma + 1)
            return result.logits.copy(), before

        logits, before = await engine.run(speculate(drafts))
        assert engine.stats().num_layer_rows - before == (gamma + 1) * model.num_layers
        assert sequence.early_ids == []
        assert sequence.token_ids == [*prompt, last, *drafts]
        expected = await engine.run(plain([*prompt, last, *drafts]))
        assert np.abs(logits - expected).max() < 1e-4


async def test_forwards_that_cannot_be_are_dropped_alone():
    model = ToyModel(TOY)
    model.exit_after(EXIT)
    engine = Engine(model, num_blocks=16, block_size=4, max_batch_tokens=32, max_waiting_sessions=0)
    with started(engine):
        sequence = await engine.open_sequence(6)

        def ask(**kwargs):
            yield Forward(sequence, [1, 2], **kwargs)

        for kwargs, why in (
            ({"num_logits": 0, "num_layers": 1}, "stops after 1 layers; rows of its sequence may stop after 2"),
            ({"num_logits": 1, "num_layers": 2}, "has logits"),
            ({"num_logits": 0, "num_layers": 2, "parents": (-1, -1)}, "or a tree"),
        ):
            with pytest.raises(Internal, match=why):
                await engine.run(ask(**kwargs))
        for _ in range(3):
            await engine.run(ask(num_logits=0, num_layers=2))
        with pytest.raises(Internal, match="exceed the 6"):
            await engine.run(ask(num_logits=0, num_layers=2))
        with pytest.raises(Internal, match="told of none"):
            await engine.open_sequence(6, skips=True)
        assert sequence.early_ids == [1, 2] * 3


def test_what_cannot_be_is_refused_by_name():
    for model in (TransformersModel(tiny("Llama"), **SIZES), ToyModel(TOY)):
        for wrong in (model.num_layers, -1):
            with pytest.raises(InvalidArgument, match=f"{model.num_layers}"):
                model.exit_after(wrong)
        with pytest.raises(InvalidArgument, match="layers"):
            model.skip_layers((1, model.num_layers))
        with pytest.raises(InvalidArgument, match="skip"):
            model.skip_layers(range(model.num_layers))
        assert (model.exit_layer, model.skipped_layers) == (0, ())
    on_gpu = GpuModel(tiny("Llama"), **SIZES)
    sharded = TensorParallelModel(TransformersModel(tiny("Llama"), **SIZES), None)
    for refused, why in ((on_gpu, "for models on a CPU"), (sharded, "tensor_parallel: .* for one rank only")):
        for ask in (lambda m=refused: m.exit_after(1), lambda m=refused: m.skip_layers((1,))):
            with pytest.raises(InvalidArgument, match=why):
                ask()
