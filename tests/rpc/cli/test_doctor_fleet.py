"""`outrider doctor --address`: a running coordinator and each of its workers."""

from __future__ import annotations

import asyncio
import json
import zipfile
from pathlib import Path

from stack import in_process_stack
from typer.testing import CliRunner

from outrider.cli.app import app

FLAGS = ("doctor", "--no-models", "--target=toy:vocab=8", "--draft=none", "--json")


async def doctor(*flags: str) -> tuple[int, dict[str, dict[str, str]]]:
    result = await asyncio.to_thread(CliRunner().invoke, app, [*FLAGS, *flags])
    return result.exit_code, {check["name"]: check for check in json.loads(result.stdout)["checks"]}


async def test_a_fleet_is_told_worker_by_worker(tmp_path: Path) -> None:
    async with in_process_stack() as stack:
        path = tmp_path / "all.zip"
        code, checks = await doctor(f"--address={stack.address}", f"--bundle={path}")
        assert code == 0
        for role, workers in (("target", stack.target), ("draft", stack.draft)):
            told = checks[f"{role} worker {workers[0].address}"]
            assert told["state"] == "ok"
            assert " ms away, clock " in told["detail"]
        assert "0 running, 0 waiting" in checks[f"coordinator {stack.address}"]["detail"]
        with zipfile.ZipFile(path) as bundle:
            info = json.loads(bundle.read("server_info.json"))
        assert {worker["role"] for worker in info["workers"]} == {"draft", "target"}
        await stack.target[0].close()
        while True:
            code, checks = await doctor(f"--address={stack.address}")
            if code:
                break
            await asyncio.sleep(0.1)
        assert checks["targets"]["state"] == "fail"


async def test_nobody_there_is_a_failure() -> None:
    code, checks = await doctor("--address=127.0.0.1:1")
    assert code == 1
    assert checks["coordinator 127.0.0.1:1"]["state"] == "fail"
