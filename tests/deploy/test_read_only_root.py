"""The services as confined as their pods: another user, a root that cannot be written to, the mounts of the manifests.

Real processes in mount namespaces of their own; skipped where these may not be made.
"""

from __future__ import annotations

import asyncio
import os
import re
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import pytest
from conftest import SCALE
from roles import ROOT
from test_docker import STAGES
from test_kubernetes import WRITABLE

from outrider import Client

pytestmark = pytest.mark.slow

SCRIPT = Path(__file__).with_name("read_only.sh")
TOY = "toy:vocab=64,seed=1,agreement=0.8"
MODELS = [TOY, *(["smollm2-135m"] if SCALE >= 1 else [])]
"""The second writes what it converts to its cache."""
KEPT = (str(ROOT), sys.prefix, sys.base_prefix)


@pytest.fixture(autouse=True)
def may_mount() -> None:
    try:
        tried = subprocess.run(["unshare", "-m", "mount", "-t", "tmpfs", "none", "/mnt"], capture_output=True)
    except FileNotFoundError:
        pytest.skip("unshare is not installed")
    if tried.returncode:
        pytest.skip("no mounts may be made here")


def image_variables() -> dict[str, str]:
    """What the images set for workers."""
    found = [a for name, a in (*STAGES["base"].steps, *STAGES["runtime"].steps) if name == "ENV"]
    variables = dict(pair.split("=", 1) for line in found for pair in line.split())
    return {name: value for name, value in variables.items() if name not in ("PATH", "OUTRIDER_HOST")}


def confined(role: str, *command: str) -> list[str]:
    return ["unshare", "-m", "sh", str(SCRIPT), *sorted(WRITABLE[role]), "--", *KEPT, "--", *command]


@asynccontextmanager
async def running(role: str, *flags: str) -> AsyncIterator[str]:
    """Its address."""
    command = confined(role, sys.executable, "-m", "outrider.cli", role, "--port=0", "--drain-grace-s=2", *flags)
    environment = {name: value for name, value in os.environ.items() if not name.startswith("OUTRIDER_")}
    process = await asyncio.create_subprocess_exec(
        *command, stdout=asyncio.subprocess.PIPE, env=environment | image_variables(), cwd=ROOT
    )
    assert process.stdout is not None
    try:
        ready = re.search(r"ready on (\S+)", (await process.stdout.readline()).decode())
        assert ready, f"{role} ended with {await process.wait()}"
        yield ready[1]
    finally:
        if process.returncode is None:
            process.terminate()
        assert await process.wait() == 0


@pytest.mark.parametrize("model", MODELS)
async def test_services_need_no_more_than_their_mounts(model: str) -> None:
    async with AsyncExitStack() as stack:
        target = await stack.enter_async_context(running("target-worker", f"--model={model}", "--num-threads=1"))
        draft = await stack.enter_async_context(running("draft-worker", f"--model={model}", "--num-threads=1"))
        flags = (f"--target-workers={target}", f"--draft-workers={draft}", "--metrics-port=0")
        coordinator = await stack.enter_async_context(running("coordinator", *flags))
        async with Client(coordinator, timeout_s=60) as client:
            answer = await client.complete([1, 2, 3], max_tokens=16, num_speculative_tokens=2, ignore_eos=True)
    assert answer.usage.completion_tokens == 16
    assert answer.speculation.num_draft_tokens > 0, "inconclusive: nothing was drafted"


def test_the_root_cannot_be_written_to() -> None:
    """So the test above can fail."""
    done = subprocess.run(
        confined("coordinator", "sh", "-c", "id -u; touch /here; touch /usr/here; cd /tmp && touch here"),
        capture_output=True,
        text=True,
        cwd=ROOT,
    )
    assert (done.stdout.strip(), done.returncode) == ("10001", 0), done.stderr
    assert done.stderr.count("Read-only file system") == 2
