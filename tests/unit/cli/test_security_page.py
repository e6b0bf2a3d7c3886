"""SECURITY.md against the code: flags, reasons, metrics, the limits file, and commands that need no server."""

from __future__ import annotations

import re
import shlex
import subprocess
from itertools import pairwise
from pathlib import Path

import pytest
import typer.testing
from click.testing import Result

from coordinator.tenants import Limits, parse_limits
from outrider.cli.app import app
from outrider.cli.up import stack_settings
from outrider.errors import InvalidArgument
from outrider.serving.access import Access
from outrider.serving.tokens import FleetTokens, TenantTokens, token_from_file
from outrider.settings import known_variables

ROOT = Path(__file__).parents[3]
PAGE = (ROOT / "SECURITY.md").read_text(encoding="utf-8")
COMMANDS = [
    shlex.split(line, comments=True)
    for line in re.sub(r"\\\n\s*", "", PAGE).splitlines()
    if line.startswith("    ") and "outrider " in line
]
OF_COMMANDS = {"--tenant", "--file", "--out", "--address"}


def run(*command: str) -> Result:
    return typer.testing.CliRunner().invoke(app, [*command])


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
        for path in (
            *(ROOT / "outrider/serving").glob("*.py"),
            *(ROOT / "outrider/sampling").glob("*.py"),
            ROOT / "coordinator/tenants.py",
        )
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


def test_commands_of_an_empty_folder_make_what_the_next_ones_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    new, secret, *servers = (command for command in COMMANDS if "outrider" in command)
    assert [command[1] for command in servers if command[0] == "outrider"] == ["target-worker", "coordinator"]
    for command in (new, secret):
        done = run(*command[1:])
        assert done.exit_code == 0, done.output
        assert "outrider_" not in done.output, "a secret that went to a file is on the screen too"
    assert TenantTokens("tokens").tenant(token_from_file("token")()) == "team-a"
    assert FleetTokens("fleet-token").metadata()
    (script, limits) = re.findall(r"(?m)^ {4}(CHECKOUT/.*|printf .*)$", PAGE)
    before = (tmp_path / "token").read_text()
    subprocess.run(["bash", "-c", f"{script}\n{limits}".replace("CHECKOUT", str(ROOT))], check=True)
    assert (tmp_path / "token").read_text() == before
    secrets = set(tmp_path.iterdir()) - {tmp_path / "limits.toml"}
    assert {path.name for path in secrets if path.stat().st_mode & 0o077} == set()
    read = [
        value for command in servers for flag, value in pairwise(command) if re.fullmatch(r"--(\S+-file|tls-\S+)", flag)
    ]
    read += [word.partition("=")[2] for word in servers[-1] if word.startswith("OUTRIDER_")]
    assert len(read) > 10
    assert {name for name in read if not (tmp_path / name).is_file()} == set()


def test_a_tenants_second_token_is_beside_its_first(tmp_path: Path) -> None:
    tokens, first, second = (tmp_path / name for name in ("tokens", "first", "second"))
    for out in (first, second):
        assert run("token", "new", "--tenant=team-a", f"--file={tokens}", f"--out={out}").exit_code == 0
    known = TenantTokens(str(tokens))
    assert {known.tenant(token_from_file(str(path))()) for path in (first, second)} == {"team-a"}


def test_without_files_a_token_is_printed_with_its_line(tmp_path: Path) -> None:
    shown = run("token", "new", "--tenant=team-a").output.split()
    (tmp_path / "tokens").write_text(" ".join(shown[3:]))
    assert TenantTokens(str(tmp_path / "tokens")).tenant(shown[1]) == "team-a"


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        (["--tenant=two words"], "tenant"),
        (["--tenant=a", "--until=soon"], "--until must be a time"),
        (["--tenant=a", "--until=2020-01-01"], "--until 2020-01-01 is past"),
        (["--tenant=a", "--until=2020-01-01T00:00:00+09:00"], "is past (2019-12-31T15:00:00Z)"),
        (["--tenant=a", "--file=no/tokens"], "--file no/tokens"),
        (["--tenant=a", "--file=kept"], "--file kept: line 1"),
        (["--tenant=a", "--file=."], "--file ."),
        (["--tenant=a", "--out=no/token"], "--out no/token"),
        (["--tenant=a", "--out=kept", "--file=tokens"], "--out kept is there already"),
        (["--tenant=a", "--out=fresh", "--file=kept"], "--file kept: line 1"),
    ],
)
def test_what_cannot_be_made_is_refused_by_name_and_changes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, flags: list[str], told: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "kept").write_text("as it was")
    done = run("token", "new", *flags)
    assert done.exit_code == 2, done.output
    assert told in done.output
    assert [(path.name, path.read_text()) for path in tmp_path.iterdir()] == [("kept", "as it was")]


def test_a_file_that_holds_more_than_a_token_is_named_unquoted(tmp_path: Path) -> None:
    (tmp_path / "token").write_text(run("token", "new", "--tenant=a").output)
    with pytest.raises(
        InvalidArgument, match=rf"{re.escape(str(tmp_path / 'token'))} must be a token.*--out"
    ) as caught:
        token_from_file(str(tmp_path / "token"))
    assert "outrider_" not in caught.value.message


def test_up_opens_its_coordinator_alone_to_others() -> None:
    """The workers have no callers but the coordinator beside them."""
    settings = stack_settings({"host": "0.0.0.0", "insecure": True})
    assert settings["shared"]["host"] == "0.0.0.0"
    assert "host" not in settings["coordinator"]
    assert {settings[worker]["host"] for worker in ("target_worker", "draft_worker")} == {"127.0.0.1"}
