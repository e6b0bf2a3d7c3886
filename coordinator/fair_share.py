"""Whose turn it is among tenants that wait: start-time fair queueing (Goyal, Vin, Cheng 1996). Pure.

Every tenant is served as much as every other one that waits as long, counted in what requests cost, whatever number of
requests each has queued. While two tenants wait, what each was given differs by no more than the dearest request of the
one and of the other. A tenant that waits alone gets everything, and owes nothing for it later.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Generic, TypeVar

T = TypeVar("T")
MAX_REMEMBERED = 1024
"""Tenants that nobody waits for but that were given more than others in turn; those with least more are forgotten."""


@dataclass(order=True, slots=True)
class _Entry(Generic[T]):
    """A request of a tenant: the lower priority first, then first come."""

    priority: int
    number: int
    cost: float = field(compare=False)
    weight: int = field(compare=False)
    item: T = field(compare=False)


@dataclass(slots=True)
class _Tenant(Generic[T]):
    """`start`: how much was given to this tenant when its next request begins, on the scale of all tenants."""

    start: float
    waiting: list[_Entry[T]] = field(default_factory=list)


class FairQueue(Generic[T]):
    """Requests in the order in which they are to be served. Priorities order a tenant's own requests only: no number
    that a client may write takes anything from other tenants."""

    def __init__(self) -> None:
        self._tenants: dict[str, _Tenant[T]] = {}
        self._served = 0.0
        """Start of the request that was served last."""
        self._number = 0
        self._size = 0

    def __len__(self) -> int:
        return self._size

    def push(self, item: T, *, tenant: str, cost: float, priority: int = 0, weight: int = 1) -> None:
        """cost: above 0, what the tenant is charged. weight: of the item in `weight_ahead`."""
        self._number += 1
        entry = _Entry(priority, self._number, cost, weight, item)
        known = self._tenants.setdefault(tenant, _Tenant(self._served))
        if not known.waiting:
            known.start = max(known.start, self._served)
        bisect.insort(known.waiting, entry)
        self._size += 1

    def first(self) -> T | None:
        """The one whose turn it is, left in its place."""
        return self._next().waiting[0].item if self._size else None

    def pop(self) -> T:
        """The one whose turn it is, which is charged to its tenant. Raises IndexError when nobody waits."""
        if not self._size:
            raise IndexError("nobody waits")
        tenant = self._next()
        entry = tenant.waiting.pop(0)
        self._served = tenant.start
        tenant.start += entry.cost
        self._taken()
        return entry.item

    def remove(self, item: T, *, tenant: str) -> None:
        """One that waits no more; nobody is charged. Raises ValueError when it is not here."""
        waiting = self._tenants[tenant].waiting if tenant in self._tenants else []
        index = next((i for i, entry in enumerate(waiting) if entry.item is item), None)
        if index is None:
            raise ValueError("not in the queue")
        del waiting[index]
        self._taken()

    def weight_ahead(self, *, tenant: str, priority: int = 0) -> int:
        """Weight of those who would be served before a request pushed now, if no other came after it."""
        own = self._tenants.get(tenant) or _Tenant[T](self._served)
        ahead = [entry for entry in own.waiting if entry.priority <= priority]
        start = max(own.start, self._served) + sum(entry.cost for entry in ahead)
        others = (other for name, other in self._tenants.items() if name != tenant)
        return sum(entry.weight for entry in ahead) + sum(_weight_until(start, other) for other in others)

    def __iter__(self) -> Iterator[T]:
        """Whoever waits, in no order."""
        return (entry.item for tenant in self._tenants.values() for entry in tenant.waiting)

    def _next(self) -> _Tenant[T]:
        waiting = (tenant for tenant in self._tenants.values() if tenant.waiting)
        return min(waiting, key=lambda tenant: (tenant.start, tenant.waiting[0].number))

    def _taken(self) -> None:
        """One less waits. Tenants that have nothing here and owe nothing are forgotten: all, when nobody waits."""
        self._size -= 1
        if not self._size:
            self._tenants.clear()
            self._served = 0.0
        idle = sorted((t.start, name) for name, t in self._tenants.items() if not t.waiting)
        num_forgotten = max(len(idle) - MAX_REMEMBERED, sum(start <= self._served for start, _ in idle))
        for _, name in idle[:num_forgotten]:
            del self._tenants[name]


def _weight_until(start: float, tenant: _Tenant[T]) -> int:
    """Of a tenant's requests that begin no later than `start`."""
    weight, begins = 0, tenant.start
    for entry in tenant.waiting:
        if begins > start:
            break
        weight, begins = weight + entry.weight, begins + entry.cost
    return weight
