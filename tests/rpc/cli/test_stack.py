"""Three real processes: they start, serve, and are gone afterwards, whatever ended them."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import urllib.request
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager

import psutil
import pytest
from ports import free_port
from programs import running

from outrider.cli.stack import local_stack
from outrider.client import Client
from outrider.errors import FailedPrecondition, Unavailable
from outrider.results import Chunk

TARGET = "toy:vocab=32,seed=1"
DRAFT = "toy:vocab=32,seed=1,agreement=0.9"


async def assert_gone(pids: list[int]) -> None:
    """Within the time that a stop may take at most."""
    async with asyncio.timeout(30):
        for pid in pids:
            while psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
                await asyncio.sleep(0.05)


def command(*args: str) -> AbstractAsyncContextManager[asyncio.subprocess.Process]:
    """`outrider <args>`."""
    pipe = asyncio.subprocess.PIPE
    return running("outrider.cli", *args, stdin=pipe, stdout=pipe, stderr=pipe)


async def read_until(stream: asyncio.StreamReader | None, text: str) -> str:
    """Lines up to the one that holds `text`; fails when the stream ends first."""
    assert stream is not None
    lines = ""
    async with asyncio.timeout(60):
        while text not in lines:
            line = (await stream.readline()).decode()
            assert line, f"ended without {text!r}: {lines}"
            lines += line
    return lines


async def test_a_stack_serves_and_leaves_nothing_behind() -> None:
    async with local_stack(TARGET, DRAFT) as stack, Client(stack.address) as client:
        assert set(stack.processes) == {"coordinator", "draft-worker", "target-worker"}
        assert all(size > 0 for size in stack.resident_bytes().values())
        answer = await client.complete([1, 2, 3], max_tokens=20, num_speculative_tokens=3)
        assert answer.speculation.num_draft_tokens > 0
        pids = [child.pid for child in stack.processes.values()]
    assert not any(psutil.pid_exists(pid) for pid in pids)


async def test_without_a_draft_worker() -> None:
    async with (
        local_stack(TARGET, None, coordinator={"default_max_tokens": 5}) as stack,
        Client(stack.address) as client,
    ):
        answer = await client.complete([1, 2, 3])
        assert (len(answer.token_ids), answer.speculation.num_draft_tokens) == (5, 0)


async def test_a_child_that_cannot_start_is_named_with_its_last_words() -> None:
    with pytest.raises(Unavailable, match=r"(?s)draft-worker exited with code 2.*has no key 'speed'"):
        async with local_stack(TARGET, "toy:speed=1"):
            pytest.fail("it cannot have started")
    assert not [p for p in psutil.Process().children(recursive=True) if "outrider.cli" in " ".join(p.cmdline())]


async def test_a_killed_child_is_found_and_a_stream_survives_the_draft_worker() -> None:
    async with local_stack(f"{TARGET},pass_ms=2", DRAFT) as stack, Client(stack.address) as client:
        token_ids: list[int] = []
        async for event in client.generate([1, 2], temperature=0.0, max_tokens=200, num_speculative_tokens=2):
            if isinstance(event, Chunk):
                token_ids += event.token_ids
                if len(token_ids) < 20:
                    stack.processes["draft-worker"].kill()
        dead = await asyncio.wait_for(stack.first_exit(), 30)
        assert dead is stack.processes["draft-worker"]
        assert "draft-worker was killed by SIGKILL" in (await dead.death()).message
        plain = await client.complete([1, 2], temperature=0.0, max_tokens=200, num_speculative_tokens=0)
        assert tuple(token_ids) == plain.token_ids


@asynccontextmanager
async def up(*flags: str) -> AsyncIterator[tuple[asyncio.subprocess.Process, str, list[int]]]:
    """(process, address, pids of the services) of a running `outrider up`."""
    async with command("up", f"--target={TARGET}", f"--draft={DRAFT}", "--port=0", *flags) as process:
        text = await read_until(process.stdout, "Ctrl-C")
        address = text.split("is up on ")[1].split()[0]
        pids = [int(line.split("pid ")[1]) for line in text.splitlines() if "pid " in line]
        assert len(pids) == 3
        yield process, address, pids
        await assert_gone(pids)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_up_starts_serves_and_stops_clean(number: signal.Signals) -> None:
    async with up() as (process, address, _):
        async with command("generate", "!!", f"--address={address}", "--max-tokens=5", "--stats") as generate:
            output, errors = await generate.communicate()
            assert (generate.returncode, len(output.decode().strip())) == (0, 5), errors
            assert b"5 tokens (length)" in errors
        process.send_signal(number)
        assert await asyncio.wait_for(process.wait(), 60) == 0


async def test_up_says_which_child_died_and_stops_the_others() -> None:
    async with up() as (process, _, pids):
        os.kill(pids[0], signal.SIGKILL)
        assert await asyncio.wait_for(process.wait(), 60) == 1
        assert process.stderr is not None
        errors = (await process.stderr.read()).decode()
        assert "target-worker was killed by SIGKILL" in errors
        assert "The other services were stopped too." in errors
        assert "Its last words:" not in errors, "they are shown as they come"
        assert "last words are above" not in errors, "it was killed, and had none"


async def test_up_tells_once_why_it_could_not_start() -> None:
    async with command("up", f"--target={TARGET}", "--draft=none", "--heads=no-such-head", "--port=0") as process:
        _, errors = await asyncio.wait_for(process.communicate(), 120)
    assert process.returncode == 1
    assert errors.decode().count("no-such-head") == 1, errors
    assert "target-worker exited with code 2: its last words are above" in errors.decode()


async def test_up_goes_on_without_a_killed_draft_worker_and_starts_it_again() -> None:
    async with up() as (process, address, pids), Client(address) as client:
        os.kill(pids[1], signal.SIGKILL)
        errors = await read_until(process.stderr, "starting it again")
        assert "draft-worker was killed by SIGKILL" in errors
        assert len((await client.complete([1, 2], max_tokens=5)).token_ids) == 5
        await read_until(process.stderr, "draft-worker serves again")
        async with asyncio.timeout(30):
            while not (await client.complete([1, 2], max_tokens=20, num_speculative_tokens=2)).speculation.drafters:
                await asyncio.sleep(0.1)
        process.send_signal(signal.SIGTERM)
        assert await asyncio.wait_for(process.wait(), 60) == 0


async def test_a_pair_that_does_not_match_is_told_at_once() -> None:
    with pytest.raises(FailedPrecondition, match=r"VOCAB_MISMATCH.*--draft none"):
        async with asyncio.timeout(60), local_stack(TARGET, "toy:vocab=33"):
            pytest.fail("it cannot have become healthy")


@pytest.mark.parametrize(
    ("flags", "says"),
    [(["--target=toy:speed=1"], "no key 'speed'"), (["--target=toy:vocab=8", "--draft=toy:v=1"], "no key 'v'")],
)
async def test_up_refuses_a_bad_toy_before_it_starts_anything(flags: list[str], says: str) -> None:
    async with command("up", *flags) as process:
        _, errors = await process.communicate()
        assert process.returncode == 2
        assert says in errors.decode()
        assert "starting" not in errors.decode()


async def test_up_sees_a_taken_port_before_it_starts_anything() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        async with command("up", f"--target={TARGET}", f"--target-port={port}", "--port=0") as process:
            _, errors = await process.communicate()
    assert process.returncode == 1
    assert errors.decode().count("cannot listen") == 1
    assert "--target-port" in errors.decode()
    assert "starting" not in errors.decode()


async def test_services_do_not_outlive_a_killed_up() -> None:
    async with up() as (process, _, _):
        process.kill()
        await process.wait()


async def test_up_refuses_a_bad_setting_before_it_starts_anything() -> None:
    async with command("up", f"--target={TARGET}", "--max-speculative-tokens=0") as process:
        _, errors = await process.communicate()
        assert process.returncode == 2
        assert b"--max-speculative-tokens" in errors


async def test_up_exports_its_coordinators_metrics_and_records_streams() -> None:
    port = free_port()
    async with up("--record-streams=2", "--model-aliases=it=toy", f"--metrics-port={port}") as (process, address, _):
        flags = (f"--address={address}", "--request-id=first", "--num-speculative-tokens=2", "--max-tokens=20")
        async with command("generate", "!!", *flags) as generate:
            await generate.communicate()
        async with command("audit", "first", f"--address={address}") as audit:
            output, errors = await audit.communicate()
        assert (audit.returncode, b"AUDITED" in output) == (0, True), errors
        exported = await asyncio.to_thread(urllib.request.urlopen, f"http://127.0.0.1:{port}/metrics")
        with exported:
            assert b"outrider_build_info{python=" in exported.read()
        process.send_signal(signal.SIGTERM)
        assert await asyncio.wait_for(process.wait(), 60) == 0
