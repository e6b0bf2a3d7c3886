"""Services as processes of their own, to be killed, frozen and started again at their addresses."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, Self

import forked
from ports import free_port

from outrider.cli.flags import to_flags
from outrider.cli.process import Child

READY_S = 240.0


class Fleet:
    """Processes by name. `common`: settings of all."""

    def __init__(self, **common: Any) -> None:
        self.children: dict[str, Child] = {}
        self._common = common
        self._started_as: dict[str, tuple[str, list[str]]] = {}

    @classmethod
    @asynccontextmanager
    async def running(cls, **common: Any) -> AsyncIterator[Self]:
        """An empty one, which ends all that is started."""
        fleet = cls(**common)
        try:
            yield fleet
        finally:
            for child in fleet.children.values():
                child.kill()
                await child.stop(0.1)

    async def start(self, name: str, role: str, **settings: Any) -> str:
        """Its address, once it serves."""
        values = {"host": "127.0.0.1", "port": free_port(), **self._common, **settings}
        self._started_as[name] = role, to_flags(values)
        return await self._start(name)

    async def restart(self, name: str, grace_s: float = 0.1) -> None:
        """SIGTERM, SIGKILL after the grace, and the next one at its address once it is gone."""
        await self.children[name].stop(grace_s)
        await self._start(name)

    @property
    def dead(self) -> list[str]:
        """Names of those that have ended."""
        return [name for name, child in self.children.items() if child.exit_code is not None]

    def at(self, address: str) -> str:
        """The name of what serves there."""
        return next(name for name, child in self.children.items() if child.address == address)

    def signal(self, name: str, number: int) -> None:
        os.kill(self.children[name].pid, number)

    async def _start(self, name: str) -> str:
        role, flags = self._started_as[name]
        self.children[name] = await forked.start(role, flags)
        return await self.children[name].wait_ready(READY_S)
