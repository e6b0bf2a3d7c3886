"""What the autoscaler asks Prometheus for, against what the services export."""

from __future__ import annotations

import re
from types import SimpleNamespace

import pytest
from manifests import of_kind
from roles import ROLES

from coordinator.metric_families import FALLBACKS, NO_PROPOSAL
from coordinator.metrics import CoordinatorMetrics
from outrider.lm.engine_stats import EngineStats
from outrider.serving.metrics import Reading, new_registry
from outrider.serving.session_log import SessionCounters
from outrider.serving.worker_metrics import worker_families

pytestmark = pytest.mark.outside

LABELS = {"role": set(ROLES), "cause": {*FALLBACKS, NO_PROPOSAL}}
"""Values that a query may name."""


def exported() -> dict[str, set[str]]:
    """Sample names of all roles, with the labels that each has."""
    coordinator = new_registry("coordinator")
    fleet = SimpleNamespace(workers=lambda: (), health=lambda worker: (True, ""))
    metrics = CoordinatorMetrics(coordinator, SimpleNamespace(num_running=0, num_waiting=0, num_paused=0), fleet)
    metrics._model("m")
    worker = new_registry("target-worker")
    stats = EngineStats(**dict.fromkeys(EngineStats.__annotations__, 0))
    worker.register(
        Reading(
            lambda: worker_families(
                {"role": "r", "model_name": "m"}, num_sessions=0, stats=stats, counters=SessionCounters()
            )
        )
    )
    found: dict[str, set[str]] = {}
    for registry in (coordinator, worker):
        for family in registry.collect():
            for sample in family.samples:
                found.setdefault(sample.name, set()).update(sample.labels)
    return found


def queries() -> list[str]:
    return [
        trigger["metadata"]["query"]
        for scaled in of_kind("gpu", "ScaledObject").values()
        for trigger in scaled["spec"]["triggers"]
    ]


def test_queries_ask_for_what_is_exported() -> None:
    names = exported()
    assert queries()
    for query in queries():
        for name, matchers in re.findall(r"(outrider_\w+)\{(.*?)\}", query):
            assert name in names, query
            for label, _, values in re.findall(r'(\w+)(=~|=)"([^"]*)"', matchers):
                assert label in names[name], query
                assert set(values.split("|")) <= LABELS[label], query
        assert len(re.findall(r"outrider_\w+", query)) == 1
        assert query.endswith(" or vector(0)"), "no series yet is nobody waiting, not an error"


def test_the_waiting_gauge_scales_targets_and_counts_nobody_twice() -> None:
    (query,) = (t["metadata"]["query"] for t in of_kind("gpu", "ScaledObject")["target-worker"]["spec"]["triggers"])
    assert 'outrider_num_requests_waiting{role=~"coordinator|target-worker"}' in query


def test_a_wrong_name_would_be_seen() -> None:
    assert "outrider_num_requests_waiting" in exported()
    assert "outrider_requests_waiting" not in exported()


def test_scaled_are_the_workers_whose_number_nobody_else_sets() -> None:
    scaled = of_kind("gpu", "ScaledObject")
    assert set(scaled) == {"draft-worker", "target-worker"}
    for name, found in scaled.items():
        spec = found["spec"]
        assert spec["scaleTargetRef"]["name"] == name
        assert "replicas" not in of_kind("gpu", "Deployment")[name]["spec"]
        assert 1 <= spec["minReplicaCount"] < spec["maxReplicaCount"]
        down = spec["advanced"]["horizontalPodAutoscalerConfig"]["behavior"]["scaleDown"]
        assert spec["cooldownPeriod"] >= 300
        assert down["stabilizationWindowSeconds"] >= 300
        assert [policy["value"] for policy in down["policies"]] == [1]
