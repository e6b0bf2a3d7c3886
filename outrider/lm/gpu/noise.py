"""Gumbel noise where the logits are: the same random bits as `Noise.gumbel`, bit for bit.

Torch has no full set of unsigned operations, so 64-bit words are signed here; only right shifts notice, and mask.
Logarithms are those of the device, so values may differ from the host's in the last bits: by 1e-13 of them at most in
tests, where two candidates for a draw are 1e-13 apart with a probability of that order.
"""

from __future__ import annotations

import torch

_INCREMENT = 0x9E3779B97F4A7C15
_MULTIPLIER_1 = 0xBF58476D1CE4E5B9
_MULTIPLIER_2 = 0x94D049BB133111EB


def random_bits(keys: torch.Tensor, num_ids: int) -> torch.Tensor:
    """int64[R, num_ids]: splitmix64 of each id under each of int64[R] keys, as `Noise.gumbel` mixes them."""
    bits = torch.arange(num_ids, device=keys.device)[None] * signed(_INCREMENT) + keys[:, None]
    bits = (bits ^ _shifted(bits, 30)) * signed(_MULTIPLIER_1)
    bits = (bits ^ _shifted(bits, 27)) * signed(_MULTIPLIER_2)
    return bits ^ _shifted(bits, 31)


def gumbel(keys: torch.Tensor, num_ids: int) -> torch.Tensor:
    """float64[R, num_ids] of `Noise.gumbel_key` of each row's position, as signed words."""
    uniform = (_shifted(random_bits(keys, num_ids), 12).double() + 0.5) * 2.0**-52
    return -torch.log(-torch.log(uniform))


def signed(word: int) -> int:
    """A 64-bit word as torch holds it."""
    return word - (1 << 64) if word >= 1 << 63 else word


def _shifted(bits: torch.Tensor, count: int) -> torch.Tensor:
    """Logical shift to the right."""
    return (bits >> count) & ((1 << (64 - count)) - 1)
