"""The timing model finds the line that made the times, through outliers, drifts and passes of one size."""

from __future__ import annotations

import numpy as np
import pytest

from outrider.lm.engine import Engine
from outrider.lm.interface import Forward, PackedBatch, Program, Segment
from outrider.lm.timing import HALF_LIFE, PassTiming, TimingModel, expected_ms
from outrider.lm.toy import load_toy

BASE, PER_ROW, PER_CONTEXT = 20.0, 0.8, 0.004


def batch(num_rows: int, num_cached_tokens: int, num_sequences: int = 1, num_logits: int | None = None) -> PackedBatch:
    """`num_rows` rows in each of so many sequences."""
    ids = [1] * num_rows
    return PackedBatch(
        (Segment(num_cached_tokens, ids, range(64), num_rows if num_logits is None else num_logits),) * num_sequences
    )


def feed(model: TimingModel, count: int, *, seed: int, slower: float = 1.0, noise: float = 0.2, outliers: float = 0.0):
    """Passes of 1 to 9 rows after 10 to 2,000 tokens; a share of them takes 5 to 100 times as long."""
    rng = np.random.default_rng(seed)
    for _ in range(count):
        rows, cached = int(rng.integers(1, 10)), int(rng.integers(10, 2000))
        ms = slower * (BASE + PER_ROW * rows + PER_CONTEXT * (cached + rows)) + abs(rng.normal(0, noise))
        if rng.random() < outliers:
            ms *= rng.uniform(5, 100)
        model.observe(batch(rows, cached), ms)


def only(model: TimingModel) -> PassTiming:
    (timing,) = model.timings()
    return timing


def test_nothing_seen_is_nothing_known() -> None:
    assert TimingModel().timings() == ()
    assert expected_ms((), num_rows=1, num_context_tokens=1) is None


def test_finds_the_line() -> None:
    model = TimingModel()
    feed(model, 200, seed=1)
    timing = only(model)
    assert timing.base_ms == pytest.approx(BASE, abs=0.5)
    assert timing.ms_per_row == pytest.approx(PER_ROW, rel=0.1)
    assert timing.ms_per_context_token == pytest.approx(PER_CONTEXT, rel=0.1)
    assert (timing.num_passes, timing.min_rows, timing.max_rows) == (200, 1, 9)
    assert (timing.prefill, timing.min_sequences, timing.max_sequences) == (False, 1, 1)


@pytest.mark.parametrize("seed", range(5))
def test_outliers_hardly_move_it(seed: int) -> None:
    model = TimingModel()
    feed(model, 250, seed=seed, outliers=0.15)
    timing = only(model)
    for rows, context in ((1, 100), (5, 1000), (9, 2000)):
        right = BASE + PER_ROW * rows + PER_CONTEXT * context
        assert timing.ms(rows, context) == pytest.approx(right, rel=0.05)
    assert timing.spread_ms < 1.0


def test_plain_least_squares_would_fail_there() -> None:
    """The outliers above are worth a robust fit: the mean is far off."""
    rng = np.random.default_rng(0)
    times = np.full(250, BASE)
    times[rng.random(250) < 0.15] *= 50
    assert times.mean() > 3 * BASE


def test_follows_a_machine_that_became_slower_and_faster_again() -> None:
    model = TimingModel()
    feed(model, 300, seed=1)
    feed(model, 2 * HALF_LIFE, seed=2, slower=2.0)
    assert only(model).ms(5, 1000) == pytest.approx(2 * (BASE + 5 * PER_ROW + 1000 * PER_CONTEXT), rel=0.1)
    feed(model, 2 * HALF_LIFE, seed=3)
    assert only(model).ms(5, 1000) == pytest.approx(BASE + 5 * PER_ROW + 1000 * PER_CONTEXT, rel=0.1)


def test_a_slow_drift_is_followed_closely() -> None:
    model = TimingModel()
    for step in range(600):
        feed(model, 1, seed=step, slower=1 + step / 600, outliers=0.05)
    assert only(model).ms(5, 1000) == pytest.approx(2 * (BASE + 5 * PER_ROW + 1000 * PER_CONTEXT), rel=0.15)


def test_passes_of_one_size_give_a_level_and_no_slope() -> None:
    model = TimingModel()
    for _ in range(20):
        model.observe(batch(1, 99), 30.0)
    timing = only(model)
    assert (timing.ms_per_row, timing.ms_per_context_token) == (0, 0)
    assert timing.ms(1, 100) == pytest.approx(30.0)


@pytest.mark.parametrize("seed", range(8))
def test_noise_at_one_context_is_not_drawn_out_to_another(seed: int) -> None:
    rng = np.random.default_rng(seed)
    model = TimingModel()
    for step in range(40):
        model.observe(batch(1, 30 + step % 20), 40.0 + rng.normal(0, 5))
    assert only(model).ms(1, 4000) == pytest.approx(40.0, rel=0.2)


def test_time_that_falls_with_size_is_level() -> None:
    model = TimingModel()
    for rows in range(1, 10):
        model.observe(batch(rows, 50 - rows), 30.0 - rows)
    timing = only(model)
    assert timing.ms_per_row == timing.ms_per_context_token == 0
    assert 21 <= timing.base_ms <= 29


def test_load_and_prefill_have_lines_of_their_own() -> None:
    model = TimingModel()
    for _ in range(10):
        model.observe(batch(1, 100, num_sequences=1), 10.0)
        model.observe(batch(1, 100, num_sequences=3), 30.0)
        model.observe(batch(1, 100, num_sequences=4), 40.0)
        model.observe(batch(300, 0, num_logits=1), 500.0)
    timings = model.timings()
    assert [(t.prefill, t.min_sequences, t.max_sequences) for t in timings] == [
        (False, 1, 1), (False, 3, 4), (True, 1, 1)
    ]  # fmt: skip
    assert expected_ms(timings, num_rows=1, num_context_tokens=101) == pytest.approx(10)
    assert expected_ms(timings, num_rows=3, num_context_tokens=303, num_sequences=3) == pytest.approx(30, rel=0.1)
    # a load that was not seen is judged by the nearest that was
    assert expected_ms(timings, num_rows=4, num_context_tokens=404, num_sequences=16) == pytest.approx(40, rel=0.1)


async def test_the_engine_feeds_it() -> None:
    engine = Engine(
        load_toy("toy:vocab=8,pass_ms=2").model,
        num_blocks=64,
        block_size=4,
        max_batch_tokens=64,
        max_waiting_sessions=4,
    )
    engine.start()
    try:
        sequence = await engine.open_sequence(60)

        def decode() -> Program[None]:
            yield Forward(sequence, [1] * 40)
            for rows in (1, 2, 3, 1):
                yield Forward(sequence, [1] * rows, num_logits=rows)

        await engine.run(decode())
    finally:
        engine.stop()  # and so the last step is over
    decodes, prefills = engine.timing.timings()
    assert (decodes.num_passes, decodes.min_rows, decodes.max_rows) == (4, 1, 3)
    assert (prefills.num_passes, prefills.prefill, prefills.max_rows) == (1, True, 40)
    assert decodes.ms(1, 41) >= 1.9  # a pass is slept, so no step can be shorter
