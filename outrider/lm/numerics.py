"""Whether a model's rows really are bitwise independent of their company here: tried, not assumed.

`numerics=exact` promises that a row's logits depend on its sequence's tokens alone. What could break it is chosen
inside libraries by the shapes of a pass, the processor and the number of threads, so the proof runs on the machine that
serves, over every row count that passes use (`ROW_COUNTS`).
"""

from __future__ import annotations

import itertools
import random
import time
from collections.abc import Callable, Iterator

import numpy as np

from outrider.errors import FailedPrecondition
from outrider.lm.interface import LanguageModel, PackedBatch, Segment
from outrider.lm.row_counts import ROW_COUNTS
from outrider.server_info import Numerics

BLOCK_SIZE = 16
MAX_TOKENS = 640
"""Length of the longest sequence tried: several tiles of keys, and more keys than attention takes at once."""
TOKENS_AT_ONCE = 490
"""Of which small passes begin: just before attention takes a second lot of keys."""

MAX_TREE_DEPTH = 5


def prove(model: LanguageModel, on_progress: Callable[[str, float | None], None] | None = None) -> Numerics:
    """Compares the logits of one text computed in different chunks, places and companies; tells what was compared.

    Leaves the model with a cache of a few blocks: `allocate_cache` is to be called again. Raises FailedPrecondition,
    naming the first difference, when two logits of a row differ in any bit.
    """
    on_progress = on_progress or (lambda text, fraction: None)
    length = min(MAX_TOKENS, model.context_length)
    rng = random.Random(0)
    ids = [rng.randrange(model.vocab_size) for _ in range(length)]
    num_blocks = -(-length // BLOCK_SIZE)
    model.allocate_cache(3 * num_blocks, BLOCK_SIZE)
    straight = list(range(num_blocks))
    scattered = [num_blocks + (7 * i) % num_blocks if num_blocks % 7 else 2 * num_blocks - 1 - i for i in straight]
    other = [2 * num_blocks + i for i in straight]

    on_progress("proving exact numerics", 0.8)
    started_s = time.perf_counter()
    reference = _run(model, ids, straight, itertools.repeat(32), None)
    large = itertools.repeat(ROW_COUNTS[-1])
    before = max(1, min(TOKENS_AT_ONCE, length - 50))
    histories: dict[str, tuple[list[int], Iterator[int], list[int] | None]] = {
        "ascending chunks": (straight, itertools.chain(ROW_COUNTS, large), None),
        "scattered blocks": (scattered, itertools.chain([3], reversed(ROW_COUNTS), large), None),
        "single rows beside another stream": (straight, itertools.chain([1] * 20, [before], [1] * 20, large), other),
        "single rows and verifications": (
            straight,
            itertools.chain([1] * 10, [before], itertools.cycle([1, 1, 5, 1, 9, 1, 40])),
            None,
        ),
        "verifications beside another stream": (
            scattered,
            itertools.chain([before], itertools.cycle([9, 1, 5, 2, 12])),
            other,
        ),
        "trees": (straight + other, itertools.chain([before], itertools.cycle([5, 1, 3, 16])), None),
    }
    for name, (table, chunks, company) in histories.items():
        logits = _run(model, ids, table, chunks, company, MAX_TREE_DEPTH if name == "trees" else 0)
        differs = (logits.view(np.int32) != reference.view(np.int32)).any(1)
        if differs.any():
            row = int(differs.argmax())
            gap = float(np.abs(logits[row] - reference[row]).max())
            raise FailedPrecondition(
                f"numerics=exact does not hold on this machine: with {name}, {int(differs.sum())} of {length} rows "
                f"differ, the first at position {row} by up to {gap:.1e}. Use numerics=fast, another dtype or number "
                "of threads",
                field="numerics",
            )
    return Numerics(
        mode="exact",
        proven=True,
        row_counts=ROW_COUNTS,
        num_histories=len(histories),
        num_tokens=length,
        probe_s=time.perf_counter() - started_s,
    )


def _run(
    model: LanguageModel,
    ids: list[int],
    table: list[int],
    chunks: Iterator[int],
    company: list[int] | None,
    max_tree_depth: int = 0,
) -> np.ndarray:
    """float32[len(ids), vocab]: the text's logits, computed chunk by chunk.

    company: blocks of a second stream, one or more of whose rows come before this text's in every pass. Chunks of up to
    `max_tree_depth` tokens are trees, in which each has a sibling that is another token.
    """
    parts = []
    done = passes = 0
    while done < len(ids):
        count = min(next(chunks), len(ids) - done)
        if count <= max_tree_depth:
            parts.append(_run_tree(model, done, ids[done : done + count], table))
            done += count
            continue
        own = Segment(done, ids[done : done + count], table, count)
        segments = [own]
        if company is not None:
            num_before = passes % 3 + 1
            segments.insert(0, Segment(0, ids[-num_before:], company, passes % 2))
        logits = model.forward(PackedBatch(tuple(segments)))
        parts.append(logits[len(logits) - count :].copy())
        done += count
        passes += 1
    return np.concatenate(parts)


def _run_tree(model: LanguageModel, start: int, ids: list[int], table: list[int]) -> np.ndarray:
    """The tokens' rows; what the tree leaves in the cache is as if they had been computed alone."""
    nodes, parents, last = [], [], -1
    for token_id in ids:
        nodes += [(token_id + 1) % model.vocab_size, token_id]
        parents += [last, last]
        last = len(nodes) - 1
    logits = model.forward(PackedBatch((Segment(start, nodes, table, len(nodes), tuple(parents)),)))
    sources = range(start + 1, start + len(nodes), 2)
    model.move_slots(_slots(table, sources), _slots(table, range(start, start + len(ids))))
    return logits[1::2].copy()


def _slots(table: list[int], places: range) -> list[int]:
    return [table[place // BLOCK_SIZE] * BLOCK_SIZE + place % BLOCK_SIZE for place in places]
