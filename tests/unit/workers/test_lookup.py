"""N-gram lookup: longest first, most recent first, as a slow search over the whole text finds it."""

import numpy as np
import pytest
from conftest import scaled

from outrider.drafting.lookup import NgramIndex


def slow_continuation(ids, num_tokens, min_ngram, max_ngram):
    for n in range(min(max_ngram, len(ids)), min_ngram - 1, -1):
        for end in range(len(ids) - 1, n - 1, -1):
            if ids[end - n : end] == ids[-n:]:
                text = list(ids)
                for position in range(end, end + num_tokens):
                    text.append(text[position])
                return text[len(ids) :]
    return []


@pytest.mark.parametrize("vocab", [2, 3, 8])
def test_equals_the_slow_search_at_every_length(vocab):
    num_found = 0
    for seed in range(scaled(100)):
        rng = np.random.default_rng(seed)
        min_ngram = int(rng.integers(1, 4))
        max_ngram = min_ngram + int(rng.integers(3))
        index, ids = NgramIndex(min_ngram, max_ngram), []
        while len(ids) < 60:
            ids += rng.integers(vocab, size=rng.integers(1, 6)).tolist()
            found = index.continuation(ids, 5)
            assert found == slow_continuation(ids, 5, min_ngram, max_ngram)
            num_found += bool(found)
    assert num_found > 0


def test_a_repeating_text_goes_on_repeating():
    assert NgramIndex(2, 4).continuation([7, 1, 2, 1, 2], 5) == [1, 2, 1, 2, 1]
    assert NgramIndex(2, 4).continuation([5, 5, 5], 4) == [5, 5, 5, 5]


def test_nothing_found_is_nothing_drafted():
    assert NgramIndex(2, 4).continuation([1, 2, 3, 4], 5) == []
    assert NgramIndex(2, 4).continuation([1], 5) == []


def test_lengths_must_be_a_range():
    with pytest.raises(ValueError, match="no range"):
        NgramIndex(3, 2)
