"""The plain loop over packed layers gives what the transformers modules give, which are its slow twin."""

import copy

import pytest

import outrider.lm  # noqa: F401  # before torch: it says how torch's threads wait

torch = pytest.importorskip("torch")

import numpy as np  # noqa: E402
from tiny_models import CONTEXT_LENGTH, FAMILIES, VOCAB_SIZE, stock_logits, tiny  # noqa: E402

from outrider.lm.adapter import TransformersModel  # noqa: E402
from outrider.lm.cpu_linear import pack_linears  # noqa: E402
from outrider.lm.interface import PackedBatch, Segment  # noqa: E402

KINDS = {
    **{name: FAMILIES[name] for name in ("llama", "qwen2", "qwen3", "qwen2_sliding")},
    "mistral_sliding": ("Mistral", {"sliding_window": 5}),
}
BLOCKS = ([3, 1], [0, 2], [4, 5])
NUM_TOKENS = 30


def loop_and_modules(kind, extra, dtype=torch.float32, **options):
    """Two models of the same weights; the second computes with the modules."""
    weights = tiny(kind, **extra).to(dtype)
    sizes = {"vocab_size": VOCAB_SIZE, "context_length": CONTEXT_LENGTH}
    models = []
    for _ in range(2):
        model = copy.deepcopy(weights)
        if pack_linears(model) == 0:
            pytest.skip("no packed form on this machine")
        models.append(TransformersModel(model, **sizes, **options))
        models[-1].allocate_cache(6, 16)
    assert models[0]._loop is not None
    models[1]._loop = None
    return *models, weights


def passes(texts):
    """Prefills, decodes and verifications of three streams, alone and together, over scattered blocks."""
    done = [0] * len(texts)
    for counts in ([7, 0, 0], [1, 3, 0], [1, 1, 1], [0, 5, 9], [5, 1, 4], [1, 0, 0], [9, 9, 9]):
        parts = []
        for i, count in enumerate(counts):
            if count:
                parts.append(Segment(done[i], texts[i][done[i] : done[i] + count], BLOCKS[i], count))
                done[i] += count
        yield PackedBatch(tuple(parts))


def texts():
    rng = np.random.default_rng(0)
    return [rng.integers(0, VOCAB_SIZE, NUM_TOKENS).tolist() for _ in BLOCKS]


@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("family", KINDS)
def test_equals_the_modules_and_a_fresh_forward(family, exact):
    loop, modules, weights = loop_and_modules(*KINDS[family], exact=exact)
    expected = [stock_logits(weights, text) for text in texts()]
    for batch in passes(texts()):
        logits = loop.forward(batch)
        assert np.abs(logits - modules.forward(batch)).max() < 1e-3
        rows = [
            expected[BLOCKS.index(s.block_table)][s.num_cached_tokens : s.num_cached_tokens + len(s.token_ids)]
            for s in batch.segments
        ]
        assert np.abs(logits - np.concatenate(rows)).max() < 1e-3


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_bfloat16_differs_from_the_modules_by_roundings_only(family):
    loop, modules, _ = loop_and_modules(*KINDS[family], dtype=torch.bfloat16)
    for batch in passes(texts()):
        logits, others = loop.forward(batch), modules.forward(batch)
        assert np.sqrt(np.mean((logits - others) ** 2)) < 0.05 * others.std()


def test_rows_without_logits_are_cached_all_the_same():
    loop, modules, _ = loop_and_modules(*FAMILIES["llama"])
    text = texts()[0]
    for model in (loop, modules):
        assert model.forward(PackedBatch((Segment(0, text[:9], BLOCKS[0], 0),))).shape == (0, VOCAB_SIZE)
    last = PackedBatch((Segment(9, text[9:12], BLOCKS[0], 1),))
    assert np.abs(loop.forward(last) - modules.forward(last)).max() < 1e-3


def test_other_models_keep_their_modules():
    sizes = {"vocab_size": VOCAB_SIZE, "context_length": CONTEXT_LENGTH}
    assert TransformersModel(tiny("Llama"), **sizes)._loop is None  # not packed
    gemma = tiny("Gemma", head_dim=16)
    pack_linears(gemma)
    assert TransformersModel(gemma, **sizes)._loop is None
    hooked = tiny("Llama")
    pack_linears(hooked)
    hooked.model.layers[1].register_forward_hook(lambda *_: None)
    assert TransformersModel(hooked, **sizes)._loop is None
