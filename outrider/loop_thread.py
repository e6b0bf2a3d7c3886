"""One event loop in a thread of its own, on which the blocking clients of a process do their calls."""

from __future__ import annotations

import asyncio
import atexit
import concurrent.futures
import contextlib
import os
import threading
from collections.abc import Coroutine
from typing import Any, TypeVar

from outrider.errors import Unavailable
from outrider.serving.forks import AFTER_FORK

T = TypeVar("T")
STOP_WAIT_S = 5.0


class LoopThread:
    """Runs coroutines for other threads, any number at a time, until it is stopped. A child that is forked has no such
    thread, only a picture of it."""

    def __init__(self) -> None:
        self._pid = os.getpid()
        self._loop = asyncio.new_event_loop()
        self._is_stopped = False
        self._unfinished: set[concurrent.futures.Future[Any]] = set()
        self._thread = threading.Thread(target=self._serve, name="outrider-client", daemon=True)
        self._thread.start()

    @property
    def is_here(self) -> bool:
        """Whether it is a thread of this process."""
        return self._pid == os.getpid()

    def check_is_here(self) -> None:
        """Raises RuntimeError in a forked child."""
        if not self.is_here:
            raise RuntimeError(f"this client was made before a fork, in another process: {AFTER_FORK}")

    def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Its result. The caller's thread waits; an interrupt there cancels the coroutine. Raises what the coroutine
        raises, Unavailable where it was cancelled from elsewhere, RuntimeError on the loop's own thread and in a forked
        child."""
        try:
            self.check_is_here()
            if threading.current_thread() is self._thread:
                raise RuntimeError(
                    "a blocking call on the client's own event loop would wait for itself: use outrider.Client"
                )
        except RuntimeError:
            coroutine.close()
            raise
        future = self.submit(coroutine)
        if future is None:
            raise RuntimeError("the interpreter is shutting down")
        try:
            return future.result()
        except concurrent.futures.CancelledError:
            raise Unavailable("the client was closed meanwhile", reason="CLIENT_CLOSED") from None
        except BaseException:
            future.cancel()  # of no effect where it is the coroutine that raised
            raise

    def submit(self, coroutine: Coroutine[Any, Any, T]) -> concurrent.futures.Future[T] | None:
        """Without waiting; None after the end and in a forked child. Takes no lock: the garbage collector may end a
        stream, and come here, while the same thread is here already."""
        if self._is_stopped or not self.is_here:
            coroutine.close()
            return None
        try:
            future = asyncio.run_coroutine_threadsafe(coroutine, self._loop)
        except RuntimeError:  # the loop was closed meanwhile
            coroutine.close()
            return None
        self._unfinished.add(future)
        future.add_done_callback(self._unfinished.discard)
        if self._loop.is_closed():
            self._cancel_unfinished()
        return future

    def stop(self) -> None:
        """Cancels what still runs, and waits a while for that. Of no effect in a forked child."""
        if self._is_stopped or not self.is_here:
            return
        self._is_stopped = True
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(STOP_WAIT_S)

    def _serve(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            self._loop.run_forever()
        finally:
            while True:
                tasks = asyncio.all_tasks(self._loop)
                for task in tasks:
                    task.cancel()
                self._loop.run_until_complete(asyncio.gather(*tasks, return_exceptions=True))
                self._loop.run_until_complete(self._loop.shutdown_asyncgens())
                if not asyncio.all_tasks(self._loop):  # one may have come meanwhile
                    break
            self._loop.close()
            self._cancel_unfinished()

    def _cancel_unfinished(self) -> None:
        """What reached the loop too late to begin there: nobody is to wait for it."""
        with contextlib.suppress(KeyError):  # two threads may do this
            while True:
                self._unfinished.pop().cancel()


_shared: LoopThread | None = None
_shared_lock = threading.Lock()


def shared_loop() -> LoopThread:
    """That of this process, begun by the first call. A forked child gets its own: threads do not come along."""
    global _shared
    with _shared_lock:
        if _shared is None or not _shared.is_here:
            _shared = LoopThread()
            atexit.register(_shared.stop)
        return _shared


def _renew_lock() -> None:
    """A fork may have come while another thread held it."""
    global _shared_lock
    _shared_lock = threading.Lock()


os.register_at_fork(after_in_child=_renew_lock)
