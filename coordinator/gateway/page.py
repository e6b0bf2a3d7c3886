"""The playground: a folder of static files, with headers that let the page reach nothing but this gateway."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from starlette.responses import RedirectResponse, Response
from starlette.routing import BaseRoute, Mount, Route
from starlette.staticfiles import StaticFiles

PLAYGROUND = Path(__file__).parent / "playground"
HEADERS = {
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
    "require-trusted-types-for 'script'; trusted-types 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "cache-control": "no-cache",
}
"""Texts of models are put on the page as text alone; should that ever fail, nothing in them can run or be fetched."""


def playground_routes() -> list[BaseRoute]:
    """The page at /playground/, to which / leads."""
    return [Route("/", _to_playground), Mount("/playground", _Files(directory=PLAYGROUND, html=True))]


class _Files(StaticFiles):
    async def get_response(self, path: str, scope: Any) -> Response:
        response = await super().get_response(path, scope)
        response.headers.update(HEADERS)
        return response


async def _to_playground(request: Any) -> Response:
    return RedirectResponse("playground/")
