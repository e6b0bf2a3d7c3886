"""Draft workers as processes of their own that start within milliseconds: forked from one that has imported everything.

Each is as real as one from the command line: its own memory, connections and pid, to be killed, stopped and continued.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
import traceback
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

    async def start(self, port: int) -> int:
        """Its port, once it serves. One that had the port before must have been killed; its end is waited for."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        wanted = {"settings": {**self._settings, "port": port}, "after": self.pids.get(port)}
        async with self._lock:
            self._process.stdin.write(json.dumps(wanted).encode() + b"\n")
            await self._process.stdin.drain()
            pid = await self._process.stdout.readline()
        assert pid.strip(), f"no draft worker serves at port {port}: stderr has the cause"
        self.pids[port] = int(pid)
        return port

    def signal(self, port: int, number: signal.Signals) -> None:
        os.kill(self.pids[port], number)


@asynccontextmanager
async def nursery(**settings: Any) -> AsyncIterator[Nursery]:
    """All of its workers end with it, those too that are just being started: one that lived on would hold the pipe for
    whose end `wait` waits."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, str(Path(__file__))),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        start_new_session=True,
    )
    try:
        yield Nursery(process, settings)
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        await process.wait()


def main() -> None:
    """Forks a worker for each line, and tells its pid once it serves, nothing where it cannot. It has no threads of its
    own, and has not touched gRPC: so a child may. Whatever ends who writes the lines ends all of them."""
    import draft_worker.server  # noqa: F401

    for line in sys.stdin:
        wanted = json.loads(line)
        if wanted["after"] is not None:
            os.waitpid(wanted["after"], 0)  # a killed process holds its port until the system has time to end it
        ready, told = os.pipe()
        if not os.fork():
            os.close(ready)
            _serve(DraftWorkerSettings(**wanted["settings"]), told)
        os.close(told)
        with os.fdopen(ready) as words:
            print(words.readline().strip(), flush=True)
    os.killpg(0, signal.SIGKILL)


def _serve(settings: DraftWorkerSettings, told: int) -> None:
    from draft_worker.server import serve

    def on_ready(port: int) -> None:
        os.write(told, f"{os.getpid()}\n".encode())
        os.close(told)

    try:
        asyncio.run(serve(settings, on_ready=on_ready))
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(0)


if __name__ == "__main__":
    main()
