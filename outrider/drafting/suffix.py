"""A growing text that finds the earlier places where its newest tokens stood. Constant time per token."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

from outrider.drafting.guess import MAX_MATCH_TOKENS, OWN, Place

MAX_PLACES = 12
"""Newest places that a query looks at."""
NOWHERE = -1


class SuffixIndex:
    """Every place of a text, chained to the one before it with the same last tokens, newest first (as LZ77 matchers
    chain theirs). A query follows the chains and compares backwards, so that it knows the length of each match.

    min_match: shortest match that counts. `ids` is the text; it only grows. Some 280 bytes a token.
    """

    def __init__(self, min_match: int) -> None:
        if min_match < 1:
            raise ValueError(f"min_match is {min_match}, must be at least 1")
        self.ids: list[int] = []
        # The longer chain finds a long match that newer places of the short one's frequent tokens would hide.
        self._chains = (_Chain(2 * min_match), _Chain(min_match))

    def extend(self, token_ids: Sequence[int]) -> None:
        """Appends tokens."""
        for token_id in token_ids:
            # A place is entered once something follows it, so that the newest tokens never match themselves.
            for chain in self._chains:
                chain.enter(self.ids)
            self.ids.append(token_id)

    def places(self, tail: Sequence[int] = ()) -> list[Place]:
        """Where the last tokens of text and `tail` stood in the text before, newest first."""
        recent = [*self.ids[-MAX_MATCH_TOKENS:], *tail][-MAX_MATCH_TOKENS:]
        found: dict[int, Place] = {}
        for chain in self._chains:
            position = chain.newest(recent)
            while position != NOWHERE and len(found) < MAX_PLACES:
                if position not in found:
                    found[position] = Place(self.ids, position, match_length(self.ids, position, recent), OWN)
                position = chain.previous(position)
        return sorted(found.values(), key=lambda place: -place.position)


class _Chain:
    """Places by the `length` tokens before them."""

    def __init__(self, length: int) -> None:
        self._length = length
        self._newest: dict[tuple[int, ...], int] = {}
        self._previous = array("i")

    def enter(self, ids: Sequence[int]) -> None:
        """The place at the end of `ids`, which is one token further than last time."""
        position = len(ids)
        if position < self._length:
            self._previous.append(NOWHERE)
            return
        key = tuple(ids[position - self._length :])
        self._previous.append(self._newest.get(key, NOWHERE))
        self._newest[key] = position

    def newest(self, recent: Sequence[int]) -> int:
        if len(recent) < self._length:
            return NOWHERE
        return self._newest.get(tuple(recent[-self._length :]), NOWHERE)

    def previous(self, position: int) -> int:
        return self._previous[position]


def match_length(ids: Sequence[int], position: int, recent: Sequence[int]) -> int:
    """How many tokens before `position` are the last ones of `recent`."""
    length, most = 0, min(position, len(recent))
    while length < most and ids[position - 1 - length] == recent[-1 - length]:
        length += 1
    return length
