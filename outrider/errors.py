"""Errors that carry a gRPC status name, without importing grpc: core code raises them, `serving/status.py` sends them.

`field` is the proto path of the offending field, `reason` an UPPER_SNAKE_CASE word for machines.
"""

from __future__ import annotations

DRAINING = "DRAINING"
"""Reason of a service that ends: what it refuses or hands over goes on at another one, with nothing lost."""
OTHER_PROCESS = "OTHER_PROCESS"
"""Reason of a worker that is not the process that was meant: another one answers at its address now."""
PASS_FAILED = "PASS_FAILED"
"""Reason of a pass of the model that failed or hung, with all that were in it: one of them may be why, or none."""
SESSION_LOST = "SESSION_LOST"
"""Reason of a session that a worker has given up or forgotten, and that alone: opened anew, it goes on."""
STARTING = "STARTING"
"""Reason of a service that listens and does not serve yet."""


class OutriderError(Exception):
    """Base: a failure with a status. Subclasses fix `status`."""

    status = "INTERNAL"

    def __init__(
        self,
        message: str,
        *,
        reason: str | None = None,
        field: str | None = None,
        retry_delay_s: float | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.reason = reason or self.status
        self.field = field
        self.retry_delay_s = retry_delay_s


class InvalidArgument(OutriderError):
    """A field is wrong whatever the state of the server."""

    status = "INVALID_ARGUMENT"


class NotFound(OutriderError):
    """The named model or lease does not exist."""

    status = "NOT_FOUND"


class FailedPrecondition(OutriderError):
    """The request is fine, the state is not: wrong prompt hash, different vocabularies."""

    status = "FAILED_PRECONDITION"


class Unauthenticated(OutriderError):
    """The caller showed no token, or none that is known."""

    status = "UNAUTHENTICATED"


class PermissionDenied(OutriderError):
    """The caller is known, and may not do this."""

    status = "PERMISSION_DENIED"


class ResourceExhausted(OutriderError):
    """A bounded queue is full. Carries `retry_delay_s`."""

    status = "RESOURCE_EXHAUSTED"


class Unavailable(OutriderError):
    """Nobody can serve this now. Carries `retry_delay_s`."""

    status = "UNAVAILABLE"


class Aborted(OutriderError):
    """The session is gone (restart, eviction, lease): open it again."""

    status = "ABORTED"


class DeadlineExceeded(OutriderError):
    """The caller's deadline passed first."""

    status = "DEADLINE_EXCEEDED"


class Unimplemented(OutriderError):
    """In the contract, not working yet."""

    status = "UNIMPLEMENTED"


class Internal(OutriderError):
    """A fault on our side, NaN logits included."""

    status = "INTERNAL"


class DeadEnd(Internal):
    """What a request asks for leaves a place no token: its client hears of it, and no worker is at fault. Of a draft's
    place: as a row that cannot be read."""

    status = "INVALID_ARGUMENT"


BY_STATUS: dict[str, type[OutriderError]] = {cls.status: cls for cls in OutriderError.__subclasses__()}
