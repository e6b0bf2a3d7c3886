"""Every overlay against the Kubernetes schemas and the code. No cluster is used."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
from manifests import OVERLAYS, Object, Pod, environment, faults, objects, of_kind, pods, selects
from roles import HEALTH_PORT, METRICS_PORT, ROLES, VERSION, Role

from outrider.serving.naming import split_names

pytestmark = pytest.mark.outside

VERSIONS = ("1.29", "1.37")
"""gRPC probes are stable since 1.27; the oldest and the newest schema that we test."""
SERVED = [(overlay, role) for overlay in ("cpu", "gpu") for role in ROLES.values()] + [("ray", ROLES["coordinator"])]

each_overlay = pytest.mark.parametrize("overlay", OVERLAYS)
each_server = pytest.mark.parametrize(("overlay", "role"), SERVED, ids=[f"{o}-{r.name}" for o, r in SERVED])


def server(overlay: str, role: Role) -> Pod:
    return pods(overlay)[role.name]


@pytest.mark.parametrize("version", VERSIONS)
@each_overlay
def test_every_object_passes_the_strict_schema(overlay: str, version: str) -> None:
    assert objects(overlay)
    assert [fault for thing in objects(overlay) for fault in faults(thing, version)] == []


def _set(thing: Object, path: str, value: Any) -> None:
    *parents, last = path.split("/")
    for key in parents:
        thing = thing[int(key) if isinstance(thing, list) else key]
    thing[int(last) if isinstance(thing, list) else last] = value


@pytest.mark.parametrize(
    ("overlay", "kind", "path", "value"),
    [
        ("cpu", "Deployment", "spec/template/spec/containers/0/livenessProbe/failureTreshold", 3),
        ("gpu", "ScaledObject", "spec/minReplicas", 1),
        ("gpu", "ScaledObject", "spec/triggers/0/metadata/threshold", 5),
        ("gpu", "ScaledObject", "spec/advanced/horizontalPodAutoscalerConfig/behavior/scaleDown/policies/0/type", None),
        ("ray", "RayCluster", "spec/headGroupSpec/rayStartParams/num-cpus", 0),
        ("ray", "RayCluster", "spec/workerGroupSpecs/0/rayStartParams/labels", "outrider.dev/pool=draft"),
        ("ray", "RayCluster", "spec/workerGroupSpecs/1/template/spec/containers/0/livenessProbe/httpget", {}),
        ("ray", "RayCluster", "spec/workerGroupSpecs/1/minReplicas", "1"),
        ("ray", "RayJob", "spec/shutdownAfterJobFinishes", True),
        ("ray", "RayJob", "spec/submissionMode", "HttpMode"),
    ],
)
def test_schemas_see_mistakes(overlay: str, kind: str, path: str, value: Any) -> None:
    broken = copy.deepcopy(next(iter(of_kind(overlay, kind).values())))
    assert faults(broken, VERSIONS[-1]) == []
    _set(broken, path, value)
    assert faults(broken, VERSIONS[-1]) != []


@each_overlay
def test_everything_is_in_the_namespace_and_every_image_of_this_version(overlay: str) -> None:
    (namespace,) = of_kind(overlay, "Namespace")
    assert {o["metadata"]["namespace"] for o in objects(overlay) if o["kind"] != "Namespace"} == {namespace}
    kinds = of_kind(overlay, "Namespace")[namespace]["metadata"]["labels"]
    assert kinds["pod-security.kubernetes.io/enforce"] == "restricted"
    for pod in pods(overlay).values():
        image = "outrider-ray" if pod.name.startswith("ray-") else f"outrider-{pod.name}"
        assert pod.container["image"] == f"{image}:{VERSION}"


def test_overlays_run_what_they_are_for() -> None:
    assert set(pods("cpu")) == set(pods("gpu")) == set(ROLES)
    assert set(pods("ray")) == {"coordinator", "ray-head", "ray-draft", "ray-target"}
    for overlay in ("gpu", "ray"):
        assert pods(overlay)["coordinator"].replicas >= 2


@each_server
def test_ports_are_the_servers_own(overlay: str, role: Role) -> None:
    pod = server(overlay, role)
    variables = environment(overlay, pod)
    assert pod.ports == {"grpc": role.port, "metrics": METRICS_PORT, "health": HEALTH_PORT}
    assert variables["OUTRIDER_HEALTH_PORT"] == str(HEALTH_PORT)
    assert variables["OUTRIDER_PORT"] == str(role.port)
    assert variables["OUTRIDER_METRICS_HOST"] == "0.0.0.0"
    assert variables["OUTRIDER_METRICS_PORT"] == str(METRICS_PORT) == pod.annotations["prometheus.io/port"]
    services = [s["spec"] for s in of_kind(overlay, "Service").values() if selects_labels(s["spec"], pod)]
    assert services
    for service in services:
        assert [(p["port"], p["targetPort"]) for p in service["ports"]] == [(role.port, "grpc")]


def selects_labels(spec: Object, pod: Pod) -> bool:
    return spec["selector"].items() <= pod.labels.items()


@each_overlay
def test_selectors_reach_one_kind_of_pod(overlay: str) -> None:
    for name, deployment in of_kind(overlay, "Deployment").items():
        assert selects(deployment["spec"]["selector"], pods(overlay)[name].labels)
    for service in of_kind(overlay, "Service").values():
        assert len([pod for pod in pods(overlay).values() if selects_labels(service["spec"], pod)]) == 1
    for pod in pods(overlay).values():
        for constraint in pod.spec.get("topologySpreadConstraints", ()):
            assert [p.name for p in pods(overlay).values() if selects(constraint["labelSelector"], p.labels)] == [
                pod.name
            ]


@each_overlay
def test_every_pod_but_the_head_spreads_and_has_a_budget_that_a_drain_can_spend(overlay: str) -> None:
    budgets = [b["spec"] for b in of_kind(overlay, "PodDisruptionBudget").values()]
    for pod in pods(overlay).values():
        if pod.name == "ray-head":
            continue
        assert pod.spec["topologySpreadConstraints"]
        (budget,) = (b for b in budgets if selects(b["selector"], pod.labels))
        assert budget["maxUnavailable"] == 1


@each_server
def test_variables_are_settings_and_their_values_load(
    overlay: str, role: Role, monkeypatch: pytest.MonkeyPatch
) -> None:
    pod = server(overlay, role)
    variables = environment(overlay, pod)
    assert set(variables) - role.variables == set()
    for name, value in variables.items():
        assert isinstance(value, str)
        monkeypatch.setenv(name, value)
    settings = role.settings()
    assert settings.host == "0.0.0.0"
    if role.is_worker:
        assert variables["OUTRIDER_NUM_THREADS"] == str(pod.container["resources"]["limits"]["cpu"])


@each_overlay
def test_no_service_becomes_a_variable(overlay: str) -> None:
    """Kubernetes would set OUTRIDER_PORT=tcp://... for the Service `outrider`: the name of a setting."""
    assert all(pod.spec["enableServiceLinks"] is False for pod in pods(overlay).values())


@pytest.mark.parametrize("overlay", ["cpu", "gpu"])
def test_coordinator_is_pointed_at_the_workers_headless_services(overlay: str) -> None:
    variables = environment(overlay, pods(overlay)["coordinator"])
    for variable, name in (("OUTRIDER_TARGET_WORKERS", "target-worker"), ("OUTRIDER_DRAFT_WORKERS", "draft-worker")):
        _, (address,) = split_names(variables[variable].split(","), variable)
        assert address == f"{name}:{ROLES[name].port}"
        service = of_kind(overlay, "Service")[name]["spec"]
        assert service["clusterIP"] == "None"
        assert selects_labels(service, pods(overlay)[name])


@each_server
def test_probes_ask_the_health_service(overlay: str, role: Role) -> None:
    container = server(overlay, role).container
    probes = {name: container[name] for name in ("startupProbe", "readinessProbe", "livenessProbe")}
    assert {probe["grpc"]["port"] for probe in probes.values()} == {HEALTH_PORT}, "the kubelet's probes know no TLS"
    assert probes["readinessProbe"]["grpc"]["service"] == role.service
    assert probes["livenessProbe"]["grpc"].get("service", "") == "", "liveness must not depend on other services"
    startup = probes["startupProbe"]
    # A coordinator without workers is alive but not ready: it must not be restarted for that.
    assert startup["grpc"].get("service", "") == (role.service if role.is_worker else "")
    allowed_s = startup["periodSeconds"] * startup["failureThreshold"]
    assert allowed_s >= (1200 if role.is_worker else 60)


@each_overlay
def test_pods_are_confined(overlay: str) -> None:
    for pod in pods(overlay).values():
        assert pod.spec["automountServiceAccountToken"] is False
        account = of_kind(overlay, "ServiceAccount")[pod.spec["serviceAccountName"]]
        assert account["automountServiceAccountToken"] is False
        assert pod.spec["securityContext"]["runAsNonRoot"] is True
        assert pod.spec["securityContext"]["runAsUser"] >= 10000
        assert pod.spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        assert pod.container["securityContext"] == {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        }
        forbidden = {"hostNetwork", "hostPID", "hostIPC", "initContainers"} & set(pod.spec)
        assert not forbidden


WRITABLE = {
    "coordinator": {"/tmp"},
    "draft-worker": {"/tmp", "/cache"},
    "target-worker": {"/tmp", "/cache"},
    "ray-head": {"/tmp", "/cache", "/dev/shm"},
    "ray-draft": {"/tmp", "/cache", "/dev/shm"},
    "ray-target": {"/tmp", "/cache", "/dev/shm"},
}


@each_overlay
def test_what_is_written_to_is_mounted_and_bounded(overlay: str) -> None:
    claims = of_kind(overlay, "PersistentVolumeClaim")
    for pod in pods(overlay).values():
        volumes = {volume["name"]: volume for volume in pod.spec["volumes"]}
        mounts = {mount["mountPath"]: volumes[mount["name"]] for mount in pod.container["volumeMounts"]}
        assert len(mounts) == len(volumes)
        writable = {path: volume for path, volume in mounts.items() if not {"configMap", "secret"} & set(volume)}
        expected = WRITABLE[pod.name] | ({"/dev/shm"} if (overlay, pod.name) == ("gpu", "target-worker") else set())
        assert set(writable) == expected
        for volume in writable.values():
            if "persistentVolumeClaim" in volume:
                claim = claims.pop(volume["persistentVolumeClaim"]["claimName"])
                assert claim["spec"]["resources"]["requests"]["storage"]
            else:
                assert volume["emptyDir"]["sizeLimit"]
    assert claims == {}, "a claim that no pod mounts"


@each_overlay
def test_resources_are_bounded_and_gpus_only_where_they_are_meant(overlay: str) -> None:
    for pod in pods(overlay).values():
        resources = pod.container["resources"]
        has_gpu = overlay != "cpu" and pod.name not in ("coordinator", "ray-head")
        for kind in ("requests", "limits"):
            assert set(resources[kind]) == {"cpu", "memory"} | ({"nvidia.com/gpu"} if has_gpu else set())
        assert resources["requests"].get("nvidia.com/gpu") == resources["limits"].get("nvidia.com/gpu")
        assert [t["key"] for t in pod.spec.get("tolerations", ())] == (["nvidia.com/gpu"] if has_gpu else [])


@pytest.mark.parametrize(
    ("overlay", "draft", "target"), [("gpu", "draft-worker", "target-worker"), ("ray", "ray-draft", "ray-target")]
)
def test_drafts_go_to_small_cards_near_the_targets_on_large_ones(overlay: str, draft: str, target: str) -> None:
    found = pods(overlay)
    assert found[draft].spec["nodeSelector"] == {"outrider.dev/gpu-pool": "small"}
    assert found[target].spec["nodeSelector"] == {"outrider.dev/gpu-pool": "large"}
    (near,) = found[draft].spec["affinity"]["podAffinity"]["preferredDuringSchedulingIgnoredDuringExecution"]
    chosen = [pod.name for pod in found.values() if selects(near["podAffinityTerm"]["labelSelector"], pod.labels)]
    assert chosen == [target]
    assert "nodeSelector" not in found["coordinator"].spec


def test_a_laptop_downloads_nothing() -> None:
    """The model of the cpu overlay is the one that the Dockerfile puts into the images."""
    for name in ("draft-worker", "target-worker"):
        assert environment("cpu", pods("cpu")[name])["OUTRIDER_MODEL"] == "smollm2-135m"
        assert environment("cpu", pods("cpu")[name])["OUTRIDER_DEVICE"] == "cpu"


@each_server
def test_drain_ends_before_the_kill(overlay: str, role: Role) -> None:
    variables = environment(overlay, server(overlay, role))
    grace_s = server(overlay, role).spec["terminationGracePeriodSeconds"]
    field: Callable[[str], float] = lambda name: role.settings.model_fields[name].default  # noqa: E731
    for drain_s in (
        float(variables["OUTRIDER_DRAIN_DELAY_S"]) + float(variables["OUTRIDER_DRAIN_GRACE_S"]),
        field("drain_delay_s") + field("drain_grace_s"),
    ):
        assert grace_s >= drain_s + 10
