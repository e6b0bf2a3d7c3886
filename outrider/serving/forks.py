"""gRPC does not live through a fork: a child of a process that has used it crashes or hangs at its next call.

A process that has not used it yet may fork, and each child use it. Nothing here knows of gRPC that others use.

Beside that, gRPC's own handlers of forks end some children of a process with an open stream, whatever those do:
`outrider/__init__.py` has gRPC do without them, unless gRPC was imported before or `GRPC_ENABLE_FORK_SUPPORT` is set.
"""

from __future__ import annotations

import os

AFTER_FORK = "start processes by spawn, not by fork, or make clients and first calls after the fork"
_used_by = 0
"""The process that used gRPC first, this one or one that it was forked from; 0: none."""


def is_ours() -> bool:
    """Whether what gRPC holds is of this process."""
    return _used_by in (0, os.getpid())


def use_grpc() -> None:
    """To be called before gRPC is used. Raises RuntimeError in a child whose parent had used it."""
    global _used_by
    if not is_ours():
        raise RuntimeError(
            f"gRPC was used before a fork, by process {_used_by}, and does not work in its children: {AFTER_FORK}"
        )
    _used_by = os.getpid()
