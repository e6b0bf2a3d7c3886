"""The picking policy alone: running streams first, prefills never starve, budgets hold."""

import random
from dataclasses import dataclass

import pytest
from conftest import scaled

from outrider.lm.scheduler import PREFILL_PATIENCE, STREAM_MEMORY_STEPS, StepQueue


@dataclass(eq=False)
class Job:
    num_rows: int
    num_logits: int = 1
    num_rows_done: int = 0
    finished: bool = False
    is_background: bool = False


def step(queue):
    picked = queue.pick()
    for job, num_rows in picked:
        job.num_rows_done += num_rows
    return picked


def test_verifications_go_before_prefills_and_prefills_fill_the_rest():
    queue = StepQueue(20)
    prefill, verification = Job(100), Job(5, num_logits=5)
    queue.add(prefill)
    queue.add(verification)
    assert step(queue) == [(verification, 5), (prefill, 15)]
    assert step(queue) == [(prefill, 20)]


def test_a_prefill_is_cut_and_ends_with_what_is_left():
    queue = StepQueue(8)
    job = Job(21)
    queue.add(job)
    assert [n for _ in range(3) for _, n in step(queue)] == [8, 8, 5]
    assert not queue


def test_verifications_are_never_cut():
    queue = StepQueue(8)
    jobs = [Job(5, num_logits=5) for _ in range(3)]
    for job in jobs:
        queue.add(job)
    assert [step(queue) for _ in range(3)] == [[(job, 5)] for job in jobs]


def test_a_verification_larger_than_the_budget_is_cut_all_the_same():
    queue = StepQueue(4)
    queue.add(Job(9, num_logits=9))
    assert [n for _ in range(3) for _, n in step(queue)] == [4, 4, 1]


@pytest.mark.parametrize("budget", [1, 4, 32])
def test_a_prefill_does_not_starve_under_full_load_nor_stop_the_running(budget):
    queue = StepQueue(budget)
    prefill = Job(10 * budget + 17)
    running = [Job(1) for _ in range(3 * budget)]
    for job in [*running, prefill]:
        queue.add(job)
    num_picked = {id(job): 0 for job in running}
    num_steps = 0
    while prefill.num_rows_done < prefill.num_rows and num_steps < 200:
        num_steps += 1
        for job, _ in step(queue):
            if job is not prefill:
                num_picked[id(job)] += 1
                job.num_rows_done = 0
                queue.add(job)
    assert num_steps <= (PREFILL_PATIENCE + 1) * -(-prefill.num_rows // budget)
    assert min(num_picked.values()) >= num_steps // 3 * PREFILL_PATIENCE // (PREFILL_PATIENCE + 1) - 1


def turn(queue, streams, prefill):
    """One step in which all streams are ready again; (rows of streams, rows of prefill)."""
    picked = step(queue)
    for job, _ in picked:
        if job in streams:
            job.num_rows_done = 0
            queue.add(job)
    prefill_rows = sum(n for job, n in picked if job is prefill)
    return sum(n for _, n in picked) - prefill_rows, prefill_rows


@pytest.mark.parametrize(("num_streams", "stream_rows"), [(1, 24), (4, 24), (50, 24)])
def test_each_side_has_its_share_of_every_step(num_streams, stream_rows):
    """32 rows, 8 of them for prefills: streams are slowed by 8 rows a step and no more, a prompt by nothing beyond."""
    queue, prefill = StepQueue(32, prefill_rows=8), Job(4096)
    streams = [Job(1) for _ in range(num_streams)]
    for job in [prefill, *streams]:
        queue.add(job)
    for num_steps in range(512):
        assert turn(queue, streams, prefill) == (min(num_streams, stream_rows), 8), num_steps
    assert prefill.num_rows_done == 4096
    assert turn(queue, streams, prefill)[0] == min(num_streams, 32)


def test_without_streams_a_prefill_has_the_whole_step_and_a_pause_between_rounds_is_not_without():
    queue, prefill, stream = StepQueue(32, prefill_rows=8), Job(4096), Job(5, num_logits=5)
    queue.add(prefill)
    assert turn(queue, [], prefill) == (0, 32)
    queue.add(stream)
    assert turn(queue, [], prefill) == (5, 8)
    taken = [turn(queue, [], prefill)[1] for _ in range(STREAM_MEMORY_STEPS + 2)]
    assert taken == [8] * (STREAM_MEMORY_STEPS - 1) + [32] * 3


def test_a_prompt_that_comes_after_the_last_stream_has_closed_is_not_cut() -> None:
    queue, prefill, stream = StepQueue(32, prefill_rows=8), Job(4096), Job(5, num_logits=5)
    queue.add(prefill)
    queue.add(stream)
    assert turn(queue, [], prefill) == (5, 8)
    queue.streams_open = False
    assert turn(queue, [], prefill)[1] == 32


def test_a_verification_that_the_share_leaves_no_room_for_is_not_cut_and_the_prompt_goes_on():
    queue, prefill = StepQueue(32, prefill_rows=8), Job(200)
    streams = [Job(30, num_logits=30) for _ in range(2)]
    for job in [prefill, *streams]:
        queue.add(job)
    turns = [turn(queue, streams, prefill) for _ in range(20)]
    assert {rows for rows, _ in turns} <= {0, 30}
    assert sum(rows for rows, _ in turns) >= 10 * 30
    assert sum(rows for _, rows in turns) >= 40


def test_a_job_taken_out_is_not_picked():
    queue, jobs = StepQueue(8), [Job(1), Job(100)]
    for job in jobs:
        queue.add(job)
    assert [queue.remove(job) for job in [*jobs, jobs[0]]] == [True, True, False]
    assert not queue


def test_finished_jobs_are_skipped():
    queue = StepQueue(8)
    jobs = [Job(1), Job(2, num_logits=2), Job(50), Job(60)]
    for job in jobs:
        queue.add(job)
    jobs[0].finished = jobs[2].finished = True
    assert step(queue) == [(jobs[1], 2), (jobs[3], 6)]


@pytest.mark.parametrize("seed", range(scaled(40, at_least=4)))
def test_any_mix_is_computed_once_within_budget(seed):
    rng = random.Random(seed)
    budget = rng.randint(1, 40)
    queue = StepQueue(budget, rng.choice([None, 1, 8, budget]))
    jobs = []
    for _ in range(60):
        for _ in range(rng.randint(0, 3)):
            num_rows = rng.randint(1, 60)
            jobs.append(Job(num_rows, num_logits=rng.choice([0, 1, num_rows])))
            queue.add(jobs[-1])
        assert sum(n for _, n in step(queue)) <= queue.max_batch_tokens
    while queue:
        picked = step(queue)
        assert picked
        assert 0 < sum(n for _, n in picked) <= queue.max_batch_tokens
    assert all(job.num_rows_done == job.num_rows for job in jobs)


def test_work_in_the_background_waits_for_all_other():
    queue = StepQueue(8)
    ahead, late = Job(20, is_background=True), Job(2, num_logits=2, is_background=True)
    stream, prompt = Job(3, num_logits=3), Job(30)
    for job in (ahead, late, stream, prompt):
        queue.add(job)
    picked = [step(queue) for _ in range(8)]
    first = next(i for i, jobs in enumerate(picked) if any(job.is_background for job, _ in jobs))
    assert {job for jobs in picked[:first] for job, _ in jobs} == {stream, prompt}
    assert prompt.num_rows_done == 30
    assert picked[first:] == [[(ahead, 8)], [(ahead, 8)], [(ahead, 4), (late, 2)]]
    assert not queue


def test_work_in_the_background_goes_on_where_it_was_passed_by():
    queue = StepQueue(8)
    ahead, stream = Job(20, is_background=True), Job(3, num_logits=3)
    queue.add(ahead)
    assert step(queue) == [(ahead, 8)]
    queue.add(stream)
    assert step(queue) == [(stream, 3)]
    assert step(queue) == [(ahead, 8)]
    assert queue.remove(ahead)
    assert not queue


def test_work_that_somebody_begins_to_wait_for_leaves_the_background():
    queue = StepQueue(8)
    ahead, stream = Job(2, num_logits=2, is_background=True), Job(7, num_logits=7)
    queue.add(ahead)
    queue.add(stream)
    ahead.is_background = False
    assert step(queue) == [(stream, 7)]
    assert step(queue) == [(ahead, 2)]
