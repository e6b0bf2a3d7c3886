"""Short names for "the same": the same tokenizer, the same weights, the same arithmetic."""

from __future__ import annotations

import hashlib
import json
import platform
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

NUM_SAMPLES, SAMPLE_BYTES = 64, 4096
_VOLATILE = {"_name_or_path", "transformers_version", "dtype", "torch_dtype"}


def tokenizer_fingerprint(tokenizer_json: str) -> str:
    """Over every real id and the bytes it stands for, added tokens included, whatever the vocabulary is padded to.

    tokenizer_json: the text of a tokenizer.json.
    """
    parsed = json.loads(tokenizer_json)
    vocabulary = parsed["model"]["vocab"]
    if isinstance(vocabulary, list):  # Unigram: [token, score] in order of ids.
        vocabulary = {entry[0]: token_id for token_id, entry in enumerate(vocabulary)}
    to_bytes = _byte_level_bytes if '"ByteLevel"' in json.dumps(parsed.get("decoder")) else _plain_bytes
    bytes_of = {token_id: to_bytes(token) for token, token_id in vocabulary.items()}
    bytes_of |= {token["id"]: token["content"].encode() for token in parsed.get("added_tokens", [])}
    digest = hashlib.sha256()
    for token_id, token_bytes in sorted(bytes_of.items()):
        digest.update(b"%d %d " % (token_id, len(token_bytes)) + token_bytes)
    return digest.hexdigest()


def model_fingerprint(config: Mapping[str, Any], weight_files: Iterable[Path], dtype: str) -> str:
    """Over the config, the number type, and each weight file's size, header and samples of its data.

    Fine-tunes of one model share config and headers, so the data has to count; reading all of it would cost minutes.
    """
    digest = hashlib.sha256(json.dumps(_stable(config), sort_keys=True, default=str).encode())
    digest.update(dtype.encode())
    for path in sorted(weight_files):
        size = path.stat().st_size
        digest.update(b"%d" % size)
        with path.open("rb") as file:
            for index in range(NUM_SAMPLES):
                file.seek(max(0, size - SAMPLE_BYTES) * index // (NUM_SAMPLES - 1))
                digest.update(file.read(SAMPLE_BYTES))
    return digest.hexdigest()


def cpu_name() -> str:
    """The processor as the system calls it."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def _stable(config: Mapping[str, Any]) -> dict[str, Any]:
    return {k: v for k, v in config.items() if k not in _VOLATILE}


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
