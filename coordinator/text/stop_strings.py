"""Finds stop strings in text that arrives in pieces, holding back only what could still become one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Match:
    """A stop string that was found; the text has ended."""

    stop: str


class StopStringMatcher:
    """Push pieces, receive what is certain. Which text has been released after n pieces is a function of those pieces.

    The text ends before the first match (after it with `include`): the match that completes earliest, and of those that
    complete at the same code point the longest, which is the one that begins first.
    """

    def __init__(self, stops: Sequence[str], *, include: bool = False) -> None:
        self._stops = sorted(set(stops), key=len, reverse=True)
        self._include = include
        self._held = ""
        self.match: Match | None = None

    def push(self, text: str, *, may_match: bool = True) -> str:
        """Text that is certain now. With `may_match` false, a stop string that completes in `text` is passed over."""
        if not self._stops:
            return text
        buffer, new_from = self._held + text, len(self._held)
        found = self._first_match(buffer, new_from) if may_match else None
        if found is not None:
            start, end, stop = found
            self.match, self._held = Match(stop), ""
            return buffer[: end if self._include else start]
        keep = self._longest_open_suffix(buffer)
        self._held = buffer[len(buffer) - keep :]
        return buffer[: len(buffer) - keep]

    def flush(self) -> str:
        """The text has ended otherwise: what was held back is certain."""
        held, self._held = self._held, ""
        return held

    def _first_match(self, buffer: str, new_from: int) -> tuple[int, int, str] | None:
        best: tuple[int, int, str] | None = None
        for stop in self._stops:
            start = buffer.find(stop, max(0, new_from - len(stop) + 1))
            if start >= 0 and (best is None or start + len(stop) < best[1]):
                best = (start, start + len(stop), stop)
        return best

    def _longest_open_suffix(self, buffer: str) -> int:
        longest = 0
        for stop in self._stops:
            for size in range(min(len(stop) - 1, len(buffer)), longest, -1):
                if buffer.endswith(stop[:size]):
                    longest = size
                    break
        return longest
