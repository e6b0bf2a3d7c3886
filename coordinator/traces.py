"""Rounds of the last requests, for whoever asks how one of them went: counts and times, never text or ids."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field

from outrider.errors import NotFound
from outrider.results import GammaCause, Step, StreamTrace

MAX_STEPS_A_STREAM = 4096
MAX_REQUESTS = 4096
"""Those without a round among them."""

Key = tuple[str, str]
"""Tenant and request id."""
KeepStep = Callable[[int, Step], None]
"""A choice, and a round of it."""

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
    "draft-circuit-open": GammaCause.NO_DRAFTER,
    "draft-quarantined": GammaCause.NO_DRAFTER,
    "draft-resting": GammaCause.NO_DRAFTER,
    "draft-late": GammaCause.DRAFT_LATE,
    "draft-lost": GammaCause.DRAFT_LOST,
    "prefill": GammaCause.PREFILL,
}
"""By the reason of a choice."""


def for_each(*keeps: KeepStep) -> KeepStep:
    """Tells all of them."""

    def keep(choice: int, step: Step) -> None:
        for each in keeps:
            each(choice, step)

    return keep


@dataclass(slots=True)
class _Stream:
    steps: list[Step] = field(default_factory=list)
    num_left_out: int = 0


class Traces:
    """Of one coordinator. The oldest requests go first, once there are more than `max_steps` rounds in all."""

    def __init__(self, max_steps: int) -> None:
        self._max_steps = max_steps
        self._num_steps = 0
        self._requests: OrderedDict[Key, list[_Stream]] = OrderedDict()

    def begin(self, tenant: str, request_id: str, num_choices: int) -> KeepStep:
        """Of a request that begins: what is to be told of each round that has ended, with its choice. The tenant's last
        one of the same name is forgotten, and what still comes of it is kept no more."""
        key, streams = (tenant, request_id), [_Stream() for _ in range(num_choices)]
        if self._max_steps:
            self._forget(key)
            if len(self._requests) >= MAX_REQUESTS:
                self._forget(next(iter(self._requests)))
            self._requests[key] = streams

        def keep(choice: int, step: Step) -> None:
            if self._requests.get(key) is streams:
                self._add(streams[choice], step)

        return keep

    @property
    def is_on(self) -> bool:
        return self._max_steps > 0

    def of(self, tenant: str, request_id: str) -> tuple[StreamTrace, ...]:
        """Raises NotFound, for another tenant's as well."""
        streams = self._requests.get((tenant, request_id))
        if streams is None:
            kept = f"the last {self._max_steps} rounds are" if self._max_steps else "nothing is (trace_steps is 0)"
            raise NotFound(
                f"request_id {request_id[:128]!r}: no such request is kept here; {kept} kept", field="request_id"
            )
        return tuple(
            StreamTrace(index, tuple(stream.steps), stream.num_left_out) for index, stream in enumerate(streams)
        )

    def _add(self, stream: _Stream, step: Step) -> None:
        if len(stream.steps) >= MAX_STEPS_A_STREAM:
            stream.num_left_out += 1
            return
        stream.steps.append(step)
        self._num_steps += 1
        while self._num_steps > self._max_steps:
            self._forget(next(iter(self._requests)))

    def _forget(self, key: Key) -> None:
        self._num_steps -= sum(len(stream.steps) for stream in self._requests.pop(key, ()))
