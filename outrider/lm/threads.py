"""How threads wait between two pieces of a pass. Decided before torch loads its thread pool, and once.

A pass has a few hundred parallel regions, so its threads must spin from one to the next: a wake-up costs 20 us or more.
After the pass they must sleep: a draft and a target worker that spin on the same cores take turns at stopping each
other, and a pass of 20 ms takes more than a second. Intel's OpenMP runtime (`pip install outrider[cpu]`) spins for a
time and then sleeps; torch's own, GNU's, can only count iterations, and gets so few of them that most waits sleep.
"""

from __future__ import annotations

import ctypes
import os
import sys
from importlib import metadata
from pathlib import Path

SPIN_TIME = "200us"
"""Longer than the gap between two regions of a pass, much shorter than a pass."""
GNU_SPIN_COUNT = "1000"
_CHOSEN_BY_USER = ("OMP_WAIT_POLICY", "KMP_BLOCKTIME", "GOMP_SPINCOUNT")

INTEL, GNU = "Intel OpenMP", "GNU OpenMP"


def choose_runtime() -> str:
    """Loads Intel's runtime where it is installed, so that torch finds its functions first; else sets up GNU's.

    Environment variables that the user has set stay as they are. Returns the runtime's name.
    """
    if "torch" in sys.modules:
        return GNU  # torch has loaded its own already: two at once would spin against each other
    path = _intel_runtime()
    is_users_choice = any(name in os.environ for name in _CHOSEN_BY_USER)
    if path is not None:
        if not is_users_choice:
            os.environ["KMP_BLOCKTIME"] = SPIN_TIME
        try:
            ctypes.CDLL(str(path), mode=ctypes.RTLD_GLOBAL)
        except OSError:
            os.environ.pop("KMP_BLOCKTIME", None)
        else:
            return INTEL
    if not is_users_choice:
        os.environ["OMP_WAIT_POLICY"] = "PASSIVE"
        os.environ["GOMP_SPINCOUNT"] = GNU_SPIN_COUNT
    return GNU


def _intel_runtime() -> Path | None:
    try:
        files = metadata.files("intel-openmp") or []
    except metadata.PackageNotFoundError:
        return None
    found = (Path(str(file.locate())) for file in files if file.name == "libiomp5.so")
    return next((path for path in found if path.is_file()), None)


RUNTIME = choose_runtime()
