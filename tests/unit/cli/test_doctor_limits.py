"""What doctor finds of containers, access and workers, and what its bundle must not hold."""

from __future__ import annotations

import json
import zipfile
from pathlib import Path

import pytest
from certificates import Authority
from test_commands import invoke

from outrider.cli.doctor import check_number_type
from outrider.cli.doctor_bundle import redacted
from outrider.cli.doctor_fleet import check_security, check_worker
from outrider.cli.doctor_limits import Limits, check_files, check_limits, read_limits
from outrider.server_info import CacheCounters, Capacity, DraftRounds, Numerics, Worker
from outrider.serving.tokens import line_for, new_token
from outrider.settings import CoordinatorSettings, DraftWorkerSettings, WorkerSettings


def write(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


def test_the_tightest_group_counts(tmp_path: Path) -> None:
    root = write(tmp_path / "v2", {
        "a/b/cpu.max": "max 100000\n", "a/b/memory.max": "8589934592\n", "a/cpu.max": "150000 100000\n",
        "a/memory.max": "max\n", "a/b/cpu.stat": "usage_usec 1\nnr_periods 50\nnr_throttled 7\n",
    })  # fmt: skip
    own = write(tmp_path, {"own": "0::/a/b\n"}) / "own"
    assert read_limits(root, own) == Limits(1.5, 8 << 30, (7, 50))
    root = write(tmp_path / "v1", {
        "cpu/x/cpu.cfs_quota_us": "200000", "cpu/x/cpu.cfs_period_us": "100000", "memory/memory.limit_in_bytes": "1024",
        "cpu/cpu.cfs_quota_us": "-1", "cpu/cpu.cfs_period_us": "100000",
    })  # fmt: skip
    own = write(tmp_path, {"old": "4:memory:/y\n2:cpu,cpuacct:/x\n0::/\n"}) / "old"
    assert read_limits(root, own) == Limits(2.0, 1024)
    assert read_limits(tmp_path / "none", tmp_path / "none") == Limits()
    unlimited = write(tmp_path / "v0", {"memory/memory.limit_in_bytes": "9223372036854771712"})
    assert read_limits(unlimited, own).memory_bytes is None


def test_limits_are_held_against_settings() -> None:
    def states(limits: Limits, **values: object) -> list[str]:
        return [check.state for check in check_limits(WorkerSettings(**values), limits, 8)]  # type: ignore[arg-type]

    assert states(Limits()) == ["ok", "ok"]
    assert states(Limits(2.0, 8 << 30)) == ["warn", "ok"], "as many threads as cores are more than it may use"
    assert states(Limits(2.0, 8 << 30), num_threads=2) == ["ok", "ok"]
    assert states(Limits(None, 1 << 30), kv_cache_bytes=2 << 30) == ["ok", "fail"]
    assert states(Limits(None, 8 << 30), memory_fraction=0.5) == ["ok", "warn"]
    cpus, _ = check_limits(WorkerSettings(), Limits(1.5, None, (7, 50)), 8)
    assert "7 of 50 periods" in cpus.detail
    assert "--num-threads 1" in cpus.fix
    settings = CoordinatorSettings(max_running_requests=1000, max_waiting_requests=1000)
    assert check_files(settings, 1024).state == "warn"
    assert "ulimit -n 2128" in check_files(settings, 1024).fix
    assert check_files(settings, 4096).state == "ok"


def test_access(tmp_path: Path) -> None:
    tokens = write(tmp_path, {"tokens": line_for(new_token(), "a") + "\n"}) / "tokens"
    assert check_security("coordinator", CoordinatorSettings()).state == "ok"
    assert check_security("coordinator", CoordinatorSettings(host="0.0.0.0")).state == "fail"
    assert check_security("coordinator", CoordinatorSettings(host="0.0.0.0", insecure=True)).state == "warn"
    pair = Authority(tmp_path).certify("coordinator")
    shown = {"host": "0.0.0.0", "tls_cert": pair.cert, "tls_key": pair.key}
    told = check_security("coordinator", CoordinatorSettings(**shown))
    assert (told.state, "--tokens-file or --tls-client-ca" in told.fix) == ("fail", True), "TLS alone knows no caller"
    assert check_security("coordinator", CoordinatorSettings(**shown, tokens_file=str(tokens))).state == "ok"
    told = check_security("coordinator", CoordinatorSettings(host="0.0.0.0", tokens_file=str(tokens)))
    assert told.state == "warn"
    assert "plaintext" in told.detail
    for settings in (
        CoordinatorSettings(tokens_file=str(tmp_path / "none")),
        CoordinatorSettings(tls_cert=str(tokens)),
        DraftWorkerSettings(fleet_token_file=str(write(tmp_path, {"short": "x"}) / "short")),
    ):
        told = check_security("one", settings)
        assert told.state == "fail", told
        assert told.fix


@pytest.mark.parametrize(
    ("changes", "state", "says"),
    [
        ({}, "ok", "2.0 ms away, clock +3 ms, 4 streams, cache 75% used"),
        ({"healthy": False, "detail": "UNAVAILABLE: no"}, "fail", "UNAVAILABLE"),
        ({"healthy": False, "detail": "gone", "role": "draft"}, "warn", "gone"),
        ({"clock_offset_ms": -4000.0}, "warn", "clock -4000 ms"),
        ({"clock_offset_ms": None}, "ok", "2.0 ms away, 4 streams"),
    ],
)
def test_workers_as_their_coordinator_sees_them(changes: dict[str, object], state: str, says: str) -> None:
    values = {
        "role": "target", "address": "here:1", "model": "m", "healthy": True, "detail": "", "num_sessions": 4,
        "network_ms": 2.0, "capacity": Capacity(8, 16, 2, 4, 0, 512, 8), "drafters": (), "numerics_fingerprint": "",
        "weight_bytes": 1, "dtype": "float32", "numerics": Numerics(), "cache_counters": CacheCounters(),
        "draft_rounds": DraftRounds(), "clock_offset_ms": 3.0, **changes,
    }  # fmt: skip
    check = check_worker(Worker(**values))  # type: ignore[arg-type]
    assert check.state == state
    assert says in check.detail


def test_secrets_are_left_out() -> None:
    told = redacted({
        "OUTRIDER_TOKEN": "abc", "token_file": "/etc/token", "max_batch_tokens": 5, "token": "", "tls_key": "/etc/key",
        "otlp_endpoint": "https://me:word@host:1/x", "some_password": "p",
    })  # fmt: skip
    assert told["OUTRIDER_TOKEN"] == told["some_password"] == "(redacted)"
    assert (told["token_file"], told["tls_key"], told["max_batch_tokens"], told["token"]) == (
        "/etc/token", "/etc/key", 5, "",
    )  # fmt: skip
    assert told["otlp_endpoint"] == "https://(redacted)@host:1/x"


def test_the_bundle_has_what_was_found_and_no_secret(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    secret = new_token()
    monkeypatch.setenv("OUTRIDER_TOKEN", secret)
    path = tmp_path / "found.zip"
    flags = [
        "--no-models",
        "--target=toy:vocab=8",
        "--draft=none",
        f"--bundle={path}",
        "--metrics=127.0.0.1:1",
        "--json",
    ]
    code, output, errors = invoke("doctor", *flags, "--json")
    failed = [check["name"] for check in json.loads(output)["checks"] if check["state"] == "fail"]
    assert (code, failed) == (1, ["metrics 127.0.0.1:1"]), output + errors
    with zipfile.ZipFile(path) as bundle:
        parts = {name: bundle.read(name).decode() for name in bundle.namelist()}
    assert parts.keys() == {
        "checks.json", "versions.json", "settings.json", "environment.json", "system.json", "metrics-0.txt",
    }  # fmt: skip
    assert json.loads(parts["checks.json"]) == json.loads(output)["checks"]
    assert json.loads(parts["environment.json"])["OUTRIDER_TOKEN"] == "(redacted)"
    assert json.loads(parts["settings.json"])["coordinator"]["port"] == 50050
    assert "not fetched" in parts["metrics-0.txt"]
    assert not any(secret in text for text in parts.values())
    assert "no metrics" not in errors
    code, _, errors = invoke("doctor", *(flag for flag in flags if "metrics" not in flag))
    assert code == 0
    assert "It has no metrics: --metrics HOST:PORT" in errors
    code, _, errors = invoke("doctor", "--no-models", "--metrics=here:1")
    assert code == 2
    assert "--bundle" in errors


@pytest.mark.parametrize(
    ("dtype", "has_it", "told"), [("bfloat16", False, 1), ("bfloat16", True, 0), ("float32", False, 0)]
)
def test_bfloat16_on_a_processor_without_it_is_told(
    monkeypatch: pytest.MonkeyPatch, dtype: str, has_it: bool, told: int
) -> None:
    monkeypatch.setattr("outrider.lm.cpu_linear.packs", lambda dtype: has_it)
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    checks = list(check_number_type("target", dtype))
    assert [(check.state, check.name) for check in checks] == [("warn", "target dtype")] * told
    assert all("float32" in check.fix for check in checks)
