"""The pages' commands run as printed, against toys; the metrics that they name are exported; their Python runs."""

from __future__ import annotations

import asyncio
import re
import sys
import textwrap
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import forked
import pytest
from conftest import SCALE
from pages import read_pages
from ports import free_port
from prometheus_client.parser import text_string_to_metric_families
from stack import Stack, in_process_stack
from typer.testing import CliRunner

from outrider.cli.app import app
from outrider.client import Client

TOY = "toy:vocab=128,seed=1"
CALLS = ("generate", "trace", "models", "audit")
"""They call a coordinator, in this order: what was generated is audited."""
ALONE = ("plan", "token")
PROCESSES = ("bench", "doctor", "verify")
"""They run by themselves; those that start services do at full counts alone, since each takes ten seconds of a core."""
DEAR = ("bench", "verify")
SERVICES = ("coordinator", "draft-worker", "target-worker", "gateway")
"""They run until they are stopped."""
TOGETHER = ("up",)
"""Services together: tests/unit/test_pages.py has it read its arguments, other tests start it."""
COMMANDS = sorted({tuple(words[1:]) for page in read_pages() for words in page.commands})


def of(*kinds: str) -> list[tuple[str, ...]]:
    found = [words for words in COMMANDS if words[0] in kinds]
    assert {words[0] for words in found} == set(kinds)
    return sorted(found, key=lambda words: kinds.index(words[0]))


@asynccontextmanager
async def stack_with_metrics() -> AsyncIterator[tuple[Stack, list[int]]]:
    ports = [free_port() for _ in range(3)]
    roles = ("coordinator", "draft_worker", "target_worker")
    settings: dict[str, Any] = {role: {"metrics_port": port} for role, port in zip(roles, ports, strict=True)}
    settings["coordinator"]["record_streams"] = 16
    async with in_process_stack(TOY, f"{TOY},agreement=0.8", **settings) as stack:
        yield stack, ports


async def metric_names(port: int) -> set[str]:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n")
    body = (await reader.read()).decode().partition("\r\n\r\n")[2]
    writer.close()
    families = list(text_string_to_metric_families(body))
    return {family.name for family in families} | {sample.name for family in families for sample in family.samples}


def test_every_command_is_of_a_kind_that_is_checked() -> None:
    assert {words[0] for words in COMMANDS} == {*CALLS, *ALONE, *PROCESSES, *SERVICES, *TOGETHER}


async def test_calls_metrics_and_python(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)  # some write files
    async with stack_with_metrics() as (stack, ports):
        for words in of(*CALLS, *ALONE):
            address = ["--address", stack.address] if words[0] in CALLS else []
            done = await asyncio.to_thread(CliRunner().invoke, app, [*words, *address])
            assert done.exit_code == 0, f"{words}: {done.output}"
            assert done.output.strip(), words
        async with Client(stack.address) as client:
            for page in read_pages():
                for block in page.python_blocks():
                    program = f"async def run(client, prompt):\n{textwrap.indent(block, '    ')}"
                    scope: dict[str, Any] = {}
                    exec(compile(program, page.name, "exec"), scope)  # noqa: S102
                    await scope["run"](client, "Hello")
        exported = set().union(*[await metric_names(port) for port in ports])
    named = {name for page in read_pages() for name in re.findall(r"\boutrider_[a-z0-9_]*[a-z0-9]\b", page.prose)}
    assert named
    assert named <= exported


@pytest.mark.slow
@pytest.mark.parametrize("words", of(*PROCESSES), ids=" ".join)
async def test_commands_that_need_no_services(words: tuple[str, ...], tmp_path: Path) -> None:
    if words[0] in DEAR and SCALE < 1:
        pytest.skip("at full counts: make check")
    outrider = Path(sys.executable).parent / "outrider"
    process = await asyncio.create_subprocess_exec(
        outrider, *words, cwd=tmp_path, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
    )
    out, err = await process.communicate()
    assert process.returncode == 0, f"{out.decode()}\n{err.decode()}"
    if words[0] == "verify":
        assert "LOSSLESS" in out.decode()


@pytest.mark.slow
@pytest.mark.parametrize("words", of(*SERVICES), ids=" ".join)
async def test_services_start_as_printed(words: tuple[str, ...]) -> None:
    """At another port: the printed one may be taken. Those of a real model at full counts alone."""
    role, *flags = words
    if SCALE < 1 and any(word.startswith("smollm2") for word in words):
        pytest.skip("at full counts: make check")
    child = await forked.start(role, [*flags, "--port=0"])
    try:
        await child.wait_ready(240)
    finally:
        await child.stop(10)
