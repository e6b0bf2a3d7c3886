"""The overlays as `kubectl kustomize` builds them, and what of them a test wants to look at."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate
import yaml
from conftest import require_tool
from kubernetes_validate.utils import schema_contents
from referencing import Registry, Resource
from roles import ROOT

FOLDER = ROOT / "deploy/kubernetes"
OVERLAYS = ("cpu", "gpu", "ray")
OWN_SCHEMAS = Path(__file__).parent / "schemas"

Object = dict[str, Any]


@cache
def rendered(overlay: str) -> str:
    command = [require_tool("kubectl"), "kustomize", str(FOLDER / "overlays" / overlay)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


@cache
def objects(overlay: str) -> list[Object]:
    return list(yaml.safe_load_all(rendered(overlay)))


def of_kind(overlay: str, kind: str) -> dict[str, Object]:
    return {o["metadata"]["name"]: o for o in objects(overlay) if o["kind"] == kind}


def faults(thing: Object, version: str) -> list[str]:
    """What a strict schema of the Kubernetes `version` (or our own, for kinds that are none of its) has against it."""
    try:
        kubernetes_validate.validate(thing, version, strict=True)
    except kubernetes_validate.SchemaNotFoundError:
        definitions = schema_contents(f"kubernetes-json-schema/v{version}.0-local-strict/_definitions.json", version)
        return own_faults(thing, thing["kind"].lower(), definitions)
    except kubernetes_validate.ValidationError as error:
        return [f"{thing['kind']} {thing['metadata']['name']}: {list(error.path)}: {error.message}"]
    return []


def own_faults(thing: Object, name: str, definitions: Object | None = None) -> list[str]:
    schema = json.loads((OWN_SCHEMAS / f"{name}.json").read_text())
    registry: Registry[Any] = Registry()
    if definitions is not None:
        registry = Resource.from_contents(definitions) @ registry
    validator = jsonschema.Draft202012Validator(schema, registry=registry)
    return [f"{name}: {list(error.absolute_path)}: {error.message}" for error in validator.iter_errors(thing)]


@dataclass(frozen=True)
class Pod:
    """The template of a Deployment or of a group of a RayCluster, as the controller will label its pods."""

    name: str
    labels: dict[str, str]
    annotations: dict[str, str]
    spec: dict[str, Any]
    replicas: int

    @property
    def container(self) -> dict[str, Any]:
        (only,) = self.spec["containers"]
        return only

    @property
    def ports(self) -> dict[str, int]:
        return {port["name"]: port["containerPort"] for port in self.container["ports"]}


def pods(overlay: str) -> dict[str, Pod]:
    return {pod.name: pod for pod in _pods(overlay)}


def _pods(overlay: str) -> Iterator[Pod]:
    for name, deployment in of_kind(overlay, "Deployment").items():
        yield _pod(name, deployment["spec"]["template"], {}, deployment["spec"].get("replicas", 1))
    for name, cluster in of_kind(overlay, "RayCluster").items():
        head, *groups = cluster["spec"]["headGroupSpec"], *cluster["spec"]["workerGroupSpecs"]
        yield _pod("ray-head", head["template"], {"ray.io/cluster": name, "ray.io/node-type": "head"}, 1)
        for group in groups:
            own = {"ray.io/cluster": name, "ray.io/node-type": "worker", "ray.io/group": group["groupName"]}
            yield _pod(f"ray-{group['groupName']}", group["template"], own | group["labels"], group["replicas"])


def _pod(name: str, template: dict[str, Any], labels: dict[str, str], replicas: int) -> Pod:
    metadata = template["metadata"]
    return Pod(name, metadata["labels"] | labels, metadata.get("annotations", {}), template["spec"], replicas)


def environment(overlay: str, pod: Pod) -> dict[str, str]:
    """Variables as the container gets them; a resource field as its number."""
    found: dict[str, str] = {}
    for source in pod.container.get("envFrom", ()):
        found |= of_kind(overlay, "ConfigMap")[source["configMapRef"]["name"]]["data"]
    for variable in pod.container.get("env", ()):
        if "value" in variable:
            found[variable["name"]] = variable["value"]
        else:
            kind, _, resource = variable["valueFrom"]["resourceFieldRef"]["resource"].partition(".")
            found[variable["name"]] = str(pod.container["resources"][kind][resource])
    return found


def selects(selector: dict[str, Any], labels: dict[str, str]) -> bool:
    """Whether a Kubernetes label selector matches."""
    if not selector.get("matchLabels", {}).items() <= labels.items():
        return False
    return all(
        {"In": labels.get(e["key"]) in e.get("values", ())}[e["operator"]] for e in selector.get("matchExpressions", ())
    )
