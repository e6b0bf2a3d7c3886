"""Ports of 127.0.0.1 that must be known before anything listens there, or kept while nothing does."""

from __future__ import annotations

import os
import random
import socket
from contextlib import suppress

PORTS = range(20_000, 32_000)
"""Below those that the system gives to callers: while a server is down, nobody gets its port by chance."""
_rng = random.Random(os.getpid())
_given: set[int] = set()


def free_port() -> int:
    """Where nothing listens; each time another one."""
    while True:
        port = _rng.choice(PORTS)
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", port))
            if port not in _given:
                _given.add(port)
                return port
