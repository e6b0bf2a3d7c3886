"""docs/examples run as printed, as processes of their own, against the model that comes with the package."""

from __future__ import annotations

import asyncio
import re
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from certificates import Authority
from stack import in_process_stack, start

from coordinator.server import serve
from outrider.cli.stack import DEFAULT_MODEL
from outrider.serving.tokens import line_for, new_token
from outrider.settings import CoordinatorSettings

EXAMPLES = Path(__file__).parents[2] / "docs/examples"
EXPECTED = {
    "stream.py": r"\n(stop|length): \d+\.\d\d tokens a step\n$",
    "blocking.py": r"^(?P<text>.+)\nplain decoding says the same, in \d+ steps: '(?P<again>.+)'\n$",
    "conversation.py": r"\n[1-9]\d* prompt tokens were known from the turn before\n5 messages so far\n$",
    "production.py": r".\n0 losses were mended on the way\n$",
    "structured.py": r"^\{'name': '.*', 'big': (True|False)\}\n\d+ of \d+ tokens were drafted\n$",
    "same_text.py": r"0 drafts a round.*\n2 drafts a round.*\n5 drafts a round.*\n1 different text\n$",
}
SMALL = {"kv_cache_bytes": 64 << 20, "num_threads": 1}


def write_secrets(folder: Path) -> dict[str, str]:
    """What production.py finds in its folder, and the settings of a coordinator that wants it."""
    authority, token = Authority(folder), new_token()
    pair = authority.certify("localhost")
    (folder / "tokens").write_text(line_for(token, "acme") + "\n")
    (folder / "token").write_text(token + "\n")
    (folder / "ca.crt").write_bytes(Path(authority.ca).read_bytes())
    return {"tokens_file": str(folder / "tokens"), "tls_cert": pair.cert, "tls_key": pair.key}


@asynccontextmanager
async def services(folder: Path) -> AsyncIterator[tuple[str, str]]:
    """Addresses of two coordinators over the same workers: one as `outrider up` starts it, one that asks for tokens and
    speaks TLS."""
    secured = write_secrets(folder)
    async with in_process_stack(DEFAULT_MODEL, DEFAULT_MODEL, worker=SMALL) as stack:
        guarded = CoordinatorSettings(
            port=0,
            log_level="warning",
            target_workers=(stack.target[0].address,),
            **secured,
        )
        second = await start(serve, guarded)
        try:
            yield stack.address, f"localhost:{second.port}"
        finally:
            await second.close()


def redirected(script: Path, folder: Path, address: str) -> Path:
    """A copy that calls `address`."""
    code = script.read_text(encoding="utf-8")
    assert code.count("localhost:50050") == 1
    copied = folder / script.name
    copied.write_text(re.sub(r"localhost:50050(,localhost:50060)?", address, code), encoding="utf-8")
    return copied


async def run(script: Path, folder: Path) -> str:
    process = await asyncio.create_subprocess_exec(
        sys.executable, script, cwd=folder, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
    )
    out, err = await process.communicate()
    assert process.returncode == 0, f"{script.name}: {err.decode()}"
    return out.decode()


def test_examples_are_short_and_all_are_run() -> None:
    scripts = list(EXAMPLES.iterdir())
    assert {script.name for script in scripts} == EXPECTED.keys()
    for script in scripts:
        code = script.read_text(encoding="utf-8")
        assert len(code.splitlines()) <= 24, script.name
        assert "token=" in code, f"{script.name} is refused where tokens are asked for"


@pytest.mark.slow
async def test_examples_run_as_printed(tmp_path: Path) -> None:
    async with services(tmp_path) as (plain, guarded):
        for script in sorted(EXAMPLES.iterdir()):
            address = guarded if script.name == "production.py" else plain
            out = await run(redirected(script, tmp_path, address), tmp_path)
            found = re.search(EXPECTED[script.name], out, re.DOTALL)
            assert found, f"{script.name} printed {out!r}"
            if "again" in found.groupdict():
                assert found["text"].encode("unicode_escape").decode() == found["again"]
