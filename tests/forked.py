"""Services as processes of their own that start within milliseconds: forked from one that has imported everything.

Each is as real as one from the command line and is told the same flags: its own memory, connections and pid, to be
killed, stopped and continued. `start` stands for `Child.start`, and gives the same `Child`; `outrider` runs any other
command, and what that starts is forked too.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import gc
import importlib
import json
import os
import runpy
import signal
import socket
import sys
import traceback
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from subprocess import Popen
from typing import Any

from outrider.cli.process import Child, OnLine

LONGEST_LINE = 1 << 20


class ForkedProcess:
    """What `Child` needs of an `asyncio.subprocess.Process`."""

    def __init__(
        self, pid: int, stdin: int, outputs: Sequence[asyncio.StreamReader], fate: asyncio.StreamReader
    ) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self.stdout, self.stderr = outputs
        self._stdin = stdin
        self._waiting = asyncio.create_task(self._wait(fate))

    async def wait(self) -> int:
        return await asyncio.shield(self._waiting)

    def terminate(self) -> None:
        os.kill(self.pid, signal.SIGTERM)

    async def output(self) -> tuple[str, str]:
        """All of stdout and stderr. It is killed where nobody waits for them any longer."""
        try:
            output, errors = await asyncio.gather(self.stdout.read(), self.stderr.read())
            await self.wait()
        finally:
            if self.returncode is None:
                os.kill(self.pid, signal.SIGKILL)
                await self.wait()
        return output.decode(), errors.decode()

    async def _wait(self, fate: asyncio.StreamReader) -> int:
        line = await fate.readline()
        self.returncode = int(line) if line else -signal.SIGKILL  # the parent of all is gone, and so are they
        os.close(self._stdin)
        return self.returncode


async def start(role: str, flags: Sequence[str], on_line: OnLine | None = None) -> Child:
    """Starts `outrider <role> <flags>`."""
    process: Any = await _fork([role, *flags, "--exit-with-stdin"])
    return Child(role, process, on_line)


async def outrider(*args: str) -> tuple[int | None, str, str]:
    """Runs `outrider <args>` to its end, with nothing on its stdin: (exit code, stdout, stderr)."""
    return await _finish(await _fork(args, forks=True))


async def script(path: Path, variables: Mapping[str, str]) -> tuple[int | None, str, str]:
    """Runs a Python file with these variables beside ours, as `outrider` runs a command."""
    return await _finish(await _fork((), script=path, variables=variables, forks=True))


async def _finish(process: ForkedProcess) -> tuple[int | None, str, str]:
    output, errors = await asyncio.wait_for(process.output(), 240)
    return process.returncode, output, errors


async def _fork(
    argv: Sequence[str],
    *,
    script: Path | None = None,
    variables: Mapping[str, str] | None = None,
    forks: bool = False,
) -> ForkedProcess:
    """forks: so do the services that it starts. It must end before this process does."""
    theirs, ours = zip(*(os.pipe() if number == 0 else os.pipe()[::-1] for number in range(4)), strict=True)
    what = {"argv": argv, "script": str(script or ""), "environ": {**os.environ, **(variables or {})}}
    request = json.dumps(what).encode()
    socket.send_fds(_parent(), [request], [*theirs, _parent().fileno()] if forks else theirs)
    for number in theirs:
        os.close(number)
    stdout, stderr, fate = [await _reader(number) for number in ours[1:]]
    pid = int(await fate.readline())
    return ForkedProcess(pid, ours[0], (stdout, stderr), fate)


async def _reader(number: int) -> asyncio.StreamReader:
    reader = asyncio.StreamReader(limit=LONGEST_LINE)
    loop = asyncio.get_running_loop()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), os.fdopen(number, "rb", 0))
    return reader


@cache
def _parent() -> socket.socket:
    """To the parent of all, which ends with this process."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with theirs:
        command = [sys.executable, str(Path(__file__)), str(theirs.fileno())]
        same_code = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "TERM": "dumb"}  # no colours for a pipe
        process = Popen(command, pass_fds=[theirs.fileno()], env=same_code)
    atexit.register(process.wait)
    atexit.register(ours.close)
    return ours


def main() -> None:
    """Forks a service for each request, and tells its pid and how it ended. It has no threads of its own, and has not
    touched gRPC: so a child may."""
    from outrider.cli.app import app

    for role in ("coordinator", "draft_worker", "target_worker"):
        importlib.import_module(f"{role}.server")
    gc.freeze()
    requests, fates = socket.socket(fileno=int(sys.argv[1])), dict[int, int]()

    def bury(*_: object) -> None:
        with contextlib.suppress(ChildProcessError):
            while pid := (ended := os.waitpid(-1, os.WNOHANG))[0]:
                fate = fates.pop(pid)
                with contextlib.suppress(BrokenPipeError):
                    os.write(fate, f"{os.waitstatus_to_exitcode(ended[1])}\n".encode())
                os.close(fate)

    signal.signal(signal.SIGCHLD, bury)
    while True:
        message, numbers, *_ = socket.recv_fds(requests, LONGEST_LINE, 5)
        if not message:
            return
        signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGCHLD])
        pid = os.fork()
        if not pid:
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGCHLD])
            requests.close()
            for fate in fates.values():
                os.close(fate)
            _become(app, numbers, **json.loads(message))
        for number in (*numbers[:3], *numbers[4:]):
            os.close(number)
        fates[pid] = numbers[3]
        os.write(numbers[3], f"{pid}\n".encode())
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGCHLD])


def _fork_from(parent: socket.socket) -> None:
    """Services that this process starts come from there."""
    globals()["_parent"] = lambda: parent
    Child.start = start  # type: ignore[method-assign, assignment]


def _become(app: Any, numbers: Sequence[int], argv: list[str], script: str, environ: dict[str, str]) -> None:
    code: Any = 1
    try:
        os.setsid()
        if numbers[4:]:
            _fork_from(socket.socket(fileno=os.dup(numbers[4])))
        for number, standard in zip(numbers, range(3), strict=False):
            os.dup2(number, standard)
        for number in numbers:
            os.close(number)
        os.environ.clear()
        os.environ.update(environ)
        sys.argv = [script or "outrider", *argv]
        if script:
            runpy.run_path(script, run_name="__main__")
        else:
            app()
        code = 0
    except SystemExit as end:
        code = end.code
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code if isinstance(code, int) else int(code is not None))


if __name__ == "__main__":
    main()
