"""Threads for work that nobody can stop, and that must not keep a process from ending."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from concurrent.futures import Executor, Future
from typing import Any, ParamSpec, TypeVar

STACK_BYTES = 8 << 20
"""Of each, whatever the system's limit is: how deep calls may go is not left to it."""
P = ParamSpec("P")
R = TypeVar("R")


class DaemonThreads(Executor):
    """As a ThreadPoolExecutor, but that the process does not wait at its end for what they are at."""

    def __init__(self, num_threads: int, name: str) -> None:
        self._num_threads = num_threads
        self._name = name
        self._calls: queue.SimpleQueue[tuple[Future[Any], Callable[[], Any]]] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._threads: list[threading.Thread] = []

    def submit(self, fn: Callable[P, R], /, *args: P.args, **kwargs: P.kwargs) -> Future[R]:
        """In turn; what is cancelled before its turn is left out."""
        future: Future[R] = Future()
        self._calls.put((future, lambda: fn(*args, **kwargs)))
        with self._lock:
            if len(self._threads) < self._num_threads:
                thread = threading.Thread(target=self._run, name=f"{self._name}-{len(self._threads)}", daemon=True)
                self._threads.append(thread)
                usual = threading.stack_size(STACK_BYTES)
                thread.start()
                threading.stack_size(usual)
        return future

    def _run(self) -> None:
        while True:
            self._call(*self._calls.get())

    @staticmethod
    def _call(future: Future[Any], call: Callable[[], Any]) -> None:
        if not future.set_running_or_notify_cancel():
            return
        try:
            future.set_result(call())
        except BaseException as error:
            future.set_exception(error)
