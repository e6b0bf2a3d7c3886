"""What to do about a pool's workers: their phases and the wanted number in, actions out. No Ray, no clock, no I/O.

Nothing is remembered: whatever was lost on the way, an action that was not carried out is planned again the next time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum


class Phase(StrEnum):
    """Of one worker, as seen from outside."""

    PENDING = "pending"
    """Does not answer: without a place, or between death and restart."""
    STARTING = "starting"
    """Has its place, loads its model, has no session."""
    SERVING = "serving"
    DRAINING = "draining"
    """Takes no new sessions, ends those that it has."""
    DRAINED = "drained"
    FAILED = "failed"
    """Cannot start."""
    ENDING = "ending"
    """Was ended, and is not gone yet: its name, port and resources may still be taken."""


@dataclass(frozen=True, slots=True)
class Observed:
    """index: among the pool's workers. leaving_s: since it was first asked to drain; None: it was not."""

    index: int
    phase: Phase
    num_sessions: int = 0
    leaving_s: float | None = None

    @property
    def leaves(self) -> bool:
        return self.leaving_s is not None or self.phase in (Phase.DRAINING, Phase.DRAINED, Phase.ENDING)


@dataclass(frozen=True, slots=True)
class Start:
    """A worker of this index."""

    index: int


@dataclass(frozen=True, slots=True)
class Drain:
    """No new sessions to it; those that run end in peace."""

    index: int


@dataclass(frozen=True, slots=True)
class End:
    """Its process, at once, and for good."""

    index: int


Action = Start | Drain | End

_WORTH = (Phase.PENDING, Phase.STARTING, Phase.SERVING)
"""Phases of workers that count, those to give up first before those to keep."""


def plan(
    wanted: int, workers: Sequence[Observed], *, max_workers: int, grace_s: float, may_start: bool = True
) -> list[Action]:
    """Brings the pool towards `wanted` workers that do not leave, by draining where there are too many.

    Never more than `max_workers` are there at once, leaving ones included: these hold their resources to the end.
    grace_s: longest drain. may_start: False while workers that fail to start are given time.
    """
    actions: list[Action] = []
    for worker in workers:
        if worker.leaves:
            actions += _see_off(worker, grace_s)
        elif worker.phase is Phase.FAILED:
            actions.append(End(worker.index))
    kept = sorted((w for w in workers if not w.leaves and w.phase in _WORTH), key=_worth)
    for worker in kept[: max(0, len(kept) - wanted)]:
        actions.append(End(worker.index) if worker.phase is Phase.PENDING else Drain(worker.index))
    taken = {worker.index for worker in workers}
    free = [index for index in range(max_workers) if index not in taken]
    if may_start:
        actions += [Start(index) for index in free[: max(0, wanted - len(kept))]]
    return actions


def _see_off(worker: Observed, grace_s: float) -> list[Action]:
    if worker.phase is Phase.ENDING:
        return []
    is_late = worker.leaving_s is not None and worker.leaving_s > grace_s
    if is_late or worker.phase in (Phase.DRAINED, Phase.FAILED, Phase.PENDING):
        return [End(worker.index)]
    if worker.phase is Phase.DRAINING:
        return []
    # it was started again meanwhile, or has not heard
    return [Drain(worker.index)]


def _worth(worker: Observed) -> tuple[int, int, int]:
    return _WORTH.index(worker.phase), worker.num_sessions, -worker.index
