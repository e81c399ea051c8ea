"""What an asyncpg pool is asked to do: to notice who takes a connection, to lend us one, and not to reset it twice.

To go through the pool and back costs more than all that a unit does itself, and under load the next unit is there at
once. So in a pool of ours a connection that was just used is put on a shelf, and the next unit takes it from there. But
the pool may have others who wait, or want to close it: it gets each of them back after a moment, and all that are idle
as soon as anybody else asks for one.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Awaitable
from contextlib import suppress
from functools import cache
from types import FunctionType
from typing import Any

import asyncpg

from onceward.shield import finish_here, within
from onceward.sql.drivers.pool_watch import noticed

RESET_WITHIN = 5.0
"""Seconds that a pool may take to reset a connection. One that does not answer is closed."""

ROUND = 0.1
"""Seconds that a connection is kept from its pool, at most; longer only while a unit works with it."""


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
    is_plain = _IS_KNOWN and all(getattr(connection_class, name) is _OWN_VERBS[name] for name in _OWN_VERBS)

    class Riding(connection_class):  # type: ignore[misc]
        is_reset = False
        """The last thing that was said to it was a COMMIT with the reset behind it."""
        round = 0
        """Of the shelf, when it came from the pool."""

        @property
        def is_clean(self) -> bool:
            """Also of what a handler may have left in the driver itself."""
            left = self._listeners or self._log_listeners or self.is_in_transaction()
            return self.is_reset and not left and not self.is_closed()

        async def reset(self, *, timeout: float | None = None) -> None:
            """The pool says this."""
            if not self.is_clean:
                await super().reset(timeout=timeout)

        async def execute(self, query: str, *args: Any, timeout: float | None = None) -> str:
            """The same with fewer coroutines, where the statement has been prepared before. In a batch, what handlers
            say is most of what this process does."""
            protocol = self._protocol
            if (
                args and timeout is None and protocol is not None and not self._query_loggers
                and is_plain and connection_class.execute is _EXECUTE  # somebody may put something around it any time
            ):  # fmt: skip
                statement = self._stmt_cache.get((query, protocol.get_record_class(), False))
                if statement is not None:
                    try:
                        _, status, _ = await protocol.bind_execute(statement, args, "", 0, True, None)  # noqa: FBT003
                        return status.decode()  # type: ignore[no-any-return]
                    except asyncpg.OutdatedSchemaCacheError:
                        await self.reload_schema_state()
                        raise
                    except asyncpg.InvalidCachedStatementError:
                        self._drop_global_statement_cache()
                        if self.is_in_transaction():
                            raise
            return await super().execute(query, *args, timeout=timeout)  # type: ignore[no-any-return]

    return Riding


KNOWN = ((0, 30), (0, 32))
"""The first and the last version of asyncpg that `Riding.execute` was compared with. With others it does as they do."""
_OWN_VERBS = {
    name: getattr(asyncpg.Connection, name) for name in ("execute", "_execute", "_do_execute", "_get_statement")
}
"""Of asyncpg. Where a class of the user has others, or somebody has put something around them, those are called."""
_EXECUTE = _OWN_VERBS["execute"]
_IS_KNOWN = KNOWN[0] <= tuple(map(int, re.findall(r"\d+", asyncpg.__version__)[:2])) <= KNOWN[1] and all(
    type(one) is FunctionType and one.__module__ == "asyncpg.connection" and not hasattr(one, "__wrapped__")
    for one in _OWN_VERBS.values()
)


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


class Shelf:
    """Connections that are idle, and reset."""

    def __init__(self) -> None:
        self._pool: Any = None
        self._idle: list[Any] = []
        self._round = 0
        self._timer: asyncio.TimerHandle | None = None
        self._waiting = 0
        """Units that wait for the pool. They come first."""
        self._lets_others = False
        """Others have asked the pool since it was asked for a unit."""
        self._leaving: set[asyncio.Task[None]] = set()

    def take(self) -> Any:
        """A connection that need not be waited for, or None."""
        while self._idle:
            proxy = self._idle.pop()
            connection = proxy._con  # noqa: SLF001
            if connection is not None:  # or it was lost, and the pool knows
                if not connection.is_closed():
                    return proxy
                connection.terminate()
        return None

    def put(self, proxy: Any) -> bool:
        """False: it has to go back to the pool."""
        connection = proxy._con  # noqa: SLF001
        if connection is None or self._waiting or connection.round != self._round or not connection.is_clean:
            return False
        connection._on_release()  # noqa: SLF001 - what a handler may have kept of it does not work any longer
        self._idle.append(proxy)
        return True

    async def acquire(self, pool: Any, wait: float) -> Any:
        """From the pool."""
        self._pool = pool
        if self._waiting or self._lets_others:
            # Who waits is woken when a connection comes back, and finds it gone if we take it in the same moment.
            self._lets_others = False
            await asyncio.sleep(0)
        self._waiting += 1
        try:
            proxy = await acquire(pool, wait)
        finally:
            self._waiting -= 1
        proxy._con.round = self._round  # noqa: SLF001
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(ROUND, self.end_round)
        return proxy

    def let_others(self) -> None:
        """Somebody else takes a connection of the pool."""
        self._lets_others = True
        self.end_round()

    def end_round(self) -> None:
        """What is idle goes back to the pool, and what is in use when its unit ends."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._round += 1
        while self._idle:
            task = asyncio.ensure_future(release(self._pool, self._idle.pop()))
            self._leaving.add(task)
            task.add_done_callback(self._leaving.discard)
