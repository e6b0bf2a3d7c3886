"""A trimmed draft vocabulary: the draft's head computes the rows of frequent ids only, every other id has q = 0.

The target may still say any token: an id that is never drafted is reached by correction, bonus and plain decoding, so
the list decides how much is accepted and never what is said. Torch is imported only where
a real model's head is cut.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from outrider.errors import InvalidArgument
from outrider.lm.interface import LanguageModel, PackedBatch
from outrider.lm.toy import ToyModel, ToySpec
from outrider.settings import DraftWorkerSettings, WorkerSettings

FIELD = "draft_vocab"


def frequent_ids(counts: Mapping[int, int], size: int, vocab_size: int) -> list[int]:
    """The `size` most frequent ids, lower ones first among equals; the rest is filled with the lowest ids.

    Tokenizers give low ids to their earliest merges, which are frequent in any text.
    """
    return sorted(range(vocab_size), key=lambda i: (-counts.get(i, 0), i))[:size]


def write_draft_vocab(path: Path, ids: Iterable[int], tokenizer_fingerprint: str) -> None:
    """A JSON file that `read_draft_vocab` accepts for this tokenizer only."""
    content = {"tokenizer_fingerprint": tokenizer_fingerprint, "ids": list(ids)}
    path.write_text(json.dumps(content) + "\n", encoding="utf-8")


def read_draft_vocab(text: str, *, vocab_size: int, tokenizer_fingerprint: str, kept: Iterable[int] = ()) -> np.ndarray:
    """int64[K], ascending: the ids in the file `text`, and those of `kept` (special and end-of-text ids).

    The file holds a JSON list of ids, or {"ids": [...], "tokenizer_fingerprint": "..."}, or plain text with one id a
    line (`#` starts a comment). Raises InvalidArgument naming the setting and what is wrong where.
    """
    path = Path(text).expanduser()
    try:
        content = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise _fault(f"cannot read {text} ({error})") from error
    is_json = content.lstrip().startswith(("[", "{"))
    ids = _from_json(text, content, tokenizer_fingerprint) if is_json else _from_lines(content)
    if not ids:
        raise _fault(f"{text} holds no ids: make a list with `outrider draft-vocab`")
    seen: set[int] = set()
    for number, token_id in enumerate(ids, start=1):
        if not isinstance(token_id, int) or isinstance(token_id, bool):
            raise _fault(f"entry {number} of {text} is {token_id!r}, not a token id")
        if not 0 <= token_id < vocab_size:
            raise _fault(f"entry {number} of {text} is {token_id}, the vocabulary has ids 0 to {vocab_size - 1}")
        if token_id in seen:
            raise _fault(f"entry {number} of {text} repeats id {token_id}")
        seen.add(token_id)
    return np.array(sorted(seen | {i for i in kept if 0 <= i < vocab_size}), np.int64)


def drafted_ids(
    settings: WorkerSettings, vocab_size: int, tokenizer_fingerprint: str, kept: Iterable[int]
) -> np.ndarray | None:
    """What the settings' list reads as; None, for all ids, without one. Raises InvalidArgument on a bad list."""
    if not isinstance(settings, DraftWorkerSettings) or not settings.draft_vocab:
        return None
    return read_draft_vocab(
        settings.draft_vocab, vocab_size=vocab_size, tokenizer_fingerprint=tokenizer_fingerprint, kept=kept
    )


def trim_head(model: Any, ids: np.ndarray) -> None:
    """Leaves rows `ids`, int64[K], of the output head of a transformers causal LM; a tied input embedding stays whole.

    Raises InvalidArgument where the head is no plain linear layer.
    """
    import torch
    from torch import nn

    head = model.get_output_embeddings()
    if type(head) is not nn.Linear:
        raise _fault(f"the output head of {type(model).__name__} is no linear layer and cannot be trimmed")
    rows = torch.from_numpy(ids).to(head.weight.device)
    trimmed = nn.Linear(head.in_features, len(ids), bias=False, device="meta")
    trimmed.weight = nn.Parameter(head.weight.detach()[rows], requires_grad=False)
    if head.bias is not None:
        trimmed.bias = nn.Parameter(head.bias.detach()[rows], requires_grad=False)
    model.set_output_embeddings(trimmed)


class TrimmedModel:
    """A `LanguageModel` over one whose logits are those of `ids` only, in that order: -inf for every other id."""

    def __init__(self, model: LanguageModel, ids: np.ndarray, vocab_size: int) -> None:
        self._model = model
        self._ids = ids
        self.vocab_size = vocab_size
        self.context_length = model.context_length

    def forward(self, batch: PackedBatch) -> np.ndarray:
        """float32[num_logit_rows, vocab_size]."""
        trimmed = self._model.forward(batch)
        logits = np.full((len(trimmed), self.vocab_size), -np.inf, np.float32)
        logits[:, self._ids] = trimmed
        return logits

    @property
    def num_rows_computed(self) -> int:
        """The model's own count."""
        return int(getattr(self._model, "num_rows_computed", 0))

    def bytes_per_block(self, block_size: int) -> int:
        """The model's own."""
        return self._model.bytes_per_block(block_size)

    def allocate_cache(self, num_blocks: int, block_size: int) -> None:
        """The model's own."""
        self._model.allocate_cache(num_blocks, block_size)

    def copy_block(self, source: int, destination: int) -> None:
        """The model's own."""
        self._model.copy_block(source, destination)

    def move_slots(self, sources: Sequence[int], destinations: Sequence[int]) -> None:
        """The model's own."""
        self._model.move_slots(sources, destinations)

    def free_bytes(self) -> int:
        """Memory free where the model's cache goes."""
        free_bytes: Any = getattr(self._model, "free_bytes", None)
        return int(free_bytes()) if free_bytes is not None else int(psutil.virtual_memory().available)


class TrimmedToy(ToyModel):
    """A toy that drafts `ids` only: simulated, as toys are."""

    def __init__(self, spec: ToySpec, ids: np.ndarray) -> None:
        super().__init__(spec)
        self._dropped = np.setdiff1d(np.arange(spec.vocab), ids)

    def forward(self, batch: PackedBatch) -> np.ndarray:
        """float32[num_logit_rows, vocab], -inf for the other ids."""
        logits = super().forward(batch)
        logits[:, self._dropped] = -np.inf
        return logits


def _from_json(text: str, content: str, tokenizer_fingerprint: str) -> list[Any]:
    try:
        parsed = json.loads(content)
    except ValueError as error:
        raise _fault(f"{text} is no JSON ({error})") from error
    if isinstance(parsed, dict):
        stated = parsed.get("tokenizer_fingerprint", tokenizer_fingerprint)
        if stated != tokenizer_fingerprint:
            raise _fault(f"{text} was made for another tokenizer: make one with `outrider draft-vocab`")
        parsed = parsed.get("ids")
    if not isinstance(parsed, list):
        raise _fault(f'{text} is neither a list of ids nor {{"ids": [...]}}')
    return parsed


def _from_lines(content: str) -> list[Any]:
    lines = [line.partition("#")[0].strip() for line in content.splitlines()]
    return [int(line) if line.isascii() and line.isdigit() else line for line in lines if line]


def _fault(what: str) -> InvalidArgument:
    return InvalidArgument(f"{FIELD}: {what}", field=FIELD)
