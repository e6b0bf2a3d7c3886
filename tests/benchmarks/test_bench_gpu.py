"""The GPU benchmark's script: says what it did not run, and works where it runs. No speed is judged here."""

import json
import subprocess
import sys
from pathlib import Path

import gpu
import pytest

SCRIPT = Path(__file__).with_name("gpu.py")
NEEDED_NOT = ("pydantic", "pydantic_settings", "grpc", "prometheus_client")
BLOCKED = f"""
import runpy, sys
class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {NEEDED_NOT}:
            raise ImportError(f"{{name}} is not on that machine")
sys.meta_path.insert(0, Blocked())
sys.argv = ["gpu.py", "--cpu-tiny"]
runpy.run_path({str(SCRIPT)!r}, run_name="__main__")
"""


def run(*command: str) -> tuple[int, list[str], str]:
    done = subprocess.run([sys.executable, *command], capture_output=True, text=True)
    return done.returncode, done.stdout.splitlines(), done.stderr


@pytest.mark.skipif(__import__("torch").cuda.is_available(), reason="there is a GPU: this is about its absence")
def test_without_a_gpu_it_says_so_and_gives_nulls() -> None:
    code, lines, errors = run(str(SCRIPT))
    assert code == 0, errors
    assert "the GPU check was not run" in lines[0]
    assert json.loads(lines[-1]) == dict.fromkeys(gpu.KEYS)


def test_the_whole_script_runs_with_torch_transformers_and_numpy_alone() -> None:
    code, lines, errors = run("-c", BLOCKED)
    assert code == 0, errors
    figures = json.loads(lines[-1])
    assert list(figures) == list(gpu.KEYS)
    assert "the GPU check was not run" in lines[0]
    assert figures["text_equal_float32"] is True
    assert figures["drafted"] > 0
    assert figures["captured"] is False
    assert None not in figures.values()
