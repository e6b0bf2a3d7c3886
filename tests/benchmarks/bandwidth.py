"""How fast this machine reads memory: what a pass over a model's weights cannot beat."""

from __future__ import annotations

import json
import math
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

NUM_BYTES = 1 << 30
NUM_THREADS = 2
NUM_REPETITIONS = 8


def read_bandwidth(
    num_bytes: int = NUM_BYTES, num_threads: int = NUM_THREADS, num_repetitions: int = NUM_REPETITIONS
) -> float:
    """Bytes per second of the best of several reads of `num_bytes`, by two ways of reading, with so many threads."""
    parts = np.array_split(np.ones(num_bytes // 8, np.uint64), num_threads)
    best_s = float("inf")
    with ThreadPoolExecutor(num_threads) as pool:
        for _ in range(num_repetitions):
            for read in (np.maximum.reduce, np.add.reduce):
                begin = time.perf_counter()
                list(pool.map(read, parts))
                best_s = min(best_s, time.perf_counter() - begin)
    return num_bytes / best_s


def bytes_read(folder: Path, dtype: str) -> int:
    """Bytes of weights that one pass of a checkpoint (safetensors) reads in `dtype`; 0 for what is no such folder.

    Of a table of embeddings a pass reads a few rows only, unless the same table is the output head as well.
    """
    counts: dict[str, int] = {}
    for path in folder.glob("*.safetensors") if folder.is_dir() else ():
        with path.open("rb") as file:
            header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
        counts |= {name: math.prod(entry["shape"]) for name, entry in header.items() if name != "__metadata__"}
    has_own_head = any(name.endswith("lm_head.weight") for name in counts)
    read = (n for name, n in counts.items() if not (has_own_head and name.endswith("embed_tokens.weight")))
    return sum(read) * (4 if dtype == "float32" else 2)
