"""Running streams are slowed by a prompt within the bar, on machines of modelled costs; no clock is read here."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

import pytest

from outrider.lm.prefill_share import MAX_DEBT_STEPS, MAX_SLOWDOWN, MIN_ROWS, NUM_PRICES, PrefillShare
from outrider.lm.scheduler import StepQueue

MAX_BATCH_TOKENS = 512
PROMPT = 4096


@dataclass(eq=False)
class Job:
    num_rows: int
    num_logits: int = 1
    num_rows_done: int = 0
    finished: bool = False
    is_background: bool = False


def roofline(read_ms: float, row_ms: float) -> Callable[[int], float]:
    """A pass reads all weights and computes its rows, whichever takes longer."""
    return lambda rows: max(read_ms, row_ms * rows)


COSTS: dict[str, Callable[[int], float]] = {
    "line": lambda rows: 20 + 0.25 * rows,
    "steep line": lambda rows: 20 + 1.0 * rows,
    "reads up to 16 rows": roofline(100, 6.25),
    "reads up to 256 rows, as a GPU": roofline(10, 10 / 256),
    "grows faster and faster": lambda rows: 15 + 0.4 * rows + 0.01 * rows**2,
}


def serve(
    cost: Callable[[int], float], num_streams: int, *, noise: float = 0.0, chunk_ms: float = 0.0
) -> tuple[list[float], float, int]:
    """(ms of each step while a prompt of 4k is computed beside the streams, ms of one without it, last share).

    chunk_ms: what the prompt's last rows take beyond their number, the first ones nothing: attention to what precedes.
    """
    rng = random.Random(0)
    queue: StepQueue[Job] = StepQueue(MAX_BATCH_TOKENS, prefill_rows=8)
    share = PrefillShare(8, MAX_BATCH_TOKENS // 2)
    streams, prompt = [Job(1) for _ in range(num_streams)], Job(PROMPT)
    for stream in streams:
        queue.add(stream)
    times = []
    for number in range(40 + 4 * PROMPT):
        if number == 40:
            queue.add(prompt)
        queue.prefill_rows, queue.prefill_paused = share.rows, share.is_in_debt
        picked = queue.pick()
        for job, rows in picked:
            job.num_rows_done += rows
            if job in streams:
                job.num_rows_done = 0
                queue.add(job)
        num_rows = sum(rows for _, rows in picked)
        ms = cost(num_rows)
        if queue.num_prefill_rows:
            ms += chunk_ms * prompt.num_rows_done / PROMPT
        if number >= 40:
            times.append(ms)
        seen_ms = ms * (1 + abs(rng.gauss(0, noise)) + (rng.random() < noise / 2) * 5)
        share.observe(num_rows - queue.num_prefill_rows, queue.num_prefill_rows, seen_ms)
        if prompt.num_rows_done == PROMPT:
            break
    return times, cost(num_streams), share.rows


@pytest.mark.parametrize("noise", [0.0, 0.1])
@pytest.mark.parametrize("num_streams", [1, 3, 8])
@pytest.mark.parametrize("machine", COSTS)
def test_streams_are_slowed_by_no_more_than_the_bar(machine: str, num_streams: int, noise: float) -> None:
    times, alone_ms, rows = serve(COSTS[machine], num_streams, noise=noise)
    settled = sorted(times[2 * NUM_PRICES :])
    assert len(settled) > NUM_PRICES
    slowdown = settled[len(settled) // 2] / alone_ms
    assert slowdown <= MAX_SLOWDOWN, (slowdown, rows)
    assert sum(times) / len(times) / alone_ms <= MAX_SLOWDOWN


@pytest.mark.parametrize("chunk_ms", [5.0, 20.0, 60.0])
def test_a_late_part_of_a_long_prompt_waits_until_the_streams_have_earned_it(chunk_ms: float) -> None:
    """60 ms are three steps' time: without the debt even the fewest rows would triple every step."""
    times, alone_ms, rows = serve(COSTS["line"], 3, chunk_ms=chunk_ms)
    assert sum(times) / len(times) / alone_ms <= MAX_SLOWDOWN, rows
    is_alone = [ms == alone_ms for ms in times]
    longest = max((len(run) for run in "".join("01"[alone] for alone in is_alone).split("0")), default=0)
    assert longest <= MAX_DEBT_STEPS + 1
    if chunk_ms >= 20:
        assert longest >= 2


def test_streams_that_are_not_ready_leave_the_step_to_the_prompt() -> None:
    """Between two rounds streams wait for drafts: an engine that then did nothing would spin."""
    queue: StepQueue[Job] = StepQueue(64, prefill_rows=8)
    stream, prompt = Job(1), Job(100)
    queue.add(stream)
    queue.add(prompt)
    queue.prefill_paused = True
    assert queue.pick() == [(stream, 1)]
    assert queue.num_prefill_rows == 0
    assert queue.pick() == [(prompt, 8)]


@pytest.mark.parametrize(("machine", "at_least"), [("line", 12), ("reads up to 256 rows, as a GPU", 150)])
def test_a_prompt_has_what_the_streams_can_spare(machine: str, at_least: int) -> None:
    _, _, rows = serve(COSTS[machine], 3)
    assert rows >= at_least


def test_eight_rows_would_break_the_bar_on_a_steep_machine_and_the_share_does_not() -> None:
    cost = COSTS["steep line"]
    assert cost(3 + 8) > MAX_SLOWDOWN * cost(3)
    times, alone_ms, rows = serve(cost, 3)
    assert rows < 8
    assert max(times[3 * NUM_PRICES :]) <= MAX_SLOWDOWN * alone_ms


def test_nothing_changes_before_steps_without_prompts_were_seen() -> None:
    share = PrefillShare(8, 256)
    for _ in range(50):
        share.observe(3, 8, 1000.0)
        share.observe(0, 512, 1000.0)
    assert share.rows == 8


def test_a_prompt_never_stops_and_never_takes_more_than_there_is() -> None:
    assert PrefillShare(8, 2).rows == 2
    share = PrefillShare(8, 256)
    for _ in range(50):
        share.observe(1, 0, 1.0)
    for _ in range(100):
        share.observe(1, share.rows, 1000.0)
    assert share.rows == MIN_ROWS
    for _ in range(400):
        share.observe(1, share.rows, 1.0)
    assert share.rows == 256


def test_one_stream_does_not_keep_seven_waiting() -> None:
    """Eight short prompts at once: the eighth starts within a few steps, and a single long one is held to the bar."""
    cost, share = COSTS["line"], PrefillShare(8, MAX_BATCH_TOKENS // 2)
    queue: StepQueue[Job] = StepQueue(MAX_BATCH_TOKENS, prefill_rows=8)
    streams, prompts = [Job(1)], [Job(24) for _ in range(7)]
    for number in range(200):
        if number == 40:
            for prompt in prompts:
                queue.add(prompt)
        for stream in streams:
            stream.num_rows_done = 0
            queue.add(stream)
        share.weigh(queue.num_prefills, len(streams))
        queue.prefill_rows, queue.prefill_paused = share.step_rows, share.is_in_debt
        picked = queue.pick()
        for job, rows in picked:
            job.num_rows_done += rows
        num_rows = sum(rows for _, rows in picked)
        share.observe(num_rows - queue.num_prefill_rows, queue.num_prefill_rows, cost(num_rows))
        streams += [Job(1) for job, _ in picked if job in prompts and job.num_rows_done == 24]
        if len(streams) == 8:
            break
    assert number - 40 < 20
    share.weigh(1, 8)
    assert share.step_rows == share.rows
