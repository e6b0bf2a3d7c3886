"""How long a request would wait for its place, by what streams were measured to take, and who is refused for it. Pure.

A stream leaves its place at a rate that is counted over all places: streams that ended over the time that places were
taken, the time of those that still run among it. So places that stand still make the estimate grow by themselves.
"""

from __future__ import annotations

from collections import OrderedDict

from outrider.errors import ResourceExhausted

MEMORY_ENDS = 64
"""Ends that the measured life leans on: older ones count less and less."""
DEFAULT_RETRY_S = 1.0
"""Before any stream has ended."""
MIN_RETRY_S, MAX_RETRY_S = 0.1, 60.0
RETURNS_PER_PLACE = 2
MAX_TENANTS = 1024
"""Whose returns are spread; the one refused longest ago is forgotten first."""


class ServiceTimes:
    """Measured life of streams in their places."""

    def __init__(self, now: float) -> None:
        """now: seconds of a clock that never goes back, here and below."""
        self._taken_s = self._since_end_s = 0.0
        self._num_ends = 0.0
        self._num_running = 0
        self._last = now

    def runs(self, num_running: int, now: float) -> None:
        """So many places are taken from now on."""
        self._since_end_s += self._num_running * (now - self._last)
        self._num_running, self._last = num_running, now

    def ended(self, num_streams: int) -> None:
        """So many streams have come to their end: tell `runs` first."""
        for _ in range(num_streams):
            keep = 1 - 1 / MEMORY_ENDS
            self._taken_s, self._since_end_s = self._taken_s * keep + self._since_end_s, 0.0
            self._num_ends = self._num_ends * keep + 1

    @property
    def life_s(self) -> float | None:
        """How long a stream keeps its place; None: none has ended yet."""
        return (self._taken_s + self._since_end_s) / self._num_ends if self._num_ends else None

    def wait_s(self, num_to_end: int, num_running: int) -> float:
        """Until so many of `num_running` streams, and of those that follow in their places, have ended. 0 when nothing
        is known: nobody is refused for a guess."""
        if num_to_end <= 0 or self.life_s is None:
            return 0.0
        return num_to_end * self.life_s / max(1, num_running)


class Returns:
    """When those who are refused are told to come back: one after the other of each tenant, not all at once, and as
    many as places become free, twice over since not all do come back."""

    def __init__(self) -> None:
        self._last: OrderedDict[str, float] = OrderedDict()
        """By tenant, when the one who was told last comes."""

    def delay_s(self, tenant: str, times: ServiceTimes, num_to_end: int, num_running: int, now: float) -> float:
        """For one whose place comes when so many streams have ended."""
        if times.life_s is None:
            wait_s = interval_s = DEFAULT_RETRY_S
        else:
            wait_s, interval_s = times.wait_s(num_to_end, num_running), times.wait_s(1, num_running)
        comes = max(now + wait_s, self._last.get(tenant, now) + interval_s / RETURNS_PER_PLACE)
        comes = now + _bounded(comes - now)
        self._last[tenant] = comes
        self._last.move_to_end(tenant)
        while len(self._last) > MAX_TENANTS:
            self._last.popitem(last=False)
        return comes - now


def refuse_if_too_late(wait_s: float, time_left_s: float | None) -> None:
    """Raises ResourceExhausted for a request that would get its place after its deadline: to come back once the wait
    is as short as the time that it has."""
    if time_left_s is None or wait_s <= time_left_s:
        return
    raise ResourceExhausted(
        f"the request has {time_left_s:.3g} s left and would wait {wait_s:.3g} s for a place, as streams end now; give "
        "it more time or try again later",
        reason="DEADLINE_TOO_SHORT",
        retry_delay_s=_bounded(wait_s - time_left_s),
    )


def _bounded(delay_s: float) -> float:
    return min(MAX_RETRY_S, max(MIN_RETRY_S, delay_s))
