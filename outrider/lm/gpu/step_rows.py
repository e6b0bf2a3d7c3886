"""What a static step reads of its rows: one integer matrix, sent to the device in one piece.

N rows of the bucket, W blocks of the table. Each row is a query of its own: its id, its position, and the block table
of its sequence, whose tokens up to that position it sees. Rows that fill the bucket up have a table of nothing but the
scratch block and stand at position 0: they see what they themselves wrote there, and nobody sees them.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from outrider.lm.gpu.buckets import row_bucket, table_bucket
from outrider.lm.interface import PackedBatch

MAX_SEGMENT_ROWS = 128
"""Rows of one sequence up to which a step may be static: more are a prefill, which has company enough."""


@dataclass(frozen=True, slots=True)
class StepShape:
    """num_rows: N. table_blocks: W."""

    num_rows: int
    table_blocks: int


@dataclass(frozen=True, slots=True)
class StepRows:
    """token_ids, positions: int64[N]; tables: int64[N, W]: views of one matrix, all on the device of the step."""

    matrix: torch.Tensor

    @property
    def token_ids(self) -> torch.Tensor:
        return self.matrix[:, 0]

    @property
    def positions(self) -> torch.Tensor:
        return self.matrix[:, 1]

    @property
    def tables(self) -> torch.Tensor:
        return self.matrix[:, 2:]

    def slots(self, block_size: int) -> torch.Tensor:
        """int64[N]: where each row's keys and values go."""
        blocks = self.tables.gather(1, (self.positions // block_size)[:, None])[:, 0]
        return blocks * block_size + self.positions % block_size


def static_shape(batch: PackedBatch, block_size: int) -> StepShape | None:
    """The shape that holds this batch; None when it is for the eager path: too many rows, or rows that form a tree."""
    num_rows = row_bucket(batch.num_rows)
    if num_rows is None:
        return None
    longest = 0
    for segment in batch.segments:
        if len(segment.token_ids) > MAX_SEGMENT_ROWS or getattr(segment, "parents", None):
            return None
        longest = max(longest, segment.num_cached_tokens + len(segment.token_ids))
    return StepShape(num_rows, table_bucket(-(-longest // block_size)))


def fill(batch: PackedBatch, shape: StepShape, scratch_block: int, block_size: int) -> np.ndarray:
    """int64[N, 2 + W] of a batch that `static_shape` gave this shape."""
    matrix = np.empty((shape.num_rows, 2 + shape.table_blocks), np.int64)
    matrix[:, :2] = 0
    matrix[:, 2:] = scratch_block
    row = 0
    for segment in batch.segments:
        start, count = segment.num_cached_tokens, len(segment.token_ids)
        num_blocks = -(-(start + count) // block_size)
        if num_blocks > len(segment.block_table):
            raise ValueError(f"{start + count} tokens do not fit {len(segment.block_table)} blocks of {block_size}")
        rows = matrix[row : row + count]
        rows[:, 0] = segment.token_ids
        rows[:, 1] = np.arange(start, start + count)
        rows[:, 2 : 2 + num_blocks] = segment.block_table[:num_blocks]
        row += count
    return matrix


def wanted_rows(batch: PackedBatch) -> np.ndarray:
    """int64[L]: the rows whose logits the batch wants, in order."""
    ends = np.cumsum([len(s.token_ids) for s in batch.segments])
    parts = [np.arange(end - s.num_logits, end) for end, s in zip(ends, batch.segments, strict=True)]
    return np.concatenate(parts)
