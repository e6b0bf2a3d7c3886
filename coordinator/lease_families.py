"""The exported families of the leases that workers take."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric

from coordinator.fleet.sources import LeaseSource
from outrider.serving.metrics import PREFIX


def lease_families(leases: LeaseSource) -> Iterator[Metric]:
    yield GaugeMetricFamily(
        f"{PREFIX}worker_leases", "Workers that registered themselves and whose leases run.", value=leases.num_leases
    )
    events = CounterMetricFamily(
        f"{PREFIX}worker_lease_events", "Leases taken, renewed and drained; and named though unknown.", labels=["event"]
    )
    for event, number in leases.num_events.items():
        events.add_metric([event], number)
    yield events
