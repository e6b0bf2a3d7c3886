"""A settings field, its flag and its variable are one thing, for every field of every process."""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import cache
from typing import Any, Literal, get_args, get_origin

import pytest
import typer
from pydantic import ValidationError
from pydantic_settings import BaseSettings
from typer.main import get_command
from typer.testing import CliRunner

from outrider.cli.app import app
from outrider.cli.flags import flag_of, read_settings, settings_parameters, to_flags, with_parameters
from outrider.cli.main import FILES, application
from outrider.cli.services import SETTINGS
from outrider.errors import InvalidArgument
from outrider.settings import PREFIX, ClientSettings, CoordinatorSettings, GatewaySettings

FIELDS = [(cls, name) for cls in SETTINGS.values() for name in cls.model_fields]
IDS = [f"{cls.__name__}-{name}" for cls, name in FIELDS]


def parse(cls: type[BaseSettings], *args: str) -> tuple[int, str, list[BaseSettings]]:
    """(exit code, output, settings read) of a command with the flags of `cls`."""
    read: list[BaseSettings] = []
    app = typer.Typer()
    app.command()(with_parameters(lambda **given: read.append(read_settings(cls, given)), settings_parameters(cls)))
    result = CliRunner().invoke(app, list(args))
    if result.exception and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result.exit_code, result.output, read


def another_value(cls: type[BaseSettings], name: str) -> Any:
    """A valid value that is not the default."""
    field = cls.model_fields[name]
    if get_origin(field.annotation) is Literal:
        return next(v for v in get_args(field.annotation) if v != field.default)
    if field.annotation is bool:
        return not field.default
    if field.annotation == tuple[str, ...]:
        return ("a:1", "b:2")
    if field.annotation is str:
        return "other"
    most = next((m.le for m in field.metadata if hasattr(m, "le")), None)
    more = (field.default or 0) + 1
    return more if most is None or more <= most else type(field.default)(field.default / 2)


@pytest.mark.parametrize(("cls", "name"), FIELDS, ids=IDS)
def test_flag_and_variable_set_the_same_field(
    cls: type[BaseSettings], name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    value = another_value(cls, name)
    assert value != cls.model_fields[name].default
    _, _, (by_flag,) = parse(cls, *to_flags({name: value}))
    text = ",".join(value) if isinstance(value, tuple) else str(value)
    monkeypatch.setenv(f"OUTRIDER_{name.upper()}", text)
    _, _, (by_variable,) = parse(cls)
    assert by_flag == by_variable == cls(**{name: value})
    assert getattr(by_flag, name) == value


@pytest.mark.parametrize("cls", SETTINGS.values())
def test_no_flag_beside_the_fields(cls: type[BaseSettings]) -> None:
    assert [p.name for p in settings_parameters(cls)] == list(cls.model_fields)
    exit_code, output, _ = parse(cls, "--no-such-flag", "1")
    assert exit_code == 2
    assert "--no-such-flag" in output


@pytest.mark.parametrize("cls", SETTINGS.values())
def test_help_names_each_flag_and_meaning(cls: type[BaseSettings], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "240")
    _, output, _ = parse(cls, "--help")
    for name, field in cls.model_fields.items():
        assert flag_of(name) in output
        assert str(field.description)[:30] in output


def commands(command: Any, *path: str) -> Iterator[tuple[tuple[str, ...], list[str]]]:
    """Each command below, by its words, and the names of its options that are shown."""
    for name, one in getattr(command, "commands", {}).items():
        yield from commands(one, *path, name)
    shown = [param for param in command.params if param.param_type_name == "option" and not param.hidden]
    yield path, [name for param in shown for name in (*param.opts, *param.secondary_opts)]


COMMANDS = list(commands(get_command(app)))


@cache
def narrow_help(path: tuple[str, ...]) -> str:
    """Of a command, on a terminal of 80 columns."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("typer.rich_utils.MAX_WIDTH", 80)
        return CliRunner().invoke(application(path[:1] or FILES), [*path, "--help"], env={"COLUMNS": "80"}).output


@pytest.mark.parametrize(("path", "names"), COMMANDS, ids=[" ".join(path) or "outrider" for path, _ in COMMANDS])
def test_no_narrow_help_cuts_the_name_of_an_option(path: tuple[str, ...], names: list[str]) -> None:
    output = narrow_help(path)
    assert max(map(len, output.splitlines())) <= 80
    assert not set(names) - set(output.replace(",", " ").replace("/", " ").split())


def test_the_commands_are_all_there_and_those_that_call_a_coordinator_name_its_variables() -> None:
    assert sum(len(names) for _, names in COMMANDS) > 300
    variables = {f"{PREFIX}{name.upper()}" for name in ClientSettings.model_fields}
    callers = [path for path, names in COMMANDS if "--address" in names and path[0] != "ray"]
    assert len(callers) == 9
    for path in callers:
        assert variables <= set(re.findall(r"OUTRIDER_[A-Z_]+", narrow_help(path))), path


@pytest.mark.parametrize("role", [*SETTINGS, "up"])
def test_a_narrow_help_cuts_no_flag_and_tells_the_rule_of_variables(role: str) -> None:
    output = narrow_help((role,))
    assert max(map(len, output.splitlines())) <= 80
    names = SETTINGS[role].model_fields if role in SETTINGS else ("host", "target_port", "num_speculative_tokens")
    words = output.replace(",", " ").replace("/", " ").split()
    assert not [name for name in names if flag_of(name) not in words]
    assert "OUTRIDER_<FLAG>" in output


def test_flags_outweigh_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    cls = SETTINGS["coordinator"]
    monkeypatch.setenv("OUTRIDER_PORT", "1001")
    assert parse(cls)[2][0].port == 1001  # type: ignore[attr-defined]
    assert parse(cls, "--port=1002")[2][0].port == 1002  # type: ignore[attr-defined]


def test_unknown_variables_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OUTRIDER_PROT", "1")
    with pytest.raises(InvalidArgument, match="OUTRIDER_PROT"):
        parse(SETTINGS["coordinator"])


@pytest.mark.parametrize(
    ("flags", "named"),
    [(["--port=70000"], "--port"), (["--port=x"], "--port"), (["--log-level=loud"], "--log-level")],
)
def test_values_out_of_range_are_usage_errors(flags: list[str], named: str) -> None:
    exit_code, output, _ = parse(SETTINGS["coordinator"], *flags)
    assert exit_code == 2
    assert named in output


def test_bounds_that_flags_cannot_tell_are_still_checked() -> None:
    with pytest.raises(ValidationError, match="peer_timeout_s"):
        parse(SETTINGS["coordinator"], "--peer-timeout-s=0")


@pytest.mark.parametrize("cls", [CoordinatorSettings, GatewaySettings])
def test_a_tenant_header_that_no_call_can_carry_is_refused(cls: type[BaseSettings]) -> None:
    with pytest.raises(ValueError, match="trusted_tenant_header"):
        parse(cls, "--trusted-tenant-header", "X-Team")
