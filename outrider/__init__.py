"""Lossless speculative decoding as a service. The client is here; the servers are started by the `outrider` command."""

from __future__ import annotations

import importlib
import os
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from outrider.chat import Chat as Chat
    from outrider.chat import SyncChat as SyncChat
    from outrider.client import Client as Client
    from outrider.client import KeepAlive as KeepAlive
    from outrider.errors import OutriderError as OutriderError
    from outrider.results import Chunk as Chunk
    from outrider.results import Complete as Complete
    from outrider.results import Completion as Completion
    from outrider.results import Started as Started
    from outrider.resume import Resume as Resume
    from outrider.sampling.params import AcceptanceRule as AcceptanceRule
    from outrider.sampling.params import Origin as Origin
    from outrider.serving.tls import TLS as TLS
    from outrider.serving.tokens import token_from_file as token_from_file
    from outrider.sync_client import SyncClient as SyncClient

_HOME_OF = {
    "Chat": "outrider.chat",
    "SyncChat": "outrider.chat",
    "Client": "outrider.client",
    "KeepAlive": "outrider.client",
    "OutriderError": "outrider.errors",
    "Chunk": "outrider.results",
    "Complete": "outrider.results",
    "Completion": "outrider.results",
    "Started": "outrider.results",
    "Resume": "outrider.resume",
    "AcceptanceRule": "outrider.sampling.params",
    "Origin": "outrider.sampling.params",
    "TLS": "outrider.serving.tls",
    "token_from_file": "outrider.serving.tokens",
    "SyncClient": "outrider.sync_client",
}
__all__ = list(_HOME_OF)

# Read when gRPC is imported. Its own handlers of forks crash children, whatever they do, while a stream is open, and
# Outrider's clients do without them (see serving/forks.py). What is set already stays.
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


def __getattr__(name: str) -> Any:
    """Loads what is asked for only then: workers and core code import this package without grpc."""
    if name in _HOME_OF:
        return getattr(importlib.import_module(_HOME_OF[name]), name)
    raise AttributeError(f"module 'outrider' has no attribute {name!r}")
