"""The exported families of lost target workers: why, how long it took to see it, and until the streams went on."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Histogram

from coordinator.failover import CAUSES, SUDDEN
from outrider.serving.metrics import PREFIX

_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)


class FailoverFamilies:
    """Of all models. A name's children are made at once, so that nothing lost reads 0."""

    def __init__(self, registry: CollectorRegistry) -> None:
        def histogram(name: str, meaning: str) -> Histogram:
            return Histogram(PREFIX + name, meaning, ["model_name"], buckets=_SECONDS, registry=registry)

        self.lost = Counter(
            f"{PREFIX}target_failovers",
            "Sessions that streams lost on target workers, by cause.",
            ["model_name", "cause"],
            registry=registry,
        )
        self.recovered = Counter(
            f"{PREFIX}target_recoveries",
            "Times that a stream went on after losing its target.",
            ["model_name"],
            registry=registry,
        )
        self.poisoned = Counter(
            f"{PREFIX}poisoned_requests",
            "Streams that failed for having killed their target workers.",
            ["model_name"],
            registry=registry,
        )
        self.detection = histogram(
            "target_detection_seconds",
            "From the last word of a target worker that died or fell silent, or the question if that was later, to its "
            "loss being known: it was lost at most so long before.",
        )
        self.recovery = histogram(
            "target_recovery_seconds", "From a lost target being known to the next token of the stream."
        )

    def of(self, model: str) -> ModelFailovers:
        """One model's."""
        return ModelFailovers(self, model)


class ModelFailovers:
    """What the streams of one model tell."""

    def __init__(self, families: FailoverFamilies, model: str) -> None:
        self._losses = {cause: families.lost.labels(model, cause) for cause in CAUSES}
        self._recoveries = families.recovered.labels(model)
        self.poisoned = families.poisoned.labels(model)
        self._detection = families.detection.labels(model)
        self._recovery = families.recovery.labels(model)

    def lost(self, cause: str, unheard_s: float) -> None:
        """As `StreamStatistics.count_loss`."""
        self._losses[cause].inc()
        if cause in SUDDEN:
            self._detection.observe(unheard_s)

    def recovered(self, after_s: float) -> None:
        """As `StreamStatistics.count_recovery`."""
        self._recoveries.inc()
        self._recovery.observe(after_s)
