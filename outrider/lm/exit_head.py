"""Loading an exit adapter: refused whole, with the file, the key and what was expected, unless it is this target's.

The folder holds config.json, whose "outrider" names kind "exit", the exit layer and the fingerprints of the target, and
model.safetensors: the block and the norm as transformers names them in a model of one layer, and draft_ids. Rows of the
output head are the target's own.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel

from outrider.errors import InvalidArgument
from outrider.lm.cpu_linear import pack_linears
from outrider.lm.exit_block import ExitHead, new_block

KIND = "exit"
CONFIG_FILE, WEIGHTS_FILE = "config.json", "model.safetensors"
DRAFT_IDS = "draft_ids"
FIELD = "heads"
UNITS_AT_ONCE = 64


@dataclass(frozen=True, slots=True)
class ExitTarget:
    """What an adapter needs of its target. lm_head: [n, H] in `dtype` on `device` -> [n, at least vocab_size]."""

    config: PretrainedConfig
    model_fingerprint: str
    vocab_size: int
    dtype: torch.dtype
    device: torch.device
    lm_head: Callable[[torch.Tensor], torch.Tensor]

    @classmethod
    def of(cls, model: PreTrainedModel, *, model_fingerprint: str, vocab_size: int) -> ExitTarget:
        """Of a loaded transformers causal LM, its layers packed or not. vocab_size: real ids."""
        head = model.get_output_embeddings()
        return cls(model.config, model_fingerprint, vocab_size, model.dtype, model.device, head)

    @torch.inference_mode()
    def head_rows(self, token_ids: torch.Tensor) -> torch.Tensor:
        """[len(token_ids), H]: rows of the head, which may keep them in a layout of its own, by what it makes of the
        columns of a unit matrix."""
        units = torch.eye(self.config.hidden_size, dtype=self.dtype, device=self.device)
        ids = token_ids.to(self.device)
        return torch.cat([self.lm_head(part)[:, ids] for part in units.split(UNITS_AT_ONCE)]).T.contiguous()


def is_exit(path: Path) -> bool:
    """Whether this folder says that it holds an exit adapter."""
    try:
        content = json.loads((path / CONFIG_FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    about = content.get("outrider") if isinstance(content, dict) else None
    return isinstance(about, dict) and about.get("kind") == KIND


def load_exit(path: Path, target: ExitTarget) -> ExitHead:
    """Raises InvalidArgument (field "heads") for what is no exit adapter, another target's, or not whole."""
    about = _read_config(path)
    layer = _exit_layer(path, about, target)
    base = new_block(target.config, layer)
    tensors = _read_tensors(path / WEIGHTS_FILE, {name: tuple(p.shape) for name, p in base.state_dict().items()})
    draft_ids = tensors.pop(DRAFT_IDS)
    ascending = bool((draft_ids[1:] > draft_ids[:-1]).all())
    if not ascending or int(draft_ids[0]) < 0 or int(draft_ids[-1]) >= target.vocab_size:
        raise _fault(f"{path / WEIGHTS_FILE}: {DRAFT_IDS} must be ascending ids below {target.vocab_size}")
    base.load_state_dict(tensors)
    base = base.to(target.dtype).to(target.device)
    rows = nn.Linear(base.config.hidden_size, len(draft_ids), bias=False, device="meta")
    rows.weight = nn.Parameter(target.head_rows(draft_ids), requires_grad=False)
    whole = nn.ModuleDict({"base": base, "rows": rows})
    if target.device.type == "cpu":
        pack_linears(whole)
    return ExitHead(whole["base"], whole["rows"], layer, draft_ids, about)


def _read_config(path: Path) -> dict[str, Any]:
    file = path / CONFIG_FILE
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise _fault(f"cannot read {file}: {error}") from error
    about = content.get("outrider") if isinstance(content, dict) else None
    if not isinstance(about, dict) or about.get("kind") != KIND:
        raise _fault(f'{file} has no "outrider" of kind "{KIND}": make one with `outrider distill --kind {KIND}`')
    return about


def _exit_layer(path: Path, about: dict[str, Any], target: ExitTarget) -> int:
    """Once the target is known to be the one that the adapter was trained on."""
    file = path / CONFIG_FILE
    fingerprints = about.get("target_fingerprints")
    if not isinstance(fingerprints, dict) or target.model_fingerprint not in fingerprints.values():
        raise _fault(
            f"{file}: trained on {about.get('target_model')} with fingerprints {fingerprints}, this target's is "
            f"{target.model_fingerprint}: distill one for it"
        )
    layer, num_layers = about.get("exit_layer"), target.config.num_hidden_layers
    if type(layer) is not int or not 0 < layer < num_layers:
        raise _fault(f"{file}: exit_layer is {layer!r}, expected 1 to {num_layers - 1}")
    return layer


def _read_tensors(file: Path, shapes: dict[str, tuple[int, ...]]) -> dict[str, torch.Tensor]:
    """All tensors of these shapes, and draft_ids; each checked before any is used."""
    try:
        with safe_open(file, framework="pt") as content:
            names = set(content.keys())
            for name in sorted(names - {*shapes, DRAFT_IDS}):
                raise _fault(f"{file}: {name} is not part of an exit adapter of this target")
            for name in (*shapes, DRAFT_IDS):
                if name not in names:
                    raise _fault(f"{file}: {name} is missing, expected shape {shapes.get(name, ('V',))}")
            tensors = {name: content.get_tensor(name) for name in (*shapes, DRAFT_IDS)}
    except (OSError, SafetensorError) as error:
        raise _fault(f"cannot read {file}: {error}") from error
    for name, shape in shapes.items():
        if tuple(tensors[name].shape) != shape:
            raise _fault(f"{file}: {name} has shape {tuple(tensors[name].shape)}, expected {shape}")
        if not tensors[name].is_floating_point() or not bool(torch.isfinite(tensors[name]).all()):
            raise _fault(f"{file}: {name} holds values that are no finite numbers")
    ids = tensors[DRAFT_IDS]
    if ids.dtype != torch.int64 or ids.ndim != 1 or not len(ids):
        raise _fault(f"{file}: {DRAFT_IDS} is {ids.dtype} of shape {tuple(ids.shape)}, expected int64 of shape (V,)")
    return tensors


def _fault(what: str) -> InvalidArgument:
    return InvalidArgument(f"{FIELD}: {what}", field=FIELD)
