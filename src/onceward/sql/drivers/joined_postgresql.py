"""Joining a transaction on PostgreSQL, through a connection of asyncpg or psycopg."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any, NoReturn

from onceward.errors import CommitNotApplied, OncewardError, TransactionUnusable, UsageError
from onceward.sql.drivers.joined import CLOSED, FAILED, NOT_BEGUN, JoinedSession, SavepointGone
from onceward.sql.drivers.postgresql import PostgresSession, count
from onceward.sql.plan import Result, Statement, gives_rows, inlined, numbered

NO_TRANSACTION = "25P01"
ABORTED = "25P02"
NO_SAVEPOINT = "3B001"


def sqlstate(error: BaseException | None) -> str:
    """Also of an error that SQLAlchemy has wrapped."""
    while error is not None:
        state = getattr(error, "sqlstate", None)
        if state:
            return str(state)
        error = error.__cause__
    return ""


def problem_of(error: Exception, *, entered: bool, closed: bool = False) -> Exception:
    """What an error of the database means: before our savepoint is made it is about the caller's transaction."""
    state = sqlstate(error)
    if state in (NO_TRANSACTION, ABORTED) and not entered:
        return TransactionUnusable(FAILED if state == ABORTED else NOT_BEGUN)
    return PostgresSession.translated(error, lost=closed)


class JoinedPostgres(JoinedSession):
    dialect = "postgresql"

    async def _begin(self, savepoint: str, first: Statement | None) -> Result:
        """Savepoint and claim in one trip, once the connection is known."""
        if first is None or gives_rows(first.sql) or not self.is_known:
            return await super()._begin(savepoint, first)
        try:
            return Result((), count(await self._say(f"SAVEPOINT {savepoint}; {inlined(first)}")))
        except Exception as error:  # noqa: BLE001 - told apart there
            self._raise(error)

    async def execute(self, statement: Statement) -> Result:
        self.check_stands()
        try:
            return await self._run(statement)
        except Exception as error:  # noqa: BLE001 - told apart there
            self._raise(error)

    def _raise(self, error: Exception) -> NoReturn:
        problem = error
        if not isinstance(error, OncewardError):
            problem = problem_of(error, entered=self.entered, closed=self._closed())
        if problem is error:
            raise error
        raise problem from error

    async def _enter(self, savepoint: str) -> None:
        try:
            await self._say(f"SAVEPOINT {savepoint}")
        except Exception as error:  # noqa: BLE001 - told apart there
            self._raise(error)

    async def _release(self, savepoint: str) -> None:
        await self._end(f"RELEASE {savepoint}")

    async def _undo(self, savepoint: str) -> None:
        await self._end(f"ROLLBACK TO {savepoint}; RELEASE {savepoint}")

    async def _end(self, sql: str) -> None:
        try:
            await self._say(sql)
        except Exception as error:
            if sqlstate(error) in (NO_SAVEPOINT, NO_TRANSACTION):
                raise SavepointGone from error
            if sqlstate(error) == ABORTED:
                raise CommitNotApplied from error
            self._raise(error)

    @abstractmethod
    def _closed(self) -> bool: ...

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
        except UsageError as error:
            raise TransactionUnusable(str(error)) from error  # the handler is over
        except Exception as error:
            raise TransactionUnusable(CLOSED) from error  # given back to its pool
        if closed:
            raise TransactionUnusable(CLOSED)
        if not begun:
            raise TransactionUnusable(NOT_BEGUN)

    def _connection(self) -> Any:
        return getattr(self.tx, "_con", None) or getattr(self.tx, "_connection", None) or self.tx

    def _closed(self) -> bool:
        return bool(self._connection().is_closed())

    def _in_transaction(self) -> bool:
        return bool(self._connection().is_in_transaction())

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

        try:
            # In its pool a connection belongs to nobody; psycopg tells the two by this attribute too.
            closed = self.tx.closed or getattr(self._connection(), "_pool", self) is None
        except UsageError as error:
            raise TransactionUnusable(str(error)) from error  # the handler is over
        if closed:
            raise TransactionUnusable(CLOSED)
        status = self.tx.info.transaction_status
        if status is TransactionStatus.INERROR:
            raise TransactionUnusable(FAILED)
        if status is TransactionStatus.IDLE and self.tx.autocommit:
            raise TransactionUnusable(NOT_BEGUN)

    def _connection(self) -> Any:
        return getattr(self.tx, "_connection", self.tx)

    def _closed(self) -> bool:
        return bool(self._connection().closed)

    def _in_transaction(self) -> bool:
        from psycopg.pq import TransactionStatus  # noqa: PLC0415

        return bool(self._connection().info.transaction_status is not TransactionStatus.IDLE)

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
