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

READING = ("GET", "HEAD")
PROBED = ("/live", "/health")


class LocalPages:
    """Before an app that listens on loopback in plaintext: refuses what a page may have sent under a name that is
    neither loopback's, nor an address, nor one of `names`.

    Whatever a page sends has an Origin, but for what it reads of what is its own site to the browser. So what only
    reads is refused by its name alone, where that name can be a stranger's (see `_may_be_rebound`); not at `PROBED`,
    which tell no more than well or not, and are asked under whatever name somebody has for this machine.
    """

    def __init__(self, app: ASGIApp, names: Collection[str]) -> None:
        self._app = app
        self._names = frozenset(name.lower() for name in names)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = Headers(scope=scope)
        name = _name_in(headers.get("host", ""))
        has_origin = "origin" in headers
        may_be_page = has_origin or (
            scope.get("method") in READING and scope.get("path") not in PROBED and _may_be_rebound(name)
        )
        if not may_be_page or _is_local(name) or name in self._names:
            await self._app(scope, receive, send)
            return
        error = PermissionDenied(
            f"{'a page asks' if has_origin else 'somebody asks'} for {name[:80]!r}, and this gateway serves its own "
            "machine alone: start it with --allowed-hosts and that name if a proxy passes it on",
            field="host",
            reason="FOREIGN_HOST",
        )
        await answer_to(failure_of(error), request_id_of(Request(scope)))(scope, receive, send)


def _name_in(host: str) -> str:
    """Of a Host header, without its port."""
    name, bracket, _ = host.partition("]")
    return (name + bracket if bracket else host.partition(":")[0]).lower().removesuffix(".")


def _may_be_rebound(name: str) -> bool:
    """Whether a stranger's name server can be the one that says what it means: it has a dot, as names of pods,
    containers and machines nearby have not, and is of no domain that is private for good."""
    return "." in name and not name.endswith(".internal")


def _is_local(name: str) -> bool:
    """An address is what a rebound name is not."""
    try:
        ipaddress.ip_address(name.strip("[]"))
    except ValueError:
        return name == "localhost" or name.endswith(".localhost")
    return True
