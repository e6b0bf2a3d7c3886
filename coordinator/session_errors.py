"""What a worker says about the session that it was asked to open, in the words of the request that it came from."""

from __future__ import annotations

from outrider.errors import OutriderError

FIELDS = (
    ("open.sampling.grammar", "structured_output"),
    ("open.committed_ids", "resume_token_ids"),
    ("open.sampling.", "sampling."),
    ("open.stopping.", "stopping."),
)
"""Of an opening, and whence they come; the first that fits counts."""


def in_request_terms(error: OutriderError) -> OutriderError:
    """The same error, about the fields that its client knows."""
    if error.field is None:
        return error
    field, message = error.field, error.message
    for opened, asked in FIELDS:
        message = message.replace(opened, asked)
        if field.startswith(opened):
            field = asked + field[len(opened) :]
    return type(error)(message, reason=error.reason, field=field, retry_delay_s=error.retry_delay_s)
