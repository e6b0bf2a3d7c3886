"""The input embedding stays in its file: only rows that are looked up come to memory, and all workers share them.

Every other weight lives once, packed (cpu_linear.py). Without this the embedding keeps the whole checkpoint file mapped
and counted, and where it is tied to the output head, the head's values are held twice.
"""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors import safe_open
from torch import nn
from transformers import PreTrainedModel

SMALL = 1 << 20
"""Numbers in a parameter up to which it is copied out of the checkpoint's mapping: norms and biases."""


def map_embedding(model: PreTrainedModel, folder: Path) -> bool:
    """Lets the input embedding of `model` read from the folder's safetensors file. False, unchanged, where it cannot:

    the file holds another number type, another shape or no tensor of that name.
    """
    embedding = model.get_input_embeddings()
    names = [name for name, module in model.named_modules() if module is embedding]
    if not isinstance(embedding, nn.Embedding) or not names:
        return False
    mapped = _find(folder, f"{names[0]}.weight")
    weight = embedding.weight
    if mapped is None or mapped.dtype != weight.dtype or mapped.shape != weight.shape:
        return False
    sample = [0, weight.shape[0] // 2, weight.shape[0] - 1]
    if not torch.equal(mapped[sample], weight.detach()[sample]):
        return False
    for parameter in model.parameters():
        # What is left is small, and a view of the checkpoint's mapping, all of which it would keep.
        if parameter is not weight and parameter.numel() < SMALL:
            parameter.data = parameter.data.clone()
    embedding.weight = nn.Parameter(mapped, requires_grad=False)
    return True


def _find(folder: Path, name: str) -> torch.Tensor | None:
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            if name in file.keys():  # noqa: SIM118  # not a mapping
                tensor: torch.Tensor = file.get_tensor(name)
                return tensor
    return None
