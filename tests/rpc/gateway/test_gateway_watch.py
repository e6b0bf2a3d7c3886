"""What the gateway's log says of its coordinators without a request: that none is there, why, and that one is again."""

from __future__ import annotations

import logging
from typing import Any

import pytest
from gateway_stack import gateway_before
from ports import free_port
from stack import in_process_stack
from waiting import until

from coordinator.gateway import watch
from outrider.serving.tokens import line_for, new_token

LOST, BACK = "no coordinator serves this gateway", "a coordinator answers again"


def told(caplog: pytest.LogCaptureFixture, text: str) -> list[str]:
    return [record.getMessage() for record in caplog.records if text in record.getMessage()]


async def test_lost_is_told_once_with_the_reason_and_found_again(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watch, "INTERVAL_S", 0.05)
    monkeypatch.setattr(watch, "RETRY_INTERVAL_S", 0.05)
    caplog.set_level(logging.INFO)
    port = free_port()
    level = {"log_level": "info"}  # of the process: whoever starts last sets it
    stack: dict[str, Any] = {"draft": None, "coordinator": {"port": port, **level}, "worker": level}
    async with gateway_before(f"127.0.0.1:{port}", **level):
        await until(lambda: bool(told(caplog, LOST)))
        (warning,) = told(caplog, LOST)
        assert f"nothing answers at 127.0.0.1:{port}" in warning
        for number in (1, 2):
            async with in_process_stack(**stack):
                await until(lambda number=number: len(told(caplog, BACK)) == number)
            await until(lambda number=number: len(told(caplog, LOST)) == number + 1)
    assert len(told(caplog, LOST)) == 3, "once each time"


@pytest.mark.parametrize("has_tokens", [False, True])
async def test_one_that_is_there_is_not_told_of_with_tokens_or_without(
    has_tokens: bool, tmp_path: Any, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog.set_level(logging.INFO)
    num_asked, find_fault = 0, watch.find_fault

    async def counted(client: Any) -> str:
        nonlocal num_asked
        found = await find_fault(client)
        num_asked += 1
        return found

    monkeypatch.setattr(watch, "find_fault", counted)
    monkeypatch.setattr(watch, "INTERVAL_S", 0.02)
    (tmp_path / "tokens").write_text(line_for(new_token(), "somebody") + "\n")
    coordinator = {"tokens_file": str(tmp_path / "tokens")} if has_tokens else {}
    async with in_process_stack(draft=None, coordinator=coordinator) as stack, gateway_before(stack.address):
        await until(lambda: num_asked >= 3)
    assert not told(caplog, LOST)
