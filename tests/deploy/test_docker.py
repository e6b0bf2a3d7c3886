"""The Dockerfile, read instruction by instruction. No container engine is used: that it builds is not tested here."""

from __future__ import annotations

import fnmatch
import json
import re
import shlex
import tomllib
from dataclasses import dataclass, field

import pytest
from roles import ROLES, ROOT, Role

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
    assert inherited(stage, "EXPOSE") == str(role.port)


def installs(role: Role) -> str:
    """All RUN lines of the stages whose files end up in the image."""
    sources = [
        STAGES[match[1]]
        for stage in lineage(STAGES[role.name])
        for name, arguments in stage.steps
        if name == "COPY" and (match := re.match(r"--from=(\S+)", arguments))
    ]
    return "\n".join(a for source in sources for s in lineage(source) for name, a in s.steps if name == "RUN")


@each_role
def test_only_workers_carry_torch(role: Role) -> None:
    lines = installs(role)
    assert "pip install" in lines
    assert ("torch" in lines) is role.needs_gpu
    assert ("[worker]" in lines) is role.needs_gpu
    pip_lines = [line for line in lines.splitlines() if "pip install" in line]
    assert all("-c constraints.txt" in line for line in pip_lines)


def copied() -> set[str]:
    sources: set[str] = set()
    for stage in STAGES.values():
        for name, arguments in stage.steps:
            if name == "COPY" and not arguments.startswith("--from="):
                sources.update(shlex.split(arguments)[:-1])
    return sources


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
        *wheel,
        "pyproject.toml",
        "constraints.txt",
        project["project"]["readme"],
        *project["project"]["license-files"],
    }
    assert copied() == needed
