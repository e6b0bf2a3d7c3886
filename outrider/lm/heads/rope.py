"""Rotary angles of a head, from its own config: never from its target's, which may have another base."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch

from outrider.lm.heads.checkpoint import fault

DEFAULT_THETA = 10000.0
"""Of heads whose config names no base, as original EAGLE-3's: their training code falls back to this."""
PAGE = 1024


def inverse_frequencies(config: Mapping[str, Any], head_dim: int) -> torch.Tensor:
    """float32[head_dim / 2]. Reads `rope_parameters` (newer configs), or `rope_theta` and `rope_scaling` (older).

    Raises InvalidArgument for a kind of scaling that is not computed here.
    """
    parameters = {**(config.get("rope_scaling") or {}), **(config.get("rope_parameters") or {})}
    theta = float(parameters.get("rope_theta") or config.get("rope_theta") or DEFAULT_THETA)
    kind = parameters.get("rope_type") or parameters.get("type") or "default"
    frequencies = theta ** -(torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim)
    if kind == "linear":
        frequencies = frequencies / float(parameters["factor"])
    elif kind == "llama3":
        frequencies = _llama3(frequencies, parameters)
    elif kind != "default":
        raise fault(f"config.json: rotary scaling {kind!r} is not supported, only default, linear and llama3")
    return frequencies.float()


def _llama3(frequencies: torch.Tensor, parameters: Mapping[str, Any]) -> torch.Tensor:
    """Slow waves are stretched by `factor`, fast ones kept, those between blended (Llama 3.1)."""
    factor, low, high = (float(parameters[k]) for k in ("factor", "low_freq_factor", "high_freq_factor"))
    turns = float(parameters["original_max_position_embeddings"]) * frequencies / (2 * math.pi)
    kept = ((turns - low) / (high - low)).clamp(0, 1)
    return frequencies * (kept + (1 - kept) / factor)


class RotaryTable:
    """Cosines and sines of positions, computed once a page."""

    def __init__(self, frequencies: torch.Tensor, device: torch.device) -> None:
        """frequencies: float32[D / 2]."""
        self._frequencies = frequencies.to(device)
        self._cosines = self._sines = torch.empty(0, 1, len(frequencies), device=device)

    def rows(self, start: int, end: int) -> tuple[torch.Tensor, torch.Tensor]:
        """float32[end - start, 1, D / 2] each, of positions start, start + 1, ..."""
        while len(self._cosines) < end:
            first = len(self._cosines)
            positions = torch.arange(first, first + PAGE, device=self._frequencies.device).float()
            angles = (positions[:, None] * self._frequencies)[:, None]
            self._cosines = torch.cat([self._cosines, angles.cos()])
            self._sines = torch.cat([self._sines, angles.sin()])
        return self._cosines[start:end], self._sines[start:end]

    def at(self, positions: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
        """float32[n, 1, D / 2] each, of n positions in any order."""
        cosines, sines = self.rows(0, max(positions) + 1)
        return cosines[positions], sines[positions]


def rotate(x: torch.Tensor, cosines: torch.Tensor, sines: torch.Tensor) -> torch.Tensor:
    """[n, heads, D], each pair (i, i + D/2) turned by its row's angle."""
    low, high = x.chunk(2, -1)
    return torch.cat([low * cosines - high * sines, high * cosines + low * sines], -1)
