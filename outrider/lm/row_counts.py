"""Row counts of passes under exact numerics: only these are used, so that a probe can try all of them."""

from __future__ import annotations

ROW_COUNTS = (*range(1, 18), 32, 64, 128)
"""Small ones for decoding and verification, each possible; a few larger ones for prefill and many streams."""


def pieces(num_rows: int, at_least: int = 1) -> list[int]:
    """`num_rows` as a sum of row counts, the largest first; none below `at_least` unless num_rows itself is.

    at_least: at most 8.
    """
    sizes = []
    while num_rows and num_rows not in ROW_COUNTS:
        size = max(count for count in ROW_COUNTS if count <= num_rows)
        if 0 < num_rows - size < at_least:
            size = max(count for count in ROW_COUNTS if count <= num_rows - at_least)
        sizes.append(size)
        num_rows -= size
    return [*sizes, num_rows]
