"""What every command prints with: answers on stdout, progress and errors on stderr, JSON as one last line."""

from __future__ import annotations

import enum
import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn

from pydantic import ValidationError
from pydantic_settings import BaseSettings
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from outrider.cli.setting_names import flag_and_variable, flag_of, naming_settings
from outrider.errors import InvalidArgument, OutriderError
from outrider.serving.tokens import NO_TOKEN
from outrider.settings import PREFIX

EXIT_FAILURE = 1
EXIT_USAGE = 2
EXIT_INCONCLUSIVE = 3
EXIT_UNTOLD = 4
"""Of commands whose EXIT_FAILURE is a finding: nothing could be asked or compared, so there is none."""
EXIT_BROKEN_PIPE = 141
"""What a shell tells of a process that SIGPIPE ended."""
_EXTRAS = {
    **dict.fromkeys(("torch", "transformers", "safetensors", "gguf"), "worker"),
    "matplotlib": "plot",
    "ray": "ray",
    "starlette": "gateway",
    "uvicorn": "gateway",
}
"""By a module that may be missing, the extra that brings it."""
OnProgress = Callable[[str, float | None], None]
"""What is being done now, and how far it is in 0 to 1 (None: unknown)."""
MAX_TABLE_CHARS = 1000
PROGRESS_INTERVAL_S = 3.0
"""Without a terminal, progress is told this often at most."""

out = Console(highlight=False, soft_wrap=True)
err = Console(stderr=True, highlight=False, soft_wrap=True)


def print_json(value: Any) -> None:
    """One line, unstyled, for machines; enums by their names, bytes as numbers."""
    sys.stdout.write(json.dumps(_plain(value), default=str) + "\n")
    sys.stdout.flush()


def _plain(value: Any) -> Any:
    if isinstance(value, enum.Enum):
        return str(value)
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    return [_plain(item) for item in value] if isinstance(value, list | tuple | bytes) else value


def print_table(table: Table) -> None:
    """Whole: in a terminal words are broken where they do not fit, into a pipe it goes as wide as it is."""
    for column in table.columns:
        column.overflow = "fold"
    if not out.is_terminal:
        table.width = out.measure(table, options=out.options.update_width(MAX_TABLE_CHARS)).maximum
    out.print(table)


def require_writable(path: Path, name: str) -> None:
    """Of what is written once a run is over: told before it where that cannot be. name: of the option. Raises
    InvalidArgument."""
    try:
        path.touch()
    except OSError as error:
        raise InvalidArgument(f"{flag_of(name)}: cannot write {path}: {error.strerror}", field=name) from None


def print_error(message: str) -> None:
    """On stderr."""
    err.print(Text.assemble(("error:", "bold red"), f" {message}"))


def fail(message: str, code: int = EXIT_FAILURE) -> NoReturn:
    """One line on stderr, then the end."""
    print_error(message)
    raise SystemExit(code)


def debugging() -> bool:
    """Whether tracebacks are wanted."""
    return os.environ.get(PREFIX + "LOG_LEVEL", "").lower() == "debug" or "--log-level=debug" in sys.argv


@contextmanager
def reporting_errors(*settings: type[BaseSettings], is_finding: bool = False) -> Iterator[None]:
    """Turns failures into one line that names the fix; with log level debug the traceback comes first. settings: those
    that the command has a flag and a variable for each of. is_finding: EXIT_FAILURE is what the command finds out, and
    whatever keeps it from that, a fault of its own included, ends with EXIT_UNTOLD."""
    try:
        yield
    except BrokenPipeError:  # who reads us has enough, as in `| head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # or the flush at exit fails again
        raise SystemExit(EXIT_BROKEN_PIPE) from None
    except (OutriderError, ValidationError, ModuleNotFoundError, OSError) as error:
        if debugging():
            err.print_exception()
        message, code = describe_failure(error, *settings)
        fail(message, EXIT_UNTOLD if is_finding and code == EXIT_FAILURE else code)
    except KeyboardInterrupt:
        raise SystemExit(130) from None
    except Exception:
        if not is_finding:
            raise
        err.print_exception()
        raise SystemExit(EXIT_UNTOLD) from None


def describe_failure(error: BaseException, *settings: type[BaseSettings]) -> tuple[str, int]:
    """Message and exit code. settings: whose fields are called by their flags and variables."""
    match error:
        case ValidationError():
            return "; ".join(_describe_field(fault) for fault in error.errors()), EXIT_USAGE
        case InvalidArgument():
            if (told := naming_settings(error, *settings)) is not None:
                return told, EXIT_USAGE
            field = error.field or ""
            where = "" if field in error.message or flag_of(field) in error.message else f" [{field}]"
            return error.message + where, EXIT_USAGE
        case OutriderError() if error.reason == NO_TOKEN:
            return f"no token: set {PREFIX}TOKEN_FILE to a file that holds yours, or {PREFIX}TOKEN to it", EXIT_FAILURE
        case OutriderError():
            is_told = not error.retry_delay_s or "try again in" in error.message
            return error.message + ("" if is_told else f" (try again in {error.retry_delay_s:.3g} s)"), EXIT_FAILURE
        case ModuleNotFoundError() if error.name in _EXTRAS:
            return f"{error.name} is not installed: pip install 'outrider[{_EXTRAS[error.name]}]'", EXIT_FAILURE
    return f"{type(error).__name__}: {error}", EXIT_FAILURE


def _describe_field(fault: Any) -> str:
    name = str(fault["loc"][0]) if fault["loc"] else "settings"
    message = fault["msg"].removeprefix("Value error, ")
    return f"{flag_and_variable(name)} is {fault['input']!r}: {message}"


@contextmanager
def progress(description: str) -> Iterator[OnProgress]:
    """A bar on stderr.

    Without a terminal it prints a line when the text has changed, every few seconds at most.
    """
    if not err.is_terminal:
        last, next_at = "", 0.0

        def report_line(text: str, fraction: float | None) -> None:
            nonlocal last, next_at
            if text != last and time.monotonic() >= next_at:
                last, next_at = text, time.monotonic() + PROGRESS_INTERVAL_S
                err.print(f"{description}: {text}", markup=False)

        yield report_line
        return
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.fields[doing]}"),
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=err, transient=True) as bar:
        task = bar.add_task(description, total=None, doing="")

        def report_bar(text: str, fraction: float | None) -> None:
            total = None if fraction is None else 1.0
            bar.update(task, total=total, completed=fraction or 0.0, doing=text)

        yield report_bar
