"""Forms are read in processes of their own before anybody else reads them: no form ends or hangs a service.

What llguidance's own limits and `outrider.sampling.grammar_bounds` let through may still take hours, or overflow a
stack. A process that a form has ended, by a signal or by its limits of CPU time and memory, has found it too complex.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import os
import signal
import sys
from collections import OrderedDict
from collections.abc import AsyncIterator
from typing import Any

from coordinator.fair_share import FairQueue
from coordinator.structured_output import FIELD, FORM_FIELDS
from outrider.errors import InvalidArgument, Unavailable
from outrider.sampling.grammar import GrammarTooComplex
from outrider.sampling.params import Grammar

COMMAND = (sys.executable, "-m", "coordinator.form_trial_process")
NUM_PROCESSES = 2
MAX_CPU_S = 4
"""Of one form; what `outrider.sampling.grammar.LIMITS` let through takes a second or two."""
MAX_WAIT_S = 60.0
"""A process that has not even used up its CPU time by then does not get any: nothing is said about the form."""
MAX_REMEMBERED = 1024
MAX_LINE_BYTES = 1 << 20
FOUND_TOO_COMPLEX = {-number for number in (signal.SIGXCPU, signal.SIGSEGV, signal.SIGBUS, signal.SIGABRT)}
"""Exit codes of a process that a form has ended. Any other one had another cause."""
_ONE_THREAD = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MALLOC_ARENA_MAX": "1"}

Verdict = tuple[str, str]
"""Reason and problem; empty: it may be read."""


class FormTrials:
    """Started when they are first needed, and kept."""

    def __init__(self, command: tuple[str, ...] = COMMAND) -> None:
        self._command = command
        self._idle: list[asyncio.subprocess.Process] = []
        self._num_free = NUM_PROCESSES
        self._queue: FairQueue[asyncio.Future[None]] = FairQueue()
        self._verdicts: OrderedDict[tuple[int, bytes], Verdict] = OrderedDict()
        self._ended: set[asyncio.Task[int]] = set()

    async def check(self, form: Grammar, *, tenant: str = "") -> None:
        """Raises InvalidArgument for a form that is none or is too complex, Unavailable where nobody can tell. Tenants
        have their turns. Whoever is cancelled ends the trial as well."""
        key = (int(form.kind), hashlib.sha256(form.text.encode("utf-8", "surrogatepass")).digest())
        if key not in self._verdicts:
            async with self._turn(tenant):
                if key not in self._verdicts:
                    self._verdicts[key] = await self._tried(form)
        self._verdicts.move_to_end(key)
        reason, problem = self._verdicts[key]
        while len(self._verdicts) > MAX_REMEMBERED:
            self._verdicts.popitem(last=False)
        if problem.startswith(FIELD):
            raise InvalidArgument(problem, field=FIELD, reason=reason)
        if reason:
            field = FORM_FIELDS[form.kind]
            raise InvalidArgument(f"{field}: {problem}", field=field, reason=reason)

    async def close(self) -> None:
        """Ends the processes."""
        while self._idle:
            self._end(self._idle.pop())
        await asyncio.gather(*self._ended)

    @contextlib.asynccontextmanager
    async def _turn(self, tenant: str) -> AsyncIterator[None]:
        if self._num_free:
            self._num_free -= 1
        else:
            turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._queue.push(turn, tenant=tenant, cost=1)
            try:
                await turn
            except asyncio.CancelledError:
                if turn.done() and not turn.cancelled():
                    self._next_turn()
                else:
                    self._queue.remove(turn, tenant=tenant)
                raise
        try:
            yield
        finally:
            self._next_turn()

    def _next_turn(self) -> None:
        if len(self._queue):
            self._queue.pop().set_result(None)
        else:
            self._num_free += 1

    async def _tried(self, form: Grammar) -> Verdict:
        process = None
        try:
            async with asyncio.timeout(MAX_WAIT_S):
                process = await self._process()
                answer = await self._ask(process, {"kind": form.kind.name, "text": form.text, "max_cpu_s": MAX_CPU_S})
                if answer is None and await process.wait() not in FOUND_TOO_COMPLEX:
                    raise OSError(f"a process that reads forms ended with {process.returncode}")
        except (OSError, TimeoutError) as error:
            if process is not None:
                self._end(process)
            raise Unavailable(
                f"structured_output cannot be read now ({error or 'no CPU time is left for it'}): ask again",
                reason="FORMS_UNREAD",
                retry_delay_s=1.0,
            ) from None
        except asyncio.CancelledError:
            if process is not None:
                self._end(process)
            raise
        if answer is None:
            limits = f"{MAX_CPU_S} s of CPU time, 256 MiB and 2 MiB of stack"
            found = GrammarTooComplex(f"it cannot be read within {limits}")
            return found.reason, found.message
        if answer["is_last"]:
            self._end(process)
        else:
            self._idle.append(process)
        return answer["reason"], answer["problem"]

    async def _process(self) -> asyncio.subprocess.Process:
        while self._idle:
            if (process := self._idle.pop()).returncode is None:
                return process
            self._end(process)
        pipe = asyncio.subprocess.PIPE
        process = await asyncio.create_subprocess_exec(
            *self._command,
            stdin=pipe,
            stdout=pipe,
            stderr=asyncio.subprocess.DEVNULL,
            limit=MAX_LINE_BYTES,
            env=os.environ | _ONE_THREAD,
        )
        assert process.stdout is not None
        try:
            if not await process.stdout.readline():
                raise OSError(f"a process that reads forms did not start: {await process.wait()}")
        except BaseException:
            self._end(process)
            raise
        return process

    @staticmethod
    async def _ask(process: asyncio.subprocess.Process, question: dict[str, str | int]) -> Any:
        """None: the process ended over it."""
        assert process.stdin is not None
        assert process.stdout is not None
        with contextlib.suppress(ConnectionError):
            process.stdin.write(json.dumps(question).encode() + b"\n")
            await process.stdin.drain()
        line = await process.stdout.readline()
        return json.loads(line) if line else None

    def _end(self, process: asyncio.subprocess.Process) -> None:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        ended = asyncio.ensure_future(process.wait())
        self._ended.add(ended)
        ended.add_done_callback(self._ended.discard)
