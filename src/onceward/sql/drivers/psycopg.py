"""PostgreSQL through psycopg 3. What all drivers share is in postgresql.py.

The connection is in autocommit mode while a unit has it, so that psycopg begins nothing by itself: BEGIN is ours, and
`tx.transaction()` of a handler makes savepoints, as psycopg does it inside a transaction.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from functools import lru_cache
from typing import Any

import msgspec
import psycopg
from psycopg import sql as compose
from psycopg.pq import TransactionStatus
from psycopg.rows import dict_row
from psycopg.transaction import OutOfOrderTransactionNesting
from psycopg_pool import AsyncConnectionPool, PoolTimeout

from onceward.errors import HandlerEndedTransaction, StoreUnavailable, UsageError
from onceward.shield import finish
from onceward.sql.drivers.guard import Guard
from onceward.sql.drivers.listening import Ring, listening
from onceward.sql.drivers.pool_watch import PoolWatch, noticed, unnoticed
from onceward.sql.drivers.postgresql import PostgresDriver, PostgresSession, count
from onceward.sql.plan import PARAMETER, Result, Statement, gives_rows

_OPEN = (TransactionStatus.INTRANS, TransactionStatus.INERROR, TransactionStatus.ACTIVE)
_ENDS_TRANSACTION = {"commit", "rollback"}
_ENDS_CONNECTION = {"close", "set_autocommit", "cancel", "cancel_safe", "tpc_begin"}


class GuardedConnection(Guard):
    """A psycopg AsyncConnection inside the inbox's transaction, as the handler sees it.

    Everything of a connection is there, `cursor()` and `transaction()` (a savepoint) included. After `execute` the
    driver is asked whether the transaction still stands; COMMIT finds out the rest.
    """

    def __init__(self, connection: psycopg.AsyncConnection[Any]) -> None:
        self._connection = connection

    async def execute(self, query: Any, params: Any = None, **options: Any) -> psycopg.AsyncCursor[Any]:
        self.enter()
        try:
            return await self._connection.execute(query, params, **options)
        finally:
            closed = self._connection.closed
            self.leave(stands=closed or self._connection.info.transaction_status in _OPEN)

    @asynccontextmanager
    async def transaction(self, *args: Any, **options: Any) -> AsyncIterator[Any]:
        """psycopg's own, which is a savepoint here. While it is open somebody is about to say something: its end."""
        self.check()
        self.running += 1
        try:
            async with self._connection.transaction(*args, **options) as block:
                yield block
        except OutOfOrderTransactionNesting:
            self.broken = True  # psycopg has left this block as it is
            raise
        finally:
            self.running -= 1

    def __getattr__(self, name: str) -> Any:
        if name in _ENDS_TRANSACTION:
            self.has_ended = True
            raise HandlerEndedTransaction(
                f"the handler called {name}(). It was stopped and nothing it wrote stands. Leave that to onceward; "
                "`async with tx.transaction()` makes a savepoint."
            )
        if name in _ENDS_CONNECTION:
            raise UsageError(f"{name}() is not for handlers: the connection belongs to the inbox")
        self.check()
        return getattr(self._connection, name)


class PsycopgSession(PostgresSession["psycopg.AsyncConnection[Any]"]):
    _connection: psycopg.AsyncConnection[Any]

    @property
    def tx(self) -> psycopg.AsyncConnection[Any]:
        if self._guard is None:
            raise UsageError("there is no transaction")
        return self._guard  # type: ignore[return-value]  # it answers to everything a connection does

    @property
    def gone(self) -> bool:
        return self._connection.closed

    def _new_guard(self) -> Guard:
        return GuardedConnection(self._connection)

    def _in_transaction(self) -> bool:
        return self._connection.info.transaction_status in _OPEN

    def _server_version(self) -> int:
        return self._connection.info.server_version // 10000

    def _prepares(self) -> bool:
        """`prepare_threshold=None` is what psycopg needs behind PgBouncer."""
        return self._connection.prepare_threshold is not None

    async def _send(self, sql: str) -> str:
        cursor = await self._connection.execute(sql.encode(), prepare=False)
        while cursor.nextset():
            pass
        return cursor.statusmessage or ""

    async def _run(self, statement: Statement) -> Result:
        async with self._connection.cursor(row_factory=dict_row) as cursor:
            await cursor.execute(named(statement.sql), statement.params)
            if gives_rows(statement.sql):
                rows = await cursor.fetchall()
                return Result(rows, len(rows))
            return Result((), count(cursor.statusmessage or ""))

    def _terminate(self) -> None:
        self._connection.pgconn.finish()


@lru_cache(maxsize=256)
def named(sql: str) -> bytes:
    """`:name` as `%(name)s`."""
    return PARAMETER.sub(lambda m: m[0] if m[1] is None else f"%({m[1]})s", sql.replace("%", "%%")).encode()


def _put_on(pool: Any) -> None:
    original = pool.getconn

    async def getconn(timeout: float | None = None) -> Any:
        return await original(timeout=noticed(pool, timeout))

    pool.getconn = getconn


def _take_off(pool: Any) -> None:
    del pool.getconn


class PsycopgDriver(PostgresDriver["psycopg.AsyncConnection[Any]"]):
    timeouts = (PoolTimeout,)

    def __init__(
        self,
        *,
        conninfo: str | None = None,
        pool: AsyncConnectionPool[Any] | None = None,
        schema: str | None = None,
        second_connection: str = "warn",
        **pool_options: Any,
    ) -> None:
        if (conninfo is None) == (pool is None):
            raise UsageError("PsycopgStore takes either a DSN or pool=")
        super().__init__(pool, schema, PoolWatch(second_connection, _put_on, _take_off, _acquire, _release))
        self._conninfo = conninfo
        self._options = pool_options
        self.features = msgspec.structs.replace(self.features, listens=_can_listen(pool, pool_options))

    async def _create_pool(self) -> AsyncConnectionPool[Any]:
        options: dict[str, Any] = {"min_size": 1, "max_size": 10, "timeout": 10.0} | self._options
        try:
            # Once directly: a pool would try for a long time, and hide why it cannot.
            await (await psycopg.AsyncConnection.connect(self._conninfo or "")).close()
            pool: AsyncConnectionPool[Any] = AsyncConnectionPool(self._conninfo or "", open=False, **options)
            try:
                await pool.open(wait=True)
            except BaseException:
                await pool.close()
                raise
        except (psycopg.Error, PoolTimeout, OSError) as error:
            raise StoreUnavailable(f"cannot connect to PostgreSQL: {error or type(error).__name__}") from error
        return pool

    async def _close_pool(self, pool: AsyncConnectionPool[Any]) -> None:
        await pool.close(timeout=10.0)

    def listening(self, channel: str, ring: Ring) -> AbstractAsyncContextManager[None]:
        return listening(self._listen, channel, ring)

    async def _listen(self, channel: str, ring: Ring) -> None:
        if self._given is not None:
            async with self._given.connection() as connection:
                await connection.set_autocommit(True)
                try:
                    await _hear(connection, channel, ring)
                finally:
                    await connection.close()  # it must not go back with a LISTEN on it
        else:
            options = dict(self._options.get("kwargs") or {})
            async with await psycopg.AsyncConnection.connect(self._conninfo or "", autocommit=True, **options) as own:
                await _hear(own, channel, ring)

    def session_on(self, connection: Any) -> PsycopgSession:
        return PsycopgSession(connection)


async def _hear(connection: psycopg.AsyncConnection[Any], channel: str, ring: Ring) -> None:
    await connection.execute(compose.SQL("LISTEN {}").format(compose.Identifier(channel)))
    ring()  # it may have been said a moment ago
    async for _ in connection.notifies():
        ring()


def _can_listen(pool: AsyncConnectionPool[Any] | None, options: dict[str, Any]) -> bool:
    """Behind PgBouncer, where nothing is prepared, nobody hears a call; and a small pool has none to spare."""
    kwargs = (options.get("kwargs") if pool is None else pool.kwargs) or {}
    prepares = not isinstance(kwargs, dict) or kwargs.get("prepare_threshold", 5) is not None
    return prepares and (pool is None or pool.max_size > 2)


async def _acquire(pool: Any, wait: float) -> Any:
    task = asyncio.current_task()
    before = task.cancelling() if task else 0
    with unnoticed():
        connection = await pool.getconn(timeout=wait)
    connection.onceward_autocommit = connection.autocommit
    try:
        # The pool uses asyncio.wait_for: before Python 3.12 it loses a cancellation that comes with the connection.
        if task is not None and task.cancelling() > before:
            raise asyncio.CancelledError
        await connection.set_autocommit(True)
    except BaseException:
        await pool.putconn(connection)
        raise
    return connection


async def _release(pool: Any, connection: Any) -> None:
    await finish(_give_back(pool, connection))


async def _give_back(pool: Any, connection: Any) -> None:
    with suppress(psycopg.Error):  # a lost connection says nothing about the message; the pool replaces it
        if not connection.closed:
            await connection.set_autocommit(connection.onceward_autocommit)
    await pool.putconn(connection)
