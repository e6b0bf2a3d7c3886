"""A gateway before a stack of toys, all in this process, with real HTTP and gRPC between them; and its clients."""

from __future__ import annotations

import dataclasses
import socket
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass
from typing import Any

import httpx
import openai
import pytest
from stack import Server, Stack, in_process_stack, start

from coordinator.gateway import server as gateway_server
from outrider.client import Client
from outrider.lm.loading import LoadedModel, load_model
from outrider.settings import GatewaySettings, TargetWorkerSettings

TARGET, DRAFT = "toy:vocab=128,seed=1", "toy:vocab=128,seed=1,agreement=0.8"
TEMPLATE = "{% for message in messages %}{{ message['role'][0] + message['content'] }}{% endfor %}"
"""Of few characters, all of which a toy can write; `<` opens the assistant's turn."""
TEMPLATE += "{% if add_generation_prompt %}<{% endif %}"
KEY = "a-key"


def chatty(toy: str = TARGET) -> LoadedModel:
    """The toy, with a chat template."""
    loaded = load_model(TargetWorkerSettings(model=toy))
    return dataclasses.replace(loaded, description=dataclasses.replace(loaded.description, chat_template=TEMPLATE))


@dataclass
class Front:
    """`server`: the gateway. `client`: of the coordinator behind it."""

    server: Server
    stack: Stack
    client: Client
    openai: openai.AsyncOpenAI
    http: httpx.AsyncClient

    @property
    def url(self) -> str:
        return f"http://{self.server.address}"


@asynccontextmanager
async def gateway_before(*coordinators: str, **settings: Any) -> AsyncIterator[Server]:
    common = {"port": 0, "drain_grace_s": 2.0, "log_level": "warning"}
    server = await start(gateway_server.serve, GatewaySettings(**{**common, "coordinators": coordinators, **settings}))
    try:
        yield server
    finally:
        await server.close()


@asynccontextmanager
async def front(
    target: Any = None, draft: str | None = DRAFT, *, gateway: dict[str, Any] | None = None, **stack_options: Any
) -> AsyncIterator[Front]:
    async with AsyncExitStack() as cleanup:
        stack = await cleanup.enter_async_context(in_process_stack(target or chatty(), draft, **stack_options))
        server = await cleanup.enter_async_context(gateway_before(stack.address, **(gateway or {})))
        client = await cleanup.enter_async_context(Client(stack.address))
        url = f"http://{server.address}"
        asking = openai.AsyncOpenAI(base_url=f"{url}/v1", api_key=KEY, max_retries=0)
        http = httpx.AsyncClient(base_url=url, timeout=60)
        await cleanup.enter_async_context(asking)
        await cleanup.enter_async_context(http)
        yield Front(server, stack, client, asking, http)


def small_send_buffers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of every gateway that starts from now on: what its client does not read is soon held back in it."""
    listening = gateway_server._listening

    @contextmanager
    def with_small_buffers(settings: GatewaySettings) -> Iterator[socket.socket]:
        with listening(settings) as listener:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
            yield listener

    monkeypatch.setattr(gateway_server, "_listening", with_small_buffers)


async def metric(http: httpx.AsyncClient, name: str, **labels: str) -> float:
    """A sample of the gateway's own metrics; 0 where it is not there."""
    for line in (await http.get("/metrics")).text.splitlines():
        is_it = line.startswith((f"{name}{{", f"{name} "))
        if is_it and all(f'{key}="{value}"' in line for key, value in labels.items()):
            return float(line.rpartition(" ")[2])
    return 0.0


def error_of(answer: httpx.Response) -> dict[str, Any]:
    """In the shape that all errors have."""
    body = answer.json()
    assert body.keys() == {"error"}
    assert body["error"].keys() == {"message", "type", "param", "code"}
    assert body["error"]["message"]
    assert body["error"]["code"] == "bad_request_id" or answer.headers["x-request-id"]
    return body["error"]
