"""The committed stubs are what the protos generate, and the protos pass buf."""

import subprocess
import sys
from pathlib import Path

import pytest
from conftest import require_tool

ROOT = Path(__file__).parents[2]
PROTOS = sorted((ROOT / "protos").rglob("*.proto"))


def test_stubs_regenerate_to_no_diff(tmp_path: Path) -> None:
    outputs = [f"--{kind}={tmp_path}" for kind in ("python_out", "pyi_out", "grpc_python_out")]
    command = [sys.executable, "-m", "grpc_tools.protoc", f"-I{ROOT / 'protos'}", *outputs, *map(str, PROTOS)]
    subprocess.run(command, check=True)
    generated = {p.name: p.read_text() for p in (tmp_path / "outrider/v1").iterdir()}
    committed = {p.name: p.read_text() for p in (ROOT / "outrider/v1").iterdir() if "_pb2" in p.name and p.is_file()}
    assert len(generated) == 3 * len(PROTOS)
    assert sorted(committed) == sorted(generated)
    stale = [name for name, text in generated.items() if committed[name] != text]
    assert not stale, f"run `make proto`: {stale}"


@pytest.mark.outside
@pytest.mark.parametrize("arguments", [("lint",), ("format", "--diff", "--exit-code")], ids=["lint", "format"])
def test_protos_pass_buf(arguments: tuple[str, ...]) -> None:
    done = subprocess.run([require_tool("buf"), *arguments, "protos"], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
