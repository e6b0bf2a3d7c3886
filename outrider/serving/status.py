"""`OutriderError` to a gRPC status with google.rpc details, and back. The one place that knows both."""

from __future__ import annotations

from typing import Any

import grpc
from google.protobuf import any_pb2, duration_pb2
from google.rpc import code_pb2, error_details_pb2, status_pb2
from grpc_status import rpc_status

from outrider.errors import BY_STATUS, Internal, OutriderError, Unavailable

DOMAIN = "outrider"
STATUS_DETAILS = "grpc-status-details-bin"
"""Key of the trailing metadata that holds the details."""
MAX_MESSAGE_BYTES = 1400
"""A message travels three times, once percent-encoded, in trailers for which gRPC keeps 8 KiB."""


def to_status(error: OutriderError) -> grpc.Status:
    """For `context.abort_with_status`: ErrorInfo always, BadRequest with a field, RetryInfo with a delay.

    A message that quotes too much of a request is cut short.
    """
    message = error.message
    if len(message.encode(errors="replace")) > MAX_MESSAGE_BYTES:
        message = message.encode(errors="replace")[:MAX_MESSAGE_BYTES].decode(errors="ignore") + "..."
    details: list[Any] = [error_details_pb2.ErrorInfo(reason=error.reason, domain=DOMAIN)]
    if error.field is not None:
        violation = error_details_pb2.BadRequest.FieldViolation(field=error.field, description=message)
        details.append(error_details_pb2.BadRequest(field_violations=[violation]))
    if error.retry_delay_s is not None:
        delay = duration_pb2.Duration()
        delay.FromNanoseconds(round(error.retry_delay_s * 1e9))
        details.append(error_details_pb2.RetryInfo(retry_delay=delay))
    packed = []
    for detail in details:
        packed.append(any_pb2.Any())
        packed[-1].Pack(detail)
    code = code_pb2.Code.Value(error.status)
    return rpc_status.to_status(status_pb2.Status(code=code, message=message, details=packed))


def from_rpc_error(error: grpc.RpcError) -> OutriderError:
    """The error that a peer of ours sent, or what a bare status (a broken connection, a foreign proxy) amounts to."""
    code: grpc.StatusCode = error.code()  # type: ignore[attr-defined]
    message = error.details() or code.name  # type: ignore[attr-defined]
    reason: str | None = None
    field: str | None = None
    retry_delay_s: float | None = None
    for detail in _details(error):
        if detail.Is(error_details_pb2.ErrorInfo.DESCRIPTOR):
            info = error_details_pb2.ErrorInfo()
            detail.Unpack(info)
            reason = info.reason
        elif detail.Is(error_details_pb2.BadRequest.DESCRIPTOR):
            bad = error_details_pb2.BadRequest()
            detail.Unpack(bad)
            field = bad.field_violations[0].field if bad.field_violations else None
        elif detail.Is(error_details_pb2.RetryInfo.DESCRIPTOR):
            retry = error_details_pb2.RetryInfo()
            detail.Unpack(retry)
            retry_delay_s = retry.retry_delay.ToNanoseconds() / 1e9
    # A stream that the other side cut off (its process stopped) comes out as CANCELLED: the peer is gone, no more.
    fallback = Unavailable if code is grpc.StatusCode.CANCELLED else Internal
    kind = BY_STATUS.get(code.name, fallback)
    return kind(message, reason=reason or code.name, field=field, retry_delay_s=retry_delay_s)


def is_from_transport(error: grpc.aio.AioRpcError) -> bool:
    """Servers of ours send details with every error; a bare status is the connection's own, whatever its code: a killed
    process can show as INTERNAL or UNKNOWN too."""
    return STATUS_DETAILS not in {key for key, _ in error.trailing_metadata() or ()}


def _details(error: grpc.RpcError) -> list[any_pb2.Any]:
    try:
        status = rpc_status.from_call(error)
    except (ValueError, AttributeError):  # details that contradict the code, or no trailing metadata at all
        return []
    return list(status.details) if status is not None else []
