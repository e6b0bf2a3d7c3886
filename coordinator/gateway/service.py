"""What the gateway's routes share: the client of the coordinators, and the requests that run."""

from __future__ import annotations

import secrets
import time
from dataclasses import dataclass, field

from prometheus_client import CollectorRegistry
from starlette.requests import Request

from coordinator.gateway.body import Bodies
from coordinator.gateway.logprobs import Spellings
from coordinator.gateway.metrics import GatewayMetrics
from coordinator.gateway.running import Running
from outrider.client import Client
from outrider.errors import InvalidArgument, Unauthenticated
from outrider.serving.metrics import new_registry
from outrider.serving.request_context import REQUEST_ID
from outrider.serving.tokens import METADATA_KEY
from outrider.settings import GatewaySettings

ROLE = "gateway"
TRACING = ("traceparent", "tracestate")
"""Several of a name are one list, as W3C has it: the first is then malformed, and the second is not."""
PASSED_ON = (METADATA_KEY, *TRACING)
"""Headers that the coordinators judge, beside the one that names a tenant: they go with every call, as metadata of the
same names."""
MAX_PASSED_ON_BYTES = 6144
"""Of such headers: above 8 KiB, with what gRPC adds of its own, a coordinator refuses metadata."""


class HeadersTooLarge(InvalidArgument):
    """More than can be passed on."""

    http_status = 431


@dataclass(slots=True)
class Gateway:
    """One gateway. `client` is open."""

    settings: GatewaySettings
    client: Client
    bodies: Bodies
    running: Running
    registry: CollectorRegistry
    metrics: GatewayMetrics
    spellings: Spellings = field(default_factory=Spellings)
    started_at: int = field(default_factory=lambda: int(time.time()))

    @classmethod
    def over(cls, client: Client, settings: GatewaySettings) -> Gateway:
        registry = new_registry(ROLE)
        running = Running(settings.max_concurrent_requests)
        bodies = Bodies(settings.max_body_bytes)
        return cls(settings, client, bodies, running, registry, GatewayMetrics(registry))

    def client_of(self, request: Request) -> Client:
        """Whose calls carry what the request says of its caller. Raises InvalidArgument and Unauthenticated."""
        told = {}
        for name in (*PASSED_ON, self.settings.trusted_tenant_header):
            values = request.headers.getlist(name)
            if not values:
                continue
            if len(values) > 1 and name == METADATA_KEY:
                raise Unauthenticated(f"header {name} is there {len(values)} times: send one", reason="BAD_TOKEN")
            if len(values) > 1 and name not in TRACING:
                raise InvalidArgument(
                    f"header {name} is there {len(values)} times: send one", field=name, reason="BAD_HEADER"
                )
            told[name] = ",".join(values)
            if not (told[name].isascii() and told[name].isprintable()):
                raise InvalidArgument(f"header {name} must be printable ASCII", field=name, reason="BAD_HEADER")
        num_bytes = sum(len(name) + len(value) for name, value in told.items())
        if num_bytes > MAX_PASSED_ON_BYTES:
            longest = max(told, key=lambda name: len(told[name]))
            raise HeadersTooLarge(
                f"header {longest} has {len(told[longest])} characters: headers that are passed on may have "
                f"{MAX_PASSED_ON_BYTES} together, with their names",
                field=longest,
                reason="HEADERS_TOO_LARGE",
            )
        return self.client.with_metadata(told)


def request_id_of(request: Request) -> str:
    """The header's, or a new one; whether it is a good one the coordinator tells."""
    return request.headers.get(REQUEST_ID) or secrets.token_hex(16)
