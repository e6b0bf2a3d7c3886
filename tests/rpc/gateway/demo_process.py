"""Programs that print how they are called once they serve."""

from __future__ import annotations

import asyncio
import os
from contextlib import AbstractAsyncContextManager

from programs import running

TOY = ("--target=toy:vocab=128,seed=1", "--draft=toy:vocab=128,seed=1,agreement=0.8")
DEMO = "outrider.cli.demo_gateway"
"""What `make demo-gateway` runs."""


def started(module: str, *args: str) -> AbstractAsyncContextManager[asyncio.subprocess.Process]:
    """At ports of their own."""
    return running(
        module, *args, "--port=0", "--gateway-port=0", stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.DEVNULL, env={**os.environ, "COLUMNS": "300"},
    )  # fmt: skip


async def told(process: asyncio.subprocess.Process) -> str:
    """What it says until it says how it is stopped."""
    assert process.stdout is not None
    lines = ""
    while "Ctrl-C" not in lines:
        line = (await process.stdout.readline()).decode()
        assert line, lines
        lines += line
    return lines
