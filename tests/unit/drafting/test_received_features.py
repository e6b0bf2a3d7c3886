"""Rows of states on the wire, and the rows that have come: against a plain list, and what is refused."""

import numpy as np
import pytest
from conftest import scaled

from outrider.drafting.received_features import ReceivedFeatures, packed_rows
from outrider.errors import Internal, InvalidArgument

torch = pytest.importorskip("torch")

WIDTH = 3


def some_rows(rng, count):
    return rng.standard_normal((count, WIDTH)).astype(np.float32) * 10 ** rng.uniform(-30, 30)


def test_rows_are_rounded_as_torch_rounds_them():
    rng = np.random.default_rng(0)
    halfway = (np.arange(64, dtype=np.uint32) << 15 | 0x3F800000).view(np.float32).reshape(-1, 2)
    for rows in (*(some_rows(rng, 50) for _ in range(20)), halfway, np.zeros((2, WIDTH), np.float32)):
        expected = torch.from_numpy(rows).bfloat16()
        assert packed_rows(rows) == packed_rows(torch.from_numpy(rows)) == packed_rows(expected)
        buffer = ReceivedFeatures(rows.shape[1], 1000)
        buffer.append(0, packed_rows(rows))
        assert torch.equal(buffer.rows(0, len(rows)), expected)
    odd = np.array([[np.nan, np.inf, -np.inf]], np.float32)
    assert torch.from_numpy(np.frombuffer(packed_rows(odd), np.int16).copy()).view(torch.bfloat16).isnan().tolist() == [
        True, False, False,
    ]  # fmt: skip


def test_it_is_a_list_of_rows():
    num_reads = num_refused = 0
    for seed in range(scaled(200, at_least=40)):
        rng = np.random.default_rng(seed)
        truth = torch.from_numpy(some_rows(rng, 60)).bfloat16()
        buffer, length, forgotten = ReceivedFeatures(WIDTH, 50), 0, 0
        for _ in range(40):
            what = rng.integers(6)
            start = int(rng.integers(0, length + 3))
            end = int(rng.integers(start, start + 12))
            if what < 3:
                if start < end and (start > length or end > 50):
                    num_refused += 1
                    with pytest.raises(InvalidArgument):
                        buffer.append(start, packed_rows(truth[start:end]))
                else:
                    buffer.append(start, packed_rows(truth[start:end]))
                    length = max(length, end) if start < end else length
            elif what == 3:
                buffer.forget_before(start)
                forgotten = max(forgotten, min(start, length))
            elif what == 4 and rng.integers(3) == 0:
                buffer.truncate(start)
                kept = start if start >= forgotten else 0
                length, forgotten = min(length, kept), min(forgotten, kept)
            if forgotten <= start <= end <= length:
                num_reads += 1
                assert torch.equal(buffer.rows(start, end), truth[start:end])
            else:
                with pytest.raises(Internal):
                    buffer.rows(start, end)
            assert buffer.num_rows == length
            assert buffer.num_bytes <= 2 * WIDTH * length
        buffer.forget_before(length)
        assert buffer.num_bytes == 0
    assert num_reads > 100 < num_refused


@pytest.mark.parametrize(
    ("start", "data", "told"),
    [
        (5, bytes(2 * WIDTH), "begin at token 5, those before it end at 4"),
        (4, bytes(2 * WIDTH + 1), "hold 7 bytes, a row of 3 numbers has 6"),
        (4, bytes(3), "hold 3 bytes"),
        (4, bytes(2 * WIDTH * 3), "end at token 7, the stream has 6 at most"),
        (3, bytes(2 * WIDTH) + packed_rows(np.array([[1, np.nan, 2]], np.float32)), "of tokens 4 to 4 hold NaN"),
        (4, packed_rows(np.array([[1, np.inf, 2]], np.float32)), "NaN or infinity"),
    ],
)
def test_what_is_refused_changes_nothing(start, data, told):
    buffer = ReceivedFeatures(WIDTH, 6)
    rows = np.ones((4, WIDTH), np.float32)
    buffer.append(0, packed_rows(rows))
    with pytest.raises(InvalidArgument, match=told) as caught:
        buffer.append(start, data)
    assert (caught.value.field, caught.value.reason) == ("features", "BAD_FEATURES")
    assert buffer.num_rows == 4
    assert torch.equal(buffer.rows(0, 4), torch.from_numpy(rows).bfloat16())


def test_rows_that_come_again_are_not_held_twice():
    """What is held is what is counted, also where one new row comes behind a thousand known ones."""
    buffer = ReceivedFeatures(WIDTH, 2000)
    rows = some_rows(np.random.default_rng(0), 1002)
    buffer.append(0, packed_rows(rows[:1000]))
    for end in (1001, 1002):
        buffer.append(0, packed_rows(rows[:end]))
    assert buffer.num_bytes == 1002 * WIDTH * 2
    for _, part in buffer._parts:
        held = part
        while isinstance(held.base, np.ndarray):
            held = held.base
        assert held.nbytes == part.nbytes
    assert torch.equal(buffer.rows(0, 1002), torch.from_numpy(rows).bfloat16())
