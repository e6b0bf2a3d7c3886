"""Random histories of sequences that share texts, on an engine short of blocks; every kind of event is counted."""

import asyncio
import random
from collections import Counter

from lm_programs import is_fragmented

from outrider.lm.interface import Forward

KINDS = (
    "accepts", "rejections", "truncations", "prefix_hits", "copies", "preemptions", "idle_evictions", "evicted_blocks",
    "fragmented", "recomputed_rows", "reopenings",
)  # fmt: skip
MAX_REOPENED = 70
"""Tokens of a text that a session goes on with: with its own it still fits the cache alone."""


class Histories:
    """Sequences follow one of a few texts, or leave it; drafts are accepted in part; logits are handed to `check`.

    check(prefix, num_logits, logits): logits of the last rows after `prefix`.
    """

    def __init__(self, engine, vocab_size, check, seed):
        self.engine, self.check, self.vocab_size = engine, check, vocab_size
        self.counts = Counter()
        self.num_rows_asked = 0
        self.rng = random.Random(seed)
        self.texts = [self._draw(90) for _ in range(3)]

    def _draw(self, count):
        return [self.rng.randrange(self.vocab_size) for _ in range(count)]

    async def run(self, num_workers, num_sessions):
        """All workers at once, each one session after another; again where a kind of event has not come up yet."""
        for _ in range(20):
            seeds = [self.rng.random() for _ in range(num_workers)]
            await asyncio.gather(*(self._worker(random.Random(seed), num_sessions) for seed in seeds))
            stats = self.engine.stats()
            assert stats.num_free_blocks == stats.num_blocks
            self.engine.check_integrity([])
            self.counts |= Counter(
                {
                    "prefix_hits": stats.num_cached_tokens,
                    "copies": stats.num_copied_blocks,
                    "preemptions": stats.num_preemptions,
                    "idle_evictions": stats.num_idle_evictions,
                    "evicted_blocks": self.engine._cache._pool.num_evictions,
                    "recomputed_rows": stats.num_rows + stats.num_cached_tokens - self.num_rows_asked,
                }
            )
            if all(self.counts[kind] for kind in KINDS):
                return
        raise AssertionError(f"a kind of event never occurred: {self.counts}")

    async def _worker(self, rng, num_sessions):
        committed = []
        for _ in range(num_sessions):
            text = rng.choice(self.texts)
            reopens = 0 < len(committed) <= MAX_REOPENED and rng.random() < 0.5
            prompt = committed if reopens else text[: rng.choice([4, 8, 12, 16, 24, rng.randint(1, 40)])]
            max_length = len(prompt) + rng.randint(2, 40)
            sequence = await self.engine.open_sequence(max_length, priority=rng.choice([0, 0, 1]))
            committed = list(prompt)
            try:
                for _ in range(3):
                    num_cached = await self.engine.run(self._rounds(rng, sequence, text, committed))
                    self.counts["reopenings"] += reopens and num_cached > 0
                    reopens = False
                    await asyncio.sleep(rng.choice([0, 0.001]))
            finally:
                self.engine.close_sequence(sequence)

    def _rounds(self, rng, sequence, text, committed):
        """Returns how many tokens of the first round's forward came from the prefix cache."""
        num_cached = None
        for _ in range(rng.randint(1, 4)):
            room = sequence.max_length - len(committed)
            if room < 1:
                break
            if sequence.length and rng.random() < 0.3:
                self.counts["truncations"] += 1
                sequence.truncate(rng.randint(max(0, sequence.length - 7), sequence.length - 1))
            follows = text[: len(committed)] == committed
            drafts = text[len(committed) :] if follows else []
            drafts = [*drafts, *(rng.randrange(self.vocab_size) for _ in range(8))][: rng.randint(0, min(6, room - 1))]
            rows = [*committed[sequence.length :], *drafts]
            sequence.committed_length = len(committed)
            self.num_rows_asked += len(rows)
            result = yield Forward(sequence, rows, len(drafts) + 1)
            num_cached = result.num_cached_tokens if num_cached is None else num_cached
            self.counts["fragmented"] += is_fragmented(sequence.blocks)
            assert sequence.token_ids == committed + drafts
            self.check(committed + drafts, len(drafts) + 1, result.logits.copy())
            num_accepted = rng.randint(0, len(drafts))
            self.counts["accepts"] += num_accepted
            self.counts["rejections"] += len(drafts) - num_accepted
            committed += drafts[:num_accepted]
            follows = follows and text[: len(committed)] == committed and rng.random() < 0.9
            committed.append(text[len(committed)] if follows else rng.randrange(self.vocab_size))
            sequence.truncate(min(sequence.length, len(committed) - 1))
            sequence.committed_length = sequence.length
        return num_cached or 0
