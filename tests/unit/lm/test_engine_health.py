"""An engine is broken once passes fail in a row, for a while; or while one hangs; or for good."""

from outrider.lm.engine_health import MAX_FAILED_PASSES, MAX_PASS_S, REST_S, EngineHealth


class Clock:
    now = 50.0

    def __call__(self) -> float:
        return self.now


def test_it_rests_after_passes_that_failed_in_a_row_and_again_after_the_next_one() -> None:
    clock = Clock()
    health = EngineHealth(clock)
    for _ in range(2):
        for _ in range(MAX_FAILED_PASSES - 1):
            health.begins()
            health.failed()
        assert not health.fault()
        health.begins()
        health.passed()
    for _ in range(MAX_FAILED_PASSES):
        health.begins()
        health.failed()
    assert "passes failed" in health.fault()
    clock.now += REST_S + 1
    assert not health.fault()
    health.begins()
    health.failed()
    assert health.fault()
    clock.now += REST_S + 1
    health.begins()
    health.passed()
    health.begins()
    health.failed()
    assert not health.fault()


def test_a_pass_that_does_not_end_is_told_until_it_does_and_the_end_for_good() -> None:
    clock = Clock()
    health = EngineHealth(clock)
    health.begins()
    clock.now += MAX_PASS_S
    assert not health.fault()
    clock.now += 1
    assert "not ended" in health.fault()
    health.passed()
    assert not health.fault()
    health.ended("the engine failed")
    health.passed()
    assert health.fault() == "the engine failed"
