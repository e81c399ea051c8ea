"""What stands between a handler and asyncpg: a handle that notices when the transaction ends, and a pool that
notices when a handler takes a second connection."""

from __future__ import annotations

import warnings
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from contextvars import ContextVar
from functools import lru_cache
from typing import Any

import asyncpg
import msgspec

from onceward.current import current_or_none
from onceward.errors import HandlerEndedTransaction, SecondConnection, UsageError
from onceward.shield import finish
from onceward.sql.drivers.postgresql import Guard

_ENDS_CONNECTION = {"close", "terminate", "reset"}


class GuardedConnection(Guard):
    """An asyncpg connection inside the inbox's transaction, as the handler sees it.

    Everything of a connection is there. `transaction()` makes a savepoint; after each verb the driver is asked
    whether the transaction still stands, and when it does not, HandlerEndedTransaction is raised.
    """

    def __init__(self, connection: asyncpg.Connection) -> None:
        super().__init__()
        self._connection = connection
        self._savepoints = 0

    async def execute(self, query: str, *args: Any, timeout: float | None = None) -> str:
        return await self._guarded(self._connection.execute, query, *args, timeout=timeout)  # type: ignore[no-any-return]

    async def executemany(self, command: str, args: Any, *, timeout: float | None = None) -> None:
        await self._guarded(self._connection.executemany, command, args, timeout=timeout)

    async def fetch(self, query: str, *args: Any, **options: Any) -> list[Any]:
        return await self._guarded(self._connection.fetch, query, *args, **options)  # type: ignore[no-any-return]

    async def fetchrow(self, query: str, *args: Any, **options: Any) -> Any:
        return await self._guarded(self._connection.fetchrow, query, *args, **options)

    async def fetchval(self, query: str, *args: Any, **options: Any) -> Any:
        return await self._guarded(self._connection.fetchval, query, *args, **options)

    async def fetchmany(self, query: str, args: Any, **options: Any) -> Any:
        return await self._guarded(self._connection.fetchmany, query, args, **options)

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

    async def _guarded(self, verb: Any, *args: Any, **options: Any) -> Any:
        self.enter()
        try:
            return await verb(*args, **options)
        finally:
            self.leave(stands=self._connection.is_closed() or self._connection.is_in_transaction())


class SecondConnectionWarning(UserWarning):
    """A handler took a second connection from the pool of its own inbox."""


class Hold(msgspec.Struct):
    """That this task, or the task that started it, holds a connection of a pool for a unit of work."""

    pool: Any
    active: bool = True


_hold: ContextVar[Hold | None] = ContextVar("onceward_asyncpg_hold", default=None)


class PoolWatch:
    """Tells when a handler takes a second connection from the pool of its own inbox.

    What it writes there is outside of the inbox's transaction, and with enough of them every connection waits for
    another one. The pool is watched by giving it a subclass of its own class, and gets its class back when the
    store is closed.
    """

    def __init__(self, reaction: str, timeout: float = 10.0) -> None:
        self._reaction = reaction
        self._timeout = timeout

    def attach(self, pool: Any) -> None:
        if self._reaction != "allow" and id(pool) not in _watches:
            pool.__class__ = _watched(pool.__class__)
            _watches[id(pool)] = self

    def detach(self, pool: Any) -> None:
        if _watches.get(id(pool)) is self:
            del _watches[id(pool)]
            pool.__class__ = type(pool).__mro__[2]

    @asynccontextmanager
    async def connection(self, pool: Any, wait: float) -> AsyncIterator[Any]:
        """A connection for the inbox itself, for as long as a unit needs it."""
        before = _hold.set(None)
        try:
            proxy = await pool.acquire(timeout=max(wait, 0.05))  # with 0 even a free connection comes too late
        finally:
            _hold.reset(before)
        hold = Hold(pool)
        token = _hold.set(hold)
        try:
            # The pool's proxy forgets its connection when that is lost; we still want to ask it.
            yield proxy._con  # noqa: SLF001
        finally:
            hold.active = False
            _hold.reset(token)
            await finish(_release(pool, proxy))

    def noticed(self, pool: Any, timeout: float | None) -> float | None:
        """Called on every acquire. Gives the timeout to use: inside a handler there always is one."""
        hold, run = _hold.get(), current_or_none()
        if hold is None or run is None or hold.pool is not pool or not hold.active:
            return timeout
        text = (
            f"the handler {run.handler!r} took a second connection from the pool of its own inbox. What it writes "
            "there is not exactly once; write through tx, or use another pool."
        )
        if self._reaction == "raise":
            raise SecondConnection(text, handler=run.handler)
        warnings.warn(text, SecondConnectionWarning, stacklevel=3)
        return self._timeout if timeout is None else timeout


async def _release(pool: Any, proxy: Any) -> None:
    try:
        await pool.release(proxy)
    except Exception:  # noqa: BLE001 - a connection that died on its way back says nothing about the message
        with suppress(Exception):
            proxy.terminate()


_watches: dict[int, PoolWatch] = {}


class _WatchedPool:
    __slots__ = ()

    def acquire(self, *, timeout: float | None = None) -> Any:
        timeout = _watches[id(self)].noticed(self, timeout)
        return super().acquire(timeout=timeout)  # type: ignore[misc]


@lru_cache
def _watched(pool_class: type) -> type:
    return type(f"Watched{pool_class.__name__}", (_WatchedPool, pool_class), {"__slots__": ()})
