"""Masks: against a slow twin, over random outputs, and the promise that some token is always left."""

import numpy as np
import pytest
from conftest import scaled
from hypothesis import given, settings
from hypothesis import strategies as st

from outrider.errors import DeadEnd, Internal
from outrider.sampling import History, SamplingParams, StoppingParams, distribution, processed_logits
from outrider.sampling.masks import is_masked, leaves_a_token
from outrider.sampling.sparse_q import sparse_q

VOCAB = 6
ids = st.integers(0, VOCAB - 1)
param_sets = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.7, 1.0]),
    top_k=st.integers(0, 3),
    top_p=st.sampled_from([0.6, 1.0]),
    repetition_penalty=st.sampled_from([1.0, 1.5]),
    logit_bias=st.dictionaries(ids, st.sampled_from([-100.0, 100.0])),
    allowed_token_ids=st.lists(ids, max_size=4),
    bad_words=st.lists(st.lists(ids, min_size=1, max_size=3).map(tuple), max_size=4),
)
stoppings = st.builds(
    StoppingParams, max_tokens=st.just(100), min_tokens=st.integers(0, 3), stop_token_ids=st.frozensets(ids, max_size=2)
)


def slow_masked(params, stopping, output) -> set[int]:
    """By definition: append the id and look."""
    masked = set()
    for token_id in range(VOCAB):
        text = [*output, token_id]
        completes = any(tuple(text[-len(word) :]) == word for word in params.bad_words if len(word) <= len(text))
        not_allowed = bool(params.allowed_token_ids) and token_id not in params.allowed_token_ids
        too_soon = len(output) < stopping.min_tokens and token_id in stopping.stop_token_ids
        if completes or not_allowed or too_soon:
            masked.add(token_id)
    return masked


@settings(max_examples=scaled(2000, at_least=300), deadline=None)
@given(params=param_sets, stopping=stoppings, prompt=st.lists(ids, max_size=4), output=st.lists(ids, max_size=6))
def test_equals_the_slow_twin_and_masked_tokens_have_no_probability(params, stopping, prompt, output) -> None:
    history, masked = History(prompt, output), slow_masked(params, stopping, output)
    logits = np.linspace(-1, 1, VOCAB, dtype=np.float32)
    assert {i for i in range(VOCAB) if is_masked(i, params, stopping, history)} == masked
    if len(masked) == VOCAB:
        assert not leaves_a_token(params, stopping, VOCAB)
        return
    row = processed_logits(logits, params, stopping, history)
    assert set(np.nonzero(np.isneginf(row))[0].tolist()) == masked
    assert not any(distribution(logits, params, stopping, history)[sorted(masked)])
    assert not masked & set(sparse_q(logits, params, stopping, history, 64).ids.tolist())


@settings(max_examples=scaled(2000, at_least=300), deadline=None)
@given(params=param_sets, stopping=stoppings, output=st.lists(ids, max_size=6))
def test_what_admission_lets_through_always_has_a_next_token(params, stopping, output) -> None:
    if leaves_a_token(params, stopping, VOCAB):
        assert len(slow_masked(params, stopping, output)) < VOCAB


@pytest.mark.parametrize(
    ("params", "min_tokens", "left"),
    [
        ({}, 0, True),
        ({"allowed_token_ids": (2,)}, 0, True),
        ({"allowed_token_ids": (2,)}, 1, False),
        ({"allowed_token_ids": (2, 3)}, 1, True),
        ({"allowed_token_ids": (3,), "bad_words": ((3,),)}, 0, False),
        ({"allowed_token_ids": (3,), "bad_words": ((5, 3),)}, 0, False),
        ({"bad_words": tuple((i,) for i in range(VOCAB))}, 0, False),
        ({"bad_words": tuple((i,) for i in range(VOCAB - 1))}, 0, True),
    ],
)
def test_whether_a_token_is_left(params, min_tokens, left) -> None:
    stopping = StoppingParams(max_tokens=9, min_tokens=min_tokens, stop_token_ids=frozenset({2}))
    assert leaves_a_token(SamplingParams(**params), stopping, VOCAB) is left


def test_only_the_output_completes_a_word() -> None:
    params, stopping = SamplingParams(bad_words=((1, 2),)), StoppingParams(max_tokens=9)
    assert not is_masked(2, params, stopping, History([1]))
    assert is_masked(2, params, stopping, History([5], [1]))


def test_pushed_drafts_count_and_popped_ones_do_not() -> None:
    params, stopping, history = SamplingParams(bad_words=((1, 2, 3),)), StoppingParams(max_tokens=9), History([0], [1])
    assert not is_masked(3, params, stopping, history)
    history.push(2)
    assert is_masked(3, params, stopping, history)
    history.pop()
    assert not is_masked(3, params, stopping, history)


@pytest.mark.parametrize(
    ("params", "stopping", "field"),
    [
        ({"allowed_token_ids": [1], "bad_words": [(1,)]}, {}, "sampling.allowed_token_ids"),
        ({"bad_words": [(0,), (1,)]}, {}, "sampling.bad_words"),
        ({}, {"min_tokens": 1, "stop_token_ids": frozenset({0, 1})}, "stopping.min_tokens"),
    ],
)
def test_masks_that_leave_no_token_are_the_requests_and_named(params, stopping, field) -> None:
    subject = SamplingParams(**params), StoppingParams(**{"max_tokens": 9, **stopping}), History((), ())
    with pytest.raises(DeadEnd, match=field) as caught:
        processed_logits(np.zeros(2, dtype=np.float32), *subject)
    assert (caught.value.status, caught.value.field) == ("INVALID_ARGUMENT", field)
    with pytest.raises(Internal, match="the model's logits") as bad:
        processed_logits(np.full(2, -np.inf, dtype=np.float32), *subject)
    assert bad.value.reason == "BAD_LOGITS"
