"""Moving between target workers: who is tried again, and when it is enough."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from coordinator.request import ResolvedRequest
from coordinator.stream import Stream
from coordinator.target_link import Timed
from coordinator.text.tokenizer import ToyCodec
from coordinator.verifying import MAX_LOSSES, MAX_REOPENINGS, TargetLost, TargetSide
from outrider.errors import Aborted, InvalidArgument, OutriderError, Unavailable
from outrider.sampling.noise import hash_ids
from outrider.sampling.params import Origin, SamplingParams, StoppingParams
from outrider.serving.messages import TargetOpening, Verdict
from outrider.serving.session_calls import SealedProposal

REQUEST = ResolvedRequest(
    request_id="r",
    model="toy",
    prompt_ids=(1, 2),
    prompt_hash=hash_ids((1, 2)),
    sampling=SamplingParams(),
    stopping=StoppingParams(1000),
)


class Link:
    """A worker that opens unless told otherwise, and is lost at every verify."""

    def __init__(self, pool: Pool, address: str) -> None:
        self.pool, self.address, self.closed = pool, address, False

    async def open(self, opening: TargetOpening) -> Timed:
        self.pool.openings.append((self.address, opening.epoch, tuple(opening.committed_ids)))
        if self.address in self.pool.down:
            raise self.pool.error
        return Timed(Verdict(header=self.pool.stream.log.header(opening.epoch), committed_ids=(3,),
                             origins=(Origin.PLAIN,)), 1.0)  # fmt: skip

    async def verify(self, proposal: SealedProposal) -> Timed:
        raise self.pool.error

    def close(self) -> None:
        self.closed = True


class Pool:
    """Addresses in order of preference."""

    def __init__(self, stream: Stream, *addresses: str, error: OutriderError | None = None) -> None:
        self.stream, self.addresses = stream, addresses
        self.error = error or Unavailable("gone")
        self.down: set[str] = set()
        self.openings: list[Any] = []
        self.num_open = 0

    def connect_target(self, stream: Stream, avoid: frozenset[str]) -> Any:
        for address in self.addresses:
            if address not in avoid:
                self.num_open += 1
                return Link(self, address)
        raise Unavailable("nobody left")

    def disconnect(self, link: Any, error: Exception | None = None) -> None:
        self.num_open -= 1


def make(*addresses: str, error: OutriderError | None = None) -> tuple[TargetSide, Pool, Stream]:
    stream = Stream(dataclasses.replace(REQUEST), 0, ToyCodec(94))
    pool = Pool(stream, *addresses, error=error)
    return TargetSide(stream, pool), pool, stream


async def lose(side: TargetSide, stream: Stream) -> None:
    """One verify that loses the worker, and the token that the next one gives."""
    with pytest.raises(TargetLost) as lost:
        await side.verify(SealedProposal())
    stream.commit((await side.reopen(lost.value)).verdict)


async def test_a_worker_that_failed_is_tried_again_once_another_has_given_a_token() -> None:
    side, pool, stream = make("a", "b")
    stream.commit((await side.open()).verdict)
    await lose(side, stream)
    await lose(side, stream)
    assert [(address, epoch) for address, epoch, _ in pool.openings] == [("a", 1), ("b", 2), ("a", 3)]
    assert pool.openings[-1][2] == tuple(stream.log.output_ids[:-1]), "an opening holds all that is committed"
    side.close()
    assert pool.num_open == 0


async def test_nobody_is_tried_twice_without_a_token_between() -> None:
    side, pool, stream = make("a", "b", "c")
    stream.commit((await side.open()).verdict)
    pool.down = {"a", "b", "c"}
    with pytest.raises(TargetLost) as lost:
        await side.verify(SealedProposal())
    with pytest.raises(Unavailable):
        await side.reopen(lost.value)
    assert [address for address, _, _ in pool.openings] == ["a", "b", "c"]
    assert len(pool.openings) <= 1 + MAX_REOPENINGS
    side.close()
    assert pool.num_open == 0


async def test_a_stream_that_kills_its_workers_does_not_go_round_for_ever() -> None:
    side, pool, stream = make("a", "b")
    stream.commit((await side.open()).verdict)
    for _ in range(MAX_LOSSES):
        await lose(side, stream)
    with pytest.raises(TargetLost) as lost:
        await side.verify(SealedProposal())
    with pytest.raises(Unavailable, match="gone"):
        await side.reopen(lost.value)
    assert len(pool.openings) == 1 + MAX_LOSSES
    assert pool.num_open == 0


async def test_a_session_that_is_gone_is_opened_on_the_same_worker() -> None:
    side, pool, stream = make("a", "b", error=Aborted("its lease", reason="SESSION_LOST"))
    stream.commit((await side.open()).verdict)
    for _ in range(MAX_LOSSES + 3):
        await lose(side, stream)
    assert {address for address, _, _ in pool.openings} == {"a"}


async def test_what_another_worker_would_say_too_goes_to_the_client() -> None:
    side, pool, stream = make("a", "b", error=InvalidArgument("no", field="x"))
    stream.commit((await side.open()).verdict)
    with pytest.raises(InvalidArgument):
        await side.verify(SealedProposal())
    assert len(pool.openings) == 1
