"""SQLAlchemy over the drivers we already have.

The unit drives the DBAPI connection below SQLAlchemy as it does without it: our BEGIN, with claim and token, and our
COMMIT, with its proof. SQLAlchemy sits on top in AUTOCOMMIT mode, so it begins and ends nothing by itself; its Session
joins a transaction that exists only in SQLAlchemy's mind, with `join_transaction_mode="rollback_only"`: `commit()` of
the handler is harmless, `rollback()` is noticed.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from typing import Any

import sqlalchemy.exc
from sqlalchemy import event
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine, AsyncSession, create_async_engine
from sqlalchemy.orm import Session

from onceward.errors import CommitNotApplied, HandlerEndedTransaction, StoreUnavailable, UsageError
from onceward.shield import finish
from onceward.sql.drivers.guard import Guard
from onceward.sql.drivers.pool_watch import PoolWatch, noticed, unnoticed
from onceward.sql.drivers.postgresql import PostgresDriver, PostgresSession
from onceward.sql.drivers.sqlalchemy_shared import check_shared, ledger_of, shared_by
from onceward.sql.plan import Result, Statement

_log = logging.getLogger("onceward")

MakeSession = Callable[..., AsyncSession]


class OrmTransaction:
    """A Session of the user's on top of a driver's session; mixed in before it."""

    connection: AsyncConnection
    make_session: MakeSession
    _root: Any = None
    _session: AsyncSession | None = None

    @property
    def tx(self) -> AsyncSession:
        if self._root is None:
            raise UsageError("there is no transaction")
        if self._session is None:
            self._session = self.make_session(
                bind=self.connection, join_transaction_mode="rollback_only", close_resets_only=False
            )
            event.listen(self._session.sync_session, "after_begin", self._check_connection)
            shared_by(self.connection, self._session)
        return self._session

    def _check_connection(self, _session: Any, _transaction: Any, connection: Any) -> None:
        if connection is not self.connection.sync_connection:
            raise UsageError(
                "the handler's session goes to another connection than the inbox's, because of binds= or get_bind() of "
                "your sessionmaker. Give the inbox one without them; other databases need sessions of their own."
            )

    def stands(self) -> bool:
        return bool(super().stands()) and (self._root is None or self._root.is_active)  # type: ignore[misc]

    async def begin(self, first: Statement | None = None) -> Result:
        result: Result = await super().begin(first)  # type: ignore[misc]
        self._root = await self.connection.begin()
        return result

    async def commit(self) -> None:
        session = self._session
        if session is not None:
            if not session.is_active:
                raise CommitNotApplied("a flush failed inside the handler, and the error was swallowed")
            await session.run_sync(_prepare)
            if not self._root.is_active:
                raise HandlerEndedTransaction(
                    "the handler called rollback() on its session and returned. Nothing it wrote stands. Let the error "
                    "out of the handler, or undo a part with `async with tx.begin_nested()`."
                )
        check_shared(self.connection)
        await super().commit()  # type: ignore[misc]
        if session is not None:
            with suppress(sqlalchemy.exc.InvalidRequestError):
                await _told(session.commit())  # for those who listen to after_commit; nothing is sent
        await self._leave()

    async def flush(self) -> None:
        session = self._session
        if session is not None:
            if not session.is_active:
                raise CommitNotApplied("a flush failed inside the handler, and the error was swallowed")
            await session.flush()
        if not self._root.is_active:
            raise HandlerEndedTransaction("the handler called rollback() on its session and returned")
        check_shared(self.connection)

    async def forget(self) -> None:
        """Below, the transaction goes on; above it there will be a new session, which knows nothing of it."""
        session, self._session = self._session, None
        ledger = ledger_of(self.connection)
        if ledger is not None:
            ledger.ended()
        if session is not None:
            await _told(session.close())

    async def ended(self) -> bool:
        """A session that rolled back has ended it cleanly, unless the handler went on: then it wrote on its own."""
        if self._root is not None and not self._root.is_active and not self.connection.in_transaction():
            return False
        ended: bool = await super().ended()  # type: ignore[misc]
        return ended

    async def rollback(self) -> None:
        await super().rollback()  # type: ignore[misc]
        await self._leave()

    async def _leave(self) -> None:
        session, root, self._session, self._root = self._session, self._root, None, None
        ledger = ledger_of(self.connection)
        if ledger is not None:
            ledger.ended()
        if session is not None:
            await _told(session.close())
        if root is not None and root.is_active:
            await _told(root.close())


def _prepare(session: Session) -> None:
    """The first half of its commit(): `before_commit` listeners, and flushes. What they write is part of ours."""
    try:
        transaction = session.get_transaction() or session.begin()
    except sqlalchemy.exc.InvalidRequestError:  # the handler has closed it
        return
    transaction._prepare_impl()  # noqa: SLF001 - prepare() is for two-phase commits only


async def _told(step: Any) -> None:
    """SQLAlchemy's own bookkeeping after the database has decided: whatever it says changes nothing any more."""
    try:
        await step
    except Exception:  # noqa: BLE001 - listeners of the user's, or a connection that is gone
        _log.debug("after the end of a transaction", exc_info=True)


class Borrowed:
    """A connection of the engine's pool, and the driver's connection below it."""

    def __init__(self, connection: AsyncConnection, raw: Any) -> None:
        self.connection = self.joinable = connection
        self.raw = raw
        self.pool = connection.engine.sync_engine.pool

    @property
    def gone(self) -> bool:
        closed = getattr(self.raw, "is_closed", None)
        return bool(closed() if closed is not None else getattr(self.raw, "closed", False))


async def acquire(engine: AsyncEngine, wait: float) -> Borrowed:
    with unnoticed():
        async with asyncio.timeout(wait):
            connection = await engine.connect()
    try:
        await connection.execution_options(isolation_level="AUTOCOMMIT")
        return Borrowed(connection, (await connection.get_raw_connection()).driver_connection)
    except BaseException:
        await connection.close()
        raise


async def release(engine: AsyncEngine, borrowed: Borrowed) -> None:
    await finish(_give_back(engine, borrowed))


async def _give_back(engine: AsyncEngine, borrowed: Borrowed) -> None:
    try:
        if borrowed.gone or engine.sync_engine.pool is not borrowed.pool:  # disposed of: only we close it
            await borrowed.connection.invalidate()
        await borrowed.connection.close()
    except Exception:  # noqa: BLE001 - a connection that died on its way back says nothing about the message
        _log.debug("a connection could not be given back", exc_info=True)


_listeners: dict[int, Any] = {}


def put_on(engine: AsyncEngine) -> None:
    def checkout(_dbapi_connection: Any, _record: Any, _proxy: Any) -> None:
        noticed(engine, None)

    _listeners[id(engine)] = checkout
    event.listen(engine.sync_engine, "checkout", checkout)


def take_off(engine: AsyncEngine) -> None:
    event.remove(engine.sync_engine, "checkout", _listeners.pop(id(engine)))


def watch_for(reaction: str) -> PoolWatch:
    watch = PoolWatch(reaction, put_on, take_off, acquire, release)
    watch.joins = True
    return watch


class SqlAlchemyPostgresDriver(PostgresDriver[AsyncSession]):
    """On an engine of the user's, or on one made from a URL; the engine says whether it is asyncpg or psycopg."""

    timeouts = (TimeoutError, sqlalchemy.exc.TimeoutError)

    def __init__(
        self,
        *,
        engine: AsyncEngine | None,
        url: str | None,
        make_session: MakeSession,
        schema: str | None,
        second_connection: str,
        **engine_options: Any,
    ) -> None:
        super().__init__(engine, schema, watch_for(second_connection))
        self._url = url
        self._options = engine_options
        self._make_session = make_session

    async def _create_pool(self) -> AsyncEngine:
        engine = create_async_engine(self._url or "", **self._options)
        try:
            await (await engine.connect()).close()
        except (OSError, sqlalchemy.exc.SQLAlchemyError, ValueError) as error:
            await engine.dispose()
            raise StoreUnavailable(f"cannot connect to PostgreSQL: {error or type(error).__name__}") from error
        return engine

    async def _close_pool(self, pool: AsyncEngine) -> None:
        await pool.dispose()

    def session_on(self, connection: Borrowed) -> PostgresSession[AsyncSession]:
        session_class = _session_class(connection.connection.dialect.driver)
        session: PostgresSession[AsyncSession] = session_class(connection, self._make_session)
        return session


@cache
def _session_class(driver: str) -> Any:
    if driver == "asyncpg":
        from onceward.sql.drivers.asyncpg import AsyncpgSession as Below  # noqa: PLC0415 - only what is installed
    elif driver == "psycopg_async" or driver.startswith("psycopg"):
        from onceward.sql.drivers.psycopg import PsycopgSession as Below  # type: ignore[assignment]  # noqa: PLC0415
    else:
        raise UsageError(f"SqlAlchemyStore knows the drivers asyncpg, psycopg and aiosqlite, not {driver}")

    class SqlAlchemySession(OrmTransaction, Below):
        def __init__(self, borrowed: Borrowed, make_session: MakeSession) -> None:
            Below.__init__(self, borrowed.raw)
            self.connection = borrowed.connection
            self.make_session = make_session

        def _new_guard(self) -> Guard:
            return Guard()

    return SqlAlchemySession
