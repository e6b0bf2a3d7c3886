"""The commands of deploy/README.md, as far as they can be followed without a cluster or a container engine."""

from __future__ import annotations

import re
import shlex

import pytest
import typer.testing
from manifests import of_kind, pods
from roles import METRICS_PORT, ROLES, ROOT, VERSION
from test_docker import STAGES

from outrider.cli.app import app

pytestmark = pytest.mark.outside

README = (ROOT / "deploy/README.md").read_text()
COMMANDS = [
    shlex.split(line, comments=True)
    for line in re.findall(r"^ {4,}(\S.*)$", README, re.MULTILINE)
    if not line.startswith(("for ", "done"))
]


def commands(*start: str) -> list[list[str]]:
    found = [command[len(start) :] for command in COMMANDS if command[: len(start)] == list(start)]
    assert found, f"none begins with {start}"
    return found


def test_every_command_is_of_a_kind_that_is_checked_here() -> None:
    known = {"docker build", "docker compose", "kubectl apply", "kubectl label", "kubectl -n", "kind load"}
    known |= {"outrider generate", "outrider coordinator", "outrider ray", "ray start", "ray job", "curl -s"}
    known |= {
        "deploy/kubernetes/secrets.sh secrets",
        "OUTRIDER_TLS_CA=secrets/ca.crt OUTRIDER_TOKEN_FILE=secrets/token",
    }
    assert {" ".join(command[:2]) for command in COMMANDS} == known


def test_paths_exist() -> None:
    paths = {word for word in re.findall(r"`((?:deploy|components)/[\w./-]+)`", README) if "." not in word}
    paths |= {word for command in COMMANDS for word in command if word.startswith("deploy/")}
    assert len(paths) > 5
    for path in paths:
        assert any((ROOT / folder / path).exists() for folder in ("", "deploy/kubernetes")), path


def test_images_are_targets_of_this_version() -> None:
    (roles,) = re.findall(r"for role in (.*); do", README)
    assert set(roles.split()) == {*ROLES, "ray"} <= set(STAGES)
    (build,) = commands("docker", "build")
    assert build == ["-f", "deploy/docker/Dockerfile", "--target", "$role", "-t", f"outrider-$role:{VERSION}", "."]
    (loaded,) = commands("kind", "load", "docker-image")
    assert set(loaded) == {pod.container["image"] for pod in pods("cpu").values()}


def test_objects_and_labels_are_those_of_the_overlays() -> None:
    for command in commands("kubectl", "apply"):
        assert command[0] == "-k"
        assert (ROOT / command[1] / "kustomization.yaml").is_file()
    for overlay, words in (("cpu", "rollout status"), ("cpu", "port-forward"), ("ray", "get rayjob")):
        (rest,) = commands("kubectl", "-n", "outrider", *words.split())
        kind, _, name = rest[0].rpartition("/")
        assert name in of_kind(overlay, {"deployment": "Deployment", "service": "Service", "": "RayJob"}[kind])
    selected = {tuple(*pod.spec["nodeSelector"].items()) for pod in pods("gpu").values() if "nodeSelector" in pod.spec}
    labelled = {tuple(command[1].split("=")) for command in commands("kubectl", "label", "node")}
    assert labelled == selected
    assert "`outrider.dev/client=true`" in README
    assert f"port {METRICS_PORT}" in README


@pytest.mark.parametrize("command", ["generate", "coordinator"])
def test_flags_are_the_programs_own(command: str) -> None:
    (arguments,) = commands("outrider", command)
    shown = typer.testing.CliRunner().invoke(app, [command, "--help"], env={"COLUMNS": "200"}).output
    flags = [word for word in arguments if word.startswith("--")]
    assert flags
    assert all(flag in shown for flag in flags)


def test_ray_is_given_a_fleet_file_that_loads_by_a_command_that_is_there() -> None:
    pytest.importorskip("ray")
    from ray.dashboard.modules.job.cli import submit

    from deploy.ray.config import load_fleet

    ((verb, file),) = commands("outrider", "ray")
    assert load_fleet(ROOT / file).pools
    ((*flags, separator, program, group, job_verb, job_file),) = commands("ray", "job", "submit")
    assert (separator, program, group, job_verb, job_file) == ("--", "outrider", "ray", verb, file)
    known = {option for parameter in submit.params for option in parameter.opts}
    assert {flag for flag in flags if flag.startswith("--")} <= known
    shown = typer.testing.CliRunner().invoke(app, ["ray", verb, "--help"], env={"COLUMNS": "200"}).output
    assert all(flag in shown for flag in ("--detach", "--address"))
