"""Logits to distribution: against a slow twin, stage by stage, with every tie and edge."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from outrider.errors import Internal
from outrider.sampling import (
    History,
    Noise,
    SamplingParams,
    StoppingParams,
    coupled_token,
    distribution,
    draw,
    greedy_token,
    processed_logits,
    raw_logprobs,
)
from outrider.sampling.distribution import likeliest

NO_STOP = StoppingParams(max_tokens=100)
EMPTY = History(())


def slow_distribution(
    logits: np.ndarray, params: SamplingParams, stopping: StoppingParams, prompt: list[int], output: list[int]
) -> np.ndarray:
    """The documented order, token by token, with a full stable sort for every filter."""
    x = [np.float32(v) for v in logits]
    for token_id, bias in params.logit_bias.items():
        x[token_id] += np.float32(bias)
    for token_id in range(len(x)):
        if token_id in prompt or token_id in output:
            penalty = np.float32(params.repetition_penalty)
            x[token_id] = x[token_id] / penalty if x[token_id] > 0 else x[token_id] * penalty
        x[token_id] -= np.float32(params.frequency_penalty) * np.float32(output.count(token_id))
        x[token_id] -= np.float32(params.presence_penalty) * np.float32(token_id in output)
        if len(output) < stopping.min_tokens and token_id in stopping.stop_token_ids:
            x[token_id] = np.float32(-np.inf)
    ranked = sorted(range(len(x)), key=lambda i: (-x[i], i))
    mass = {i: math.exp((float(x[i]) - float(x[ranked[0]])) / params.temperature) for i in ranked}
    kept = ranked[: params.top_k or None]
    total = math.fsum(mass[i] for i in kept)
    if params.top_p < 1:
        length = next(
            (n for n in range(1, len(kept)) if math.fsum(mass[i] for i in kept[:n]) >= params.top_p * total), len(kept)
        )
        kept = kept[:length]
    kept = [i for i in kept if mass[i] >= params.min_p * mass[ranked[0]]]
    total = math.fsum(mass[i] for i in kept)
    return np.array([mass[i] / total if i in kept else 0.0 for i in range(len(x))])


# Eighths of small numbers make ties frequent; sums of masses stay clear of top_p by irrational temperatures.
logit_rows = st.lists(st.integers(-24, 24).map(lambda n: n / 8), min_size=2, max_size=12)
param_sets = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.3, 0.7, 1.0, 1.5]),
    top_k=st.integers(0, 6),
    top_p=st.sampled_from([0.137, 0.5003, 0.9001, 1.0]),
    min_p=st.sampled_from([0.0, 0.0501, 0.3003, 1.0]),
    repetition_penalty=st.sampled_from([0.8, 1.0, 1.3]),
    presence_penalty=st.sampled_from([-0.5, 0.0, 0.7]),
    frequency_penalty=st.sampled_from([-0.25, 0.0, 0.4]),
    logit_bias=st.dictionaries(st.integers(0, 1), st.sampled_from([-100.0, -1.0, 0.5, 3.0])),
)
texts = st.lists(st.integers(0, 1), max_size=5)


@settings(max_examples=300, deadline=None)
@given(logits=logit_rows, params=param_sets, prompt=texts, output=texts, min_tokens=st.integers(0, 4))
def test_equals_the_slow_twin(logits, params, prompt, output, min_tokens) -> None:
    row = np.array(logits, dtype=np.float32)
    before = row.copy()
    stopping = StoppingParams(max_tokens=100, min_tokens=min_tokens, stop_token_ids=frozenset({1}))
    history = History(prompt, output)
    got = distribution(row, params, stopping, history)
    expected = slow_distribution(row, params, stopping, prompt, output)
    np.testing.assert_array_equal(got > 0, expected > 0)
    np.testing.assert_allclose(got, expected, rtol=1e-12)
    assert got.dtype == np.float64
    assert got.sum() == pytest.approx(1.0, abs=1e-12)
    np.testing.assert_array_equal(row, before)
    # The other ways to choose see the same survivors.
    noise = Noise(len(logits))
    with np.errstate(divide="ignore"):
        scores = np.log(got) + noise.gumbel(3, len(row))
    assert coupled_token(row, params, stopping, history, noise, 3) == np.argmax(scores)
    processed = processed_logits(row, params, stopping, history)
    assert processed.dtype == np.float32
    assert greedy_token(row, params, stopping, history) == np.flatnonzero(processed == processed.max())[0]


@settings(max_examples=200, deadline=None)
@given(
    prompt=texts,
    output=texts,
    drafts=st.lists(st.integers(0, 7), max_size=6),
    params=param_sets,
    seed=st.integers(0, 99),
)
def test_processed_rows_at_drafts_equal_sequential_decode(prompt, output, drafts, params, seed) -> None:
    """Pushed drafts count as committed ones would, and popping them leaves no trace, bit for bit."""
    rows = np.random.default_rng(seed).normal(size=(len(drafts) + 1, 8)).astype(np.float32)
    history = History(prompt, output)
    before = processed_logits(rows[0], params, NO_STOP, history)
    for index, draft in enumerate(drafts):
        sequential = History(prompt, [*output, *drafts[:index]])
        np.testing.assert_array_equal(
            processed_logits(rows[index], params, NO_STOP, history),
            processed_logits(rows[index], params, NO_STOP, sequential),
        )
        history.push(draft)
    history.pop(len(drafts))
    assert history.output_ids == tuple(output)
    fresh = History(prompt, output)
    for have, want in zip(history.seen(), fresh.seen(), strict=True):
        np.testing.assert_array_equal(have, want)
    np.testing.assert_array_equal(processed_logits(rows[0], params, NO_STOP, history), before)


def test_history_grows_past_its_first_room_and_refuses_to_pop_too_much() -> None:
    history = History([5] * 1000, range(500))
    ids, counts = history.seen()
    assert sorted(ids.tolist()) == list(range(500))
    assert counts.tolist() == [1] * 500
    history.pop(499)
    assert sorted(history.seen()[0].tolist()) == [0, 5]
    with pytest.raises(ValueError, match="cannot pop 2 of 1"):
        history.pop(2)


def test_large_vocabulary_filters_equal_a_full_sort() -> None:
    """The selection without a sort, its growing top-p included, on rows flat enough to need most of the vocabulary."""
    rng = np.random.default_rng(5)
    for spread, top_p in [(0.2, 0.97), (2.4, 0.95), (8.0, 0.9), (0.0, 0.5)]:
        row = np.round(rng.normal(size=30_000) * spread, 2).astype(np.float32)
        ranked = np.argsort(-row, kind="stable")
        mass = np.exp(row[ranked].astype(np.float64))
        cumulative = np.cumsum(mass) / mass.sum()
        length = int(np.searchsorted(cumulative, top_p)) + 1
        got = np.flatnonzero(distribution(row, SamplingParams(top_p=top_p), NO_STOP, EMPTY))
        assert abs(len(got) - length) <= 1, "the two sums may round to either side of top_p"
        np.testing.assert_array_equal(got, np.sort(ranked[: len(got)]))
        for k in (1, 50, 29_999, 30_000):
            np.testing.assert_array_equal(likeliest(row, k), ranked[:k])


def test_filters_keep_the_lower_id_on_ties() -> None:
    row = np.array([1.0, 2.0, 2.0, 1.0, 2.0], dtype=np.float32)

    def kept(**params: float) -> list[int]:
        return np.flatnonzero(distribution(row, SamplingParams(**params), NO_STOP, EMPTY)).tolist()

    assert kept(top_k=2) == [1, 2]
    assert kept(top_k=4) == [0, 1, 2, 4]
    assert kept(top_p=1e-9) == [1]
    assert kept(min_p=1.0) == [1, 2, 4]
    assert kept(top_k=99) == [0, 1, 2, 3, 4]
    assert greedy_token(row, SamplingParams(temperature=0.0), NO_STOP, EMPTY) == 1

    row = np.zeros(4, dtype=np.float32)
    assert kept(top_p=0.5) == [0, 1], "two of four have exactly the mass that was asked for"


def test_temperature_zero_is_one_hot_on_the_greedy_token() -> None:
    row = np.array([0.0, 3.0, 3.0], dtype=np.float32)
    params = SamplingParams(temperature=0.0, logit_bias={2: 0.5})
    np.testing.assert_array_equal(distribution(row, params, NO_STOP, EMPTY), [0, 0, 1])
    assert coupled_token(row, params, NO_STOP, EMPTY, Noise(0), 0) == 2


@pytest.mark.parametrize("temperature", [1e-300, 0.01, 100.0])
def test_extreme_logits_and_temperatures_stay_finite(temperature: float) -> None:
    row = np.array([3e38, -3e38, 2.9e38, -np.inf], dtype=np.float32)
    p = distribution(row, SamplingParams(temperature=temperature), NO_STOP, EMPTY)
    np.testing.assert_array_equal(p, [1, 0, 0, 0])


@pytest.mark.parametrize(
    "params", [SamplingParams(), SamplingParams(temperature=0.0), SamplingParams(top_k=2, top_p=0.5)]
)
@pytest.mark.parametrize(
    ("row", "says"),
    [
        ([0.0, np.nan, 1.0], "model's logits hold NaN at id 1"),
        ([0.0, np.inf, 1.0], r"model's logits hold \+inf at id 1"),
        ([np.inf, np.inf, np.nan], "model's logits hold NaN at id 2"),
        ([-np.inf] * 3, "-inf for every id"),
    ],
)
def test_bad_rows_are_refused_by_name(row, says, params) -> None:
    for choose in (processed_logits, distribution, greedy_token):
        with pytest.raises(Internal, match=says) as caught:
            choose(np.array(row, dtype=np.float32), params, NO_STOP, EMPTY)
        assert caught.value.reason == "BAD_LOGITS"


def test_nothing_left_after_the_mask_is_refused() -> None:
    stopping = StoppingParams(max_tokens=9, min_tokens=1, stop_token_ids=frozenset({0, 1}))
    with pytest.raises(Internal, match="after logit_bias, penalties and masks"):
        distribution(np.zeros(2, dtype=np.float32), SamplingParams(), stopping, EMPTY)


def test_min_tokens_counts_output_only() -> None:
    stopping = StoppingParams(max_tokens=9, min_tokens=2, stop_token_ids=frozenset({0}))
    row = np.array([9.0, 0.0], dtype=np.float32)
    greedy = SamplingParams(temperature=0.0)
    assert [greedy_token(row, greedy, stopping, History([1, 1, 1], [1] * n)) for n in range(4)] == [1, 1, 0, 0]


@pytest.mark.parametrize("probabilities", [[0.25, 0.0, 0.5, 0.25, 0.0], [0.0, 0.0, 1.0], [1.0], [0.0, 2.0, 0.0, 6.0]])
def test_draw_gives_each_id_its_share_of_u(probabilities: list[float]) -> None:
    p = np.array(probabilities)
    grid = 4096
    counts = np.bincount([draw(p, k / grid) for k in range(grid)], minlength=len(p))
    np.testing.assert_array_equal(counts, p / p.sum() * grid)


@settings(max_examples=300, deadline=None)
@given(st.lists(st.floats(0, 1e3) | st.just(0.0), min_size=1, max_size=9).filter(lambda p: sum(p) > 0))
def test_draw_never_returns_an_impossible_id(probabilities: list[float]) -> None:
    p = np.array(probabilities)
    for u in (0.0, 2.0**-53, 0.5, 1 - 2.0**-53):
        assert p[draw(p, u)] > 0


@settings(max_examples=100, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    vocab_size=st.sampled_from([511, 512, 513, 700, 1024, 5000]),
    share=st.sampled_from([0.0, 0.01, 0.5, 1.0]),
    u=st.one_of(st.sampled_from([0.0, 0.5, 1 - 2**-53]), st.floats(0, 1, exclude_max=True)),
)
def test_draw_over_a_large_vocabulary_is_the_inverse_of_the_exact_sum(seed, vocab_size, share, u) -> None:
    rng = np.random.default_rng(seed)
    p = np.exp(rng.normal(size=vocab_size) * 4) * (rng.random(vocab_size) < share)
    p[rng.integers(vocab_size)] = 1.0
    drawn = draw(p, u)
    before, total = math.fsum(p[:drawn]), math.fsum(p)
    assert p[drawn] > 0
    assert before <= u * total + 1e-12 * total
    assert u * total < before + p[drawn] + 1e-12 * total


def test_draw_over_a_large_vocabulary_reaches_every_id() -> None:
    """Each id of equal mass takes its own part of [0, 1), at the seams between blocks too."""
    size = 1024
    assert [draw(np.ones(size), (i + 0.5) / size) for i in range(size)] == list(range(size))
    assert [draw(np.ones(size), i / size) for i in range(size)] == list(range(size))
    one = np.zeros(size)
    for token_id in (0, 255, 256, 511, 1023):
        for mass in (1e-300, 5e-324):
            one[:] = 0.0
            one[token_id] = mass
            assert {draw(one, u) for u in (0.0, 0.3, 1 - 2**-53)} == {token_id}


def test_raw_logprobs_are_those_of_the_softmax() -> None:
    row = np.array([0.0, 2.0, -np.inf, 2.0, 1.0], dtype=np.float32)
    with np.errstate(divide="ignore"):
        expected = np.log(np.exp(row.astype(np.float64)) / np.exp(row.astype(np.float64)).sum())
    logprob, ids, logprobs = raw_logprobs(row, 4, 3)
    assert logprob == pytest.approx(expected[4])
    assert ids.tolist() == [1, 3, 4]
    np.testing.assert_allclose(logprobs, expected[[1, 3, 4]])
    assert raw_logprobs(row, 2, 0)[0] == -np.inf
    assert len(raw_logprobs(row, 0, 0)[1]) == 0
    assert raw_logprobs(row, 0, 99)[1].tolist() == [1, 3, 4, 0, 2]
