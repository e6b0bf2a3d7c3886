"""One service as a child process of this one, in a process group of its own, that cannot outlive us.

Its stdin is a pipe that we hold: whatever ends us, the pipe closes and the child stops. The last lines of its stderr
are kept to say why it died.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress

from outrider.cli.services import READY
from outrider.errors import Unavailable
from outrider.serving import huge_pages

OnLine = Callable[[str, str], None]
TAIL_LINES = 40


class Died(Unavailable):
    """A service that has ended. `what`: which one and how, without its last words. `where_it_says_why`: for where its
    lines were shown as they came; empty where none of them can say why."""

    def __init__(self, what: str, last_words: str, *, says_why: bool = True) -> None:
        super().__init__(f"{what}. Its last words:\n{last_words}")
        self.what = what
        self.where_it_says_why = ": its last words are above" if says_why else ""


class Child:
    """A running service. `address` is known once `wait_ready` returned."""

    def __init__(self, role: str, process: asyncio.subprocess.Process, on_line: OnLine | None) -> None:
        self.role = role
        self.address = ""
        self.stderr_tail: deque[str] = deque(maxlen=TAIL_LINES)
        self._process = process
        self._on_line = on_line
        self._ready = asyncio.get_running_loop().create_future()
        self._readers = [asyncio.create_task(self._read_stdout()), asyncio.create_task(self._read_stderr())]

    @classmethod
    async def start(cls, role: str, flags: Sequence[str], on_line: OnLine | None = None) -> Child:
        """Starts `outrider <role> <flags>`."""
        pages = huge_pages.asking(os.environ) if role.endswith("worker") else {}
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "outrider.cli", role, *flags, "--exit-with-stdin",
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            start_new_session=True,
            limit=1 << 20,  # a longer line would end the reader, and a full pipe would stop the child
            env={**os.environ, **pages, "PYTHONUNBUFFERED": "1"},
        )  # fmt: skip
        return cls(role, process, on_line)

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def exit_code(self) -> int | None:
        """None while it runs; negative: the signal that ended it."""
        return self._process.returncode

    async def wait_ready(self, timeout_s: float) -> str:
        """host:port, once it serves. Raises Unavailable with the reason when it dies or takes longer."""
        exited = asyncio.create_task(self._process.wait())
        try:
            await asyncio.wait({self._ready, exited}, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
            if not self._ready.done():
                if exited.done():
                    raise await self.death()
                raise Unavailable(f"{self.role} was not ready after {timeout_s:g} s. Its last words:\n{self._last()}")
        finally:
            exited.cancel()
        self.address = self._ready.result()
        return self.address

    async def wait(self) -> int:
        """Exit code, once it ended."""
        return await self._process.wait()

    async def death(self) -> Died:
        """Why it died, for people. Only after it did."""
        await asyncio.wait(self._readers, timeout=1.0)
        was_killed = self.exit_code == -signal.SIGKILL  # and had no time for a word
        says_why = bool(self.stderr_tail) and not was_killed
        return Died(f"{self.role} {self.how_it_ended()}", self._last(), says_why=says_why)

    def how_it_ended(self) -> str:
        """By which signal, or with which exit code. Only after it did."""
        code = self.exit_code
        return f"was killed by {signal.Signals(-code).name}" if code and code < 0 else f"exited with code {code}"

    def _last(self) -> str:
        return "\n".join(f"  {line}" for line in list(self.stderr_tail)[-12:]) or "  (none)"

    def kill(self) -> None:
        """SIGKILL to the whole group: for tests of failures."""
        with suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)

    async def stop(self, grace_s: float) -> None:
        """SIGTERM, and SIGKILL to the whole group after `grace_s`."""
        if self.exit_code is None:
            with suppress(ProcessLookupError):
                self._process.terminate()
            with suppress(TimeoutError):
                await asyncio.wait_for(self._process.wait(), grace_s)
        self.kill()
        await self._process.wait()
        await asyncio.wait(self._readers, timeout=1.0)
        for reader in self._readers:
            reader.cancel()

    async def _read_stdout(self) -> None:
        assert self._process.stdout is not None
        prefix = READY.format(role=self.role, address="")
        async for raw in self._process.stdout:
            line = raw.decode(errors="replace").rstrip()
            if line.startswith(prefix) and not self._ready.done():
                self._ready.set_result(line.removeprefix(prefix))
            elif self._on_line:
                self._on_line(self.role, line)

    async def _read_stderr(self) -> None:
        assert self._process.stderr is not None
        async for raw in self._process.stderr:
            line = raw.decode(errors="replace").rstrip()
            self.stderr_tail.append(line)
            if self._on_line:
                self._on_line(self.role, line)
