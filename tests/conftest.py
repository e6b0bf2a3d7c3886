"""Counts scale with OUTRIDER_TEST_SCALE: `make test` runs a seeded tenth, `make check` the whole."""

import gc
import logging
import os
import shutil
import sys
from collections.abc import Generator
from pathlib import Path

import pytest

if "PYTEST_XDIST_WORKER" in os.environ:
    # The cores are shared out among the test processes: threads of two of them would wait for one another.
    os.environ.setdefault("OMP_NUM_THREADS", "1")

# Where nothing is meant to be silent, only a slow machine is.
os.environ.setdefault("OUTRIDER_PEER_TIMEOUT_S", "60")
os.environ.setdefault("OUTRIDER_DRAFT_BREAKER_SHARE", "1")

import outrider.lm  # noqa: F401  (before anything imports torch: it sets how idle threads wait)
from coordinator import drafting
from outrider.serving.server import LOGGED_PACKAGES

drafting.MIN_WAIT_S = 0.25

SCALE = float(os.environ.get("OUTRIDER_TEST_SCALE", "0.1"))


def scaled(count: int, at_least: int = 1) -> int:
    """`count` is the full number; the result is what this run does."""
    return max(at_least, round(count * SCALE))


@pytest.fixture(autouse=True)
def _log_levels() -> None:
    """A service that ran in this process has set levels: no test hears less for it."""
    for package in LOGGED_PACKAGES:
        logging.getLogger(package).setLevel(logging.NOTSET)


def require_tool(name: str) -> str:
    """Path of a tool from outside. Missing: the test is skipped with the tool's name, or fails where CI=true."""
    path = shutil.which(name, path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}")
    if path is None:
        if os.environ.get("CI") == "true":
            pytest.fail(f"{name} is missing, and .ci/run must install it", pytrace=False)
        pytest.skip(f"{name} is not installed")
    return path


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """What is imported stays: looking through it for garbage took 0.4 s each time, of which loading a model is one."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files with slow tests come first, each file whole: of two processes neither is left alone with a long one."""
    slow = {item.path for item in items if item.get_closest_marker("slow")}
    items.sort(key=lambda item: item.path not in slow)
