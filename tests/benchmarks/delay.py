"""A network with a delay between processes of one machine: a relay that holds every byte back for a while.

Threads, not the event loop: its timers are rounded up to a millisecond, which a round trip of 5 ms has four times.
"""

from __future__ import annotations

import contextlib
import queue
import socket
import threading
import time
from collections.abc import AsyncIterator

CHUNK_BYTES = 1 << 16


@contextlib.asynccontextmanager
async def delayed(address: str, rtt_ms: float) -> AsyncIterator[str]:
    """An address that leads to `address`, half of `rtt_ms` later in each direction. Bandwidth is not limited."""
    host, _, port = address.rpartition(":")
    relay = _Relay((host, int(port)), rtt_ms / 2000)
    try:
        yield f"127.0.0.1:{relay.port}"
    finally:
        relay.close()


class _Relay:
    def __init__(self, there: tuple[str, int], delay_s: float) -> None:
        self._there = there
        self._delay_s = delay_s
        self._sockets: list[socket.socket] = []
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        _start(self._accept)

    def close(self) -> None:
        """Wakes whoever waits for a byte."""
        for connection in (self._listener, *self._sockets):
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
            connection.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                here, _ = self._listener.accept()
                there = socket.create_connection(self._there)
                self._sockets += [here, there]
                for source, sink in ((here, there), (there, here)):
                    sink.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                    held: queue.SimpleQueue[tuple[float, bytes]] = queue.SimpleQueue()
                    _start(self._read, source, held)
                    _start(self._deliver, sink, held)

    def _read(self, source: socket.socket, held: queue.SimpleQueue[tuple[float, bytes]]) -> None:
        """Until either end closes, which the other end hears as late as everything."""
        data = b"?"
        while data:
            try:
                data = source.recv(CHUNK_BYTES)
            except OSError:
                data = b""
            held.put((time.monotonic() + self._delay_s, data))

    def _deliver(self, sink: socket.socket, held: queue.SimpleQueue[tuple[float, bytes]]) -> None:
        with contextlib.suppress(OSError):
            while True:
                due, data = held.get()
                time.sleep(max(0.0, due - time.monotonic()))
                if not data:
                    sink.shutdown(socket.SHUT_RDWR)
                    return
                sink.sendall(data)


def _start(target: object, *args: object) -> None:
    threading.Thread(target=target, args=args, daemon=True).start()  # type: ignore[arg-type]
