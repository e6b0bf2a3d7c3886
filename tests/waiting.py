"""Tests wait for what they expect, never for a time."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from coordinator import drafting

PATIENCE_S = 120.0
"""Longer than any machine is busy with something else."""


async def until(condition: Callable[[], Any]) -> None:
    """Until `condition`, a plain function or a coroutine function, says true. Raises TimeoutError if it never does."""
    async with asyncio.timeout(PATIENCE_S):
        while True:
            answer = condition()
            if await answer if asyncio.iscoroutine(answer) else answer:
                return
            await asyncio.sleep(0.01)


def wait_for_drafts(patch: pytest.MonkeyPatch) -> None:
    """In coordinators of this process: however slow the machine, no proposal comes too late."""
    for name in ("OPEN_WAIT_S", "FIRST_WAIT_S", "MIN_WAIT_S"):
        patch.setattr(drafting, name, 60.0)
