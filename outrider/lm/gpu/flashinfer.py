"""Paged attention by FlashInfer's decode kernels, where that package is installed and the model's heads fit them.

It plans every step on the host, before the step runs; what it planned lies in buffers that a captured step reads.
https://docs.flashinfer.ai/api/attention.html
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from outrider.lm.gpu.cache import PagedCache
from outrider.lm.gpu.step_rows import StepRows, StepShape

HEAD_WIDTHS = (64, 128, 256)
DTYPES = (torch.bfloat16, torch.float16)
WORKSPACE_BYTES = 128 << 20

Key = tuple[int, int, int, float, int, float]
"""Query heads, key-value heads, width, scaling, window (-1: none), softcap (0: none)."""


def fits(cache: PagedCache) -> bool:
    """Whether FlashInfer's decode kernels exist for these heads."""
    shapes = zip(cache.key_pages, cache.value_pages, strict=True)
    return not cache.is_rounded and all(
        k.dtype in DTYPES and k.shape[3] in HEAD_WIDTHS and k.shape == v.shape for k, v in shapes
    )


def installed() -> Callable[..., Any] | None:
    """The wrapper class of the installed package; None without one."""
    try:
        wrapper: Callable[..., Any] = importlib.import_module("flashinfer").BatchDecodeWithPagedKVCacheWrapper
    except (ImportError, OSError, AttributeError):
        return None
    return wrapper


class FlashInferAttention:
    """workspace: uint8[WORKSPACE_BYTES] on the device, shared by all that never run at the same time."""

    name = "flashinfer"

    def __init__(
        self, cache: PagedCache, shape: StepShape, wrapper_class: Callable[..., Any], workspace: torch.Tensor
    ) -> None:
        self._cache = cache
        self._shape = shape
        self._wrapper_class = wrapper_class
        self._workspace = workspace
        self._wrappers: dict[Key, Any] = {}
        self._pages: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None = None

    def begin(self, matrix: np.ndarray) -> None:
        """Plans with every wrapper that a layer has asked for."""
        size = self._cache.block_size
        positions = matrix[:, 1]
        counts = positions // size + 1
        indptr = np.concatenate([[0], np.cumsum(counts)])
        held = np.arange(matrix.shape[1] - 2)[None] < counts[:, None]
        indices = matrix[:, 2:][held]
        self._pages = (_int32(indptr), _int32(indices), _int32(positions % size + 1))
        for key, wrapper in self._wrappers.items():
            self._plan(key, wrapper)

    def plan(self, rows: StepRows) -> None:
        """Nothing: the host has planned."""

    def attend(
        self, layer: int, query: torch.Tensor, scaling: float | None, window: int | None, softcap: float | None
    ) -> torch.Tensor:
        """A new kind of layer gets a wrapper of its own; that happens before a capture, never in one."""
        keys, values = self._cache.key_pages[layer], self._cache.value_pages[layer]
        width = query.shape[2]
        scale = 1.0 / math.sqrt(width) if scaling is None else scaling
        key = (query.shape[1], keys.shape[2], width, scale, -1 if window is None else window, softcap or 0.0)
        wrapper = self._wrappers.get(key)
        if wrapper is None:
            wrapper = self._wrappers[key] = self._new_wrapper()
            self._plan(key, wrapper)
        attended: torch.Tensor = wrapper.run(query, (keys, values))
        return attended

    def _new_wrapper(self) -> Any:
        num_rows, device = self._shape.num_rows, self._workspace.device
        return self._wrapper_class(
            self._workspace,
            "NHD",
            use_cuda_graph=True,
            use_tensor_cores=True,
            paged_kv_indptr_buffer=torch.empty(num_rows + 1, dtype=torch.int32, device=device),
            paged_kv_indices_buffer=torch.empty(num_rows * self._shape.table_blocks, dtype=torch.int32, device=device),
            paged_kv_last_page_len_buffer=torch.empty(num_rows, dtype=torch.int32, device=device),
        )

    def _plan(self, key: Key, wrapper: Any) -> None:
        assert self._pages is not None, "begin comes first"
        num_heads, num_kv_heads, width, scale, window, softcap = key
        wrapper.plan(
            *self._pages,
            num_heads,
            num_kv_heads,
            width,
            self._cache.block_size,
            # Its window counts the tokens before the row's own.
            window_left=window - 1 if window >= 0 else -1,
            logits_soft_cap=softcap,
            sm_scale=scale,
            q_data_type=self._cache.key_pages[0].dtype,
            kv_data_type=self._cache.key_pages[0].dtype,
        )


def _int32(values: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(np.ascontiguousarray(values, np.int32))
