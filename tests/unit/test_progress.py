"""What a client has of texts whose connections break: nothing is told twice, and counts are those of the whole text."""

import dataclasses
import random
from itertools import pairwise

import pytest
from conftest import scaled
from hypothesis import given, settings
from hypothesis import strategies as st

from coordinator.statistics import StreamStatistics
from outrider.errors import (
    DRAINING,
    Aborted,
    DeadlineExceeded,
    FailedPrecondition,
    Internal,
    InvalidArgument,
    ResourceExhausted,
    Unavailable,
)
from outrider.progress import BEFORE_RESUME, ChoiceProgress, Progress
from outrider.results import Chunk, Complete, Logprobs, PromptLogprobs, Started, Timings, Usage
from outrider.resume import Losses, Mend, Resume, mend
from outrider.sampling.params import AcceptanceRule, Origin

STARTED = Started("r", 7, AcceptanceRule.BLOCK, 1, 3, "m")


@st.composite
def rounds(draw):
    """(drafts, origins of the tokens delivered), as a coordinator counts them."""
    num_drafts = draw(st.integers(0, 4))
    num_accepted = draw(st.integers(0, num_drafts))
    if not num_drafts:
        last = [Origin.PLAIN]
    elif num_accepted == num_drafts:
        last = draw(st.sampled_from([[Origin.BONUS], []]))  # cut by a stop: no bonus
    else:
        last = [Origin.CORRECTION]
    return num_drafts, (Origin.ACCEPTED,) * num_accepted + tuple(last)


def counted(all_rounds):
    statistics = StreamStatistics()
    for num_drafts, origins in all_rounds:
        statistics.count(num_drafts, origins)
    return statistics.speculation()


def chunk(index, num_drafts, origins):
    return Chunk(0, tuple(range(index, index + len(origins))), "x", origins, num_draft_tokens=num_drafts)


def complete(all_rounds, index=0):
    return Complete(index, "stop", None, Usage(3, 9, 0), Timings(*[1.0] * 7), counted(all_rounds))


PER_ROUND = (
    "num_spec_steps", "num_draft_tokens", "num_accepted_draft_tokens", "mean_acceptance_length",
    "draft_acceptance_rate", "acceptance_histogram", "gamma_histogram", "num_draft_tokens_per_pos",
    "num_accepted_tokens_per_pos", "num_plain_tokens", "num_correction_tokens", "num_bonus_tokens",
)  # fmt: skip


@settings(max_examples=scaled(400, at_least=60), deadline=None)
@given(st.lists(rounds(), max_size=12), st.lists(st.integers(0, 12), max_size=4))
def test_counts_over_connections_are_those_of_the_whole_text(all_rounds, cuts):
    """However the rounds are spread over coordinators, each of which counts its own only."""
    progress = Progress([ChoiceProgress(0)])
    progress.take(STARTED)
    edges = [0, *sorted(min(cut, len(all_rounds)) for cut in cuts), len(all_rounds)]
    ids = []
    for number, (start, end) in enumerate(pairwise(edges)):
        if number:
            progress.lost()
        for index, (num_drafts, origins) in enumerate(all_rounds[start:end], start):
            ids += progress.take(chunk(10 * index, num_drafts, origins)).token_ids
    told = progress.take(complete(all_rounds[edges[-2] :]))
    whole = counted(all_rounds)
    assert {name: getattr(told.speculation, name) for name in PER_ROUND} == {
        name: getattr(whole, name) for name in PER_ROUND
    }
    assert progress.choices[0].token_ids == ids
    uses = told.speculation.drafter_uses
    assert sum(use.num_rounds for use in uses) == len(all_rounds)
    assert sum(use.num_draft_tokens for use in uses) == whole.num_draft_tokens
    assert progress.is_complete


def test_an_undisturbed_end_is_told_as_it_came():
    progress = Progress([ChoiceProgress(0)])
    assert progress.take(STARTED) is STARTED
    end = complete([(0, (Origin.PLAIN,))])
    assert progress.take(end) == end
    progress.lost()  # the connection may break behind the end: nothing is left to do
    assert progress.is_complete
    assert progress.choices[0].num_resumes == 0


def test_a_resumed_end_says_so_and_has_the_clients_times():
    now = 100.0
    choice = ChoiceProgress(0, [5], clock=lambda: now)
    progress = Progress([choice])
    progress.take(STARTED)
    now = 101.0
    progress.take(chunk(0, 2, (Origin.ACCEPTED, Origin.CORRECTION)))
    progress.lost()
    assert progress.take(STARTED) is None, "told once"
    now = 104.0
    told = progress.take(complete([(0, (Origin.PLAIN,))]))
    assert told.num_resumes == 1
    assert (told.timings.time_to_first_token_ms, told.timings.total_ms) == (1000.0, 4000.0)
    assert told.speculation.drafter_uses[0].reason == BEFORE_RESUME
    assert choice.token_ids == [5, 0, 1]


def test_a_coordinator_that_does_not_tell_its_drafts_is_counted_by_what_it_delivered():
    progress = Progress([ChoiceProgress(0)])
    progress.take(STARTED)
    older = dataclasses.replace(chunk(0, 2, (Origin.ACCEPTED, Origin.ACCEPTED, Origin.BONUS)), num_draft_tokens=0)
    progress.take(older)
    progress.lost()
    spec = progress.take(complete([])).speculation
    assert (spec.num_draft_tokens, spec.num_accepted_draft_tokens, spec.num_bonus_tokens) == (2, 2, 1)


def test_choices_go_on_apart_under_their_own_numbers():
    progress = Progress([ChoiceProgress(index) for index in range(3)])
    progress.take(STARTED)
    assert not progress.has_tokens
    assert progress.take(dataclasses.replace(chunk(7, 0, (Origin.PLAIN,)), index=2)).index == 2
    assert progress.take(complete([], index=1)).index == 1
    assert progress.has_tokens
    progress.lost()
    alone = progress.alone()
    assert [one.choices[0].index for one in alone] == [0, 2]
    assert [one.started for one in alone] == [STARTED, STARTED]
    assert alone[1].take(chunk(8, 0, (Origin.PLAIN,))).index == 2
    assert progress.choices[2].token_ids == [7, 8]
    for one in alone:
        one.take(complete([]))
    assert progress.is_complete
    with pytest.raises(Internal, match="choice 1 of 1"):
        alone[0].take(dataclasses.replace(chunk(8, 0, (Origin.PLAIN,)), index=1))


@settings(max_examples=scaled(400, at_least=60), deadline=None)
@given(st.integers(0, 9), st.lists(st.lists(st.integers(1, 4), min_size=1, max_size=6), min_size=1, max_size=4))
def test_every_prompt_logprob_is_told_once_and_in_order(num_entries, tries):
    """Each try tells all of them from the first on, in pieces of its own, and breaks where its pieces end."""
    progress, told, heard = Progress([ChoiceProgress(0)]), [], []
    most = 0
    for pieces in tries:
        position = 1
        for size in pieces if num_entries else [0]:
            size = min(size, num_entries + 1 - position)
            if num_entries and not size:
                break
            values = tuple(float(i) for i in range(position, position + size))
            top = tuple(((i, -1.0),) for i in range(position, position + size))
            event = progress.take(PromptLogprobs(position, Logprobs(values, top)))
            heard += [event] if event is not None else []
            position += size
        most = max(most, position - 1)
        progress.lost()
    for event in heard:
        assert event.first_position == len(told) + 1
        told += event.logprobs.token_logprobs
        assert [row[0][0] for row in event.logprobs.top] == list(event.logprobs.token_logprobs)
    assert told == list(range(1, most + 1))
    assert heard, "a prompt without entries gets its empty list"
    assert num_entries or len(heard) == 1


@pytest.mark.parametrize(
    ("error", "is_bare", "is_accepted", "is_known", "expected"),
    [
        # a text that had begun goes on, whatever was lost
        (Unavailable("x"), True, True, True, Mend.PATIENCE),
        (Unavailable("x", reason="WORKER_LOST"), False, True, True, Mend.PATIENCE),
        (Unavailable("x", reason=DRAINING), False, True, True, Mend.PATIENCE),
        (Aborted("x"), False, True, True, Mend.PATIENCE),
        (Internal("x"), True, True, True, Mend.PATIENCE),  # a killed process can look like this
        (ResourceExhausted("x", reason="QUEUE_FULL"), False, True, True, Mend.PATIENCE),
        # a new one waits only for coordinators that come and go
        (Unavailable("x", reason=DRAINING), False, False, True, Mend.PATIENCE),
        (Unavailable("x", reason="STARTING"), False, False, False, Mend.PATIENCE),
        (Unavailable("x"), True, False, True, Mend.PATIENCE),
        (Unavailable("x"), True, False, False, Mend.ELSEWHERE),  # perhaps nobody ever was there
        (Unavailable("x", reason="NO_TARGET_WORKER"), False, False, True, Mend.ELSEWHERE),
        (ResourceExhausted("x", reason="QUEUE_FULL"), False, False, True, Mend.NOTHING),  # overload is told at once
        # what every coordinator would say
        (Internal("NaN"), False, True, True, Mend.NOTHING),
        (InvalidArgument("x"), False, True, True, Mend.NOTHING),
        (FailedPrecondition("x", reason="MODEL_CHANGED"), False, True, True, Mend.NOTHING),
        (DeadlineExceeded("x"), True, True, True, Mend.NOTHING),
        (ResourceExhausted("too large"), True, True, True, Mend.NOTHING),
    ],
)
def test_what_mends_what(error, is_bare, is_accepted, is_known, expected):
    assert mend(error, is_bare=is_bare, is_accepted=is_accepted, is_known=is_known) is expected


def test_losses_are_bounded_by_number_unless_they_were_announced():
    losses = Losses(Resume(max_losses=2), clock=lambda: 0.0)
    loss, announced = Unavailable("gone"), Unavailable("going", reason=DRAINING)
    for _ in range(20):
        losses.wait_s(announced, had_begun=True)
        losses.wait_s(loss, had_begun=False)  # nobody was there to begin with it
    losses.wait_s(loss, had_begun=True)
    losses.progressed()
    losses.wait_s(loss, had_begun=True)
    losses.progressed()
    with pytest.raises(Unavailable, match="gone"):
        losses.wait_s(loss, had_begun=True)


def test_losses_are_bounded_by_time_since_the_last_token():
    times = iter([100.0, 100.0, 105.0, 110.0, 200.0, 200.0, 210.0, 210.1])
    losses = Losses(Resume(patience_s=10.0, max_losses=1000), clock=lambda: next(times))
    for _ in range(3):
        losses.wait_s(Unavailable("gone"), had_begun=True)
    losses.progressed()
    for _ in range(2):
        losses.wait_s(Unavailable("gone"), had_begun=True)
    with pytest.raises(Unavailable, match="gone"):
        losses.wait_s(Unavailable("gone"), had_begun=True)


@settings(max_examples=scaled(400, at_least=60), deadline=None)
@given(st.integers(1, 5000), st.integers(0, 2**32))
def test_waits_double_up_to_a_limit_and_are_never_the_same_for_all(num_tries, seed):
    policy = Resume(min_wait_s=0.1, max_wait_s=3.0)
    whole = min(3.0, 0.1 * 2.0 ** min(num_tries - 1, 60))
    waits = [policy.wait_s(num_tries, random.Random(seed + i)) for i in range(20)]
    assert all(whole / 2 <= wait <= whole for wait in waits)
    assert len(set(waits)) == 20


@pytest.mark.parametrize(
    ("values", "field"),
    [
        ({"patience_s": -1.0}, "patience_s"),
        ({"patience_s": float("nan")}, "patience_s"),
        ({"max_losses": -1}, "max_losses"),
        ({"min_wait_s": -0.1}, "min_wait_s"),
        ({"min_wait_s": 3.0}, "max_wait_s"),
        ({"max_wait_s": float("inf")}, "max_wait_s"),
    ],
)
def test_a_policy_that_makes_no_sense_names_its_field(values, field):
    with pytest.raises(InvalidArgument) as refused:
        Resume(**values)
    assert refused.value.field == field
