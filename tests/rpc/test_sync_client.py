"""The blocking client beside the async one, over a real stack: the same answers, from any thread."""

from __future__ import annotations

import asyncio
import gc
import inspect
import subprocess
import sys
import threading
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from itertools import islice

import pytest
from stack import Stack, in_process_stack

import outrider
from outrider.client import GenerateOptions
from outrider.errors import DeadlineExceeded, InvalidArgument, Unavailable
from outrider.loop_thread import shared_loop
from outrider.results import Chunk, Complete, Started

GREEDY: GenerateOptions = {"temperature": 0.0, "max_tokens": 24, "num_speculative_tokens": 3}
LONG: GenerateOptions = {"temperature": 0.0, "max_tokens": 4000, "ignore_eos": True}


@pytest.fixture
async def stack() -> AsyncIterator[Stack]:
    async with in_process_stack() as stack:
        yield stack


def public(cls: type) -> dict[str, object]:
    return {name: value for name, value in vars(cls).items() if not name.startswith("_")}


def test_has_every_method_of_the_async_client_with_the_same_parameters() -> None:
    theirs, ours = public(outrider.Client), public(outrider.SyncClient)
    assert theirs.keys() == ours.keys()
    theirs["__init__"], ours["__init__"] = outrider.Client.__init__, outrider.SyncClient.__init__
    for name, method in theirs.items():
        wanted, found = inspect.signature(method), inspect.signature(ours[name])  # type: ignore[arg-type]
        assert wanted.parameters == found.parameters, name
        assert not inspect.iscoroutinefunction(ours[name]), name


async def test_answers_are_those_of_the_async_client(stack: Stack) -> None:
    def ask() -> list[object]:
        with outrider.SyncClient(stack.address) as client:
            events = list(client.generate([5, 3, 2], **GREEDY))
            completion = client.complete([5, 3, 2], **GREEDY)
            tagged = client.with_metadata({"x-outrider-tenant": "acme"})
            return [events, completion, client.model_info(), tagged.tokenize("!0"), client.detokenize([1, 2])]

    events, completion, info, ids, text = await asyncio.to_thread(ask)
    assert [type(event) for event in (events[0], events[-1])] == [Started, Complete]
    assert {type(event) for event in events[1:-1]} == {Chunk}
    async with outrider.Client(stack.address) as client:
        plain = await client.complete([5, 3, 2], **{**GREEDY, "num_speculative_tokens": 0})
        assert completion.token_ids == plain.token_ids == tuple(i for chunk in events[1:-1] for i in chunk.token_ids)
        assert completion.speculation.num_draft_tokens > 0, "INCONCLUSIVE: nothing was drafted"
        assert info == await client.model_info()
        assert ids == await client.tokenize("!0")
        assert text == await client.detokenize([1, 2])


async def test_threads_share_a_client(stack: Stack) -> None:
    prompts = [[1 + i, 2, 3] for i in range(8)]

    def ask_all() -> list[tuple[int, ...]]:
        with outrider.SyncClient(stack.address) as client, ThreadPoolExecutor(8) as threads:
            return list(threads.map(lambda prompt: client.complete(prompt, **GREEDY).token_ids, prompts))

    answers = await asyncio.to_thread(ask_all)
    async with outrider.Client(stack.address) as client:
        assert answers == [(await client.complete(prompt, **GREEDY)).token_ids for prompt in prompts]
    assert sum(thread.name == "outrider-client" for thread in threading.enumerate()) == 1


async def none_runs(stack: Stack) -> None:
    async with outrider.Client(stack.address) as client:
        while (await client.server_info()).num_requests_running:
            await asyncio.sleep(0.01)


@pytest.mark.parametrize("how", ["break", "close", "collect"])
async def test_a_stream_that_is_left_early_is_cancelled(stack: Stack, how: str) -> None:
    def leave() -> None:
        client = outrider.SyncClient(stack.address)
        stream = client.generate([5, 3, 2], **LONG)
        assert len(list(islice(stream, 3))) == 3
        if how == "close":
            stream.close()
        elif how == "collect":  # in a cycle, so that the collector ends it, wherever it happens to run
            knot: list[object] = [stream]
            knot.append(knot)
            del knot
        del stream
        gc.collect()
        client.close()

    await asyncio.to_thread(leave)
    await none_runs(stack)


async def test_a_stream_whose_client_is_closed_ends_with_an_error(stack: Stack) -> None:
    def close_in_the_midst() -> None:
        client = outrider.SyncClient(stack.address)
        stream = client.generate([5, 3, 2], **LONG)
        next(stream)
        client.close()
        with pytest.raises(Unavailable, match="closed"):
            list(stream)
        with pytest.raises(Unavailable, match="closed"):
            client.model_info()

    await asyncio.to_thread(close_in_the_midst)
    await none_runs(stack)


async def test_bad_options_and_deadlines_are_raised_where_the_call_stands(stack: Stack) -> None:
    def ask() -> None:
        with pytest.raises(InvalidArgument, match="timeout_s"):
            outrider.SyncClient(stack.address, timeout_s=0)
        with outrider.SyncClient(stack.address) as client:
            with pytest.raises(TypeError, match="did you mean 'temperature'"):
                client.generate([1], temprature=0.5)  # type: ignore[call-arg]
            with pytest.raises(InvalidArgument) as caught:
                client.complete([1], temperature=-1.0)
            assert caught.value.field == "sampling.temperature"
            with pytest.raises(DeadlineExceeded, match=r"timeout_s is 0\.001"):
                client.complete([5, 3, 2], **LONG, timeout_s=0.001)

    await asyncio.to_thread(ask)


async def test_a_client_that_is_forgotten_closes_its_connections(stack: Stack) -> None:
    def forget() -> None:
        client = outrider.SyncClient(stack.address)
        copied = client.with_metadata({"a": "b"})
        inner = client._client
        del client
        gc.collect()
        assert copied.complete([5, 3, 2], **GREEDY).finish_reason == "length"
        del copied
        gc.collect()
        shared_loop().run(asyncio.sleep(0))
        assert inner._endpoints.is_closed

    await asyncio.to_thread(forget)


async def test_the_clients_own_loop_refuses_to_wait_for_itself(stack: Stack) -> None:
    def ask() -> None:
        with outrider.SyncClient(stack.address) as client:

            async def within() -> None:
                client.model_info()

            with pytest.raises(RuntimeError, match="wait for itself"):
                shared_loop().run(within())

    await asyncio.to_thread(ask)


async def test_a_program_may_end_without_closing_and_an_interrupt_ends_a_wait() -> None:
    program = """
import os, signal, sys, threading
import outrider
client = outrider.SyncClient(sys.argv[1])
stream = client.generate([5, 3, 2], temperature=0, max_tokens=4000, ignore_eos=True)
next(stream)
threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT)).start()
try:
    for event in stream:
        pass
    print("ended by itself")
except KeyboardInterrupt:
    print("interrupted", flush=True)
if os.fork() == 0:
    try:
        client.model_info()
    except RuntimeError as error:
        print("fork" in str(error), flush=True)
    os._exit(0)
os.wait()
"""
    async with in_process_stack("toy:vocab=16,seed=1,pass_ms=20", None) as stack:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-c", program, stack.address),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        out, err = await process.communicate()
        assert process.returncode == 0, err.decode()
        assert sorted(out.decode().split()) == ["True", "interrupted"], err.decode()
        await none_runs(stack)


async def test_a_program_that_ends_amid_streams_says_nothing(stack: Stack) -> None:
    program = """
import sys
import outrider
client = outrider.SyncClient(sys.argv[1])
streams = [client.generate([5, 3, 2], temperature=0, max_tokens=4000, ignore_eos=True) for _ in range(20)]
for stream in streams:
    next(stream)
for stream in streams[10:]:
    stream.close()
"""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", program, stack.address), stderr=subprocess.PIPE
    )
    _, err = await process.communicate()
    assert process.returncode == 0
    assert "Traceback" not in err.decode(), err.decode()
    await none_runs(stack)
