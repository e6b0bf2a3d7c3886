"""The tables of all sequences over one pool of blocks: prefix hits, blocks to write to, publishing, giving up.

Rows are only ever written to blocks that one table holds and nobody can find by hash. Where others hold it too, a block
that begins with tokens to keep is copied (copy on write), any other is replaced by a fresh one.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable

from outrider.lm.block_pool import BlockPool, block_hash, root_hash
from outrider.lm.kv_cache import Sequence

MAX_SPARE_FROM_CACHED = 8


class SequenceCache:
    """Thread-safe: sequences are closed on the event loop, everything else happens on the engine's thread.

    copy_block(source, destination) copies keys and values in the model, move_slots(sources, destinations) as in
    `LanguageModel`. namespace names whatever decides a key or value
    besides ids and tenant: model, number type, numerics.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        copy_block: Callable[[int, int], None],
        namespace: str = "",
        move_slots: Callable[[list[int], list[int]], None] | None = None,
    ) -> None:
        self.block_size = block_size
        self.num_copied_blocks = 0
        self._namespace = namespace
        self._copy_block = copy_block
        self._move_slots = move_slots
        self._pool = BlockPool(num_blocks)
        self._holders: set[Sequence] = set()
        self._lock = threading.Lock()

    @property
    def num_blocks(self) -> int:
        """All blocks there are."""
        return self._pool.num_blocks

    @property
    def num_free_blocks(self) -> int:
        """Blocks in no table, those kept for their content included."""
        return self._pool.num_available

    @property
    def num_cached_blocks(self) -> int:
        """Blocks in no table that are kept for their content."""
        return self._pool.num_cached

    def root(self, tenant: str, skips: bool = False) -> bytes:
        """The root of a tenant's sequences; of those that skip layers it is another."""
        return root_hash(self._namespace + "|skips" * skips, tenant)

    def chain(self, sequence: Sequence, token_ids: list[int], num_tokens: int) -> list[bytes]:
        """Hashes of the full blocks among the first `num_tokens` of `token_ids`."""
        digests, size = list(sequence.block_hashes), self.block_size
        for index in range(len(digests), num_tokens // size):
            parent = digests[-1] if digests else sequence.root
            digests.append(block_hash(parent, token_ids[index * size : (index + 1) * size]))
        return digests

    def first_missing(self, chain: list[bytes], start: int) -> int:
        """Index from `start` on of the first block of `chain` that nobody has computed."""
        with self._lock:
            while start < len(chain) and self._pool.find(chain[start]) is not None:
                start += 1
        return start

    def adopt(self, sequence: Sequence, chain: list[bytes], limit: int) -> None:
        """Takes computed blocks of `chain` into the table in place of what follows the computed tokens, which fill
        whole blocks. `num_computed` grows, to `limit` at most: the last block may then hold more than is counted."""
        start = sequence.num_computed // self.block_size
        with self._lock:
            shared: list[int] = []
            for digest in chain[start : -(-limit // self.block_size)]:
                block = self._pool.find(digest)
                if block is None:
                    break
                self._pool.share(block)
                shared.append(block)
            if not shared:
                return
            self._pool.release(sequence.blocks[start:])
            sequence.blocks = sequence.blocks[:start] + shared
            sequence.num_computed = min(limit, len(sequence.blocks) * self.block_size)
            sequence.num_reserved = sequence.num_computed
            sequence.early_end = 0
            self._holders.add(sequence)

    def reserve(self, sequence: Sequence, length: int) -> int:
        """Makes the table fit to write positions `num_computed` to `length`. Returns how many blocks are missing for
        that, and has changed nothing unless that is 0. It takes more than is needed now, for the sake of long runs: for
        the whole life where so many blocks hold nothing, a few at the cost of cached content.
        """
        size, pool = self.block_size, self._pool
        first, num_needed = sequence.num_computed // size, -(-length // size)
        with self._lock:
            blocks = sequence.blocks
            held = range(first, min(num_needed, len(blocks)))
            foreign = [i for i in held if pool.is_shared(blocks[i])]
            num_new = max(0, num_needed - len(blocks))
            num_missing = num_new + len(foreign) - pool.num_available
            if num_missing > 0:
                return num_missing
            for index in held:
                if index in foreign:
                    self._replace(blocks, index, keep=index * size < sequence.num_computed)
                else:
                    pool.withdraw(blocks[index])
            if num_new:
                num_empty = pool.num_available - pool.num_cached
                num_spare = max(num_empty - num_new, min(MAX_SPARE_FROM_CACHED, pool.num_available - num_new))
                num_new += min(num_spare, sequence.num_promised_blocks - num_needed)
                blocks += pool.take(num_new, after=blocks[-1] if blocks else None)
            sequence.num_reserved = max(length, sequence.num_computed)
            self._holders.add(sequence)
            return 0

    def settle(self, sequences: Iterable[Sequence]) -> None:
        """What these kept of trees goes where it belongs, all in one call of the model. Their blocks hold no other
        sequence's tokens there: rows were written to them, and nothing of them was published."""
        size, sources, destinations = self.block_size, [], []
        with self._lock:
            for sequence in sequences:
                for source, destination in sequence.moves:
                    sources.append(sequence.blocks[source // size] * size + source % size)
                    destinations.append(sequence.blocks[destination // size] * size + destination % size)
                sequence.moves = []
            if sources:
                assert self._move_slots is not None
                self._move_slots(sources, destinations)

    def reclaim_spare(self) -> None:
        """Every sequence gives up blocks that its next rows do not need."""
        with self._lock:
            for sequence in self._holders:
                num_needed = -(-sequence.num_reserved // self.block_size)
                self._pool.release(sequence.blocks[num_needed:])
                del sequence.blocks[num_needed:]

    def publish(self, sequence: Sequence) -> None:
        """Whole blocks of computed, committed tokens may be found by others from now on."""
        with self._lock:
            self._publish(sequence)

    def evict(self, sequence: Sequence) -> None:
        """Its blocks go; its ids stay, to be computed again. What was published stays until somebody needs room."""
        with self._lock:
            self._publish(sequence)
            self._pool.release(sequence.blocks)
            self._holders.discard(sequence)
            sequence.blocks = []
            sequence.num_computed = sequence.num_reserved = sequence.early_end = 0
            sequence.block_hashes = []
            sequence.moves = []

    def holders(self) -> list[Sequence]:
        """Sequences with blocks."""
        with self._lock:
            return list(self._holders)

    def num_freed_by(self, sequences: list[Sequence]) -> int:
        """Blocks that would be free if all of these were evicted."""
        with self._lock:
            return self._pool.num_freed_by([s.blocks for s in sequences])

    def check_integrity(self, sequences: list[Sequence]) -> None:
        """Raises Internal unless exactly the blocks in the tables of `sequences` are taken."""
        with self._lock:
            self._pool.check_integrity([s.blocks for s in sequences])

    def _replace(self, blocks: list[int], index: int, keep: bool) -> None:
        """A block of our own in place of one that others hold too."""
        old, (new,) = blocks[index], self._pool.take(1)
        if keep:
            self._copy_block(old, new)
            self.num_copied_blocks += 1
        blocks[index] = new
        self._pool.release([old])

    def _publish(self, sequence: Sequence) -> None:
        num_final = sequence.num_final
        if num_final // self.block_size <= len(sequence.block_hashes) or not sequence.blocks:
            return
        start = len(sequence.block_hashes)
        sequence.block_hashes = self.chain(sequence, sequence.token_ids, num_final)
        for index in range(start, len(sequence.block_hashes)):
            self._pool.publish(sequence.blocks[index], sequence.block_hashes[index])
