"""A pool that notices when a handler takes a second connection from the pool of its own inbox.

What it writes there is outside of the inbox's transaction, and with enough of them every connection waits for another
one. How a pool is made to call `noticed` is the driver's business; it is left as it was when the store is closed.
"""

from __future__ import annotations

import warnings
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from contextlib import contextmanager
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
    watch, held = _watches[id(pool)], _active()
    if watch.others is not None:
        watch.others()
    return timeout if held is None or held.pool is not pool else watch.noticed(timeout)


@contextmanager
def unnoticed() -> Iterator[None]:
    """The inbox itself may take a connection, also inside a handler."""
    before = _hold.set(None)
    try:
        yield
    finally:
        _hold.reset(before)


def hold(pool: Any, connection: Any = None) -> Hold:
    """From now on this task works with a connection of this pool; `unhold` has to follow."""
    held = Hold(pool, connection, before=_active())
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
    """`put_on` makes a pool call `noticed` and `take_off` ends that. `acquire`, which is not noticed, and `release` are
    the driver's.
    """

    joins = False
    """What is acquired has a connection of SQLAlchemy's, which sessions can join."""

    others: Callable[[], None] | None = None
    """Called when somebody else than the inbox takes a connection."""

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
