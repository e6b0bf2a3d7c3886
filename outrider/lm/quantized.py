"""Quantised checkpoints: their weights are put back into the model's number type while they are read.

What a pass computes with is exactly the values that the checkpoint stands for; it saves download and disk, not memory.
Kinds that are read here are FP8 (by blocks, rows or tensors), GPTQ, AWQ and most of compressed-tensors. Others need
their own kernels and are refused by name.

Letters: O outputs and I inputs of a layer; g inputs share a scale (a group).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from outrider.errors import InvalidArgument

Parts = dict[str, torch.Tensor]
"""A layer's tensors by the last part of their names."""

_AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
"""Which output of eight stands in each successive group of 4 bits."""
_FIXES = {
    "bitsandbytes": "convert it with `model.dequantize()` of transformers where bitsandbytes is installed",
    "gguf": "give the .gguf file itself",
}


@dataclass(frozen=True, slots=True)
class Quantization:
    """How a checkpoint's weights are kept."""

    method: str
    """As the config names it, with a format where there are several."""
    dequantize: Callable[[Parts], torch.Tensor]
    """float32[O, I] from a quantised layer's tensors."""
    markers: tuple[str, ...]
    """Tensors of which a quantised layer has one, and other layers none."""
    leftovers: tuple[str, ...]
    """Tensors of quantised layers that are no part of the model, the marker and scales among them."""


def read_quantization(config: Mapping[str, Any]) -> Quantization | None:
    """None for a checkpoint that is not quantised. config: what config.json holds.

    Raises InvalidArgument, naming method and fix, for a kind that cannot be read.
    """
    stated = config.get("quantization_config") or config.get("compression_config")
    if stated is None:
        stated = (config.get("text_config") or {}).get("quantization_config")
    if stated is None:
        return None
    method = str(stated.get("quant_method", ""))
    if not method and (stated.get("load_in_4bit") or stated.get("load_in_8bit")):
        method = "bitsandbytes"
    reader = _READERS.get(method)
    if reader is None:
        raise _refusal(method or "unnamed", "its weights cannot be read without its own kernels")
    return reader(stated)


def dequantized_weights(folder: Path, quantization: Quantization, dtype: torch.dtype) -> Parts:
    """Every weight of the folder's safetensors files under its plain name, in `dtype`.

    Raises InvalidArgument when the files do not hold what the config says.
    """
    weights: Parts = {}
    layers: dict[str, Parts] = {}
    for name, tensor in _tensors(folder):
        layer, _, part = name.rpartition(".")
        if part in (*quantization.leftovers, "weight"):
            layers.setdefault(layer, {})[part] = tensor
        else:
            weights[name] = tensor
    num_quantized = 0
    for layer in list(layers):
        parts = layers.pop(layer)
        if any(marker in parts for marker in quantization.markers):
            weights[f"{layer}.weight"] = _dequantized(quantization, layer, parts).to(dtype)
            num_quantized += 1
        elif "weight" in parts:
            weights[f"{layer}.weight"] = _plain(quantization, layer, parts["weight"])
    if not num_quantized:
        raise InvalidArgument(
            f"the config says {quantization.method} but no layer in {folder} has a {quantization.markers[0]}: "
            "it is no whole checkpoint of that kind",
            field="model",
        )
    return {name: w.to(dtype) if w.is_floating_point() else w for name, w in weights.items()}


def _plain(quantization: Quantization, layer: str, weight: torch.Tensor) -> torch.Tensor:
    if weight.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        raise InvalidArgument(
            f"layer {layer} is kept as {weight.dtype} without {quantization.markers[0]}, so not as "
            f"{quantization.method} says",
            field="model",
        )
    return weight


def _dequantized(quantization: Quantization, layer: str, parts: Parts) -> torch.Tensor:
    try:
        return quantization.dequantize(parts)
    except (KeyError, RuntimeError, IndexError) as error:
        raise InvalidArgument(
            f"layer {layer} is not kept as {quantization.method} says ({type(error).__name__}: {error})", field="model"
        ) from error


def _tensors(folder: Path) -> Iterator[tuple[str, torch.Tensor]]:
    for path in _weight_files(folder):
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118  # not a mapping
                yield name, file.get_tensor(name)


def _weight_files(folder: Path) -> list[Path]:
    """Those of transformers' own naming where there are some: a folder may hold the weights twice."""
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        return [folder / name for name in sorted(set(json.loads(index.read_text())["weight_map"].values()))]
    single = folder / "model.safetensors"
    return [single] if single.is_file() else sorted(folder.glob("*.safetensors"))


def _fp8(stated: Mapping[str, Any]) -> Quantization:
    """`weight` in 8-bit floats, to be multiplied with `weight_scale_inv`, or `weight_scale`: per block, or one."""
    block = stated.get("weight_block_size")
    if stated.get("expert_dtype", "fp8") != "fp8":
        raise _refusal("fp8 with 4-bit experts", "they are not read")

    def dequantize(parts: Parts) -> torch.Tensor:
        weight = parts["weight"].float()
        scale = parts["weight_scale_inv"] if "weight_scale_inv" in parts else parts["weight_scale"]
        scale = torch.exp2(scale.float() - 127) if scale.dtype == torch.uint8 else scale.float()
        return weight * (_spread(scale, block, weight.shape) if block and scale.dim() == 2 else scale)

    scales = ("weight_scale_inv", "weight_scale")
    return Quantization("fp8", dequantize, scales, (*scales, "activation_scale", "input_scale"))


def _fbgemm_fp8(_: Mapping[str, Any]) -> Quantization:
    """`weight` in 8-bit floats, `weight_scale` [O, 1]."""
    leftovers = ("weight_scale", "input_scale", "input_scale_ub")
    return Quantization("fbgemm_fp8", _scaled_rows, ("weight_scale",), leftovers)


def _compressed_tensors(stated: Mapping[str, Any]) -> Quantization:
    """One format for all layers: 8-bit floats or integers as they are, or integers packed in 32-bit words."""
    layout = str(stated.get("format", ""))
    groups = list((stated.get("config_groups") or {}).values())
    weights = [group.get("weights") or {} for group in groups if isinstance(group, Mapping)]
    leftovers = ("weight_scale", "weight_zero_point", "input_scale", "input_zero_point", "output_scale")
    method = f"compressed-tensors ({layout or 'no format'})"
    if (stated.get("sparsity_config") or {}).get("format", "dense") != "dense":
        raise _refusal(method, "sparse weights are not read")
    if len(weights) != 1:
        raise _refusal(method, f"it has {len(weights)} groups of layers, and one is read")
    if layout in ("float-quantized", "naive-quantized", "int-quantized"):
        return Quantization(method, _scaled_rows, ("weight_scale",), leftovers)
    if layout != "pack-quantized":
        raise _refusal(method, "formats read are float-quantized, int-quantized, naive-quantized and pack-quantized")
    bits = int(weights[0].get("num_bits", 4))
    if bits not in (4, 8) or weights[0].get("actorder") not in (None, False, "weight", "static"):
        raise _refusal(method, f"{bits} bits, activation order {weights[0].get('actorder')}, are not read")

    def dequantize(parts: Parts) -> torch.Tensor:
        num_outputs, num_inputs = parts["weight_shape"].tolist()
        values = _unpacked(parts["weight_packed"], bits, 1)[:num_outputs, :num_inputs] - (1 << bits - 1)
        scale = parts["weight_scale"].float()
        group_size = -(-num_inputs // scale.shape[1])
        zeros = torch.zeros_like(scale)
        if "weight_zero_point" in parts:
            zeros = (_unpacked(parts["weight_zero_point"], bits, 0)[:num_outputs] - (1 << bits - 1)).float()
        block = (1, group_size)
        shape = values.shape
        return (values.float() - _spread(zeros, block, shape)) * _spread(scale, block, shape)

    return Quantization(method, dequantize, ("weight_packed",), (*leftovers, "weight_packed", "weight_shape"))


def _gptq(stated: Mapping[str, Any]) -> Quantization:
    """`qweight` int32 [I bits/32, O], `qzeros` [I/g, O bits/32], `scales` [I/g, O], `g_idx` [I]."""
    bits = int(stated.get("bits", 4))
    if bits not in (2, 4, 8):
        raise _refusal(f"gptq with {bits} bits", "2, 4 and 8 bits are read")
    layout = str(stated.get("checkpoint_format") or "gptq")
    if layout not in ("gptq", "gptq_v2"):
        raise _refusal(f"gptq ({layout})", "formats gptq and gptq_v2 are read")
    less_one = int(layout == "gptq")
    """The older format keeps zero points less one."""

    def dequantize(parts: Parts) -> torch.Tensor:
        values = _unpacked(parts["qweight"], bits, 0)
        zeros = _unpacked(parts["qzeros"], bits, 1) + less_one & (1 << bits) - 1
        groups = parts["g_idx"].long()
        return (parts["scales"].float()[groups] * (values - zeros[groups])).T

    return Quantization(f"gptq {bits}-bit", dequantize, ("qweight",), ("qweight", "qzeros", "scales", "g_idx"))


def _awq(stated: Mapping[str, Any]) -> Quantization:
    """`qweight` int32 [I, O/8], `qzeros` [I/g, O/8], `scales` [I/g, O]."""
    bits, layout = int(stated.get("bits", stated.get("w_bit", 4))), str(stated.get("version", "gemm")).lower()
    if bits != 4 or layout != "gemm":
        raise _refusal(f"awq ({layout}, {bits} bits)", "format gemm with 4 bits is read")
    order = torch.tensor(_AWQ_ORDER).argsort()

    def in_order(packed: torch.Tensor) -> torch.Tensor:
        return _unpacked(packed, 4, 1).unflatten(1, (-1, 8))[:, :, order].flatten(1)

    def dequantize(parts: Parts) -> torch.Tensor:
        values, zeros, scales = in_order(parts["qweight"]), in_order(parts["qzeros"]), parts["scales"].float()
        group_size = values.shape[0] // scales.shape[0]
        zeros, scales = zeros.repeat_interleave(group_size, 0), scales.repeat_interleave(group_size, 0)
        return (scales * (values - zeros)).T

    return Quantization("awq 4-bit", dequantize, ("qweight",), ("qweight", "qzeros", "scales"))


def _scaled_rows(parts: Parts) -> torch.Tensor:
    """`weight_scale`: one, one a row, or one a group of a row's inputs."""
    weight, scale = parts["weight"].float(), parts["weight_scale"].float()
    zeros = parts["weight_zero_point"].float() if "weight_zero_point" in parts else torch.zeros_like(scale)
    if scale.dim() == 2 and scale.shape[1] > 1:
        block = (1, -(-weight.shape[1] // scale.shape[1]))
        scale, zeros = _spread(scale, block, weight.shape), _spread(zeros, block, weight.shape)
    elif scale.dim() == 1 and scale.numel() > 1:
        scale, zeros = scale[:, None], zeros[:, None]
    return (weight - zeros) * scale


def _spread(scale: torch.Tensor, block: tuple[int, int], shape: torch.Size) -> torch.Tensor:
    """A value for each weight of [O, I] from one for each block; the last ones may be cut."""
    spread = scale.repeat_interleave(block[0], 0).repeat_interleave(block[1], 1)
    return spread[: shape[0], : shape[1]]


def _unpacked(packed: torch.Tensor, bits: int, dim: int) -> torch.Tensor:
    """int32 with 32 / bits times as many entries along `dim`, the lowest bits first."""
    shifts = torch.arange(0, 32, bits, dtype=torch.int32)
    shape = [1] * (packed.dim() + 1)
    shape[dim + 1] = -1
    values = packed.unsqueeze(dim + 1) >> shifts.view(shape) & (1 << bits) - 1
    return values.flatten(dim, dim + 1)


def _refusal(method: str, why: str) -> InvalidArgument:
    fix = _FIXES.get(method, "convert it to bfloat16, or choose an FP8, GPTQ or AWQ checkpoint of the same model")
    text = f"the checkpoint is quantised with {method}, which is not served: {why}; {fix}"
    return InvalidArgument(text, field="model")


_READERS: dict[str, Callable[[Mapping[str, Any]], Quantization]] = {
    "fp8": _fp8,
    "mxfp8": _fp8,
    "fbgemm_fp8": _fbgemm_fp8,
    "compressed-tensors": _compressed_tensors,
    "gptq": _gptq,
    "awq": _awq,
}
