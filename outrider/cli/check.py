"""What `outrider doctor` finds."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Check:
    """One line. `state` is ok, warn or fail; `fix` says what to do unless it is ok."""

    state: str
    name: str
    detail: str
    fix: str = ""
