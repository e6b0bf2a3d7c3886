"""Block accounting: nothing leaks, nothing has two owners, runs are long."""

import random

import pytest
from conftest import scaled

from outrider.errors import Internal
from outrider.lm.kv_cache import BlockAllocator, Sequence


@pytest.mark.parametrize("seed", range(scaled(30, at_least=3)))
def test_any_history_of_reservations_keeps_the_books(seed):
    rng = random.Random(seed)
    allocator = BlockAllocator(64)
    held: list[list[int]] = []
    num_fragmented = 0
    for _ in range(400):
        if held and (rng.random() < 0.5 or allocator.num_free == 0):
            allocator.free(held.pop(rng.randrange(len(held))))
        else:
            count = rng.randint(1, min(12, allocator.num_free))
            blocks = allocator.reserve(count)
            assert blocks == sorted(set(blocks))
            assert len(blocks) == count
            num_fragmented += blocks[-1] - blocks[0] != count - 1
            held.append(blocks)
        allocator.check_integrity(held)
    assert num_fragmented > 0
    for blocks in held:
        allocator.free(blocks)
    allocator.check_integrity([])
    assert allocator.reserve(64) == list(range(64))


def test_a_fitting_run_is_preferred_and_the_tightest_of_them():
    allocator = BlockAllocator(20)
    a, b, c = allocator.reserve(5), allocator.reserve(3), allocator.reserve(4)
    allocator.free(a)
    assert allocator.reserve(4) == [0, 1, 2, 3]  # the run of 5, not the 8 at the end
    allocator.free(b)
    allocator.free(c)
    assert allocator.reserve(9) == list(range(4, 13))


def test_a_fragmented_reservation_takes_the_longest_runs_first():
    allocator = BlockAllocator(10)
    runs = [allocator.reserve(n) for n in (1, 1, 3, 1, 4)]
    for index in (0, 2, 4):
        allocator.free(runs[index])
    assert allocator.reserve(7) == [2, 3, 4, 6, 7, 8, 9]


@pytest.mark.parametrize("blocks", [[0, 1], [3, 3], [9, 10], [-1]])
def test_a_wrong_free_is_refused_and_changes_nothing(blocks):
    allocator = BlockAllocator(10)
    held = allocator.reserve(5)
    allocator.free(held[:2])
    with pytest.raises(Internal):
        allocator.free(blocks)
    allocator.check_integrity([held[2:]])


def test_integrity_check_sees_leaks_and_double_owners():
    allocator = BlockAllocator(4)
    held = allocator.reserve(2)
    for wrong in ([], [held, held], [[2, 3]]):
        with pytest.raises(Internal):
            allocator.check_integrity(wrong)


def test_more_than_free_is_refused():
    allocator = BlockAllocator(4)
    allocator.reserve(3)
    assert not allocator.can_reserve(2)
    with pytest.raises(Internal):
        allocator.reserve(2)


def test_truncation_to_any_length_and_no_other():
    sequence = Sequence(8, [0, 1])
    sequence.token_ids += [5, 6, 7]
    sequence.truncate(3)
    sequence.truncate(1)
    assert sequence.token_ids == [5]
    for length in (2, -1):
        with pytest.raises(Internal):
            sequence.truncate(length)
    sequence.pending = object()
    with pytest.raises(Internal):
        sequence.truncate(0)
