"""Failures in OpenAI's shape: `{"error": {"message", "type", "param", "code"}}` under an HTTP status."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import Any

from outrider.errors import InvalidArgument, OutriderError

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
_PARAMS = {"text": "prompt", "token_ids.ids": "prompt", "chat": "messages", "request_id": "x-request-id"}
_SECTION = re.compile(r"\b(?:sampling|stopping|output|speculation|chat)\.(?=[a-z_])")


@dataclass(frozen=True, slots=True)
class Failure:
    """What the client is told."""

    status: int
    body: dict[str, Any]
    headers: dict[str, str]


def failure_of(error: OutriderError, *, structured_field: str = "response_format") -> Failure:
    """structured_field: where the request said what form its text shall have."""
    status, kind = _KINDS.get(error.status, (500, SERVER))
    status = getattr(error, "http_status", status)
    code = _CODES.get(error.reason, error.reason.lower())
    if error.status == "UNAUTHENTICATED":
        code = "invalid_api_key"
    elif error.status == "NOT_FOUND" and error.field == "model":
        code = "model_not_found"
    message = _SECTION.sub("", error.message)
    if error.field is not None and _is_form(error.field):
        message = message.replace(error.field, structured_field)
    param = _param(error.field, structured_field)
    return Failure(status, error_body(message, kind, param=param, code=code), _headers(status, error.retry_delay_s))


def unsupported(field: str) -> InvalidArgument:
    """Of a field that other services have, and this one has not."""
    return InvalidArgument(f"{field} is not supported here: leave it out", field=field, reason="UNSUPPORTED_PARAMETER")


def error_body(message: str, kind: str, *, param: str | None = None, code: str | None = None) -> dict[str, Any]:
    """The JSON of an error."""
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


def _param(field: str | None, structured_field: str) -> str | None:
    if field is None:
        return None
    if _is_form(field):
        return structured_field
    return _PARAMS.get(field) or _SECTION.sub("", field, count=1)


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
