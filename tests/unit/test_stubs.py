"""The committed stubs are what the protos generate, and the protos pass buf: style, and the wire of older peers."""

import shutil
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


def breaks(protos: Path) -> str:
    """What buf says against these protos beside the committed baseline; empty: older peers go on."""
    baseline = ROOT / "protos/baseline.binpb"
    command = [require_tool("buf"), "breaking", str(protos), "--against", str(baseline)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode in (0, 100), done.stderr  # 100: it did its work, and found something
    return done.stdout


@pytest.mark.outside
def test_the_wire_breaks_no_peer_of_the_baseline() -> None:
    found = breaks(ROOT / "protos")
    assert not found, f"older peers cannot speak this; if that is meant, `make wire-baseline BREAKING=1`:\n{found}"


@pytest.mark.outside
@pytest.mark.parametrize(
    ("old", "new", "what"),
    [
        ("  uint32 num_prompt_tokens = 5;", "  uint32 num_prompt_tokens = 55;", "num_prompt_tokens"),
        ("  uint32 num_prompt_tokens = 5;", "  string num_prompt_tokens = 5;", "changed type"),
        ("rpc GetTrace(", "rpc GetRounds(", "GetTrace"),
        ("  GAMMA_CAUSE_PREFILL = 14;", "  GAMMA_CAUSE_FIRST = 14;", "GAMMA_CAUSE_FIRST"),
    ],
    ids=["renumbered", "retyped", "method gone", "renamed value"],
)
def test_a_wire_that_older_peers_cannot_speak_is_found(old: str, new: str, what: str, tmp_path: Path) -> None:
    changed = shutil.copytree(ROOT / "protos", tmp_path / "protos")
    path = changed / "outrider/v1/generation.proto"
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))
    assert what in breaks(changed)
