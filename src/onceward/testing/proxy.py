"""A TCP proxy that can be cut, for tests of lost connections. Loopback only."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager


class Proxy:
    """Forwards bytes. When `cut_at` is seen on its way to the server, every connection is cut.

    With `deliver` the bytes still reach the server and its answer is lost; without, they never arrive.
    """

    def __init__(self, host: str, port: int) -> None:
        self._target = (host, port)
        self._writers: set[asyncio.StreamWriter] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self.port = 0
        self.cut_at: bytes | None = None
        self.deliver = False
        self.was_cut = asyncio.Event()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        server_reader, server_writer = await asyncio.open_connection(*self._target)
        self._writers |= {writer, server_writer}
        dead = asyncio.Event()
        with contextlib.suppress(OSError):
            await asyncio.gather(
                self._upstream(reader, server_writer, writer, dead), self._downstream(server_reader, writer, dead)
            )
        for one in (writer, server_writer):
            one.close()
            self._writers.discard(one)

    async def _upstream(
        self,
        client: asyncio.StreamReader,
        server: asyncio.StreamWriter,
        back: asyncio.StreamWriter,
        dead: asyncio.Event,
    ) -> None:
        while data := await client.read(65536):
            if self.cut_at is not None and self.cut_at in data:
                self.cut_at = None
                dead.set()  # from here on, answers are dropped
                if self.deliver:
                    server.write(data)
                    await server.drain()
                back.transport.abort()
                self.was_cut.set()
                break
            server.write(data)
            await server.drain()
        if server.can_write_eof():
            server.write_eof()  # the server reads all that was sent before it sees the end

    async def _downstream(
        self, server: asyncio.StreamReader, client: asyncio.StreamWriter, dead: asyncio.Event
    ) -> None:
        while data := await server.read(65536):
            if not dead.is_set():
                client.write(data)
                await client.drain()
        client.close()

    def cut(self) -> None:
        """Cut every connection now."""
        for writer in self._writers:
            writer.transport.abort()

    @asynccontextmanager
    async def running(self, port: int = 0) -> AsyncIterator[Proxy]:
        """On any free port, unless clients will look for it on a certain one."""

        def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            task = asyncio.ensure_future(self._serve(reader, writer))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

        server = await asyncio.start_server(accept, "127.0.0.1", port)
        self.port = server.sockets[0].getsockname()[1]
        try:
            yield self
        finally:
            server.close()
            self.cut()
            await asyncio.gather(*self._tasks, return_exceptions=True)
            await server.wait_closed()
