"""Trees in real models' passes: each node's logits are those of a fresh forward over its own path."""

import itertools
import random

import pytest
from conftest import scaled

import outrider.lm  # noqa: F401  # before torch: it says how torch's threads wait

torch = pytest.importorskip("torch")

import numpy as np  # noqa: E402
from test_exact_numerics import DTYPES, adapt, differing_rows, fresh  # noqa: E402
from tiny_models import CONTEXT_LENGTH, FAMILIES, VOCAB_SIZE, stock_logits, tiny_pair  # noqa: E402

from outrider.lm.adapter import TransformersModel  # noqa: E402
from outrider.lm.batch import flatten, split  # noqa: E402
from outrider.lm.interface import PackedBatch, Segment  # noqa: E402
from outrider.lm.tree import path_to  # noqa: E402

TOLERANCE = 1e-4
BLOCK_SIZE = 4


def random_tree(rng, num_nodes):
    """Parents; deep ones, wide ones, and whatever is between."""
    depth = rng.choice([1, 3, 100])
    return tuple(max(-1, rng.randint(node - depth, node) - 1) if node else -1 for node in range(num_nodes))


def draw(rng, count):
    return [rng.randrange(VOCAB_SIZE) for _ in range(count)]


def compute(model, rng, prefix, nodes, parents, *, with_company):
    """float32[1 + nodes, vocab] after the prefix and each node, the passes cut anywhere, in scattered blocks."""
    ids = [*prefix, *nodes]
    blocks = list(range(-(-CONTEXT_LENGTH // BLOCK_SIZE)))
    model.allocate_cache(2 * len(blocks), BLOCK_SIZE)
    table = rng.choice([blocks, rng.sample(blocks, len(blocks))])
    cuts = rng.sample(range(1, len(ids)), min(len(ids) - 1, rng.choice([0, 1, 2, 5])))
    parts = []
    for start, end in itertools.pairwise([0, *sorted(cuts), len(ids)]):
        num_logits = max(0, end - max(start, len(prefix) - 1))
        segments = [Segment(start, ids[start:end], table, num_logits, parents[: max(0, end - len(prefix))])]
        if with_company:
            other = Segment(0, draw(rng, 5), range(len(blocks), 2 * len(blocks)), 0, rng.choice([(), (-1, -1, 0)]))
            segments.insert(rng.randint(0, 1), other)
        parts.append(model.forward(PackedBatch(tuple(segments))).copy())
    return np.concatenate(parts), table


@pytest.mark.parametrize("seed", range(scaled(40, at_least=4)))
@pytest.mark.parametrize("family", FAMILIES)
def test_a_nodes_logits_are_those_of_its_own_path(family, seed):
    rng = random.Random(seed)
    ours, stock = tiny_pair(family)
    model = TransformersModel(ours, vocab_size=VOCAB_SIZE, context_length=CONTEXT_LENGTH)
    prefix = draw(rng, rng.choice([1, 2, 7, 30, 80]))
    nodes = draw(rng, rng.choice([2, 5, 12, 40, 90]))
    parents = random_tree(rng, len(nodes))
    logits, _ = compute(model, rng, prefix, nodes, parents, with_company=seed % 2)
    for row, node in enumerate(range(-1, len(nodes))):
        text = [*prefix, *(nodes[n] for n in path_to(parents, node))]
        assert np.abs(logits[row] - stock_logits(stock, text)[-1]).max() < TOLERANCE


@pytest.mark.parametrize("seed", range(scaled(20, at_least=3)))
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen2_sliding", "gemma"])
def test_under_exact_numerics_to_the_bit(family, dtype, seed):
    rng = random.Random(seed)
    model = adapt(family, dtype)
    prefix = draw(rng, rng.choice([1, 30, 60, 64, 120]))
    nodes = draw(rng, rng.choice([5, 12, 30, 70]))
    parents = random_tree(rng, len(nodes))
    logits, _ = compute(model, rng, prefix, nodes, parents, with_company=seed % 2)
    for row, node in enumerate(range(-1, len(nodes))):
        text = [*prefix, *(nodes[n] for n in path_to(parents, node))]
        assert differing_rows(logits[row : row + 1], fresh(model, text)[-1:]) == 0


@pytest.mark.parametrize("cut", range(8, 15))
def test_the_window_of_a_node_is_of_its_own_text(cut):
    """A window that ends between a branch and its siblings: by places instead of positions other tokens would show."""
    ours, stock = tiny_pair("qwen2_sliding")
    model = TransformersModel(ours, vocab_size=VOCAB_SIZE, context_length=CONTEXT_LENGTH)
    model.allocate_cache(8, 16)
    prefix, nodes = [1, 2, 3, 4, 5, 6, 7, 8], [11, 12, 13, 14, 15, 16, 17]
    parents = (-1, -1, -1, 0, 3, 1, 5)
    whole = PackedBatch((Segment(0, [*prefix, *nodes], range(8), 7, parents),))
    logits = np.concatenate([model.forward(part).copy() for part in split(whole, [cut, 15 - cut])])
    for node in range(7):
        text = [*prefix, *(nodes[n] for n in path_to(parents, node))]
        assert np.abs(logits[node] - stock_logits(stock, text)[-1]).max() < TOLERANCE


def test_a_sibling_that_is_seen_would_show():
    ours, stock = tiny_pair("llama")
    model = TransformersModel(ours, vocab_size=VOCAB_SIZE, context_length=CONTEXT_LENGTH)
    model.allocate_cache(8, 16)
    expected = stock_logits(stock, [1, 2, 3, 6, 7])[-1]
    for parents, right in (((-1, -1, 1), True), ((-1, 0, 1), False), ((-1, -1, 0), False)):
        logits = model.forward(PackedBatch((Segment(0, [1, 2, 3, 5, 6, 7], range(8), 1, parents),)))
        assert (np.abs(logits[0] - expected).max() < TOLERANCE) == right
        assert right or np.abs(logits[0] - expected).max() > 100 * TOLERANCE


def test_a_chain_told_by_parents_is_a_plain_pass():
    batch = [PackedBatch((Segment(3, [1, 2, 3, 4], [0, 1], 2, parents),)) for parents in ((), (-1, 0, 1), (-1,))]
    plain, *chains = (flatten(b, 4) for b in batch)
    for flat in chains:
        assert flat.spans == plain.spans
        assert flat.positions.tolist() == plain.positions.tolist()


def test_a_cut_tree_keeps_its_parents():
    batch = PackedBatch((Segment(3, [1, 2, 3, 4], [0, 1], 3, (-1, -1, 1)),))
    parts = split(batch, [3, 1])
    assert parts[0].segments == (Segment(3, [1, 2, 3], [0, 1], 2, (-1, -1)),)
    assert parts[1].segments == (Segment(6, [4], [0, 1], 1, (-1, -1, 1)),)
    assert [flatten(part, 4).positions.tolist() for part in parts] == [[3, 4, 4], [5]]


@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("seed", range(scaled(10, at_least=2)))
def test_a_moved_path_is_a_plain_context(seed, exact):
    rng = random.Random(seed)
    model = adapt("llama", "float32", exact=exact)
    prefix, nodes = draw(rng, 13), draw(rng, 20)
    # A long path moved by one place: most of its slots are read as well as written.
    parents = (-1, -1, *range(1, 19)) if seed == 0 else random_tree(rng, 20)
    path = path_to(parents, rng.randrange(10, 20))
    _, table = compute(model, rng, prefix, nodes, parents, with_company=False)

    def slots(places):
        return [table[p // BLOCK_SIZE] * BLOCK_SIZE + p % BLOCK_SIZE for p in places]

    model.move_slots(slots(13 + node for node in path), slots(range(13, 13 + len(path))))
    text = [*prefix, *(nodes[n] for n in path)]
    more = draw(rng, 3)
    logits = model.forward(PackedBatch((Segment(len(text), more, table, 3),)))
    expected = fresh(model, [*text, *more])[-3:]
    assert differing_rows(logits, expected) == 0 if exact else np.abs(logits - expected).max() < TOLERANCE
