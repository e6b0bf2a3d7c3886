"""The exported families of draft workers as streams have found them: circuit, quarantine, bad proposals, adoptions."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric

from coordinator.fleet.breaker import Circuit
from coordinator.fleet.standing import Standing
from outrider.serving.metrics import PREFIX

CIRCUIT_LEVELS = {Circuit.CLOSED: 0, Circuit.HALF_OPEN: 1, Circuit.OPEN: 2}


def draft_worker_families(standings: Iterable[tuple[str, Standing]], now: float) -> Iterator[Metric]:
    """standings: by address. now: the time of the breakers."""
    labels = ["worker"]
    circuit = GaugeMetricFamily(
        f"{PREFIX}draft_worker_circuit",
        "0: streams ask the draft worker. 1: one tries. 2: it was lost, or waited for in vain, and is left alone.",
        labels=labels,
    )
    openings = CounterMetricFamily(
        f"{PREFIX}draft_worker_circuit_openings", "Times that a draft worker was left alone.", labels=labels
    )
    quarantined = GaugeMetricFamily(
        f"{PREFIX}draft_worker_quarantined",
        "1 where a draft worker is asked no more, for its proposals, until another process answers there.",
        labels=labels,
    )
    bad = CounterMetricFamily(
        f"{PREFIX}draft_worker_bad_proposals",
        "Proposals that could not be, and answers about another text.",
        labels=labels,
    )
    adoptions = CounterMetricFamily(
        f"{PREFIX}draft_worker_adoptions",
        "Streams that the worker took over in their middle, from another one or after it was lost itself.",
        labels=labels,
    )
    for address, standing in standings:
        circuit.add_metric([address], CIRCUIT_LEVELS[standing.breaker.circuit(now)])
        openings.add_metric([address], standing.breaker.num_openings)
        quarantined.add_metric([address], float(bool(standing.quarantine.reason)))
        bad.add_metric([address], standing.quarantine.num_bad)
        adoptions.add_metric([address], standing.num_adoptions)
    yield from (circuit, openings, quarantined, bad, adoptions)
