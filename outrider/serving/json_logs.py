"""Log records as lines of JSON, with the ids of the request that they are about. Never a prompt or a text."""

from __future__ import annotations

import json
import logging
from datetime import UTC, datetime
from typing import Any

from outrider.serving.request_context import CURRENT

FIELDS = "fields"
"""`extra={FIELDS: {...}}` of a logging call: members of its line beside the message."""


class JsonFormatter(logging.Formatter):
    """One object a line: time (UTC), level, logger, message; request_id, trace_id and span_id where they are known."""

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, Any] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        current = CURRENT.get()
        if current.request_id:
            line["request_id"] = current.request_id
        if current.trace is not None:
            line |= {"trace_id": current.trace.trace_id, "span_id": current.trace.span_id}
        line |= getattr(record, FIELDS, {})
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, ensure_ascii=False, default=str)
