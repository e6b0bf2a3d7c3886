"""Reference-counted cache blocks, and an index of those whose content may be used again.

A block is free, or counted in the table of one or more sequences, or unreferenced but *published*: kept with its
content until somebody finds it by its hash, or until blocks are wanted and it is the one unused for longest.

The hash of a block covers its own ids and, through its parent's hash, every id before; the first block's parent is a
root that names model, number type, numerics and tenant. Equal hashes thus mean equal keys and values.
"""

from __future__ import annotations

import hashlib
from collections import Counter, OrderedDict
from collections.abc import Sequence

import numpy as np

from outrider.errors import Internal
from outrider.lm.kv_cache import BlockAllocator

HASH_BYTES = 16
"""A collision would mix two texts: 128 bits of a cryptographic hash, since prompts come from strangers."""


def root_hash(namespace: str, tenant: str) -> bytes:
    """What the first block of a sequence is chained to."""
    lengths = f"{len(namespace)},{len(tenant)}:"
    return hashlib.blake2b((lengths + namespace + tenant).encode(), digest_size=HASH_BYTES).digest()


def block_hash(parent: bytes, token_ids: Sequence[int]) -> bytes:
    """Hash of a full block of these ids whose predecessor has hash `parent`."""
    return hashlib.blake2b(parent + np.asarray(token_ids, "<i8").tobytes(), digest_size=HASH_BYTES).digest()


class BlockPool:
    """Who holds which block how often, and what is published. Not thread-safe: its owner has the lock."""

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self.num_evictions = 0
        """Published blocks whose content was given up."""
        self._allocator = BlockAllocator(num_blocks)
        self._num_references = [0] * num_blocks
        self._block_of: dict[bytes, int] = {}
        self._hash_of: dict[int, bytes] = {}
        self._unreferenced: OrderedDict[int, None] = OrderedDict()
        """Published blocks in nobody's table, the one unused for longest first."""

    @property
    def num_available(self) -> int:
        """Blocks that `take` could give: free ones, and unreferenced ones whose content would be lost."""
        return self._allocator.num_free + len(self._unreferenced)

    @property
    def num_cached(self) -> int:
        """Unreferenced blocks kept for their content."""
        return len(self._unreferenced)

    def take(self, count: int, after: int | None = None) -> list[int]:
        """`count` blocks with one reference each and no content; see `BlockAllocator.reserve`."""
        if count > self.num_available:
            raise Internal(f"{count} cache blocks wanted, {self.num_available} are available")
        num_missing = count - self._allocator.num_free
        if num_missing > 0:
            evicted = [self._unreferenced.popitem(last=False)[0] for _ in range(num_missing)]
            for block in evicted:
                self._unpublish(block)
            self._allocator.free(evicted)
            self.num_evictions += num_missing
        blocks = self._allocator.reserve(count, after)
        for block in blocks:
            self._num_references[block] = 1
        return blocks

    def find(self, digest: bytes) -> int | None:
        """The published block of this hash."""
        return self._block_of.get(digest)

    def share(self, block: int) -> None:
        """One more reference to a published block, or to one that is in a table already."""
        if not self._num_references[block] and block not in self._unreferenced:
            raise Internal(f"cache block {block} is shared, but holds nothing")
        self._num_references[block] += 1
        self._unreferenced.pop(block, None)

    def release(self, blocks: Sequence[int]) -> None:
        """One reference less to each. Of those then unreferenced the last ones are given up first: the first ones are
        the beginning of more texts."""
        free = []
        for block in reversed(blocks):
            if self._num_references[block] < 1:
                raise Internal(f"cache block {block} released more often than it was taken")
            self._num_references[block] -= 1
            if not self._num_references[block]:
                if block in self._hash_of:
                    self._unreferenced[block] = None
                else:
                    free.append(block)
        if free:
            self._allocator.free(free)

    def publish(self, block: int, digest: bytes) -> None:
        """The block's content is final and has this hash. The first block of a hash stays the published one."""
        if digest not in self._block_of and block not in self._hash_of:
            self._block_of[digest] = block
            self._hash_of[block] = digest

    def is_shared(self, block: int) -> bool:
        """Whether more than one table holds it."""
        return self._num_references[block] > 1

    def withdraw(self, block: int) -> None:
        """Nobody will find it any more: its one holder is about to write to it."""
        self._unpublish(block)

    def num_freed_by(self, tables: Sequence[Sequence[int]]) -> int:
        """Blocks that would become available if all of `tables` were released."""
        counts = Counter(block for table in tables for block in table)
        return sum(self._num_references[block] == count for block, count in counts.items())

    def check_integrity(self, tables: Sequence[Sequence[int]]) -> None:
        """Raises Internal unless each block is free, cached or in exactly as many of `tables` as were counted."""
        counts = Counter(block for table in tables for block in table)
        self._allocator.check_integrity([list(counts), list(self._unreferenced)])
        if any(self._num_references[block] != counts[block] for block in range(self.num_blocks)):
            raise Internal("references to cache blocks are miscounted")
        if any(len(set(table)) != len(table) for table in tables):
            raise Internal("a table holds a cache block twice")
        if {block: digest for digest, block in self._block_of.items()} != self._hash_of:
            raise Internal("the index of cached blocks contradicts itself")
        if any(block not in self._hash_of for block in self._unreferenced):
            raise Internal("a cache block is kept that nobody can find")
        if any(not counts[block] and block not in self._unreferenced for block in self._hash_of):
            raise Internal("a free cache block is published")

    def _unpublish(self, block: int) -> None:
        digest = self._hash_of.pop(block, None)
        if digest is not None:
            del self._block_of[digest]
