"""`/v1/models`: what is served, under its names and aliases."""

from __future__ import annotations

import asyncio
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse

from coordinator.gateway.service import Gateway
from outrider.client import Client
from outrider.errors import NotFound


class Models:
    """Both routes."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway

    async def all(self, request: Request) -> JSONResponse:
        client = self._gateway.client_of(request)
        told = await client.server_info()
        names = [*told.models, *told.model_aliases]
        found = await asyncio.gather(*(self._model(client, name) for name in names), return_exceptions=True)
        # one that left between the two calls is not served
        models = [model for model in found if not isinstance(model, NotFound)]
        for model in models:
            if isinstance(model, BaseException):
                raise model
        return JSONResponse({"object": "list", "data": models})

    async def one(self, request: Request) -> JSONResponse:
        return JSONResponse(await self._model(self._gateway.client_of(request), request.path_params["model"]))

    async def _model(self, client: Client, name: str) -> dict[str, Any]:
        """OpenAI's object, vLLM's `root` and `max_model_len`, and what speculation there is."""
        info = await client.model_info(name)
        return {
            "id": name,
            "object": "model",
            "created": self._gateway.started_at,
            "owned_by": "outrider",
            "root": info.model,
            "max_model_len": info.context_length,
            "outrider": {
                "model_fingerprint": info.model_fingerprint,
                "draft_model": info.draft_model,
                "drafters": list(info.drafters),
                "acceptance_rules": [str(rule) for rule in info.acceptance_rules],
                "max_speculative_tokens": info.max_speculative_tokens,
                "default_max_tokens": info.default_max_tokens,
                "has_chat_template": info.has_chat_template,
                "simulated": info.simulated,
            },
        }
