"""A pipelined verify that counted on another verdict is dropped at once, whatever pass of other streams is under way:
the round that is asked for instead takes part in the next one."""

from __future__ import annotations

import threading
from typing import Any

import pytest
from session_clients import decode_request, header_of, opened, read, running_target, target_opening, verify_request
from waiting import PATIENCE_S, until

from outrider.lm.toy import ToyModel
from outrider.serving.messages import Header
from target_worker.session import TargetSession


async def test_it_does_not_hold_up_the_round_that_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    is_held, may_pass = threading.Event(), threading.Event()
    real_forward, real_verify = ToyModel.forward, TargetSession.verify
    passes: list[int] = []
    asked: list[Header] = []

    def forward(self: ToyModel, batch: Any) -> Any:
        passes.append(len(batch.segments))
        if len(passes) == 3:  # two prompts, then a step of the other stream
            is_held.set()
            may_pass.wait(PATIENCE_S)
        return real_forward(self, batch)

    def verify(self: TargetSession, header: Header, *args: Any, **fields: Any) -> Any:
        asked.append(header)
        return real_verify(self, header, *args, **fields)

    monkeypatch.setattr(ToyModel, "forward", forward)
    monkeypatch.setattr(TargetSession, "verify", verify)
    try:
        async with running_target() as worker:
            other, other_ids = await opened(worker, target_opening((4, 5)))
            call, ids = await opened(worker)
            await other.write(decode_request(other_ids, 8))
            await until(is_held.is_set)
            stale = verify_request([*ids[:-1], (ids[-1] + 1) % 16])
            stale.verify.expected_token_id = (ids[-1] + 1) % 16
            await call.write(stale)
            await call.write(verify_request(ids))
            await until(lambda: header_of(ids) in asked)
            may_pass.set()
            assert (await read(call)).verdict.header.base_length == len(ids)
            assert passes[:4] == [1, 1, 1, 2]
            for one in (other, call):
                one.cancel()
            await worker.wait_idle()
    finally:
        may_pass.set()
