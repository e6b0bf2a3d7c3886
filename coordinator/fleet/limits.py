"""What the targets of a model can take of our streams, by what they told last: rows of a pass, cache blocks. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Limits:
    """In all, what other coordinators' streams hold left out.

    num_rows: of one pass, so that each stream has one in every pass. num_tokens: what caches promise to streams for
    their whole lives; infinite where a target does not tell. block_size: tokens that are promised together.
    """

    num_rows: int
    num_tokens: float
    block_size: int = 1

    def promised(self, length: int) -> int:
        """Tokens that a stream of at most `length` cached ones is promised: whole blocks."""
        return -(-length // self.block_size) * self.block_size

    def allow(self, num_streams: int, num_tokens: int) -> bool:
        """Whether so many streams, promised so many tokens together, can be there at once."""
        return num_streams <= self.num_rows and num_tokens <= self.num_tokens


def limits_of(
    *, num_rows: int, num_foreign_streams: int, max_blocks: int, num_foreign_blocks: int, block_size: int
) -> Limits:
    """Of one target, whose cache promises `max_blocks` (0: it does not tell); foreign is what is not ours."""
    num_tokens = max(0, max_blocks - num_foreign_blocks) * block_size if max_blocks else math.inf
    return Limits(max(0, num_rows - num_foreign_streams), num_tokens, max(1, block_size))


def together(limits: Iterable[Limits]) -> Limits | None:
    """Of several targets, among which streams are spread; None: there is no target, and nothing is known."""
    found = list(limits)
    if not found:
        return None
    num_tokens = sum(one.num_tokens for one in found)
    return Limits(sum(one.num_rows for one in found), num_tokens, max(one.block_size for one in found))


class Foreign:
    """What other coordinators' streams hold of a target. Ours begin and end while it tells, so that some of them may
    look like others': the least of what was told twice in a row counts."""

    def __init__(self) -> None:
        self.num_streams = 0
        self.num_blocks = 0
        self._last = (0, 0)

    def heard(self, num_streams: int, num_blocks: int) -> None:
        """Of all streams there, those left out that are ours by our own count."""
        now = (max(0, num_streams), max(0, num_blocks))
        self.num_streams, self.num_blocks = (min(one, other) for one, other in zip(now, self._last, strict=True))
        self._last = now
