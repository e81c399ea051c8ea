"""Wire: one connection with the commands of many tasks on their way. The server answers them in their order.

redis-py connects it, with all that belongs to that: TLS, AUTH, HELLO, the name, the database. From then on what arrives
is handed to us and not to redis-py's stream, by `set_protocol` of asyncio, and is read by the same parser, hiredis.
redis-py disconnects it, too.

That reaches into redis-py at four places, which have had their names since its version 4.5: `_writer`, `_reader` and
`_parser` of a connection, and `_reader` of that parser. Where they are not as expected, `wire_on` gives nothing, and
commands are said on a connection for each (`shelf.py`). So it is without hiredis, too.

A command whose caller has gone is still answered: its future stays in its place, and its answer is thrown away.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from redis import exceptions

_Reader: Any = None
_Push: Any = None
_pack: Any = None
_NOT_YET: Any = None
with suppress(ImportError):  # no hiredis, or another redis-py
    import hiredis
    from redis._parsers.hiredis import NOT_ENOUGH_DATA as _NOT_YET

    _Reader, _pack = hiredis.Reader, hiredis.pack_command
    _Push = getattr(hiredis, "PushNotification", None)
    """Before 3.2 what a server says by itself cannot be told from an answer."""

TOGETHER = 4
"""Commands of one write. With all of a round the server would have nothing to do while we make them, and we nothing
while it answers."""
ONCE_MORE = 0.05
"""Seconds that an answer which is late has left: it may be here, unread, because the event loop was held up."""


def can_be() -> bool:
    """Whether the libraries are as expected."""
    return _pack is not None


def packed(command: tuple[Any, ...]) -> bytes:
    words: bytes = _pack(command)
    return words


def wire_on(connection: Any, gone: Callable[[Wire], None]) -> Wire | None:
    """On a connection that is connected. `gone` is told when no more can be asked, and when the wire is lost. None: the
    connection is not as expected, and has been left as it was."""
    transport = getattr(getattr(connection, "_writer", None), "transport", None)
    reader = getattr(getattr(connection, "_parser", None), "_reader", None)
    if not isinstance(reader, _Reader) or not hasattr(transport, "set_protocol"):
        return None
    if _Push is None and str(getattr(connection, "protocol", 3)) != "2":
        return None
    return Wire(connection, transport, reader, gone)


class Wire(asyncio.Protocol):
    def __init__(self, connection: Any, transport: Any, reader: Any, gone: Callable[[Wire], None]) -> None:
        self.connection = connection
        self._tell_gone = gone
        self._loop = asyncio.get_running_loop()
        self._transport = transport
        self._reader = reader
        self._timeout: float | None = connection.socket_timeout
        self._waiting: deque[tuple[asyncio.Future[Any], float]] = deque()
        """Whoever waits for an answer, in their order, and since when."""
        self._out: list[bytes] = []
        """What is written in this round of the event loop, all at once."""
        self._watch: asyncio.TimerHandle | None = None
        self._late: asyncio.Future[Any] | None = None
        self._full: asyncio.Future[None] | None = None
        """Done when there is room again in what is not sent yet."""
        self._told: set[asyncio.Task[None]] = set()
        self._leaves = False
        """It takes no more commands, and ends with the last answer."""
        self.is_lost = False
        self._stream: Any = transport.get_protocol()
        transport.set_protocol(self)
        early: Any = getattr(connection._reader, "_buffer", None)  # noqa: SLF001
        if early:  # it came behind the last answer that redis-py has read
            data = bytes(early)
            early.clear()
            self.data_received(data)
        if transport.is_closing():
            self._lose(exceptions.ConnectionError("the connection was closed"))

    # --- out ------------------------------------------------------------------------------------------------

    @property
    def is_full(self) -> bool:
        """The server does not read as fast as we write."""
        return self._full is not None

    async def room(self) -> None:
        while self._full is not None:
            await asyncio.wait([self._full])

    def ask(self, command: bytes) -> asyncio.Future[Any]:
        """Its answer. Commands of several tasks are written together; that of one alone at once."""
        if self.is_lost:
            raise exceptions.ConnectionError("the connection was lost")
        loop, waiting, out = self._loop, self._waiting, self._out
        future: asyncio.Future[Any] = loop.create_future()
        alone = not waiting
        waiting.append((future, loop.time()))
        if alone:
            self._transport.write(command)
        else:
            out.append(command)
            if len(out) == 1:
                loop.call_soon(self._write)
            elif len(out) == TOGETHER:
                self._write()
        if self._watch is None and self._timeout is not None:
            self._watch = loop.call_later(self._timeout, self._look)
        return future

    def _write(self) -> None:
        if self._out and not self.is_lost:
            self._transport.write(b"".join(self._out))
        self._out.clear()

    def pause_writing(self) -> None:
        self._full = self._loop.create_future()

    def resume_writing(self) -> None:
        full, self._full = self._full, None
        if full is not None:
            full.set_result(None)

    # --- in -------------------------------------------------------------------------------------------------

    def data_received(self, data: bytes) -> None:
        reader, waiting = self._reader, self._waiting
        reader.feed(data)
        try:
            while (reply := reader.gets()) is not _NOT_YET:
                if type(reply) is _Push:
                    self._pushed(reply)
                else:
                    self._answered(waiting.popleft()[0], reply)
        except Exception as error:  # noqa: BLE001 - nobody knows any more which answer is whose
            self._lose(exceptions.ConnectionError(f"an answer that cannot be read: {error!r}"))
        if self._leaves and not waiting:
            self._lose(exceptions.ConnectionError("the server does not want us"))

    def _answered(self, future: asyncio.Future[Any], reply: Any) -> None:
        if not isinstance(reply, Exception):
            if not future.done():
                future.set_result(reply)
            return
        if not future.done():
            future.set_exception(reply)
        if isinstance(reply, exceptions.ConnectionError) and not self._leaves:
            self._leaves = True  # it loads, or does not know us: redis-py would leave, too
            self._tell_gone(self)

    def _pushed(self, push: Any) -> None:
        """What the server says by itself, as that it is about to move, is redis-py's business."""
        task = asyncio.ensure_future(self._tell(push))
        self._told.add(task)
        task.add_done_callback(self._told.discard)

    async def _tell(self, push: Any) -> None:
        with suppress(Exception):
            await self.connection._parser.handle_push_response(push)  # noqa: SLF001

    # --- its end --------------------------------------------------------------------------------------------

    def _look(self) -> None:
        """Whether the oldest command has waited too long."""
        self._watch = None
        if not self._waiting or self._timeout is None:
            return
        oldest, since = self._waiting[0]
        left = since + self._timeout - self._loop.time()
        if left <= 0 and oldest is self._late:
            self._lose(exceptions.TimeoutError(f"no answer after {self._timeout:g} seconds"))
            return
        if left <= 0:
            self._late, left = oldest, ONCE_MORE
        self._watch = self._loop.call_later(left, self._look)

    def _lose(self, error: Exception) -> None:
        """The error is for who has waited longest; the others are told of the connection."""
        if self.is_lost:
            return
        self.is_lost = True
        if self._watch is not None:
            self._watch.cancel()
        self.resume_writing()
        kind = type(error)
        while self._waiting:
            future, _ = self._waiting.popleft()
            if not future.done():
                future.set_exception(kind(*error.args))
            kind = exceptions.ConnectionError
        self._transport.abort()
        self._tell_gone(self)

    def connection_lost(self, error: Exception | None) -> None:
        self._lose(exceptions.ConnectionError(f"the connection was lost: {error or 'closed by the server'}"))
        self._stream.connection_lost(error)  # redis-py waits for that when it disconnects

    def close(self) -> None:
        self._lose(exceptions.ConnectionError("the store was closed"))
