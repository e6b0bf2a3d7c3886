"""`outrider top` over running services: rates between two looks, what is drawn, and what is never shown."""

from __future__ import annotations

import asyncio
import fcntl
import io
import json
import os
import pty
import struct
import sys
import termios

import pytest
from endless import endless
from fake_generation import FakeGeneration, serving
from rich.console import Console
from stack import in_process_stack
from typer.testing import CliRunner

from outrider.cli import console
from outrider.cli.app import app
from outrider.cli.top_view import Look, render, sparks, summarise
from outrider.client import Client

SLOW = "toy:vocab=16,seed=1,pass_ms=4"


def invoke(*arguments: str) -> tuple[int, str]:
    """In a window of 200 columns, whatever that was in which the console was made."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(console.out, "_width", 200)
        result = CliRunner().invoke(app, ["top", *arguments])
    return result.exit_code, result.output


def recorded(told: dict[str, object], look: Look, width: int = 200) -> str:
    recording = Console(width=width, record=True, file=io.StringIO())
    recording.print(render(told, look, width))
    return recording.export_text()


async def test_once_tells_rates_streams_and_workers() -> None:
    async with in_process_stack(SLOW) as stack, Client(stack.address) as client:
        async with endless(client, "watched"):
            flags = (f"--address={stack.address}", "--once", "--interval-s=0.5")
            code, line = await asyncio.to_thread(invoke, *flags, "--json")
            assert code == 0, line
            told = json.loads(line)
            code, shown = await asyncio.to_thread(invoke, *flags)
            assert code == 0, shown
    (stream,) = told["streams"]
    assert (stream["request_id"], stream["state"], stream["max_tokens"]) == ("watched", "running", 3000)
    assert stream["tokens_per_s"] > 0
    assert 0 < stream["mean_gamma"] <= 2
    assert 0 < stream["acceptance_rate"] <= 1
    assert len(stream["acceptance_by_position"]) == 2
    assert {"verify", "network"} <= stream["round_parts_ms"].keys()
    (counts,) = told["models"].values()
    assert counts["tokens_per_s"] > 0
    assert {worker["role"] for worker in told["workers"]} == {"draft", "target"}
    assert all(worker["healthy"] for worker in told["workers"])
    assert "text" not in line
    assert "prompt_ids" not in line
    for word in ("watched.0", "running", "healthy", "verify", "tokens a step"):
        assert word in shown


async def test_rates_are_of_the_time_between_looks() -> None:
    async with in_process_stack() as stack, Client(stack.address) as client:
        await client.complete([1, 2], max_tokens=30, num_speculative_tokens=2)
        before = Look(10.0, await client.server_info(), await client.activity())
        await client.complete([1, 2], max_tokens=20, num_speculative_tokens=2)
        after = Look(14.0, await client.server_info(), await client.activity())
    (counts,) = summarise("here", before, after)["models"].values()
    assert (counts["num_tokens"], counts["tokens_per_s"]) == (50, 5.0)
    assert counts["num_draft_tokens"] > 0
    (alone,) = summarise("here", None, after)["models"].values()
    assert alone["num_draft_tokens"] > counts["num_draft_tokens"]
    text = recorded(summarise("here", before, after), after)
    assert "5.0 tokens/s" in text
    assert sparks([0.0, 0.5, 1.0]) == " ▄█"


@pytest.mark.parametrize("width", [60, 80, 100, 150])
async def test_a_narrow_window_shows_fewer_columns_and_each_of_them_whole(width: int) -> None:
    async with in_process_stack(SLOW) as stack, Client(stack.address) as client, endless(client, "a-request-by-name"):
        while not (activity := await client.activity()).streams or activity.streams[0].last_step is None:
            await asyncio.sleep(0.01)
        look = Look(1.0, await client.server_info(), activity)
    shown = recorded(summarise("here", None, look), look, width)
    assert max(map(len, shown.splitlines())) <= width
    rows = [line.split() for line in shown.splitlines() if "a-request-by-nam.0" in line]
    assert len(rows) == 1
    assert {"running", f"{activity.streams[0].speculation.num_tokens}/3000"} <= set(rows[0])
    for worker in look.info.workers:
        assert any({worker.role, worker.address, "healthy"} <= set(line.split()) for line in shown.splitlines())
    assert ("a wider window shows more" in shown) == (width < 150)


async def test_an_older_coordinator_is_shown_without_streams() -> None:
    async with serving(FakeGeneration()) as address, Client(address) as client:
        info = await client.server_info()
    look = Look(1.0, info, None)
    assert "too old to tell of its streams" in recorded(summarise("here", None, look), look)


def test_nobody_there_names_the_fix() -> None:
    code, shown = invoke("--address=127.0.0.1:1", "--once")
    assert code == 1
    assert "outrider up" in shown


async def test_q_quits_and_leaves_the_terminal_as_it_was() -> None:
    async with in_process_stack(SLOW) as stack, Client(stack.address) as client, endless(client, "watched"):
        ours, theirs = pty.openpty()
        fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 40, 200, 0, 0))
        before = termios.tcgetattr(theirs)
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "outrider.cli", "top", f"--address={stack.address}", "--interval-s=0.2",
            stdin=theirs, stdout=theirs, stderr=theirs,
            env={**os.environ, "TERM": "xterm-256color", "COLUMNS": "200", "LINES": "40"},
        )  # fmt: skip
        shown, loop = bytearray(), asyncio.get_running_loop()
        loop.add_reader(ours, lambda: shown.extend(os.read(ours, 65536)))
        try:
            async with asyncio.timeout(120):
                while b"watched.0" not in shown or b"q quits" not in shown:
                    await asyncio.sleep(0.02)
                os.write(ours, b"q")
                assert await process.wait() == 0
            assert termios.tcgetattr(theirs) == before
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()
            loop.remove_reader(ours)
            os.close(theirs)
            os.close(ours)
