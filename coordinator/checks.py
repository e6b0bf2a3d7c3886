"""What every check of a request says when it fails: the field, its value, and what it must be."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NoReturn

from outrider.errors import InvalidArgument


def refuse(field: str, value: object, limit: str) -> NoReturn:
    """Raises InvalidArgument."""
    shown = "NaN" if isinstance(value, float) and math.isnan(value) else value
    raise InvalidArgument(f"{field} is {shown}, must be {limit}", field=field, reason="OUT_OF_RANGE")


def within(field: str, value: float, low: float, high: float) -> float:
    """`value`. Raises InvalidArgument outside of the limits, and for NaN."""
    if not low <= value <= high:
        refuse(field, value, f"from {low} to {high}")
    return value


def check_ids(field: str, ids: Sequence[int], vocab_size: int) -> None:
    """Raises InvalidArgument, naming the first id that is not the model's."""
    if not ids or max(ids) < vocab_size:
        return
    index, token_id = next((index, token_id) for index, token_id in enumerate(ids) if token_id >= vocab_size)
    raise InvalidArgument(
        f"{field}: id {token_id} at index {index} is out of range, ids of this model are below {vocab_size}",
        field=field,
        reason="TOKEN_ID_OUT_OF_RANGE",
    )
