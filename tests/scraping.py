"""`/metrics` of a server of this machine, as numbers by name and labels."""

from __future__ import annotations

import asyncio

from prometheus_client.parser import text_string_to_metric_families

Samples = dict[tuple[str, frozenset[tuple[str, str]]], float]


async def get(port: int, request: bytes) -> bytes:
    """The whole answer to `request` as it stands."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(request)
    try:
        async with asyncio.timeout(10):
            return await reader.read()
    finally:
        writer.close()


async def scrape(port: int) -> Samples:
    """What `/metrics` tells at this port of this machine."""
    answer = (await get(port, b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n")).decode()
    head, _, body = answer.partition("\r\n\r\n")
    assert head.startswith("HTTP/1.1 200 OK\r\n")
    assert f"Content-Length: {len(body)}" in head
    return {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(body)
        for sample in family.samples
    }


def total(samples: Samples, name: str, **labels: str) -> float:
    """Sum over the series of a name that have these labels."""
    return sum(v for (n, own), v in samples.items() if n == f"outrider_{name}" and labels.items() <= own)


def by_label(samples: Samples, name: str, label: str) -> dict[str, float]:
    """Value of each series of a name that differs in this label alone."""
    return {dict(own)[label]: v for (n, own), v in samples.items() if n == f"outrider_{name}"}
