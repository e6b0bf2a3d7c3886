"""What streams leave to later ones: found again, kept apart by scope, bounded in bytes that are really used."""

import random
import tracemalloc

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outrider.drafting.past import ANCHOR_TOKENS, CONTEXT_TOKENS, Corrections, PastOutputs


def found(past, scope, recent):
    return [(tuple(place.ids), place.position, place.num_matching) for place in past.places(scope, recent)]


def test_a_text_is_found_by_its_last_tokens():
    past = PastOutputs(1 << 20)
    past.add("t", [1, 2, 3, 4, 5])
    assert found(past, "t", [9, 2, 3, 4]) == [((1, 2, 3, 4, 5), 4, 3)]
    assert found(past, "t", [1, 2, 3, 4]) == [((1, 2, 3, 4, 5), 4, 4)]
    assert found(past, "t", [3, 4]) == []
    assert found(past, "t", [3, 4, 5]) == [], "nothing follows there"


def test_scopes_see_nothing_of_one_another():
    past, corrections = PastOutputs(1 << 20), Corrections(1 << 20)
    past.add(("m", "a"), [1, 2, 3, 4])
    corrections.learn(("m", "a"), [1, 2, 3], 4)
    for other in (("m", "b"), ("n", "a"), "a"):
        assert found(past, other, [1, 2, 3]) == []
        assert corrections.choice(other, [1, 2, 3]) is None
    assert found(past, ("m", "a"), [1, 2, 3]) != []
    assert corrections.choice(("m", "a"), [1, 2, 3]) == (4, 1)


def test_the_least_recently_used_text_goes_first():
    texts = [[10 * i + j for j in range(10)] for i in range(4)]
    probe = PastOutputs(1 << 30)
    probe.add("t", texts[0])
    past = PastOutputs(3 * probe.num_bytes)
    for text in texts[:3]:
        past.add("t", text)
    assert past.num_texts == 3
    past.places("t", texts[0][:5])  # used
    past.add("t", texts[1])  # comes again
    past.add("t", texts[3])
    kept = [i for i, text in enumerate(texts) if found(past, "t", text[:5])]
    assert kept == [0, 1, 3]
    assert past.num_texts == 3


def test_the_same_text_is_kept_once():
    past = PastOutputs(1 << 20)
    past.add("t", [1, 2, 3, 4])
    size = past.num_bytes
    past.add("t", [1, 2, 3, 4])
    assert (past.num_texts, past.num_bytes) == (1, size)
    assert len(found(past, "t", [1, 2, 3])) == 1


@given(
    st.lists(
        st.tuples(st.sampled_from("ab"), st.lists(st.integers(0, 2), max_size=12), st.lists(st.integers(0, 2))),
        max_size=30,
    )
)
def test_places_are_true_whatever_was_added_and_forgotten(steps):
    past = PastOutputs(20_000)
    added = {"a": [], "b": []}
    for scope, text, recent in steps:
        past.add(scope, text)
        added[scope].append(tuple(text))
        assert past.num_bytes <= 20_000
        for place in past.places(scope, recent):
            assert tuple(place.ids) in added[scope]
            n = place.num_matching
            assert n >= ANCHOR_TOKENS
            assert list(place.ids[place.position - n : place.position]) == recent[-n:]
    for scope in "ab":
        for anchor, packed in past._places.get(scope, {}).items():
            assert packed, anchor
            assert all(number >> 32 in past._texts for number in packed)


def test_a_text_that_does_not_fit_keeps_its_end():
    past = PastOutputs(20_000)
    text = list(range(1000))
    past.add("t", text)
    assert 0 < past.num_bytes <= 20_000
    assert found(past, "t", text[-5:-1]) != []
    assert found(past, "t", text[:5]) == []


@pytest.mark.parametrize("max_bytes", [0, 100])
def test_no_room_is_no_cache(max_bytes):
    past, corrections = PastOutputs(max_bytes), Corrections(max_bytes)
    past.add("t", list(range(100)))
    corrections.learn("t", [1, 2, 3], 4)
    assert past.num_texts == past.num_bytes == corrections.num_bytes == 0
    assert corrections.choice("t", [1, 2, 3]) is None


def test_the_bound_holds_in_real_memory():
    """Texts of all different ids, the dearest kind, for as long as it takes to turn the cache over several times."""
    rng, limit = random.Random(1), 1 << 20
    tracemalloc.start()
    try:
        past, corrections = PastOutputs(limit), Corrections(limit)
        before = tracemalloc.get_traced_memory()[0]
        for i in range(60):
            past.add(("m", f"tenant {i % 7}"), [rng.randrange(1 << 30) for _ in range(rng.choice([5, 50, 300]))])
            assert past.num_bytes <= limit
        used = tracemalloc.get_traced_memory()[0] - before
        assert past.num_bytes > limit // 2, "INCONCLUSIVE: the cache never filled"
        assert used <= 1.1 * limit
        before = tracemalloc.get_traced_memory()[0]
        for _ in range(3 * limit // 400):
            corrections.learn(("m", "t"), [rng.randrange(1 << 30) for _ in range(3)], rng.randrange(1 << 30))
        assert corrections.num_bytes > limit // 2, "INCONCLUSIVE: the cache never filled"
        assert tracemalloc.get_traced_memory()[0] - before <= 1.1 * limit
    finally:
        tracemalloc.stop()


def test_corrections_keep_the_newest_choice_and_count_agreement():
    corrections = Corrections(1 << 20)
    corrections.learn("t", [0, 1, 2, 3], 7)
    corrections.learn("t", [9, 1, 2, 3], 7)
    assert corrections.choice("t", [5, 5, 1, 2, 3]) == (7, 2)
    corrections.learn("t", [1, 2, 3], 8)
    assert corrections.choice("t", [1, 2, 3]) == (8, 1)
    corrections.learn("t", [1] * (CONTEXT_TOKENS - 1), 5)
    assert corrections.choice("t", [1] * (CONTEXT_TOKENS - 1)) is None


def test_corrections_forget_the_least_recently_used():
    corrections = Corrections(3 * 400)
    for i in range(3):
        corrections.learn("t", [i, i, i], i)
    corrections.choice("t", [0, 0, 0])
    corrections.learn("t", [3, 3, 3], 3)
    kept = [i for i in range(4) if corrections.choice("t", [i, i, i])]
    assert kept == [0, 2, 3]
