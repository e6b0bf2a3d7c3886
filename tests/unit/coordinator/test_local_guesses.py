"""Local drafters of one stream, their chances, and the choice between them and a draft worker's drafter."""

from __future__ import annotations

import asyncio
import dataclasses
import random

import pytest
from loop_law import warm_policy

from coordinator.gamma.adaptive import AdaptiveGamma
from coordinator.gamma.chances import Chances
from coordinator.gamma.fixed import FixedGamma
from coordinator.gamma.policy import Candidate, Choice, RoundReport
from coordinator.gamma.shared import PairEstimates
from coordinator.local_drafts import LocalDrafts, LocalMemory
from coordinator.request import ResolvedRequest
from coordinator.statistics import Drafting
from coordinator.stream import Stream
from coordinator.text.tokenizer import ToyCodec
from outrider.drafting.guess import OWN, Evidence, Guess
from outrider.sampling.noise import hash_ids
from outrider.sampling.params import AcceptanceRule, SamplingParams, StoppingParams
from outrider.serving.messages import Verdict
from outrider.settings import CoordinatorSettings

PROMPT = (5, 6, 7, 1, 2, 3, 4, 8, 1, 2)
SETTINGS = CoordinatorSettings()
GREEDY = SamplingParams(temperature=0.0)
MODEL = Candidate("model")
SURE, UNSURE = Evidence(OWN, 16, 3), Evidence(OWN, 1, 0)


def stream(prompt: tuple[int, ...] = PROMPT, **changes: object) -> Stream:
    request = ResolvedRequest(
        request_id="r", model="toy", prompt_ids=prompt, prompt_hash=hash_ids(prompt), sampling=GREEDY,
        stopping=StoppingParams(100), max_speculative_tokens=8,
    )  # fmt: skip
    return Stream(dataclasses.replace(request, **changes), 0, ToyCodec(94))


def local(memory: LocalMemory | None = None, of: Stream | None = None) -> LocalDrafts:
    drafts = LocalDrafts(of or stream(), memory or LocalMemory(SETTINGS))
    asyncio.run(drafts.prepare())
    return drafts


def ids(guesses: tuple[Guess, ...]) -> dict[str, tuple[int, ...]]:
    return {guess.drafter: guess.token_ids for guess in guesses}


def test_each_drafter_guesses_from_the_prompt() -> None:
    assert ids(local().guesses(3)) == {"lookup": (3, 4, 8), "suffix": (3, 4, 8)}
    assert local().guesses(0) == ()


@pytest.mark.parametrize(("drafter", "names"), [("lookup", {"lookup"}), ("suffix", {"suffix"}), ("model", set())])
def test_a_named_drafter_is_the_only_one(drafter: str, names: set[str]) -> None:
    assert set(ids(local(of=stream(drafter=drafter)).guesses(3))) == names


def test_nothing_is_kept_for_a_stream_without_drafts() -> None:
    drafts = local(of=stream(num_speculative_tokens=0))
    assert drafts.names == ()
    assert drafts.guesses(3) == ()
    assert drafts._index.ids == []


def test_the_log_is_followed() -> None:
    memory, of = LocalMemory(SETTINGS), stream()
    drafts = local(memory, of)
    drafts.guesses(3)
    of.log.append((3, 4, 9, 1, 2))
    drafts.committed()
    assert ids(drafts.guesses(2))["lookup"] == (3, 4)
    assert drafts.continuation((3, 4, 9), 2).token_ids == (1, 2)


def test_guesses_end_before_masked_ids_and_with_a_stop_token() -> None:
    def guessed(sampling: SamplingParams = GREEDY, **stopping: object) -> tuple[int, ...]:
        of = stream(sampling=sampling, stopping=StoppingParams(100, **stopping))  # type: ignore[arg-type]
        return ids(local(of=of).guesses(5)).get("suffix", ())

    assert guessed() == (3, 4, 8, 1, 2)
    assert guessed(stop_token_ids=frozenset({4})) == (3, 4)
    assert guessed(stop_token_ids=frozenset({4}), min_tokens=5) == (3,)
    assert guessed(stop_token_ids=frozenset({4}), min_tokens=1) == (3, 4)
    assert guessed(dataclasses.replace(GREEDY, allowed_token_ids=(3, 4))) == (3, 4)
    assert guessed(dataclasses.replace(GREEDY, bad_words=((4, 8),))) == (3, 4)
    assert guessed(dataclasses.replace(GREEDY, logit_bias={8: -100.0, 2: 5.0})) == (3, 4)
    assert guessed(dataclasses.replace(GREEDY, logit_bias={8: -99.0})) == (3, 4, 8, 1, 2)
    of = stream(stopping=StoppingParams(100, stop_token_ids=frozenset({3})))
    assert not local(of=of).continuation((9, 3), 4), "nothing follows a drafted stop token"


def test_an_ended_output_is_left_to_the_tenant_alone() -> None:
    memory, text = LocalMemory(SETTINGS), (40, 41, 42, 43, 44, 45)
    first = stream()
    drafts = local(memory, first)
    first.log.append(text)
    drafts.close()
    drafts.close()
    assert memory.past.num_texts == 1
    later = {"prompt": (9, *text[:3])}
    assert ids(local(memory, stream(**later)).guesses(2)) == {"suffix": (43, 44)}  # type: ignore[arg-type]
    assert local(memory, stream(**later, tenant="other")).guesses(2) == ()  # type: ignore[arg-type]
    assert local(memory, stream(**later, model="other")).guesses(2) == ()  # type: ignore[arg-type]
    shared = LocalMemory(SETTINGS.model_copy(update={"share_draft_cache": True}))
    shared.past.add(shared.scope(first), text)
    assert ids(local(shared, stream(**later, tenant="other")).guesses(2)) == {"suffix": (43, 44)}  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("sampling", "has_fresh_seed", "reads"),
    [
        (GREEDY, False, True),
        (SamplingParams(acceptance=AcceptanceRule.COUPLED), False, True),
        (SamplingParams(acceptance=AcceptanceRule.TOKEN), False, False),
        (SamplingParams(acceptance=AcceptanceRule.BLOCK), False, False),
        (SamplingParams(acceptance=AcceptanceRule.TOKEN), True, True),
        (SamplingParams(acceptance=AcceptanceRule.BLOCK), True, True),
    ],
)
def test_who_may_read_what_others_left(sampling: SamplingParams, has_fresh_seed: bool, reads: bool) -> None:
    memory = LocalMemory(SETTINGS)
    of = stream((9, 40, 41, 42), sampling=sampling, has_fresh_seed=has_fresh_seed)
    memory.past.add(memory.scope(of), (40, 41, 42, 43))
    assert bool(local(memory, of).guesses(2)) == reads
    memory = LocalMemory(SETTINGS)
    memory.corrections.learn(memory.scope(of), (40, 41, 42), 43)
    assert bool(local(memory, of).guesses(2)) == reads


def test_rows_past_a_rejection_teach_what_follows_their_tokens() -> None:
    memory, of = LocalMemory(SETTINGS), stream((30, 31, 32))
    drafts = local(memory, of)
    assert drafts.guesses(4) == ()
    # after 30 31 32 the target says 33; after the drafts 50, 51 it would have said 60 and 61
    drafts.learn(of.log.length, (50, 51), (33, 60, 61))
    later = local(memory, stream((99, 32, 50, 51)))
    assert ids(later.guesses(4)) == {"suffix": (61,)}
    drafts.learn(of.log.length, (50, 51, 61), (33, 60, 61, 62))
    assert ids(local(memory, stream((99, 32, 50, 51))).guesses(4)) == {"suffix": (61, 62)}
    (guess,) = local(memory, stream((99, 32, 50, 51))).guesses(4)
    assert {evidence.source for evidence in guess.evidence} == {"correction"}


def test_chances_follow_what_was_right_and_begin_with_what_others_saw() -> None:
    shared = Chances(decay=0.998)
    own = Chances(prior=shared)
    assert own.chance(SURE) == pytest.approx(SURE.prior_chance())
    for _ in range(200):
        own.observe(SURE, False)
        own.observe(UNSURE, True)
    assert own.chance(SURE) < 0.1
    assert own.chance(UNSURE) > 0.8
    assert Chances(prior=shared).chance(SURE) < 0.1
    assert Chances(prior=shared).chance(Evidence("past", 16, 3)) > 0.8, "other evidence is untouched"


def test_a_greedy_text_is_expected_to_repeat_itself_more_surely() -> None:
    memory = LocalMemory(SETTINGS)
    greedy, sampled = (memory.chances(stream(sampling=s)) for s in (GREEDY, SamplingParams()))
    for length in (1, 2, 3, 4, 5, 7, 10, 16):
        unsure = Evidence("own", length, 2)
        assert Chances(prior=greedy).chance(unsure) == pytest.approx(unsure.prior_chance(greedy=True))
        assert Chances(prior=greedy).chance(unsure) > Chances(prior=sampled).chance(unsure)


def test_a_chance_is_right_on_average() -> None:
    rng, chances = random.Random(1), Chances(decay=0.99)
    for _ in range(2000):
        chances.observe(SURE, rng.random() < 0.3)
    assert chances.chance(SURE) == pytest.approx(0.3, abs=0.1)


def test_guesses_are_judged_by_what_was_committed_up_to_the_first_miss() -> None:
    memory, of = LocalMemory(SETTINGS), stream(drafter="suffix")
    drafts = local(memory, of)
    (guess,) = drafts.guesses(4)
    of.log.append((3, 9, 8))
    drafts.committed()
    chances = memory.chances(of)
    assert chances.chance(guess.evidence[0]) > guess.evidence[0].prior_chance(greedy=True)
    assert chances.chance(guess.evidence[1]) < guess.evidence[1].prior_chance(greedy=True)
    assert chances.chance(guess.evidence[2]) == pytest.approx(guess.evidence[2].prior_chance(greedy=True))


def test_guesses_are_judged_by_rows_past_a_rejection_too() -> None:
    """The model drafted what was guessed, the target said otherwise at the second token, and told what it would have
    said after it."""
    memory, of = LocalMemory(SETTINGS), stream(drafter="suffix")
    drafts = local(memory, of)
    (guess,) = drafts.guesses(4)
    of.log.append((3, 9))
    header = of.log.header(1, of.log.length - 2)
    verdict = Verdict(header=header, committed_ids=(3, 9), origins=(), row_choices=(3, 9, 8, 7))
    drafts.committed((3, 4, 8), verdict)
    chances = memory.chances(of)
    assert guess.token_ids == (3, 4, 8, 1)
    moved = [chances.chance(e) - e.prior_chance(greedy=True) for e in guess.evidence]
    assert moved[0] > 0 > moved[1]
    assert 0 < moved[2] < moved[0], "right, on a path that was not taken"
    assert moved[3] < 0, "after the last draft the target would have said 7"


def test_rows_past_a_rejection_judge_nothing_where_the_request_bends_what_they_would_commit() -> None:
    memory, of = LocalMemory(SETTINGS), stream(sampling=dataclasses.replace(GREEDY, logit_bias={8: 3.0}))
    drafts = local(memory, of)
    (guess, *_) = drafts.guesses(4)
    of.log.append((3, 9))
    header = of.log.header(1, of.log.length - 2)
    drafts.committed((3, 4, 8), Verdict(header=header, committed_ids=(3, 9), origins=(), row_choices=(3, 9, 8, 7)))
    unjudged = guess.evidence[2]
    assert memory.chances(of).chance(unjudged) == pytest.approx(unjudged.prior_chance(greedy=True))


def guess_of(chance: float, num_tokens: int = 4) -> Guess:
    return Guess("suffix", tuple(range(num_tokens)), (SURE,) * num_tokens, (chance,) * num_tokens)


def test_the_better_of_model_and_guess_is_chosen_by_tokens_per_ms() -> None:
    policy = warm_policy(draft_ms=1.0, accept=1, cap=8)
    for _ in range(30):
        policy.observe(
            RoundReport(choice=Choice("model", 3, "best", candidate=MODEL), num_draft_tokens=3,
                        num_accepted=1, num_committed=2, draft_ms=3.0, verify_ms=10.3, round_ms=13.3)
        )  # fmt: skip
    sure = policy.choose(8, 64, (MODEL,), (guess_of(0.95),))
    assert (sure.drafter, sure.num_draft_tokens, sure.reason) == ("suffix", 4, "match")
    unsure = policy.choose(8, 64, (MODEL,), (guess_of(0.05),))
    assert (unsure.drafter, unsure.reason) == ("model", "best")
    assert policy.choose(2, 64, (MODEL,), (guess_of(0.95),)).num_draft_tokens == 2
    assert policy.choose(8, 64, (), (guess_of(0.95),)).drafter == "suffix"
    assert policy.interrupts((guess_of(0.95),))
    assert not policy.interrupts((guess_of(0.0),))
    assert not policy.interrupts(())


def test_a_guess_ends_a_run_of_a_head_though_plain_decoding_was_never_measured() -> None:
    """As with users who never ask for plain text: what the target's worker has told of its passes is enough."""
    head = Candidate("eagle3", on_target=True)
    shared = PairEstimates()
    policy = AdaptiveGamma(shared, 8)
    assert not policy.interrupts((guess_of(0.95),)), "nothing is known of any cost"
    shared.costs.verify.tell(10.0, 0.5)
    shared.costs.draft(head).work.tell(0.5, 0.5)
    choice = policy.choose(8, 64, (head,), (guess_of(0.0),))
    assert choice.candidate == head
    assert choice.is_run
    assert policy.interrupts((guess_of(0.95),))
    assert not policy.interrupts((guess_of(0.05),))


def test_rows_that_cost_are_not_spent_on_a_doubtful_guess() -> None:
    policy = warm_policy(draft_ms=1.0, row_ms=8.0, accept=0, cap=8)
    assert policy.choose(8, 64, (), (guess_of(0.3),)).num_draft_tokens == 0
    assert policy.choose(8, 64, (), (guess_of(0.99),)).num_draft_tokens > 0


def test_a_chain_goes_on_where_a_guess_is_worth_its_rows() -> None:
    policy = warm_policy(draft_ms=0.1, accept=2, cap=4)
    choice = policy.choose(8, 64, (MODEL,), ())
    assert choice.drafter == "model"
    assert policy.num_continued(choice, choice.num_draft_tokens, guess_of(0.99)) == 4
    assert policy.num_continued(choice, choice.num_draft_tokens, guess_of(0.0)) == 0
    assert policy.num_continued(Choice("model", 2, "probe", candidate=MODEL), 2, guess_of(0.99)) in (0, 4)


def test_a_fixed_number_uses_guesses_only_while_nobody_can_be_asked() -> None:
    policy = FixedGamma(3)
    assert policy.choose(8, 64, (MODEL,), (guess_of(0.9),)) == Choice("model", 3, "fixed", candidate=MODEL)
    assert policy.choose(8, 64, (), (guess_of(0.1, 2), guess_of(0.9))) == Choice("suffix", 3, "fixed")
    assert policy.choose(8, 64, (), ()).reason == "no-match"
    assert FixedGamma(0).choose(8, 64, (), (guess_of(0.9),)).num_draft_tokens == 0


@pytest.mark.parametrize(
    ("by", "num_drafts", "num_accepted", "parts"),
    [
        (Drafting("model", "best"), 3, 2, [("model", "best", 3, 2)]),
        (Drafting("suffix", "match", "suffix", 4), 4, 1, [("suffix", "match", 4, 1)]),
        (Drafting("model", "best", "lookup", 2), 5, 4, [("model", "best", 3, 3), ("lookup", "continued", 2, 1)]),
        (Drafting("model", "best", "lookup", 2), 5, 1, [("model", "best", 3, 1), ("lookup", "continued", 2, 0)]),
        (Drafting("model", "draft-late", "lookup", 2), 2, 1, [("lookup", "draft-late", 2, 1)]),
        (Drafting("", "best"), 0, 0, [("", "best", 0, 0)]),
    ],
)
def test_each_part_of_a_round_is_counted_for_who_drafted_it(
    by: Drafting, num_drafts: int, num_accepted: int, parts: list[tuple[str, str, int, int]]
) -> None:
    assert list(by.parts(num_drafts, num_accepted)) == parts
