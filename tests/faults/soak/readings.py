"""What a service holds now, as its own /metrics tell: what must be as little after a soak as before it."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

from prometheus_client.parser import text_string_to_metric_families

TIMEOUT_S = 30.0
"""Longer than any machine makes a service wait that is neither dead nor frozen."""


@dataclass(frozen=True, slots=True)
class Reading:
    """`held`: by what is held, how much. `health`: of a coordinator, by worker address."""

    service: str
    held: dict[str, float] = field(default_factory=dict)
    health: dict[str, bool] = field(default_factory=dict)

    @property
    def num_streams(self) -> int:
        """Open now: sessions of a worker, requests of a coordinator."""
        return int(self.held.get("running requests", self.held.get("sessions", 0)))

    def more_than(self, before: Reading) -> list[str]:
        """What is held beyond `before`."""
        return [
            f"{self.service} holds {value:g} {what}, {before.held.get(what, 0):g} before"
            for what, value in self.held.items()
            if value > before.held.get(what, 0)
        ]


_NAMES = {
    "outrider_num_sessions": "sessions",
    "outrider_worker_num_sessions": "sessions",
    "outrider_num_requests_running": "running requests",
    "outrider_num_requests_waiting": "waiting requests",
    "outrider_kv_cache_usage_perc": "part of the cache",
    "outrider_event_loop_tasks": "tasks",
    "process_open_fds": "file descriptors",
}


async def read_metrics(service: str, port: int) -> Reading | None:
    """None where nobody answers in time, or with an error: then the service's log says why, and that is a complaint."""
    try:
        async with asyncio.timeout(TIMEOUT_S):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            try:
                writer.write(b"GET /metrics HTTP/1.1\r\nHost: localhost\r\n\r\n")
                answer = (await reader.read(-1)).decode()
            finally:
                writer.close()
    except (OSError, TimeoutError):
        return None
    head, _, text = answer.partition("\r\n\r\n")
    return _parse(service, text) if head.startswith("HTTP/1.1 200 ") else None


def _parse(service: str, text: str) -> Reading | None:
    held: dict[str, float] = {}
    health: dict[str, bool] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            if sample.name in _NAMES:
                what = _NAMES[sample.name]
                held[what] = held.get(what, 0) + sample.value
            elif sample.name == "outrider_worker_healthy":
                health[sample.labels["worker"]] = bool(sample.value)
    return Reading(service, held, health) if held else None
