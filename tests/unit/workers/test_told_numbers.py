"""Numbers that a worker tells of itself: what cannot be makes it unusable by name, or counts as not told."""

from __future__ import annotations

import math
from typing import Any

import pytest

from outrider.errors import FailedPrecondition
from outrider.serving.told_numbers import drop_bad_hints, refuse_unusable
from outrider.v1 import worker_pb2

BAD = (math.nan, math.inf, -math.inf, -1.0)


def description(role: worker_pb2.WorkerRole = worker_pb2.WORKER_ROLE_TARGET) -> worker_pb2.DescribeWorkerResponse:
    return worker_pb2.DescribeWorkerResponse(
        role=role, vocab_size=16, context_length=64, eos_token_ids=[15], bos_token_id=0, unix_time_s=1.7e9,
        generation_defaults=worker_pb2.GenerationDefaults(temperature=0.0, top_p=1.0, repetition_penalty=1.0),
        capacity=worker_pb2.WorkerCapacity(num_blocks=8, block_size=16, max_batch_tokens=64, max_draft_tokens=4),
        timings=[worker_pb2.PassTiming(base_ms=1.0, ms_per_row=0.5, num_passes=9) for _ in range(3)],
        target_drafters=[
            worker_pb2.TargetDrafter(
                name="head", first_draft_ms=2.0, next_draft_ms=1.0, agreement=0.0, rank_agreement=[1.0, 0.0],
                depth_agreement=[0.5],
            )
        ],
    )  # fmt: skip


def test_what_honest_workers_tell_stays_as_it_is() -> None:
    told = description()
    refuse_unusable(told)
    assert drop_bad_hints(told) == ""
    assert told == description()


def spoilt(path: str, value: float | list[int]) -> worker_pb2.DescribeWorkerResponse:
    told = description()
    *parents, name = path.split(".")
    message: Any = told
    for parent in parents:
        message = getattr(message, parent)
    if isinstance(value, list):
        del getattr(message, name)[:]
        getattr(message, name).extend(value)
    else:
        setattr(message, name, value)
    return told


@pytest.mark.parametrize(
    ("path", "value", "field"),
    [
        ("vocab_size", 0, "vocab_size"),
        ("vocab_size", 2**32 - 1, "vocab_size"),
        ("context_length", 0, "context_length"),
        *((f"capacity.{name}", 0, f"capacity.{name}")
          for name in ("num_blocks", "block_size", "max_batch_tokens", "max_draft_tokens")),
        ("capacity.max_draft_tokens", 2**32 - 1, "capacity.max_draft_tokens"),
        ("eos_token_ids", [1, 16], "eos_token_ids[1]"),
        ("bos_token_id", 16, "bos_token_id"),
        *((f"generation_defaults.{name}", value, f"generation_defaults.{name}")
          for name in ("temperature", "top_p", "min_p", "repetition_penalty") for value in BAD),
    ],
)  # fmt: skip
def test_a_worker_that_cannot_be_used_is_refused_by_the_field(path: str, value: float | list[int], field: str) -> None:
    with pytest.raises(FailedPrecondition) as caught:
        refuse_unusable(spoilt(path, value))
    assert caught.value.field == field
    assert field in caught.value.message


def test_nobody_reads_how_a_draft_worker_would_sample() -> None:
    told = spoilt("generation_defaults.top_p", math.nan)
    told.role = worker_pb2.WORKER_ROLE_DRAFT
    refuse_unusable(told)


@pytest.mark.parametrize("value", [*BAD, 1e308])
@pytest.mark.parametrize("name", ["base_ms", "ms_per_row", "ms_per_context_token", "spread_ms"])
def test_a_time_that_cannot_be_leaves_the_other_lines(name: str, value: float) -> None:
    told = description()
    setattr(told.timings[1], name, value)
    assert drop_bad_hints(told) == f"timings[1].{name} is {value:g}"
    assert list(told.timings) == [description().timings[0]] * 2


def test_a_pass_that_takes_no_time_is_none() -> None:
    told = description()
    told.timings[0].base_ms = told.timings[0].ms_per_row = 5e-324
    assert drop_bad_hints(told).startswith("timings[0].")
    assert len(told.timings) == 2


@pytest.mark.parametrize("value", [*BAD, 1.5])
def test_shares_and_costs_of_a_drafter_that_cannot_be_count_as_not_told(value: float) -> None:
    told = description()
    (drafter,) = told.target_drafters
    drafter.agreement = drafter.rank_agreement[1] = drafter.depth_agreement[0] = value
    drafter.next_draft_ms = value if value != 1.5 else math.nan
    fault = drop_bad_hints(told)
    for name in ("agreement", "rank_agreement", "depth_agreement", "next_draft_ms"):
        assert f"target_drafters[0].{name} " in fault
    assert drafter == worker_pb2.TargetDrafter(name="head")


@pytest.mark.parametrize("value", [*BAD, 1e300])
@pytest.mark.parametrize("path", ["unix_time_s", "numerics.probe_s"])
def test_a_clock_or_a_probe_that_cannot_be_counts_as_not_told(path: str, value: float) -> None:
    told = spoilt(path, value)
    assert drop_bad_hints(told) == f"{path} is {value:g}"
    assert told.unix_time_s in (0.0, 1.7e9)
    assert told.numerics.probe_s == 0.0
