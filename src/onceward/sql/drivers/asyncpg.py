"""PostgreSQL through asyncpg. What all drivers share is in postgresql.py."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import asyncpg

from onceward.errors import StoreUnavailable, TryLater, UsageError
from onceward.sql import dialect
from onceward.sql.drivers.asyncpg_guard import GuardedConnection, acquire, put_on, release, take_off
from onceward.sql.drivers.pool_watch import PoolWatch
from onceward.sql.drivers.postgresql import LOCATE, Guard, PostgresSession, count
from onceward.sql.plan import Result, Statement, gives_rows, numbered
from onceward.store import Features


class AsyncpgSession(PostgresSession["asyncpg.Connection"]):
    def __init__(self, connection: asyncpg.Connection) -> None:
        super().__init__()
        self._connection = connection

    @property
    def tx(self) -> asyncpg.Connection:
        if self._guard is None:
            raise UsageError("there is no transaction")
        return self._guard  # it answers to everything a connection does

    @property
    def gone(self) -> bool:
        return bool(self._connection.is_closed())

    def _new_guard(self) -> Guard:
        return GuardedConnection(self._connection)

    def _in_transaction(self) -> bool:
        return bool(self._connection.is_in_transaction())

    def _server_version(self) -> int:
        return int(self._connection.get_server_version().major)

    def _has_standard_strings(self) -> bool:
        return bool(self._connection.get_settings().standard_conforming_strings == "on")

    async def _send(self, sql: str) -> str:
        tag: str = await self._connection.execute(sql)
        return tag

    async def _run(self, statement: Statement) -> Result:
        sql, names = numbered(statement.sql)
        params = [statement.params[name] for name in names]
        if gives_rows(sql):
            rows = await self._connection.fetch(sql, *params)
            return Result(rows, len(rows))
        return Result((), count(await self._connection.execute(sql, *params)))

    def _terminate(self) -> None:
        self._connection.terminate()


class AsyncpgDriver:
    features = Features(guards_pool=True, errors_abort=True)

    def __init__(
        self,
        *,
        dsn: str | None = None,
        pool: asyncpg.Pool | None = None,
        schema: str | None = None,
        second_connection: str = "warn",
        **pool_options: Any,
    ) -> None:
        if (dsn is None) == (pool is None):
            raise UsageError("AsyncpgStore takes either dsn= or pool=")
        self.schema = schema
        self.dialect = dialect.postgresql(schema)
        self._dsn = dsn
        self._options = pool_options
        self._given = pool
        self._pool: asyncpg.Pool | None = None
        self.watch = PoolWatch(second_connection, put_on, take_off, acquire, release)

    @property
    def pool(self) -> asyncpg.Pool:
        if self._pool is None:
            raise StoreUnavailable("the store is not open")
        return self._pool

    async def open(self) -> None:
        if self._given is not None:
            self._pool = self._given
        else:
            self._pool = await self._create_pool()
        self.watch.attach(self._pool)
        self.dialect = dialect.postgresql(self.schema)
        if self.schema is None:
            await self._locate()

    async def _locate(self) -> None:
        """Name the schema of our tables from now on, so that a handler may set another search path."""
        async with self.session(wait=30.0) as session:
            found = await session.execute(LOCATE)
        if found.rows:
            self.dialect = dialect.postgresql(found.rows[0]["schema"])

    async def _create_pool(self) -> asyncpg.Pool:
        try:
            return await asyncpg.create_pool(self._dsn, **{"min_size": 1, "max_size": 10} | self._options)
        except (OSError, asyncpg.PostgresError, asyncpg.InterfaceError, ValueError) as error:
            raise StoreUnavailable(f"cannot connect to PostgreSQL: {error or type(error).__name__}") from error

    async def close(self) -> None:
        pool, self._pool = self._pool, None
        if pool is None:
            return
        self.watch.detach(pool)
        if self._given is None:
            try:
                await asyncio.wait_for(pool.close(), 10.0)
            except TimeoutError:
                pool.terminate()

    @asynccontextmanager
    async def session(self, *, wait: float, read_only: bool = False) -> AsyncIterator[AsyncpgSession]:  # noqa: ARG002
        async with AsyncExitStack() as stack:
            try:
                proxy = await stack.enter_async_context(self.watch.connection(self.pool, wait))
            except TimeoutError as error:
                text = f"waited {wait:g} s for a connection: all of the pool are in use, or PostgreSQL does not answer"
                raise TryLater(reason="store_busy", text=text) from error
            except Exception as error:
                raise AsyncpgSession.translated(error, lost=True) from error
            # The pool's proxy forgets its connection when that is lost; we still want to ask it.
            session = AsyncpgSession(proxy._con)  # noqa: SLF001
            try:
                yield session
            finally:
                await session.rollback()
