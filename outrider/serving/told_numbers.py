"""Numbers that workers tell of themselves, checked where they come in: nobody behind this meets NaN, or times below 0.

What a worker needs right to be of use, or what says how texts are to be, makes it unusable where it cannot be so. What
is a hint alone, such as what passes have cost, is dropped: it counts as not told.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from typing import Any

from outrider.errors import FailedPrecondition
from outrider.v1 import worker_pb2

MAX_MS = 1e9
"""Eleven days: no pass takes longer."""
MIN_PASS_MS = 1e-9
MAX_UNIX_TIME_S = 1e11
MAX_IDS = 1 << 24
MAX_DRAFT_TOKENS = 1024
BAD_DESCRIPTION = "BAD_DESCRIPTION"
_TIMES = ("base_ms", "ms_per_row", "ms_per_context_token", "spread_ms")
_CAPACITY = ("num_blocks", "block_size", "max_batch_tokens", "max_draft_tokens")
_DEFAULTS = ("temperature", "top_p", "min_p", "repetition_penalty")


def refuse_unusable(answer: worker_pb2.DescribeWorkerResponse) -> None:
    """Raises FailedPrecondition, naming the field."""
    for name in ("vocab_size", "context_length"):
        _within(name, getattr(answer, name), 1, MAX_IDS if name == "vocab_size" else math.inf)
    for name in _CAPACITY:
        most = MAX_DRAFT_TOKENS if name == "max_draft_tokens" else math.inf
        _within(f"capacity.{name}", getattr(answer.capacity, name), 1, most)
    if answer.role != worker_pb2.WORKER_ROLE_TARGET:
        return
    for place, token_id in enumerate(answer.eos_token_ids):
        _within(f"eos_token_ids[{place}]", token_id, 0, answer.vocab_size - 1)
    if answer.HasField("bos_token_id"):
        _within("bos_token_id", answer.bos_token_id, 0, answer.vocab_size - 1)
    for name in _DEFAULTS:
        if answer.generation_defaults.HasField(name):
            value = getattr(answer.generation_defaults, name)
            if not 0 <= value < math.inf:
                raise _unusable(f"generation_defaults.{name}", value, "finite and not below 0")


def drop_bad_hints(answer: worker_pb2.DescribeWorkerResponse) -> str:
    """What was dropped and why, to be read by people; empty: nothing was."""
    dropped = [
        *_bad_timings(answer.timings),
        *(fault for n, drafter in enumerate(answer.target_drafters) for fault in _bad_drafter(n, drafter)),
    ]
    if not 0 <= answer.unix_time_s <= MAX_UNIX_TIME_S:
        dropped.append(f"unix_time_s is {answer.unix_time_s:g}")
        answer.unix_time_s = 0.0
    if not 0 <= 1000 * answer.numerics.probe_s <= MAX_MS:
        dropped.append(f"numerics.probe_s is {answer.numerics.probe_s:g}")
        answer.numerics.probe_s = 0.0
    return "; ".join(dropped)


def _bad_timings(timings: Any) -> Iterator[str]:
    """A line is taken or left as a whole."""
    good = []
    for place, timing in enumerate(timings):
        if fault := _fault_of(timing):
            yield f"timings[{place}].{fault}"
        else:
            good.append(timing)
    if len(good) < len(timings):
        kept = [worker_pb2.PassTiming.FromString(timing.SerializeToString()) for timing in good]
        del timings[:]
        timings.extend(kept)


def _fault_of(timing: worker_pb2.PassTiming) -> str:
    for name in _TIMES:
        if not 0 <= getattr(timing, name) <= MAX_MS:
            return f"{name} is {getattr(timing, name):g}"
    if timing.base_ms + timing.ms_per_row + timing.ms_per_context_token < MIN_PASS_MS:
        return "base_ms and the rest say that a pass takes no time"
    return ""


def _bad_drafter(place: int, drafter: worker_pb2.TargetDrafter) -> Iterator[str]:
    for name in ("first_draft_ms", "next_draft_ms"):
        if not 0 <= getattr(drafter, name) <= MAX_MS:
            yield f"target_drafters[{place}].{name} is {getattr(drafter, name):g}"
            drafter.first_draft_ms = drafter.next_draft_ms = 0.0
    if not _are_shares([drafter.agreement]):
        yield f"target_drafters[{place}].agreement is {drafter.agreement:g}"
        drafter.ClearField("agreement")
    for name in ("rank_agreement", "depth_agreement"):
        if not _are_shares(getattr(drafter, name)):
            yield f"target_drafters[{place}].{name} holds what is no share"
            drafter.ClearField(name)


def _are_shares(values: Iterable[float]) -> bool:
    return all(0 <= value <= 1 for value in values)


def _within(field: str, value: float, least: float, most: float) -> None:
    if not least <= value <= most:
        raise _unusable(field, value, f"at least {least}" if most == math.inf else f"from {least} to {most}")


def _unusable(field: str, value: float, wanted: str) -> FailedPrecondition:
    return FailedPrecondition(
        f"it tells that {field} is {value}, which must be {wanted}", field=field, reason=BAD_DESCRIPTION
    )
