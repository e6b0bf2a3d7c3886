"""Heads that come with this package: each in a folder of its name, with a README that tells how it was made.

A target worker finds them by name (`--heads smollm2-135m-eagle3`); `outrider up`, `demo`, `bench` and `verify` use the
one that was made for their target unless told otherwise.
"""

from __future__ import annotations

from pathlib import Path

TARGETS = {"smollm2-135m-eagle3": "smollm2-135m"}
"""By head, the bundled model that it was made for, the best one first."""


def head_folder(name: str) -> Path | None:
    """Where the head of that name is; None when none comes with the package."""
    return Path(__file__).parent / name if name in TARGETS else None


def heads_of(model: str) -> tuple[str, ...]:
    """The head that goes with a target unless another is named: one at most."""
    return tuple(name for name, target in TARGETS.items() if target == model)[:1]
