"""Work in daemon threads is done as in any pool, and does not keep a process from ending."""

import subprocess
import sys
import threading
from concurrent.futures import CancelledError

import pytest

from outrider.serving.daemon_threads import DaemonThreads


def test_calls_are_made_in_turn_and_errors_are_told() -> None:
    pool, may_go = DaemonThreads(1, "test"), threading.Event()
    first = pool.submit(may_go.wait, 60)
    left_out, failing, last = pool.submit(may_go.clear), pool.submit(int, "x"), pool.submit(int, "7")
    assert left_out.cancel()
    may_go.set()
    assert (first.result(60), last.result(60)) == (True, 7)
    with pytest.raises(ValueError, match="invalid literal"):
        failing.result(60)
    with pytest.raises(CancelledError):
        left_out.result(60)
    assert may_go.is_set()


def test_a_process_ends_whatever_its_threads_are_at() -> None:
    """As a worker that is told to end while it reads a form."""
    code = (
        "import threading\n"
        "from outrider.serving.worker_stream import BUILDERS\n"
        "began = threading.Event()\n"
        "BUILDERS.submit(lambda: (began.set(), threading.Event().wait()))\n"
        "began.wait()\n"
        "print('ends', flush=True)\n"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.communicate(timeout=60)[0] == "ends\n"
        finally:
            process.kill()
    assert process.returncode == 0
