"""Settings in errors, as who runs a command knows them: `--tls-cert (OUTRIDER_TLS_CERT)`. Elsewhere an error names the
field of the settings class."""

from __future__ import annotations

import re
from collections.abc import Callable

from pydantic_settings import BaseSettings

from outrider.errors import InvalidArgument
from outrider.serving.watched import UNREADABLE_FILE
from outrider.settings import PREFIX, ClientSettings

_FIELD = re.compile(r"(?<![\w./-])[a-z]+(?:_[a-z0-9]+)+\b")
"""A name of several words: those of one word, such as host, are words of a message as well."""
_OF_ONE_WORD = r"(:| (and|cannot|gives?|had|has|is|must|names?|needs|takes?)\b)"
"""What follows such a one where it is the name."""


def variable_of(name: str) -> str:
    """`num_threads` -> `OUTRIDER_NUM_THREADS`."""
    return PREFIX + name.upper()


def flag_of(name: str) -> str:
    """`num_threads` -> `--num-threads`."""
    return "--" + name.replace("_", "-")


def flag_and_variable(name: str) -> str:
    """Both, at the first mention."""
    return f"{flag_of(name)} ({variable_of(name)})"


def naming_settings(error: InvalidArgument, *classes: type[BaseSettings]) -> str | None:
    """The error's message with each field of `classes` called by its flag; None where it is about none of them."""
    fields = {name for cls in classes for name in cls.model_fields}
    return _renamed(error, fields, first=flag_and_variable, further=flag_of)


def naming_variables(error: InvalidArgument) -> str | None:
    """The same for settings of clients, which have variables alone."""
    return _renamed(error, set(ClientSettings.model_fields), first=variable_of, further=variable_of)


def _renamed(
    error: InvalidArgument, fields: set[str], *, first: Callable[[str], str], further: Callable[[str], str]
) -> str | None:
    given = error.field or ""
    field = given.replace("tls.", "tls_")
    if field not in fields:
        return None
    behind = r"\b" if "_" in field or "." in given else _OF_ONE_WORD
    is_named = error.reason != UNREADABLE_FILE and re.match(re.escape(given) + behind, error.message)
    rest = error.message.removeprefix(given) if is_named else f": {error.message}"
    return first(field) + _FIELD.sub(lambda found: further(found[0]) if found[0] in fields else found[0], rest)
