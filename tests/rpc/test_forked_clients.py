"""Clients in forked children: an error that tells the fix wherever gRPC would crash or hang; the parent goes on."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections.abc import AsyncIterator

import pytest
from stack import Stack, in_process_stack

PRELUDE = """
import asyncio, os, signal, sys
import outrider

address = sys.argv[1]

def child(ask):
    pid = os.fork()
    if pid:
        print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)
        return
    signal.alarm(60)  # one that hangs
    try:
        print(ask(), flush=True)
    except RuntimeError as error:
        assert "spawn" in str(error), error
        print("refused", flush=True)
    os._exit(0)

def new():
    return outrider.SyncClient(address, timeout_s=30).complete([5, 3, 2], temperature=0, max_tokens=2).token_ids == told

async def ask_async():
    async with outrider.Client(address, timeout_s=30) as client:
        return (await client.complete([5, 3, 2], temperature=0, max_tokens=2)).token_ids
"""
"""A child prints what it got, then its parent how it ended."""
USED = """
client = outrider.SyncClient(address)
told = client.complete([5, 3, 2], temperature=0, max_tokens=2).token_ids
child(new)
child(lambda: asyncio.run(ask_async()))
stream = client.generate([5, 3, 2], temperature=0, max_tokens=100, ignore_eos=True)
next(stream)
child(lambda: next(stream))
child(lambda: client.generate([1]))
child(stream.close)
child(client.close)
assert sum(len(event.token_ids) for event in stream if isinstance(event, outrider.Chunk)) == 100
client.close()
child(new)
"""
ASYNC = """
async def begin():
    client = outrider.Client(address)
    stream = client.generate([5, 3, 2], temperature=0, max_tokens=100, ignore_eos=True)
    await anext(stream)
    return client, stream

async def rest():
    return sum([len(event.token_ids) async for event in stream if isinstance(event, outrider.Chunk)])

loop = asyncio.new_event_loop()
client, stream = loop.run_until_complete(begin())
child(lambda: loop.run_until_complete(anext(stream)))
child(lambda: loop.run_until_complete(client.server_info()))
child(lambda: loop.run_until_complete(stream.aclose()))
child(lambda: loop.run_until_complete(client.close()))
assert loop.run_until_complete(rest()) == 100
loop.run_until_complete(client.close())
"""
UNUSED = """
client = outrider.SyncClient(address)  # makes no call before the forks

child(lambda: len(asyncio.run(ask_async())) == 2)
child(lambda: len(asyncio.run(ask_async())) == 2)
child(client.server_info)
client.server_info()
"""


@pytest.fixture
async def stack() -> AsyncIterator[Stack]:
    async with in_process_stack("toy:vocab=16,seed=1,pass_ms=1", None) as stack:
        yield stack


@pytest.mark.parametrize(
    ("program", "tells"),
    [
        (USED, ["refused", "refused", "refused", "refused", "None", "refused", "refused"]),
        (ASYNC, ["refused", "refused", "None", "None"]),
        (UNUSED, ["True", "True", "refused"]),
    ],
    ids=["used", "async", "unused"],
)
async def test_forked_children(stack: Stack, program: str, tells: list[str]) -> None:
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", PRELUDE + program, stack.address),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={name: value for name, value in os.environ.items() if name != "GRPC_ENABLE_FORK_SUPPORT"},  # ours
    )
    out, err = await process.communicate()
    assert process.returncode == 0, err.decode()
    assert out.decode().split() == [word for told in tells for word in (told, "0")], err.decode()
