"""Calls that members of a fleet refuse one another for what somebody has set: no waiting mends that, a setting does."""

from __future__ import annotations

from outrider.errors import OutriderError
from outrider.serving.unreachable import NO_TLS, UNTRUSTED, WRONG_HOST

_TOKENS = "the first line of the caller's --fleet-token-file must be a line of the called one's"
_BY_REASON = {
    "FLEET_CLOSED": "set --fleet-token-file on both, or --tls-client-ca there",
    "ROLE_MISMATCH": "see --target-workers and --draft-workers there",
}
_BY_STATUS = {
    "UNAUTHENTICATED": _TOKENS,
    "PERMISSION_DENIED": "--tls-cert here must be a certificate that names the role of this server",
    "INVALID_ARGUMENT": "see --advertise-address here",
}
_BY_WORDS = {
    WRONG_HOST: "--tls-cert there must be a certificate that names {name!r}",
    UNTRUSTED: "--tls-ca here must hold the authority of --tls-cert there, which must be valid now",
    NO_TLS: "--tls-ca is set here, and there is no --tls-cert there",
}
"""gRPC's own, where a handshake failed."""


_NO_GRPC = ("failed parsing http/2", "http1.x server")
"""What gRPC says, in lower case, of servers of another kind."""


def is_other_server(error: OutriderError) -> bool:
    """Whether whoever answered is no such member of a fleet: it has no such service, or speaks no gRPC at all."""
    words = error.message.lower()
    return error.status == "UNIMPLEMENTED" or any(part in words for part in _NO_GRPC)


def mending(error: OutriderError, name: str) -> str:
    """The settings to look at, `here` being those of the caller; empty where the call may well be taken later. name:
    what the certificate of whoever was called must name."""
    if error.status == "UNAVAILABLE":
        words = error.message.lower()
        return next((advice.format(name=name) for part, advice in _BY_WORDS.items() if part in words), "")
    return _BY_REASON.get(error.reason) or _BY_STATUS.get(error.status, "")
