"""Rounds go to the target before the verdict of the round before where the way there is long, and not otherwise."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from coordinator.request import ResolvedRequest
from coordinator.stream import Stream
from coordinator.target_link import Timed
from coordinator.text.tokenizer import ToyCodec
from coordinator.verifying import MIN_NETWORK_MS, MIN_ROUND_TRIPS, TargetSide
from outrider.sampling.noise import hash_ids
from outrider.sampling.params import Origin, SamplingParams, StoppingParams
from outrider.serving.messages import Header, Verdict
from outrider.serving.session_calls import SealedProposal


class Link:
    """A worker so far away; of a round that was pipelined the way is not seen."""

    def __init__(self, network_ms: float, *, sends_features: bool = False) -> None:
        self.network_ms, self.sends_features, self.is_pipelined = network_ms, sends_features, False

    async def verify(self, proposal: SealedProposal) -> Timed:
        verdict = Verdict(header=Header(1, 1, 0), committed_ids=(1,), origins=(Origin.PLAIN,), compute_us=30_000)
        network_ms = 0.0 if self.is_pipelined else self.network_ms
        return Timed(verdict, 30.0 + network_ms, is_pipelined=self.is_pipelined)


def side(link: Link) -> TargetSide:
    request = ResolvedRequest(
        request_id="r", model="toy", prompt_ids=(1,), prompt_hash=hash_ids((1,)),
        sampling=SamplingParams(temperature=0.0), stopping=StoppingParams(100), max_speculative_tokens=8,
    )  # fmt: skip
    no_pool: Any = None
    target = TargetSide(Stream(request, 0, ToyCodec(94)), no_pool)
    target._link = link  # type: ignore[assignment]
    return target


def rounds(target: TargetSide, count: int) -> None:
    for _ in range(count):
        asyncio.run(target.verify(SealedProposal()))


@pytest.mark.parametrize(("network_ms", "pays"), [(0.2, False), (MIN_NETWORK_MS - 0.1, False), (5.0, True)])
def test_it_pays_by_the_measured_way(network_ms: float, pays: bool) -> None:
    target = side(Link(network_ms))
    rounds(target, MIN_ROUND_TRIPS - 1)
    assert not target.pipelines, "too few were measured"
    rounds(target, 10)
    assert target.pipelines == pays


def test_a_way_that_is_hidden_is_not_taken_for_a_short_one() -> None:
    link = Link(20.0)
    target = side(link)
    rounds(target, MIN_ROUND_TRIPS)
    link.is_pipelined = True
    rounds(target, 50)
    assert target.pipelines


def test_verdicts_that_carry_states_are_not_guessed_at() -> None:
    target = side(Link(20.0, sends_features=True))
    rounds(target, 10)
    assert not target.pipelines
