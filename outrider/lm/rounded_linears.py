"""A draft model's linear layers with weights of 8 or 4 bits. Exactness never depends on a draft, only its luck does."""

from __future__ import annotations

from typing import Literal

import torch
from torch import nn

from outrider.errors import InvalidArgument
from outrider.lm import int4_linear
from outrider.lm.cpu_linear import join_children
from outrider.lm.int4_linear import Int4Linear
from outrider.lm.int8_linear import Int8Linear

WeightDtype = Literal["int8", "int4"]
ROUNDED = (Int8Linear, Int4Linear)
_DTYPES = (torch.float32, torch.bfloat16)


def round_linears(model: nn.Module, weight_dtype: WeightDtype) -> int:
    """Replaces every linear layer by its rounded form, in place, siblings jointly; returns how many.

    Under int4 the head keeps 8 bits, on which the choice among near-equal tokens depends most, and so does a layer of a
    shape that the kernel does not take. Raises InvalidArgument naming weight_dtype where device, torch or model have no
    such form.
    """
    head = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None  # type: ignore[operator]

    def rounded(linear: nn.Linear) -> nn.Module:
        if weight_dtype == "int4" and linear is not head and int4_linear.can_hold(linear):
            return Int4Linear(linear)
        return Int8Linear(linear)

    try:
        num_joined = sum(join_children(module, rounded, _fits) for module in list(model.modules()))
    except (RuntimeError, AttributeError, NotImplementedError) as error:
        raise _missing(weight_dtype, error) from error
    linears = [
        (parent, name, child)
        for parent in list(model.modules())
        for name, child in parent.named_children()
        if type(child) is nn.Linear
    ]
    if not num_joined and not linears:
        raise _refusal(weight_dtype, "the model has no linear layers that it could hold so")
    for parent, name, linear in linears:
        if linear.weight.device.type != "cpu":
            raise _refusal(weight_dtype, f"it runs on a CPU only, the model is on {linear.weight.device}")
        if linear.weight.dtype not in _DTYPES:
            why = f"its activations are float32 or bfloat16, not {linear.weight.dtype}: set dtype"
            raise _refusal(weight_dtype, why)
        try:
            layer = rounded(linear)
            layer(torch.zeros(1, linear.in_features, dtype=linear.weight.dtype))
        except (RuntimeError, AttributeError, NotImplementedError) as error:
            raise _missing(weight_dtype, error) from error
        setattr(parent, name, layer)
    return num_joined + len(linears)


def weight_bytes(model: nn.Module) -> int:
    """Of all parameters and all rounded layers."""
    rounded = sum(module.num_bytes for module in model.modules() if isinstance(module, ROUNDED))
    return rounded + sum(p.numel() * p.element_size() for p in model.parameters())


def _fits(linear: nn.Linear) -> bool:
    return type(linear) is nn.Linear and linear.weight.device.type == "cpu" and linear.weight.dtype in _DTYPES


def _missing(weight_dtype: str, error: Exception) -> InvalidArgument:
    return _refusal(weight_dtype, f"this build of torch or this processor has no such kernel ({error})")


def _refusal(weight_dtype: str, why: str) -> InvalidArgument:
    return InvalidArgument(f"weight_dtype {weight_dtype}: {why}. Use weight_dtype auto.", field="weight_dtype")
