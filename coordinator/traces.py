"""Rounds of the last requests, for whoever asks how one of them went: counts and times, never text or ids."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field

from outrider.errors import NotFound
from outrider.results import GammaCause, Step, StreamTrace

MAX_STEPS_A_STREAM = 4096

CAUSES = {
    "fixed": GammaCause.FIXED,
    "off": GammaCause.OFF,
    "best": GammaCause.BEST,
    "load": GammaCause.LOAD,
    "prior": GammaCause.PRIOR,
    "match": GammaCause.MATCH,
    "probe": GammaCause.PROBE,
    "warm-up": GammaCause.WARM_UP,
    "no-room": GammaCause.NO_ROOM,
    "no-match": GammaCause.NO_MATCH,
    "no-draft-worker": GammaCause.NO_DRAFTER,
    "draft-opening": GammaCause.NO_DRAFTER,
    "draft-context-full": GammaCause.NO_DRAFTER,
    "draft-features-late": GammaCause.NO_DRAFTER,
    "draft-lacks-features": GammaCause.NO_DRAFTER,
    "draft-late": GammaCause.DRAFT_LATE,
    "draft-lost": GammaCause.DRAFT_LOST,
    "prefill": GammaCause.PREFILL,
    "plain": GammaCause.PREFILL,
}
"""By the reason of a choice. `plain` is the token that a session begins with which was opened anew."""


@dataclass(slots=True)
class _Stream:
    steps: list[Step] = field(default_factory=list)
    num_left_out: int = 0


@dataclass(slots=True)
class _Request:
    tenant: str
    streams: list[_Stream]


class Traces:
    """Of one coordinator. The oldest requests go first, once there are more than `max_steps` rounds in all."""

    def __init__(self, max_steps: int) -> None:
        self._max_steps = max_steps
        self._num_steps = 0
        self._requests: OrderedDict[str, _Request] = OrderedDict()

    def begin(self, request_id: str, tenant: str, num_choices: int) -> None:
        """Of a request that begins; one of the same name is forgotten."""
        if not self._max_steps:
            return
        self._forget(request_id)
        self._requests[request_id] = _Request(tenant, [_Stream() for _ in range(num_choices)])

    @property
    def is_on(self) -> bool:
        return self._max_steps > 0

    def add(self, request_id: str, choice: int, step: Step) -> None:
        """A round that has ended."""
        request = self._requests.get(request_id)
        if request is None:
            return
        stream = request.streams[choice]
        if len(stream.steps) >= MAX_STEPS_A_STREAM:
            stream.num_left_out += 1
            return
        stream.steps.append(step)
        self._num_steps += 1
        while self._num_steps > self._max_steps:
            self._forget(next(iter(self._requests)))

    def of(self, request_id: str, tenant: str) -> tuple[StreamTrace, ...]:
        """Raises NotFound, for another tenant's as well."""
        request = self._requests.get(request_id)
        if request is None or request.tenant != tenant:
            kept = f"the last {self._max_steps} rounds are" if self._max_steps else "nothing is (trace_steps is 0)"
            raise NotFound(
                f"request_id {request_id[:128]!r}: no such request is kept here; {kept} kept", field="request_id"
            )
        return tuple(
            StreamTrace(index, tuple(stream.steps), stream.num_left_out) for index, stream in enumerate(request.streams)
        )

    def _forget(self, request_id: str) -> None:
        request = self._requests.pop(request_id, None)
        if request is not None:
            self._num_steps -= sum(len(stream.steps) for stream in request.streams)
