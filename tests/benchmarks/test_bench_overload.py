"""`make bench-overload` on a small scale: it ends in its JSON line, all texts are the toy's, and some were refused."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

SMALL = {
    "PLACES": "2", "QUEUE": "1", "MAX_TOKENS": "12", "PASS_MS": "5", "SECONDS": "2", "UNLOADED_SECONDS": "2",
    "STREAMS": "30", "STREAMS_MAX_TOKENS": "12", "STREAMS_PASS_MS": "20",
}  # fmt: skip


def test_overload_ends_in_its_figures() -> None:
    script = Path(__file__).parent / "overload.py"
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, env={**os.environ, **SMALL})
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout.splitlines()[-1])
    overload, streams = told["overload"], told["streams"]
    assert overload["clients"] == 30
    assert overload["accepted"] > 0
    assert overload["refused"] > 0
    assert overload["drafted"] > 0
    assert streams["complete"] == streams["streams"] == 30
    for part in (overload, streams):
        assert (part["wrong"], part["failures"]) == (0, {})
