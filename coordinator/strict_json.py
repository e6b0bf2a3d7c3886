"""JSON as the standard has it: no NaN, no name given twice in an object."""

from __future__ import annotations

import json
from typing import Any


def parse_json(source: str | bytes | bytearray) -> Any:
    """Raises ValueError, or RecursionError where it is nested too deeply."""
    return json.loads(source, parse_constant=_refuse_constant, object_pairs_hook=_object)


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) < len(pairs):
        raise ValueError("an object gives a name twice")
    return value
