"""Peer: one forward of the stock transformers model over one row, keys and values cached. Run by engine.py."""

from __future__ import annotations

import os
import sys
import time

import torch
from peer_transformers import load

NUM_CONTEXT, NUM_PASSES = 100, 25


def main() -> None:
    torch.set_num_threads(os.cpu_count() or 1)
    model = load(sys.argv[1], sys.argv[2])
    with torch.inference_mode():
        cache = model(torch.arange(NUM_CONTEXT)[None], use_cache=True).past_key_values
        seconds = []
        for _ in range(NUM_PASSES):
            begin = time.perf_counter()
            cache = model(torch.tensor([[5]]), past_key_values=cache, use_cache=True).past_key_values
            seconds.append(time.perf_counter() - begin)
    print(1000 * sorted(seconds)[NUM_PASSES // 2])


if __name__ == "__main__":
    main()
