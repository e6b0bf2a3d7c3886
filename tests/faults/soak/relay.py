"""A network link that can be cut, held up, slowed down or fall silent: a TCP relay between two processes."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
from dataclasses import dataclass

READ_BYTES = 1 << 16


@dataclass(eq=False, slots=True)
class _Connection:
    near: asyncio.StreamWriter
    far: asyncio.StreamWriter
    is_silent: bool = False
    """Both ends believe in it, and nothing passes any more, the end of either included."""

    def abort(self) -> None:
        """RST to both ends, as a firewall or a rebooted machine would."""
        for writer in (self.near, self.far):
            _reset(writer)


class Relay:
    """Listens on `address` and carries bytes to and from `there` (host:port), both ways in order."""

    def __init__(self, there: str) -> None:
        self.there = there
        self.address = ""
        self.delay_s = 0.0
        """Each read waits so long before it is written: the way is as much longer, and carries less."""
        self.num_silenced = 0
        """Connections that fell silent with this link, so far."""
        self._is_cut = False
        self._open_gate = asyncio.Event()
        self._open_gate.set()
        self._connections: set[_Connection] = set()
        self._serving: set[asyncio.Task[None]] = set()
        self._server: asyncio.Server | None = None

    async def start(self) -> str:
        """The address to use in place of `there`."""
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        self.address = f"127.0.0.1:{self._server.sockets[0].getsockname()[1]}"
        return self.address

    def cut(self) -> None:
        """Every connection is reset, and new ones are until `heal`."""
        self._is_cut = True
        for connection in list(self._connections):
            connection.abort()

    def hold(self) -> None:
        """Nothing passes until `heal`, and then everything does, late and in order."""
        self._open_gate.clear()

    def fall_silent(self) -> None:
        """The present connections are half-open from now on: what either end says is lost, its end too. New ones
        work."""
        for connection in self._connections:
            self.num_silenced += not connection.is_silent
            connection.is_silent = True

    def heal(self) -> None:
        """As at the start, but silent connections stay so: no bytes of theirs can be had back."""
        self._is_cut, self.delay_s = False, 0.0
        self._open_gate.set()

    async def close(self) -> None:
        if self._server is not None:
            self._server.close()
        for task in self._serving:
            task.cancel()
        await asyncio.gather(*self._serving, return_exceptions=True)

    async def __aenter__(self) -> Relay:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        serving = asyncio.create_task(self._connected(reader, writer))
        self._serving.add(serving)
        serving.add_done_callback(self._serving.discard)

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self._is_cut:
            _reset(writer)
            return
        host, _, port = self.there.rpartition(":")
        try:
            far_reader, far_writer = await asyncio.open_connection(host, int(port))
        except OSError:
            _reset(writer)
            return
        connection = _Connection(writer, far_writer)
        if self._is_cut:  # meanwhile
            connection.abort()
            return
        self._connections.add(connection)
        try:
            await asyncio.gather(
                self._carry(connection, reader, writer, far_writer),
                self._carry(connection, far_reader, far_writer, writer),
            )
        finally:
            self._connections.discard(connection)
            connection.abort()

    async def _carry(
        self,
        connection: _Connection,
        source: asyncio.StreamReader,
        own: asyncio.StreamWriter,
        sink: asyncio.StreamWriter,
    ) -> None:
        """Until `source` ends. `own`: where its end is answered, whatever became of the other side."""
        with contextlib.suppress(OSError):
            while data := await source.read(READ_BYTES):
                if self.delay_s:
                    await asyncio.sleep(self.delay_s)
                await self._open_gate.wait()
                if not connection.is_silent:
                    sink.write(data)
                    await sink.drain()
        await self._open_gate.wait()
        own.close()
        if not connection.is_silent:
            sink.close()


def _reset(writer: asyncio.StreamWriter) -> None:
    own = writer.get_extra_info("socket")
    with contextlib.suppress(OSError):  # closed already
        own.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    writer.transport.abort()
