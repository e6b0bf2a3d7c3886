"""The third source of workers: names such as a headless Service's, `dns:///HOST:PORT`, a worker per address behind it.

Each address gets a lease in the directory, renewed for as long as the name resolves to it: a worker that leaves the
name is forgotten when its lease ends, and its running streams end in peace.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
from collections.abc import Awaitable, Callable, Iterable

from coordinator.directory import WorkerDirectory
from outrider.errors import InvalidArgument, NotFound
from outrider.serving.channel import is_host_and_port

log = logging.getLogger(__name__)

PREFIX = "dns:///"
Resolve = Callable[[str], Awaitable[list[str]]]


async def resolve(name: str) -> list[str]:
    """All host:port behind HOST:PORT. Raises OSError when the host does not resolve."""
    host, _, port = name.rpartition(":")
    found = await asyncio.get_running_loop().getaddrinfo(host, int(port), type=socket.SOCK_STREAM)
    return sorted(
        {f"[{address[0]}]:{port}" if ":" in str(address[0]) else f"{address[0]}:{port}" for *_, address in found}
    )


def split_names(addresses: Iterable[str], field: str) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """(plain addresses, names without the prefix). Raises InvalidArgument on one that is not HOST:PORT."""
    plain, names = [], []
    for address in addresses:
        if not address.startswith(PREFIX):
            if not is_host_and_port(address):
                raise InvalidArgument(f"{field} has {address!r}, must be host:port or {PREFIX}HOST:PORT", field=field)
            plain.append(address)
            continue
        host, _, port = address.removeprefix(PREFIX).rpartition(":")
        if not host or not port.isdecimal():
            raise InvalidArgument(f"{field} has {address!r}, must be {PREFIX}HOST:PORT", field=field)
        names.append(f"{host}:{port}")
    return tuple(plain), tuple(names)


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
