"""What the ids of a tokenizer stand for, in bytes."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """`bytes_of[id]`: what a real id stands for. `special_ids` mark text (turns of a chat, its end) and spell none."""

    bytes_of: dict[int, bytes]
    special_ids: frozenset[int]


def read_vocabulary(tokenizer_json: str) -> Vocabulary:
    """Every real id, added tokens included. tokenizer_json: the text of a tokenizer.json."""
    parsed = json.loads(tokenizer_json)
    added = parsed.get("added_tokens") or []
    special_ids = frozenset(token["id"] for token in added if token.get("special"))
    return Vocabulary(_bytes_of(parsed, added), special_ids)


def _bytes_of(parsed: dict[str, Any], added: list[dict[str, Any]]) -> dict[int, bytes]:
    vocabulary = parsed["model"]["vocab"]
    if isinstance(vocabulary, list):  # Unigram: [token, score] in order of ids.
        vocabulary = {entry[0]: token_id for token_id, entry in enumerate(vocabulary)}
    to_bytes = _byte_level_bytes if '"ByteLevel"' in json.dumps(parsed.get("decoder")) else _plain_bytes
    bytes_of = {token_id: to_bytes(token) for token, token_id in vocabulary.items()}
    return bytes_of | {token["id"]: token["content"].encode() for token in added}


def _plain_bytes(token: str) -> bytes:
    """SentencePiece's writing: a lower block for a space, <0xNN> for a byte."""
    if len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
        return bytes([int(token[3:5], 16)])
    return token.replace("\u2581", " ").encode()


def _byte_level_bytes(token: str) -> bytes:
    try:
        return bytes(_BYTE_OF[char] for char in token)
    except KeyError:
        return token.encode()


def _byte_level_alphabet() -> dict[str, int]:
    """GPT-2's printable stand-ins: printable Latin-1 stands for itself, the rest follows from 256 on."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(b): b for b in printable} | {chr(256 + index): b for index, b in enumerate(others)}


_BYTE_OF = _byte_level_alphabet()
"""What each stand-in character of a byte-level vocabulary means."""
