"""How busy pools are, from what coordinators tell. Sans-IO: answers in, numbers out."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, fields

from outrider.server_info import Capacity, DraftRounds, ServerInfo, Worker


@dataclass(frozen=True, slots=True)
class Load:
    """Of the workers of a pool that serve, all coordinators' streams together.

    num_waiting: streams that wait for a place on them; of targets, also those that wait in a coordinator. num_sessions:
    streams that have one. usage: share of their room that these take, 0 to 1: cache blocks held, blocks promised, or
    rows of a pass, whichever is scarcest. Of the last rounds that asked the pool for drafts, None where none did:
    draft_wait is the share of their time that they waited for a worker's turn, or for drafts that did not come;
    accepted_drafts how many of its drafts were accepted, a round.
    """

    num_serving: int
    num_waiting: int = 0
    num_sessions: int = 0
    usage: float = 0.0
    draft_wait: float | None = None
    accepted_drafts: float | None = None


class LoadWindow:
    """What coordinators have told in the last `window_s` seconds. Any clock will do."""

    def __init__(self, window_s: float) -> None:
        self._window_s = window_s
        self._counted: dict[tuple[str, str], DraftRounds] = {}
        """By coordinator and worker, as told last."""
        self._rounds: deque[tuple[float, str, DraftRounds]] = deque()
        """When, of which worker, and how many more than the time before."""
        self._workers: dict[str, Worker] = {}
        self._num_waiting = 0

    def add(self, now_s: float, told: Mapping[str, ServerInfo]) -> None:
        """What the coordinators tell now, by their address."""
        self._workers = {}
        self._num_waiting = sum(info.num_requests_waiting for info in told.values())
        counted: dict[tuple[str, str], DraftRounds] = {}
        for coordinator, info in told.items():
            for worker in info.workers:
                key = coordinator, worker.address
                counted[key] = worker.draft_rounds
                if (before := self._counted.get(key)) is not None:
                    self._rounds.append((now_s, worker.address, _more(worker.draft_rounds, before)))
                known = self._workers.get(worker.address)
                # one of two coordinators may have asked it later, and may have lost sight of it
                if worker.healthy and (known is None or worker.capacity.num_sessions > known.capacity.num_sessions):
                    self._workers[worker.address] = worker
        self._counted = counted
        while self._rounds and self._rounds[0][0] <= now_s - self._window_s:
            self._rounds.popleft()

    def num_sessions(self, address: str) -> int:
        """Open sessions of a worker, of all coordinators."""
        worker = self._workers.get(address)
        return worker.capacity.num_sessions if worker is not None else 0

    def load(self, role: str, addresses: Collection[str]) -> Load:
        """Of the workers at these addresses. What waits in coordinators is shared out among all targets by what runs on
        them: nobody tells for which model it waits."""
        own = [worker for address, worker in self._workers.items() if address in addresses]
        num_waiting = sum(worker.capacity.num_waiting for worker in own)
        num_open = sum(worker.capacity.num_sessions for worker in own)
        if role == "target":
            num_all = sum(w.capacity.num_sessions for w in self._workers.values() if w.role == "target")
            num_waiting += round(self._num_waiting * (num_open / num_all if num_all else 1.0))
        rounds = [more for _, address, more in self._rounds if address in addresses]
        num_rounds = sum(more.num_rounds for more in rounds)
        return Load(
            num_serving=len(own),
            num_waiting=num_waiting,
            num_sessions=num_open - sum(worker.capacity.num_waiting for worker in own),
            usage=_usage([worker.capacity for worker in own]),
            draft_wait=_share(sum(m.wait_ms for m in rounds), sum(m.round_ms for m in rounds)) if num_rounds else None,
            accepted_drafts=sum(m.num_accepted_draft_tokens for m in rounds) / num_rounds if num_rounds else None,
        )


def _usage(capacities: Sequence[Capacity]) -> float:
    held = sum(c.num_blocks - c.num_free_blocks for c in capacities), sum(c.num_blocks for c in capacities)
    promised = sum(c.num_promised_blocks for c in capacities), sum(c.max_promised_blocks for c in capacities)
    rows = sum(c.num_sessions - c.num_waiting for c in capacities), sum(c.max_batch_tokens for c in capacities)
    return max(_share(*held), _share(*promised), _share(*rows))


def _share(part: float, whole: float) -> float:
    return min(1.0, part / whole) if whole else 0.0


def _more(now: DraftRounds, before: DraftRounds) -> DraftRounds:
    """Since `before`; a coordinator that was started again counts from nothing."""
    if now.num_rounds < before.num_rounds:
        return now
    return DraftRounds(**{f.name: getattr(now, f.name) - getattr(before, f.name) for f in fields(DraftRounds)})
