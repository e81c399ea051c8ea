"""The handle that stands between a handler and asyncpg, and what the pool is asked to do."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Coroutine
from contextlib import asynccontextmanager, suppress
from functools import cache
from typing import Any

import asyncpg

from onceward.errors import HandlerEndedTransaction, UsageError
from onceward.shield import finish_here, within
from onceward.sql.drivers.pool_watch import noticed
from onceward.sql.drivers.postgresql import Guard

_ENDS_CONNECTION = {"close", "terminate", "reset"}

RESET_WITHIN = 5.0
"""Seconds that a pool may take to reset a connection. One that does not answer is closed."""


class GuardedConnection(Guard):
    """An asyncpg connection inside the inbox's transaction, as the handler sees it.

    Everything of a connection is there. `transaction()` makes a savepoint; after each verb the driver is asked
    whether the transaction still stands, and when it does not, HandlerEndedTransaction is raised.
    """

    _savepoints = 0

    def __init__(self, connection: asyncpg.Connection) -> None:
        self._connection = connection

    # Not async: each would be one more coroutine around the one that does the work.

    def execute(self, query: str, *args: Any, timeout: float | None = None) -> Coroutine[Any, Any, str]:
        return self._guarded(self._connection.execute(query, *args, timeout=timeout))

    def executemany(self, command: str, args: Any, *, timeout: float | None = None) -> Coroutine[Any, Any, None]:
        return self._guarded(self._connection.executemany(command, args, timeout=timeout))

    def fetch(self, query: str, *args: Any, **options: Any) -> Coroutine[Any, Any, list[Any]]:
        return self._guarded(self._connection.fetch(query, *args, **options))

    def fetchrow(self, query: str, *args: Any, **options: Any) -> Coroutine[Any, Any, Any]:
        return self._guarded(self._connection.fetchrow(query, *args, **options))

    def fetchval(self, query: str, *args: Any, **options: Any) -> Coroutine[Any, Any, Any]:
        return self._guarded(self._connection.fetchval(query, *args, **options))

    def fetchmany(self, query: str, args: Any, **options: Any) -> Coroutine[Any, Any, Any]:
        return self._guarded(self._connection.fetchmany(query, args, **options))

    @asynccontextmanager
    async def transaction(self, **options: Any) -> AsyncIterator[None]:
        """A savepoint: an error that leaves the block undoes what the block wrote, and only that."""
        if options:
            raise UsageError("inside a handler transaction() is a savepoint and takes no options")
        self._savepoints += 1
        name = f"onceward_{self._savepoints}"
        await self.execute(f"SAVEPOINT {name}")
        try:
            yield
        except BaseException:
            # After a lost connection or an ended transaction there is no savepoint to go back to; and where another
            # task's block has undone this one, the error aborts the transaction, which COMMIT finds out.
            with suppress(HandlerEndedTransaction, UsageError, asyncpg.PostgresError, asyncpg.InterfaceError, OSError):
                await self.execute(f"ROLLBACK TO {name}; RELEASE {name}")
            raise
        else:
            await self.execute(f"RELEASE {name}")

    def is_in_transaction(self) -> bool:
        return True

    def __getattr__(self, name: str) -> Any:
        if name in _ENDS_CONNECTION:
            raise UsageError(f"{name}() is not for handlers: the connection belongs to the inbox")
        self.check()
        return getattr(self._connection, name)

    async def _guarded(self, verb: Coroutine[Any, Any, Any]) -> Any:
        try:
            self.enter()
        except BaseException:
            verb.close()
            raise
        try:
            return await verb
        finally:
            self.leave(stands=self._connection.is_closed() or self._connection.is_in_transaction())


class _WatchedPool:
    __slots__ = ()

    def acquire(self, *, timeout: float | None = None) -> Any:
        return super().acquire(timeout=noticed(self, timeout))  # type: ignore[misc]


@cache
def _watched(pool_class: Any) -> Any:
    return type(f"Watched{pool_class.__name__}", (_WatchedPool, pool_class), {"__slots__": ()})


def put_on(pool: Any) -> None:
    """asyncpg's pool has slots, so it gets another class instead of another method."""
    pool.__class__ = _watched(pool.__class__)


def take_off(pool: Any) -> None:
    pool.__class__ = type(pool).__mro__[2]


def acquire(pool: Any, wait: float) -> Awaitable[Any]:
    unwatched: Any = super(_WatchedPool, pool) if isinstance(pool, _WatchedPool) else pool
    return within(wait, unwatched.acquire())


@cache
def riding(connection_class: Any) -> Any:
    """A pool resets a connection that comes back, with a trip of its own. In a pool of ours it rides with COMMIT."""

    class Riding(connection_class):  # type: ignore[misc]
        is_reset = False
        """The last thing that was said to it was a COMMIT with the reset behind it."""

        async def reset(self, *, timeout: float | None = None) -> None:
            """The pool says this. What a handler has left in the driver itself is not gone with COMMIT."""
            if not self.is_reset or self._listeners or self._log_listeners or self.is_in_transaction():
                await super().reset(timeout=timeout)

    return Riding


async def release(pool: Any, proxy: Any) -> None:
    connection = proxy._con  # noqa: SLF001
    is_reset = getattr(connection, "is_reset", False)
    try:
        if is_reset:
            # Nothing is left to be sent, so it needs neither the task of pool.release() nor a limit of time.
            connection._on_release()  # noqa: SLF001
            await finish_here(proxy._holder.release(None))  # noqa: SLF001
        else:
            await finish_here(pool.release(proxy, timeout=RESET_WITHIN))  # it is set in a task of its own
    except Exception:  # noqa: BLE001 - a connection that died on its way back says nothing about the message
        with suppress(Exception):
            proxy.terminate()
    finally:
        if is_reset:
            connection.is_reset = False  # whoever has it next may be the user
