"""Shelf: one command at a time on a connection of redis-py's, on one that was just used where there is one.

To take a connection from redis-py's pool and to give it back costs about as much as the command itself. So a few are
kept on a shelf between two commands. One that has died there is noticed by its next command, which is sent again on
another; that is no harm, because every script says the same the second time.
"""

from __future__ import annotations

import asyncio
from typing import Any

from redis import exceptions
from redis.asyncio import BlockingConnectionPool

SHELF = 16
"""At most, and half of the pool: others take connections from it too, and cannot see the shelf."""
TRIES = 3
"""After the first, each a little later, before a server counts as not there."""
LOST = (exceptions.ConnectionError, exceptions.TimeoutError, OSError)


async def pause(tries: int, error: BaseException) -> None:
    """Before it is said again. The error, if that is enough."""
    if tries == TRIES or (tries and isinstance(error, exceptions.TimeoutError)):
        raise error
    await asyncio.sleep(0.05 * 2**tries if tries else 0.0)


class Shelf:
    def __init__(self, pool: BlockingConnectionPool) -> None:
        self._pool: Any = pool
        self._shelf: list[Any] = []
        self._room = min(SHELF, pool.max_connections // 2)
        self._waiting = 0

    async def say(self, *command: Any) -> Any:
        for tries in range(TRIES + 1):
            connection = self._shelf.pop() if self._shelf else await self._next()
            try:
                await connection.send_command(*command)
                reply = await connection.read_response()
            except LOST as error:
                await let_go(self._pool, connection)
                await self.close()  # what is on the shelf is most likely dead too
                await pause(tries, error)
            except exceptions.ResponseError:
                await self._keep(connection)
                raise
            except BaseException:
                await let_go(self._pool, connection)
                raise
            else:
                await self._keep(connection)
                return reply
        raise AssertionError  # the last try has raised

    async def _next(self) -> Any:
        self._waiting += 1
        try:
            return await self._pool.get_connection()
        finally:
            self._waiting -= 1

    async def _keep(self, connection: Any) -> None:
        if len(self._shelf) < self._room and not self._waiting:
            self._shelf.append(connection)
        else:
            await self._pool.release(connection)

    async def close(self) -> None:
        """The shelf is empty; the pool looks whether a connection is alive before it lends it."""
        while self._shelf:
            await self._pool.release(self._shelf.pop())


async def let_go(pool: Any, connection: Any, *, nowait: bool = True) -> None:
    """Of a connection that cannot be used any more: the pool may have another in its place."""
    await connection.disconnect(nowait=nowait)
    await pool.release(connection)
