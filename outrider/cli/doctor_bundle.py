"""The file that `outrider doctor --bundle` writes for whoever helps: what was found, versions, settings, metrics, the
coordinator's account. No token, key, prompt or text is in it; paths of such files are. Settings are those that services
would have if they were started here."""

from __future__ import annotations

import dataclasses
import http.client
import json
import os
import platform
import re
import urllib.request
import zipfile
from collections.abc import Mapping, Sequence
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path
from types import MappingProxyType
from typing import Any

import psutil
from packaging.requirements import Requirement
from pydantic import ValidationError

from outrider.cli.check import Check
from outrider.cli.console import describe_failure
from outrider.cli.doctor_limits import num_cores, read_limits
from outrider.cli.services import SETTINGS
from outrider.server_info import ServerInfo
from outrider.settings import PREFIX

REDACTED = "(redacted)"
METRICS_TIMEOUT_S = 5.0
MAX_METRICS_BYTES = 16 << 20
NO_METRICS: Mapping[str, str] = MappingProxyType({})
_SECRET = re.compile(r"(^|_)(token|secret|password|api_key|credentials)$", re.IGNORECASE)
_LOGIN = re.compile(r"(?<=://)[^/@\s]+@")


def write_bundle(
    path: Path, checks: Sequence[Check], info: ServerInfo | None, metrics: Mapping[str, str] = NO_METRICS
) -> list[str]:
    """A zip file; the names of what it holds. metrics: of /metrics endpoints, by address. Raises OSError."""
    parts: dict[str, str] = {
        "checks.json": _json([dataclasses.asdict(check) for check in checks]),
        "versions.json": _json(_versions()),
        "settings.json": _json(_settings()),
        "environment.json": _json(redacted({k: v for k, v in os.environ.items() if k.startswith(PREFIX)})),
        "system.json": _json(_system()),
    }
    if info is not None:
        parts["server_info.json"] = _json(dataclasses.asdict(info))
    for number, (address, text) in enumerate(metrics.items()):
        parts[f"metrics-{number}.txt"] = f"# {_LOGIN.sub('', address)}\n{text}"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as bundle:
        for name, text in parts.items():
            bundle.writestr(name, text)
    return list(parts)


def redacted(values: Mapping[str, Any]) -> dict[str, Any]:
    """Without the values of secrets, and without logins in addresses."""
    told = {}
    for name, value in values.items():
        if _SECRET.search(name) and value:
            value = REDACTED
        told[name] = _LOGIN.sub(f"{REDACTED}@", value) if isinstance(value, str) else value
    return told


def _settings() -> dict[str, Any]:
    """Those that each service would have here."""
    told: dict[str, Any] = {}
    for role, cls in SETTINGS.items():
        try:
            told[role] = redacted(cls().model_dump(mode="json"))
        except ValidationError as error:
            told[role] = {"error": _LOGIN.sub("", describe_failure(error)[0])}
    return told


def _versions() -> dict[str, str]:
    told = {"python": platform.python_version(), "platform": platform.platform(), "outrider": version("outrider")}
    for text in requires("outrider") or []:
        name = Requirement(text).name
        try:
            told[name] = version(name)
        except PackageNotFoundError:
            told[name] = "not installed"
    return told


def _system() -> dict[str, Any]:
    memory = psutil.virtual_memory()
    return {
        "machine": platform.machine(),
        "num_cores": num_cores(),
        "memory_bytes": memory.total,
        "available_bytes": memory.available,
        "limits": dataclasses.asdict(read_limits()),
    }


def fetch_metrics(address: str) -> tuple[str, Check]:
    """The metrics there, or why there are none."""
    name, url = f"metrics {_LOGIN.sub('', address)}", address if "://" in address else f"http://{address}/metrics"
    try:
        if not url.startswith(("http://", "https://")):
            raise ValueError("it is no http address")
        with urllib.request.urlopen(url, timeout=METRICS_TIMEOUT_S) as answer:
            text: str = answer.read(MAX_METRICS_BYTES).decode(errors="replace")
    except (OSError, ValueError, http.client.HTTPException) as error:
        fault = _LOGIN.sub("", str(error) or type(error).__name__)
        fix = "give a service --metrics-port, and that HOST:PORT here"
        return f"# not fetched: {fault}", Check("fail", name, f"not fetched: {fault}", fix)
    num_series = sum(bool(line) and not line.startswith("#") for line in text.splitlines())
    return text, Check("ok", name, f"{num_series} series")


def _json(value: Any) -> str:
    return json.dumps(value, indent=1, default=str) + "\n"
