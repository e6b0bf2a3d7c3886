"""Failures in OpenAI's shape: `{"error": {"message", "type", "param", "code"}}` under an HTTP status."""

from __future__ import annotations

import difflib
import logging
import math
import re
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

from starlette.responses import JSONResponse

from outrider.errors import InvalidArgument, OutriderError
from outrider.serving.request_context import REQUEST_ID, REQUEST_ID_FORM
from outrider.serving.tokens import NO_TOKEN

log = logging.getLogger(__name__)

CLIENT_GONE = 499
"""Status, in logs and metrics alone, of a request whose client hung up first."""
INVALID, SERVER = "invalid_request_error", "server_error"
_KINDS: dict[str, tuple[int, str]] = {
    "INVALID_ARGUMENT": (400, INVALID),
    "FAILED_PRECONDITION": (400, INVALID),
    "OUT_OF_RANGE": (400, INVALID),
    "UNAUTHENTICATED": (401, "authentication_error"),
    "PERMISSION_DENIED": (403, "permission_error"),
    "NOT_FOUND": (404, INVALID),
    "RESOURCE_EXHAUSTED": (429, "rate_limit_error"),
    "UNIMPLEMENTED": (501, SERVER),
    "UNAVAILABLE": (503, SERVER),
    "ABORTED": (503, SERVER),
    "DEADLINE_EXCEEDED": (504, SERVER),
}
"""By gRPC status; any other is 500."""
_CODES = {
    "PROMPT_TOO_LONG": "context_length_exceeded",
    "CONTEXT_EXCEEDED": "context_length_exceeded",
    "RESOURCE_EXHAUSTED": "rate_limit_exceeded",
    "INVALID_ARGUMENT": "invalid_value",
}
"""Where OpenAI has a word of its own for a reason of ours; the others are told in lower case."""
_PARAMS = {
    "text": "prompt",
    "token_ids": "prompt",
    "token_ids.ids": "prompt",
    "chat": "messages",
    "request_id": "x-request-id",
}
_NO_TOKEN = "no token: send the header `Authorization: Bearer TOKEN`; in the playground: Settings, Bearer token"
_SECTION = re.compile(r"\b(?:sampling|stopping|output|speculation|chat)\.(?=[a-z_])")
_ADDRESS = re.compile(
    r"(?<!['/])(?:\b(?:ipv4|ipv6|dns):/*)?(?:\[[0-9a-f:.%]+\]|%5b[0-9a-f:.%]+%5d|\b[a-z0-9](?:[a-z0-9._-]*[a-z0-9])?):\d{1,5}\b",
    re.IGNORECASE,
)
_UNREACHABLE = ("UNAVAILABLE", "NAME_NOT_FOUND")
"""Reasons of calls that came to no coordinator: why not is its operator's to know."""
_LIKE = 0.81
"""Share of letters in common, from which on a name is taken for another one misspelt."""


@dataclass(frozen=True, slots=True)
class Failure:
    """What the client is told. `cause`: for the log, where the client is told less."""

    status: int
    body: dict[str, Any]
    headers: dict[str, str]
    cause: str = ""


def failure_of(error: OutriderError, *, structured_field: str = "response_format") -> Failure:
    """structured_field: where the request said what form its text shall have."""
    status, kind = _KINDS.get(error.status, (500, SERVER))
    status = getattr(error, "http_status", status)
    code = _CODES.get(error.reason, error.reason.lower())
    if error.status == "UNAUTHENTICATED":
        code = "invalid_api_key"
    elif error.status == "NOT_FOUND" and error.field == "model":
        code = "model_not_found"
    message = _NO_TOKEN if error.reason == NO_TOKEN else _SECTION.sub("", error.message)
    if error.field is not None and _is_form(error.field):
        message = message.replace(error.field, structured_field)
    public = _public(message, error.reason) if status >= 500 else message
    cause = f"{error.reason}: {message}" if public != message else ""
    param = _param(error.field, structured_field)
    body = error_body(public, kind, param=param, code=code)
    return Failure(status, body, _headers(status, error.retry_delay_s), cause)


def answer_to(failure: Failure, request_id: str) -> JSONResponse:
    """That tells the request's id, unless it is no good."""
    told = {REQUEST_ID: request_id} if _is_good(request_id) else {}
    return JSONResponse(failure.body, failure.status, failure.headers | told)


def log_cause(failure: Failure, request_id: str) -> None:
    """By which an operator finds what the client was not told."""
    if failure.cause:
        log.warning("request %s failed: %s", request_id if _is_good(request_id) else "of a bad id", failure.cause)


def unsupported(field: str, known: Collection[str] = ()) -> InvalidArgument:
    """Of a field that this service has not, and others may have. known: those in its place that this one has."""
    owner, dot, name = field.rpartition(".")
    near = difflib.get_close_matches(name, known, 1, cutoff=_LIKE)
    fix = f"did you mean {owner}{dot}{near[0]}?" if near else "leave it out"
    return InvalidArgument(f"{field} is not supported here: {fix}", field=field, reason="UNSUPPORTED_PARAMETER")


def error_body(message: str, kind: str, *, param: str | None = None, code: str | None = None) -> dict[str, Any]:
    """The JSON of an error."""
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


def _param(field: str | None, structured_field: str) -> str | None:
    if field is None:
        return None
    if _is_form(field):
        return structured_field
    return _PARAMS.get(field) or _SECTION.sub("", field, count=1)


def _public(message: str, reason: str) -> str:
    """Whose fault it is behind the gateway, and not where."""
    return "no coordinator can be reached" if reason in _UNREACHABLE else _ADDRESS.sub("[address]", message)


def _is_good(request_id: str) -> bool:
    return REQUEST_ID_FORM.fullmatch(request_id) is not None


def _is_form(field: str) -> bool:
    return field.partition(".")[0] == "structured_output"


def _headers(status: int, retry_delay_s: float | None) -> dict[str, str]:
    if status == 401:
        return {"www-authenticate": "Bearer"}
    if retry_delay_s is None:
        return {}
    return {
        "retry-after": str(max(1, math.ceil(retry_delay_s))),
        "retry-after-ms": str(math.ceil(1000 * retry_delay_s)),
    }
