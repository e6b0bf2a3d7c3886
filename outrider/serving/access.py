"""Who may call a server's services: asked before a byte of a request is read. Refusals are counted.

Health checks stay open, so that probes need no secret.
"""

from __future__ import annotations

import contextvars
from collections import Counter, OrderedDict
from collections.abc import Collection, Iterator, Mapping
from typing import Any, Protocol

from prometheus_client.core import CounterMetricFamily
from prometheus_client.metrics_core import Metric

from outrider.errors import InvalidArgument, OutriderError, PermissionDenied
from outrider.serving.channel import is_loopback
from outrider.serving.metrics import PREFIX
from outrider.serving.tls import certificate_names
from outrider.serving.tokens import FleetTokens, bearer_token
from outrider.settings import GatewaySettings, ServerSettings

CALLER: contextvars.ContextVar[str] = contextvars.ContextVar("outrider_caller", default="")
"""Tenant of the call at hand, where a token told it."""
BY_TOKEN_ALONE = ("x-outrider-callers", "by-token-alone")
"""Metadata of a gateway that anyone can reach: whose call it is only a token tells, whatever else comes with it."""
CALLERS_UNKNOWN = "CALLERS_UNKNOWN"
"""Reason of a refusal of such calls, where there are no tokens."""
MAX_REMEMBERED_PEERS = 8192
HANDSHAKE_TIMEOUT_MS = 10_000
"""Of TLS: who does not finish it is cut off."""


class Guard(Protocol):
    """Of one service."""

    def check(self, method: str, context: Any) -> None:
        """method: its name within the service. Raises OutriderError for a call that is not to be served."""


class FleetGuard:
    """Of services that members of a fleet call on one another: with a shared token, with a certificate that names one
    of `names`, or with both, as the settings ask for. `is_closed`: without either nobody may."""

    def __init__(self, settings: ServerSettings, names: Collection[str], *, is_closed: bool = False) -> None:
        self._tokens = FleetTokens(settings.fleet_token_file) if settings.fleet_token_file else None
        self._names = frozenset(names) if settings.tls_client_ca else frozenset()
        self._is_closed = is_closed and self._tokens is None and not self._names

    def check(self, method: str, context: Any) -> None:
        if self._is_closed:
            raise PermissionDenied(
                "workers cannot register here: set fleet_token_file, or tls_client_ca, of this coordinator",
                reason="FLEET_CLOSED",
            )
        if self._tokens is not None:
            self._tokens.check(bearer_token(context))
        if self._names and not self._names & (shown := certificate_names(context)):
            raise PermissionDenied(
                f"the caller's certificate names {', '.join(sorted(shown))[:200] or 'nobody'}, must name "
                f"{' or '.join(sorted(self._names))}",
                reason="WRONG_ROLE",
            )


class Access:
    """The guards of one server by full service name; a service without one is open."""

    def __init__(self, guards: Mapping[str, Guard] | None = None) -> None:
        self._guards = dict(guards or {})
        self._refusals: Counter[tuple[str, str, str]] = Counter()
        self._peers: OrderedDict[str, None] = OrderedDict()
        self.num_handshakes = 0
        self.num_connections = 0

    def admit(self, service: str, method: str, context: Any) -> None:
        """Raises OutriderError for a call that is not to be served."""
        self._see(context.peer())
        guard = self._guards.get(service)
        if guard is None:
            return
        try:
            guard.check(method, context)
        except OutriderError as error:
            self._refusals[service, error.status, error.reason] += 1
            raise

    def on_handshake(self) -> None:
        """Somebody has connected to a port with TLS."""
        self.num_handshakes += 1

    def families(self) -> Iterator[Metric]:
        """For Prometheus."""
        refusals = CounterMetricFamily(
            f"{PREFIX}rpc_refusals",
            "Calls refused before anything of them was read, by why.",
            labels=["service", "status", "reason"],
        )
        for labels, number in self._refusals.items():
            refusals.add_metric(labels, number)
        yield refusals
        yield CounterMetricFamily(
            f"{PREFIX}tls_handshakes", "Connections to the TLS port, failed handshakes too.", value=self.num_handshakes
        )
        yield CounterMetricFamily(
            f"{PREFIX}connections",
            "Connections that made a call to a service of ours. With TLS, far fewer than handshakes: somebody tries "
            "without a valid certificate, or in plaintext.",
            value=self.num_connections,
        )

    def _see(self, peer: str) -> None:
        if peer not in self._peers:
            self.num_connections += 1
            self._peers[peer] = None
            if len(self._peers) > MAX_REMEMBERED_PEERS:
                self._peers.popitem(last=False)
        else:
            self._peers.move_to_end(peer)


def refuse_to_be_open(settings: ServerSettings | GatewaySettings, *, is_guarded: bool, remedy: str) -> None:
    """Raises InvalidArgument for a server that would listen beyond loopback and serve anyone. is_guarded: whether it
    asks callers who they are, or others behind it do; remedy: how to make it."""
    if is_guarded or settings.insecure or is_loopback(settings.host):
        return
    raise InvalidArgument(
        f"host is {settings.host!r}: beyond loopback anyone could call this server. {remedy}; or say that the network "
        "keeps others out with --insecure (OUTRIDER_INSECURE=true)",
        field="host",
        reason="INSECURE",
    )
