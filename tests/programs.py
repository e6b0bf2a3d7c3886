"""Programs as processes of their own."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any


@asynccontextmanager
async def running(module: str, *args: str, **options: Any) -> AsyncIterator[asyncio.subprocess.Process]:
    """`python -m <module> <args>`, killed at the end if it runs still. options: of the subprocess."""
    process = await asyncio.create_subprocess_exec(sys.executable, "-m", module, *args, **options)
    try:
        yield process
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
