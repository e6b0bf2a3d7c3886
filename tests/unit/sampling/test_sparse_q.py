"""Sparse q: exact counts, deterministic, and a draw that follows them to the last integer."""

from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from outrider.drafting.proposal import Q_TOTAL, Proposal, check
from outrider.errors import Internal
from outrider.sampling import History, SamplingParams, StoppingParams, distribution, draw_draft, sparse_q
from outrider.sampling.distribution import likeliest, support
from outrider.sampling.sparse_q import to_counts

NO_STOP = StoppingParams(max_tokens=100)
EMPTY = History(())


@settings(max_examples=300, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    vocab_size=st.integers(1, 400),
    spread=st.sampled_from([0.0, 0.1, 1.0, 5.0, 40.0]),
    max_entries=st.integers(1, 256),
    params=st.builds(
        SamplingParams,
        temperature=st.sampled_from([0.3, 1.0, 1.5]),
        top_k=st.sampled_from([0, 1, 20]),
        top_p=st.sampled_from([0.4, 0.95, 1.0]),
        min_p=st.sampled_from([0.0, 0.05]),
        repetition_penalty=st.sampled_from([1.0, 1.4]),
    ),
)
def test_well_formed_faithful_and_deterministic(seed, vocab_size, spread, max_entries, params) -> None:
    row = (np.random.default_rng(seed).normal(size=vocab_size) * spread).astype(np.float32)
    history = History([0], [vocab_size - 1])
    q = sparse_q(row, params, NO_STOP, history, max_entries)
    # The receiver's own check, for each id that may be drawn.
    for token_id in q.ids.tolist():
        check(Proposal((token_id,), (q,)), vocab_size=vocab_size, max_draft_tokens=1)
    assert q.ids.dtype == np.uint32
    assert len(q.ids) <= max_entries
    assert (np.diff(q.counts) <= 1).all(), "entries fall in likelihood, but for the units that rounding hands out"
    again = sparse_q(row.copy(), params, NO_STOP, History([0], [vocab_size - 1]), max_entries)
    np.testing.assert_array_equal(again.ids, q.ids)
    np.testing.assert_array_equal(again.counts, q.counts)

    p = distribution(row, params, NO_STOP, history)
    top = np.argsort(-p, kind="stable")[:max_entries]
    exact = p[top] / p[top].sum() * Q_TOTAL
    counts = np.zeros(vocab_size)
    counts[q.ids] = q.counts
    assert (np.abs(counts[top] - exact) < 1 + 1e-6).all(), "largest remainder moves no entry by a whole unit"
    assert counts.sum() == counts[top].sum()
    assert not counts[p == 0].any()


def test_draw_follows_the_counts_exactly() -> None:
    row = np.random.default_rng(3).normal(size=300).astype(np.float32)
    q = sparse_q(row, SamplingParams(), NO_STOP, EMPTY, 64)
    drawn = np.bincount([draw_draft(q, integer) for integer in range(Q_TOTAL)], minlength=300)
    expected = np.zeros(300, dtype=int)
    expected[q.ids] = q.counts
    np.testing.assert_array_equal(drawn, expected)


def test_one_id_can_hold_all_the_mass() -> None:
    for row, params in [([0.0, 500.0], SamplingParams()), ([1.0, 2.0], SamplingParams(top_k=1))]:
        q = sparse_q(np.array(row, dtype=np.float32), params, NO_STOP, EMPTY, 64)
        assert (q.ids.tolist(), q.counts.tolist()) == ([1], [Q_TOTAL])
        assert {draw_draft(q, 0), draw_draft(q, Q_TOTAL - 1)} == {1}


def test_ties_and_remainders_go_to_the_lower_id() -> None:
    q = sparse_q(np.zeros(3, dtype=np.float32), SamplingParams(), NO_STOP, EMPTY, 64)
    assert (q.ids.tolist(), q.counts.tolist()) == ([0, 1, 2], [21_846, 21_845, 21_845])
    q = sparse_q(np.array([0, 1, 1, 1], dtype=np.float32), SamplingParams(), NO_STOP, EMPTY, 2)
    assert (q.ids.tolist(), q.counts.tolist()) == ([1, 2], [32_768, 32_768])


@settings(max_examples=200, deadline=None)
@given(st.lists(st.integers(1, 10**6), min_size=1, max_size=256))
def test_counts_are_the_largest_remainders(weights: list[int]) -> None:
    """Against exact arithmetic; entries whose remainders agree to rounding may swap the unit."""
    counts = to_counts(np.array(weights, dtype=np.float64))
    shares = [Fraction(w * Q_TOTAL, sum(weights)) for w in weights]
    assert counts.sum() == Q_TOTAL
    got_unit = [share - int(share) for share, count in zip(shares, counts, strict=True) if count > int(share)]
    no_unit = [share - int(share) for share, count in zip(shares, counts, strict=True) if count <= int(share)]
    assert all(int(share) <= count <= int(share) + 1 for share, count in zip(shares, counts, strict=True))
    assert not got_unit or not no_unit or min(got_unit) >= max(no_unit) - Fraction(1, 10**9)


def test_refusals() -> None:
    row = np.zeros(4, dtype=np.float32)
    for max_entries in (0, 257):
        with pytest.raises(ValueError, match="max_entries"):
            sparse_q(row, SamplingParams(), NO_STOP, EMPTY, max_entries)
    with pytest.raises(ValueError, match="temperature is 0"):
        sparse_q(row, SamplingParams(temperature=0.0), NO_STOP, EMPTY, 64)
    row[2] = np.nan
    with pytest.raises(Internal, match="NaN at id 2"):
        sparse_q(row, SamplingParams(), NO_STOP, EMPTY, 64)


@pytest.mark.parametrize("top_k", [0, 1, 5, 100])
@pytest.mark.parametrize("temperature", [1e-3, 0.7, 1.0, 30.0])
def test_filters_by_rank_alone_give_what_the_whole_distribution_gives(top_k, temperature):
    """The slow twin: every filter over the whole vocabulary, then the likeliest, ties and rows of -inf included."""
    rng = np.random.default_rng(top_k)
    params = SamplingParams(temperature=temperature, top_k=top_k)
    for _ in range(20):
        logits = rng.integers(-6, 6, 300).astype(np.float32) / 2
        logits[rng.random(300) < 0.5] = -np.inf
        ids, weights = support(logits, params, NO_STOP, EMPTY)
        ranked = likeliest(weights, 64)
        counts = to_counts(np.exp(weights[ranked]))
        expected = (ranked if ids is None else ids[ranked])[counts > 0]
        q = sparse_q(logits, params, NO_STOP, EMPTY, 64)
        assert q.ids.tolist() == expected.tolist()
        assert q.counts.tolist() == counts[counts > 0].tolist()
