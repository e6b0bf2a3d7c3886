"""The third source of workers: names such as a headless Service's, `dns:///HOST:PORT`, a worker per address behind it.

Each address gets a lease in the directory, renewed for as long as the name resolves to it: a worker that leaves the
name is forgotten when its lease ends, and its running streams end in peace.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Iterable

from coordinator.directory import WorkerDirectory
from outrider.errors import NotFound
from outrider.serving.naming import Resolve, resolve

log = logging.getLogger(__name__)


class DnsSource:
    """Resolves `names` (HOST:PORT and the role of the workers there) three times within a lease."""

    def __init__(
        self,
        directory: WorkerDirectory,
        names: Iterable[tuple[str, str]],
        *,
        lease_ms: int,
        resolve: Resolve = resolve,
    ) -> None:
        self._directory = directory
        self._names = tuple(names)
        self._interval_s = lease_ms / 3000
        self._resolve = resolve
        self._lease_ids: dict[tuple[str, str], str] = {}
        self._failing: set[str] = set()

    async def refresh(self) -> None:
        """Takes or renews a lease for each address behind each name. A name that does not resolve renews nothing."""
        for name, role in self._names:
            try:
                addresses = await self._resolve(name)
            except OSError as error:
                if name not in self._failing:
                    log.warning("%s does not resolve: %s", name, error)
                self._failing.add(name)
                continue
            self._failing.discard(name)
            for address in addresses:
                self._keep(address, role)

    async def run(self) -> None:
        """`refresh` again and again, until cancelled."""
        while True:
            await self.refresh()
            await asyncio.sleep(self._interval_s)

    def _keep(self, address: str, role: str) -> None:
        lease_id = self._lease_ids.get((address, role))
        if lease_id is not None:
            with contextlib.suppress(NotFound):
                self._directory.renew(lease_id)
                return
        self._lease_ids[address, role] = self._directory.register(address, role)
