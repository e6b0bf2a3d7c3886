"""Counts scale with OUTRIDER_TEST_SCALE: `make test` runs a seeded tenth, `make check` the whole."""

import os

SCALE = float(os.environ.get("OUTRIDER_TEST_SCALE", "0.1"))


def scaled(count: int, at_least: int = 1) -> int:
    """`count` is the full number; the result is what this run does."""
    return max(at_least, round(count * SCALE))
