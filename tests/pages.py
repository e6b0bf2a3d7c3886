"""The pages of documentation, and what can be asked of them: links, commands, names in backticks."""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import typer.main

from outrider.cli.app import app

ROOT = Path(__file__).parents[1]
GENERATED = ROOT / "docs/api.md"
PAGES = (
    *sorted(path for path in (ROOT / "docs").glob("*.md") if path != GENERATED),
    *(ROOT / service / "README.md" for service in ("coordinator", "draft_worker", "target_worker")),
)
MIGRATING = ROOT / "docs/migrating.md"
"""Its headings and the first columns of its tables are other people's."""


@dataclass(frozen=True)
class Page:
    """One of them. `commands`: lines of indented blocks, as a shell splits them."""

    path: Path
    text: str

    @property
    def name(self) -> str:
        return str(self.path.relative_to(ROOT))

    @property
    def prose(self) -> str:
        """Without fenced blocks, and without what is other people's."""
        text = re.sub(r"^```.*?^```$", "", self.text, flags=re.M | re.S)
        return re.sub(r"^#.*$|^\|[^|]*\|", "|", text, flags=re.M) if self.path == MIGRATING else text

    @property
    def commands(self) -> list[list[str]]:
        lines = re.findall(r"^ {4}(\S.*)$", re.sub(r"\\\n\s*", "", self.prose), re.M)
        return [shlex.split(line, comments=True) for line in lines]

    @property
    def words(self) -> list[str]:
        """What stands in backticks."""
        return [" ".join(word.split()) for word in re.findall(r"`([^`]+)`", self.prose)]

    @property
    def links(self) -> list[str]:
        return re.findall(r"\]\(([^)#]+)[^)]*\)", self.text)

    def python_blocks(self) -> list[str]:
        return re.findall(r"^```python\n(.*?)^```$", self.text, re.M | re.S)


def read_pages() -> list[Page]:
    return [Page(path, path.read_text(encoding="utf-8")) for path in PAGES]


@cache
def root_command() -> Any:
    return typer.main.get_command(app)


def find_command(words: list[str]) -> tuple[Any, list[str]]:
    """The program's command that `words` begin with, and its arguments. Raises AssertionError where there is none."""
    command, words = root_command(), list(words)
    while hasattr(command, "commands"):
        assert words, "names a group of commands alone"
        assert words[0] in command.commands, f"no command {words[0]}"
        command = command.commands[words.pop(0)]
    return command, words


def all_flags() -> set[str]:
    """Of every command."""

    def of(command: Any) -> set[str]:
        own = {flag for parameter in command.params for flag in (*parameter.opts, *parameter.secondary_opts)}
        return own.union(*map(of, getattr(command, "commands", {}).values()))

    return of(root_command())
