"""The input embedding stays in a file: only rows that are looked up come to memory, and the system may drop them again.

Every other weight lives once, packed (cpu_linear.py). Without this the embedding keeps the whole checkpoint file mapped
and counted, and where it is tied to the output head, the head's values are held twice.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import numpy as np
import torch
from safetensors import safe_open
from torch import nn
from transformers import PreTrainedModel

SMALL = 1 << 20
"""Numbers in a parameter up to which it is copied out of the checkpoint's mapping: norms and biases."""


def map_embedding(model: PreTrainedModel, path: Path) -> bool:
    """Lets the input embedding of `model` read from the safetensors file in folder `path`, which all workers share.

    Where that holds other values, another number type or no such tensor (as a GGUF file), it is written to a file
    without a name first. False, unchanged, where it is small, no plain embedding, or cannot be written.
    """
    embedding = model.get_input_embeddings()
    names = [name for name, module in model.named_modules() if module is embedding]
    if not isinstance(embedding, nn.Embedding) or not names:
        return False
    weight = embedding.weight.detach()
    mapped = _find(path, f"{names[0]}.weight")
    if mapped is None or not _is_same(mapped, weight):
        mapped = _written(weight) if weight.numel() >= SMALL else None
    if mapped is None:
        return False
    for parameter in model.parameters():
        # What is left is small, and a view of the checkpoint's mapping, all of which it would keep.
        if parameter is not embedding.weight and parameter.numel() < SMALL:
            parameter.data = parameter.data.clone()
    embedding.weight = nn.Parameter(mapped, requires_grad=False)
    return True


def _is_same(mapped: torch.Tensor, weight: torch.Tensor) -> bool:
    sample = [0, weight.shape[0] // 2, weight.shape[0] - 1]
    return mapped.dtype == weight.dtype and mapped.shape == weight.shape and torch.equal(mapped[sample], weight[sample])


def _written(weight: torch.Tensor) -> torch.Tensor | None:
    """The same numbers in a file that is gone when nothing maps it any more; None: there is no room for it."""
    numbers = weight.contiguous().view(torch.uint8).numpy()
    try:
        with tempfile.TemporaryFile() as file:
            numbers.tofile(file)
            mapped = np.memmap(file, np.uint8, "r+", shape=numbers.shape)
    except OSError:
        return None
    return torch.from_numpy(mapped).view(weight.dtype)


def _find(folder: Path, name: str) -> torch.Tensor | None:
    for path in sorted(folder.glob("*.safetensors")) if folder.is_dir() else ():
        with safe_open(path, framework="pt") as file:
            if name in file.keys():  # noqa: SIM118  # not a mapping
                tensor: torch.Tensor = file.get_tensor(name)
                return tensor
    return None
