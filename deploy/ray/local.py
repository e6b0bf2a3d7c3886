"""A coordinator process and a Ray of one node on this machine: for the demo and the tests."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager

import ray

from outrider import Client
from outrider.cli.process import Child
from outrider.errors import Unavailable
from outrider.server_info import ServerInfo, Worker


@contextmanager
def local_ray(
    labels: Mapping[str, str], *, num_cpus: int, num_gpus: int = 0, resources: Mapping[str, float] | None = None
) -> Iterator[None]:
    """A Ray of its own, ended with the block. Its resources are logical: the GPUs need not exist."""
    ray.init(
        num_cpus=num_cpus,
        num_gpus=num_gpus,
        labels=dict(labels),
        resources=dict(resources or {}),
        object_store_memory=100 * 2**20,
        include_dashboard=False,
        log_to_driver=False,
        logging_level=logging.WARNING,
    )
    try:
        yield
    finally:
        ray.shutdown()


@asynccontextmanager
async def local_coordinator(port: int, *, lease_ms: int = 1000) -> AsyncIterator[str]:
    """A coordinator that knows no worker until one takes a lease. Yields its address."""
    child = await Child.start("coordinator", ["--host=127.0.0.1", f"--port={port}", f"--lease-ms={lease_ms}"])
    try:
        yield await child.wait_ready(30.0)
    finally:
        await child.stop(5.0)


async def wait_workers(client: Client, enough: Callable[[list[Worker]], bool], timeout_s: float) -> ServerInfo:
    """The coordinator's view, once its healthy workers are `enough`. Raises Unavailable after `timeout_s`."""
    deadline = time.monotonic() + timeout_s
    while True:
        info = await client.server_info()
        if enough([worker for worker in info.workers if worker.healthy]):
            return info
        if time.monotonic() > deadline:
            known = "; ".join(f"{w.role} {w.address}: {w.detail or w.healthy}" for w in info.workers) or "none"
            raise Unavailable(f"the coordinator lacks workers after {timeout_s:g} s; it knows: {known}")
        await asyncio.sleep(0.1)
