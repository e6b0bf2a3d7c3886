"""How fast this machine reads memory: what a pass over a model's weights cannot beat."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor

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
