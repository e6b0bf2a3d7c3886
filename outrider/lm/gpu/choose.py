"""Which paged attention serves here."""

from __future__ import annotations

from collections.abc import Callable

import torch

from outrider.lm.gpu import flashinfer
from outrider.lm.gpu.cache import PagedCache
from outrider.lm.gpu.paged_attention import GatheredAttention, PagedAttention
from outrider.lm.gpu.step_rows import StepShape

NAMES = ("auto", "flashinfer", "flex", "gathered")
AttentionFactory = Callable[[StepShape], PagedAttention]


def attention_factory(cache: PagedCache, device: torch.device, wanted: str = "auto") -> AttentionFactory:
    """auto: FlashInfer where it is installed and fits, else flex; on a CPU the gathered one.

    Raises ValueError for a name not in NAMES, or for one that cannot serve here.
    """
    if wanted not in NAMES:
        raise ValueError(f"attention {wanted!r} is none of {', '.join(NAMES)}")
    is_gpu = device.type == "cuda"
    wrapper = flashinfer.installed() if wanted in ("auto", "flashinfer") and is_gpu else None
    if wrapper is not None and flashinfer.fits(cache):
        workspace = torch.zeros(flashinfer.WORKSPACE_BYTES, dtype=torch.uint8, device=device)
        return lambda shape: flashinfer.FlashInferAttention(cache, shape, wrapper, workspace)
    if wanted == "flashinfer":
        raise ValueError("flashinfer is not installed here, or has no kernels for this model's heads")
    if wanted == "gathered" or (wanted == "auto" and (cache.is_rounded or not is_gpu)):
        return lambda shape: GatheredAttention(cache)
    if cache.is_rounded:
        raise ValueError("flex reads the cache as it is kept: cache and model have one number type then")
    from outrider.lm.gpu.flex import FlexAttention

    return lambda shape: FlexAttention(cache, compiled=is_gpu)
