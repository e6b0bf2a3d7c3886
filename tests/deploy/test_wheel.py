"""The wheel: what is in it, and what it needs."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from email import message_from_string
from pathlib import Path

import pytest
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
