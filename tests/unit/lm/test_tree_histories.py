"""Trees in any history: preempted, copied, shared, grown, kept, dropped; every row has the logits of its own text."""

from collections import Counter

import numpy as np
import pytest
from conftest import scaled
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tree_histories import KINDS, History, histories

from outrider.lm.toy import ToyModel, parse_toy

TOLERANCE = 1e-4


def run(make_model, check, num_histories):
    """Many histories; gives what occurred."""
    counts = Counter()

    @settings(max_examples=num_histories, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
    @given(history=histories, seed=st.integers(0, 2**32 - 1))
    def any_history(history, seed):
        History(make_model(), check, counts, seed).run(history)

    any_history()
    return counts


def test_any_history_of_a_toy():
    spec = parse_toy("toy:vocab=16,order=0,seed=4")
    known = ToyModel(spec)

    def check(text, logits):
        assert np.array_equal(logits, known.logits_for(text))

    counts = run(lambda: ToyModel(spec), check, scaled(2000, at_least=200))
    assert all(counts[kind] for kind in KINDS), counts


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
