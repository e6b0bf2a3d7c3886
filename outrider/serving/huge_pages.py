"""Large memory pages for a worker's weights: a pass reads all of them, and walks fewer page tables on the way.

Linux gives pages of 2 MiB to whoever asks, where `/sys/kernel/mm/transparent_hugepage/enabled` says `madvise`, as it
mostly does. The GNU C library asks for all that it allocates when told so at the start of a process (a tunable of glibc
2.35; older and other libraries ignore it), so it has to stand in the environment before Python runs. On an AMD EPYC VM
two threads read 8% faster so, and a pass over one row of a 0.5B model took 7% less time.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from pathlib import Path

VARIABLE = "GLIBC_TUNABLES"
TUNABLE = "glibc.malloc.hugetlb"
MODE = Path("/sys/kernel/mm/transparent_hugepage/enabled")


def mode(path: Path = MODE) -> str:
    """`always`, `madvise` or `never`, as the system is set; empty where it has no such pages."""
    try:
        words = path.read_text().split()
    except OSError:
        return ""
    return next((word.strip("[]") for word in words if word.startswith("[")), "")


def asking(environment: Mapping[str, str], path: Path = MODE) -> dict[str, str]:
    """What to add to a worker's environment: nothing where it would not matter, or where the user has decided."""
    tunables = environment.get(VARIABLE, "")
    if mode(path) != "madvise" or TUNABLE in tunables:
        return {}
    return {VARIABLE: f"{tunables}:{TUNABLE}=1".lstrip(":")}


def start_over_asking() -> None:
    """Replaces this process, the same command and pid, by one that asks; returns where there is nothing to ask for.
    Only before threads, sockets or models exist."""
    wanted = asking(os.environ)
    if wanted:
        sys.stdout.flush()
        sys.stderr.flush()
        os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], {**os.environ, **wanted})
