"""Pages of strangers in a browser of this machine (DNS rebinding): their own name may come to mean loopback, and the
browser then takes the gateway there for a part of their site."""

from __future__ import annotations

import ipaddress
from collections.abc import Collection

from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.types import ASGIApp, Receive, Scope, Send

from coordinator.gateway.errors import answer_to, failure_of
from coordinator.gateway.service import request_id_of
from outrider.errors import PermissionDenied


class LocalPages:
    """Before an app that listens on loopback in plaintext: refuses what a page sends (it has an Origin) under a name
    that is neither loopback's, nor an address, nor one of `names`."""

    def __init__(self, app: ASGIApp, names: Collection[str]) -> None:
        self._app = app
        self._names = frozenset(name.lower() for name in names)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = Headers(scope=scope)
        name = _name_in(headers.get("host", ""))
        if "origin" not in headers or _is_local(name) or name in self._names:
            await self._app(scope, receive, send)
            return
        error = PermissionDenied(
            f"a page asks for {name[:80]!r}, and this gateway serves its own machine alone: start it with "
            "--allowed-hosts and that name if a proxy passes it on",
            field="host",
            reason="FOREIGN_HOST",
        )
        await answer_to(failure_of(error), request_id_of(Request(scope)))(scope, receive, send)


def _name_in(host: str) -> str:
    """Of a Host header, without its port."""
    name, bracket, _ = host.partition("]")
    return (name + bracket if bracket else host.partition(":")[0]).lower().removesuffix(".")


def _is_local(name: str) -> bool:
    """An address is what a rebound name is not."""
    try:
        ipaddress.ip_address(name.strip("[]"))
    except ValueError:
        return name == "localhost" or name.endswith(".localhost")
    return True
