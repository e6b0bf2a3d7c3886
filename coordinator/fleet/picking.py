"""Which worker takes a stream: pure functions of what is known of each, and a memory of who has seen which prompts."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

MIN_PREFIX = 32
MAX_PREFIX = 32_768
"""Tokens. Beginnings are remembered at MIN_PREFIX times each power of two."""
MAX_HOLDERS = 8
"""Targets remembered for one beginning."""
MIN_SLACK = 2
SLACK_SHARE = 0.25
"""A target with the beginning in its cache may have this many more streams than the idlest one, or this part more."""
MIN_PROPOSAL_MS = 1.0
"""What a stream on a draft worker delays another one by, at least: round trips are measured to about as much."""

W = TypeVar("W")
Keys = Sequence[tuple[int, int]]
"""(tokens, hash) of beginnings of a prompt, the longest first."""


@dataclass(frozen=True, slots=True)
class Target(Generic[W]):
    """load: streams on it, of all coordinators. cached: tokens of the prompt that it has probably computed already.
    is_standby: it has followed the stream. has_others: it has other choices of the same request."""

    worker: W
    load: int
    cached: int = 0
    has_drafter: bool = True
    same_numerics: bool = True
    is_standby: bool = False
    has_others: bool = False


@dataclass(frozen=True, slots=True)
class Draft(Generic[W]):
    """round_trip_ms: to it and back. proposal_ms: what it takes per drafted token; 0: not measured."""

    worker: W
    load: int
    round_trip_ms: float = 0.0
    proposal_ms: float = 0.0


def best_target(targets: Iterable[Target[W]]) -> W | None:
    """One with the numerics of the worker before it, the standby, one with the request's other choices, which have the
    same prompt and whatever else the request may do to a worker, one with the wanted drafter, where there is such; of
    these the one that has most of the prompt, unless others are much less loaded; else the least loaded, the first of
    several."""
    found = list(targets)
    for wanted in ("same_numerics", "is_standby", "has_others", "has_drafter"):
        found = [t for t in found if getattr(t, wanted)] or found
    if not found:
        return None
    idlest = min(t.load for t in found)
    near = [t for t in found if t.load <= idlest + max(MIN_SLACK, SLACK_SHARE * idlest)]
    longest = max(t.cached for t in near)
    return min([t for t in near if t.cached == longest] if longest else found, key=lambda t: t.load).worker


def best_draft(drafts: Iterable[Draft[W]]) -> W | None:
    """The one whose proposals should come soonest: its round trip, and its other streams' proposals before ours."""
    best = min(drafts, key=lambda d: d.round_trip_ms + d.load * max(MIN_PROPOSAL_MS, d.proposal_ms), default=None)
    return best.worker if best is not None else None


def prefix_keys(namespace: tuple[str, ...], prompt_ids: tuple[int, ...]) -> Keys:
    """namespace: whatever prompts must agree in to share a cache: weights, tenant."""
    keys, length = [], MIN_PREFIX
    while length <= min(len(prompt_ids), MAX_PREFIX):
        keys.append((length, hash((namespace, prompt_ids[:length]))))
        length *= 2
    return keys[::-1]


class PrefixMemory:
    """Which targets have had which beginnings of prompts. The least recently used ones are forgotten."""

    def __init__(self, max_entries: int = 16_384) -> None:
        self._max_entries = max_entries
        self._holders: OrderedDict[int, list[str]] = OrderedDict()

    def cached(self, keys: Keys) -> Mapping[str, int]:
        """By address: tokens of the longest beginning that went there."""
        found: dict[str, int] = {}
        for length, key in keys:
            for address in self._holders.get(key, ()):
                found.setdefault(address, length)
        return found

    def remember(self, keys: Keys, address: str) -> None:
        """A prompt with these beginnings goes there."""
        for _, key in keys:
            holders = self._holders.pop(key, [])
            self._holders[key] = [address, *(known for known in holders if known != address)][:MAX_HOLDERS]
        while len(self._holders) > self._max_entries:
            self._holders.popitem(last=False)
