"""Workers ask the C library for large pages, once, and leave what the user has decided."""

import subprocess
import sys
from pathlib import Path

import pytest

from outrider.serving import huge_pages

PROGRAM = """
import os, sys
from pathlib import Path
from outrider.serving import huge_pages
huge_pages.asking.__defaults__ = (Path(sys.argv[1]),)
huge_pages.start_over_asking()
print(os.getpid(), os.environ["GLIBC_TUNABLES"], sys.argv[1:], sys.stdin.read())
"""


@pytest.fixture
def madvise(tmp_path: Path) -> Path:
    path = tmp_path / "enabled"
    path.write_text("always [madvise] never\n")
    return path


@pytest.mark.parametrize("mode", ["always", "never"])
def test_nothing_is_asked_where_it_would_not_matter(tmp_path: Path, mode: str) -> None:
    path = tmp_path / "enabled"
    path.write_text("always madvise never\n".replace(mode, f"[{mode}]"))
    assert huge_pages.mode(path) == mode
    assert huge_pages.asking({}, path) == {}


def test_no_such_pages(tmp_path: Path) -> None:
    assert huge_pages.mode(tmp_path / "absent") == ""
    assert huge_pages.asking({}, tmp_path / "absent") == {}


def test_asked_beside_what_stands_there(madvise: Path) -> None:
    assert huge_pages.asking({}, madvise) == {"GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"}
    others = {"GLIBC_TUNABLES": "glibc.malloc.arena_max=2"}
    assert huge_pages.asking(others, madvise) == {"GLIBC_TUNABLES": "glibc.malloc.arena_max=2:glibc.malloc.hugetlb=1"}


def test_the_users_choice_stands(madvise: Path) -> None:
    assert huge_pages.asking({"GLIBC_TUNABLES": "glibc.malloc.hugetlb=0"}, madvise) == {}


@pytest.mark.parametrize("mode", ["always", "madvise"])
def test_started_over_once_with_the_same_command_and_input(tmp_path: Path, mode: str) -> None:
    """Where large pages are always given nothing starts over; the variable is then what was there."""
    path = tmp_path / "enabled"
    path.write_text("always madvise never\n".replace(mode, f"[{mode}]"))
    command = [sys.executable, "-c", PROGRAM, str(path), "--flag=1"]
    environment = {"GLIBC_TUNABLES": "glibc.malloc.perturb=0"}
    process = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment
    )
    out, err = process.communicate("lifeline")
    assert process.returncode == 0, err
    wanted = "glibc.malloc.perturb=0" + (":glibc.malloc.hugetlb=1" if mode == "madvise" else "")
    assert out == f"{process.pid} {wanted} ['{path}', '--flag=1'] lifeline\n"
