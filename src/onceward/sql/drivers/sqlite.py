"""SQLite through the standard library: the handle that handlers write through, and the driver."""

from __future__ import annotations

import asyncio
import os
import re
import sqlite3
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, closing
from functools import lru_cache
from operator import itemgetter
from typing import Any, NoReturn, Self, cast

from onceward.errors import (
    HandlerEndedTransaction,
    OncewardError,
    PayloadMismatch,
    SchemaMissing,
    StoreUnavailable,
    UsageError,
)
from onceward.shield import finish
from onceward.sql import dialect
from onceward.sql.driver import SessionDefaults
from onceward.sql.drivers.sqlite_line import was_closed
from onceward.sql.drivers.sqlite_writer import Group, Turn, Writer, connect, primary_code, raise_translated
from onceward.sql.plan import PARAMETER, Result, Statement, numbered
from onceward.store import Conflict, Features


@lru_cache(maxsize=512)
def _numbered(sql: str) -> bool:
    """Whether parameters are written $1, outside of quotes."""
    return re.search(r"\$\d", re.sub(r"'[^']*'", "", sql)) is not None


class Transaction:
    """What a handler on SQLite writes through, shaped like an asyncpg connection.

    Parameters are `?` or `$1`. `execute` gives the number of rows it changed; rows are sqlite3.Row.
    """

    def __init__(self, run: Callable[[Transaction, str, Any], sqlite3.Cursor]) -> None:
        self._execute = run
        self._savepoints = 0
        self.broken = False
        """A savepoint could not be undone, so nobody knows what would be committed."""

    async def execute(self, sql: str, *params: Any) -> int:
        cursor = self._run(sql, params)
        return cursor.rowcount if cursor.description is None else len(cursor.fetchall())

    async def executemany(self, sql: str, rows: Iterable[Sequence[Any]]) -> int:
        return sum(self._run(sql, tuple(row)).rowcount for row in rows)

    async def fetch(self, sql: str, *params: Any) -> list[sqlite3.Row]:
        return self._run(sql, params).fetchall()

    async def fetchrow(self, sql: str, *params: Any) -> sqlite3.Row | None:
        cursor = self._run(sql, params)
        row: sqlite3.Row | None = cursor.fetchone()
        cursor.close()
        return row

    async def fetchval(self, sql: str, *params: Any) -> Any:
        row = await self.fetchrow(sql, *params)
        return None if row is None else row[0]

    @asynccontextmanager
    async def transaction(self) -> AsyncIterator[None]:
        """A savepoint: an error that leaves the block undoes what the block wrote, and only that."""
        self._savepoints += 1
        name = f"handler_{self._savepoints}"
        self._run(f"SAVEPOINT {name}")
        try:
            yield
        except BaseException:
            self._undo(name)
            raise
        else:
            self._release(name)

    def _release(self, name: str) -> None:
        try:
            self._run(f"RELEASE {name}")
        except sqlite3.Error:  # undone by another task's block
            self.broken = True
            raise

    def _undo(self, name: str) -> None:
        try:
            self._run(f"ROLLBACK TO {name}")
            self._run(f"RELEASE {name}")
        except (OncewardError, sqlite3.Error):  # ended, lost, or undone by another task's block
            self.broken = True

    def _run(self, sql: str, params: tuple[Any, ...] = ()) -> sqlite3.Cursor:
        if params and _numbered(sql):
            return self._execute(self, sql, {str(n): value for n, value in enumerate(params, 1)})
        return self._execute(self, sql, params)


@lru_cache(maxsize=256)
def _spelled(sql: str, nothing: tuple[str, ...]) -> tuple[str, Callable[[Mapping[str, Any]], tuple[Any, ...]]]:
    """`:name` as `?1`, and what picks the parameters in that order. None is NULL in the text: for each None that it
    binds, sqlite3 looks for an adapter, and a claim has five."""
    text, names = numbered(PARAMETER.sub(lambda found: "NULL" if found[1] in nothing else found[0], sql), "?")
    if len(names) > 1:
        return text, itemgetter(*names)
    return text, lambda params: tuple([params[name] for name in names])


class SqliteSession(SessionDefaults):
    """A unit's transactions: each one a savepoint of the group that its turn is part of."""

    __slots__ = ("_ended", "_leans_on", "_turn", "_tx", "_wait", "_writer", "lost")

    def __init__(self, writer: Writer, wait: float) -> None:
        self._writer = writer
        self._wait = wait
        self._turn: Turn | None = None
        self._tx: Transaction | None = None
        self._ended = False
        self._leans_on: Group | None = None
        """Whose writes it saw before they were committed, until it commits with them."""
        self.lost = False

    @property
    def gone(self) -> bool:
        return self._writer.closed

    @property
    def tx(self) -> Transaction:
        if self._tx is None:
            raise UsageError("there is no transaction")
        return self._tx

    def stands(self) -> bool:
        return self._tx is not None and not self._ended and self._writer.alive

    def _handler_execute(self, tx: Transaction, sql: str, params: Any) -> sqlite3.Cursor:
        if tx is not self._tx or self.lost:
            raise UsageError("this transaction is over; write only while the handler runs")
        if self._ended:
            raise HandlerEndedTransaction
        self._writer.guarding = True
        try:
            return self._writer.connection.execute(sql, params)
        except sqlite3.DatabaseError as error:
            if primary_code(error) == sqlite3.SQLITE_AUTH and self._writer.refused_setting:
                raise UsageError("this PRAGMA would outlast the handler, on the connection of all handlers") from error
            if primary_code(error) == sqlite3.SQLITE_AUTH:
                self._ended = True
                raise HandlerEndedTransaction(
                    "the handler tried to begin or end a transaction itself. It was stopped and nothing it wrote "
                    "stands. Leave COMMIT and ROLLBACK to onceward; `async with tx.transaction()` makes a savepoint."
                ) from error
            if isinstance(error, sqlite3.IntegrityError) and not self._writer.alive:
                self._ended = True
                self._writer.doom_group(Conflict("a neighbour rolled the transaction back"))
                raise HandlerEndedTransaction(
                    "a statement of the handler rolled the whole transaction back (OR ROLLBACK, RAISE(ROLLBACK)). "
                    "Nothing it wrote stands. Use OR ABORT, or `async with tx.transaction()`."
                ) from error
            self._look_alive()
            raise

    def _look_alive(self) -> None:
        if not self._writer.alive:
            self.lost = True

    async def begin(self, first: Statement | None = None) -> Result:
        if self._turn is None:
            self._turn = await self._writer.take(self._wait)
        self._ended = self.lost = False
        self._leans_on = self._writer.uncommitted()
        self._tx = Transaction(self._handler_execute)
        self._raw(self._writer.savepoint)
        return Result((), 0) if first is None else self._result(first)

    async def execute(self, statement: Statement) -> Result:
        return self._result(statement)

    def _result(self, statement: Statement) -> Result:
        params = statement.params
        nothing = tuple([name for name, value in params.items() if value is None]) if None in params.values() else ()
        sql, pick = _spelled(statement.sql, nothing)
        if statement.rows is not None:
            return Result((), self._raw_many(sql, list(map(pick, statement.rows))))
        cursor = self._raw(sql, pick(params))
        if cursor.description is None:
            return Result((), cursor.rowcount)
        columns = [column[0] for column in cursor.description]
        rows = [dict(zip(columns, row, strict=True)) for row in cursor.fetchall()]
        return Result(rows, len(rows))

    async def script(self, sql: str) -> None:
        for statement in statements_of(sql):
            self._raw(statement)

    def _raw(self, sql: str, params: tuple[Any, ...] = ()) -> sqlite3.Cursor:
        self._writer.guarding = False
        try:
            return self._writer.cursor.execute(sql, params)
        except sqlite3.Error as error:
            self._raise(error)

    def _raw_many(self, sql: str, rows: list[tuple[Any, ...]]) -> int:
        self._writer.guarding = False
        try:
            return self._writer.cursor.executemany(sql, rows).rowcount
        except sqlite3.Error as error:
            self._raise(error)

    def _raise(self, error: sqlite3.Error) -> NoReturn:
        self._look_alive()
        if self._writer.closed:
            raise was_closed(self._writer.path) from error
        raise_for(error, self._writer.path)

    async def ended(self) -> bool:
        return self._ended

    def commit(self) -> Coroutine[Any, Any, None]:
        """Into the group, and then wait for the group's COMMIT, which says for all of its members what happened."""
        writer, turn = self._writer, self._turn
        if turn is None or self._tx is None:
            raise UsageError("there is no transaction to commit")
        if self._ended:
            raise HandlerEndedTransaction
        if self._tx.broken:
            raise UsageError("two tasks of the handler used tx.transaction() at the same time, and one was undone")
        self._look_alive()
        if self.lost:
            raise StoreUnavailable(f"{writer.path} ended the transaction: the disk is full, or the store was closed")
        self._raw(writer.release)
        self._turn = self._tx = self._leans_on = None
        return writer.wait_for(writer.join_group(turn))

    async def rollback(self) -> None:
        if self._tx is None:
            return
        self._tx = None
        if not self._ended:
            self._look_alive()
        if not self._writer.alive:
            self._give_turn()  # the group is over, and its members have to hear it
        elif not self.lost:
            self._raw(self._writer.undo)
            self._raw(self._writer.release)

    def _give_turn(self) -> None:
        turn, self._turn = self._turn, None
        if turn is not None:
            self._writer.give(turn)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, _type: object, error: BaseException | None, _trace: object) -> None:
        if self._tx is not None:
            await self.rollback()
        if self._turn is not None:
            self._give_turn()
        if self._leans_on is not None and (error is None or isinstance(error, PayloadMismatch)):
            # "Duplicate" is an answer only once what it was told from is committed.
            try:
                await self._writer.wait_for(self._leans_on)
            except sqlite3.IntegrityError as refused:
                raise Conflict("a neighbour's commit was refused") from refused

    def is_conflict(self, error: BaseException) -> bool:
        return isinstance(error, Conflict)


def statements_of(sql: str) -> Iterator[str]:
    """One by one: executescript would commit first."""
    pending = ""
    for line in sql.splitlines(keepends=True):
        pending += line
        if sqlite3.complete_statement(pending):
            yield pending
            pending = ""
    if pending.strip():
        yield pending


def raise_for(error: sqlite3.Error, path: str) -> NoReturn:
    if "no such table: onceward_" in str(error):
        raise SchemaMissing from error
    raise_translated(error, path)


class SqliteReadSession(SessionDefaults):
    """Reads what is committed, on a connection of its own: in WAL mode nothing makes it wait."""

    lost = gone = False

    def __init__(self, connection: sqlite3.Connection, path: str) -> None:
        self._connection = connection
        self._path = path
        self.tx = Transaction(lambda _tx, sql, params: connection.execute(sql, params))

    async def begin(self, first: Statement | None = None) -> Result:
        return await self.execute(first) if first is not None else Result((), 0)

    async def execute(self, statement: Statement) -> Result:
        def read() -> list[Any]:
            return self._connection.execute(statement.sql, statement.params).fetchall()

        try:  # in a thread: counting a large table takes a while
            rows = await finish(asyncio.to_thread(read))
        except sqlite3.Error as error:
            raise_for(error, self._path)
        return Result(rows, len(rows))

    async def script(self, _sql: str) -> None:
        raise UsageError("a read-only session runs no scripts")

    async def ended(self) -> bool:
        return False

    async def commit(self) -> None:
        pass

    async def rollback(self) -> None:
        pass

    def is_conflict(self, error: BaseException) -> bool:  # noqa: ARG002
        return False


class SqliteDriver:
    """One file, one writer in this process; several processes on one file are safe."""

    features = Features(concurrent_units=False, automatic_setup=True, refuses_end=True)
    schema = None

    def __init__(self, path: str) -> None:
        self.dialect = dialect.sqlite()
        self._path = path if path == ":memory:" else os.path.realpath(path)
        self._writer: Writer | None = None

    async def open(self) -> None:
        self._writer = Writer(self._path)
        await self._writer.open()

    async def close(self) -> None:
        writer, self._writer = self._writer, None
        if writer is not None:
            await writer.close()

    def session(self, *, wait: float, read_only: bool = False) -> AbstractAsyncContextManager[SqliteSession]:
        if self._writer is None:
            raise StoreUnavailable("the store is not open")
        if read_only and self._path != ":memory:":
            return cast("AbstractAsyncContextManager[SqliteSession]", self._reading())
        return SqliteSession(self._writer, wait)

    @asynccontextmanager
    async def _reading(self) -> AsyncIterator[SqliteReadSession]:
        with closing(connect(self._path)) as connection:
            connection.execute("PRAGMA query_only = ON")
            yield SqliteReadSession(connection, self._path)
