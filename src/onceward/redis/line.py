"""Line: commands to one server, those of all tasks on one connection (`wire.py`).

A connection for each command would mean a write, a read and a wake-up of the event loop for each; on a shared one they
are for all who speak in the same moment. When it is lost, all that is on its way is said again on the next one; that is
no harm, because every script says the same the second time.

What is long goes another way (`shelf.py`), so that nobody waits behind it; and so does everything where redis-py or its
parser is not as expected.

A line belongs to the event loop and the process that it was made in. On a connection that two processes share, each
would read answers of the other.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Coroutine
from typing import Any, TypeVar

from redis import exceptions
from redis.asyncio import BlockingConnectionPool

from onceward.errors import UsageError
from onceward.redis import wire
from onceward.redis.shelf import LOST, TRIES, Shelf, let_go, pause
from onceward.redis.wire import Wire

T = TypeVar("T")

LONG = 64 * 1024
"""Bytes of a command that goes another way."""


def apart(work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
    """In a task of its own: redis-py sets timeouts on the task that it runs in, and loses a cancellation that comes
    while it connects. So `finish_here` cannot be around it."""
    return asyncio.ensure_future(work)


class Line:
    def __init__(self, pool: BlockingConnectionPool) -> None:
        self._pool: Any = pool
        self._shelf = Shelf(pool)
        self._shares = wire.can_be() and pool.max_connections > 1  # others need one, too
        self._wire: Wire | None = None
        self._connecting: asyncio.Task[Wire | None] | None = None
        self._left: list[Any] = []
        """Connections that were lost, and are still the pool's."""
        self._closed = False
        self._loop = asyncio.get_running_loop()
        self._pid = os.getpid()

    async def say(self, *command: Any) -> Any:
        if os.getpid() != self._pid or asyncio.get_running_loop() is not self._loop:
            raise UsageError("the store was opened by another event loop or process: open one of its own in this one")
        if self._shares:
            packed = wire.packed(command)
            if len(packed) <= LONG:
                return await self._say(packed, command)
        return await apart(self._shelf.say(*command))

    async def _say(self, packed: bytes, command: tuple[Any, ...]) -> Any:
        for tries in range(TRIES + 1):
            here = self._wire or await self._connected()
            if here is None:
                return await apart(self._shelf.say(*command))
            try:
                if here.is_full:
                    await here.room()
                return await here.ask(packed)
            except LOST as error:
                await pause(tries, error)
        raise AssertionError  # the last try has raised

    # --- its connection -------------------------------------------------------------------------------------

    async def _connected(self) -> Wire | None:
        """One connects, and the others wait for it. None: it cannot be shared."""
        if self._closed:
            raise exceptions.ConnectionError("the store was closed")
        if self._connecting is None:
            self._connecting = apart(self._connect())
            self._connecting.add_done_callback(self._has_connected)
        connecting = self._connecting
        await asyncio.wait([connecting])  # which is not cancelled with who waits
        return connecting.result()

    async def _connect(self) -> Wire | None:
        while self._left:
            await let_go(self._pool, self._left.pop())
        connection = await self._pool.get_connection()
        found = wire.wire_on(connection, self._gone)
        if found is None:
            self._shares = False
            await self._pool.release(connection)
        elif not found.is_lost:
            self._wire = found
        return found

    def _has_connected(self, connecting: asyncio.Task[Wire | None]) -> None:
        self._connecting = None
        if not connecting.cancelled():
            connecting.exception()  # seen: whoever waited may have gone

    def _gone(self, gone: Wire) -> None:
        if self._wire is gone:
            self._wire = None
        if gone.is_lost:
            self._left.append(gone.connection)

    async def close(self) -> None:
        """The pool has all its connections again."""
        self._closed = True
        if os.getpid() != self._pid:
            return
        if self._connecting is not None:
            await asyncio.wait([self._connecting])
        if self._wire is not None:
            self._wire.close()
        while self._left:
            await let_go(self._pool, self._left.pop(), nowait=False)
        await self._shelf.close()
