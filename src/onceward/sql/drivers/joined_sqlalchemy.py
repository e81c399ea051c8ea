"""Joining a transaction of SQLAlchemy: an AsyncConnection or an AsyncSession, on asyncpg, psycopg or aiosqlite."""

from __future__ import annotations

import sqlite3
from typing import Any, NoReturn

from sqlalchemy.exc import InvalidRequestError, PendingRollbackError, ResourceClosedError, SQLAlchemyError

from onceward.errors import (
    CommitNotApplied,
    HandlerEndedTransaction,
    OncewardError,
    StoreUnavailable,
    TransactionUnusable,
)
from onceward.sql.drivers.joined import CLOSED, FAILED, JoinedSession, SavepointGone
from onceward.sql.drivers.joined_postgresql import ABORTED, NO_SAVEPOINT, NO_TRANSACTION, problem_of, sqlstate
from onceward.sql.drivers.joined_sqlite import TAKE_LOCK, WHERE, begin_as_python_would, without_waiting
from onceward.sql.drivers.pool_watch import Hold, hold, unhold
from onceward.sql.drivers.sqlalchemy_shared import check_shared, ledger_of, shared_by
from onceward.sql.drivers.sqlite import raise_for
from onceward.sql.plan import PARAMETER, Result, Statement, numbered


class JoinedConnection(JoinedSession):
    """An AsyncConnection. It begins by itself; a savepoint of our own is enough."""

    def __init__(self, tx: Any, *, read_only: bool = False) -> None:
        super().__init__(tx, read_only=read_only)
        self._below: Any = None
        self._held: Hold | None = None

    async def prepare(self) -> None:
        """Which database it is on is known only with a connection."""
        try:
            self._below = await self._connected()
            self._raw = (await self._below.get_raw_connection()).driver_connection
        except (SQLAlchemyError, OSError) as error:
            self._raise(error)
        self.dialect = self._below.dialect.name

    async def _connected(self) -> Any:
        return self.tx

    def _connection(self) -> Any:
        return self._raw

    def _in_transaction(self) -> bool:
        return bool(self.tx.in_transaction())

    async def begin(self, first: Statement | None = None) -> Result:
        if self.dialect != "sqlite":
            return await super().begin(first)
        if self.read_only:
            await self.check_database()
            return await self.execute(first) if first is not None else Result((), 0)
        async with without_waiting(self._raw):
            return await super().begin(first or TAKE_LOCK)

    async def _begin(self, savepoint: str, first: Statement | None) -> Result:
        try:
            if self.dialect == "sqlite":
                # SQLAlchemy's transaction on SQLite begins with its first write; the savepoint has to be inside of it.
                await begin_as_python_would(self._raw)
            result = await super()._begin(savepoint, first)
        except OncewardError:
            raise
        except Exception as error:  # noqa: BLE001 - told apart there
            self._raise(error)
        ledger = ledger_of(self._below)
        self._mark = (0, "") if ledger is None else ledger.mark()
        self._held = hold(self._below.engine, self._below)
        return result

    async def commit(self) -> None:
        if not (self.read_only and self.dialect == "sqlite"):
            check_shared(self._below)
            await super().commit()
        self._let_go()

    async def rollback(self) -> None:
        if self._held is not None:
            self._let_go()
            ledger = ledger_of(self._below)
            if ledger is not None:
                ledger.undone_to(self._mark)
        await super().rollback()

    def _let_go(self) -> None:
        held, self._held = self._held, None
        if held is not None:
            unhold(held)

    async def execute(self, statement: Statement) -> Result:
        self.check_stands()
        try:
            result = await self._below.exec_driver_sql(*_spelled(self._below.dialect, statement))
        except Exception as error:  # noqa: BLE001 - told apart there
            self._raise(error)
        if result.returns_rows:
            rows = result.mappings().all()
            return Result(rows, len(rows))
        return Result((), result.rowcount)

    def _raise(self, error: Exception) -> NoReturn:
        problem = self._problem(error)
        if problem is error:
            raise error
        raise problem from error

    def _problem(self, error: Exception) -> Exception:
        if isinstance(error, ResourceClosedError):
            return TransactionUnusable(CLOSED)
        if isinstance(error, PendingRollbackError):
            return CommitNotApplied() if self.entered else TransactionUnusable(FAILED)
        if isinstance(error, InvalidRequestError):
            return TransactionUnusable(f"the session that you gave cannot be used: {error}")
        below = getattr(error, "orig", None) or error
        if isinstance(below, sqlite3.Error):
            raise_for(below, WHERE)
        if getattr(error, "connection_invalidated", False) or isinstance(error, OSError):
            return StoreUnavailable(f"the connection was lost: {error}")
        problem = problem_of(below, entered=self.entered)
        return error if problem is below else problem  # SQLAlchemy's, as everywhere in the caller's code

    async def _enter(self, savepoint: str) -> None:
        await self._below.exec_driver_sql(f"SAVEPOINT {savepoint}")

    async def _release(self, savepoint: str) -> None:
        await self._end(f"RELEASE {savepoint}")

    async def _undo(self, savepoint: str) -> None:
        await self._end(f"ROLLBACK TO {savepoint}")
        await self._end(f"RELEASE {savepoint}")

    async def _end(self, sql: str) -> None:
        if not self._in_transaction():
            raise SavepointGone
        try:
            await self._below.exec_driver_sql(sql)
        except Exception as error:
            if sqlstate(error) in (NO_SAVEPOINT, NO_TRANSACTION) or "no such savepoint" in str(error):
                raise SavepointGone from error
            if sqlstate(error) == ABORTED:
                raise CommitNotApplied from error
            self._raise(error)


class JoinedOrmSession(JoinedConnection):
    """An AsyncSession: the savepoint is its own, so that its objects follow a rollback."""

    _nested: Any = None

    async def _connected(self) -> Any:
        return await self.tx.connection()

    async def _enter(self, _savepoint: str) -> None:
        self._nested = await self.tx.begin_nested()
        self._below = await self.tx.connection()  # SAVEPOINT is sent only when the connection is used
        shared_by(self._below, self.tx)

    def check_stands(self) -> None:
        if self.entered and not self._is_open():
            raise HandlerEndedTransaction

    def _is_open(self) -> bool:
        """Whether our savepoint is one of those that the session has open; it need not be fit for use any more."""
        mine, found = self._nested.sync_transaction, self.tx.sync_session.get_nested_transaction()
        while found is not None and found is not mine:
            found = found.parent
        return found is not None

    async def _release(self, _savepoint: str) -> None:
        if not self._nested.is_active:
            raise CommitNotApplied  # a flush failed, and that was swallowed
        await self.tx.flush()
        if self.dialect == "postgresql":
            # A RELEASE that fails would leave a session that cannot go back to the savepoint. So ask first.
            await self.execute(Statement("SELECT 1"))
        await self._nested.commit()

    async def _undo(self, _savepoint: str) -> None:
        if self._nested is None:
            return
        if not self._is_open():
            raise SavepointGone
        await self._nested.rollback()


def _spelled(dialect: Any, statement: Statement) -> tuple[Any, ...]:
    """A statement in the driver's own style of parameters."""
    if dialect.name == "sqlite":
        rows = statement.rows
        return statement.sql, dict(statement.params) if rows is None else list(map(dict, rows))
    if dialect.driver == "asyncpg":
        sql, names = numbered(statement.sql)
        return sql, tuple(statement.params[name] for name in names)
    sql = PARAMETER.sub(lambda m: m[0] if m[1] is None else f"%({m[1]})s", statement.sql.replace("%", "%%"))
    return sql, dict(statement.params)
