"""The gateway's component in an overlay, against the schemas and the code; and the image that has it."""

import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from conftest import require_tool
from manifests import FOLDER, faults, selects
from roles import METRICS_PORT, ROOT, VERSION

from coordinator.gateway.app import build_app
from coordinator.gateway.service import Gateway
from outrider.client import Client
from outrider.serving.naming import split_names
from outrider.settings import PREFIX, GatewaySettings

pytestmark = pytest.mark.outside
PORT = GatewaySettings.model_fields["port"].default


@pytest.fixture(scope="module")
def rendered(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, str], Any]:
    """By kind and name: the cpu overlay with the gateway."""
    kubectl, folder = require_tool("kubectl"), tmp_path_factory.mktemp("kubernetes")
    shutil.copytree(FOLDER, folder / "kubernetes")
    own = folder / "kubernetes/overlays/with-gateway"
    own.mkdir()
    lines = {"resources": ["../cpu"], "components": ["../../components/gateway"]}
    head = {"apiVersion": "kustomize.config.k8s.io/v1beta1", "kind": "Kustomization", "namespace": "outrider"}
    (own / "kustomization.yaml").write_text(yaml.safe_dump(head | lines))
    done = subprocess.run([kubectl, "kustomize", str(own)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return {(thing["kind"], thing["metadata"]["name"]): thing for thing in yaml.safe_load_all(done.stdout)}


def pod_of(rendered: dict[tuple[str, str], Any], name: str) -> Any:
    return rendered["Deployment", name]["spec"]["template"]


def variables_of(rendered: dict[tuple[str, str], Any]) -> dict[str, str]:
    (container,) = pod_of(rendered, "gateway")["spec"]["containers"]
    (source,) = container["envFrom"]
    return rendered["ConfigMap", source["configMapRef"]["name"]]["data"]


@pytest.mark.parametrize("version", ["1.29", "1.37"])
def test_every_object_passes_the_strict_schema(rendered: dict[tuple[str, str], Any], version: str) -> None:
    assert [fault for thing in rendered.values() for fault in faults(thing, version)] == []


def test_settings_load_and_point_at_the_coordinators(
    rendered: dict[tuple[str, str], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    variables = variables_of(rendered)
    assert set(variables) <= {PREFIX + name.upper() for name in GatewaySettings.model_fields}
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    settings = GatewaySettings()
    assert (settings.port, settings.metrics_port, settings.host) == (PORT, METRICS_PORT, "0.0.0.0")
    assert settings.metrics_host == "0.0.0.0", "or Prometheus would not reach it"
    _, (address,) = split_names(settings.coordinators, "coordinators")
    assert address == "coordinator:50050"
    assert ("Service", "coordinator") in rendered
    pod = pod_of(rendered, "gateway")["spec"]
    grace_s = settings.drain_delay_s + settings.drain_grace_s
    assert pod["terminationGracePeriodSeconds"] >= grace_s + 10
    mounts = {mount["mountPath"] for mount in pod["containers"][0]["volumeMounts"]}
    files = [Path(value) for name, value in variables.items() if "_TLS_" in name]
    assert len(files) == 3
    assert {str(path.parent) for path in files} <= mounts


async def test_probes_ask_for_paths_that_are_served(rendered: dict[tuple[str, str], Any]) -> None:
    async with Client("127.0.0.1:1") as client:
        app = build_app(Gateway.over(client, GatewaySettings(metrics_port=METRICS_PORT)))
    paths = {getattr(route, "path", "") for route in app.routes}
    (container,) = pod_of(rendered, "gateway")["spec"]["containers"]
    assert container["image"] == f"outrider-coordinator:{VERSION}"
    assert container["command"] == ["outrider", "gateway"]
    ports = {port["name"]: port["containerPort"] for port in container["ports"]}
    assert ports == {"https": PORT, "metrics": METRICS_PORT}
    for probe, path in (("startupProbe", "/live"), ("readinessProbe", "/health"), ("livenessProbe", "/live")):
        asked = container[probe]["httpGet"]
        assert (asked["path"], asked["scheme"], ports[asked["port"]]) == (path, "HTTPS", PORT)
        assert path in paths
    assert container["securityContext"]["readOnlyRootFilesystem"] is True


def test_ways_in_and_out_are_open_and_no_others(rendered: dict[tuple[str, str], Any]) -> None:
    gateway = pod_of(rendered, "gateway")["metadata"]["labels"]
    coordinator = pod_of(rendered, "coordinator")["metadata"]["labels"]
    own, other = (rendered["NetworkPolicy", name]["spec"] for name in ("gateway", "gateway-to-coordinator"))
    assert selects(own["podSelector"], gateway)
    assert selects(other["podSelector"], coordinator)
    (way_in,), (way_out,) = own["ingress"], own["egress"]
    assert [port["port"] for port in way_in["ports"]] == [PORT]
    assert [port["port"] for port in way_out["ports"]] == [port["port"] for port in other["ingress"][0]["ports"]]
    assert selects(way_out["to"][0]["podSelector"], coordinator)
    assert selects(other["ingress"][0]["from"][0]["podSelector"], gateway)
    budget = rendered["PodDisruptionBudget", "gateway"]["spec"]
    assert selects(budget["selector"], gateway)


def test_the_coordinators_image_has_the_gateway() -> None:
    text = (ROOT / "deploy/docker/Dockerfile").read_text()
    stage = text.partition("FROM venv AS coordinator-venv\n")[2].partition("\nFROM ")[0]
    extras = re.findall(r"pip install '\.\[([^]]+)\]'", stage)
    assert any("gateway" in extra.split(",") for extra in extras)


def test_its_certificate_is_made_with_the_others(tmp_path: Path) -> None:
    require_tool("openssl")
    script = FOLDER / "secrets.sh"
    done = subprocess.run(["bash", script, tmp_path / "made"], capture_output=True, text=True, env={**os.environ})
    assert done.returncode == 0, done.stderr
    secrets = {thing["metadata"]["name"]: thing["data"] for thing in yaml.safe_load_all(done.stdout) if thing}
    assert secrets["gateway-tls"].keys() == {"tls.crt", "tls.key", "ca.crt"}
