"""Memory that only this process holds, and giving back what it has freed."""

from __future__ import annotations

import ctypes
import gc
from pathlib import Path


def give_back_freed() -> None:
    """Hands freed memory back to the system: loading leaves holes of some hundred MB that the C library would keep."""
    gc.collect()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # of the GNU C library
    if trim is not None:
        trim(0)


def anonymous_bytes() -> int:
    """Memory of this process that no file backs, so that the system cannot drop it. Linux only."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("RssAnon:"))
