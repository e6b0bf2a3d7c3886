"""Linear layers with oneDNN-prepacked weights: on CPUs one pass over a few rows then costs as much as over one.

Stock `F.linear` repacks or strides through the weight on every call; the packed form reads it once, in order. This is
what decides whether verifying several drafts is cheaper than decoding them. Projections that read the same input
(queries, keys and values; gate and up) are packed into one weight: fewer calls, each long enough to fill the threads.
The stock layers stay the slow twin in tests, and the fallback where the op, the device or the number type does not fit.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from outrider.lm.row_counts import ROW_COUNTS, pieces

PACK_ROWS = 8
"""Row count that the packed layout is made for: a verification's, not a prefill's."""

JOINT_INPUT = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
"""Names of sibling layers that all families here call with one and the same input."""

_DTYPES = (torch.float32, torch.bfloat16)


class PackedLinear(nn.Module):
    """Drop-in for an `nn.Linear` in inference: y = x W^T + b with W[out_features, in_features] packed."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        weight = linear.weight.detach()
        self.dtype = weight.dtype
        self._packed = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), PACK_ROWS)
        self._bias = linear.bias.detach().clone() if linear.bias is not None else None
        self.min_rows = 0
        """Under a fixed order of additions the fewest rows that the kernel is given; 0: any order will do."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.min_rows:
            return self._in_fixed_order(x)
        return torch.ops.mkldnn._linear_pointwise(x, self._packed, self._bias, "none", [], "")

    @property
    def has_bias(self) -> bool:
        return self._bias is not None

    def fix_order(self) -> int:
        """Sets `min_rows` and returns it: from here on a row's result is the same, to the bit, whatever its neighbours.

        oneDNN takes another kernel, with another order of additions, for one row and may for a few; so the fewest rows
        (two or more) are found for which all counts agree, and fewer are filled up inside this call. Raises
        RuntimeError when no count will do.
        """
        generator = torch.Generator().manual_seed(0)
        x = torch.randn(max(ROW_COUNTS), self.in_features, generator=generator).to(self.dtype)
        for num_rows in (2, 4, 8):
            self.min_rows = num_rows
            expected = torch.cat([self(x[i : i + 8]) for i in range(0, len(x), 8)])
            starts = [
                (count, start) for count in ROW_COUNTS for start in {0, 3, len(x) - count} if start + count <= len(x)
            ]
            if all(torch.equal(self(x[s : s + c]), expected[s : s + c]) for c, s in starts):
                return num_rows
        raise RuntimeError(f"a packed {self.in_features}x{self.out_features} layer has no row-independent order")

    def _in_fixed_order(self, x: torch.Tensor) -> torch.Tensor:
        """Only row counts that `fix_order` has tried reach the kernel."""
        rows = x.reshape(-1, self.in_features)
        num_rows = rows.shape[0]
        if not num_rows:
            return x.new_empty(*x.shape[:-1], self.out_features)
        if num_rows < self.min_rows:
            rows = torch.cat([rows, rows[:1].expand(self.min_rows - num_rows, -1)])
        parts = [
            torch.ops.mkldnn._linear_pointwise(part, self._packed, self._bias, "none", [], "")
            for part in rows.split(pieces(rows.shape[0], at_least=self.min_rows))
        ]
        y = parts[0] if len(parts) == 1 else torch.cat(parts)
        return y[:num_rows].view(*x.shape[:-1], self.out_features)


class JointLinear:
    """Layers of one input as one packed weight: computed when the first of them is called, handed out to each."""

    def __init__(self, linears: list[nn.Linear], pack: Callable[[nn.Linear], nn.Module] = PackedLinear) -> None:
        """linears: as `can_join` allows. Their weights are copied. pack: makes what computes them as one."""
        self.sizes = [linear.out_features for linear in linears]
        whole = nn.Linear(linears[0].in_features, sum(self.sizes), bias=False, device="meta")
        whole.weight = nn.Parameter(torch.cat([linear.weight.detach() for linear in linears]), requires_grad=False)
        if linears[0].bias is not None:
            whole.bias = nn.Parameter(torch.cat([linear.bias.detach() for linear in linears]), requires_grad=False)
        self.packed = pack(whole)
        self._input: torch.Tensor | None = None
        self._outputs: list[torch.Tensor | None] = []

    def output(self, index: int, x: torch.Tensor) -> torch.Tensor:
        """What layer `index` gives for x; a view of the joint result. Keeps nothing once all have been asked."""
        if x is not self._input or self._outputs[index] is None:
            self._input, self._outputs = x, list(self.packed(x).split(self.sizes, -1))
        result = self._outputs[index]
        assert result is not None
        self._outputs[index] = None
        if not any(output is not None for output in self._outputs):
            self._input = None
        return result


class JointPart(nn.Module):
    """Stands where one of the joined layers stood."""

    def __init__(self, joint: JointLinear, index: int, linear: nn.Linear) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.joint = joint
        self.index = index
        if index == 0:
            self.packed = joint.packed  # a child of the first, so that whoever walks the modules meets it once

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.joint.output(self.index, x)


def can_pack(linear: nn.Linear) -> bool:
    """Whether this layer, on this machine and build of torch, has a packed form that computes the same."""
    weight = linear.weight
    return weight.device.type == "cpu" and type(linear) is nn.Linear and packs(weight.dtype)


def packs(dtype: torch.dtype) -> bool:
    """Whether this machine and build of torch have a packed form for weights of this number type."""
    has_kernel = torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_reorder_linear_weight")
    if dtype not in _DTYPES or not has_kernel:
        return False
    return dtype == torch.float32 or torch.ops.mkldnn._is_mkldnn_bf16_supported()


def can_join(layers: list[nn.Module | None], fits: Callable[[nn.Linear], bool] = can_pack) -> bool:
    """Whether these are plain layers that fit, of one input width and number type, all with a bias or all without."""
    linears = [layer for layer in layers if isinstance(layer, nn.Linear) and fits(layer)]
    kinds = {(linear.in_features, linear.weight.dtype, linear.bias is None) for linear in linears}
    return len(linears) == len(layers) and len(kinds) == 1


def pack_linears(model: nn.Module) -> int:
    """Replaces every linear layer that can be packed, in place, siblings jointly; returns how many.

    The original weights are freed with their layers, except one that is also the input embedding, whose rows are looked
    up. Falls back to the stock layer, unchanged, when packing any single one fails.
    """
    num_packed = 0
    for module in list(model.modules()):
        try:
            num_packed += join_children(module) + _pack_children(module)
        except (RuntimeError, NotImplementedError):
            return num_packed
    return num_packed


def fix_orders(model: nn.Module) -> None:
    """`PackedLinear.fix_order` of every packed layer; equal shapes are tried once."""
    tried: dict[tuple[int, int, torch.dtype, bool], int] = {}
    for module in model.modules():
        if isinstance(module, PackedLinear):
            shape = (module.in_features, module.out_features, module.dtype, module.has_bias)
            if shape not in tried:
                tried[shape] = module.fix_order()
            module.min_rows = tried[shape]


def join_children(
    module: nn.Module,
    pack: Callable[[nn.Linear], nn.Module] = PackedLinear,
    fits: Callable[[nn.Linear], bool] = can_pack,
) -> int:
    """Replaces children that can be packed jointly, in place; returns how many. What packing raises goes on."""
    num_packed = 0
    for names in JOINT_INPUT:
        layers = [getattr(module, name, None) for name in names]
        if not can_join(layers, fits):
            continue
        linears = [layer for layer in layers if isinstance(layer, nn.Linear)]
        joint = JointLinear(linears, pack)
        _try_out(joint.packed, linears[0])
        for index, (name, linear) in enumerate(zip(names, linears, strict=True)):
            setattr(module, name, JointPart(joint, index, linear))
        num_packed += len(linears)
    return num_packed


def _pack_children(module: nn.Module) -> int:
    num_packed = 0
    for name, child in list(module.named_children()):
        if isinstance(child, nn.Linear) and can_pack(child):
            packed = PackedLinear(child)
            _try_out(packed, child)
            setattr(module, name, packed)
            num_packed += 1
    return num_packed


def _try_out(packed: nn.Module, linear: nn.Linear) -> None:
    packed(torch.zeros(1, linear.in_features, dtype=linear.weight.dtype))
