"""Costs of workers as they measured them themselves: lines by load, see `outrider.lm.timing`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from outrider.errors import InvalidArgument
from outrider.lm.timing import PassTiming, expected_ms

_FIELDS = {
    name: float if kind == "float" else bool if kind == "bool" else int
    for name, kind in PassTiming.__annotations__.items()
}


class MeasuredCost:
    """A pass by the line of its load, or of the nearest load that was seen."""

    def __init__(self, timings: Sequence[PassTiming]) -> None:
        """timings: at least one that is no prefill."""
        self._timings = tuple(timing for timing in timings if not timing.prefill)

    def __call__(self, num_rows: int, num_context_tokens: int, num_sequences: int) -> float:
        ms = expected_ms(
            self._timings, num_rows=num_rows, num_context_tokens=num_context_tokens, num_sequences=num_sequences
        )
        assert ms is not None
        return ms


def read_timings(worker: Mapping[str, Any], where: str) -> MeasuredCost:
    """A worker of a profile. Raises InvalidArgument naming the place in the profile."""
    found = worker.get("timings")
    if not isinstance(found, list):
        raise InvalidArgument(f"{where}.timings is missing", field="profile")
    timings = []
    for index, entry in enumerate(found):
        place = f"{where}.timings[{index}]"
        if not isinstance(entry, Mapping) or set(entry) != set(_FIELDS):
            raise InvalidArgument(f"{place} must have {', '.join(_FIELDS)}", field="profile")
        wrong = [name for name, kind in _FIELDS.items() if not _is(entry[name], kind)]
        if wrong:
            raise InvalidArgument(
                f"{place}.{wrong[0]} is {entry[wrong[0]]!r}, not a number that it can be", field="profile"
            )
        timings.append(PassTiming(**entry))
    if not any(not timing.prefill for timing in timings):
        raise InvalidArgument(f"{where}.timings has no pass that decodes: measure longer answers", field="profile")
    return MeasuredCost(timings)


def _is(value: Any, kind: type) -> bool:
    if kind is bool or isinstance(value, bool):
        return isinstance(value, bool) and kind is bool
    return isinstance(value, int | float if kind is float else int) and 0 <= value < float("inf")
