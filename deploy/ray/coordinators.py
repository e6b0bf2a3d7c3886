"""What every coordinator tells about itself and its workers, asked by RPC."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from outrider import Client
from outrider.cli.connect import connect, tls_of
from outrider.errors import OutriderError
from outrider.server_info import ServerInfo
from outrider.serving.naming import Resolve, resolve, split_names
from outrider.serving.tls import COORDINATOR_NAME
from outrider.settings import ClientSettings

TIMEOUT_S = 2.0


class Coordinators:
    """All behind `addresses`; names are looked up again each time. Use it on one event loop, and close it."""

    def __init__(
        self, addresses: Sequence[str], client: ClientSettings | None = None, *, resolve: Resolve = resolve
    ) -> None:
        self._addresses, self._names = split_names(addresses, "coordinators")
        self._settings = _by_role(client or ClientSettings())
        self._resolve = resolve
        self._clients: dict[str, Client] = {}

    async def ask(self) -> tuple[dict[str, ServerInfo], list[str]]:
        """What each tells, by address, and why others do not."""
        told: dict[str, ServerInfo] = {}
        faults: list[str] = []
        addresses = set(self._addresses)
        for name in self._names:
            try:
                addresses |= set(await self._resolve(name))
            except OSError as error:
                faults.append(f"{name} does not resolve: {error}")
        for gone in self._clients.keys() - addresses:
            await self._clients.pop(gone).close()

        async def ask_one(address: str) -> None:
            if address not in self._clients:
                self._clients[address] = connect(address, self._settings, timeout_s=TIMEOUT_S)
            try:
                told[address] = await self._clients[address].server_info()
            except OutriderError as error:
                faults.append(f"{address}: {error.message}")

        await asyncio.gather(*map(ask_one, sorted(addresses)))
        return told, faults

    async def close(self) -> None:
        """Harmless when repeated."""
        clients, self._clients = self._clients, {}
        for client in clients.values():
            await client.close()


def _by_role(settings: ClientSettings) -> ClientSettings:
    """Their certificates name the role: addresses come and go."""
    if tls_of(settings) is None or settings.tls_server_name:
        return settings
    return settings.model_copy(update={"tls_server_name": COORDINATOR_NAME})
