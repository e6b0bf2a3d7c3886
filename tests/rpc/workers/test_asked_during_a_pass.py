"""What comes while a pass of other streams is under way: the engine begins it after that pass, and its answer says how
long it waited. A pipelined verify that counted on another verdict needs no pass and waits for none."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
from session_clients import (
    advance_request,
    ask,
    decode_request,
    draft_opening,
    header_of,
    open_request,
    opened,
    read,
    running_draft,
    running_target,
    target_opening,
    verify_request,
)
from waiting import PATIENCE_S, until

from draft_worker.session import DraftSession
from outrider.lm.toy import ToyModel
from outrider.serving.messages import Header
from target_worker.session import TargetSession

REST_S = 0.05
"""Of the pass, from when it is let go."""
OTHER_PROMPT, PROMPT = (4, 5, 4, 5, 4, 5), (1, 2, 3)


class HeldPass:
    """The first pass of the other stream behind its prompt lasts until it is let go, and REST_S. `num_segments`: of
    that pass and of those that began later. `asked`: headers that sessions were asked about."""

    def __init__(self) -> None:
        self.is_held, self.may_end = threading.Event(), threading.Event()
        self.num_segments: list[int] = []
        self.asked: list[Header] = []

    def patch(self, monkeypatch: pytest.MonkeyPatch) -> None:
        real_forward = ToyModel.forward

        def forward(model: ToyModel, batch: Any) -> Any:
            first = batch.segments[0]
            is_step = first.num_cached_tokens + len(first.token_ids) > len(OTHER_PROMPT)
            if self.num_segments or is_step:
                self.num_segments.append(len(batch.segments))
            if len(self.num_segments) == 1:
                self.is_held.set()
                self.may_end.wait(PATIENCE_S)
                time.sleep(REST_S)
            return real_forward(model, batch)

        monkeypatch.setattr(ToyModel, "forward", forward)
        for kind, name in ((TargetSession, "verify"), (DraftSession, "advance")):
            monkeypatch.setattr(kind, name, self._noting(getattr(kind, name)))

    def _noting(self, real: Any) -> Any:
        def noted(session: Any, header: Header, *args: Any, **fields: Any) -> Any:
            self.asked.append(header)
            return real(session, header, *args, **fields)

        return noted


@pytest.fixture
def held(monkeypatch: pytest.MonkeyPatch) -> Iterator[HeldPass]:
    one = HeldPass()
    one.patch(monkeypatch)
    yield one
    one.may_end.set()


async def test_a_verdict_tells_the_wait_for_the_pass(held: HeldPass) -> None:
    async with running_target() as worker:
        call, ids = await opened(worker, target_opening(PROMPT))
        other, other_ids = await opened(worker, target_opening(OTHER_PROMPT))
        await other.write(decode_request(other_ids, 8))
        await until(held.is_held.is_set)
        await call.write(verify_request(ids))
        await until(lambda: header_of(ids) in held.asked)
        held.may_end.set()
        assert (await read(call)).verdict.queue_us >= 1e6 * REST_S
        assert held.num_segments[:2] == [1, 2]
        for one in (call, other):
            one.cancel()
        await worker.wait_idle()


async def test_a_proposal_tells_it_too(held: HeldPass) -> None:
    async with running_draft() as worker:
        call, other = worker.draft.Session(), worker.draft.Session()
        await ask(call, open_request(draft_opening(PROMPT)))
        assert (await ask(call, advance_request(PROMPT, [], 1))).WhichOneof("message") == "proposal"
        await ask(other, open_request(draft_opening(OTHER_PROMPT)))
        await other.write(advance_request([*OTHER_PROMPT, 6], [6], 1))
        await until(held.is_held.is_set)
        await call.write(advance_request([*PROMPT, 7], [7], 1))
        await until(lambda: header_of([*PROMPT, 7]) in held.asked)
        held.may_end.set()
        assert (await read(call)).proposal.proposal.queue_us >= 1e6 * REST_S
        for one in (call, other):
            one.cancel()
        await worker.wait_idle()


async def test_a_verify_that_is_dropped_does_not_hold_up_the_one_that_counts(held: HeldPass) -> None:
    async with running_target() as worker:
        call, ids = await opened(worker, target_opening(PROMPT))
        other, other_ids = await opened(worker, target_opening(OTHER_PROMPT))
        await other.write(decode_request(other_ids, 8))
        await until(held.is_held.is_set)
        another_id = (ids[-1] + 1) % 16
        stale = verify_request([*ids[:-1], another_id])
        stale.verify.expected_token_id = another_id
        await call.write(stale)
        await call.write(verify_request(ids))
        await until(lambda: header_of(ids) in held.asked)
        held.may_end.set()
        assert (await read(call)).verdict.header.base_length == len(ids)
        assert held.num_segments[:2] == [1, 2]
        for one in (call, other):
            one.cancel()
        await worker.wait_idle()
