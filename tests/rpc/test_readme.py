"""The README's client runs as printed, and its commands exist."""

import asyncio
import re
import sys
from pathlib import Path

import pytest
from stack import in_process_stack

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")


@pytest.mark.slow
async def test_the_client_example(tmp_path):
    code = re.search(r"<!-- client-example -->\n```python\n(.*?)```", README, re.S).group(1)
    assert len(code.splitlines()) <= 25
    prompt = re.search(r"messages = (.*)\n", code).group(0)
    code = code.replace(prompt, "messages = [5, 3, 2]\n")  # toys have no chat template
    async with in_process_stack() as stack:
        script = tmp_path / "example.py"
        script.write_text(code.replace("localhost:50050", stack.address), encoding="utf-8")
        process = await asyncio.create_subprocess_exec(
            sys.executable, script, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
        )
        out, err = await asyncio.wait_for(process.communicate(), 60)
    assert process.returncode == 0, err.decode()
    assert "seed 7, rule coupled" in out.decode()
    assert "tokens a step" in out.decode()


def test_every_make_target_and_command_exists():
    targets = set(re.findall(r"^([a-z-]+):.*##", (ROOT / "Makefile").read_text(encoding="utf-8"), re.M))
    named = set(re.findall(r"\bmake ([a-z][a-z-]+)", README))
    assert named
    assert named <= targets
    from typer.main import get_command

    from outrider.cli.app import app

    commands = set(get_command(app).commands)
    used = set(re.findall(r"^\s+(?:\.venv/bin/)?outrider ([a-z-]+)", README, re.M))
    assert used
    assert used <= commands
