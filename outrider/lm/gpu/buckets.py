"""Row counts and context widths that static steps come in: a step is padded up to the next of them."""

from __future__ import annotations

ROW_BUCKETS = (1, 2, 4, 8, 16, 32, 64, 128)
MIN_TABLE_BLOCKS = 16
"""Narrowest block table of a step; wider ones are powers of two."""


def row_bucket(num_rows: int) -> int | None:
    """The smallest bucket that holds `num_rows`; None beyond the largest one."""
    return next((bucket for bucket in ROW_BUCKETS if bucket >= num_rows), None)


def table_bucket(num_blocks: int) -> int:
    """Blocks of the table that a step over contexts of `num_blocks` at most is given."""
    width = MIN_TABLE_BLOCKS
    while width < num_blocks:
        width *= 2
    return width
