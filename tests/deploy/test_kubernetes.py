"""The base as `kubectl kustomize` builds it, against the Kubernetes schemas and the code. No cluster is used."""

from __future__ import annotations

import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml
from conftest import require_tool
from roles import ROLES, ROOT, Role

from outrider.settings import PREFIX

pytestmark = pytest.mark.outside

BASE = ROOT / "deploy/kubernetes/base"
VERSIONS = ("1.29", "1.37")
"""gRPC probes are stable since 1.27; the oldest and the newest schema that we test."""


@cache
def rendered() -> str:
    command = [require_tool("kubectl"), "kustomize", str(BASE)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


@cache
def objects() -> list[dict[str, Any]]:
    return list(yaml.safe_load_all(rendered()))


def of_kind(kind: str) -> dict[str, dict[str, Any]]:
    return {o["metadata"]["name"]: o for o in objects() if o["kind"] == kind}


def pod(role: Role) -> dict[str, Any]:
    return of_kind("Deployment")[role.name]["spec"]["template"]["spec"]


def container(role: Role) -> dict[str, Any]:
    (only,) = pod(role)["containers"]
    return only


def environment(role: Role) -> dict[str, str]:
    (source,) = container(role)["envFrom"]
    config_maps = of_kind("ConfigMap")
    return config_maps[source["configMapRef"]["name"]]["data"]


each_role = pytest.mark.parametrize("role", ROLES.values(), ids=ROLES)


@pytest.mark.parametrize("version", VERSIONS)
def test_every_object_passes_the_strict_schema(tmp_path: Path, version: str) -> None:
    path = tmp_path / "rendered.yaml"
    path.write_text(rendered())
    validator = Path(sys.executable).with_name("kubernetes-validate")
    done = subprocess.run([validator, "--strict", "-k", version, path], capture_output=True, text=True)
    report = done.stdout + done.stderr
    assert done.returncode == 0, report
    # A kind without a schema is only warned about, with exit code 0.
    assert report.count(" passed for ") == len(objects()), report


def test_strict_schema_sees_a_typo(tmp_path: Path) -> None:
    path = tmp_path / "typo.yaml"
    path.write_text(rendered().replace("failureThreshold:", "failureTreshold:", 1))
    validator = Path(sys.executable).with_name("kubernetes-validate")
    done = subprocess.run([validator, "--strict", "-k", VERSIONS[-1], path], capture_output=True, text=True)
    assert done.returncode != 0
    assert "failureTreshold" in done.stdout + done.stderr


def test_there_is_one_deployment_per_role_and_everything_has_the_namespace() -> None:
    assert set(of_kind("Deployment")) == set(ROLES)
    assert of_kind("Deployment")["coordinator"]["spec"]["replicas"] >= 2
    (namespace,) = of_kind("Namespace")
    assert {o["metadata"]["namespace"] for o in objects() if o["kind"] != "Namespace"} == {namespace}


@each_role
def test_ports_are_the_servers_own(role: Role) -> None:
    assert environment(role)["OUTRIDER_PORT"] == str(role.port)
    assert [(port["name"], port["containerPort"]) for port in container(role)["ports"]] == [("grpc", role.port)]
    services = [s for s in of_kind("Service").values() if s["spec"]["selector"]["app.kubernetes.io/name"] == role.name]
    assert services
    for service in services:
        assert [(p["port"], p["targetPort"]) for p in service["spec"]["ports"]] == [(role.port, "grpc")]


@each_role
def test_selectors_reach_their_pods(role: Role) -> None:
    deployment = of_kind("Deployment")[role.name]["spec"]
    labels = deployment["template"]["metadata"]["labels"]
    for selector in (deployment["selector"]["matchLabels"], of_kind("Service")[role.name]["spec"]["selector"]):
        assert selector.items() <= labels.items()
    assert of_kind("Service")[role.name]["spec"]["clusterIP"] == "None"


@each_role
def test_variables_are_settings_and_their_values_load(role: Role, monkeypatch: pytest.MonkeyPatch) -> None:
    variables = environment(role)
    fields = {PREFIX + name.upper() for name in role.settings.model_fields}
    assert [name for name in variables if name not in fields] == []
    for name, value in variables.items():
        assert isinstance(value, str)
        monkeypatch.setenv(name, value)
    settings = role.settings()
    assert settings.host == "0.0.0.0"
    assert not pod(role)["enableServiceLinks"], "service links would set OUTRIDER_PORT"


def test_coordinator_is_pointed_at_the_workers_headless_services() -> None:
    variables = environment(ROLES["coordinator"])
    for name, role in (
        ("OUTRIDER_TARGET_WORKERS", ROLES["target-worker"]),
        ("OUTRIDER_DRAFT_WORKERS", ROLES["draft-worker"]),
    ):
        assert variables[name] == f"dns:///{role.name}:{role.port}"


@each_role
def test_probes_ask_the_health_service(role: Role) -> None:
    probes = {name: container(role)[name] for name in ("startupProbe", "readinessProbe", "livenessProbe")}
    assert {probe["grpc"]["port"] for probe in probes.values()} == {role.port}
    assert probes["readinessProbe"]["grpc"]["service"] == role.service
    assert probes["livenessProbe"]["grpc"].get("service", "") == "", "liveness must not depend on other services"
    startup = probes["startupProbe"]
    # A coordinator without workers is alive but not ready: it must not be restarted for that.
    assert startup["grpc"].get("service", "") == (role.service if role.needs_gpu else "")
    allowed_s = startup["periodSeconds"] * startup["failureThreshold"]
    assert allowed_s >= (1200 if role.needs_gpu else 60)


@each_role
def test_pods_are_confined(role: Role) -> None:
    spec, only = pod(role), container(role)
    assert spec["automountServiceAccountToken"] is False
    account = of_kind("ServiceAccount")[spec["serviceAccountName"]]
    assert account["automountServiceAccountToken"] is False
    assert spec["securityContext"]["runAsNonRoot"] is True
    assert spec["securityContext"]["runAsUser"] > 0
    assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    assert only["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }
    mounted = {mount["mountPath"]: mount["name"] for mount in only["volumeMounts"]}
    assert set(mounted) == ({"/tmp", "/cache"} if role.needs_gpu else {"/tmp"})
    assert set(mounted.values()) == {volume["name"] for volume in spec["volumes"]}


@each_role
def test_resources_are_bounded(role: Role) -> None:
    resources = container(role)["resources"]
    for kind in ("requests", "limits"):
        wanted = {"cpu", "memory"} | ({"nvidia.com/gpu"} if role.needs_gpu else set())
        assert set(resources[kind]) == wanted
    assert resources["requests"].get("nvidia.com/gpu") == resources["limits"].get("nvidia.com/gpu")


def test_drafts_go_to_small_cards_and_targets_to_large_ones() -> None:
    workers = ("draft-worker", "target-worker")
    pools = {name: pod(ROLES[name])["nodeSelector"]["outrider.dev/gpu-pool"] for name in workers}
    assert pools == {"draft-worker": "small", "target-worker": "large"}
    for name in pools:
        assert [t["key"] for t in pod(ROLES[name])["tolerations"]] == ["nvidia.com/gpu"]
    assert "nodeSelector" not in pod(ROLES["coordinator"])


@each_role
def test_drain_ends_before_the_kill(role: Role) -> None:
    variables = environment(role)
    drain_s = float(variables["OUTRIDER_DRAIN_DELAY_S"]) + float(variables["OUTRIDER_DRAIN_GRACE_S"])
    assert pod(role)["terminationGracePeriodSeconds"] >= drain_s + 10
