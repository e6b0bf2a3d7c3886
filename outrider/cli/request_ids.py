"""Ids of requests, as users have them at hand: the coordinator's own, or those that the gateway's answers carry."""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

from outrider.errors import InvalidArgument, NotFound
from outrider.serving.request_context import REQUEST_ID_FORM

T = TypeVar("T")
_OF_GATEWAY = re.compile("(?:chat)?cmpl-")


async def by_id(fetch: Callable[[str], Awaitable[T]], request_id: str) -> T:
    """What `fetch` gives for the id, or for what the gateway had made it of: `chatcmpl-ID`, `cmpl-ID`. Raises NotFound
    of the first."""
    try:
        return await fetch(request_id)
    except NotFound:
        bare = _OF_GATEWAY.sub("", request_id, count=1)
        if bare in ("", request_id):
            raise
        with suppress(NotFound):
            return await fetch(bare)
        raise


def refuse_paths(request_id: str) -> None:
    """Raises InvalidArgument for what can be no id, and so was meant as a file, which is not there."""
    if not REQUEST_ID_FORM.fullmatch(request_id):
        what = "is no file" if Path(request_id).exists() else "no such file"
        raise InvalidArgument(f"{request_id!r:.200}: {what}, and no request has such an id")
