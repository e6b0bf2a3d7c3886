"""Guesses from text that was seen before: where it stood, what followed, how many places agree. One-hot, no model.

Why anything may feed a guess. A guess is fixed before any coin of its round is thrown, and its q is one-hot: the rule
accepts x with probability p(x), else draws from p without x, so the emitted token has law p whatever x is, and under
greedy and COUPLED the target's own choice decides alone. The one condition is that the guess knows nothing of the noise
it will meet. Inside one stream that holds, since noise is keyed by the exact prefix, a committed prefix only grows and
a discarded one never comes back. Between streams it holds where their seeds were drawn apart: what another stream of
the *same* seed has sampled tells of the very coins, so a stream of TOKEN or BLOCK whose seed the client gave must not
read it (`past.py`).
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

OWN, PAST = "own", "past"
"""Where a place lies: in the stream's own text, in another output of its tenant."""
MAX_MATCH_TOKENS = 32
"""A longer match says no more."""
_LENGTH_CLASSES = (1, 2, 3, 4, 5, 7, 10, 16)
_SAMPLED_PRIORS = (0.1, 0.25, 0.45, 0.6, 0.7, 0.8, 0.88, 0.93)
_GREEDY_PRIORS = (0.3, 0.5, 0.65, 0.75, 0.82, 0.85, 0.92, 0.97)
"""Chance of acceptance that is assumed of a match of at least so many tokens, until it was measured. A greedy text
repeats itself, and its prompt, more surely."""
_SHARE_PRIORS = (0.5, 0.75, 1.0, 1.05)


class Evidence(NamedTuple):
    """What speaks for one guessed token, in classes coarse enough to learn each one's chance.

    source: see `Place`. length: matching tokens before it, the guessed ones included. agreement: 0 below half of the
    places, 1 below four fifths, 2 a single place, 3 nearly all.
    """

    source: str
    length: int
    agreement: int

    def prior_chance(self, greedy: bool = False) -> float:
        """Of acceptance, before anything was measured."""
        index = bisect_right(_LENGTH_CLASSES, max(1, self.length)) - 1
        prior = (_GREEDY_PRIORS if greedy else _SAMPLED_PRIORS)[index]
        return min(0.97, prior * _SHARE_PRIORS[self.agreement])


def evidence(source: str, num_matching: int, num_votes: int, num_places: int) -> Evidence:
    """Of a token that `num_votes` of `num_places` places continue with, after `num_matching` matching tokens."""
    length = _LENGTH_CLASSES[bisect_right(_LENGTH_CLASSES, max(1, num_matching)) - 1]
    share = num_votes / num_places
    if share < 0.8:
        return Evidence(source, length, int(share >= 0.5))
    return Evidence(source, length, 2 if num_places == 1 else 3)


class Place(NamedTuple):
    """The newest tokens stood before `ids[position]`, `num_matching` of them.

    source: what is learnt of the chances of such places goes under this name. In any but `PAST`, `ids` is the text that
    is being continued, so that a copy which reaches its end goes on in what it has copied itself, and a repeating text
    is continued at any length.
    """

    ids: Sequence[int]
    position: int
    num_matching: int
    source: str

    def following(self, index: int, new_ids: Sequence[int]) -> int | None:
        """Token `index` after the place; `new_ids` come after the text's own. None: the text ends before it."""
        position = self.position + index
        if position < len(self.ids):
            return self.ids[position]
        return None if self.source == PAST else new_ids[position - len(self.ids)]


Chance = Callable[[Evidence], float]


@dataclass(frozen=True, slots=True)
class Guess:
    """A chain of one-hot drafts. `chances[i]`: of token i being accepted once those before it are."""

    drafter: str = ""
    token_ids: tuple[int, ...] = ()
    evidence: tuple[Evidence, ...] = ()
    chances: tuple[float, ...] = ()

    def __len__(self) -> int:
        return len(self.token_ids)

    def cut(self, num_tokens: int) -> Guess:
        """The first so many tokens."""
        n = num_tokens
        return self if n >= len(self) else Guess(self.drafter, self.token_ids[:n], self.evidence[:n], self.chances[:n])

    def expected_accepted(self, num_tokens: int | None = None) -> float:
        """Drafts expected to stand when the first so many (None: all) are verified."""
        expected, alive = 0.0, 1.0
        for chance in self.chances[:num_tokens]:
            alive *= chance
            expected += alive
        return expected


def continue_places(
    drafter: str, places: Sequence[Place], tail: Sequence[int], num_tokens: int, chance: Chance
) -> Guess:
    """What most places were followed by, the first (own before others', newest before older) where they are even, token
    by token.

    Tried among the longest matches alone, and among all of them: long ones are right more often, many ones agree less
    by chance. What has more expected tokens is taken. `tail`: tokens after the text that the matches include.
    """
    if not places:
        return Guess(drafter)
    longest = max(place.num_matching for place in places)
    least_lengths = {longest, min(place.num_matching for place in places)}
    tried = [
        _walk(drafter, [p for p in places if p.num_matching >= least], least, tail, num_tokens, chance)
        for least in sorted(least_lengths, reverse=True)
    ]
    return max(tried, key=Guess.expected_accepted)


def _walk(
    drafter: str, places: Sequence[Place], num_matching: int, tail: Sequence[int], num_tokens: int, chance: Chance
) -> Guess:
    new_ids, found, chances = list(tail), [], []
    for index in range(num_tokens):
        # in the order of the places, so that the newest one's token comes first among equals
        voters: dict[int, list[Place]] = {}
        num_places = 0
        for place in places:
            token_id = place.following(index, new_ids)
            if token_id is not None:
                voters.setdefault(token_id, []).append(place)
                num_places += 1
        if not voters:
            break
        chosen = max(voters, key=lambda token_id: len(voters[token_id])) if len(voters) > 1 else next(iter(voters))
        places = voters[chosen]
        found.append(evidence(places[0].source, num_matching + index, len(places), num_places))
        chances.append(chance(found[-1]))
        new_ids.append(chosen)
    return Guess(drafter, tuple(new_ids[len(tail) :]), tuple(found), tuple(chances))
