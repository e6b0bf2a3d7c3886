"""numerics=exact: a row's logits are the same bits whatever its chunk, its company and its place in the cache."""

import asyncio
import itertools
import random

import pytest
from conftest import scaled

import outrider.lm  # noqa: F401  # before torch: it says how torch's threads wait

torch = pytest.importorskip("torch")

import numpy as np  # noqa: E402
from lm_programs import is_fragmented, punch_holes, started  # noqa: E402
from tiny_models import CONTEXT_LENGTH, FAMILIES, VOCAB_SIZE, stock_logits, tiny  # noqa: E402

from outrider.errors import FailedPrecondition, InvalidArgument  # noqa: E402
from outrider.lm.adapter import TransformersModel  # noqa: E402
from outrider.lm.batch import split  # noqa: E402
from outrider.lm.cpu_linear import pack_linears  # noqa: E402
from outrider.lm.engine import Engine  # noqa: E402
from outrider.lm.interface import Forward, PackedBatch, Segment  # noqa: E402
from outrider.lm.numerics import prove  # noqa: E402
from outrider.lm.row_counts import ROW_COUNTS, pieces  # noqa: E402

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
EXACT_FAMILIES = {**FAMILIES, "gemma": ("Gemma", {"head_dim": 8}), "phi3": ("Phi3", {"pad_token_id": 0})}


def adapt(family, dtype, *, exact=True, context_length=CONTEXT_LENGTH, **more):
    kind, extra = EXACT_FAMILIES[family]
    model = tiny(kind, **extra | more).to(DTYPES[dtype])
    if pack_linears(model) == 0:
        pytest.skip("no packed linear layers on this machine, and without them float32 has no exact numerics")
    return TransformersModel(model, vocab_size=VOCAB_SIZE, context_length=context_length, exact=exact)


def fresh(model, ids):
    """float32[len, vocab]: alone, in passes of 32 rows."""
    model.allocate_cache(-(-len(ids) // 16), 16)
    table = list(range(-(-len(ids) // 16)))
    parts = [Segment(a, ids[a : a + 32], table, len(ids[a : a + 32])) for a in range(0, len(ids), 32)]
    return np.concatenate([model.forward(PackedBatch((part,))) for part in parts])


def differing_rows(a, b):
    return int((a.view(np.int32) != b.view(np.int32)).any(1).sum())


async def histories(adapted, seed):
    """[(prefix, logits of its last rows)] of random sequences with drafts, truncations, chunks and neighbours."""
    rng = random.Random(seed)
    engine = Engine(
        adapted, num_blocks=70, block_size=4, max_batch_tokens=rng.choice([7, 40, 150]), max_waiting_sessions=99
    )
    seen, counts = [], {"truncations": 0, "fragmented": 0, "chunked": 0}

    def program(sequence, rng):
        for _ in range(rng.randint(4, 8)):
            if sequence.length and rng.random() < 0.5:
                length = rng.randint(max(0, sequence.length - 6), sequence.length)
                counts["truncations"] += length < sequence.length
                sequence.truncate(length)
            room = sequence.max_length - sequence.length
            if room:
                ids = [rng.randrange(VOCAB_SIZE) for _ in range(rng.randint(1, min(room, rng.choice([1, 4, 9, 60]))))]
                prefix = sequence.token_ids + ids
                counts["chunked"] += len(ids) > engine._queue.max_batch_tokens
                result = yield Forward(sequence, ids, len(ids))
                counts["fragmented"] += is_fragmented(sequence.blocks)
                seen.append((prefix, result.logits.copy()))

    async def worker(index):
        rng = random.Random(1000 * seed + index)
        for _ in range(2):
            sequence = await engine.open_sequence(rng.randint(20, 120))
            await engine.run(program(sequence, rng))
            engine.close_sequence(sequence)

    held = await punch_holes(engine) if seed % 2 == 0 else []
    with started(engine):
        await asyncio.gather(*(worker(i) for i in range(4)))
        stats = engine.stats()
    assert stats.num_padding_rows == 0
    assert stats.num_rows > stats.num_model_calls, "no pass had two rows"
    for sequence in held:
        engine.close_sequence(sequence)
    return seen, counts


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("family", EXACT_FAMILIES)
async def test_rows_are_bitwise_equal_after_any_history(family, dtype):
    adapted, alone = adapt(family, dtype), adapt(family, dtype)
    totals = {}
    num_rows = 0
    for seed in range(scaled(20, at_least=2)):
        seen, counts = await histories(adapted, seed)
        totals = {key: totals.get(key, 0) + count for key, count in counts.items()}
        for prefix, logits in seen:
            assert differing_rows(logits, fresh(alone, prefix)[-len(logits) :]) == 0
            num_rows += len(logits)
    assert num_rows > 200
    assert min(totals.values()) > 0, totals


@pytest.mark.parametrize("dtype", DTYPES)
async def test_without_exact_numerics_rows_do_differ(dtype):
    """Else the test above could not fail."""
    adapted, alone = adapt("llama", dtype, exact=False), adapt("llama", dtype, exact=False)
    seen, _ = await histories(adapted, 1)
    assert sum(differing_rows(logits, fresh(alone, prefix)[-len(logits) :]) for prefix, logits in seen) > 0


@pytest.mark.parametrize("family", ["llama", "qwen3", "qwen2_sliding"])
def test_exact_logits_are_right(family):
    kind, extra = EXACT_FAMILIES[family]
    ids = [(7 * i) % VOCAB_SIZE for i in range(150)]
    expected = stock_logits(tiny(kind, **extra), ids)
    assert np.abs(fresh(adapt(family, "float32"), ids) - expected).max() < 1e-4


def test_a_window_longer_than_its_tile():
    more = {"sliding_window": 600, "max_position_embeddings": 1400, "num_hidden_layers": 2}
    model = adapt("qwen2_sliding", "float32", context_length=1400, **more)
    kind, extra = EXACT_FAMILIES["qwen2_sliding"]
    ids = [(11 * i * i + 3) % VOCAB_SIZE for i in range(1300)]
    model.allocate_cache(200, 16)
    table = list(range(150, 68, -1))

    def run(bounds):
        parts = [Segment(a, ids[a:b], table, b - a) for a, b in itertools.pairwise(bounds)]
        return np.concatenate([model.forward(PackedBatch((part,))) for part in parts])

    whole = run([*range(0, 1300, 128), 1300])
    small = run([0, 500, 507, 512, *range(513, 530), 1100, *range(1101, 1125, 3), 1190, 1193, 1300])
    assert differing_rows(whole, small) == 0
    assert np.abs(whole - stock_logits(tiny(kind, **extra | more), ids)).max() < 1e-3


def test_what_lies_beyond_a_context_has_no_weight():
    """Slots of a neighbour, and slots never written, are read and masked."""
    model = adapt("llama", "float32")
    ids = [(5 * i) % VOCAB_SIZE for i in range(20)]
    expected = fresh(model, ids)
    model.allocate_cache(10, 16)
    model.forward(PackedBatch((Segment(0, [9] * 90, [4, 5, 6, 7, 8, 9], 0),)))
    actual = model.forward(PackedBatch((Segment(0, ids, [2, 3], 20),)))
    assert differing_rows(expected, model.forward(PackedBatch((Segment(0, ids, [8, 9], 20),)))) == 0
    assert differing_rows(expected, actual) == 0


def test_a_lone_row_is_computed_twice_and_written_once():
    model = adapt("llama", "bfloat16")
    ids = [(5 * i) % VOCAB_SIZE for i in range(20)]
    expected = fresh(model, ids)
    model.allocate_cache(4, 16)
    assert model.num_doubled_rows == 0
    before = model.num_rows_computed
    single = [model.forward(PackedBatch((Segment(i, [t], [2, 0], 1),))) for i, t in enumerate(ids)]
    assert differing_rows(expected, np.concatenate(single)) == 0
    assert (model.num_rows_computed - before, model.num_doubled_rows) == (20, 20)


def test_the_proof_holds_where_it_should_and_fails_where_it_should():
    found = prove(adapt("llama", "bfloat16"))
    assert (found.mode, found.proven, found.row_counts) == ("exact", True, ROW_COUNTS)
    assert (found.num_histories, found.num_tokens) == (6, CONTEXT_LENGTH)
    assert found.probe_s > 0
    assert "passes of 1-17, 32, 64, 128 rows, bitwise equal" in found.summary()
    with pytest.raises(FailedPrecondition, match=r"numerics=exact does not hold.*256 tokens|of 256 rows differ"):
        prove(adapt("llama", "bfloat16", exact=False))


def test_experts_are_refused():
    extra = {"head_dim": 8, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
    with pytest.raises(InvalidArgument, match="mixtures of experts"):
        TransformersModel(tiny("Qwen3Moe", **extra), vocab_size=VOCAB_SIZE, context_length=64, exact=True)


@pytest.mark.parametrize("num_rows", [*range(1, 140), 500, 512])
def test_pieces_are_proved_row_counts(num_rows):
    for at_least in (1, 2, 8):
        sizes = pieces(num_rows, at_least)
        assert sum(sizes) == num_rows
        assert set(sizes) <= set(ROW_COUNTS)
        assert min(sizes) >= min(at_least, num_rows)


def test_a_split_batch_has_the_same_rows_in_order():
    batch = PackedBatch((Segment(3, [1, 2, 3, 4], [0, 1], 2), Segment(0, [5], [2], 1), Segment(0, [6, 7, 8], [3], 3)))
    parts = split(batch, [3, 4, 1])
    assert [p.num_rows for p in parts] == [3, 4, 1]
    assert parts[0].segments == (Segment(3, [1, 2, 3], [0, 1], 1),)
    assert parts[1].segments == (Segment(6, [4], [0, 1], 1), Segment(0, [5], [2], 1), Segment(0, [6, 7], [3], 2))
    assert parts[2].segments == (Segment(2, [8], [3], 1),)
