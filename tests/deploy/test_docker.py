"""The Dockerfile, read instruction by instruction; at full scale its install steps run in clean environments.

No container engine is used: that the images build is not tested here.
"""

from __future__ import annotations

import fnmatch
import json
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from conftest import SCALE
from roles import METRICS_PORT, ROLES, ROOT, Role, pinned

DOCKERFILE = ROOT / "deploy/docker/Dockerfile"


@dataclass
class Stage:
    """One FROM and what follows it, as (instruction, arguments)."""

    base: str
    name: str
    steps: list[tuple[str, str]] = field(default_factory=list)

    def last(self, instruction: str) -> str | None:
        return next((arguments for name, arguments in reversed(self.steps) if name == instruction), None)


def parse() -> dict[str, Stage]:
    text = re.sub(r"^\s*#.*\n", "", DOCKERFILE.read_text(), flags=re.MULTILINE).replace("\\\n", " ")
    stages: dict[str, Stage] = {}
    for line in filter(None, map(str.strip, text.splitlines())):
        instruction, arguments = line.split(maxsplit=1)
        if instruction == "FROM":
            base, _, name = arguments.split()
            stage = stages[name] = Stage(base, name)
        else:
            stage.steps.append((instruction, arguments))
    return stages


STAGES = parse()


def lineage(stage: Stage) -> list[Stage]:
    """The stage and the stages of this file that it stands on, nearest first."""
    return [stage, *(lineage(STAGES[stage.base]) if stage.base in STAGES else [])]


def inherited(stage: Stage, instruction: str) -> str | None:
    return next((found for s in lineage(stage) if (found := s.last(instruction)) is not None), None)


each_role = pytest.mark.parametrize("role", ROLES.values(), ids=ROLES)


def test_outside_images_are_pinned_by_tag() -> None:
    outside = {stage.base for stage in STAGES.values()} - set(STAGES)
    assert outside
    assert all(re.fullmatch(r"[a-z/]+:\d+\.\d+\.\d+[a-z0-9-]*", image) for image in outside), outside


@each_role
def test_each_role_is_a_target_that_runs_its_command_as_nobody_special(role: Role) -> None:
    stage = STAGES[role.name]
    assert json.loads(inherited(stage, "ENTRYPOINT") or "[]") == ["outrider", role.name]
    user, group = map(int, (inherited(stage, "USER") or "0:0").split(":"))
    assert user >= 10000
    assert group >= 10000
    assert inherited(stage, "EXPOSE") == f"{role.port} {METRICS_PORT}"


def installs(target: str) -> str:
    """All RUN lines of the stages whose files end up in the image."""
    sources = [
        STAGES[match[1]]
        for stage in lineage(STAGES[target])
        for name, arguments in stage.steps
        if name == "COPY" and (match := re.match(r"--from=(\S+)", arguments))
    ]
    return "\n".join(a for source in sources for s in lineage(source) for name, a in s.steps if name == "RUN")


@each_role
def test_only_workers_carry_torch(role: Role) -> None:
    lines = installs(role.name)
    assert "pip install" in lines
    assert ("torch" in lines) is role.is_worker
    assert ("[worker,tracing]" in lines) is role.is_worker
    assert "ray" not in lines
    pip_lines = [line for line in lines.splitlines() if "pip install" in line]
    assert all("-c constraints.txt" in line for line in pip_lines)


def copied() -> set[str]:
    sources: set[str] = set()
    for stage in STAGES.values():
        for name, arguments in stage.steps:
            if name == "COPY" and not arguments.startswith("--from="):
                sources.update(shlex.split(arguments)[:-1])
    return sources


def test_ray_nodes_have_the_workers_the_driver_and_what_kuberay_asks() -> None:
    stage = STAGES["ray"]
    assert "[worker,tracing,ray]" in installs("ray")
    assert "ray[default]" in installs("ray")
    assert int((inherited(stage, "USER") or "0:0").split(":")[0]) >= 10000
    root = next(a.partition("=")[2] for name, a in stage.steps if name == "ENV" and a.startswith("PYTHONPATH="))
    copies = dict(reversed(a.split()) for name, a in stage.steps if name == "COPY" and not a.startswith("--from="))
    assert copies == {f"{root}/deploy/": "deploy/__init__.py", f"{root}/deploy/ray": "deploy/ray"}
    # the agent's own dependencies are pinned too
    assert pinned("aiohttp")
    assert pinned("opencensus")


def test_what_is_copied_exists_and_is_let_through() -> None:
    allowed = [
        line.removeprefix("!")
        for line in DOCKERFILE.with_name("Dockerfile.dockerignore").read_text().splitlines()
        if line.startswith("!")
    ]
    for source in copied():
        assert (ROOT / source).exists(), source
        assert any(fnmatch.fnmatch(source, pattern) for pattern in allowed), f"{source} is ignored"


def test_copies_all_that_the_package_is_built_from() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    wheel = project["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"]
    needed = {
        "deploy/__init__.py",
        "deploy/ray",
        *wheel,
        "pyproject.toml",
        "constraints.txt",
        project["project"]["readme"],
        *project["project"]["license-files"],
    }
    assert copied() == needed


def pip_steps(target: str) -> list[list[str]]:
    """The arguments of each `pip install`, in order."""
    lines = [line for line in installs(target).splitlines() if line.startswith("pip install")]
    return [shlex.split(line)[2:] for line in lines]


@pytest.mark.skipif(SCALE < 1, reason="installs a whole environment: make check only")
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("target", ["coordinator", "target-worker", "ray"])
def test_install_steps_work_in_a_clean_environment(target: str, tmp_path: Path) -> None:
    """Really for the coordinator. Workers' gigabytes are resolved to the last package and not fetched."""
    assert pip_steps(target)
    for source in copied():
        if (ROOT / source).is_dir():
            shutil.copytree(ROOT / source, tmp_path / source, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            (tmp_path / source).parent.mkdir(exist_ok=True)
            shutil.copy(ROOT / source, tmp_path / source)
    subprocess.run([sys.executable, "-m", "venv", tmp_path / "venv"], check=True)
    python = tmp_path / "venv/bin/python"
    how = ["--quiet"] if target == "coordinator" else ["--quiet", "--dry-run"]
    for arguments in pip_steps(target):
        done = subprocess.run(
            [python, "-m", "pip", "install", *how, *arguments], cwd=tmp_path, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stderr
    if target == "coordinator":
        program = "import outrider.client, coordinator.server, importlib.util as u; print(u.find_spec('torch'))"
        done = subprocess.run(
            [python, "-c", program], cwd=tmp_path / "venv", capture_output=True, text=True, check=True
        )
        assert done.stdout.split() == ["None"]
        done = subprocess.run([python.with_name("outrider"), "--help"], cwd=tmp_path, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        assert "coordinator" in done.stdout
