"""Trees in any history: preempted, copied, shared, grown, kept, dropped; every row has the logits of its own text."""

from collections import Counter

import numpy as np
import pytest
from conftest import scaled
from hypothesis import HealthCheck, given, seed, settings
from hypothesis import strategies as st
from tree_histories import KINDS, STATE_KINDS, History, histories

from outrider.lm.toy import ToyModel, parse_toy

TOLERANCE = 1e-4
SEED = 1
"""Under which every kind of event comes up even in few histories."""


def run(make_model, check, num_histories, **kwargs):
    """Many histories; gives what occurred."""
    counts = Counter()

    @seed(SEED)
    @settings(max_examples=num_histories, deadline=None, database=None, suppress_health_check=list(HealthCheck))
    @given(history=histories, own_seed=st.integers(0, 2**32 - 1))
    def any_history(history, own_seed):
        History(make_model(), check, counts, own_seed, **kwargs).run(history)

    any_history()
    return counts


def test_any_history_of_a_toy():
    spec = parse_toy("toy:vocab=16,order=0,seed=4")
    known = ToyModel(spec)

    def check(text, logits):
        assert np.array_equal(logits, known.logits_for(text))

    counts = run(lambda: ToyModel(spec), check, scaled(2000, at_least=200))
    assert all(counts[kind] for kind in KINDS), counts


def test_states_in_any_history_of_a_toy():
    """Two of them; kept ones are those of the token's own text, whichever sequence computed it and wherever it lies."""
    spec, states = parse_toy("toy:vocab=16,order=0,seed=4"), (2, -1)
    known = ToyModel(spec)
    fresh = Fresh(lambda text: known.features_for(text, states)[None])

    def check(text, row):
        assert np.array_equal(row, fresh(text))

    counts = run(lambda: ToyModel(spec), lambda *_: None, scaled(1000, at_least=100), check_states=check, states=states)
    assert all(counts[kind] for kind in (*KINDS, *STATE_KINDS)), counts


class Fresh:
    """Logits after texts, computed anew and remembered."""

    def __init__(self, compute):
        self.compute, self.known = compute, {}

    def __call__(self, text):
        key = tuple(text)
        if key not in self.known:
            self.known[key] = self.compute(text)[-1].copy()
        return self.known[key]


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen2_sliding"])
def test_any_history_of_a_model(family):
    pytest.importorskip("torch")
    from tiny_models import CONTEXT_LENGTH, VOCAB_SIZE, stock_logits, tiny_pair

    from outrider.lm.adapter import TransformersModel

    ours, stock = tiny_pair(family)
    model = TransformersModel(ours, vocab_size=VOCAB_SIZE, context_length=CONTEXT_LENGTH)
    fresh = Fresh(lambda text: stock_logits(stock, text))

    def check(text, logits):
        assert np.abs(logits - fresh(text)).max() < TOLERANCE

    counts = run(lambda: model, check, scaled(100, at_least=10))
    assert counts["trees"] > 20
    assert counts["moved"] > 0


@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_states_in_any_history_of_a_model(family):
    """Beside transformers' own `hidden_states` of the text alone."""
    pytest.importorskip("torch")
    from tiny_models import CONTEXT_LENGTH, VOCAB_SIZE, stock_states, tiny_pair

    from outrider.lm.adapter import TransformersModel

    ours, stock = tiny_pair(family)
    model = TransformersModel(ours, vocab_size=VOCAB_SIZE, context_length=CONTEXT_LENGTH)
    fresh = Fresh(lambda text: stock_states(stock, text, (0, 2, -1)))

    def check(text, row):
        assert np.abs(row.numpy() - fresh(text)).max() < TOLERANCE

    counts = run(lambda: model, lambda *_: None, scaled(100, at_least=12), check_states=check, states=(0, 2, -1))
    assert all(counts[kind] for kind in STATE_KINDS if kind != "states_copied"), counts


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen2_sliding"])
def test_any_history_under_exact_numerics_to_the_bit(family, dtype):
    pytest.importorskip("torch")
    from test_exact_numerics import adapt
    from test_exact_numerics import fresh as compute

    model, alone = adapt(family, dtype), adapt(family, dtype)
    fresh = Fresh(lambda text: compute(alone, text))

    def check(text, logits):
        assert logits.tobytes() == fresh(text).tobytes()

    counts = run(lambda: model, check, scaled(60, at_least=6))
    assert counts["trees"] > 20
    assert counts["moved"] > 0
