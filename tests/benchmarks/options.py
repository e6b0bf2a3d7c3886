"""Variables that both benchmarks take, from the environment (so that make variables work)."""

from __future__ import annotations

import math
import os
from pathlib import Path

from outrider.cli.prompts import read_prompts
from outrider.cli.stack import DEFAULT_MODEL
from outrider.errors import InvalidArgument


def text(name: str, default: str = "") -> str:
    """An empty variable counts as absent: make passes those on."""
    return os.environ.get(name, "").strip() or default


def number(name: str, default: int) -> int:
    """Raises InvalidArgument, naming the variable, unless it is a whole number above 0."""
    value = text(name, str(default))
    if not value.isdigit() or int(value) < 1:
        raise InvalidArgument(f"{name} is {value!r}, must be a whole number above 0", field=name)
    return int(value)


def whole_numbers(name: str, default: str) -> list[int]:
    """Comma separated. Raises InvalidArgument, naming the variable, unless all are whole numbers above 0."""
    values = [value.strip() for value in text(name, default).split(",")]
    if not all(value.isdigit() and int(value) for value in values):
        raise InvalidArgument(f"{name} is {','.join(values)!r}, must be whole numbers above 0", field=name)
    return [int(value) for value in values]


def words(name: str, default: str) -> list[str]:
    """Comma separated, each once; empty ones are left out."""
    return list(dict.fromkeys(filter(None, (value.strip() for value in text(name, default).split(",")))))


def real(name: str, default: float) -> float:
    """Raises InvalidArgument, naming the variable, unless it is a number from 0 on."""
    return _real(name, text(name, str(default)))


def reals(name: str, default: str) -> list[float]:
    """Comma separated. Raises InvalidArgument, naming the variable, unless all are numbers from 0 on."""
    return [_real(name, value) for value in words(name, default)]


def _real(name: str, value: str) -> float:
    try:
        number = float(value)
    except ValueError:
        number = math.nan
    if not 0 <= number < math.inf:
        raise InvalidArgument(f"{name} is {value!r}, must be a number from 0 on", field=name)
    return number


def models() -> tuple[str, str]:
    """(TARGET, DRAFT): the embedded model, drafting for itself, when neither is given.

    Raises InvalidArgument when one is given alone.
    """
    if bool(text("TARGET")) != bool(text("DRAFT")):
        missing = "DRAFT" if text("TARGET") else "TARGET"
        raise InvalidArgument(f"{missing} is missing: give TARGET and DRAFT, or neither", field=missing)
    return text("TARGET", DEFAULT_MODEL), text("DRAFT", DEFAULT_MODEL)


def prompts(default_count: int) -> tuple[list[str], int]:
    """PROMPTS is a JSONL file, a number of our own prompts, or both as FILE:NUMBER. Returns (prompts, how many)."""
    path, _, count = text("PROMPTS").rpartition(":")
    if count and not count.isdigit():
        path, count = text("PROMPTS"), ""
    found = read_prompts(Path(path) if path else None)
    if not count:
        return found, len(found) if path else default_count
    if int(count) < 1:
        raise InvalidArgument("PROMPTS asks for 0 prompts, must be at least 1", field="PROMPTS")
    return found, int(count)
