"""The worker processes: one line when ready, SIGTERM drains, a bad setting names its fix."""

import asyncio
import os
import signal
import sys

import pytest
from session_clients import ask, draft_opening, open_request, target_opening

from outrider.serving.channel import open_channel
from outrider.v1 import draft_pb2_grpc, target_pb2_grpc


async def start(package, **variables):
    environment = {name: value for name, value in os.environ.items() if not name.startswith("OUTRIDER_")}
    environment.update({"OUTRIDER_PORT": "0", "OUTRIDER_MODEL": "toy:vocab=16", **variables})
    return await asyncio.create_subprocess_exec(
        sys.executable, "-m", package, env=environment, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
    )


@pytest.mark.parametrize(
    ("package", "stub", "opening"),
    [
        ("target_worker", target_pb2_grpc.TargetServiceStub, target_opening()),
        ("draft_worker", draft_pb2_grpc.DraftServiceStub, draft_opening()),
    ],
)
async def test_ready_line_and_sigterm(package, stub, opening):
    process = await start(package)
    try:
        line = (await process.stdout.readline()).decode()
        prefix = f"outrider {package.replace('_', '-')} ready on 127.0.0.1:"
        assert line.startswith(prefix)
        async with open_channel(f"127.0.0.1:{int(line[len(prefix) :])}") as channel:
            call = stub(channel).Session()
            assert await ask(call, open_request(opening))
            process.send_signal(signal.SIGTERM)
            await call.done_writing()
            assert await process.wait() == 0
        assert await process.stdout.read() == b""
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


@pytest.mark.parametrize("package", ["coordinator", "draft_worker", "target_worker"])
async def test_arguments_that_nothing_reads_are_refused(package):
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", package, "--port=1", stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
    )
    output, errors = await process.communicate()
    assert (process.returncode, output) == (2, b"")
    assert f"usage: python -m {package}" in errors.decode()
    assert f"outrider {package.replace('_', '-')} --help" in errors.decode()


@pytest.mark.parametrize(
    ("variables", "named"),
    [
        ({"OUTRIDER_DRAFTERS": "model,eagle"}, "eagle"),
        ({"OUTRIDER_DRAFTERS": "model,lookup"}, "local_drafters"),
        ({"OUTRIDER_PROT": "1"}, "OUTRIDER_PROT"),
        ({"OUTRIDER_BLOCK_SIZE": "many"}, "block"),
    ],
)
async def test_a_bad_setting_is_named(variables, named):
    process = await start("draft_worker", **variables)
    output, errors = await process.communicate()
    assert process.returncode not in (0, None)
    assert not output
    assert named in errors.decode()
    assert "Traceback" not in errors.decode()
