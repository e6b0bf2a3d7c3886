"""Drafts from the text itself: what followed the last occurrence of the newest n-gram. One-hot, no model.

Prompt lookup decoding (Saxena 2023), with the longest n-gram first and the most recent match first.
"""

from __future__ import annotations

from collections.abc import Sequence


class NgramIndex:
    """Where each n-gram of a growing list of ids was last seen. Constant time per id.

    min_ngram, max_ngram: lengths that match, both inclusive.
    """

    def __init__(self, min_ngram: int, max_ngram: int) -> None:
        if not 1 <= min_ngram <= max_ngram:
            raise ValueError(f"n-gram lengths {min_ngram} to {max_ngram} are no range")
        self._lengths = range(max_ngram, min_ngram - 1, -1)
        self._continuations: dict[tuple[int, ...], int] = {}
        self._num_indexed = 0

    def extend(self, ids: Sequence[int]) -> None:
        """Takes in what `ids` has beyond the last call; earlier ids must not have changed."""
        # An n-gram is entered once its continuation is known, so that the newest n-gram never matches itself.
        for position in range(self._num_indexed, len(ids)):
            for n in self._lengths:
                if n <= position:
                    self._continuations[tuple(ids[position - n : position])] = position
        self._num_indexed = len(ids)

    def continuation(self, ids: Sequence[int], num_tokens: int) -> list[int]:
        """Up to `num_tokens` ids that followed the best match; empty without one.

        A copy that reaches the end of `ids` goes on in what it has copied itself, so that a repeating text is
        continued at any length.
        """
        self.extend(ids)
        for n in self._lengths:
            start = self._continuations.get(tuple(ids[-n:])) if n <= len(ids) else None
            if start is not None:
                copied: list[int] = []
                for position in range(start, start + num_tokens):
                    copied.append(ids[position] if position < len(ids) else copied[position - len(ids)])
                return copied
        return []
