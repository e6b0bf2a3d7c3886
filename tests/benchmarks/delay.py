"""A network with a delay between processes of one machine: a relay that holds every byte back for a while."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator


@contextlib.asynccontextmanager
async def delayed(address: str, rtt_ms: float) -> AsyncIterator[str]:
    """An address that leads to `address`, half of `rtt_ms` later in each direction. Bandwidth is not limited."""
    host, _, port = address.rpartition(":")
    tasks: set[asyncio.Task[None]] = set()

    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there_reader, there_writer = await asyncio.open_connection(host, int(port))
        for source, sink in ((reader, there_writer), (there_reader, writer)):
            task = asyncio.create_task(_carry(source, sink, rtt_ms / 2000))
            tasks.add(task)
            task.add_done_callback(tasks.discard)

    server = await asyncio.start_server(connected, "127.0.0.1", 0)
    try:
        yield f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
    finally:
        server.close()
        for task in list(tasks):
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _carry(source: asyncio.StreamReader, sink: asyncio.StreamWriter, delay_s: float) -> None:
    """Until either end closes. What is read while something waits waits behind it, each for its own time."""
    loop = asyncio.get_running_loop()
    held: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue()

    async def deliver() -> None:
        while True:
            due, data = await held.get()
            await asyncio.sleep(due - loop.time())
            if not data:
                sink.close()
                return
            sink.write(data)
            await sink.drain()

    delivering = asyncio.create_task(deliver())
    try:
        while data := await source.read(1 << 16):
            held.put_nowait((loop.time() + delay_s, data))
        held.put_nowait((loop.time() + delay_s, b""))
        await delivering
    except OSError:
        pass
    finally:
        delivering.cancel()
        sink.close()
