"""SECURITY.md against the code: flags, reasons, metrics, the limits file, and commands that need no server."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
import typer.testing

from coordinator.tenants import Limits, parse_limits
from outrider.cli.app import app
from outrider.cli.up import stack_settings
from outrider.serving.access import Access
from outrider.serving.tokens import FleetTokens, TenantTokens
from outrider.settings import known_variables

ROOT = Path(__file__).parents[3]
PAGE = (ROOT / "SECURITY.md").read_text(encoding="utf-8")
COMMANDS = [
    shlex.split(line, comments=True)
    for line in re.sub(r"\\\n\s*", "", PAGE).splitlines()
    if line.startswith("    ") and "outrider " in line
]
OF_COMMANDS = {"--tenant", "--file", "--address"}


def test_flags_and_variables_are_there() -> None:
    flags = set(re.findall(r"--[a-z][a-z-]+", PAGE)) - OF_COMMANDS
    named = {flag.removeprefix("--no-").removeprefix("--").replace("-", "_").upper() for flag in flags}
    assert len(named) > 15
    assert {f"OUTRIDER_{name}" for name in named} <= known_variables()
    assert set(re.findall(r"OUTRIDER_[A-Z_]+", PAGE)) <= known_variables()


def test_reasons_are_those_of_the_code() -> None:
    reasons = {word for word in re.findall(r"`([A-Z]+_[A-Z_]+)`", PAGE) if not word.startswith("OUTRIDER_")}
    assert len(reasons) >= 9
    code = "".join(
        path.read_text(encoding="utf-8")
        for path in (*(ROOT / "outrider/serving").glob("*.py"), ROOT / "coordinator/tenants.py")
    )
    assert {reason for reason in reasons if f'"{reason}"' not in code} == set()


def test_metrics_are_exported() -> None:
    exported = {f"{family.name}_total" for family in Access().families()}
    assert set(re.findall(r"`(outrider_\w+)`", PAGE)) == exported


def test_the_limits_file_loads_and_names_every_limit() -> None:
    (text,) = re.findall(r"(?m)^ +\[default\]\n(?: +.*\n)+", PAGE)
    limits = parse_limits(re.sub(r"(?m)^ +", "", text).encode()).of("team-a")
    assert all(value is not None for _, value in limits)
    assert {name for name, _ in limits} == set(Limits.model_fields)


def test_tokens_are_made_as_it_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    new, secret, *servers = (command for command in COMMANDS if "outrider" in command)
    assert [command[1] for command in servers if command[0] == "outrider"] == ["target-worker", "coordinator"]
    done = typer.testing.CliRunner().invoke(app, new[1:])
    assert done.exit_code == 0, done.output
    token = done.output.split()[1]
    assert TenantTokens("tokens").tenant(token) == "team-a"
    again = typer.testing.CliRunner().invoke(app, new[1:])
    assert TenantTokens("tokens").tenant(token) == TenantTokens("tokens").tenant(again.output.split()[1])
    assert (tmp_path / "tokens").stat().st_mode & 0o077 == 0
    assert secret[-2:] == [">", "fleet-token"]
    (tmp_path / "fleet-token").write_text(typer.testing.CliRunner().invoke(app, secret[1:3]).output)
    assert FleetTokens("fleet-token").metadata()


@pytest.mark.parametrize("flags", [["--tenant", "two words"], ["--tenant", "a", "--until", "soon"]])
def test_what_no_line_can_hold_is_refused(flags: list[str]) -> None:
    done = typer.testing.CliRunner().invoke(app, ["token", "new", *flags])
    assert done.exit_code == 2, done.output


def test_up_opens_its_coordinator_alone_to_others() -> None:
    """The workers have no callers but the coordinator beside them."""
    settings = stack_settings({"host": "0.0.0.0", "insecure": True})
    assert settings["shared"]["host"] == "0.0.0.0"
    assert "host" not in settings["coordinator"]
    assert {settings[worker]["host"] for worker in ("target_worker", "draft_worker")} == {"127.0.0.1"}
