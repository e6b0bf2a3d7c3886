"""States of a target that come over the wire: how rows are packed, and the rows that a drafter far from it has.

On the wire a row is the wanted states one after the other, bfloat16, little-endian.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from outrider.errors import Internal, InvalidArgument

BYTES_PER_NUMBER = 2
_EXPONENT = np.uint16(0x7F80)
"""All ones in a bfloat16 that is no number: infinite, or NaN."""


def packed_rows(rows: Any) -> bytes:
    """Of numpy float32[n, W], or torch [n, W] of any type of number: rounded to the nearest, ties to even."""
    if not isinstance(rows, np.ndarray):
        import torch  # a worker whose model is a toy has none

        return bytes(rows.to(torch.bfloat16).contiguous().cpu().view(torch.int16).numpy().astype("<i2").tobytes())
    bits = np.ascontiguousarray(rows, np.float32).view(np.uint32)
    rounded = (bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)
    return np.where(np.isnan(rows), np.uint32(0x7FC0), rounded).astype("<u2").tobytes()


class ReceivedFeatures:
    """Rows of consecutive tokens, the first token's at first: `Features` of heads.py, filled as they come.

    width: numbers in a row. max_rows: tokens that have one at most.
    """

    def __init__(self, width: int, max_rows: int) -> None:
        self._width = width
        self._max_rows = max_rows
        self._parts: list[tuple[int, np.ndarray]] = []
        """(first token, uint16[n, W]), each beginning where the one before it ends."""
        self._num_forgotten = 0
        self.num_rows = 0

    @property
    def num_bytes(self) -> int:
        """Held now."""
        return sum(part.nbytes for _, part in self._parts)

    def append(self, start: int, data: bytes) -> None:
        """Rows of token `start` and those after it; known ones among them are passed over.

        Raises InvalidArgument, with nothing changed, where they do not follow what is there, are no whole rows, are
        more than there can be tokens, or hold what is no number.
        """
        num_rows, rest = divmod(len(data), self._width * BYTES_PER_NUMBER)
        if rest:
            raise _refused(
                f"hold {len(data)} bytes, a row of {self._width} numbers has {self._width * BYTES_PER_NUMBER}"
            )
        if not num_rows:
            return
        end = start + num_rows
        if start > self.num_rows:
            raise _refused(f"begin at token {start}, those before it end at {self.num_rows}")
        if end > self._max_rows:
            raise _refused(f"end at token {end}, the stream has {self._max_rows} at most")
        if end <= self.num_rows:
            return
        rows = np.frombuffer(data, "<u2").reshape(num_rows, self._width)[self.num_rows - start :]
        if bool(((rows & _EXPONENT) == _EXPONENT).any()):
            raise _refused(f"of tokens {self.num_rows} to {end - 1} hold NaN or infinity")
        # a view would keep the known ones, which nobody counts
        self._parts.append((self.num_rows, rows.copy() if start < self.num_rows else rows))
        self.num_rows = end

    def rows(self, start: int, end: int) -> Any:
        """torch bfloat16[end - start, W]. Raises Internal on rows that are not there."""
        import torch

        if not self._num_forgotten <= start <= end <= self.num_rows:
            there = f"{self._num_forgotten} to {self.num_rows}"
            raise Internal(f"states of tokens {start} to {end} were read, those of {there} are here")
        found = [part[max(0, start - first) : end - first] for first, part in self._parts if first < end]
        rows = np.concatenate([part for part in found if len(part)] or [np.empty((0, self._width), np.uint16)])
        return torch.from_numpy(rows.astype(np.uint16).view(np.int16)).view(torch.bfloat16)

    def forget_before(self, end: int) -> None:
        """Rows before token `end` will not be read again; they still count as received."""
        self._num_forgotten = max(self._num_forgotten, min(end, self.num_rows))
        while self._parts and self._parts[0][0] + len(self._parts[0][1]) <= self._num_forgotten:
            self._parts.pop(0)

    def truncate(self, num_rows: int) -> None:
        """Rows from token `num_rows` on are to come again, and those before it where one was forgotten."""
        if num_rows < self._num_forgotten:
            num_rows = 0
        self._num_forgotten = min(self._num_forgotten, num_rows)
        self.num_rows = min(self.num_rows, num_rows)
        self._parts = [(first, part[: num_rows - first]) for first, part in self._parts if first < num_rows]


def _refused(what: str) -> InvalidArgument:
    return InvalidArgument(f"features {what}", field="features", reason="BAD_FEATURES")
