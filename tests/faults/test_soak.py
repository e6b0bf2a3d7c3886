"""The soak itself, in its short form: real processes, one fault of every kind, no text wrong, nothing left behind."""

import pytest
from faults.soak.plan import LONG_DECK, SHORT_DECK, fault, request
from faults.soak.soak import Soak

SEED = 1


def test_one_seed_is_one_plan():
    for deck in (SHORT_DECK, LONG_DECK):
        faults = [fault(SEED, index, deck) for index in range(2 * len(deck))]
        assert faults == [fault(SEED, index, deck) for index in range(2 * len(deck))]
        kinds = sorted(f.kind for f in faults[: len(deck)])
        assert kinds == sorted(f.kind for f in faults[len(deck) :]) == sorted(kind for kind, _ in deck)
        assert faults != [fault(SEED + 1, index, deck) for index in range(2 * len(deck))]
    assert request(SEED, "0-0") == request(SEED, "0-0") != request(SEED, "0-1")


@pytest.mark.slow
@pytest.mark.timeout(1200)
async def test_no_text_suffers_and_nothing_is_left():
    soak = Soak(SEED, deck=SHORT_DECK, goes_on=lambda num_faults: num_faults < len(SHORT_DECK))
    report = await soak.run()
    for found in (report.differences, report.failures, report.leaks, report.crashes, report.complaints):
        assert found == []
    assert report.num_equal == report.num_texts
    assert report.verdict == "SOUND", report.summary()
