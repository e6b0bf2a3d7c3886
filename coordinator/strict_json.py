"""JSON as the standard has it: no NaN, no name given twice in an object, no half of a surrogate pair in a string."""

from __future__ import annotations

import json
import re
from typing import Any

_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")


def parse_json(source: str | bytes | bytearray) -> Any:
    """Raises ValueError, or RecursionError where it is nested too deeply."""
    text = source if isinstance(source, str) else source.decode(json.detect_encoding(source))
    value = json.loads(text, parse_constant=_refuse_constant, object_pairs_hook=_object)
    if _SURROGATE.search(text):
        _refuse_halves(value)
    return value


def _refuse_halves(value: Any) -> None:
    """Of surrogate pairs: Python's strings can hold them, and no encoding of a text can."""
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        half = ord(error.object[error.start])
        raise ValueError(f"\\u{half:04x} is half of a surrogate pair, which is no character") from None


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) < len(pairs):
        raise ValueError("an object gives a name twice")
    return value
