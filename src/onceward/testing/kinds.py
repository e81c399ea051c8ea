"""Every kind of transaction that a caller can have, with the same few verbs, for the cases of JoinedContract."""

from __future__ import annotations

import sqlite3
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager, suppress
from typing import Any

from onceward.testing.lab import Lab
from onceward.testing.run_sql import run_sql


class Caller(ABC):
    """Somebody with a transaction of their own. `where` is a DSN, or the path of a file."""

    postgres = True
    many = True
    """Several transactions can be open at the same time."""
    guarded = False
    """It is the tx of a handler, whose inbox says itself what is wrong with it."""
    orm = False

    def __init__(self, tx: Any) -> None:
        self.tx = tx

    @classmethod
    @abstractmethod
    def opened(cls, where: str) -> AbstractAsyncContextManager[Caller]:
        """A handle on this database, closed at the end of the block."""

    async def begin(self) -> None:  # noqa: B027 - most do it by themselves
        """Begin, where that has to be said."""

    @abstractmethod
    async def commit(self) -> None: ...

    @abstractmethod
    async def rollback(self) -> None: ...

    @abstractmethod
    def savepoint(self) -> AbstractAsyncContextManager[Any]: ...

    @abstractmethod
    async def close(self) -> None:
        """What makes the handle unusable: closed, or given back to its pool."""

    async def run(self, sql: str, *params: Any) -> list[tuple[Any, ...]]:
        return await run_sql(self.tx, sql, *params)

    async def write(self, effect: str) -> None:
        await self.run("INSERT INTO effects VALUES ($1)", effect)

    async def autocommit(self) -> bool:
        """Leave the handle outside of a transaction, where that is possible."""
        return False

    def odd_rows(self) -> None:  # noqa: B027 - where a handle has no such setting
        """Set the handle's row factory to something of the caller's own."""


def place(lab: Lab) -> str:
    """Where a caller finds the lab's database."""
    path = getattr(lab, "path", None)
    return str(path) if path is not None else str(getattr(lab, "dsn", lab.url))


# --- PostgreSQL ---------------------------------------------------------------------------------------------


class AsyncpgCaller(Caller):
    _transaction: Any = None

    @classmethod
    @asynccontextmanager
    async def opened(cls, where: str) -> AsyncIterator[Caller]:
        import asyncpg  # noqa: PLC0415 - an extra

        connection = await asyncpg.connect(where)
        try:
            yield cls(connection)
        finally:
            await connection.close()

    async def begin(self) -> None:
        self._transaction = self.tx.transaction()
        await self._transaction.start()

    async def commit(self) -> None:
        await self._transaction.commit()

    async def rollback(self) -> None:
        await self._transaction.rollback()

    def savepoint(self) -> Any:
        return self.tx.transaction()

    async def close(self) -> None:
        await self.tx.close()

    async def autocommit(self) -> bool:
        return True  # until a transaction is begun


class AsyncpgPoolCaller(AsyncpgCaller):
    @classmethod
    @asynccontextmanager
    async def opened(cls, where: str) -> AsyncIterator[Caller]:
        import asyncpg  # noqa: PLC0415

        async with asyncpg.create_pool(where, min_size=1, max_size=1) as pool, pool.acquire() as connection:
            yield cls(connection)

    async def close(self) -> None:
        await self.tx._holder._pool.release(self.tx)


class PsycopgCaller(Caller):
    @classmethod
    @asynccontextmanager
    async def opened(cls, where: str) -> AsyncIterator[Caller]:
        import psycopg  # noqa: PLC0415 - an extra

        connection = await psycopg.AsyncConnection.connect(where)
        try:
            yield cls(connection)
        finally:
            await connection.close()

    async def commit(self) -> None:
        await self.tx.commit()

    async def rollback(self) -> None:
        await self.tx.rollback()

    def savepoint(self) -> Any:
        return self.tx.transaction()

    async def close(self) -> None:
        await self.tx.close()

    async def autocommit(self) -> bool:
        await self.tx.set_autocommit(True)
        return True

    def odd_rows(self) -> None:
        from psycopg.rows import dict_row  # noqa: PLC0415

        self.tx.row_factory = dict_row


class PsycopgPoolCaller(PsycopgCaller):
    @classmethod
    @asynccontextmanager
    async def opened(cls, where: str) -> AsyncIterator[Caller]:
        from psycopg_pool import AsyncConnectionPool  # noqa: PLC0415

        async with AsyncConnectionPool(where, min_size=1, max_size=1, open=False) as pool:
            caller = cls(await pool.getconn())
            caller.pool = pool
            try:
                yield caller
            finally:
                with suppress(ValueError):  # given back before
                    await pool.putconn(caller.tx)

    pool: Any

    async def close(self) -> None:
        await self.pool.putconn(self.tx)


# --- SQLAlchemy ---------------------------------------------------------------------------------------------


class SqlAlchemyCaller(Caller):
    driver = "asyncpg"

    @classmethod
    def url(cls, where: str) -> str:
        if cls.postgres:
            return where.replace("postgresql://", f"postgresql+{cls.driver}://", 1)
        return f"sqlite+aiosqlite:///{where}"

    async def commit(self) -> None:
        await self.tx.commit()

    async def rollback(self) -> None:
        await self.tx.rollback()

    def savepoint(self) -> Any:
        return self.tx.begin_nested()

    async def close(self) -> None:
        await self.tx.close()

    async def autocommit(self) -> bool:
        from sqlalchemy.ext.asyncio import AsyncConnection  # noqa: PLC0415

        if isinstance(self.tx, AsyncConnection):
            await self.tx.execution_options(isolation_level="AUTOCOMMIT")
        else:
            await self.tx.connection(execution_options={"isolation_level": "AUTOCOMMIT"})
        return True


class SessionCaller(SqlAlchemyCaller):
    """An AsyncSession on asyncpg."""

    orm = True

    @classmethod
    @asynccontextmanager
    async def opened(cls, where: str) -> AsyncIterator[Caller]:
        from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine  # noqa: PLC0415 - an extra

        engine = create_async_engine(cls.url(where))
        try:
            # With close_resets_only a session that was closed can be used again, and would be fit for a claim.
            async with AsyncSession(engine, close_resets_only=False, expire_on_commit=False) as session:
                yield cls(session)
        finally:
            await engine.dispose()


class ConnectionCaller(SqlAlchemyCaller):
    """An AsyncConnection on asyncpg."""

    @classmethod
    @asynccontextmanager
    async def opened(cls, where: str) -> AsyncIterator[Caller]:
        from sqlalchemy.ext.asyncio import create_async_engine  # noqa: PLC0415

        engine = create_async_engine(cls.url(where))
        try:
            async with engine.connect() as connection:
                yield cls(connection)
        finally:
            await engine.dispose()


class PsycopgSessionCaller(SessionCaller):
    driver = "psycopg"


class AiosqliteSessionCaller(SessionCaller):
    postgres = False


class AiosqliteConnectionCaller(ConnectionCaller):
    postgres = False


# --- SQLite -------------------------------------------------------------------------------------------------


class SqliteCaller(Caller):
    """A connection of the standard library."""

    postgres = False

    @classmethod
    @asynccontextmanager
    async def opened(cls, where: str) -> AsyncIterator[Caller]:
        connection = sqlite3.connect(where)
        try:
            yield cls(connection)
        finally:
            connection.close()

    async def commit(self) -> None:
        self.tx.commit()

    async def rollback(self) -> None:
        self.tx.rollback()

    @asynccontextmanager
    async def savepoint(self) -> AsyncIterator[None]:
        await self.run("SAVEPOINT callers")
        try:
            yield
        except BaseException:
            await self.run("ROLLBACK TO callers")
            raise
        finally:
            await self.run("RELEASE callers")

    async def close(self) -> None:
        self.tx.close()

    async def autocommit(self) -> bool:
        self.tx.isolation_level = None
        return True

    def odd_rows(self) -> None:
        self.tx.row_factory = lambda _cursor, row: {"odd": row}


class AiosqliteCaller(SqliteCaller):
    @classmethod
    @asynccontextmanager
    async def opened(cls, where: str) -> AsyncIterator[Caller]:
        import aiosqlite  # noqa: PLC0415 - an extra

        connection = await aiosqlite.connect(where)
        try:
            yield cls(connection)
        finally:
            await connection.close()

    async def commit(self) -> None:
        await self.tx.commit()

    async def rollback(self) -> None:
        await self.tx.rollback()

    async def close(self) -> None:
        await self.tx.close()

    async def autocommit(self) -> bool:
        await self.tx._execute(setattr, self.tx._conn, "isolation_level", None)  # in its thread
        return True


# --- the tx of a handler ------------------------------------------------------------------------------------


class HandlerCaller(Caller):
    """The tx that a handler of another inbox got: its unit of work is begun and ended as the inbox does it."""

    guarded = True
    session: Any

    @classmethod
    def store(cls, where: str) -> Any:
        from onceward.asyncpg import AsyncpgStore  # noqa: PLC0415

        return AsyncpgStore(where)

    @classmethod
    @asynccontextmanager
    async def opened(cls, where: str) -> AsyncIterator[Caller]:
        store = cls.store(where)
        async with AsyncExitStack() as stack:
            await store.open()
            stack.push_async_callback(store.close)
            caller = cls(None)
            caller.session = await stack.enter_async_context(store._driver.session(wait=5.0))
            yield caller

    async def begin(self) -> None:
        await self.session.begin()
        self.tx = self.session.tx

    async def commit(self) -> None:
        await self.session.commit()

    async def rollback(self) -> None:
        await self.session.rollback()

    def savepoint(self) -> Any:
        return self.tx.transaction()

    async def close(self) -> None:
        await self.session.rollback()


class PsycopgHandlerCaller(HandlerCaller):
    @classmethod
    def store(cls, where: str) -> Any:
        from onceward.psycopg import PsycopgStore  # noqa: PLC0415

        return PsycopgStore(where)


class SqlAlchemyHandlerCaller(HandlerCaller):
    @classmethod
    def store(cls, where: str) -> Any:
        from onceward.sqlalchemy import SqlAlchemyStore  # noqa: PLC0415

        return SqlAlchemyStore(SessionCaller.url(where))

    def savepoint(self) -> Any:
        return self.tx.begin_nested()


class SqliteHandlerCaller(HandlerCaller):
    postgres = False
    many = False

    @classmethod
    def store(cls, where: str) -> Any:
        from onceward.sqlite import SqliteStore  # noqa: PLC0415

        return SqliteStore(where)


POSTGRES_CALLERS: tuple[type[Caller], ...] = (
    AsyncpgCaller, PsycopgCaller, SessionCaller, PsycopgSessionCaller, ConnectionCaller, HandlerCaller,
)  # fmt: skip
SQLITE_CALLERS: tuple[type[Caller], ...] = (
    SqliteCaller, AiosqliteCaller, AiosqliteSessionCaller, AiosqliteConnectionCaller, SqliteHandlerCaller,
)  # fmt: skip
