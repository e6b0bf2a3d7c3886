"""What workers tell about themselves, between wire messages and plain data. Both directions stand together."""

from __future__ import annotations

from collections.abc import Callable

from outrider.lm.interface import ModelDescription
from outrider.lm.timing import PassTiming
from outrider.server_info import CacheCounters, Numerics, TargetDrafter
from outrider.serving.same_names import read, write
from outrider.v1 import worker_pb2

_DEFAULTS: dict[str, Callable[[float], float]] = {
    "temperature": float,
    "top_k": int,
    "top_p": float,
    "min_p": float,
    "repetition_penalty": float,
}


def description_to_pb(description: ModelDescription) -> worker_pb2.DescribeWorkerResponse:
    """The model's part of the answer; role, capacity, drafters and incarnation are the worker's to add."""
    message = worker_pb2.DescribeWorkerResponse(
        model=description.model,
        model_fingerprint=description.model_fingerprint,
        tokenizer_fingerprint=description.tokenizer_fingerprint,
        tokenizer_json=description.tokenizer_json,
        chat_template=description.chat_template,
        special_tokens=description.special_tokens,
        eos_token_ids=description.eos_token_ids,
        bos_token_id=description.bos_token_id,
        vocab_size=description.vocab_size,
        context_length=description.context_length,
        versions=description.versions,
        numerics_fingerprint=description.numerics_fingerprint,
        dtype=description.dtype,
        weight_bytes=description.weight_bytes,
        simulated=description.simulated,
        numerics=numerics_to_pb(description.numerics),
    )
    for name, value in description.generation_defaults.items():
        if name in _DEFAULTS:
            setattr(message.generation_defaults, name, _DEFAULTS[name](value))
    return message


def description_from_pb(message: worker_pb2.DescribeWorkerResponse) -> ModelDescription:
    stated = message.generation_defaults
    return ModelDescription(
        model=message.model,
        model_fingerprint=message.model_fingerprint,
        tokenizer_fingerprint=message.tokenizer_fingerprint,
        vocab_size=message.vocab_size,
        context_length=message.context_length,
        tokenizer_json=message.tokenizer_json,
        chat_template=message.chat_template,
        special_tokens=dict(message.special_tokens),
        eos_token_ids=tuple(message.eos_token_ids),
        bos_token_id=message.bos_token_id if message.HasField("bos_token_id") else None,
        generation_defaults={name: getattr(stated, name) for name in _DEFAULTS if stated.HasField(name)},
        dtype=message.dtype,
        weight_bytes=message.weight_bytes,
        numerics_fingerprint=message.numerics_fingerprint,
        versions=dict(message.versions),
        simulated=message.simulated,
        numerics=numerics_from_pb(message.numerics),
    )


def numerics_to_pb(numerics: Numerics) -> worker_pb2.Numerics:
    return write(worker_pb2.Numerics, numerics)


def numerics_from_pb(message: worker_pb2.Numerics) -> Numerics:
    return read(Numerics, message, environment=dict(message.environment))


def cache_counters_to_pb(counters: CacheCounters) -> worker_pb2.CacheCounters:
    return write(worker_pb2.CacheCounters, counters)


def cache_counters_from_pb(message: worker_pb2.CacheCounters) -> CacheCounters:
    return read(CacheCounters, message)


def timing_to_pb(timing: PassTiming) -> worker_pb2.PassTiming:
    return write(worker_pb2.PassTiming, timing)


def timing_from_pb(message: worker_pb2.PassTiming) -> PassTiming:
    return read(PassTiming, message)


def target_drafter_to_pb(drafter: TargetDrafter) -> worker_pb2.TargetDrafter:
    return write(worker_pb2.TargetDrafter, drafter)


def target_drafter_from_pb(message: worker_pb2.TargetDrafter) -> TargetDrafter:
    return read(TargetDrafter, message)
