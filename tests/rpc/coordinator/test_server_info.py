"""What `GetServerInfo` tells: enough to know which builds serve which weights, and how they fare."""

from __future__ import annotations

import platform
from importlib.metadata import version

from stack import in_process_stack

from outrider import Client

TOY = "toy:vocab=16,seed=1"


async def test_it_tells_who_serves_what() -> None:
    async with in_process_stack(
        TOY, f"{TOY},agreement=0.8", coordinator={"model_aliases": (f"fast={TOY}",)}
    ) as services:
        async with Client(services.address, timeout_s=30) as client:
            await client.complete([1, 2], max_tokens=8, num_speculative_tokens=2)
            info, model = await client.server_info(), await client.model_info()
    assert dict(info.versions) == {
        "python": platform.python_version(), **{name: version(name) for name in ("outrider", "grpcio", "protobuf")}
    }  # fmt: skip
    assert (info.models, dict(info.model_aliases), info.draining) == ((TOY,), {"fast": TOY}, False)
    assert info.uptime_s > 0
    assert info.num_requests_running == info.num_requests_waiting == info.num_requests_paused == 0
    workers = {worker.role: worker for worker in info.workers}
    assert set(workers) == {"draft", "target"}
    for worker in workers.values():
        assert worker.healthy, worker.detail
        assert worker.versions["outrider"] == version("outrider")
        assert worker.versions["python"] == platform.python_version()
        assert worker.capacity.num_blocks > 0
        assert worker.numerics_fingerprint
    assert workers["draft"].incarnation != workers["target"].incarnation
    assert workers["target"].model_fingerprint == model.model_fingerprint != workers["draft"].model_fingerprint
    assert workers["draft"].drafters == ("model",)
    assert {worker.address for worker in info.workers} == {services.draft[0].address, services.target[0].address}
