"""From a loaded model and the settings to an engine: decides how large the cache is."""

from __future__ import annotations

import math

import psutil

from outrider.errors import InvalidArgument
from outrider.lm.engine import Engine
from outrider.lm.interface import LoadedModel
from outrider.lm.prefill_share import PrefillShare
from outrider.lm.toy import ToyModel
from outrider.settings import DraftWorkerSettings, TargetWorkerSettings, WorkerSettings

MAX_DEFAULT_CACHE_BYTES = 4 << 30
CPU_PREFILL_ROWS = 8
"""To begin with: about as many rows as a pass of a processor takes at the price of one, reading all weights anyway."""
TOY_CACHE_TOKENS = 1 << 20
"""Room for 2,000 streams of some 500 tokens; a toy's cache holds ids only, 8 bytes a token."""


def build_engine(loaded: LoadedModel, settings: WorkerSettings) -> Engine:
    """An engine over `loaded`, not started. Raises InvalidArgument when the cache cannot hold a single block."""
    return Engine(
        loaded.model,
        num_blocks=_num_blocks(loaded, settings),
        block_size=settings.block_size,
        max_batch_tokens=settings.max_batch_tokens,
        max_waiting_sessions=settings.max_waiting_sessions,
        cache_namespace=_cache_namespace(loaded),
        prefill_rows=settings.prefill_rows or _prefill_share(loaded.model, settings),
        **_sharing(settings),
    )


def _prefill_share(model: object, settings: WorkerSettings) -> PrefillShare:
    most = settings.max_batch_tokens // 2 or 1
    is_cuda = getattr(getattr(model, "device", None), "type", "cpu") == "cuda"
    return PrefillShare(settings.max_batch_tokens // 4 or 1 if is_cuda else CPU_PREFILL_ROWS, most)


def _sharing(settings: WorkerSettings) -> dict[str, float]:
    """A draft worker lets every session in: a lost cache there costs time, a session that waits drafts nothing."""
    if isinstance(settings, DraftWorkerSettings):
        return {"overcommit": math.inf, "idle_grace_s": 0.0}
    return {"overcommit": settings.cache_overcommit} if isinstance(settings, TargetWorkerSettings) else {}


def _cache_namespace(loaded: LoadedModel) -> str:
    """What decides keys and values besides ids. An engine has one model: this keeps a shared index honest as well."""
    description = loaded.description
    return "|".join((description.model_fingerprint, description.dtype, description.numerics_fingerprint))


def _num_blocks(loaded: LoadedModel, settings: WorkerSettings) -> int:
    model = loaded.model
    if settings.memory_fraction and settings.kv_cache_bytes:
        raise _no_fraction("kv_cache_bytes sizes the cache too, give one of them")
    if settings.memory_fraction and isinstance(model, ToyModel):
        raise _no_fraction("a toy's cache holds ids only, give kv_cache_bytes")
    if isinstance(model, ToyModel) and not settings.kv_cache_bytes:
        return model.spec.blocks or max(1, TOY_CACHE_TOKENS // settings.block_size)
    bytes_per_block = model.bytes_per_block(settings.block_size)
    cache_bytes = _cache_bytes(model, settings)
    if cache_bytes < bytes_per_block:
        field = "memory_fraction" if settings.memory_fraction else "kv_cache_bytes"
        raise InvalidArgument(
            f"the cache has {cache_bytes} bytes, one block of {settings.block_size} tokens takes {bytes_per_block}: "
            f"raise {field} or lower block_size",
            field=field,
        )
    return int(cache_bytes // bytes_per_block)


def _no_fraction(why: str) -> InvalidArgument:
    return InvalidArgument(f"memory_fraction: {why}", field="memory_fraction")


def _cache_bytes(model: object, settings: WorkerSettings) -> int:
    if settings.kv_cache_bytes:
        return settings.kv_cache_bytes
    if settings.memory_fraction:
        return int(_free_bytes(model) * settings.memory_fraction)
    return min(_free_bytes(model) // 4, MAX_DEFAULT_CACHE_BYTES)


def _free_bytes(model: object) -> int:
    """Memory free where the model's cache goes."""
    free_bytes = getattr(model, "free_bytes", None)
    return int(free_bytes()) if free_bytes is not None else int(psutil.virtual_memory().available)
