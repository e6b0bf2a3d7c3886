"""SECURITY.md's commands, from an empty folder to a text: as printed, but for ports that are free."""

from __future__ import annotations

import asyncio
import os
import re
import shlex
import sys
from contextlib import AsyncExitStack
from pathlib import Path

import pytest
from conftest import require_tool
from ports import free_port

from outrider.cli.process import Child

ROOT = Path(__file__).parents[3]


async def shell(command: str) -> str:
    """What it prints."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    process = await asyncio.create_subprocess_exec(
        "bash", "-ec", command, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
        env={**os.environ, "PATH": path},
    )  # fmt: skip
    out, err = await process.communicate()
    assert process.returncode == 0, err.decode()
    return out.decode()


@pytest.mark.slow
@pytest.mark.outside
async def test_who_follows_the_page_gets_a_text_and_nobody_else_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    require_tool("openssl")
    monkeypatch.chdir(tmp_path)
    page = re.sub(r"\\\n\s*", "", (ROOT / "SECURITY.md").read_text(encoding="utf-8"))
    block = page.partition("In an empty folder")[2].partition("On several machines")[0].replace("CHECKOUT", str(ROOT))
    ports = {"50052": str(free_port()), "50050": str(free_port())}
    block = re.sub("|".join(ports), lambda found: ports[found[0]], block)
    *files, target, coordinator, call = re.findall(r"(?m)^ {4}(\S.*)$", block)
    assert len(files) == 4
    await shell("\n".join(files))
    async with AsyncExitStack() as cleanup:
        for command, port in zip((target, coordinator), ports.values(), strict=True):
            _, role, *flags = shlex.split(command)
            child = await Child.start(role, [*flags, f"--port={port}", "--drain-grace-s=0"])
            cleanup.push_async_callback(child.stop, 10)
            await child.wait_ready(240)
        assert (await shell(f"{call} --max-tokens 4")).strip()
        with pytest.raises(AssertionError, match="token"):
            await shell(f"{call.replace('OUTRIDER_TOKEN_FILE=token ', '')} --max-tokens 4")
