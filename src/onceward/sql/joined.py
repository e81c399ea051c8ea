"""Joining a transaction of the caller's: a savepoint in it, and nothing else is begun, committed or rolled back.

Any handle of the store's database will do, whatever driver the store itself uses: an asyncpg or psycopg connection, an
SQLAlchemy AsyncSession or AsyncConnection, a sqlite3 or aiosqlite connection, the `tx` of another handler.
"""

from __future__ import annotations

import sqlite3
from abc import ABC, abstractmethod
from contextlib import suppress
from contextvars import Token
from secrets import token_hex
from typing import Any, NoReturn
from weakref import WeakKeyDictionary

from onceward.errors import (
    CommitNotApplied,
    HandlerEndedTransaction,
    OncewardError,
    StoreUnavailable,
    TransactionUnusable,
    UsageError,
)
from onceward.shield import finish
from onceward.sql.drivers.pool_watch import Hold, hold, unhold
from onceward.sql.drivers.postgresql import PostgresSession, count
from onceward.sql.drivers.sqlite import raise_for
from onceward.sql.plan import PARAMETER, Result, Statement, gives_rows, inlined, numbered

_NO_TRANSACTION = "25P01"
_ABORTED = "25P02"
_NO_SAVEPOINT = "3B001"

_FAILED = "the transaction that you gave has failed: roll it back, and begin another one"
_NOT_BEGUN = "the connection that you gave is not in a transaction: begin one first, the claim belongs to it"
_CLOSED = "the connection that you gave is closed"
_ELSEWHERE = (
    "the transaction that you gave is on another database than the inbox's, so the claim would not protect what you "
    "write. Give both the same database."
)

# Connections that are known to be on the database with this token.
_known: WeakKeyDictionary[Any, str] = WeakKeyDictionary()


def sqlstate(error: BaseException | None) -> str:
    """Also of an error that SQLAlchemy has wrapped."""
    while error is not None:
        state = getattr(error, "sqlstate", None)
        if state:
            return str(state)
        error = error.__cause__
    return ""


class JoinedSession(ABC):
    """What every kind of handle does; the primitives are at the end."""

    lost = False
    dialect: str

    def __init__(self, tx: Any) -> None:
        self.tx = tx
        self._savepoint = ""
        self._token = ""
        self._whose: Statement | None = None

    def expect(self, token: str, whose: Statement) -> None:
        """The right database is the one in which the statement `whose` gives this token."""
        self._token, self._whose = token, whose

    @property
    def gone(self) -> bool:
        return False

    async def begin(self, first: Statement | None = None) -> Result:
        self._check()
        savepoint = f"onceward_{token_hex(8)}"
        await self._enter(savepoint)
        self._savepoint = savepoint
        await self._check_database()
        return await self.execute(first) if first is not None else Result((), 0)

    async def _check_database(self) -> None:
        if self._whose is None:
            return
        connection = self._connection()
        with suppress(TypeError):  # not weakly referable: ask each time
            if _known.get(connection) == self._token:
                return
        found = await self.execute(self._whose)
        if not found.rows or found.rows[0]["token"] != self._token:
            raise TransactionUnusable(_ELSEWHERE)
        with suppress(TypeError):
            _known[connection] = self._token

    async def script(self, _sql: str) -> None:
        raise UsageError("scripts do not run in a transaction of the caller's")

    async def commit(self) -> None:
        """The end of our savepoint; the caller's COMMIT is the caller's."""
        savepoint, self._savepoint = self._savepoint, ""
        if not savepoint:
            raise UsageError("there is no claim to end")
        try:
            await finish(self._release(savepoint))
        except BaseException:
            self._savepoint = savepoint  # so that it is undone
            raise

    async def rollback(self) -> None:
        savepoint, self._savepoint = self._savepoint, ""
        if savepoint:
            await finish(self._undo_quietly(savepoint))

    async def _undo_quietly(self, savepoint: str) -> None:
        with suppress(Exception):  # the transaction is over, or lost: nothing of ours is left in it
            await self._undo(savepoint)

    async def ended(self) -> bool:
        return False  # the release finds out

    def is_conflict(self, _error: BaseException) -> bool:
        return False  # the caller's transaction has to be run again, by the caller

    # --- primitives -------------------------------------------------------------------------------------------

    def _check(self) -> None:  # noqa: B027 - not every handle can tell
        """TransactionUnusable, where that is known without asking the database."""

    def _connection(self) -> Any:
        """The object that stands for the physical connection."""
        return self.tx

    @abstractmethod
    async def execute(self, statement: Statement) -> Result: ...

    @abstractmethod
    async def _enter(self, savepoint: str) -> None: ...

    @abstractmethod
    async def _release(self, savepoint: str) -> None: ...

    @abstractmethod
    async def _undo(self, savepoint: str) -> None: ...


class JoinedPostgres(JoinedSession):
    """PostgreSQL through a driver's own connection."""

    dialect = "postgresql"

    async def begin(self, first: Statement | None = None) -> Result:
        """Savepoint and claim in one trip, once the connection is known."""
        connection = self._connection()
        if (
            first is None
            or gives_rows(first.sql)
            or _known.get(connection) != self._token
            or not self._standard_strings()
        ):
            return await super().begin(first)
        self._check()
        savepoint = f"onceward_{token_hex(8)}"
        tag = await self._send(f"SAVEPOINT {savepoint}; {inlined(first)}")
        self._savepoint = savepoint
        return Result((), count(tag))

    async def execute(self, statement: Statement) -> Result:
        try:
            return await self._run(statement)
        except OncewardError:
            raise
        except Exception as error:  # noqa: BLE001 - told apart there
            self._raise(error)

    async def _send(self, sql: str) -> str:
        try:
            return await self._say(sql)
        except OncewardError:
            raise
        except Exception as error:  # noqa: BLE001 - told apart there
            self._raise(error)

    def _raise(self, error: Exception) -> NoReturn:
        state = sqlstate(error)
        if state == _ABORTED:
            raise TransactionUnusable(_FAILED) from error
        if state == _NO_TRANSACTION:
            raise TransactionUnusable(_NOT_BEGUN) from error
        problem = PostgresSession.translated(error)
        if problem is error:
            raise error
        raise problem from error

    async def _enter(self, savepoint: str) -> None:
        await self._send(f"SAVEPOINT {savepoint}")

    async def _release(self, savepoint: str) -> None:
        try:
            await self._say(f"RELEASE {savepoint}")
        except Exception as error:
            state = sqlstate(error)
            if state in (_NO_SAVEPOINT, _NO_TRANSACTION):
                raise HandlerEndedTransaction from error
            if state == _ABORTED:
                raise CommitNotApplied from error
            self._raise(error)

    async def _undo(self, savepoint: str) -> None:
        await self._say(f"ROLLBACK TO {savepoint}; RELEASE {savepoint}")

    @abstractmethod
    def _standard_strings(self) -> bool: ...

    @abstractmethod
    async def _run(self, statement: Statement) -> Result: ...

    @abstractmethod
    async def _say(self, sql: str) -> str:
        """Statements without parameters; the last command tag."""


class JoinedAsyncpg(JoinedPostgres):
    """An asyncpg connection, of a pool or not, or the tx of another handler."""

    def _check(self) -> None:
        try:
            closed, begun = self.tx.is_closed(), self.tx.is_in_transaction()
        except UsageError:
            raise
        except Exception as error:
            raise TransactionUnusable(_CLOSED) from error  # given back to its pool
        if closed:
            raise TransactionUnusable(_CLOSED)
        if not begun:
            raise TransactionUnusable(_NOT_BEGUN)

    def _connection(self) -> Any:
        return getattr(self.tx, "_con", None) or getattr(self.tx, "_connection", None) or self.tx

    def _standard_strings(self) -> bool:
        return bool(self.tx.get_settings().standard_conforming_strings == "on")

    async def _run(self, statement: Statement) -> Result:
        sql, names = numbered(statement.sql)
        params = [statement.params[name] for name in names]
        if gives_rows(sql):
            rows = await self.tx.fetch(sql, *params)
            return Result(rows, len(rows))
        return Result((), count(await self.tx.execute(sql, *params)))

    async def _say(self, sql: str) -> str:
        tag: str = await self.tx.execute(sql)
        return tag


class JoinedPsycopg(JoinedPostgres):
    """A psycopg AsyncConnection, or the tx of another handler. Outside of autocommit it begins by itself."""

    def _check(self) -> None:
        from psycopg.pq import TransactionStatus  # noqa: PLC0415 - an extra

        if self.tx.closed:
            raise TransactionUnusable(_CLOSED)
        status = self.tx.info.transaction_status
        if status is TransactionStatus.INERROR:
            raise TransactionUnusable(_FAILED)
        if status is TransactionStatus.IDLE and self.tx.autocommit:
            raise TransactionUnusable(_NOT_BEGUN)

    def _connection(self) -> Any:
        return getattr(self.tx, "_connection", self.tx)

    def _standard_strings(self) -> bool:
        return bool(self.tx.info.parameter_status("standard_conforming_strings") == "on")

    async def _run(self, statement: Statement) -> Result:
        from psycopg.rows import dict_row  # noqa: PLC0415

        from onceward.sql.drivers.psycopg import named  # noqa: PLC0415

        async with self.tx.cursor(row_factory=dict_row) as cursor:
            await cursor.execute(named(statement.sql), statement.params)
            if gives_rows(statement.sql):
                rows = await cursor.fetchall()
                return Result(rows, len(rows))
            return Result((), count(cursor.statusmessage or ""))

    async def _say(self, sql: str) -> str:
        cursor = await self.tx.execute(sql.encode(), prepare=False)
        while cursor.nextset():
            pass
        return cursor.statusmessage or ""


class JoinedSqlite(JoinedSession):
    """A sqlite3 or aiosqlite connection, or the tx of another handler."""

    dialect = "sqlite"

    async def execute(self, statement: Statement) -> Result:
        cursor = await self._say(statement.sql, statement.params)
        rows = await _awaited(cursor.fetchall())
        names = [column[0] for column in cursor.description or ()]
        mapped = [dict(zip(names, row, strict=True)) for row in rows]
        return Result(mapped, len(mapped) if names else cursor.rowcount)

    async def _say(self, sql: str, params: Any = ()) -> Any:
        try:
            return await self._send(sql, params)
        except sqlite3.ProgrammingError as error:
            raise TransactionUnusable(f"{_CLOSED}, or belongs to another thread: {error}") from error
        except sqlite3.Error as error:
            raise_for(error, "the database of the transaction that you gave")
        except ValueError as error:  # aiosqlite
            raise TransactionUnusable(_CLOSED) from error

    async def _enter(self, savepoint: str) -> None:
        await self._begin_as_python_would()
        await self._say(f"SAVEPOINT {savepoint}")

    async def _begin_as_python_would(self) -> None:
        """Outside of a transaction RELEASE would commit; Python's own BEGIN comes only before the first INSERT."""
        try:
            begun, level = self.tx.in_transaction, self.tx.isolation_level
        except (sqlite3.ProgrammingError, ValueError) as error:
            raise TransactionUnusable(_CLOSED) from error
        if begun:
            return
        if level is None:
            raise TransactionUnusable(_NOT_BEGUN)
        await self._say(f"BEGIN {level}")

    async def _release(self, savepoint: str) -> None:
        try:
            await self._say(f"RELEASE {savepoint}")
        except sqlite3.OperationalError as error:
            if "no such savepoint" in str(error):
                raise HandlerEndedTransaction from error
            raise

    async def _undo(self, savepoint: str) -> None:
        await self._say(f"ROLLBACK TO {savepoint}")
        await self._say(f"RELEASE {savepoint}")

    async def _send(self, sql: str, params: Any) -> Any:
        cursor = await _awaited(self.tx.cursor())
        cursor.row_factory = None  # plain tuples, whatever the caller's rows are
        await _awaited(cursor.execute(sql, params))
        return cursor


class JoinedHandler(JoinedSqlite):
    """The tx of a handler on the embedded store."""

    async def _begin_as_python_would(self) -> None:
        pass

    async def _send(self, sql: str, params: Any) -> Any:
        return self.tx._execute(self.tx, sql, params)  # noqa: SLF001


async def _awaited(value: Any) -> Any:
    return await value if hasattr(value, "__await__") else value


class JoinedSqlAlchemy(JoinedSession):
    """An AsyncSession or AsyncConnection: the savepoint is SQLAlchemy's, so that its objects follow a rollback."""

    def __init__(self, tx: Any) -> None:
        super().__init__(tx)
        self._nested: Any = None
        self._below: Any = None
        self._hold: Token[Hold | None] | None = None

    async def prepare(self) -> None:
        """Which database it is on is known only with a connection."""
        from sqlalchemy.exc import SQLAlchemyError  # noqa: PLC0415 - an extra
        from sqlalchemy.ext.asyncio import AsyncConnection  # noqa: PLC0415

        try:
            self._below = self.tx if isinstance(self.tx, AsyncConnection) else await self.tx.connection()
            self.dialect = self._below.dialect.name
        except (SQLAlchemyError, OSError) as error:
            self._raise(error)

    def _connection(self) -> Any:
        return self._below.sync_connection.connection.dbapi_connection

    async def execute(self, statement: Statement) -> Result:
        try:
            result = await self._below.exec_driver_sql(*_spelled(self._below.dialect, statement))
        except Exception as error:  # noqa: BLE001 - told apart there
            self._raise(error)
        if result.returns_rows:
            rows = result.mappings().all()
            return Result(rows, len(rows))
        return Result((), result.rowcount)

    def _raise(self, error: Exception) -> NoReturn:
        from sqlalchemy.exc import InvalidRequestError, PendingRollbackError, ResourceClosedError  # noqa: PLC0415

        if isinstance(error, ResourceClosedError):
            raise TransactionUnusable(_CLOSED) from error
        if isinstance(error, PendingRollbackError):
            raise TransactionUnusable(_FAILED) from error
        if isinstance(error, InvalidRequestError):
            raise TransactionUnusable(f"the session that you gave cannot be used: {error}") from error
        state, cause = sqlstate(error), error.__cause__
        if state == _ABORTED:
            raise TransactionUnusable(_FAILED) from error
        if isinstance(getattr(error, "orig", None), sqlite3.Error):
            raise_for(error.orig, "the database of the transaction that you gave")  # type: ignore[attr-defined]
        if state and isinstance(cause, Exception):
            problem = PostgresSession.translated(cause)
            if problem is not cause:
                raise problem from error
        if getattr(error, "connection_invalidated", False) or isinstance(error, OSError):
            raise StoreUnavailable(f"the connection was lost: {error}") from error
        raise error

    async def _enter(self, _savepoint: str) -> None:
        try:
            if self.dialect == "sqlite":
                await self._begin_sqlite()
            self._nested = await self.tx.begin_nested()
            if self.tx is not self._below:
                await self.tx.connection()  # a session sends SAVEPOINT only when it uses the connection
        except OncewardError:
            raise
        except Exception as error:  # noqa: BLE001 - told apart there
            self._raise(error)
        self._hold = hold(self._below)

    async def _begin_sqlite(self) -> None:
        """SQLAlchemy's transaction on SQLite begins with its first write; the savepoint has to be inside of it."""
        raw = (await self._below.get_raw_connection()).driver_connection
        if not raw.in_transaction:
            await self._below.exec_driver_sql("BEGIN IMMEDIATE")

    async def _release(self, _savepoint: str) -> None:
        if not self._nested.is_active:
            raise HandlerEndedTransaction
        try:
            await self._nested.commit()
        except Exception as error:
            state = sqlstate(error)
            if state in (_NO_SAVEPOINT, _NO_TRANSACTION) or "no such savepoint" in str(error):
                raise HandlerEndedTransaction from error
            if state == _ABORTED:
                raise CommitNotApplied from error
            raise  # a flush that failed: the caller's own
        self._left()

    async def _undo(self, _savepoint: str) -> None:
        self._left()
        if self._nested.is_active:
            await self._nested.rollback()

    def _left(self) -> None:
        token, self._hold = self._hold, None
        if token is not None:
            unhold(token)


def _spelled(dialect: Any, statement: Statement) -> tuple[Any, ...]:
    """A statement in the driver's own style of parameters."""
    if dialect.name == "sqlite":
        return statement.sql, dict(statement.params)
    if dialect.driver == "asyncpg":
        sql, names = numbered(statement.sql)
        return sql, tuple(statement.params[name] for name in names)
    sql = PARAMETER.sub(lambda m: m[0] if m[1] is None else f"%({m[1]})s", statement.sql.replace("%", "%%"))
    return sql, dict(statement.params)


_KINDS: dict[str, type[JoinedSession]] = {
    "asyncpg.connection.Connection": JoinedAsyncpg,
    "asyncpg.pool.PoolConnectionProxy": JoinedAsyncpg,
    "onceward.sql.drivers.asyncpg_guard.GuardedConnection": JoinedAsyncpg,
    "psycopg.connection_async.AsyncConnection": JoinedPsycopg,
    "onceward.sql.drivers.psycopg.GuardedConnection": JoinedPsycopg,
    "sqlite3.Connection": JoinedSqlite,
    "aiosqlite.core.Connection": JoinedSqlite,
    "onceward.sql.drivers.sqlite.Transaction": JoinedHandler,
    "sqlalchemy.ext.asyncio.session.AsyncSession": JoinedSqlAlchemy,
    "sqlalchemy.ext.asyncio.engine.AsyncConnection": JoinedSqlAlchemy,
}


async def joined(tx: Any, dialect: str) -> JoinedSession:
    """A session in the caller's transaction. By the name of its class: no driver is imported for it."""
    if type(tx).__name__ == "async_scoped_session":
        tx = tx()
    for kind in type(tx).__mro__:
        known = _KINDS.get(f"{kind.__module__}.{kind.__qualname__}")
        if known is not None:
            break
    else:
        raise UsageError(
            f"tx= takes an asyncpg or psycopg connection, an SQLAlchemy AsyncSession or AsyncConnection, or a sqlite3 "
            f"connection, not {type(tx).__module__}.{type(tx).__qualname__}"
        )
    session = known(tx)
    if isinstance(session, JoinedSqlAlchemy):
        await session.prepare()
    if session.dialect != dialect:
        raise TransactionUnusable(_ELSEWHERE)
    return session
