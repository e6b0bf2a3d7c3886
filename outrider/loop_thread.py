"""One event loop in a thread of its own, on which the blocking clients of a process do their calls."""

from __future__ import annotations

import asyncio
import atexit
import concurrent.futures
import os
import threading
from collections.abc import Coroutine
from typing import Any, TypeVar

from outrider.errors import Unavailable

T = TypeVar("T")
STOP_WAIT_S = 5.0


class LoopThread:
    """Runs coroutines for other threads, any number at a time, until it is stopped."""

    def __init__(self) -> None:
        self.pid = os.getpid()
        self._loop = asyncio.new_event_loop()
        self._lock = threading.Lock()
        self._is_stopped = False
        self._thread = threading.Thread(target=self._serve, name="outrider-client", daemon=True)
        self._thread.start()

    def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Its result. The caller's thread waits; an interrupt there cancels the coroutine. Raises what the coroutine
        raises, Unavailable where it was cancelled from elsewhere, RuntimeError on the loop's own thread."""
        if threading.current_thread() is self._thread:
            coroutine.close()
            raise RuntimeError(
                "a blocking call on the client's own event loop would wait for itself: use outrider.Client"
            )
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
        """Without waiting; None after the end."""
        with self._lock:
            if not self._is_stopped:
                return asyncio.run_coroutine_threadsafe(coroutine, self._loop)
        coroutine.close()
        return None

    def stop(self) -> None:
        """Cancels what still runs, and waits a while for that."""
        with self._lock:
            if self._is_stopped:
                return
            self._is_stopped = True
            self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(STOP_WAIT_S)

    def _serve(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            self._loop.run_forever()
        finally:
            tasks = asyncio.all_tasks(self._loop)
            for task in tasks:
                task.cancel()
            self._loop.run_until_complete(asyncio.gather(*tasks, return_exceptions=True))
            self._loop.run_until_complete(self._loop.shutdown_asyncgens())
            self._loop.close()


_shared: LoopThread | None = None
_shared_lock = threading.Lock()


def shared_loop() -> LoopThread:
    """That of this process, begun by the first call. A forked child gets its own: threads do not come along."""
    global _shared
    with _shared_lock:
        if _shared is None or _shared.pid != os.getpid():
            _shared = LoopThread()
            atexit.register(_shared.stop)
        return _shared
