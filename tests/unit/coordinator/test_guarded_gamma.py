"""A γ policy that fails costs the stream its drafts, and nothing else."""

from __future__ import annotations

import dataclasses
import logging
import math
from typing import Any

import pytest

from coordinator.gamma.adaptive import AdaptiveGamma
from coordinator.gamma.guarded import FAILED, GuardedGamma
from coordinator.gamma.policy import Candidate, Choice, RoundReport
from coordinator.gamma.shared import SharedEstimates
from coordinator.request import ResolvedRequest
from coordinator.stream import Stream
from coordinator.text.tokenizer import ToyCodec
from outrider.drafting.guess import Guess
from outrider.drafting.ratio_stop import Price
from outrider.sampling.params import SamplingParams, StoppingParams
from outrider.serving.messages import AheadWish

MODEL = Candidate("model")
GOOD = Choice("model", 3, "best", candidate=MODEL, price=Price(0.1, 0.0, (0.5, 1.0)))
PLAIN = Choice("", 0, FAILED, 16)


def stream() -> Stream:
    request = ResolvedRequest(
        request_id="r", model="toy", prompt_ids=(1,), prompt_hash=0, sampling=SamplingParams(),
        stopping=StoppingParams(32),
    )  # fmt: skip
    return Stream(request, 0, ToyCodec(94))


class Policy:
    """Chooses what it is given, or raises it."""

    def __init__(self, told: Any) -> None:
        self.told = told

    def tell(self, *_: object) -> Any:
        if isinstance(self.told, Exception):
            raise self.told
        return self.told

    choose = interrupts = num_continued = observe = outlooks = tell


def guarded(told: Any) -> tuple[GuardedGamma, Stream, list[str]]:
    one, forgotten = stream(), []
    policy: Any = Policy(told)
    return GuardedGamma(lambda: policy, one, lambda: forgotten.append("all")), one, forgotten


@pytest.mark.parametrize(
    "choice",
    [
        OverflowError("cannot convert float infinity to integer"),
        dataclasses.replace(GOOD, num_draft_tokens=5),
        dataclasses.replace(GOOD, num_draft_tokens=math.nan),
        dataclasses.replace(GOOD, max_wait_ms=math.nan),
        dataclasses.replace(GOOD, expected_tokens_per_s=math.inf),
        dataclasses.replace(GOOD, ahead=AheadWish(1, 1, math.nan)),
        dataclasses.replace(GOOD, price=Price(math.nan)),
        dataclasses.replace(GOOD, price=Price(0.1, 0.0, (0.5, math.nan))),
        Choice("", 0, "best", 0),
        Choice("", 0, "best", 17),
        None,
    ],
    ids=str,
)
def test_a_choice_that_is_none_is_a_plain_round_counted_and_logged_once(
    choice: Any, caplog: pytest.LogCaptureFixture
) -> None:
    policy, one, forgotten = guarded(choice)
    with caplog.at_level(logging.ERROR):
        assert [policy.choose(4, 16, (MODEL,)) for _ in range(3)] == [PLAIN] * 3
    assert one.statistics.num_draft_failures == len(caplog.records) == len(forgotten) == 1
    assert not policy.interrupts(())
    assert policy.num_continued(GOOD, 3, Guess()) == 0
    assert policy.outlooks() == ()
    policy.observe(RoundReport(choice=GOOD))
    assert len(forgotten) == 1


@pytest.mark.parametrize("call", ["interrupts", "num_continued", "observe", "outlooks", "made"])
def test_whatever_else_fails_ends_no_stream_either(call: str) -> None:
    policy, one, forgotten = guarded(ZeroDivisionError())
    args: dict[str, tuple[Any, ...]] = {
        "interrupts": ((),), "num_continued": (GOOD, 3, Guess()), "outlooks": (),
        "observe": (RoundReport(choice=GOOD),),
    }  # fmt: skip
    if call == "made":
        policy = GuardedGamma(lambda: 1 / 0, one, lambda: forgotten.append("all"))  # type: ignore[arg-type, return-value]
    else:
        assert not getattr(policy, call)(*args[call])
    assert policy.choose(4, 16, (MODEL,)) == PLAIN
    assert one.statistics.num_draft_failures == len(forgotten) == 1


def test_what_can_be_is_passed_on() -> None:
    assert guarded(GOOD)[0].choose(4, 16, (MODEL,)) is GOOD


@pytest.mark.parametrize("number", [math.inf, 1e308])
def test_a_cost_that_cannot_be_is_forgotten_and_the_next_stream_drafts_again(number: float) -> None:
    shared = SharedEstimates()

    def make() -> AdaptiveGamma:
        return AdaptiveGamma(shared.of("toy", "t", greedy=True), 8)

    def tell(draft_ms: float) -> None:
        costs = shared.costs("toy")
        costs.verify.tell(10.0, 1.0)
        costs.draft(MODEL).work.tell(0.0, draft_ms)

    tell(number)
    one, other = stream(), stream()
    policy = GuardedGamma(make, one, lambda: shared.forget("toy"))
    assert [policy.choose(4, 16, (MODEL,)) for _ in range(3)] == [PLAIN] * 3
    assert one.statistics.num_draft_failures == 1

    tell(1.0)
    assert GuardedGamma(make, other, lambda: shared.forget("toy")).choose(4, 16, (MODEL,)).num_draft_tokens > 0
    assert other.statistics.num_draft_failures == 0
