"""The ray overlay: the cluster against the fleet file that the driver places in it."""

from __future__ import annotations

import importlib.util
import shlex
from pathlib import Path

import pytest

pytest.importorskip("ray")

from manifests import Pod, environment, of_kind, pods, selects
from roles import METRICS_PORT, ROLES, pinned

from deploy.ray.config import Fleet, load_fleet
from deploy.ray.fleet import grace_s_of
from deploy.ray.placement import demands, label_matches
from outrider.serving.naming import split_names

pytestmark = pytest.mark.outside


@pytest.fixture
def fleet(tmp_path: Path) -> Fleet:
    """As it is mounted."""
    (text,) = of_kind("ray", "ConfigMap")["ray-fleet"]["data"].values()
    path = tmp_path / "fleet.toml"
    path.write_text(text)
    return load_fleet(path)


def groups() -> dict[str, tuple[Pod, dict[str, str]]]:
    (cluster,) = of_kind("ray", "RayCluster").values()
    found = {group["groupName"]: group for group in cluster["spec"]["workerGroupSpecs"]}
    return {name: (pods("ray")[f"ray-{name}"], group["labels"]) for name, group in found.items()}


def test_cluster_and_driver_are_of_the_pinned_ray() -> None:
    (cluster,) = of_kind("ray", "RayCluster").values()
    assert cluster["spec"]["rayVersion"] == pinned("ray")
    assert cluster["spec"]["authOptions"] == {"mode": "token"}
    assert cluster["spec"]["headGroupSpec"]["rayStartParams"]["num-cpus"] == "0"
    # without an autoscaler the operator wants all three
    for group in cluster["spec"]["workerGroupSpecs"]:
        assert group["replicas"] == group["minReplicas"] == group["maxReplicas"]


def test_the_job_runs_the_driver_with_a_file_that_the_head_has(fleet: Fleet) -> None:
    (job,) = of_kind("ray", "RayJob").values()
    (name,) = of_kind("ray", "RayCluster")
    assert job["spec"]["clusterSelector"] == {"ray.io/cluster": name}
    python, flag, module, command, file = shlex.split(job["spec"]["entrypoint"])
    assert (python, flag, command) == ("python", "-m", "up")
    assert importlib.util.find_spec(module) is not None
    head = pods("ray")["ray-head"]
    (mount,) = (m["mountPath"] for m in head.container["volumeMounts"] if m["mountPath"] in file)
    (volume,) = (v for v in head.spec["volumes"] if "configMap" in v)
    (key,) = of_kind("ray", "ConfigMap")[volume["configMap"]["name"]]["data"]
    assert file == f"{mount}/{key}"


def test_the_driver_has_time_to_drain(fleet: Fleet) -> None:
    wait_s = float(environment("ray", pods("ray")["ray-head"])["RAY_JOB_STOP_WAIT_TIME_S"])
    supervisor = importlib.util.find_spec("ray.dashboard.modules.job.job_supervisor")
    assert supervisor is not None
    assert supervisor.origin is not None
    assert '"RAY_JOB_STOP_WAIT_TIME_S"' in Path(supervisor.origin).read_text()
    assert wait_s >= 10 + max(grace_s_of(pool) for pool in fleet.pools)


def test_every_worker_of_the_fleet_has_a_pod_to_itself(fleet: Fleet) -> None:
    assert {pool.name for pool in fleet.pools} == set(groups())
    for pool in fleet.pools:
        pod, labels = groups()[pool.name]
        others = [found for name, (_, found) in groups().items() if name != pool.name]
        assert all(label_matches(wanted, labels.get(label)) for label, wanted in pool.label_selector.items())
        for found in others:
            assert not all(label_matches(wanted, found.get(label)) for label, wanted in pool.label_selector.items())
        limits = pod.container["resources"]["limits"]
        room = {"CPU": float(limits["cpu"]), "GPU": float(limits["nvidia.com/gpu"])}
        assert all(amount <= room[resource] for resource, amount in demands(pool).items())
        assert 2 * demands(pool)["GPU"] > room["GPU"], "two would share a pod, and its metrics port"
        assert pool.replicas == pod.replicas
        settings = pool.worker_settings()
        assert settings.metrics_port == METRICS_PORT == pod.ports["worker-metrics"]
        assert settings.metrics_host == "0.0.0.0", "or Prometheus would not reach it"
        assert pod.annotations["prometheus.io/port"] == str(METRICS_PORT)
        assert pod.spec["terminationGracePeriodSeconds"] > settings.drain_grace_s + settings.drain_delay_s


def test_workers_register_with_coordinators_that_are_not_ready_yet(fleet: Fleet) -> None:
    """A coordinator becomes ready by the target worker that registers with it."""
    (), (address,) = split_names(fleet.coordinators, "coordinators")
    name, _, port = address.partition(":")
    service = of_kind("ray", "Service")[name]["spec"]
    assert service["publishNotReadyAddresses"] is True
    assert service["clusterIP"] == "None"
    assert selects({"matchLabels": service["selector"]}, pods("ray")["coordinator"].labels)
    assert int(port) == ROLES["coordinator"].port == service["ports"][0]["port"]
    variables = environment("ray", pods("ray")["coordinator"])
    assert not {"OUTRIDER_TARGET_WORKERS", "OUTRIDER_DRAFT_WORKERS"} & set(variables)


def test_ports_are_fixed_apart_and_open(fleet: Fleet) -> None:
    ports = [pool.first_port + index for pool in fleet.pools for index in range(pool.replicas)]
    assert len(set(ports)) == len(ports)
    (rule,) = of_kind("ray", "NetworkPolicy")["ray-worker"]["spec"]["ingress"]
    (opened,) = rule["ports"]
    assert all(opened["port"] <= port <= opened["endPort"] for port in ports)


def test_probes_ask_rays_agent() -> None:
    for name in ("ray-head", "ray-draft", "ray-target"):
        container = pods("ray")[name].container
        asked = [container[kind]["httpGet"] for kind in ("startupProbe", "readinessProbe", "livenessProbe")]
        assert asked == [{"path": "/api/healthz", "port": 52365}] * 3
    agent = importlib.util.find_spec("ray.dashboard.modules.reporter.healthz_agent")
    assert agent is not None
    assert agent.origin is not None
    assert '"/api/healthz"' in Path(agent.origin).read_text()
    from ray._private import ray_constants

    assert ray_constants.DEFAULT_DASHBOARD_AGENT_LISTEN_PORT == 52365
