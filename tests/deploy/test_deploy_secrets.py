"""Secrets of the overlays: what `secrets.sh` makes is what the pods mount, and a fleet that reads it serves."""

from __future__ import annotations

import base64
import re
import subprocess
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml
from conftest import require_tool
from manifests import OVERLAYS, Pod, environment, of_kind, pods
from stack import in_process_stack

from coordinator.tenants import Limits, parse_limits
from deploy.ray.config import load_fleet
from outrider import TLS, Client
from outrider.errors import Unauthenticated
from outrider.serving.tokens import token_from_file

pytestmark = pytest.mark.outside

SCRIPT = Path(__file__).parents[2] / "deploy/kubernetes/secrets.sh"
FOLDER = "/etc/outrider/"


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, dict[str, str]]]:
    """The script's folder, and its Secrets by name: file by key."""
    require_tool("openssl")
    folder = tmp_path_factory.mktemp("secrets")
    secrets: dict[str, dict[str, str]] = {}
    for secret in yaml.safe_load_all(run(folder)):
        name = secret["metadata"]["name"]
        (folder / "mounted" / name).mkdir(parents=True)
        secrets[name] = {}
        for key, value in secret["data"].items():
            path = folder / "mounted" / name / key
            path.write_bytes(base64.b64decode(value))
            secrets[name][key] = str(path)
    return folder, secrets


def run(folder: Path) -> str:
    done = subprocess.run(["bash", SCRIPT, folder], capture_output=True, text=True, env={"PATH": "/usr/bin:/bin"})
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_second_run_makes_nothing_anew_and_only_its_owner_reads_keys(made: tuple[Path, Any]) -> None:
    folder, _ = made
    assert run(folder) == run(folder)
    for file in ("ca.key", "coordinator.key", "fleet-token", "token"):
        assert (folder / file).stat().st_mode & 0o077 == 0


def mounted(overlay: str, pod: Pod) -> dict[str, str]:
    """Path to Secret/key of every file of a Secret that is named to the process."""
    volumes = {v["name"]: v["secret"]["secretName"] for v in pod.spec["volumes"] if "secret" in v}
    folders = {m["mountPath"]: volumes[m["name"]] for m in pod.container["volumeMounts"] if m["name"] in volumes}
    if pod.name.startswith("ray-"):
        fleet = tomllib.loads(of_kind("ray", "ConfigMap")["ray-fleet"]["data"]["fleet.toml"])
        values = next(p["settings"] for p in fleet["pools"] if f"ray-{p['name']}" == pod.name)
    else:
        values = {k.removeprefix("OUTRIDER_").lower(): v for k, v in environment(overlay, pod).items()}
    paths = {v for k, v in values.items() if str(v).startswith(FOLDER) and k != "tenant_limits_file"}
    return {path: f"{folders[path.rpartition('/')[0]]}/{path.rpartition('/')[2]}" for path in paths}


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_every_file_that_a_pod_is_told_of_is_one_that_it_mounts(overlay: str, made: tuple[Path, Any]) -> None:
    _, secrets = made
    for pod in pods(overlay).values():
        if pod.name == "ray-head":
            continue
        files = mounted(overlay, pod)
        role = pod.name.replace("ray-draft", "draft-worker").replace("ray-target", "target-worker")
        expected = {f"{role}-tls/{key}" for key in ("tls.crt", "tls.key", "ca.crt")}
        expected |= {"tokens/tokens"} if role == "coordinator" else set()
        expected |= {"fleet-token/token"} if overlay == "ray" else set()
        assert set(files.values()) == expected
        assert expected <= {f"{name}/{key}" for name, keys in secrets.items() for key in keys}, "nobody makes them"
        mounts = {m["mountPath"]: m for m in pod.container["volumeMounts"]}
        assert all(mounts[path.rpartition("/")[0]]["readOnly"] for path in files)


def test_every_limit_is_in_the_file_that_is_mounted_and_none_is_in_force() -> None:
    text = of_kind("cpu", "ConfigMap")["tenant-limits"]["data"]["limits.toml"]
    assert parse_limits(text.encode()).of("anybody") == Limits()
    told = parse_limits(re.sub(r"(?m)^# (?=\w+ = )", "", text).encode()).of("anybody")
    assert all(value is not None for _, value in told)
    variables = environment("cpu", pods("cpu")["coordinator"])
    assert variables["OUTRIDER_TENANT_LIMITS_FILE"] == f"{FOLDER}limits/limits.toml"


def settings(overlay: str, pod: Pod, secrets: dict[str, dict[str, str]]) -> dict[str, str]:
    """Of TLS and tokens, with the files of this machine."""
    files = mounted(overlay, pod)
    if pod.name.startswith("ray-"):
        pools = load_fleet(Path(__file__).parents[2] / "deploy/kubernetes/overlays/ray/fleet.toml").pools
        values = dict(next(pool.settings for pool in pools if f"ray-{pool.name}" == pod.name))
    else:
        values = {k.removeprefix("OUTRIDER_").lower(): v for k, v in environment(overlay, pod).items()}
    found = {}
    for name, value in values.items():
        if value in files:
            secret, _, key = files[value].partition("/")
            found[name] = secrets[secret][key]
    return found


@pytest.mark.parametrize("overlay", ["cpu", "ray"])
async def test_a_fleet_with_these_files_serves_who_has_the_token(overlay: str, made: tuple[Path, Any]) -> None:
    folder, secrets = made
    names = {"cpu": ("draft-worker", "target-worker"), "ray": ("ray-draft", "ray-target")}[overlay]
    draft, target = (settings(overlay, pods(overlay)[name], secrets) for name in names)
    coordinator = settings(overlay, pods(overlay)["coordinator"], secrets)
    assert coordinator.keys() >= {"tls_cert", "tls_ca", "tokens_file"}
    assert all(worker.keys() >= {"tls_cert", "tls_client_ca"} for worker in (draft, target))
    tls = TLS(str(folder / "ca.crt"))
    async with in_process_stack(coordinator=coordinator, draft_worker=draft, target_worker=target) as stack:
        token = token_from_file(str(folder / "token"))
        async with Client(stack.address, tls=tls, token=token, timeout_s=60) as client:
            answer = await client.complete([1, 2, 3], max_tokens=8, num_speculative_tokens=2, ignore_eos=True)
            assert answer.speculation.num_draft_tokens > 0
        async with Client(stack.address, tls=tls, timeout_s=60) as client:
            with pytest.raises(Unauthenticated):
                await client.server_info()
