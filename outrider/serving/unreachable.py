"""Why no call reaches a coordinator, in the words of whoever can mend it: gRPC tells a mistake about TLS and a machine
on which nobody listens by one status."""

from __future__ import annotations

import re

WRONG_HOST, UNTRUSTED, NO_TLS = (
    "hostname verification check failed",
    "certificate_verify_failed",
    "wrong_version_number",
)
"""What gRPC says, in lower case, where a handshake fails."""
_VERIFY_FAILED = re.compile(rf"{UNTRUSTED}: ([^:]+)", re.IGNORECASE)
_HANDSHAKE_FAILED = re.compile(r"handshake failed[^:]*: (.+)", re.IGNORECASE)
_BROKEN_OFF = re.compile("socket closed|connection reset")


def why_unreachable(address: str, details: str, *, by_tls: bool) -> str | None:
    """What the bare status of a call means, `details` being gRPC's words; None where it is not that nobody was reached.
    by_tls: whether the call went by TLS."""
    lower = details.lower()
    if WRONG_HOST in lower:
        return (
            f"the certificate at {address} does not name the host that was dialled: dial a name that it has, or say "
            "which one it has (OUTRIDER_TLS_SERVER_NAME, TLS.server_name in Python)"
        )
    if found := _VERIFY_FAILED.search(details):
        return (
            f"the certificate at {address} is not trusted ({found[1].strip()}): name the file of the authority that "
            "it comes from (OUTRIDER_TLS_CA, TLS.ca in Python)"
        )
    if NO_TLS in lower:
        return (
            f"{address} speaks no TLS: is it served in plaintext? Then unset OUTRIDER_TLS and OUTRIDER_TLS_* (in "
            "Python leave out tls)"
        )
    if found := _HANDSHAKE_FAILED.search(details):
        return f"the TLS handshake with {address} failed: {found[1]}"
    if "failed parsing http/2" in lower:
        return f"{address} answers, but not by gRPC: is that the port of a coordinator?"
    if "errors resolving" in lower or "dns resolution failed" in lower:
        return f"nothing answers at {address}: no host has that name"
    if "failed to connect" in lower and _BROKEN_OFF.search(lower):
        return _broken_off(address, by_tls=by_tls)
    if "connect" in lower:
        return f"nothing answers at {address}: is a coordinator running there? (`outrider up`)"
    return None


def _broken_off(address: str, *, by_tls: bool) -> str:
    if by_tls:
        return (
            f"{address} broke the connection off after the TLS handshake: it may ask callers for a certificate from "
            "an authority that it trusts (OUTRIDER_TLS_CERT and OUTRIDER_TLS_KEY, TLS.cert and TLS.key in Python)"
        )
    return (
        f"{address} took the connection and closed it: it may be served by TLS. Then name the file of the authority "
        "that its certificate comes from (OUTRIDER_TLS_CA, tls=TLS(ca=...) in Python)"
    )
