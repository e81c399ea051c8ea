"""SQLite through SQLAlchemy and aiosqlite: for services whose engine is that. Each statement is a hop to a thread, so
it is slower than the embedded store, which groups commits; the promise is the same.
"""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import AsyncIterator, Awaitable
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from contextvars import ContextVar
from pathlib import Path
from secrets import token_hex
from typing import Any

import sqlalchemy.exc
from sqlalchemy import event
from sqlalchemy.ext.asyncio import AsyncEngine, create_async_engine

from onceward.errors import HandlerEndedTransaction, NestedProcess, StoreUnavailable, TryLater, UsageError
from onceward.shield import LoopLock, finish
from onceward.sql import dialect
from onceward.sql.driver import SessionDefaults
from onceward.sql.drivers.pool_watch import hold, unhold
from onceward.sql.drivers.sqlalchemy import Borrowed, MakeSession, OrmTransaction, watch_for
from onceward.sql.drivers.sqlite import raise_for, statements_of
from onceward.sql.plan import Result, Statement
from onceward.store import Features

_writing: ContextVar[AsyncEngine | None] = ContextVar("onceward_aiosqlite_writing", default=None)


class AiosqliteSession(SessionDefaults):
    """BEGIN IMMEDIATE on the connection, and a savepoint in it, by which we know our transaction again."""

    def __init__(self, raw: Any, path: str, *, wait: float, read_only: bool) -> None:
        self._raw = raw
        self._path = path
        self._wait = wait
        self._read_only = read_only
        self._savepoint = ""
        self.lost = False

    @property
    def gone(self) -> bool:
        return not self._raw.is_alive() if hasattr(self._raw, "is_alive") else False

    def stands(self) -> bool:
        return bool(self._savepoint) and bool(self._raw.in_transaction)

    async def begin(self, first: Statement | None = None) -> Result:
        if not self._read_only:
            self._savepoint = f"onceward_{token_hex(8)}"
            await self._begin(f"BEGIN IMMEDIATE; SAVEPOINT {self._savepoint}")
        return await self.execute(first) if first is not None else Result((), 0)

    async def _begin(self, sql: str) -> None:
        """Another process is waited for in the thread, as long as we are asked to and not as the engine is set."""
        ((patience,),) = await self._sent(self._raw.execute_fetchall("PRAGMA busy_timeout"))
        wanted = int(self._wait * 1000)
        if patience == wanted:
            await self._sent(self._raw.executescript(sql))
            return
        try:
            await self._send(f"PRAGMA busy_timeout = {wanted}")
            await self._sent(self._raw.executescript(sql))
        finally:
            await finish(self._raw.execute(f"PRAGMA busy_timeout = {patience}"))

    async def execute(self, statement: Statement) -> Result:
        if statement.rows is not None:
            return Result((), (await self._sent(self._raw.executemany(statement.sql, statement.rows))).rowcount)
        cursor = await self._send(statement.sql, statement.params)
        names = [column[0] for column in cursor.description or ()]
        rows = [dict(zip(names, row, strict=True)) for row in await cursor.fetchall()] if names else []
        return Result(rows, len(rows) if names else cursor.rowcount)

    async def script(self, sql: str) -> None:
        for statement in statements_of(sql):
            await self._send(statement)

    async def _send(self, sql: str, params: Any = ()) -> Any:
        return await self._sent(self._raw.execute(sql, params))

    async def _sent(self, sending: Awaitable[Any]) -> Any:
        try:
            return await sending
        except sqlite3.Error as error:
            raise_for(error, self._path)

    async def ended(self) -> bool:
        return bool(self._savepoint) and not self._raw.in_transaction

    async def commit(self) -> None:
        if self._read_only:
            return
        if not self._savepoint:
            raise UsageError("there is no transaction to commit")
        await finish(self._commit())

    async def _commit(self) -> None:
        try:
            await self._raw.execute(f"RELEASE {self._savepoint}")
        except sqlite3.OperationalError as error:
            if "no such savepoint" in str(error):
                raise HandlerEndedTransaction from error
            raise_for(error, self._path)
        await self._send("COMMIT")
        self._savepoint = ""

    async def rollback(self) -> None:
        """In the order of the thread: a BEGIN that was cancelled while it waited is undone when it has ended."""
        if self._savepoint:
            self._savepoint = ""
            await finish(self._rollback())

    async def _rollback(self) -> None:
        with suppress(sqlite3.Error, ValueError):  # ValueError: the connection is closed
            await self._raw.rollback()

    def is_conflict(self, error: BaseException) -> bool:  # noqa: ARG002
        return False


class SqlAlchemySqliteSession(OrmTransaction, AiosqliteSession):
    def __init__(self, borrowed: Borrowed, make_session: MakeSession, path: str, **options: Any) -> None:
        AiosqliteSession.__init__(self, borrowed.raw, path, **options)
        self.connection = borrowed.connection
        self.make_session = make_session

    async def begin(self, first: Statement | None = None) -> Result:
        """SQLAlchemy first: on SQLite people have listeners that send a BEGIN, and ours is the one that counts."""
        try:
            self._root = await self.connection.begin()
        except sqlalchemy.exc.DBAPIError as error:
            if isinstance(error.orig, sqlite3.Error):
                raise_for(error.orig, self._path)
            raise
        if self._raw.in_transaction:
            await self._rollback()
        return await AiosqliteSession.begin(self, first)


class SqlAlchemySqliteDriver:
    """One writer at a time in this process; other processes are waited for by SQLite's own busy timeout."""

    features = Features(concurrent_units=False, automatic_setup=True, guards_pool=True)
    schema = None

    def __init__(
        self,
        *,
        engine: AsyncEngine | None,
        url: str | None,
        make_session: MakeSession,
        second_connection: str,
        **engine_options: Any,
    ) -> None:
        self.dialect = dialect.sqlite()
        self.watch = watch_for(second_connection)
        self._given = engine
        self._url = url
        self._options = engine_options
        self._make_session = make_session
        self._engine: AsyncEngine | None = None
        self._turn = LoopLock()

    @property
    def pool(self) -> AsyncEngine:
        if self._engine is None:
            raise StoreUnavailable("the store is not open")
        return self._engine

    @property
    def _path(self) -> str:
        return str(self.pool.url.database or ":memory:")

    async def open(self) -> None:
        self._engine = self._given or self._own_engine()
        folder = Path(self._path).parent
        if self._path != ":memory:" and not folder.is_dir():
            raise StoreUnavailable(f"{self._path} cannot be used: there is no folder {folder}")
        self.watch.attach(self._engine)

    def _own_engine(self) -> AsyncEngine:
        engine = create_async_engine(self._url or "", **self._options)

        @event.listens_for(engine.sync_engine, "connect")
        def set_up(connection: Any, _record: Any) -> None:
            """As the embedded store does; an engine of the user's is set up by the user."""
            cursor = connection.cursor()
            cursor.execute("PRAGMA foreign_keys = ON")
            cursor.close()

        return engine

    async def close(self) -> None:
        engine, self._engine = self._engine, None
        if engine is None:
            return
        self.watch.detach(engine)
        if self._given is None:
            await engine.dispose()

    @asynccontextmanager
    async def session(self, *, wait: float, read_only: bool = False) -> AsyncIterator[SqlAlchemySqliteSession]:
        engine = self.pool
        async with AsyncExitStack() as stack:
            if not read_only:
                await stack.enter_async_context(self._writer(engine, wait))
            try:
                borrowed = await self.watch.acquire(engine, max(wait, 0.05))
            except (TimeoutError, sqlalchemy.exc.TimeoutError) as error:
                text = f"waited {wait:g} s for a connection: all of the pool are in use"
                raise TryLater(reason="store_busy", text=text) from error
            except (sqlite3.Error, sqlalchemy.exc.SQLAlchemyError, OSError) as error:
                raise StoreUnavailable(f"{self._path} cannot be used: {error}") from error
            stack.push_async_callback(self.watch.release, engine, borrowed)
            stack.callback(unhold, hold(engine, borrowed.joinable))
            session = SqlAlchemySqliteSession(borrowed, self._make_session, self._path, wait=wait, read_only=read_only)
            try:
                yield session
            finally:
                await session.rollback()

    @asynccontextmanager
    async def _writer(self, engine: AsyncEngine, wait: float) -> AsyncIterator[None]:
        if _writing.get() is engine:
            raise NestedProcess
        lock = self._turn.of_this_loop()
        try:
            await asyncio.wait_for(lock.acquire(), max(wait, 0.05))
        except TimeoutError as error:
            text = f"waited {wait:g} s for a turn to write to {self._path}: another handler is slow"
            raise TryLater(reason="store_busy", text=text) from error
        token = _writing.set(engine)
        try:
            yield
        finally:
            _writing.reset(token)
            lock.release()
