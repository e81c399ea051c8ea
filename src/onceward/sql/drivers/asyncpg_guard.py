"""The handle that stands between a handler and asyncpg."""

from __future__ import annotations

import inspect
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager, suppress
from types import CoroutineType
from typing import Any

import asyncpg

from onceward.errors import HandlerEndedTransaction, UsageError
from onceward.sql.drivers.guard import Guard

_ENDS_CONNECTION = {"close", "terminate", "reset"}


class GuardedConnection(Guard):
    """An asyncpg connection inside the inbox's transaction, as the handler sees it.

    Everything of a connection is there. `transaction()` makes a savepoint; after each verb that could have ended the
    transaction the driver is asked whether it still stands, and when it does not, HandlerEndedTransaction is raised.
    A statement with parameters cannot end it. So nothing is put around that, which would be one more coroutine for each
    statement of each handler; it is only remembered, until it is over.
    """

    used = False
    _savepoints = 0
    _last: CoroutineType[Any, Any, Any] | None = None
    """The last statement with parameters. Not a list of all: nearly always it is the only one that may be open."""

    def __init__(self, connection: asyncpg.Connection, behind: asyncpg.Connection | None = None) -> None:
        self._connection = connection
        self._behind = behind or connection
        """In a pool of ours, what its proxy stands for: nearly everything that handlers say goes there at once."""
        self._before: list[CoroutineType[Any, Any, Any]] = []
        """Others that were not over when the next one was said."""
        self._inside = 0

    @property
    def running(self) -> int:  # type: ignore[override]
        return self._inside + sum(verb.cr_frame is not None for verb in self._statements())

    def end_of_run(self) -> bool:
        self.close_unstarted()
        return super().end_of_run()

    def forget(self) -> None:
        self.close_unstarted()
        self.forgotten = False

    def _statements(self) -> list[CoroutineType[Any, Any, Any]]:
        return self._before if self._last is None else [*self._before, self._last]

    def close_unstarted(self) -> None:
        """Statements that nobody has awaited yet: they must not be said outside of the transaction."""
        for verb in self._statements():
            if verb.cr_frame is not None and inspect.getcoroutinestate(verb) == inspect.CORO_CREATED:
                verb.close()
                self.forgotten = True

    def execute(self, query: str, *args: Any, timeout: float | None = None) -> Coroutine[Any, Any, str]:
        if timeout is not None:  # a name beside *args makes the call twice as long
            return self._guarded(self._connection.execute(query, *args, timeout=timeout))
        if args:
            return self._watched(self._behind.execute(query, *args))  # type: ignore[no-any-return]
        return self._guarded(self._connection.execute(query))

    def executemany(self, command: str, args: Any, *, timeout: float | None = None) -> Coroutine[Any, Any, None]:
        return self._guarded(self._connection.executemany(command, args, timeout=timeout))

    def fetch(self, query: str, *args: Any, **options: Any) -> Coroutine[Any, Any, list[Any]]:
        verb = self._connection.fetch(query, *args, **options)
        return self._watched(verb) if args else self._guarded(verb)

    def fetchrow(self, query: str, *args: Any, **options: Any) -> Coroutine[Any, Any, Any]:
        verb = self._connection.fetchrow(query, *args, **options)
        return self._watched(verb) if args else self._guarded(verb)

    def fetchval(self, query: str, *args: Any, **options: Any) -> Coroutine[Any, Any, Any]:
        verb = self._connection.fetchval(query, *args, **options)
        return self._watched(verb) if args else self._guarded(verb)

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
        self.used = self.is_lent = True
        return getattr(self._connection, name)

    def _watched(self, verb: Any) -> Any:
        if self.is_lent and not self._connection.is_in_transaction():
            self.has_ended = not self._connection.is_closed()
        if self._over or self.has_ended:
            verb.close()
            self.check()
        if type(verb) is not CoroutineType:  # somebody has put something around asyncpg
            return self._guarded(verb)
        self.used = True
        last = self._last
        if last is not None and last.cr_frame is not None:
            self._before.append(last)
        self._last = verb
        return verb

    async def _guarded(self, verb: Coroutine[Any, Any, Any]) -> Any:
        if self._over or self.has_ended:
            verb.close()
            self.check()
        self.used = True
        self._inside += 1
        try:
            return await verb
        finally:
            self._inside -= 1
            if not self._connection.is_in_transaction() and not self._connection.is_closed():
                self.has_ended = True
                self.close_unstarted()
                raise HandlerEndedTransaction
