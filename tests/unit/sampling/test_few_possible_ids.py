"""Rows in which most ids cannot come (a head knows few, masks hide many): short ways, equal to long ones to the bit."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from outrider.drafting.proposal import SparseQ
from outrider.sampling import History, Noise, SamplingParams, StoppingParams, coupled_token, sparse_q
from outrider.sampling.distribution import likeliest, processed_logits, support, tempered
from outrider.sampling.params import AcceptanceRule
from outrider.sampling.sparse_q import to_counts

NO_STOP = StoppingParams(max_tokens=100)


def row_of(seed: int, vocab_size: int, share: float, decimals: int) -> np.ndarray:
    """float32[V], rounded so that values repeat; about `share` of the ids are possible, one at least."""
    rng = np.random.default_rng(seed)
    row = np.round(rng.normal(size=vocab_size) * 3, decimals).astype(np.float32)
    hidden = rng.random(vocab_size) >= share
    hidden[rng.integers(vocab_size)] = False
    row[hidden] = -np.inf
    return row


ROWS = st.builds(
    row_of,
    seed=st.integers(0, 10**6),
    vocab_size=st.integers(1, 300),
    share=st.sampled_from([0.0, 0.02, 0.2, 0.9, 1.0]),
    decimals=st.sampled_from([0, 1, 6]),
)
PARAMS = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.3, 1.0, 1.5]),
    top_k=st.sampled_from([0, 1, 20]),
    top_p=st.sampled_from([0.4, 1.0]),
    min_p=st.sampled_from([0.0, 0.05]),
    repetition_penalty=st.sampled_from([1.0, 1.4]),
    acceptance=st.just(AcceptanceRule.COUPLED),
)


@settings(max_examples=150, deadline=None)
@given(row=ROWS, count=st.integers(1, 320))
def test_the_likeliest_are_those_of_a_full_sort(row, count) -> None:
    for values in (row, row.astype(np.float64)):
        np.testing.assert_array_equal(likeliest(values, count), np.argsort(-values, kind="stable")[:count])


@settings(max_examples=150, deadline=None)
@given(row=ROWS, params=PARAMS, seed=st.integers(0, 2**64 - 1), position=st.integers(0, 10**6))
def test_a_coupled_token_is_that_of_noise_for_every_id(row, params, seed, position) -> None:
    history, noise = History([0], [len(row) - 1]), Noise(seed, 0)
    ids, weights = support(row, params, NO_STOP, history)
    dense = np.full(len(row), -np.inf)
    dense[slice(None) if ids is None else ids] = weights
    expected = int(np.argmax(dense + noise.gumbel(position, len(row))))
    assert coupled_token(row, params, NO_STOP, history, noise, position) == expected


@settings(max_examples=150, deadline=None)
@given(row=ROWS, params=PARAMS, max_entries=st.integers(1, 256))
def test_counts_are_those_of_the_whole_row(row, params, max_entries) -> None:
    history = History([0], [len(row) - 1])
    q, expected = (f(row, params, history, max_entries) for f in (_sparse_q, slow_sparse_q))
    np.testing.assert_array_equal(q.ids, expected.ids)
    np.testing.assert_array_equal(q.counts, expected.counts)
    assert np.isfinite(row[q.ids]).all()


def _sparse_q(row: np.ndarray, params: SamplingParams, history: History, max_entries: int) -> SparseQ:
    return sparse_q(row, params, NO_STOP, history, max_entries)


def slow_sparse_q(row: np.ndarray, params: SamplingParams, history: History, max_entries: int) -> SparseQ:
    """By sorting all ids, whatever they are."""
    if params.top_p >= 1.0 and params.min_p <= 0.0:
        logits = processed_logits(row, params, NO_STOP, history)
        num_kept = min(max_entries, params.top_k) if params.top_k else max_entries
        ranked = np.argsort(-logits, kind="stable")[:num_kept]
        masses = np.exp(tempered(logits[ranked], params.temperature))
    else:
        ids, weights = support(row, params, NO_STOP, history)
        best = np.argsort(-weights, kind="stable")[:max_entries]
        masses = np.exp(weights[best])
        ranked = best if ids is None else ids[best]
    counts = to_counts(masses)
    return SparseQ(ids=ranked[counts > 0].astype(np.uint32), counts=counts[counts > 0])


def test_only_possible_ids_get_noise(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    gumbel = Noise.gumbel
    monkeypatch.setattr(Noise, "gumbel", lambda self, position, ids: asked.append(ids) or gumbel(self, position, ids))
    row = row_of(1, 200, 0.1, 6)
    coupled_token(row, SamplingParams(), NO_STOP, History([0]), Noise(1, 0), 5)
    np.testing.assert_array_equal(asked[0], np.flatnonzero(row > -np.inf))
