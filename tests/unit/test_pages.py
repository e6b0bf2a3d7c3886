"""What the pages name is there: files, commands with flags and values, settings, options, reasons, make targets."""

from __future__ import annotations

import ast
import re
from functools import cache

import pytest
from pages import GENERATED, ROOT, Page, all_flags, find_command, read_pages

from outrider.client import GenerateOptions
from outrider.server_info import ServerInfo
from outrider.settings import known_variables

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")
EVERY = pytest.mark.parametrize("page", read_pages(), ids=lambda page: page.name)
SOURCES = ("outrider", "coordinator", "draft_worker", "target_worker", "protos")


@cache
def identifiers() -> frozenset[str]:
    """Every word of the program's own sources."""
    files = (path for folder in SOURCES for kind in ("*.py", "*.proto") for path in (ROOT / folder).rglob(kind))
    return frozenset(word for path in files for word in re.findall(r"\w+", path.read_text(encoding="utf-8")))


@EVERY
def test_links_lead_to_files(page: Page) -> None:
    assert page.links
    for link in page.links:
        assert (page.path.parent / link).exists(), link


def test_each_page_is_linked_from_another() -> None:
    pages = read_pages()
    for path in (*(page.path for page in pages), GENERATED):
        sources = [p.name for p in pages if any((p.path.parent / link).resolve() == path for link in p.links)]
        assert [name for name in sources if name != str(path.relative_to(ROOT))], f"nothing leads to {path.name}"


@EVERY
def test_commands_are_taken_as_printed(page: Page) -> None:
    for program, *words in page.commands:
        assert program == "outrider", f"{program}: say here how it is checked"
        command, arguments = find_command(words)
        command.make_context(command.name, list(arguments))  # raises on a flag or a value that is none


@EVERY
def test_commands_in_passing_exist(page: Page) -> None:
    for word in page.words:
        first, *rest = word.split()
        if first == "outrider" and rest:
            command, arguments = find_command(rest)
            known = {flag for parameter in command.params for flag in parameter.opts}
            assert {argument for argument in arguments if argument.startswith("--")} <= known, word
        if first == "make" and rest:
            assert re.search(rf"^{rest[0]}:.*##", (ROOT / "Makefile").read_text(encoding="utf-8"), re.M), word


@EVERY
def test_flags_and_variables_exist(page: Page) -> None:
    flags = {part for word in page.words for part in word.split() if part.startswith("--")}
    assert flags <= all_flags()
    assert set(re.findall(r"OUTRIDER_[A-Z_]+", page.text)) <= known_variables()


@EVERY
def test_files_exist(page: Page) -> None:
    named = {word for word in page.words if re.fullmatch(r"[\w/-]+\.(py|proto|md|yaml|toml)|[\w-]+(/[\w-]+)*/?", word)}
    paths = {word for word in named if "/" in word or word.endswith(".py")}
    for path in paths - {"/metrics"}:
        assert any((folder / path).exists() for folder in (ROOT, page.path.parent, ROOT / "coordinator")), path


@EVERY
def test_names_are_those_of_the_program(page: Page) -> None:
    """Reasons and rules in capitals, fields and options with an underscore."""
    for word in page.words:
        if re.fullmatch(r"[A-Z][A-Z_]{3,}|[a-z]+(_[a-z0-9]+)+", word) and not word.startswith("outrider_"):
            assert word in identifiers() or word in ServerInfo.__dataclass_fields__, word
        option = re.fullmatch(r"(\w+)=\S+", word)
        if option and option[1] != "numerics":
            assert option[1] in GenerateOptions.__annotations__, word


@EVERY
def test_python_options_exist(page: Page) -> None:
    for block in page.python_blocks():
        calls = [node for node in ast.walk(ast.parse(block)) if isinstance(node, ast.Call)]
        assert calls
        for call in calls:
            assert {keyword.arg for keyword in call.keywords} <= set(GenerateOptions.__annotations__), ast.unparse(call)


def test_a_wrong_command_would_be_found() -> None:
    command, arguments = find_command(["plan", "--pass-ms", "thirty"])
    with pytest.raises(Exception, match=r"number|float"):
        command.make_context(command.name, arguments)
    with pytest.raises(AssertionError, match="no command"):
        find_command(["plans"])
    assert "--no-such-flag" not in all_flags()
