"""What the gateway's routes share: the client of the coordinators, and the requests that run."""

from __future__ import annotations

import secrets
import time
from dataclasses import dataclass, field

from prometheus_client import CollectorRegistry
from starlette.requests import Request

from coordinator.gateway.logprobs import Spellings
from coordinator.gateway.metrics import GatewayMetrics
from coordinator.gateway.running import Running
from outrider.client import Client
from outrider.errors import InvalidArgument
from outrider.serving.metrics import new_registry
from outrider.serving.request_context import REQUEST_ID
from outrider.settings import GatewaySettings

ROLE = "gateway"
PASSED_ON = ("authorization", "traceparent", "tracestate")
"""Headers that the coordinators judge, beside the one that names a tenant: they go with every call, as metadata of the
same names."""


@dataclass(slots=True)
class Gateway:
    """One gateway. `client` is open."""

    settings: GatewaySettings
    client: Client
    running: Running
    registry: CollectorRegistry
    metrics: GatewayMetrics
    spellings: Spellings = field(default_factory=Spellings)
    started_at: int = field(default_factory=lambda: int(time.time()))

    @classmethod
    def over(cls, client: Client, settings: GatewaySettings) -> Gateway:
        registry = new_registry(ROLE)
        running = Running(settings.max_concurrent_requests)
        return cls(settings, client, running, registry, GatewayMetrics(registry))

    def client_of(self, request: Request) -> Client:
        """Whose calls carry what the request says of its caller. Raises InvalidArgument."""
        told = {}
        for name in (*PASSED_ON, self.settings.trusted_tenant_header):
            value = request.headers.get(name)
            if value is None:
                continue
            if not (value.isascii() and value.isprintable()):
                raise InvalidArgument(f"header {name} must be printable ASCII", field=name, reason="BAD_HEADER")
            told[name] = value
        return self.client.with_metadata(told)


def request_id_of(request: Request) -> str:
    """The header's, or a new one; whether it is a good one the coordinator tells."""
    return request.headers.get(REQUEST_ID) or secrets.token_hex(16)
