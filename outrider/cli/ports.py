"""Whether a port can be listened on, told before models are loaded and not after."""

from __future__ import annotations

import socket

from outrider.errors import Unavailable


def listen_fault(host: str, port: int) -> str:
    """Why nobody can listen there now; empty when one can. Port 0 always can."""
    if not port:
        return ""
    try:
        found = socket.getaddrinfo(host.strip("[]"), port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except OSError as error:
        return str(error.strerror or error)
    family, kind, protocol, _, address = found[0]
    with socket.socket(family, kind, protocol) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(address)
        except OSError as error:
            return str(error.strerror or error)
    return ""


def require_free(host: str, port: int, flag: str) -> None:
    """Raises Unavailable naming the flag that moves the port."""
    fault = listen_fault(host, port)
    if fault:
        raise Unavailable(f"cannot listen on {host}:{port}: {fault}; choose another {flag}, or 0 for a free one")
