"""A head's file read strictly: every tensor is asked for by key and shape, and nothing in it goes unasked for.

A head that is read wrongly drafts badly and says nothing, so whatever does not fit is refused here, naming the file.
Pickles are opened for their tensors only: one that holds code is not run.
"""

from __future__ import annotations

import json
import pickle
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from outrider.errors import InvalidArgument

FIELD = "heads"
FILES = ("medusa_lm_head.safetensors", "*.safetensors", "medusa_lm_head.pt", "pytorch_model*.bin")
"""Looked for in a folder in this order; the first that is there is read."""
IGNORABLE = (r"(.*\.)?rotary_emb\.inv_freq",)
"""Patterns of keys that any layout may hold and nobody needs."""
_WEIGHT_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
_LFS_POINTER = b"version https://git-lfs"


def fault(what: str) -> InvalidArgument:
    """The refusal of a head."""
    return InvalidArgument(f"{FIELD}: {what}", field=FIELD, reason="BAD_HEAD")


class Checkpoint:
    """Tensors by key, and the config. `path` is what was given, `folder` where config.json is looked for.

    take, optional: tensors are read when asked for; `finish` refuses what was not.
    """

    def __init__(self, path: Path) -> None:
        """path: a folder, or one file of tensors. Raises InvalidArgument naming the file and what is wrong with it."""
        self.path = path
        self.folder = path if path.is_dir() else path.parent
        self._stored: dict[str, _Stored] = {}
        for file in _files(path):
            for key, stored in _open(file).items():
                if key in self._stored:
                    raise fault(f"{file}: {key} is in {self._stored[key].file} too")
                self._stored[key] = stored
        self.config = _config(self.folder / "config.json")
        self._taken: set[str] = set()

    @property
    def keys(self) -> tuple[str, ...]:
        return tuple(self._stored)

    @property
    def where(self) -> str:
        """The file, or the folder where there are several, for messages."""
        files = {str(stored.file) for stored in self._stored.values()}
        return files.pop() if len(files) == 1 else str(self.path)

    def __contains__(self, key: str) -> bool:
        return key in self._stored

    def shape(self, key: str) -> tuple[int, ...]:
        """Of a tensor that is there. Raises InvalidArgument where it is not."""
        if key not in self._stored:
            raise fault(f"{self.where}: {key} is missing")
        return self._stored[key].shape

    def read(self, key: str) -> torch.Tensor:
        """A tensor that is there, unchecked; it does not count as taken."""
        return self._stored[key].read()

    def take(self, key: str, *shapes: Sequence[int]) -> torch.Tensor:
        """The tensor, as stored. Raises InvalidArgument unless it is there, of one of the shapes, and finite."""
        expected = " or ".join(str(list(shape)) for shape in shapes)
        if key not in self._stored:
            raise fault(f"{self.where}: {key} {expected} is missing{self._hint(key)}")
        stored = self._stored[key]
        if stored.shape not in [tuple(shape) for shape in shapes]:
            raise fault(f"{stored.file}: {key} should be {expected} and is {list(stored.shape)}")
        self._taken.add(key)
        tensor = stored.read()
        if key.endswith((".weight", ".bias")) and tensor.dtype not in _WEIGHT_DTYPES:
            raise fault(
                f"{stored.file}: {key} is of {tensor.dtype}: quantised heads are not read, take one that is not"
            )
        if tensor.is_floating_point() and not bool(torch.isfinite(tensor).all()):
            raise fault(f"{stored.file}: {key} holds numbers that are not finite: the file is damaged")
        return tensor

    def optional(self, key: str, *shapes: Sequence[int]) -> torch.Tensor | None:
        """As `take`; None where it is not there."""
        return self.take(key, *shapes) if key in self._stored else None

    def finish(self, *ignorable: str) -> None:
        """Raises InvalidArgument for keys that were not taken and match none of the patterns."""
        patterns = (*IGNORABLE, *ignorable)
        left = [k for k in self._stored if k not in self._taken and not any(re.fullmatch(p, k) for p in patterns)]
        if left:
            more = f" and {len(left) - 1} more" if len(left) > 1 else ""
            raise fault(
                f"{self._stored[left[0]].file}: unexpected {left[0]} {list(self._stored[left[0]].shape)}{more}: "
                "a head that has more than is computed here would guess wrongly"
            )

    def _hint(self, key: str) -> str:
        tail = key.rpartition(".weight")[0].rpartition(".")[2] or key
        near = [k for k in self._stored if tail in k]
        return f" (there is {', '.join(near[:3])})" if near else ""


class _Stored:
    """One tensor in a file, read when it is needed."""

    def __init__(self, file: Path, key: str, shape: tuple[int, ...], tensor: torch.Tensor | None) -> None:
        self.file, self._key, self.shape, self._tensor = file, key, shape, tensor

    def read(self) -> torch.Tensor:
        if self._tensor is not None:
            return self._tensor
        with safe_open(self.file, framework="pt") as opened:
            tensor: torch.Tensor = opened.get_tensor(self._key)
            return tensor


def first_keys(keys: Iterable[str], count: int = 4) -> str:
    """Some keys, for a message."""
    shown = sorted(keys)
    return ", ".join(shown[:count]) + (", ..." if len(shown) > count else "")


def _files(path: Path) -> list[Path]:
    if path.is_file():
        return [path]
    if not path.is_dir():
        raise fault(f"there is no file or folder {path}")
    for pattern in FILES:
        found = sorted(path.glob(pattern))
        if found:
            return found
    raise fault(f"{path} holds no head: none of {', '.join(FILES)} is there")


def _open(file: Path) -> dict[str, _Stored]:
    with file.open("rb") as opened:
        if opened.read(len(_LFS_POINTER)) == _LFS_POINTER:
            raise fault(f"{file} is a pointer of Git LFS and not the file itself: run `git lfs pull` where it is from")
    if file.suffix == ".safetensors":
        return _open_safetensors(file)
    try:
        loaded: Any = torch.load(file, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        raise fault(
            f"{file} holds more than tensors, which may be code, and is not loaded; or it is damaged "
            f"({_first_line(error)})"
        ) from error
    except Exception as error:  # torch raises many kinds for files cut short or overwritten
        raise fault(f"{file} is cut short or damaged: {type(error).__name__}, {_first_line(error)}") from error
    if not isinstance(loaded, dict) or not all(
        isinstance(key, str) and isinstance(value, torch.Tensor) for key, value in loaded.items()
    ):
        raise fault(f"{file} holds no plain table of tensors by name")
    return {key: _Stored(file, key, tuple(value.shape), value) for key, value in loaded.items()}


def _open_safetensors(file: Path) -> dict[str, _Stored]:
    try:
        with safe_open(file, framework="pt") as opened:
            keys = list(opened.keys())
            return {key: _Stored(file, key, tuple(opened.get_slice(key).get_shape()), None) for key in keys}
    except (SafetensorError, OSError) as error:
        raise fault(f"{file} is cut short or damaged: {_first_line(error)}") from error


def _config(file: Path) -> dict[str, Any]:
    """Empty where there is none."""
    if not file.is_file():
        return {}
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise fault(f"cannot read {file}: {error}") from error
    if not isinstance(config, dict):
        raise fault(f"{file} is no JSON object")
    return config


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0][:200]
