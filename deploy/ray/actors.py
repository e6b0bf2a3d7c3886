"""One worker in a Ray actor: the gRPC server that the command line starts, hosted by a process that Ray places.

A restarted actor reruns its constructor and nothing else, so the constructor starts the server. It runs in a thread of
its own, on the only grpc loop of the process: Ray's own calls never wait for a token, nor tokens for them.
"""

from __future__ import annotations

import asyncio
import importlib
import os
import socket
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass

import ray

from deploy.ray.config import Pool
from deploy.ray.reconcile import Phase
from outrider.settings import WorkerSettings

BIND_TIMEOUT_S = 30.0


@dataclass(frozen=True)
class WorkerStatus:
    """What a worker tells the driver. `failure` is the traceback of a server that never came up."""

    name: str
    address: str
    pid: int
    phase: Phase
    failure: str = ""

    @property
    def serving(self) -> bool:
        return self.phase is Phase.SERVING


class WorkerActor:
    """Serves `pool.role` on `port` of the node it lands on, and takes leases with `coordinators`."""

    def __init__(self, name: str, pool: Pool, port: int, coordinators: tuple[str, ...]) -> None:
        host = ray.util.get_node_ip_address()
        self._name, self._pool, self._address = name, pool, f"{host}:{port}"
        self._settings = pool.worker_settings(
            host=host, port=port, coordinators=coordinators, advertise_address=self._address
        )
        self._is_restart = ray.get_runtime_context().was_current_actor_reconstructed
        self._phase = Phase.STARTING
        self._failure = ""
        self._lock = threading.Lock()
        self._request_stop: Callable[[], object] = lambda: None
        threading.Thread(target=self._run, name="outrider-server").start()

    def status(self) -> WorkerStatus:
        """Answers as soon as the actor has a place, long before a large model is loaded."""
        return WorkerStatus(self._name, self._address, os.getpid(), self._phase, self._failure)

    def drain(self) -> None:
        """Begins to: gives the leases back, refuses new sessions, lets running ones end within the settings' grace. One
        that does not serve yet never will."""
        with self._lock:
            if self._phase is Phase.STARTING:
                self._phase = Phase.DRAINED
            elif self._phase is Phase.SERVING:
                self._phase = Phase.DRAINING
                self._request_stop()

    def _run(self) -> None:
        try:
            _cap_gpu_memory(self._pool.num_gpus)
            _wait_until_free(self._settings.host, self._settings.port)
            asyncio.run(self._serve(self._settings))
            self._phase = Phase.DRAINED
        except Exception:
            if self._phase is Phase.DRAINED:
                return
            self._failure = traceback.format_exc()
            if self._phase is not Phase.STARTING or self._is_restart:
                # The settings once worked: what failed may pass, and Ray restarts a process that ends.
                traceback.print_exc()
                time.sleep(1.0)
                os._exit(1)
            self._phase = Phase.FAILED

    async def _serve(self, settings: WorkerSettings) -> None:
        # Imported here, so that the driver needs neither torch nor a model.
        serve = importlib.import_module(f"{self._pool.role}_worker.server").serve
        stop, loop = asyncio.Event(), asyncio.get_running_loop()
        self._request_stop = lambda: loop.call_soon_threadsafe(stop.set)
        await serve(settings, stop=stop, on_ready=self._on_ready)

    def _on_ready(self, port: int) -> None:
        """Before any coordinator knows of it."""
        with self._lock:
            if self._phase is not Phase.STARTING:
                raise RuntimeError("told to drain while it started")
            self._phase = Phase.SERVING


def _cap_gpu_memory(num_gpus: float) -> None:
    """Ray's fractions are book-keeping only: this holds a worker that shares a card to its part of the memory."""
    if 0 < num_gpus < 1:
        import torch

        if torch.cuda.is_available():
            torch.cuda.set_per_process_memory_fraction(num_gpus)


def _wait_until_free(host: str, port: int) -> None:
    """A killed process may hold its port for a moment after its successor has started."""
    deadline = time.monotonic() + BIND_TIMEOUT_S
    while True:
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((host, port))
                return
            except OSError as error:
                if time.monotonic() > deadline:
                    raise OSError(error.errno, f"{host}:{port} is taken: {error.strerror}") from error
        time.sleep(0.1)
