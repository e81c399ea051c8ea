"""A pool that notices when a handler takes a second connection from the pool of its own inbox.

What it writes there is outside of the inbox's transaction, and with enough of them every connection waits for another
one. How a pool is made to call `noticed` is the driver's business; it is left as it was when the store is closed.
"""

from __future__ import annotations

import warnings
from collections.abc import Awaitable, Callable, Coroutine
from contextvars import ContextVar
from typing import Any

import msgspec

from onceward.current import current_or_none
from onceward.errors import SecondConnection, UsageError


class SecondConnectionWarning(UserWarning):
    """A handler took a second connection from the pool of its own inbox."""


class Hold(msgspec.Struct):
    """That this task, or the task that started it, holds a connection of a pool for a unit of work."""

    pool: Any
    connection: Any = None
    """Where that is an SQLAlchemy connection, sessions can join it."""
    active: bool = True
    before: Hold | None = None


_hold: ContextVar[Hold | None] = ContextVar("onceward_hold", default=None)
_watches: dict[int, PoolWatch] = {}


def noticed(pool: Any, timeout: float | None) -> float | None:
    """Called by a watched pool on every acquire. Gives the timeout to use: inside a handler there always is one."""
    held = _active()
    return timeout if held is None or held.pool is not pool else _watches[id(pool)].noticed(timeout)


def hold(connection: Any) -> Hold:
    """A connection of SQLAlchemy that the caller of the inbox has: sessions of the handler can join it."""
    held = Hold(connection.engine, connection, before=_active())
    _hold.set(held)
    return held


def unhold(held: Hold) -> None:
    held.active = False
    if _hold.get() is held:  # not so when another task ends it than began it
        _hold.set(held.before)


def _active() -> Hold | None:
    """The innermost that has not ended. Another task may have ended it."""
    held = _hold.get()
    while held is not None and not held.active:
        held = held.before
    return held


def held_of(pool: Any) -> Hold | None:
    """What this task's handler holds, if that is an SQLAlchemy connection of this pool (of an engine)."""
    held = _active()
    if held is None or held.connection is None or held.connection.engine.sync_engine.pool is not pool:
        return None
    return held


class PoolWatch:
    """`put_on` makes a pool call `noticed` and `take_off` ends that; `acquire` and `release` are the driver's."""

    joins = False
    """What is acquired has a connection of SQLAlchemy's, which sessions can join."""

    def __init__(
        self,
        reaction: str,
        put_on: Callable[[Any], None],
        take_off: Callable[[Any], None],
        acquire: Callable[[Any, float], Awaitable[Any]],
        release: Callable[[Any, Any], Coroutine[Any, Any, None]],
    ) -> None:
        if reaction not in ("warn", "raise", "allow"):
            raise UsageError('second_connection= is "warn", "raise" or "allow"')
        self._reaction = reaction
        self._put_on = put_on
        self._take_off = take_off
        self.acquire = acquire
        self.release = release
        self.timeout = 10.0

    def attach(self, pool: Any) -> None:
        if self._reaction != "allow" and id(pool) not in _watches:
            self._put_on(pool)
            _watches[id(pool)] = self

    def detach(self, pool: Any) -> None:
        if _watches.get(id(pool)) is self:
            del _watches[id(pool)]
            self._take_off(pool)

    def connection(self, pool: Any, wait: float) -> Lent:
        """A connection for the inbox itself, for as long as a unit needs it."""
        return Lent(self, pool, wait)

    def noticed(self, timeout: float | None) -> float | None:
        run = current_or_none()
        if run is None:
            return timeout
        text = (
            f"the handler {run.handler!r} took a second connection from the pool of its own inbox. What it writes "
            "there is not exactly once; write through tx, or use another pool."
        )
        if self._reaction == "raise":
            raise SecondConnection(text, handler=run.handler)
        warnings.warn(text, SecondConnectionWarning, stacklevel=4)
        return self.timeout if timeout is None else timeout


class Lent:
    """A connection, from the pool and back to it."""

    __slots__ = ("_connection", "_held", "_pool", "_token", "_wait", "_watch")

    def __init__(self, watch: PoolWatch, pool: Any, wait: float) -> None:
        self._watch = watch
        self._pool = pool
        self._wait = wait

    async def __aenter__(self) -> Any:
        before = _hold.set(None)
        try:
            # With 0 even a free connection comes too late.
            connection = self._connection = await self._watch.acquire(self._pool, max(self._wait, 0.05))
        finally:
            _hold.reset(before)
        joinable = connection.joinable if self._watch.joins else None
        self._held = Hold(self._pool, joinable, before=_active())
        self._token = _hold.set(self._held)
        return connection

    def __aexit__(self, *_error: object) -> Coroutine[Any, Any, None]:
        self._held.active = False
        _hold.reset(self._token)
        return self._watch.release(self._pool, self._connection)
