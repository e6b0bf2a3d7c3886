"""The wheel: what is in it, and (at full scale) that a base install of it serves without torch."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from email import message_from_string
from pathlib import Path

import pytest
from conftest import SCALE
from roles import ROOT

pytestmark = pytest.mark.slow
PACKAGES = ("outrider", "coordinator", "draft_worker", "target_worker")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", str(folder), str(ROOT)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    (path,) = folder.glob("*.whl")
    return path


def test_holds_every_source_and_data_file_of_the_packages(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = {name for name in archive.namelist() if ".dist-info/" not in name}
    expected = {
        str(path.relative_to(ROOT))
        for package in PACKAGES
        for path in (ROOT / package).rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    assert names == expected
    assert {f"{package}/py.typed" for package in PACKAGES} <= names
    assert {"outrider/v1/generation_pb2.py", "outrider/v1/generation_pb2.pyi", "outrider/client.py"} <= names


def test_base_install_is_light_and_brings_the_command(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        texts = {Path(name).name: archive.read(name).decode() for name in archive.namelist() if ".dist-info/" in name}
    assert "outrider = outrider.cli.main:main" in texts["entry_points.txt"]
    metadata = message_from_string(texts["METADATA"])
    assert metadata["License-Expression"] == "Apache-2.0"
    requirements = metadata.get_all("Requires-Dist") or []
    base = [r for r in requirements if "extra ==" not in r]
    assert any(r.startswith("grpcio") for r in base)
    assert not [r for r in base if r.startswith(("torch", "transformers", "ray"))]


@pytest.mark.skipif(SCALE < 1, reason="installs a whole environment: make check only")
@pytest.mark.timeout(900)
def test_base_install_in_a_clean_environment(wheel: Path, tmp_path: Path) -> None:
    python = tmp_path / "venv/bin/python"
    subprocess.run([sys.executable, "-m", "venv", tmp_path / "venv"], check=True)
    constraints = str(ROOT / "constraints.txt")
    subprocess.run([python, "-m", "pip", "install", "--quiet", str(wheel), "-c", constraints], check=True)
    program = "import outrider.client, coordinator.server, importlib.util as u; print(u.find_spec('torch'))"
    done = subprocess.run([python, "-c", program], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["None"]
    done = subprocess.run([python.with_name("outrider"), "--help"], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "coordinator" in done.stdout
