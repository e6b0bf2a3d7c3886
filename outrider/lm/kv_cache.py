"""Which cache block belongs to whom. Holds numbers only; the keys and values live in the model.

Blocks of a sequence are reserved for its whole life when it opens, so a running sequence can never be short of one, and
truncation only forgets ids. Contiguous runs are preferred: attention may then read a view instead of a gathered copy.
"""

from __future__ import annotations

import bisect
from typing import Any

from outrider.errors import Internal


class BlockAllocator:
    """Hands out block numbers 0 .. num_blocks - 1, as few and as long runs as it can."""

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self.num_free = num_blocks
        # Free blocks as maximal runs, ascending: `_starts[i]` .. `_ends[i] - 1`.
        self._starts: list[int] = [0] if num_blocks else []
        self._ends: list[int] = [num_blocks] if num_blocks else []

    def can_reserve(self, count: int) -> bool:
        """Whether `reserve(count)` would succeed now."""
        return count <= self.num_free

    def reserve(self, count: int) -> list[int]:
        """`count` free blocks, ascending: the tightest run that holds them all, else the longest runs first.

        Raises Internal when fewer are free; ask `can_reserve` first.
        """
        if count < 1 or not self.can_reserve(count):
            raise Internal(f"{count} cache blocks wanted, {self.num_free} are free")
        self.num_free -= count
        lengths = [end - start for start, end in zip(self._starts, self._ends, strict=True)]
        fitting = [(length, index) for index, length in enumerate(lengths) if length >= count]
        if fitting:
            return self._cut(min(fitting)[1], count)
        blocks: list[int] = []
        while len(blocks) < count:
            longest = max(range(len(self._starts)), key=lambda i: self._ends[i] - self._starts[i])
            available = self._ends[longest] - self._starts[longest]
            blocks += self._cut(longest, min(available, count - len(blocks)))
        return sorted(blocks)

    def free(self, blocks: list[int]) -> None:
        """Gives blocks back. Raises Internal, and changes nothing, when one of them is out of range or free already."""
        runs = _runs(sorted(blocks))
        for start, end in runs:
            at = bisect.bisect_right(self._starts, start) - 1
            overlaps_left = at >= 0 and self._ends[at] > start
            overlaps_right = at + 1 < len(self._starts) and self._starts[at + 1] < end
            if start < 0 or end > self.num_blocks or overlaps_left or overlaps_right:
                raise Internal(f"cache blocks {start} to {end - 1} freed twice or unknown")
        if len(set(blocks)) != len(blocks):
            raise Internal("a cache block is listed twice")
        for start, end in runs:
            self._insert(start, end)
        self.num_free += len(blocks)

    def check_integrity(self, reserved: list[list[int]]) -> None:
        """Raises Internal unless every block is either free or in exactly one of `reserved`."""
        free = [block for s, e in zip(self._starts, self._ends, strict=True) for block in range(s, e)]
        held = [block for blocks in reserved for block in blocks]
        if len(free) != self.num_free:
            raise Internal(f"{len(free)} blocks in free runs, {self.num_free} counted")
        if sorted(free + held) != list(range(self.num_blocks)):
            raise Internal("cache blocks leaked, or belong to two owners")
        if any(end >= start for end, start in zip(self._ends, self._starts[1:], strict=False)):
            raise Internal("free runs touch each other")

    def _cut(self, index: int, count: int) -> list[int]:
        start = self._starts[index]
        self._starts[index] += count
        if self._starts[index] == self._ends[index]:
            del self._starts[index], self._ends[index]
        return list(range(start, start + count))

    def _insert(self, start: int, end: int) -> None:
        at = bisect.bisect_left(self._starts, start)
        if at < len(self._starts) and self._starts[at] == end:
            end = self._ends[at]
            del self._starts[at], self._ends[at]
        if at > 0 and self._ends[at - 1] == start:
            self._ends[at - 1] = end
        else:
            self._starts.insert(at, start)
            self._ends.insert(at, end)


class Sequence:
    """Tokens in the cache and the blocks that hold them. Made by `Engine.open_sequence`.

    `token_ids` are the ids whose keys and values are in the cache; position i lies in block `blocks[i // block_size]`.
    """

    __slots__ = ("blocks", "closed", "max_length", "opened_at", "pending", "token_ids")

    def __init__(self, max_length: int, blocks: list[int], opened_at: float = 0.0) -> None:
        self.token_ids: list[int] = []
        self.max_length = max_length
        self.blocks = blocks
        self.closed = False
        self.pending: Any = None
        """The engine's record of the forward that is to write to this sequence; None between forwards."""
        self.opened_at = opened_at

    @property
    def length(self) -> int:
        """Number of cached tokens."""
        return len(self.token_ids)

    def truncate(self, length: int) -> None:
        """Forgets cached tokens from `length` on; the blocks stay reserved.

        Raises Internal while a forward of this sequence is pending, or if fewer than `length` tokens are cached.
        """
        if self.pending is not None:
            raise Internal("a sequence was truncated while its forward was pending")
        if not 0 <= length <= len(self.token_ids):
            raise Internal(f"cannot truncate {len(self.token_ids)} cached tokens to {length}")
        del self.token_ids[length:]


def _runs(blocks: list[int]) -> list[tuple[int, int]]:
    """Ascending numbers as (start, end) of consecutive ones."""
    runs: list[tuple[int, int]] = []
    for block in blocks:
        if runs and runs[-1][1] == block:
            runs[-1] = (runs[-1][0], block + 1)
        else:
            runs.append((block, block + 1))
    return runs
