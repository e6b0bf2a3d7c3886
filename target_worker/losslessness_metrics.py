"""What a target worker exports of its test of losslessness."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric

from outrider.serving.metrics import PREFIX
from outrider.serving.worker_metrics import Labels
from target_worker.losslessness import LosslessnessMeter


def losslessness_families(meter: LosslessnessMeter, labels: Labels) -> Iterator[Metric]:
    names = [*labels, "rule", "drafter"]
    evidence = GaugeMetricFamily(
        f"{PREFIX}losslessness_log10_e_value",
        "Evidence that committed tokens do not follow the target, at any time: 6 comes by chance once in a million.",
        labels=names,
    )
    tokens = CounterMetricFamily(f"{PREFIX}losslessness_tokens", "Committed tokens tested as draws.", labels=names)
    for key, reading in meter.readings().items():
        evidence.add_metric([*labels.values(), *key], reading.log10_e_value)
        tokens.add_metric([*labels.values(), *key], reading.num_tokens)
    yield evidence
    yield tokens
