"""Text of toy models: one code point per id, so that every text has exactly one tokenization."""

from __future__ import annotations

NUM_ASCII = 94
"""Ids whose code points are printable ASCII."""
_FIRST_ASCII = 33
_FIRST_WIDE = 0x4E00


def toy_char(token_id: int) -> str:
    """Ids below 94 are printable ASCII from `!` on; the others are ideographs from U+4E00 on."""
    return chr(_FIRST_ASCII + token_id if token_id < NUM_ASCII else _FIRST_WIDE + token_id - NUM_ASCII)


def toy_id(char: str) -> int:
    """Inverse of `toy_char`; negative for a code point that no id has."""
    code = ord(char)
    if _FIRST_ASCII <= code < _FIRST_ASCII + NUM_ASCII:
        return code - _FIRST_ASCII
    return code - _FIRST_WIDE + NUM_ASCII if code >= _FIRST_WIDE else -1
