"""Free cache blocks, and what a sequence keeps of its own. Holds numbers only; keys and values live in the model.

Contiguous runs are preferred: attention may then read a view instead of a gathered copy.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Callable, Iterable
from collections.abc import Sequence as SequenceOf
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

    def reserve(self, count: int, after: int | None = None) -> list[int]:
        """`count` free blocks, ascending: those right after block `after` if these are free, else the tightest run
        that holds them all, else the longest runs first.

        Raises Internal when fewer are free; ask `can_reserve` first.
        """
        if count < 1 or not self.can_reserve(count):
            raise Internal(f"{count} cache blocks wanted, {self.num_free} are free")
        self.num_free -= count
        if after is not None:
            at = bisect.bisect_left(self._starts, after + 1)
            if at < len(self._starts) and self._starts[at] == after + 1 and self._ends[at] - after > count:
                return self._cut(at, count)
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

    def check_integrity(self, reserved: Iterable[list[int]]) -> None:
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
    """A stream's tokens and the blocks that hold them. Made by `Engine.open_sequence`.

    `token_ids` is what its programs appended. The keys and values of the first `num_computed` of them are in the cache,
    position i in block `blocks[i // block_size]`; that is all of them, unless its blocks went to somebody else in the
    meantime: the engine then computes them again before the sequence's next forward.

    `committed_length` is set by the stream's programs: that many leading tokens, cached or about to be, are final, and
    whole blocks of them may serve other sequences of the same tenant. 0, the default, shares nothing.

    The last len(parents) tokens are a tree (tree.py), and never count as committed. What `keep_path` keeps of it lies
    elsewhere until `moves` are made: (place where it is, place where it belongs), before the next forward.

    `early_ids` follow `token_ids`: only the first layers of their rows were asked for. The cache holds these up to
    place `early_end`, and none where that is not beyond `num_computed`.
    """

    __slots__ = (
        "block_hashes", "block_size", "blocks", "closed", "committed_length", "early_end", "early_ids", "last_used_s",
        "max_length", "moves", "num_computed", "num_promised_blocks", "num_reserved", "opened_at", "parents", "pending",
        "priority", "read_features", "root", "serial", "skips", "token_ids",
    )  # fmt: skip

    def __init__(
        self,
        max_length: int,
        blocks: list[int] | None = None,
        *,
        block_size: int = 1,
        root: bytes = b"",
        priority: int = 0,
        serial: int = 0,
        opened_at: float = 0.0,
        read_features: Callable[[list[int], SequenceOf[int]], Any] | None = None,
        skips: bool = False,
    ) -> None:
        """read_features: the model's, where it has one. skips: its forwards leave out the layers that the model was
        told to skip."""
        self.token_ids: list[int] = []
        self.parents: tuple[int, ...] = ()
        self.moves: list[tuple[int, int]] = []
        self.early_ids: list[int] = []
        self.early_end = 0
        self.max_length = max_length
        self.committed_length = 0
        self.blocks = blocks or []
        self.num_computed = 0
        self.num_reserved = 0
        """Positions that its blocks must hold now; blocks beyond are spare."""
        self.block_size = block_size
        self.num_promised_blocks = math.ceil(max_length / block_size)
        self.root = root
        """What the hash of its first block is chained to: whoever has another one shares nothing with it."""
        self.block_hashes: list[bytes] = []
        """Of its leading computed blocks whose tokens are committed."""
        self.priority = priority
        self.serial = serial
        self.closed = False
        self.pending: Any = None
        """The engine's record of the forward that is to write to this sequence; None between forwards."""
        self.opened_at = opened_at
        self.last_used_s = opened_at
        self.read_features = read_features
        self.skips = skips

    @property
    def length(self) -> int:
        """Number of tokens."""
        return len(self.token_ids)

    @property
    def num_final(self) -> int:
        """Leading tokens whose keys and values are in their place for good."""
        num_final = min(self.committed_length, self.num_computed, len(self.token_ids) - len(self.parents))
        return min(num_final, self.moves[0][1]) if self.moves else num_final

    @property
    def rank(self) -> tuple[int, int]:
        """Lower goes first and keeps its blocks longer: by priority, then by age."""
        return self.priority, self.serial

    def truncate(self, length: int) -> None:
        """Forgets tokens from `length` on, of a tree its last nodes; the blocks stay.

        Raises Internal while a forward of this sequence is pending, or if there are fewer than `length` tokens.
        """
        if self.pending is not None:
            raise Internal("a sequence was truncated while its forward was pending")
        if not 0 <= length <= len(self.token_ids):
            raise Internal(f"cannot truncate {len(self.token_ids)} cached tokens to {length}")
        self.parents = self.parents[: max(0, length - (len(self.token_ids) - len(self.parents)))]
        self.moves = [move for move in self.moves if move[1] < length]
        self.forget_early()
        self.committed_length = min(self.committed_length, length)
        self.num_computed = min(self.num_computed, length)
        del self.block_hashes[length // self.block_size :]
        del self.token_ids[length:]

    def forget_early(self) -> None:
        """Forgets the tokens of early forwards. Only between this sequence's forwards."""
        self.early_ids, self.early_end = [], 0

    def keep_path(self, indices: SequenceOf[int]) -> None:
        """Of the tree keeps nodes `indices`, as plain tokens behind the prefix; they are a path from a root down.

        Raises Internal while a forward of this sequence is pending, or if they are no such path.
        """
        if self.pending is not None:
            raise Internal("a path was kept of a sequence while its forward was pending")
        parents, start = self.parents, len(self.token_ids) - len(self.parents)
        before = -1
        for index in indices:
            if not 0 <= index < len(parents) or parents[index] != before:
                raise Internal(f"nodes {list(indices)} are no path from a root of a tree of {len(parents)} nodes")
            before = index
        if not parents:
            return
        places = [start + index for index in indices]
        computed = [place for place in places if place < self.num_computed]
        self.moves = [(place, start + i) for i, place in enumerate(computed) if place != start + i]
        self.num_computed = min(self.num_computed, start + len(computed))
        self.token_ids[start:] = [self.token_ids[place] for place in places]
        self.committed_length = min(self.committed_length, len(self.token_ids))
        self.parents = ()

    def features(self, start: int, end: int, states: SequenceOf[int]) -> Any:
        """[end - start, len(states) * H]: what the model keeps of tokens `start` to `end`, states in this order.

        Tokens of early forwards follow the others; of them only the states of the first layers are there to be read.
        A tree's nodes are the last tokens, in its order, until a path is kept. On the engine's thread only. Raises
        Internal while a forward of this sequence is pending, on a state that is not kept, and unless all these tokens
        are in the cache: right after a forward all are, later their blocks may be somebody else's.
        """
        if self.pending is not None:
            raise Internal("states of a sequence were read while its forward was pending")
        num_cached = max(self.num_computed, self.early_end)
        if not 0 <= start <= end <= num_cached:
            raise Internal(f"states of tokens {start} to {end} were read, {num_cached} are in the cache")
        if self.read_features is None:
            raise Internal("states were read of a model that keeps none")
        moved, size = {new: old for old, new in self.moves}, self.block_size
        places = [moved.get(place, place) for place in range(start, end)]
        return self.read_features([self.blocks[p // size] * size + p % size for p in places], states)


def _runs(blocks: list[int]) -> list[tuple[int, int]]:
    """Ascending numbers as (start, end) of consecutive ones."""
    runs: list[tuple[int, int]] = []
    for block in blocks:
        if runs and runs[-1][1] == block:
            runs[-1] = (runs[-1][0], block + 1)
        else:
            runs.append((block, block + 1))
    return runs
