"""A checkpoint's format is told by its config and its keys; each has a reader of its own."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

import torch

from outrider.lm.heads.checkpoint import Checkpoint, fault, first_keys
from outrider.lm.heads.eagle import EagleHead
from outrider.lm.heads.eagle_loading import load_eagle, load_eagle3
from outrider.lm.heads.medusa import MedusaHead
from outrider.lm.heads.medusa_loading import load_medusa
from outrider.lm.heads.target import HeadTarget

Head = MedusaHead | EagleHead


def load_head(
    path: Path | str, target: HeadTarget, *, dtype: torch.dtype = torch.float32, states: Sequence[int] | None = None
) -> Head:
    """The head in a folder, or in one file with its config.json beside it, computing in `dtype`.

    states: for an EAGLE-3 head whose layers are known better than its config tells: inputs of the target's layers.
    Where a checkpoint leaves something open, the head is read in the likeliest way until `choose_convention`.
    Raises InvalidArgument naming the file, and the key with its expected shape, for whatever does not fit.
    """
    checkpoint = Checkpoint(Path(path).expanduser())
    try:
        return _read(checkpoint, target, dtype, states)
    except (KeyError, TypeError, ValueError, AttributeError, IndexError) as error:
        raise fault(
            f"{checkpoint.where}: its config.json or a tensor is of no form known here "
            f"({type(error).__name__}: {error})"
        ) from error


def _read(checkpoint: Checkpoint, target: HeadTarget, dtype: torch.dtype, states: Sequence[int] | None) -> Head:
    _check_made_for(checkpoint, target)
    kind = _kind(checkpoint)
    if kind == "medusa":
        return load_medusa(checkpoint, target, dtype)
    return load_eagle(checkpoint, target, dtype) if kind == "eagle" else load_eagle3(checkpoint, target, dtype, states)


def _kind(checkpoint: Checkpoint) -> str:
    stated = checkpoint.config.get("speculators_model_type")
    if stated not in (None, "eagle3"):
        raise fault(
            f"{checkpoint.folder}: speculators_model_type {stated!r} is not supported; heads that are: Medusa, "
            "EAGLE-1/2, EAGLE-3"
        )
    keys = checkpoint.keys
    if any(re.match(r"(medusa_heads?\.|blocks\.\d+\.|\d+\.\d+\.)", key) for key in keys):
        return "medusa"
    if "midlayer.hidden_norm.weight" in keys or "layers.0.hidden_norm.weight" in keys or stated:
        return "eagle3"
    if any(key.startswith("midlayer.") for key in keys):
        return "eagle3"  # incomplete: its reader says what is missing
    if any(key.startswith("fc.") for key in keys) and any(key.startswith("layers.0.") for key in keys):
        return "eagle"
    raise fault(f"{checkpoint.where} is no head of a kind known here (Medusa, EAGLE-1/2, EAGLE-3): {first_keys(keys)}")


def _check_made_for(checkpoint: Checkpoint, target: HeadTarget) -> None:
    """A head that `outrider distill` wrote names its target: another one's states mean nothing to it."""
    about = checkpoint.config.get("outrider")
    if about is None:
        return
    kind = about.get("kind") if isinstance(about, dict) else about
    if kind != "eagle3":
        raise fault(f"{checkpoint.folder}: config.json says this is a draft of kind {kind!r}, which is no such head")
    fingerprints = about.get("target_fingerprints") or {}
    if target.fingerprint and target.fingerprint not in fingerprints.values():
        raise fault(
            f"{checkpoint.folder}: this head was trained for {about.get('target_model')!r}, whose weights are not "
            f"those of {target.name}: distill one for this target"
        )
