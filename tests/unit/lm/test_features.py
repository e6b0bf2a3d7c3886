"""States kept beside keys and values are transformers' own hidden states, in every path that computes rows."""

import copy

import pytest

import outrider.lm  # noqa: F401  # before torch: it says how torch's threads wait

torch = pytest.importorskip("torch")

import numpy as np  # noqa: E402
from lm_programs import score, started, toy_engine  # noqa: E402
from test_decoder_loop import BLOCKS, KINDS, loop_and_modules, passes, texts  # noqa: E402
from tiny_models import CONTEXT_LENGTH, FAMILIES, VOCAB_SIZE, stock_states, tiny, tiny_pair  # noqa: E402

from outrider.errors import Internal, InvalidArgument  # noqa: E402
from outrider.lm.adapter import TransformersModel  # noqa: E402
from outrider.lm.draft_vocab import TrimmedModel  # noqa: E402
from outrider.lm.engine import Engine  # noqa: E402
from outrider.lm.gpu.model import GpuModel  # noqa: E402
from outrider.lm.interface import LAST_HIDDEN, Forward, PackedBatch, Segment  # noqa: E402
from outrider.lm.states import feature_model  # noqa: E402
from outrider.lm.toy import ToyModel, parse_toy  # noqa: E402

STATES = (LAST_HIDDEN, 0, 2)
BLOCK_SIZE = 16
SIZES = {"vocab_size": VOCAB_SIZE, "context_length": CONTEXT_LENGTH}


def slots(table, start, end):
    return [table[i // BLOCK_SIZE] * BLOCK_SIZE + i % BLOCK_SIZE for i in range(start, end)]


def check_all(model, stock, tolerance=1e-4):
    """Texts computed in pieces, alone and in company, a block copied, slots moved: their states are those of a fresh
    forward."""
    model.keep_features(STATES)
    model.allocate_cache(6, BLOCK_SIZE)
    ours = texts()
    done = dict.fromkeys(range(len(ours)), 0)
    for batch in passes(ours):
        model.forward(batch)
        for segment in batch.segments:
            done[BLOCKS.index(segment.block_table)] = segment.num_cached_tokens + len(segment.token_ids)
    assert min(done.values()) > BLOCK_SIZE
    expected = {i: stock_states(stock, ours[i][:end], STATES) for i, end in done.items()}

    def compare(index, table, end):
        kept = model.read_features(slots(table, 0, end), STATES)
        assert kept.dtype == torch.float32
        assert np.abs(kept.numpy() - expected[index][:end]).max() < tolerance

    for index, end in done.items():
        compare(index, BLOCKS[index], end)
    model.copy_block(3, 4)
    compare(0, [4, 1], done[0])
    model.move_slots([16, 17, 18], [80, 79, 81])
    moved = model.read_features([80, 79, 81], STATES).numpy()
    assert np.abs(moved - expected[0][[16, 17, 18]]).max() < tolerance
    few = model.read_features(slots(BLOCKS[1], 2, 5), (2, LAST_HIDDEN)).numpy()
    assert np.abs(few - stock_states(stock, ours[1][:5], (2, LAST_HIDDEN))[2:]).max() < tolerance


@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("family", KINDS)
def test_the_plain_loop_keeps_transformers_hidden_states(family, exact):
    loop, modules, weights = loop_and_modules(*KINDS[family], exact=exact)
    for model in (loop, modules):
        check_all(model, weights, 1e-3)


@pytest.mark.parametrize("family", FAMILIES)
def test_modules_keep_transformers_hidden_states(family):
    ours, stock = tiny_pair(family)
    model = TransformersModel(ours, **SIZES)
    assert model._loop is None
    check_all(model, stock)


@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_static_steps_keep_transformers_hidden_states(family):
    ours, stock = tiny_pair(family)
    model = GpuModel(ours, **SIZES)
    check_all(model, stock)
    assert model.num_static_passes > 0


@pytest.mark.parametrize("is_loop", [True, False])
def test_without_features_nothing_is_captured_and_with_them_logits_are_the_same_bits(is_loop):
    models = loop_and_modules(*FAMILIES["llama"])[:2]
    model = models[0] if is_loop else models[1]
    plain = [model.forward(batch).copy() for batch in passes(texts())]
    num_bytes = model.bytes_per_block(BLOCK_SIZE)
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model._model.modules())
    model.keep_features(STATES)
    assert model.bytes_per_block(BLOCK_SIZE) == num_bytes + BLOCK_SIZE * 3 * 32 * 4
    with pytest.raises(Internal, match="allocate again"):
        model.forward(PackedBatch((Segment(0, [1], [0], 1),)))
    model.allocate_cache(6, BLOCK_SIZE)
    kept = [model.forward(batch).copy() for batch in passes(texts())]
    assert all(np.array_equal(a, b) for a, b in zip(plain, kept, strict=True))
    model.keep_features(())
    assert model.bytes_per_block(BLOCK_SIZE) == num_bytes
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model._model.modules())
    with pytest.raises(Internal, match="none is"):
        model.read_features([0], (0,))


def test_states_come_in_the_models_number_type():
    model = TransformersModel(tiny("Llama").bfloat16(), **SIZES)
    model.keep_features((1,))
    model.allocate_cache(2, BLOCK_SIZE)
    model.forward(PackedBatch((Segment(0, [1, 2], [1], 1),)))
    kept = model.read_features([16, 17], (1,))
    assert (kept.dtype, kept.shape) == (torch.bfloat16, (2, 32))


@pytest.mark.parametrize("state", [3, -2, 100])
def test_states_that_there_are_not_are_refused_by_name(state):
    for model in (TransformersModel(tiny("Llama"), **SIZES), ToyModel(parse_toy("toy:"))):
        state_of = state if state != 3 else model.num_layers
        with pytest.raises(InvalidArgument, match=f"states 0 to {model.num_layers - 1}.*but no {state_of}$"):
            model.keep_features((0, state_of))


def test_models_that_cannot_keep_states_are_refused_by_name():
    model = TransformersModel(tiny("Llama"), **SIZES)
    assert feature_model(model) is model
    with pytest.raises(InvalidArgument, match="TrimmedModel keeps no states"):
        feature_model(TrimmedModel(model, np.arange(3), VOCAB_SIZE))
    odd = tiny("Llama")
    odd.model.more = copy.deepcopy(odd.model.layers)
    with pytest.raises(InvalidArgument, match="layers of LlamaForCausalLM are not found"):
        TransformersModel(odd, **SIZES).keep_features((0,))


def toy_engine_with(states):
    model = ToyModel(parse_toy("toy:vocab=16,order=0"))
    model.keep_features(states)
    return Engine(model, num_blocks=16, block_size=4, max_batch_tokens=8, max_waiting_sessions=0)


async def test_a_program_reads_the_states_of_what_is_computed_and_of_nothing_else():
    engine, ids = toy_engine_with((1, -1)), [1, 2, 3, 4, 5, 6]
    with started(engine):
        sequence = await engine.open_sequence(20)

        def program():
            yield Forward(sequence, ids)
            assert sequence.features(3, 3, (1,)).shape == (0, 8)
            with pytest.raises(Internal, match="6 are in the cache"):
                sequence.features(5, 7, (1,))
            with pytest.raises(Internal, match=r"states \[2\] are not among"):
                sequence.features(0, 1, (1, 2))
            read = sequence.features(2, 6, (-1, 1))
            sequence.truncate(4)
            with pytest.raises(Internal, match="4 are in the cache"):
                sequence.features(0, 5, (1,))
            return read

        read = await engine.run(program())
        assert np.array_equal(read, [engine.model.features_for(ids[: n + 1], (-1, 1)) for n in range(2, 6)])
        sequence.pending = object()
        with pytest.raises(Internal, match="pending"):
            sequence.features(0, 1, (1,))
        sequence.pending = None


async def test_states_were_read_of_a_model_that_keeps_none():
    engine = toy_engine()
    with started(engine):
        sequence = await engine.open_sequence(8)
        await engine.run(score(sequence, [1, 2]))
        with pytest.raises(Internal, match="not among those kept"):
            sequence.features(0, 2, (1,))


def test_a_toys_states_know_the_context_that_its_logits_know_and_differ_by_state():
    toy = ToyModel(parse_toy("toy:vocab=16,order=2"))
    assert np.array_equal(toy.features_for([7, 1, 2], (0,)), toy.features_for([9, 1, 2], (0,)))
    rows = [toy.features_for([1, 2], (state,)).tolist() for state in (0, 1, 2, 3, -1)]
    rows += [toy.features_for([3, 2], (0,)).tolist()]
    assert len({tuple(row) for row in rows}) == 6
