"""PostgreSQL through asyncpg.

We send BEGIN and COMMIT ourselves: the claim rides with BEGIN in one trip, and the command tag of COMMIT tells the
truth (`conn.transaction()` hides that a COMMIT rolled back). A token set with BEGIN, local to the transaction, is
tested in the same trip as COMMIT, so a handler that ended the transaction behind our back is found out by state,
not by reading its SQL.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from secrets import token_hex
from typing import Any, NoReturn

import asyncpg

from onceward.errors import (
    CommitNotApplied,
    CommitUnknown,
    HandlerEndedTransaction,
    SchemaMissing,
    StoreReadOnly,
    StoreUnavailable,
    TryLater,
    UsageError,
)
from onceward.shield import finish
from onceward.sql import dialect
from onceward.sql.drivers.asyncpg_guard import GuardedConnection, PoolWatch
from onceward.sql.plan import Result, Statement, gives_rows, inlined, numbered
from onceward.store import Features

_CONFLICTS = {"40001", "40P01"}
_AWAY = (OSError, asyncpg.InterfaceError, asyncpg.PostgresConnectionError, asyncpg.CannotConnectNowError)
_NO_TABLE = (asyncpg.UndefinedTableError, asyncpg.InvalidSchemaNameError)


class AsyncpgSession:
    def __init__(self, connection: asyncpg.Connection) -> None:
        self._connection = connection
        self._token = ""
        self._guard: GuardedConnection | None = None
        self._abandoned = False

    @property
    def tx(self) -> asyncpg.Connection:
        if self._guard is None:
            raise UsageError("there is no transaction")
        return self._guard  # it answers to everything a connection does

    @property
    def lost(self) -> bool:
        return self.gone and not self._abandoned

    @property
    def gone(self) -> bool:
        return bool(self._connection.is_closed())

    async def begin(self, first: Statement | None = None) -> Result:
        self._token = token_hex(8)
        self._guard = GuardedConnection(self._connection)
        trip = f"BEGIN ISOLATION LEVEL READ COMMITTED; SET LOCAL onceward.token = '{self._token}'"
        if self._connection.get_server_version() >= (14,):
            # A killed process must not hold its claim until a long statement of its handler ends.
            trip += "; SET LOCAL client_connection_check_interval = '2s'"
        # A text literal means what we say only with standard_conforming_strings.
        rides = (
            first is not None
            and not gives_rows(first.sql)
            and self._connection.get_settings().standard_conforming_strings == "on"
        )
        if first is not None and rides:
            return Result((), _count(await self._send(f"{trip}; {inlined(first)}")))
        await self._send(trip)
        return await self.execute(first) if first is not None else Result((), 0)

    async def execute(self, statement: Statement) -> Result:
        sql, names = numbered(statement.sql)
        params = [statement.params[name] for name in names]
        try:
            if gives_rows(sql):
                rows = await self._connection.fetch(sql, *params)
                return Result(rows, len(rows))
            return Result((), _count(await self._connection.execute(sql, *params)))
        except Exception as error:  # noqa: BLE001 - told apart there
            self._raise(error)

    async def script(self, sql: str) -> None:
        await self._send(sql)

    async def _send(self, sql: str) -> str:
        try:
            tag: str = await self._connection.execute(sql)
        except Exception as error:  # noqa: BLE001 - told apart there
            self._raise(error)
        return tag

    def _raise(self, error: Exception) -> NoReturn:
        problem = translated(error, lost=self.lost)
        if problem is error:
            raise error
        raise problem from error

    async def ended(self) -> bool:
        if self._guard is None or self.gone:
            return False
        ended = self._guard.end_of_run()
        if not await self._guard.is_idle():
            return False
        if ended or not self._connection.is_in_transaction():
            return not self.gone
        try:
            return not await self._connection.fetchval(f"SELECT {self._token_stands()}")
        except (asyncpg.PostgresError, asyncpg.InterfaceError, OSError):
            return False  # an error inside of our transaction, which is what we began; or the connection is lost

    def _token_stands(self) -> str:
        return f"coalesce(current_setting('onceward.token', true), '') = '{self._token}'"

    async def commit(self) -> None:
        if self.lost:
            raise StoreUnavailable("the connection to PostgreSQL was lost before COMMIT; nothing was written")
        guard, self._guard = self._guard, None
        if guard is None:
            raise UsageError("there is no transaction to commit")
        ended = guard.end_of_run()
        if guard.running:
            self._abandon()
            raise UsageError("a task that the handler left behind still uses tx; await it before the handler returns")
        if ended or not self._connection.is_in_transaction():
            raise HandlerEndedTransaction
        await finish(self._commit())

    def _abandon(self) -> None:
        """Closing the connection rolls back too."""
        self._abandoned = True
        self._connection.terminate()

    async def _commit(self) -> None:
        try:
            # 1/0 stops the trip before COMMIT when this is not the transaction that we began.
            tag = await self._connection.execute(f"SELECT 1 / ({self._token_stands()})::int; COMMIT")
        except asyncpg.DivisionByZeroError as error:
            raise HandlerEndedTransaction from error
        except asyncpg.InFailedSQLTransactionError as error:
            raise CommitNotApplied from error
        except Exception as error:
            if self.lost:
                raise CommitUnknown from error
            raise  # the database refused: a deferred constraint, a serialization failure
        if tag != "COMMIT":
            raise CommitNotApplied(f"COMMIT was answered with {tag}: nothing was written")

    async def rollback(self) -> None:
        guard, self._guard = self._guard, None
        if guard is not None:
            guard.end_of_run()
        if not self.gone and (self._connection.is_in_transaction() or (guard is not None and guard.running)):
            await finish(self._rollback(guard))

    async def _rollback(self, guard: GuardedConnection | None) -> None:
        if guard is not None and not await guard.is_idle():
            self._abandon()
            return
        try:
            await self._connection.execute("ROLLBACK")
        except (asyncpg.PostgresError, asyncpg.InterfaceError, OSError):
            if not self.gone:
                self._abandon()

    def is_conflict(self, error: BaseException) -> bool:
        return is_conflict(error)


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
        if second_connection not in ("warn", "raise", "allow"):
            raise UsageError('second_connection= is "warn", "raise" or "allow"')
        self.schema = schema
        self.dialect = dialect.postgresql(schema)
        self._dsn = dsn
        self._options = pool_options
        self._given = pool
        self._pool: asyncpg.Pool | None = None
        self._watch = PoolWatch(second_connection)

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
        self._watch.attach(self._pool)
        self.dialect = dialect.postgresql(self.schema)
        if self.schema is None:
            await self._locate()

    async def _locate(self) -> None:
        """Name the schema of our tables from now on, so that a handler may set another search path."""
        async with self.session(wait=30.0) as session:
            found = await session.execute(
                Statement(
                    "SELECT nspname::text AS schema FROM pg_class JOIN pg_namespace n ON n.oid = relnamespace "
                    "WHERE pg_class.oid = to_regclass('onceward_records')"
                )
            )
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
        self._watch.detach(pool)
        if self._given is None:
            try:
                await asyncio.wait_for(pool.close(), 10.0)
            except TimeoutError:
                pool.terminate()

    @asynccontextmanager
    async def session(self, *, wait: float, read_only: bool = False) -> AsyncIterator[AsyncpgSession]:  # noqa: ARG002
        async with AsyncExitStack() as stack:
            try:
                connection = await stack.enter_async_context(self._watch.connection(self.pool, wait))
            except TimeoutError as error:
                text = f"waited {wait:g} s for a connection: all of the pool are in use, or PostgreSQL does not answer"
                raise TryLater(reason="store_busy", text=text) from error
            except Exception as error:
                raise translated(error, lost=True) from error
            session = AsyncpgSession(connection)
            try:
                yield session
            finally:
                await session.rollback()


def translated(error: Exception, *, lost: bool = False) -> Exception:
    """asyncpg's error as onceward's, where the database itself is the trouble."""
    if isinstance(error, _NO_TABLE):
        return SchemaMissing()
    if isinstance(error, asyncpg.ReadOnlySQLTransactionError):
        return StoreReadOnly(f"PostgreSQL is read-only ({error}). Point the inbox at the primary.")
    if isinstance(error, asyncpg.InFailedSQLTransactionError):
        return CommitNotApplied()
    if isinstance(error, _AWAY) or lost:
        return StoreUnavailable(f"PostgreSQL is not available: {error or type(error).__name__}")
    return error


def is_conflict(error: BaseException | None) -> bool:
    """Also when the handler wrapped it: SQLAlchemy and others keep the driver's error as cause."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        if getattr(error, "sqlstate", None) in _CONFLICTS:
            return True
        seen.add(id(error))
        error = error.__cause__
    return False


def _count(tag: str) -> int:
    """The number of rows at the end of a command tag such as INSERT 0 1."""
    last = tag.rpartition(" ")[2]
    return int(last) if last.isdigit() else 0
