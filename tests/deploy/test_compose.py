"""The Compose file: its keys, and what it says against the code. No container engine is used."""

from __future__ import annotations

import asyncio
import copy
import os
import re
import sys
from typing import Any

import pytest
import yaml
from manifests import own_faults
from roles import METRICS_PORT, ROLES, ROOT, VERSION, Role
from stack import start

import coordinator.server
import target_worker.server
from outrider.serving.naming import split_names
from outrider.settings import CoordinatorSettings, TargetWorkerSettings

FILE = ROOT / "deploy/compose.yaml"
COMPOSE: dict[str, Any] = yaml.safe_load(FILE.read_text())
HEALTH_SERVICE = "HEALTH_SERVICE"

each_role = pytest.mark.parametrize("role", ROLES.values(), ids=ROLES)


def service(role: Role) -> dict[str, Any]:
    return COMPOSE["services"][role.name]


def seconds(duration: str) -> float:
    units = {"ms": 0.001, "s": 1, "m": 60, "h": 3600}
    return sum(int(number) * units[unit] for number, unit in re.findall(r"(\d+)(ms|s|m|h)", duration))


def test_keys_are_those_of_the_schema() -> None:
    assert own_faults(COMPOSE, "compose") == []
    for path, value in (("read_onyl", True), ("stop_grace_period", 45), ("ports", ["50050:50050"])):
        broken = copy.deepcopy(COMPOSE)
        broken["services"]["coordinator"][path] = value
        assert own_faults(broken, "compose") != []


def test_runs_one_service_per_role() -> None:
    assert set(COMPOSE["services"]) == set(ROLES)


@each_role
def test_is_built_as_its_role_from_the_dockerfile(role: Role) -> None:
    build = service(role)["build"]
    assert build["target"] == role.name
    context = FILE.parent / build["context"]
    assert context.resolve() == ROOT
    assert (context / build["dockerfile"]).is_file()
    assert service(role)["image"] == f"outrider-{role.name}:{VERSION}"


@each_role
def test_variables_are_settings_and_load(role: Role, monkeypatch: pytest.MonkeyPatch) -> None:
    variables = service(role)["environment"]
    assert set(variables) - role.variables == {HEALTH_SERVICE}
    assert variables[HEALTH_SERVICE] == role.service
    for name, value in variables.items():
        default = re.fullmatch(r"\$\{\w+:-(.*)\}", value)
        monkeypatch.setenv(name, default[1] if default else value)
    settings = role.settings()
    assert (settings.host, settings.port, settings.metrics_port) == ("0.0.0.0", role.port, METRICS_PORT)
    assert settings.metrics_host == "0.0.0.0", "or this machine would not reach what is published"
    assert settings.insecure, "without it none listens there"
    assert seconds(service(role)["stop_grace_period"]) >= settings.drain_grace_s + settings.drain_delay_s + 10
    if isinstance(settings, TargetWorkerSettings):
        assert settings.model == "smollm2-135m"


def test_coordinator_finds_the_others_by_their_names_and_is_reached_from_this_machine_only() -> None:
    variables = service(ROLES["coordinator"])["environment"]
    for variable, name in (("OUTRIDER_TARGET_WORKERS", "target-worker"), ("OUTRIDER_DRAFT_WORKERS", "draft-worker")):
        _, (address,) = split_names((variables[variable],), variable)
        assert address == f"{name}:{ROLES[name].port}"
    published = [f"127.0.0.1:{port}:{port}" for port in (ROLES["coordinator"].port, METRICS_PORT)]
    assert service(ROLES["coordinator"])["ports"] == published
    assert all("ports" not in service(role) for role in ROLES.values() if role.is_worker)


@each_role
def test_containers_are_confined(role: Role) -> None:
    found = service(role)
    assert found["read_only"] is True
    assert found["cap_drop"] == ["ALL"]
    assert found["security_opt"] == ["no-new-privileges:true"]
    assert found["tmpfs"] == ["/tmp"]
    assert found.get("volumes", []) == (["weights:/cache"] if role.is_worker else [])
    assert set(COMPOSE["volumes"]) == {"weights"}


async def exit_code(role: Role, port: int) -> int | None:
    """Of the health check, run here as it would be run in the container."""
    kind, python, *arguments = service(role)["healthcheck"]["test"]
    assert (kind, python) == ("CMD", "python")
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        *arguments,
        env={**os.environ, "OUTRIDER_PORT": str(port), HEALTH_SERVICE: role.service},
        stderr=asyncio.subprocess.DEVNULL,
    )
    await process.wait()
    return process.returncode


async def test_health_check_follows_the_service() -> None:
    settings = TargetWorkerSettings(port=0, model="toy:vocab=16", drain_grace_s=0, log_level="warning")
    worker = await start(target_worker.server.serve, settings)
    alone = await start(coordinator.server.serve, CoordinatorSettings(port=0, drain_grace_s=0, log_level="error"))
    assert await exit_code(ROLES["target-worker"], worker.port) == 0
    assert await exit_code(ROLES["coordinator"], alone.port) == 1, "it has no target worker"
    await worker.close()
    await alone.close()
    assert await exit_code(ROLES["target-worker"], worker.port) == 1
