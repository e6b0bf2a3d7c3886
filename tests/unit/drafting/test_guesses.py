"""Places, votes and guesses, against slow searches that were written from their meaning."""

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from outrider.drafting.guess import MAX_MATCH_TOKENS, OWN, PAST, Evidence, Guess, Place, continue_places, evidence
from outrider.drafting.suffix import MAX_PLACES, SuffixIndex

TEXT = st.lists(st.integers(0, 3), max_size=60)


def slow_places(ids, recent, min_match):
    """Every earlier place that at least `min_match` of the last tokens of `recent` stand before, newest first."""
    found = []
    for position in range(len(ids) - 1, 0, -1):
        before = ids[:position]
        length = 0
        while length < min(len(before), len(recent), MAX_MATCH_TOKENS) and before[-1 - length] == recent[-1 - length]:
            length += 1
        if length >= min_match:
            found.append((position, length))
    return found


@given(TEXT, TEXT, st.integers(1, 3), st.lists(st.integers(0, 3), max_size=4))
def test_places_are_those_that_a_slow_search_finds(first, second, min_match, tail):
    index = SuffixIndex(min_match)
    index.extend(first)
    index.extend(second)
    ids = [*first, *second]
    expected = slow_places(ids, [*ids, *tail], min_match)
    found = [(place.position, place.num_matching) for place in index.places(tail)]
    assert all(place.source == OWN and place.ids == ids for place in index.places(tail))
    if len(expected) <= MAX_PLACES:
        assert found == expected
    else:
        assert len(found) == MAX_PLACES
        assert set(found) <= set(expected)
        assert max(length for _, length in found) >= min(2 * min_match, max(length for _, length in expected)), (
            "a match that the long chain knows is not hidden by newer short ones"
        )


def test_work_per_token_is_constant_whatever_the_text():
    """Counted in chain entries and not in time: one of each chain, also where every place looks like every other."""
    for ids in ([5] * 3000, [i % 7 for i in range(3000)], list(range(3000))):
        index = SuffixIndex(2)
        index.extend(ids)
        assert [len(chain._previous) for chain in index._chains] == [3000, 3000]
        assert len(index.places()) <= MAX_PLACES


def slow_walk(places, least, tail, num_tokens):
    """Token by token what most places say, the newest among equals; (tokens, votes, places that voted)."""
    alive = [place for place in places if place.num_matching >= least]
    new, tally = list(tail), []
    for index in range(num_tokens):
        said = []
        for place in alive:
            text = list(place.ids) + (new if place.source != PAST else [])
            said.append(text[place.position + index] if place.position + index < len(text) else None)
        votes = Counter(x for x in said if x is not None)
        if not votes:
            break
        most = max(votes.values())
        chosen = next(x for x in said if x is not None and votes[x] == most)
        alive = [place for place, x in zip(alive, said, strict=True) if x == chosen]
        new.append(chosen)
        tally.append((most, sum(votes.values())))
    return tuple(new[len(tail) :]), tally


@given(TEXT, TEXT, st.integers(1, 8))
def test_a_guess_is_what_most_places_say_and_is_scored_by_its_evidence(own, other, num_tokens):
    index = SuffixIndex(1)
    index.extend(own)
    past = [Place(other, position, length, PAST) for position, length in slow_places(other, own, 1)]
    places = index.places() + past
    guess = continue_places("suffix", places, (), num_tokens, Evidence.prior_chance)
    assert guess.expected_accepted() >= 0
    if not places:
        assert not guess
        return
    lengths = {place.num_matching for place in places}
    walks = {least: slow_walk(places, least, (), num_tokens) for least in (max(lengths), min(lengths))}
    assert guess.token_ids in {tokens for tokens, _ in walks.values()}
    expected = []
    for least, (_, tally) in walks.items():
        alive = total = 0.0
        for i, (votes, voters) in enumerate(tally):
            chance = evidence(OWN, least + i, votes, voters).prior_chance()
            alive = chance if i == 0 else alive * chance
            total += alive
        expected.append(total)
    assert abs(guess.expected_accepted() - max(expected)) < 1e-9
    assert len(guess.chances) == len(guess.evidence) == len(guess)
    assert all(0 < chance < 1 for chance in guess.chances)


def test_a_repeating_text_goes_on_repeating():
    index = SuffixIndex(2)
    index.extend([7, 1, 2, 1, 2])
    assert continue_places("x", index.places(), (), 5, Evidence.prior_chance).token_ids == (1, 2, 1, 2, 1)


def test_the_most_frequent_continuation_wins_and_the_newest_among_equals():
    index = SuffixIndex(2)
    index.extend([1, 2, 5, 1, 2, 5, 1, 2, 6, 9, 1, 2])
    assert continue_places("x", index.places(), (), 1, Evidence.prior_chance).token_ids == (5,)
    index = SuffixIndex(2)
    index.extend([1, 2, 5, 9, 1, 2, 6, 9, 1, 2])
    assert continue_places("x", index.places(), (), 1, Evidence.prior_chance).token_ids == (6,)


def test_longer_matches_and_agreement_are_trusted_more():
    chances = [evidence(OWN, length, 1, 1).prior_chance() for length in range(1, 30)]
    assert chances == sorted(chances)
    votes = [evidence(OWN, 3, n, 10).prior_chance() for n in (1, 6, 10)]
    assert votes == sorted(votes)
    assert votes[0] < votes[-1]


def test_a_cut_guess_keeps_its_first_tokens():
    guess = Guess("x", (1, 2, 3), (Evidence(OWN, 2, 2),) * 3, (0.5, 0.4, 0.1))
    assert guess.cut(2) == Guess("x", (1, 2), (Evidence(OWN, 2, 2),) * 2, (0.5, 0.4))
    assert guess.cut(9) is guess
    assert guess.expected_accepted(2) == 0.5 + 0.5 * 0.4
