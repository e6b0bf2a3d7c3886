"""Dashboards, alerts and the overlay that brings them: against what real services export after a run."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import shutil
import subprocess
import urllib.request
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml
from conftest import require_tool
from manifests import environment, faults, objects, of_kind, pods, selects
from ports import free_port
from prometheus_client.parser import text_string_to_metric_families
from roles import METRICS_PORT, ROLES, ROOT
from stack import in_process_stack
from test_network_policies import flows, tcp

from outrider import Client, Completion
from outrider.errors import InvalidArgument, NotFound

MONITORING = ROOT / "deploy/monitoring"
DASHBOARDS = sorted((MONITORING / "dashboards").glob("*.json"))
OF_TARGETS = {"instance", "job", "le"}
"""Labels that Prometheus gives every series, or that every histogram has."""
SUFFIXES = {"counter": ("_total",), "histogram": ("_bucket", "_sum", "_count"), "gauge": ("",), "info": ("_info",)}
ROWS = {"Traffic", "Latency", "RPC", "Resources", "Speculation", "Losslessness"}
ALERTS = {
    "OutriderLowAcceptance", "OutriderNoHealthyTarget", "OutriderQueueGrows", "OutriderDraftWorkerQuarantined",
    "OutriderDraftCircuitOpen", "OutriderNotLossless",
}  # fmt: skip
TOY = "toy:vocab=16,seed=1"

Exported = dict[str, set[str]]
"""Labels by the name of a series; of one that has not been written yet, none are known."""


async def _run() -> dict[str, str]:
    """What every role tells after texts of several kinds and requests that were refused."""
    ports = {role: free_port() for role in ROLES}
    own = [{"metrics_port": port} for port in ports.values()]
    coordinator, draft, target = own[0], own[1], own[2] | {"losslessness_every_rounds": 1}
    async with in_process_stack(
        TOY, f"{TOY},agreement=0.8", coordinator=coordinator, draft_worker=draft, target_worker=target
    ) as services:
        async with Client(services.address, timeout_s=30) as client:
            answers: list[Completion] = await asyncio.gather(
                client.complete([1, 2, 3], max_tokens=60, ignore_eos=True, num_speculative_tokens=3),
                client.complete([1, 2, 3], max_tokens=60, ignore_eos=True),
            )
            for refused in ({"max_tokens": 0}, {"model": "another"}):
                with contextlib.suppress(InvalidArgument, NotFound):
                    await client.complete([1], **refused)
            assert sum(answer.speculation.num_draft_tokens for answer in answers) > 0
            return {role: await asyncio.to_thread(_get, port) for role, port in ports.items()}


def _get(port: int) -> str:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
        return str(answer.read().decode())


@cache
def scraped() -> dict[str, str]:
    return asyncio.run(_run())


@cache
def exported() -> Exported:
    found: Exported = {}
    for text in scraped().values():
        for family in text_string_to_metric_families(text):
            for suffix in SUFFIXES.get(family.type, ("",)):
                found.setdefault(family.name + suffix, set())
            for sample in family.samples:
                found.setdefault(sample.name, set()).update(sample.labels)
    return found


def groups() -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = yaml.safe_load((MONITORING / "rules.yaml").read_text())["groups"]
    return found


def rules() -> list[dict[str, Any]]:
    return [rule for group in groups() for rule in group["rules"]]


def panels(path: Path) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(path.read_text())["panels"]
    return found


def expressions() -> Iterator[tuple[str, str]]:
    """(where, PromQL) of every panel and rule."""
    for path in DASHBOARDS:
        for panel in panels(path):
            for target in panel.get("targets", ()):
                yield f"{path.name}: {panel['title']}", target["expr"]
    for rule in rules():
        yield rule.get("alert") or rule["record"], rule["expr"]


def unknown(expression: str, names: Exported, recorded: set[str]) -> list[str]:
    """Series that nobody exports, and labels that a series has not."""
    found = []
    labels_seen: set[str] = set()
    for name, matchers in re.findall(r"\b((?:outrider|process)[a-z0-9_:]*)\b(?:\{([^}]*)\})?", expression):
        if name in recorded:
            continue
        if name not in names:
            found.append(name)
            continue
        labels_seen |= names[name]
        has_samples = bool(names[name])
        own = set(re.findall(r"(\w+)\s*(?:=~|!=|!~|=)", matchers))
        found += [f"{name}{{{label}}}" for label in own - names[name] - OF_TARGETS if has_samples]
    grouped = {label.strip() for inside in re.findall(r"\bby \(([^)]*)\)", expression) for label in inside.split(",")}
    if labels_seen:
        known = labels_seen | OF_TARGETS | UNWRITTEN
        found += [f"by ({label})" for label in grouped - known]
    return found


UNWRITTEN = {"cause", "service", "reason", "worker"}
"""Labels of series that a run without faults does not write."""


def test_every_series_in_a_panel_or_a_rule_is_one_that_is_exported() -> None:
    names = exported()
    recorded = {rule["record"] for rule in rules() if "record" in rule}
    assert len(list(expressions())) > 50
    wrong = {where: found for where, expression in expressions() if (found := unknown(expression, names, recorded))}
    assert wrong == {}


@pytest.mark.parametrize(
    ("expression", "found"),
    [
        ("rate(outrider_generation_token_total[5m])", ["outrider_generation_token_total"]),
        ('outrider_num_requests_running{roles="x"}', ["outrider_num_requests_running{roles}"]),
        ("sum by (modelname) (outrider_generation_tokens_total)", ["by (modelname)"]),
        ("outrider_generation_tokens_total / process_cpu_second_total", ["process_cpu_second_total"]),
    ],
)
def test_a_wrong_name_is_seen(expression: str, found: list[str]) -> None:
    assert unknown(expression, exported(), set()) == found


def test_what_the_services_export_is_shown_somewhere() -> None:
    """But for what is another view of what is shown."""
    shown = {name for _, expression in expressions() for name in re.findall(r"outrider_[a-z0-9_]+", expression)}
    families = {
        family.name
        for text in scraped().values()
        for family in text_string_to_metric_families(text)
        if family.name.startswith("outrider_")
    }
    hidden = {name for name in families if not any(series.startswith(name) for series in shown)}
    assert hidden <= {
        "outrider_connections", "outrider_tls_handshakes", "outrider_worker_num_sessions", "outrider_num_sessions",
        "outrider_prefix_cache_hits", "outrider_engine_steps", "outrider_event_loop_tasks",
        "outrider_draft_worker_circuit_openings", "outrider_draft_worker_adoptions", "outrider_target_recoveries",
        "outrider_target_detection_seconds", "outrider_spec_decode_num_branches",
        "outrider_spec_decode_num_draft_failures",
    }  # fmt: skip


def test_dashboards_are_whole() -> None:
    rows = set()
    uids = set()
    for path in DASHBOARDS:
        dashboard = json.loads(path.read_text())
        assert dashboard["uid"] == path.stem
        uids.add(dashboard["uid"])
        ids = [panel["id"] for panel in dashboard["panels"]]
        assert len(set(ids)) == len(ids)
        places: set[tuple[int, int]] = set()
        for panel in dashboard["panels"]:
            at = panel["gridPos"]
            cells = {(x, y) for x in range(at["x"], at["x"] + at["w"]) for y in range(at["y"], at["y"] + at["h"])}
            assert at["x"] + at["w"] <= 24
            assert not cells & places, f"{path.name}: {panel['title']} lies on another panel"
            places |= cells
            if panel["type"] == "row":
                rows.add(panel["title"])
                continue
            assert panel["title"]
            assert panel["datasource"] == {"type": "prometheus", "uid": "${datasource}"}
            assert panel["fieldConfig"]["defaults"]["unit"]
            refs = [target["refId"] for target in panel["targets"]]
            assert refs
            assert len(set(refs)) == len(refs)
            assert all(target["legendFormat"] for target in panel["targets"])
        names = {variable["name"] for variable in dashboard["templating"]["list"]}
        used = set(re.findall(r"\$\{?([a-z]\w*)", path.read_text())) - {"__rate_interval", "__all"}
        assert used <= names
    assert len(uids) == len(DASHBOARDS) >= 2
    assert rows >= ROWS


def test_alerts_say_what_to_do() -> None:
    alerts = {rule["alert"]: rule for rule in rules() if "alert" in rule}
    assert set(alerts) >= ALERTS
    for rule in alerts.values():
        assert rule["labels"]["severity"] in ("warning", "critical")
        assert rule["annotations"].keys() == {"summary", "description"}
    assert alerts["OutriderNotLossless"]["expr"].endswith(">= 6")


def test_the_operators_rules_are_those_of_the_file() -> None:
    assert yaml.safe_load((MONITORING / "prometheus-rule.yaml").read_text())["spec"]["groups"] == groups()


@pytest.mark.outside
def test_prometheus_takes_rules_configuration_and_what_is_scraped(tmp_path: Path) -> None:
    promtool = require_tool("promtool")

    def check(*arguments: str, stdin: str = "") -> str:
        done = subprocess.run([promtool, *arguments], input=stdin, capture_output=True, text=True, cwd=tmp_path)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    assert f"{len(rules())} rules found" in check("check", "rules", str(MONITORING / "rules.yaml"))
    check("check", "config", str(MONITORING / "prometheus.yaml"))
    for text in scraped().values():
        check("check", "metrics", stdin=text)
    for path in (MONITORING / "rules.yaml", ROOT / "tests/deploy/alerts.yaml"):
        shutil.copy(path, tmp_path)
    assert "SUCCESS" in check("test", "rules", "alerts.yaml")


@pytest.mark.outside
def test_the_overlay_is_that_of_gpus_and_what_watches_it() -> None:
    assert [fault for thing in objects("monitoring") for fault in faults(thing, "1.37")] == []
    assert set(of_kind("monitoring", "Deployment")) == set(of_kind("gpu", "Deployment"))
    (monitor,) = of_kind("monitoring", "PodMonitor").values()
    ports = {endpoint["port"] for endpoint in monitor["spec"]["podMetricsEndpoints"]}
    watched = [pod for pod in pods("monitoring").values() if selects(monitor["spec"]["selector"], pod.labels)]
    assert {pod.name for pod in watched} == set(ROLES)
    assert all(METRICS_PORT in {number for name, number in pod.ports.items() if name in ports} for pod in watched)
    configs = of_kind("monitoring", "ConfigMap").values()
    (dashboards,) = (config for config in configs if "grafana_dashboard" in config["metadata"].get("labels", {}))
    assert {name: json.loads(text) for name, text in dashboards["data"].items()} == {
        path.name: json.loads(path.read_text()) for path in DASHBOARDS
    }
    assert list(of_kind("monitoring", "PrometheusRule")) == ["outrider"]


@pytest.mark.outside
@pytest.mark.parametrize("name", ROLES)
def test_its_variables_are_settings(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    variables = environment("monitoring", pods("monitoring")[name])
    assert set(variables) - ROLES[name].variables == set()
    for variable, value in variables.items():
        monkeypatch.setenv(variable, value)
    settings = ROLES[name].settings()
    assert settings.log_format == "json"
    assert settings.otlp_endpoint == "http://otel-collector.monitoring:4317"


@pytest.mark.outside
def test_traces_may_leave_for_their_collector_and_nowhere_else() -> None:
    more = set(flows("monitoring")) - set(flows("gpu"))
    assert more == {flow for name in ROLES for flow in tcp(name, "prometheus", 4317)}
    assert set(flows("gpu")) <= set(flows("monitoring"))
