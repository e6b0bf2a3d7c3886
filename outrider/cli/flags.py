"""Flags made from settings classes: field `num_threads` is `--num-threads` is `OUTRIDER_NUM_THREADS`, never by hand."""

from __future__ import annotations

import difflib
import inspect
import os
import sys
import types
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, Literal, Optional, TypeVar, Union, get_args, get_origin, get_type_hints

import annotated_types
import typer
from pydantic.fields import FieldInfo
from pydantic_settings import BaseSettings
from typer.core import TyperCommand

from outrider.cli.setting_names import flag_of
from outrider.errors import InvalidArgument
from outrider.settings import PREFIX, known_variables, unknown_variables

S = TypeVar("S", bound=BaseSettings)
CLIENT_VARIABLES = {"OUTRIDER_ADDRESS", "OUTRIDER_CACHE", "OUTRIDER_TEST_SCALE"}


VARIABLES_RULE = (
    f"Each setting has a variable too, {PREFIX}<FLAG>: --log-level is {PREFIX}LOG_LEVEL. A flag outweighs its variable."
)
"""For the end of a help text: beside each flag its variable would not fit."""
CALLS_RULE = (
    "To the coordinator goes the token in OUTRIDER_TOKEN or, better, in the first line of file OUTRIDER_TOKEN_FILE. "
    "It is called by TLS with OUTRIDER_TLS_CA (file of the authorities that its certificate may come from) or "
    "OUTRIDER_TLS=true (any public one); OUTRIDER_TLS_SERVER_NAME is what the certificate must name if not the host; "
    "OUTRIDER_TLS_CERT and OUTRIDER_TLS_KEY are a certificate of one's own, where it asks callers for one."
)
"""The same for a command that calls a coordinator: it has variables for these, and no flags."""


class PlainHelp(TyperCommand):
    """A command whose help is plain text: a table of many long flags cuts their names on a narrow terminal."""

    def __init__(self, *args: Any, **values: Any) -> None:
        super().__init__(*args, **{**values, "rich_markup_mode": None})


def parameter(name: str, field: FieldInfo) -> inspect.Parameter:
    """The flag of one settings field. Unset it is None, so that the environment and then the default decide."""
    kind = _cli_type(field.annotation)
    low, high = _bounds(field) if kind in (int, float) else (None, None)
    declaration = f"{flag_of(name)}/--no-{name.replace('_', '-')}" if kind is bool else flag_of(name)
    option = typer.Option(
        declaration,
        help=field.description,
        min=low,
        max=high,
        show_default=_shown(field.default),
    )
    return keyword(name, kind, option)


def keyword(name: str, kind: Any, option: Any, default: Any = None) -> inspect.Parameter:
    """A keyword parameter as typer reads it."""
    annotation = Annotated[Optional[kind], option] if default is None else Annotated[kind, option]  # noqa: UP045
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)


def own_parameters(function: Callable[..., Any]) -> list[inspect.Parameter]:
    """The keywords that the function itself declares, as typer reads them; `**given` is left to others."""
    hints = get_type_hints(function, include_extras=True)
    declared = inspect.signature(function).parameters.values()
    return [one.replace(annotation=hints[one.name]) for one in declared if one.kind is one.KEYWORD_ONLY]


def with_parameters(function: Callable[..., Any], parameters: list[inspect.Parameter]) -> Callable[..., Any]:
    """`function(**values)` with the signature that typer shall see."""

    def command(**values: Any) -> Any:
        return function(**values)

    command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    command.__annotations__ = {p.name: p.annotation for p in parameters}
    return command


def settings_parameters(cls: type[BaseSettings]) -> list[inspect.Parameter]:
    """A flag for each field."""
    return [parameter(name, field) for name, field in cls.model_fields.items()]


def read_settings(cls: type[S], given: Mapping[str, Any]) -> S:
    """Settings from flags (those not None), environment and defaults, in this order of weight.

    Raises InvalidArgument for an `OUTRIDER_` variable that nothing reads, pydantic's ValidationError for a bad value.
    """
    refuse_unknown_variables()
    return cls(**{name: value for name, value in given.items() if value is not None})


def refuse_unknown_variables() -> None:
    """A variable that nothing reads is a typo."""
    unknown = unknown_variables(CLIENT_VARIABLES)
    if unknown:
        raise InvalidArgument(f"unknown environment variable {with_likely_names(unknown)}: unset it, or mend its name")


def with_likely_names(unknown: Sequence[str]) -> str:
    """Variables that nothing reads, each with the one that was probably meant."""
    known = sorted(name.removeprefix(PREFIX) for name in known_variables() | CLIENT_VARIABLES)
    likely = {name: difflib.get_close_matches(name.removeprefix(PREFIX), known, 1) for name in unknown}
    return ", ".join(name + (f" (did you mean {PREFIX}{near[0]}?)" if near else "") for name, near in likely.items())


def refuse_variables(meant: Mapping[str, str], command: str) -> None:
    """Refuses settings variables that `command` cannot honour; `meant` maps a field to what to use instead."""
    for name, instead in meant.items():
        variable = PREFIX + name.upper()
        if os.environ.get(variable):
            raise InvalidArgument(f"{variable} means nothing to `outrider {command}`: unset it, and {instead}")


def refuse_arguments(module: str, command: str) -> None:
    """Ends a `python -m <module>` that was given arguments, which it would not read, with its usage."""
    if len(sys.argv) > 1:
        sys.stderr.write(
            f"usage: python -m {module}\n"
            f"It takes no arguments: its settings are variables OUTRIDER_*. For flags: outrider {command} --help\n"
        )
        raise SystemExit(0 if sys.argv[1:] in (["-h"], ["--help"]) else 2)


def to_flags(values: Mapping[str, Any]) -> list[str]:
    """The command line that gives these settings."""
    flags: list[str] = []
    for name, value in values.items():
        if value is None:
            continue
        if isinstance(value, bool):
            flags.append(flag_of(name) if value else f"--no-{name.replace('_', '-')}")
        else:
            text = ",".join(map(str, value)) if isinstance(value, tuple | list) else str(value)
            flags.append(f"{flag_of(name)}={text}")
    return flags


def _cli_type(annotation: Any) -> Any:
    if get_origin(annotation) in (Union, types.UnionType):
        (annotation,) = (a for a in get_args(annotation) if a is not type(None))
    if annotation in (str, int, float, bool) or get_origin(annotation) is Literal:
        return annotation
    return str


def _bounds(field: FieldInfo) -> tuple[float | None, float | None]:
    low = next((m.ge for m in field.metadata if isinstance(m, annotated_types.Ge)), None)
    high = next((m.le for m in field.metadata if isinstance(m, annotated_types.Le)), None)
    return low, high  # type: ignore[return-value]


def _shown(default: Any) -> str | bool:
    if isinstance(default, bool):
        return "on" if default else "off"
    if isinstance(default, tuple):
        return ",".join(default) or False  # type: ignore[return-value]
    return False if default in (None, "") else str(default)
