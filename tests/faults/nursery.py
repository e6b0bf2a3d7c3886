"""Draft workers as processes of their own that start within milliseconds: forked from one that has imported everything.

Each is as real as one from the command line: its own memory, connections and pid, to be killed, stopped and continued.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

from outrider.settings import DraftWorkerSettings


class Nursery:
    """Starts draft workers with `settings`; see `nursery`."""

    def __init__(self, process: asyncio.subprocess.Process, settings: dict[str, Any]) -> None:
        self._process = process
        self._settings = settings
        self._lock = asyncio.Lock()
        self.pids: dict[int, int] = {}
        """By port, of the last one started there."""

    async def start(self, port: int = 0) -> int:
        """Its port, once it serves."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        async with self._lock:
            self._process.stdin.write(json.dumps({**self._settings, "port": port}).encode() + b"\n")
            await self._process.stdin.drain()
            line = await self._process.stdout.readline()
        pid, port = (int(word) for word in line.split())
        self.pids[port] = pid
        return port

    def signal(self, port: int, number: signal.Signals) -> None:
        os.kill(self.pids[port], number)


@asynccontextmanager
async def nursery(**settings: Any) -> AsyncIterator[Nursery]:
    """All of its workers end with it."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, str(Path(__file__)), stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE
    )
    one = Nursery(process, settings)
    try:
        yield one
    finally:
        for pid in one.pids.values():
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        assert process.stdin is not None
        process.stdin.close()
        await process.wait()


def main() -> None:
    """Forks a worker for each line of settings, and tells `pid port` once it serves. It has no threads of its own, and
    has not touched gRPC: so a child may."""
    import draft_worker.server  # noqa: F401

    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    for line in sys.stdin:
        ready, told = os.pipe()
        if not os.fork():
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            os.close(ready)
            _serve(DraftWorkerSettings(**json.loads(line)), told)
        os.close(told)
        with os.fdopen(ready) as words:
            print(words.readline().strip(), flush=True)


def _serve(settings: DraftWorkerSettings, told: int) -> None:
    from draft_worker.server import serve

    def on_ready(port: int) -> None:
        os.write(told, f"{os.getpid()} {port}\n".encode())
        os.close(told)

    try:
        asyncio.run(serve(settings, on_ready=on_ready))
    finally:
        os._exit(0)


if __name__ == "__main__":
    main()
