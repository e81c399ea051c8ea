"""Joining a transaction on SQLite, through a connection of sqlite3 or aiosqlite, or in a handler of another inbox."""

from __future__ import annotations

import sqlite3
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from onceward.errors import TransactionUnusable, TryLater, UsageError
from onceward.shield import finish
from onceward.sql.drivers.joined import CLOSED, NOT_BEGUN, JoinedSession, SavepointGone
from onceward.sql.drivers.sqlite import raise_for
from onceward.sql.plan import Result, Statement
from onceward.store import Busy

WHERE = "the database of the transaction that you gave"

TAKE_LOCK = Statement("DELETE FROM onceward_records WHERE 0")
"""Changes nothing, and takes the write lock."""

_STALE = 517  # SQLITE_BUSY_SNAPSHOT


async def awaited(value: Any) -> Any:
    """Of sqlite3 as it is, of aiosqlite when its thread has it."""
    return await value if hasattr(value, "__await__") else value


async def send(connection: Any, sql: str, params: Any = ()) -> Any:
    """A cursor whose rows are plain tuples, whatever the caller's rows are."""
    cursor = await awaited(connection.cursor())
    cursor.row_factory = None
    await awaited(cursor.execute(sql, params))
    return cursor


async def begin_as_python_would(connection: Any) -> None:
    """Outside of a transaction RELEASE would commit, and Python's own BEGIN comes only before the first INSERT."""
    if connection.in_transaction:
        return
    if connection.isolation_level is None or getattr(connection, "autocommit", None) is True:
        raise TransactionUnusable(NOT_BEGUN)
    await send(connection, "BEGIN IMMEDIATE")


@asynccontextmanager
async def without_waiting(connection: Any) -> AsyncIterator[None]:
    """When another one writes, say Busy at once: SQLite's own waiting would hold up the event loop, or a thread."""
    (patience,) = await awaited((await send(connection, "PRAGMA busy_timeout")).fetchone())
    try:
        await send(connection, "PRAGMA busy_timeout = 0")
        yield
    except TryLater as error:
        if getattr(error.__cause__, "sqlite_errorcode", 0) == _STALE:
            text = "others have written since your transaction first read: roll it back, and begin another one"
            raise TryLater(reason="store_busy", text=text) from error
        raise Busy from error
    finally:
        await finish(send(connection, f"PRAGMA busy_timeout = {patience}"))


class JoinedSqlite(JoinedSession):
    dialect = "sqlite"

    async def begin(self, first: Statement | None = None) -> Result:
        self._check()
        if self.read_only:  # an error of the database ends nothing here, so that no savepoint is needed
            await self.check_database()
            return await self.execute(first) if first is not None else Result((), 0)
        async with without_waiting(self.tx):
            return await super().begin(first or TAKE_LOCK)

    async def commit(self) -> None:
        if not self.read_only:
            await super().commit()

    def _check(self) -> None:
        try:
            self._in_transaction()
        except (sqlite3.ProgrammingError, ValueError) as error:  # ValueError: aiosqlite
            raise TransactionUnusable(CLOSED) from error

    def _in_transaction(self) -> bool:
        return bool(self.tx.in_transaction)

    async def execute(self, statement: Statement) -> Result:
        self.check_stands()
        if statement.rows is not None:
            return Result((), sum([(await self._say(statement.sql, row)).rowcount for row in statement.rows]))
        cursor = await self._say(statement.sql, statement.params)
        rows = await awaited(cursor.fetchall())
        names = [column[0] for column in cursor.description or ()]
        mapped = [dict(zip(names, row, strict=True)) for row in rows]
        return Result(mapped, len(mapped) if names else cursor.rowcount)

    async def _say(self, sql: str, params: Any = ()) -> Any:
        try:
            return await self._send(sql, params)
        except sqlite3.ProgrammingError as error:
            raise TransactionUnusable(f"{CLOSED}, or belongs to another thread: {error}") from error
        except sqlite3.Error as error:
            raise_for(error, WHERE)

    async def _enter(self, savepoint: str) -> None:
        try:
            await begin_as_python_would(self.tx)
        except sqlite3.Error as error:
            raise_for(error, WHERE)
        await self._say(f"SAVEPOINT {savepoint}")

    async def _release(self, savepoint: str) -> None:
        try:
            await self._say(f"RELEASE {savepoint}")
        except sqlite3.OperationalError as error:
            if "no such savepoint" in str(error):
                raise SavepointGone from error
            raise

    async def _undo(self, savepoint: str) -> None:
        try:
            await self._say(f"ROLLBACK TO {savepoint}")
        except sqlite3.OperationalError as error:
            raise SavepointGone from error
        await self._say(f"RELEASE {savepoint}")

    async def _send(self, sql: str, params: Any) -> Any:
        return await send(self.tx, sql, params)


class JoinedHandler(JoinedSqlite):
    """The tx of a handler on the embedded store, which has the write lock."""

    async def begin(self, first: Statement | None = None) -> Result:
        try:
            return await JoinedSession.begin(self, first)
        except UsageError as error:
            raise TransactionUnusable(str(error)) from error  # the handler is over

    async def commit(self) -> None:
        await JoinedSession.commit(self)

    def _in_transaction(self) -> bool:
        return True  # its session looks after that

    async def _enter(self, savepoint: str) -> None:
        await self._say(f"SAVEPOINT {savepoint}")

    async def _send(self, sql: str, params: Any) -> Any:
        return self.tx._execute(self.tx, sql, params)  # noqa: SLF001
