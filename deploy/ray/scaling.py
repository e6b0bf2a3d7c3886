"""How many workers a pool wants: load in, a number and its reason out. No Ray, no clock, no I/O.

Up follows need that lasted `up_delay_s`, at most to twice the number at once. Down goes one worker at a time, after
need was lower all through `down_delay_s`: models take minutes to load, and what waits is worse than what idles. Either
time begins anew with each change. Between the thresholds of a pair nothing changes.
"""

from __future__ import annotations

import math
from collections import deque

from deploy.ray.config import Pool, Scaling
from deploy.ray.load import Load


def need(role: str, load: Load, scaling: Scaling) -> tuple[int, str]:
    """Workers that the load of `load.num_serving` of them is for, and why; the pool's bounds are not considered."""
    num = load.num_serving
    if role == "draft":
        if load.draft_wait is None or load.accepted_drafts is None:
            return 0, "no stream asks for drafts"
        if load.accepted_drafts < scaling.min_accepted_drafts:
            return 0, f"{load.accepted_drafts:.2f} drafts a round are accepted, too few to be worth a worker"
    grown = [(num, "")]
    if load.num_waiting:
        per_worker = max(1.0, load.num_sessions / num)
        crowded = math.ceil((load.num_sessions + load.num_waiting) / per_worker)
        grown.append((max(num + 1, crowded), f"streams waiting for a place: {load.num_waiting}"))
    in_use = f"{100 * load.usage:.0f}% of their room is taken"
    grown.append((_at_share(load.usage, num, scaling.max_usage), in_use))
    enough, why = max(1, _at_share(load.usage, num, scaling.min_usage)), in_use
    if role == "draft" and load.draft_wait is not None:
        waits = f"rounds wait {100 * load.draft_wait:.0f}% of their time for a draft worker"
        grown.append((_at_share(load.draft_wait, num, scaling.max_draft_wait), waits))
        enough = max(enough, num - 1 if load.draft_wait < scaling.min_draft_wait else num)
        why = waits
    most, reason = max(grown, key=lambda found: found[0])
    return (min(most, 2 * num), reason) if most > num else (min(enough, num), why)


def _at_share(share: float, num: int, wanted_share: float) -> int:
    """Workers among which the `share` of `num` comes to `wanted_share` at most."""
    return math.ceil(num * share / wanted_share - 1e-9)


class PoolScaler:
    """The wanted number of one pool, from readings in order of time."""

    def __init__(self, pool: Pool, scaling: Scaling, num_workers: int = 0) -> None:
        """num_workers: those that are there already, which an earlier driver may have found the need for."""
        self._pool = pool
        self._scaling = scaling
        self.wanted = min(max(pool.replicas, num_workers), pool.max_replicas)
        self.reason = ""
        """Of the last change."""
        self._needed: deque[tuple[float, int]] = deque()
        self._since_s: float | None = None
        """First reading after the last change, or after nothing was known."""

    def read(self, now_s: float, load: Load | None) -> int:
        """What is wanted now. load: None where no coordinator tells; then, and while nobody serves, nothing changes,
        and nothing counts that was seen before."""
        if load is None or not load.num_serving or not self._pool.scales:
            self._begin_anew()
            return self.wanted
        needed, why = need(self._pool.role, load, self._scaling)
        needed = min(max(needed, self._pool.min_replicas), self._pool.max_replicas)
        if load.num_serving < self.wanted:
            needed = min(needed, self.wanted)  # what was added last has not helped yet
        if self._since_s is None:
            self._since_s = now_s
        self._needed.append((now_s, needed))
        up_s, down_s = self._scaling.up_delay_s, self._scaling.down_delay_s
        while self._needed[0][0] < now_s - max(up_s, down_s):
            self._needed.popleft()
        lasted_s = now_s - self._since_s
        least = min(number for at, number in self._needed if at >= now_s - up_s)
        most = max(number for at, number in self._needed if at >= now_s - down_s)
        if lasted_s >= up_s and least > self.wanted:
            self._set(least, why)
        elif lasted_s >= down_s and most < self.wanted:
            self._set(self.wanted - 1, why)
        return self.wanted

    def _set(self, wanted: int, why: str) -> None:
        self.wanted, self.reason = wanted, why
        self._begin_anew()

    def _begin_anew(self) -> None:
        self._needed.clear()
        self._since_s = None
