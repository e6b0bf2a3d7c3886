"""The log level counts for the services' own packages, and for no library."""

import logging
from collections.abc import Iterator

import pytest

from outrider.serving.server import LOGGED_PACKAGES, configure_logging


@pytest.fixture(autouse=True)
def levels_as_before() -> Iterator[None]:
    before = {name: logging.getLogger(name).level for name in LOGGED_PACKAGES}
    yield
    for name, level in before.items():
        logging.getLogger(name).setLevel(level)


@pytest.mark.parametrize("module", ["outrider.serving.metrics", "coordinator.fleet.worker", "draft_worker.session"])
def test_each_service_s_modules_log_from_the_level_on(module: str) -> None:
    configure_logging("info")
    assert logging.getLogger(module).isEnabledFor(logging.INFO)
    configure_logging("error")
    assert not logging.getLogger(module).isEnabledFor(logging.WARNING)


def test_libraries_stay_as_they_are() -> None:
    before = logging.getLogger("grpc").getEffectiveLevel()
    configure_logging("debug")
    assert logging.getLogger("grpc").getEffectiveLevel() == before
