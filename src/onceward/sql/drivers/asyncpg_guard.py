"""The handle that stands between a handler and asyncpg."""

from __future__ import annotations

from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager, suppress
from typing import Any

import asyncpg

from onceward.errors import HandlerEndedTransaction, UsageError
from onceward.sql.drivers.postgresql import Guard

_ENDS_CONNECTION = {"close", "terminate", "reset"}


class GuardedConnection(Guard):
    """An asyncpg connection inside the inbox's transaction, as the handler sees it.

    Everything of a connection is there. `transaction()` makes a savepoint; after each verb the driver is asked
    whether the transaction still stands, and when it does not, HandlerEndedTransaction is raised.
    """

    used = False
    _savepoints = 0

    def __init__(self, connection: asyncpg.Connection) -> None:
        self._connection = connection

    # Not async: each would be one more coroutine around the one that does the work.

    def execute(self, query: str, *args: Any, timeout: float | None = None) -> Coroutine[Any, Any, str]:
        if timeout is None:  # as nearly always: a name beside *args makes the call twice as long
            return self._guarded(self._connection.execute(query, *args))
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
        self.used = True
        return getattr(self._connection, name)

    async def _guarded(self, verb: Coroutine[Any, Any, Any]) -> Any:
        # `enter` and `leave`, said here: two calls less for each statement of a handler.
        if self._over or self.has_ended:
            verb.close()
            self.check()
        self.used = True
        self.running += 1
        try:
            return await verb
        finally:
            self.running -= 1
            if self._idle is not None or not self._connection.is_in_transaction():
                self._tell(stands=self._connection.is_in_transaction() or self._connection.is_closed())
