"""The routes, and errors of whatever is none of them."""

from __future__ import annotations

from importlib.metadata import version
from typing import Any

from prometheus_client.exposition import choose_encoder
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import BaseRoute, Route

from coordinator.gateway.chat import Chat
from coordinator.gateway.completions import Completions
from coordinator.gateway.errors import INVALID, SERVER, Failure, answer_to, error_body, failure_of, log_cause
from coordinator.gateway.generation import Generation
from coordinator.gateway.health import Health
from coordinator.gateway.models import Models
from coordinator.gateway.page import playground_routes
from coordinator.gateway.rebinding import LocalPages
from coordinator.gateway.service import Gateway, request_id_of
from outrider.errors import OutriderError
from outrider.serving.channel import is_loopback


def build_app(gateway: Gateway) -> Starlette:
    """Everything at the gateway's port."""
    models, health = Models(gateway), Health(gateway)
    routes: list[BaseRoute] = [
        *(Route(api.path, Generation(gateway, api), methods=["POST"]) for api in (Chat(), Completions())),
        Route("/v1/models", models.all),
        Route("/v1/models/{model:path}", models.one),
        Route("/health", health.health),
        Route("/live", health.live),
        Route("/version", _version),
    ]
    if gateway.settings.metrics_port is None:
        routes.append(Route("/metrics", _metrics(gateway)))
    routes += playground_routes()
    handlers: dict[Any, Any] = {HTTPException: _on_http_error, OutriderError: _on_error, Exception: _on_fault}
    settings = gateway.settings
    is_local = is_loopback(settings.host) and not settings.tls_cert
    guards = [Middleware(LocalPages, names=settings.allowed_hosts)] if is_local else []
    return Starlette(routes=routes, exception_handlers=handlers, middleware=guards)


def _metrics(gateway: Gateway) -> Any:
    async def metrics(request: Request) -> Response:
        encode, content_type = choose_encoder(request.headers.get("accept", ""))
        return Response(encode(gateway.registry), media_type=content_type)

    return metrics


async def _version(request: Request) -> Response:
    return JSONResponse({"version": version("outrider")})


async def _on_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, OutriderError)
    failure, request_id = failure_of(error), request_id_of(request)
    log_cause(failure, request_id)
    return answer_to(failure, request_id)


async def _on_http_error(request: Request, error: Exception) -> Response:
    """No such path, or another method."""
    assert isinstance(error, HTTPException)
    what = f"{request.method} {request.url.path}"
    message = {404: f"nothing is served at {what}", 405: f"{what} is not allowed"}.get(error.status_code, error.detail)
    failure = Failure(error.status_code, error_body(message, INVALID), dict(error.headers or {}))
    return answer_to(failure, request_id_of(request))


async def _on_fault(request: Request, error: Exception) -> Response:
    failure = Failure(500, error_body("internal error; the gateway's log has its cause", SERVER), {})
    return answer_to(failure, request_id_of(request))
