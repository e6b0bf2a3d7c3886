"""States on their way from the target to a draft worker, by hand: whatever is lost, none is missed in the end."""

import numpy as np
from conftest import scaled

from coordinator import features
from coordinator.features import MAX_ASKED, FeatureRelay
from outrider.drafting.received_features import ReceivedFeatures
from outrider.errors import InvalidArgument
from outrider.sampling.params import SamplingParams, StoppingParams
from outrider.serving.messages import FeatureRows, TargetOpening

OPENING = TargetOpening(epoch=1, prompt_ids=(1, 2, 3), sampling=SamplingParams(), stopping=StoppingParams(9))
ROW = 2


def rows(start, end):
    """Row i is the number i."""
    return FeatureRows(start, b"".join(np.float32(i).tobytes()[2:] for i in range(start, end)))


class Draft:
    """A draft session: takes what it is sent, in order."""

    def __init__(self):
        self.rows = ReceivedFeatures(1, 10_000)

    def take(self, part):
        try:
            self.rows.append(part.start, part.rows)
        except InvalidArgument:
            return


def test_rows_reach_the_draft_session_whatever_gets_lost():
    """Verdicts whose rows are lost or spoilt, sessions of both kinds opened anew, evictions, long plain runs."""
    num_asked = num_drafted = 0
    for seed in range(scaled(300, at_least=40)):
        rng = np.random.default_rng(seed)
        relay, draft, length, sent_end = FeatureRelay(), Draft(), 6, 0
        opening = relay.target_opens(OPENING, "-1")
        assert (opening.features, opening.features_start) == ("-1", 0)
        relay.draft_opens()
        for _ in range(80):
            asked = relay.wanted_from(length)
            if asked is not None:
                num_asked += 1
                sent_end = asked
            length += int(rng.integers(1, 5))
            part, sent_end = rows(sent_end, length - 1), length - 1
            fate = rng.integers(12)
            if fate == 0:
                part = FeatureRows(part.start, part.rows[:-1])
            if fate != 1:
                middle = int(rng.integers(part.start, length - 1))
                parts = [rows(part.start, middle), rows(middle, length - 1)] if fate > 6 else [part]
                relay.received(parts, length - 1)
            if fate == 2:
                sent_end = relay.target_opens(OPENING, "-1").features_start
            if fate == 3:
                draft = Draft()
                relay.draft_opens()
            if fate == 4:
                draft.rows.truncate(0)
            if fate > 4 and not relay.lacks(length):
                for each in relay.take():
                    draft.take(each)
                relay.draft_has(draft.rows.num_rows)
                if draft.rows.num_rows == length - 1:
                    num_drafted += 1
                    found = draft.rows.rows(0, length - 1).float()[:, 0].numpy()
                    assert np.array_equal(found, [float(np.float32(i)) for i in range(length - 1)])
        for number in range(10):
            if relay.lacks(length) and relay._num_asked == MAX_ASKED:  # in vain: until the draft session is another
                draft = Draft()
                relay.draft_opens()
            if not relay.lacks(length) and draft.rows.num_rows == length - 1:
                break
            assert number < 9, "it never comes"
            asked = relay.wanted_from(length)
            length += 1
            start = sent_end if asked is None else asked
            relay.received([rows(start, length - 1)], length - 1)
            sent_end = length - 1
            if not relay.lacks(length):
                for each in relay.take():
                    draft.take(each)
                relay.draft_has(draft.rows.num_rows)
    assert num_asked > 100 < num_drafted


def test_a_target_that_sends_nothing_of_use_is_asked_a_few_times_only():
    relay = FeatureRelay()
    relay.target_opens(OPENING, "-1")
    relay.draft_opens()
    for length in range(4, 20):
        relay.wanted_from(length)
        relay.received([FeatureRows(0, b"x")], length - 1)
        if not relay.lacks(length):
            relay.take()
        relay.draft_has(0)
    assert relay.wanted_from(20) is None
    relay.draft_opens()
    assert [relay.wanted_from(20 + i) for i in range(MAX_ASKED + 1)] == [0] * MAX_ASKED + [None]
    relay.received([rows(0, 24)], 24)
    assert not relay.lacks(25)
    relay.take()
    relay.draft_has(24)
    relay.draft_has(3)  # it has lost them since
    assert relay.wanted_from(26) == 3


def test_nothing_is_asked_for_without_a_draft_session_or_states():
    relay = FeatureRelay()
    relay.target_opens(OPENING, "")
    relay.draft_opens()
    assert relay.wanted_from(9) is None
    relay.target_opens(OPENING, "-1")
    assert relay.wanted_from(9) == 0
    relay.draft_closes()
    assert relay.wanted_from(9) is None
    assert not relay.lacks(9)


def test_what_nobody_takes_is_bounded_and_comes_again(monkeypatch):
    monkeypatch.setattr(features, "MAX_HELD_BYTES", 20 * ROW)
    relay, num_held = FeatureRelay(), []
    relay.target_opens(OPENING, "-1")
    for end in range(5, 60, 5):
        relay.received([rows(end - 5, end)], end)
        num_held.append(relay.num_held_bytes)
    assert max(num_held) == 20 * ROW
    assert 0 in num_held
    relay.draft_opens()
    assert relay.lacks(56)
    assert relay.wanted_from(56) == 0
    assert relay.num_bytes == 55 * ROW


def test_other_states_begin_anew():
    relay = FeatureRelay()
    relay.target_opens(OPENING, "2")
    relay.received([rows(0, 5)], 5)
    assert relay.target_opens(OPENING, "2").features_start == 5
    assert relay.target_opens(OPENING, "-1").features_start == 0
    assert relay.num_held_bytes == 0


def test_many_rounds_without_drafts_go_in_few_messages(monkeypatch):
    monkeypatch.setattr(features, "MAX_MESSAGE_BYTES", 40 * ROW)
    relay = FeatureRelay()
    relay.target_opens(OPENING, "-1")
    relay.draft_opens()
    for end in (3, 5):
        relay.received([rows(relay._end, end)], end)
    assert len(relay.take()) == 2, "how large a row is nobody knows yet"
    relay.draft_has(5)
    for end in range(6, 105):
        relay.received([rows(end - 1, end)], end)
    sent = relay.take()
    assert [part.start for part in sent] == [5, 45, 85]
    assert b"".join(part.rows for part in sent) == rows(5, 104).rows
    for end in (110, 115, 120):  # the second one is cut
        relay.received([FeatureRows(relay._end, rows(relay._end, end).rows[: -1 if end == 115 else None])], end)
    assert [(part.start, len(part.rows)) for part in relay.take()] == [
        (104, 6 * ROW),
        (110, 5 * ROW - 1),
        (115, 5 * ROW),
    ]
