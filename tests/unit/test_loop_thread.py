"""The blocking clients' event loop, beside the garbage collector, a fork and its own end."""

from __future__ import annotations

import subprocess
import sys
import threading

import pytest

from outrider.errors import Unavailable
from outrider.loop_thread import LoopThread


async def nothing() -> None:
    pass


def output_of(program: str) -> list[str]:
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


def test_the_collector_may_end_a_stream_in_the_midst_of_a_submission() -> None:
    """At whatever allocation: thresholds move where it runs. A deadlock would be a stack dump and an error."""
    program = """
import faulthandler, gc
from outrider.loop_thread import shared_loop
faulthandler.dump_traceback_later(60, exit=True)
loop, ended = shared_loop(), []
async def nothing(): pass
class Stream:
    def __init__(self): self.me = self
    def __del__(self): ended.append(loop.submit(nothing()))
for number in range(1000):
    gc.set_threshold(1 + number % 50)
    Stream()
    loop.run(nothing())
print(len(ended))
"""
    (num_ended,) = output_of(program)
    assert int(num_ended) > 900, "INCONCLUSIVE"


def test_a_forked_child_has_a_loop_of_its_own_and_leaves_its_parents_alone() -> None:
    """Also where another thread held the lock while the fork came."""
    program = """
import os
from outrider import loop_thread
async def told(): return os.getpid()
ours = loop_thread.shared_loop()
assert ours.run(told()) == os.getpid()
with loop_thread._shared_lock:
    pid = os.fork()
if pid == 0:
    try:
        ours.run(told())
    except RuntimeError as error:
        print("spawn" in str(error), ours.submit(told()), loop_thread.shared_loop().run(told()) == os.getpid())
    ours.stop()
else:
    assert os.waitpid(pid, 0)[1] == 0
    print(ours.run(told()) == os.getpid())
"""
    assert output_of(program) == ["True", "None", "True", "True"]


def test_nobody_waits_for_a_loop_that_has_ended() -> None:
    loop, ends = LoopThread(), list[type[Exception]]()

    def keep_asking() -> None:
        try:
            while True:
                loop.run(nothing())
        except (RuntimeError, Unavailable) as end:
            ends.append(type(end))

    threads = [threading.Thread(target=keep_asking) for _ in range(4)]
    for thread in threads:
        thread.start()
    loop.stop()
    for thread in threads:
        thread.join()
    assert len(ends) == 4
    assert loop.submit(nothing()) is None
    with pytest.raises(RuntimeError, match="shutting down"):
        loop.run(nothing())
