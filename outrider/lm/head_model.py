"""What a draft worker loads that has a head and no model: the head, and of its target only what the head shares."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from outrider.drafting.received_features import BYTES_PER_NUMBER
from outrider.drafts import head_folder
from outrider.errors import FailedPrecondition, Internal, InvalidArgument
from outrider.lm.fingerprint import tokenizer_fingerprint
from outrider.lm.interface import LoadedModel, ModelDescription, PackedBatch
from outrider.lm.states import read_states
from outrider.lm.toy import PREFIX as TOY
from outrider.settings import DraftWorkerSettings

log = logging.getLogger(__name__)
FIELD = "head"


class HeadModel:
    """A head in the place of a model. It has no passes of its own: the cache that an engine sizes for it is what all
    sessions' contexts and rows may take, `max_bytes`.

    target_fingerprints: of the targets whose states it may be given.
    """

    def __init__(self, head: Any, *, vocab_size: int, context_length: int, target_fingerprints: Sequence[str]) -> None:
        self.head = head
        self.vocab_size = vocab_size
        self.context_length = context_length
        self.target_fingerprints = tuple(target_fingerprints)
        self.max_bytes = 0
        self.row_bytes = head.feature_width * BYTES_PER_NUMBER
        context = head.new_context()
        self.context_bytes: Callable[[int], int] = context.bytes_for
        """That a context of so many pairs takes at most."""
        self.bytes_per_token = -(-self.context_bytes(1 << 20) // (1 << 20)) + self.row_bytes

    def bytes_per_block(self, block_size: int) -> int:
        return self.bytes_per_token * block_size

    def allocate_cache(self, num_blocks: int, block_size: int) -> None:
        """Contexts take their memory as they grow."""
        self.max_bytes = num_blocks * self.bytes_per_block(block_size)
        self.context_length = min(self.context_length, num_blocks * block_size)

    def copy_block(self, source: int, destination: int) -> None:
        raise _no_passes()

    def move_slots(self, sources: Sequence[int], destinations: Sequence[int]) -> None:
        raise _no_passes()

    def forward(self, batch: PackedBatch) -> np.ndarray:
        raise _no_passes()


def load_head_model(settings: DraftWorkerSettings, on_progress: Callable[[str, float | None], None]) -> LoadedModel:
    """The head that `settings.head` names, for the target that `settings.target` names.

    Raises InvalidArgument naming the setting, and for a head the file and the key, for whatever does not fit.
    """
    if settings.head.startswith(TOY) or settings.target.startswith(TOY):
        from outrider.lm.toy_head import load_toy_head

        return load_toy_head(settings)
    return _load(settings, on_progress)


@dataclass(frozen=True, slots=True)
class FoundHead:
    """A head with what it shares with its target. source: where it was read. head: a Medusa head is one, too."""

    head: Any
    source: Path
    shell: Any
    tokenizer_json: str


def find_head(settings: DraftWorkerSettings, on_progress: Callable[[str, float | None], None]) -> FoundHead:
    """Reads both. Raises InvalidArgument or FailedPrecondition, naming the setting and what does not fit."""
    import torch

    from outrider.lm.checkpoint import pick_device
    from outrider.lm.heads import load_head
    from outrider.lm.heads.target import cheapest_dtype
    from outrider.lm.loading import locate
    from outrider.lm.pretrained import load_tokenizer
    from outrider.lm.target_shell import load_shell

    if settings.num_threads:
        torch.set_num_threads(settings.num_threads)
    device, trusted = pick_device(settings.device), settings.trust_remote_code
    with _naming("target", of="model"):
        folder, target_name = locate(settings.model_copy(update={"model": settings.target}), on_progress)
        if folder.is_file():
            raise InvalidArgument(
                f"{folder} is a GGUF file, all of which would have to be read: give a folder of safetensors",
                field="model",
            )
        on_progress(f"loading the tokenizer of {target_name}", 0.1)
        tokenizer_json = load_tokenizer(folder, trusted).backend_tokenizer.to_str()
        on_progress(f"loading the embedding of {target_name}", 0.3)
        shell = load_shell(
            folder,
            name=target_name,
            vocab_size=_vocab_size(tokenizer_json),
            dtype=settings.dtype,
            device=device,
            trust_remote_code=trusted,
        )
    source = Path(head_folder(settings.head) or settings.head).expanduser()
    on_progress(f"loading the head {source}", 0.7)
    states = read_states(",".join(settings.head_states), "head_states") if settings.head_states else None
    with _naming(FIELD, of="heads"):
        head = load_head(source, shell.target, dtype=cheapest_dtype(shell.target), states=states)
    return FoundHead(head, source, shell, tokenizer_json)


def _load(settings: DraftWorkerSettings, on_progress: Callable[[str, float | None], None]) -> LoadedModel:
    from outrider.lm.heads import EagleHead
    from outrider.lm.loading import context_length

    found = find_head(settings, on_progress)
    head, source, shell = found.head, found.source, found.shell
    if not isinstance(head, EagleHead):
        raise InvalidArgument(
            f"head: {source} is of kind {head.kind}, which drafts beside its target only: give it to a target worker, "
            "as heads",
            field=FIELD,
        )
    if len(head.conventions) > 1:
        others = "; ".join(map(str, head.conventions[1:]))
        log.warning(
            "head %s leaves open how it is read, and away from its target that cannot be tried: taken as %s, not as "
            "%s. Set head_states if its layers are others",
            source, head.convention, others,
        )  # fmt: skip
    name = source.resolve().name
    description = ModelDescription(
        model=settings.model_name or name,
        model_fingerprint=_fingerprint(source, str(head.convention)),
        tokenizer_fingerprint=tokenizer_fingerprint(found.tokenizer_json),
        vocab_size=shell.target.vocab_size,
        context_length=context_length(shell.context_length or settings.max_context_length, settings),
        tokenizer_json=found.tokenizer_json.encode(),
        dtype=str(head.dtype).removeprefix("torch."),
        weight_bytes=head.num_parameters * head.dtype.itemsize,
    )
    model = HeadModel(
        head,
        vocab_size=description.vocab_size,
        context_length=description.context_length,
        target_fingerprints=tuple(shell.fingerprints.values()),
    )
    on_progress(f"{name} is loaded", 1.0)
    return LoadedModel(model, description)


@contextmanager
def _naming(setting: str, *, of: str) -> Iterator[None]:
    """What is wrong with the field `of` of those who load is wrong with the setting that named the file."""
    try:
        yield
    except (InvalidArgument, FailedPrecondition) as error:
        if error.field != of:
            raise
        message = f"{setting}: {error.message.removeprefix(f'{of}: ')}"
        raise type(error)(message, field=setting, reason=error.reason) from error


def _vocab_size(tokenizer_json: str) -> int:
    from tokenizers import Tokenizer

    return max(Tokenizer.from_str(tokenizer_json).get_vocab(with_added_tokens=True).values()) + 1


def _fingerprint(path: Path, convention: str) -> str:
    """Over the head's files, and how it is read."""
    digest = hashlib.sha256(convention.encode())
    for file in sorted(path.iterdir()) if path.is_dir() else [path]:
        if file.is_file() and file.suffix in (".safetensors", ".json", ".bin", ".pt"):
            with file.open("rb") as opened:
                digest.update(hashlib.file_digest(opened, "sha256").digest())
    return digest.hexdigest()


def _no_passes() -> Internal:
    return Internal("a head has no passes of its own")
