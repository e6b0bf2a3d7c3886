"""What the gateway exports of itself; tokens and speculation are the coordinator's to count."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from outrider.serving.metrics import PREFIX

_SECONDS = (
    0.001,
    0.005,
    0.01,
    0.025,
    0.05,
    0.1,
    0.25,
    0.5,
    1.0,
    2.5,
    5.0,
    10.0,
    20.0,
    40.0,
    80.0,
    160.0,
    640.0,
    2560.0,
)


class GatewayMetrics:
    """The families of one gateway, in `registry`. Labels are the API's paths and HTTP statuses."""

    def __init__(self, registry: CollectorRegistry) -> None:
        prefix = f"{PREFIX}gateway_"
        self._requests = Counter(
            f"{prefix}requests",
            "Requests by path and outcome: the HTTP status, for a stream that broke the one that its error would have "
            "had, 499 where the client hung up first.",
            ["path", "status"],
            registry=registry,
        )
        self._running = Gauge(f"{prefix}requests_running", "Requests that are answered now.", registry=registry)
        self._seconds = Histogram(
            f"{prefix}request_seconds", "From head to end of the answer.", ["path"], buckets=_SECONDS, registry=registry
        )
        self._first = Histogram(
            f"{prefix}time_to_first_piece_seconds",
            "From a request's head to the first piece of its streamed text.",
            ["path"],
            buckets=_SECONDS,
            registry=registry,
        )
        self._handshakes = Counter(
            f"{PREFIX}tls_handshakes", "Connections to the TLS port, failed handshakes too.", registry=registry
        )
        self._connections = Counter(
            f"{PREFIX}connections",
            "Connections that may ask. With TLS, far fewer than handshakes: somebody speaks plaintext, or trusts "
            "another authority.",
            registry=registry,
        )

    def on_handshake(self) -> None:
        """Somebody has connected to a port with TLS."""
        self._handshakes.inc()

    def on_connection(self) -> None:
        """Its handshake, where there is one, has succeeded."""
        self._connections.inc()

    def began(self, path: str) -> Count:
        """`path`: as the API calls it, never as a client wrote it."""
        self._running.inc()
        return Count(self, path)

    def _first_piece(self, count: Count) -> None:
        self._first.labels(count.path).observe(time.perf_counter() - count.since)

    def _ended(self, count: Count, status: int) -> None:
        self._running.dec()
        self._requests.labels(count.path, str(status)).inc()
        self._seconds.labels(count.path).observe(time.perf_counter() - count.since)


@dataclass(slots=True)
class Count:
    """Of one request, which ends once."""

    metrics: GatewayMetrics
    path: str
    since: float = field(default_factory=time.perf_counter)

    def first_piece(self) -> None:
        self.metrics._first_piece(self)

    def ended(self, status: int) -> None:
        self.metrics._ended(self, status)
