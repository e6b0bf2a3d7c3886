"""Names that stand for several addresses, such as a headless Service's: `dns:///HOST:PORT`."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Awaitable, Callable, Iterable

from outrider.errors import InvalidArgument
from outrider.serving.channel import is_host_and_port

PREFIX = "dns:///"
Resolve = Callable[[str], Awaitable[list[str]]]


async def resolve(name: str) -> list[str]:
    """All host:port behind HOST:PORT. Raises OSError when the host does not resolve."""
    host, _, port = name.rpartition(":")
    found = await asyncio.get_running_loop().getaddrinfo(host, int(port), type=socket.SOCK_STREAM)
    return sorted(
        {f"[{address[0]}]:{port}" if ":" in str(address[0]) else f"{address[0]}:{port}" for *_, address in found}
    )


def is_temporary(error: OSError) -> bool:
    """Whether it only says that nobody could be asked: the name may well exist."""
    return isinstance(error, socket.gaierror) and error.errno in (socket.EAI_AGAIN, socket.EAI_FAIL, socket.EAI_SYSTEM)


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
