"""Line: one command at a time to one server, on a connection that was just used where there is one.

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
_LOST = (exceptions.ConnectionError, exceptions.TimeoutError, OSError)


class Line:
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
            except _LOST as error:
                await self._let_go(connection)
                await self.close()  # what is on the shelf is most likely dead too
                if tries == TRIES or (tries and isinstance(error, exceptions.TimeoutError)):
                    raise
                await asyncio.sleep(0.05 * 2**tries if tries else 0.0)
            except exceptions.ResponseError:
                await self._keep(connection)
                raise
            except BaseException:
                await self._let_go(connection)
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

    async def _let_go(self, connection: Any) -> None:
        await connection.disconnect(nowait=True)
        await self._pool.release(connection)

    async def close(self) -> None:
        """The shelf is empty; the pool looks whether a connection is alive before it lends it."""
        while self._shelf:
            await self._pool.release(self._shelf.pop())
