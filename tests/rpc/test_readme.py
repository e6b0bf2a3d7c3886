"""The README's client and its calls run as printed, and its other commands are read as they stand."""

import asyncio
import re
import shlex
import sys
from collections.abc import Iterable
from pathlib import Path

import pytest
from google.protobuf import json_format
from pages import Page, all_flags, find_command
from stack import in_process_stack
from typer.testing import CliRunner

from outrider.cli.app import app
from outrider.cli.stack import DEFAULT_MODEL
from outrider.serving.channel import open_channel
from outrider.v1 import generation_pb2

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
SMALL = {"kv_cache_bytes": 64 << 20, "num_threads": 1}


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


PAGE = Page(ROOT / "README.md", README)
TOY = "toy:vocab=64"
FILLED = {
    "T": TOY, "D": TOY, "SMALL": TOY, "DIR": "made", "NAME": "acme", "FILE": "kept", "FLEET.toml": "fleet.toml",
    "REQUEST_ID": "first", "REQUEST_ID|FILE": "first",
}  # fmt: skip
"""What stands for a reader's own."""
CALLS = ("generate", "trace", "audit", "top", "chat")
"""They call a coordinator, in this order: what was generated is looked at."""
ELSEWHERE = {"up", "verify", "bench", "doctor", "plan"}
"""Tests of their own run them with such arguments."""


def outrider_commands(lines: Iterable[list[str]]) -> list[list[str]]:
    """Their words behind the program's name."""
    return [[FILLED.get(word, word) for word in words] for program, *words in lines if program == "outrider"]


def test_every_make_target_and_command_exists() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    named = set(re.findall(r"\bmake ([a-z][a-z-]+)", README))
    assert named
    assert named <= set(re.findall(r"^([a-z-]+):.*##", makefile, re.M))
    settings = {word.partition("=")[0] for word in re.findall(r"\bmake [a-z-]+ ([A-Z_]+=)", README)}
    assert settings
    scripts = "".join(path.read_text(encoding="utf-8") for path in (ROOT / "tests").rglob("*.py")) + makefile
    assert {name for name in settings if not re.search(rf"\b{name}\b", scripts)} == set()
    words = [word for word in PAGE.words if not word.startswith("pip ")]
    flags = {part.partition("=")[0] for word in words for part in word.split() if part.startswith("--")}
    assert flags <= all_flags()
    assert {program for program, *_ in PAGE.commands} == {"make", "pip", "outrider", "grpcurl"}


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_every_command_is_taken_as_printed() -> None:
    passing = [shlex.split(word) for word in PAGE.words]
    commands = outrider_commands([*PAGE.commands, *(words for words in passing if len(words) > 2)])
    assert len(commands) > 15
    for words in commands:
        command, arguments = find_command(words)
        command.make_context(command.name, list(arguments))  # raises on a flag or a value that is none


@pytest.mark.slow
async def test_calls_run_as_printed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the model that comes with the package, which they are written for."""
    monkeypatch.chdir(tmp_path)  # some write files
    commands = outrider_commands(PAGE.commands)
    assert {words[0] for words in commands} == {*CALLS, *ELSEWHERE}
    more = {"generate": ["--request-id", "first"], "top": ["--once"]}
    async with in_process_stack(
        DEFAULT_MODEL, None, worker=SMALL, coordinator={"record_streams": 4, "default_max_tokens": 8}
    ) as stack:
        for words in sorted(
            (words for words in commands if words[0] in CALLS), key=lambda words: CALLS.index(words[0])
        ):
            arguments = [*words, *more.get(words[0], ()), "--address", stack.address]
            done = await asyncio.to_thread(CliRunner().invoke, app, arguments, input="Hi\n")
            assert done.exit_code == 0, f"{words}: {done.output}"
            assert done.output.strip(), words
        assert (tmp_path / FILLED["FILE"]).read_text().startswith("<svg")
        (*_, body, address, method) = next(command for command in PAGE.commands if command[0] == "grpcurl")
        assert address == "localhost:50050"
        request = json_format.Parse(body, generation_pb2.GenerateRequest())
        async with open_channel(stack.address) as channel:
            answer = channel.unary_stream(f"/{method}")(request.SerializeToString())
            events = [generation_pb2.GenerateResponse.FromString(event).WhichOneof("event") async for event in answer]
        assert (events[0], events[-1]) == ("started", "complete")
