"""PostgreSQL through asyncpg. What all drivers share is in postgresql.py."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Awaitable, Coroutine
from contextlib import AbstractAsyncContextManager
from typing import Any, TypeVar

import asyncpg
import msgspec

from onceward.errors import StoreUnavailable, UsageError
from onceward.shield import finish_here
from onceward.sql.drivers.asyncpg_guard import GuardedConnection
from onceward.sql.drivers.asyncpg_pool import Shelf, acquire, put_on, release, riding, take_off
from onceward.sql.drivers.guard import Guard
from onceward.sql.drivers.listening import Ring, listening
from onceward.sql.drivers.pool_watch import PoolWatch
from onceward.sql.drivers.postgresql import PostgresDriver, PostgresSession, count
from onceward.sql.plan import Result, Statement, gives_rows, numbered

T = TypeVar("T")


class AsyncpgSession(PostgresSession["asyncpg.Connection"]):
    _lent = False
    """A handler may have had it, and nothing was reset since."""

    def __init__(self, connection: Any, *, rides: bool = False) -> None:
        super().__init__(connection)
        self._rides = self.goes_on = rides  # a turn must not find what a handler of another one has set

    @property
    def tx(self) -> asyncpg.Connection:
        if self._guard is None:
            raise UsageError("there is no transaction")
        return self._guard  # it answers to everything a connection does

    @property
    def gone(self) -> bool:
        return bool(self._connection.is_closed())

    def _new_guard(self) -> Guard:
        if self._rides:  # what rode with the COMMIT before is said no longer
            self._connection.is_reset = False
        self._lent = True
        return GuardedConnection(self._connection, getattr(self._connection, "_con", None) if self._rides else None)

    def stands(self) -> bool:
        guard = self._guard  # as in all drivers, with one call less after each handler
        return (
            guard is not None and not guard.has_ended and not self._abandoned and self._connection.is_in_transaction()
        )

    def _in_transaction(self) -> bool:
        return bool(self._connection.is_in_transaction())

    def _server_version(self) -> int:
        return int(self._connection.get_server_version().major)

    def _prepares(self) -> bool:
        """`statement_cache_size=0` is what asyncpg needs behind PgBouncer."""
        return bool(getattr(self._connection, "_stmt_cache_enabled", False))

    def _send(self, sql: str) -> Coroutine[Any, Any, str]:
        return self._connection.execute(sql)  # type: ignore[no-any-return]

    async def _run(self, statement: Statement) -> Result:
        sql, names = numbered(statement.sql)
        params = [statement.params[name] for name in names]
        connection, alone = self._connection, self._rides and not self._lent
        if alone:
            connection.is_reset = False  # a statement that does not come back may still be cancelled by the driver
        if gives_rows(sql):
            rows = await connection.fetch(sql, *params)
            result = Result(rows, len(rows))
        else:
            result = Result((), count(await connection.execute(sql, *params)))
        if alone:
            connection.is_reset = True  # what we say ourselves leaves nothing to reset
        return result

    def _terminate(self) -> None:
        self._connection.terminate()

    def _ending(self) -> str:
        return f"COMMIT; {self._connection.get_reset_query()}" if self._rides else "COMMIT"

    def _committed(self) -> None:
        if self._rides:
            self._connection.is_reset = True
            self._lent = False

    def to_its_end(self, work: Coroutine[Any, Any, T]) -> Awaitable[T]:
        return finish_here(work)  # asyncpg's own timeouts are timers, not cancellations


_CONNECT_OPTIONS = set(inspect.signature(asyncpg.connect).parameters)


def _can_listen(pool: asyncpg.Pool | None, options: dict[str, Any]) -> bool:
    """Behind PgBouncer, where statements are not cached, nobody hears a call; and a small pool has none to spare."""
    if pool is None:
        return options.get("statement_cache_size") != 0
    cached = getattr(pool, "_connect_kwargs", {}).get("statement_cache_size") != 0
    return cached and int(pool.get_max_size()) > 2


class AsyncpgDriver(PostgresDriver["asyncpg.Connection"]):
    _shelf: Shelf | None = None

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
        self._dsn = dsn
        self._options = pool_options
        # What `setup` sets must hold for all transactions of a session, so nothing may be reset between them.
        self._rides = pool is None and pool_options.keys().isdisjoint({"reset", "setup"})
        watch = PoolWatch(second_connection, put_on, take_off, acquire, release)
        super().__init__(pool, schema, watch)
        if self._rides and second_connection != "allow":  # then others who take one are not noticed
            self._shelf = Shelf()
            watch.acquire, watch.others = self._shelf.acquire, self._shelf.let_others
        self.features = msgspec.structs.replace(self.features, listens=_can_listen(pool, pool_options))

    async def _create_pool(self) -> asyncpg.Pool:
        options: dict[str, Any] = {"min_size": 1, "max_size": 10} | self._options
        if self._rides:
            options["connection_class"] = riding(options.get("connection_class", asyncpg.Connection))
        try:
            return await asyncpg.create_pool(self._dsn, **options)
        except (OSError, asyncpg.PostgresError, asyncpg.InterfaceError, ValueError) as error:
            raise StoreUnavailable(f"cannot connect to PostgreSQL: {error or type(error).__name__}") from error

    async def _close_pool(self, pool: asyncpg.Pool) -> None:
        if self._shelf is not None:
            self._shelf.end_round()
        try:
            await asyncio.wait_for(pool.close(), 10.0)
        except TimeoutError:
            pool.terminate()

    def at_hand(self) -> Any:
        return None if self._shelf is None else self._shelf.take()

    def keeps(self, connection: Any) -> bool:
        return self._shelf is not None and self._shelf.put(connection)

    def listening(self, channel: str, ring: Ring) -> AbstractAsyncContextManager[None]:
        return listening(self._listen, channel, ring)

    async def _listen(self, channel: str, ring: Ring) -> None:
        lost = asyncio.Event()
        if self._given is not None:
            connection = await self._given.acquire()
        else:
            options = {name: value for name, value in self._options.items() if name in _CONNECT_OPTIONS}
            connection = await asyncpg.connect(self._dsn, **options)
        try:
            connection.add_termination_listener(lambda *_: lost.set())
            await connection.add_listener(channel, lambda *_: ring())
            ring()  # it may have been said a moment ago
            await lost.wait()
        finally:
            connection.terminate()
            if self._given is not None:
                await self._given.release(connection)

    def session_on(self, connection: Any) -> AsyncpgSession:
        # The pool's proxy forgets its connection when that is lost; we still want to ask it.
        return AsyncpgSession(connection._con, rides=self._rides)  # noqa: SLF001
