"""The three roles as the code has them: what manifests and images must agree with."""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from pathlib import Path

from outrider.settings import PREFIX, CoordinatorSettings, DraftWorkerSettings, ServerSettings, TargetWorkerSettings
from outrider.v1 import draft_pb2, generation_pb2, target_pb2

ROOT = Path(__file__).parents[2]
METRICS_PORT = 9464
"""Of every container: the code has no default, since processes on one machine cannot share one."""
HEALTH_PORT = 9465
VERSION: str = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]


@dataclass(frozen=True)
class Role:
    """`service` is the full name under which the role's server reports its health."""

    name: str
    settings: type[ServerSettings]
    service: str

    @property
    def port(self) -> int:
        return self.settings.model_fields["port"].default

    @property
    def is_worker(self) -> bool:
        return self.name != "coordinator"

    @property
    def variables(self) -> set[str]:
        return {PREFIX + name.upper() for name in self.settings.model_fields}


def _service(module: object, name: str) -> str:
    return module.DESCRIPTOR.services_by_name[name].full_name  # type: ignore[attr-defined]


ROLES = {
    role.name: role
    for role in (
        Role("coordinator", CoordinatorSettings, _service(generation_pb2, "GenerationService")),
        Role("draft-worker", DraftWorkerSettings, _service(draft_pb2, "DraftService")),
        Role("target-worker", TargetWorkerSettings, _service(target_pb2, "TargetService")),
    )
}


def pinned(package: str) -> str:
    """Its version in constraints.txt."""
    (version,) = (
        line.partition("==")[2]
        for line in (ROOT / "constraints.txt").read_text().splitlines()
        if line.partition("==")[0] == package
    )
    return version
