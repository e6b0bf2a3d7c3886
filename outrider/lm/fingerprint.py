"""Short names for "the same": the same tokenizer, the same weights, the same arithmetic."""

from __future__ import annotations

import hashlib
import json
import platform
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from outrider.lm.vocabulary import read_vocabulary

NUM_SAMPLES, SAMPLE_BYTES = 64, 4096
_VOLATILE = {"_name_or_path", "transformers_version", "dtype", "torch_dtype"}


def tokenizer_fingerprint(tokenizer_json: str) -> str:
    """Over every real id and the bytes it stands for, added tokens included, whatever the vocabulary is padded to.

    tokenizer_json: the text of a tokenizer.json.
    """
    bytes_of = read_vocabulary(tokenizer_json).bytes_of
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
