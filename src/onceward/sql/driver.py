"""What a driver does: run statements in transactions of one connection, and tell the truth about them."""

from __future__ import annotations

from collections.abc import Awaitable, Coroutine
from contextlib import AbstractAsyncContextManager
from typing import Any, Protocol, TypeVar

from onceward.shield import finish
from onceward.sql.dialect import Dialect
from onceward.sql.plan import Result, Statement
from onceward.store import Features

Tx_co = TypeVar("Tx_co", covariant=True)
T = TypeVar("T")


class Session(Protocol[Tx_co]):
    """One connection, for as long as a unit needs it. Commit and rollback end before a cancellation is heard."""

    @property
    def tx(self) -> Tx_co:
        """The handle for the handler of the transaction that is open."""

    @property
    def lost(self) -> bool:
        """The connection, or the transaction, was lost by no fault of the handler's."""

    @property
    def gone(self) -> bool:
        """The connection cannot be used any more, whoever ended it."""

    @property
    def goes_on(self) -> bool:
        """Whether a transaction can begin in the trip that ends another, with nothing left of that."""

    async def begin(self, first: Statement | None = None) -> Result:
        """Begin a transaction, with its first statement in the same trip where the driver can."""

    async def execute(self, statement: Statement) -> Result: ...

    def stands(self) -> bool:
        """What is known without asking: the transaction is open, and is the one that we began."""

    async def script(self, sql: str) -> None:
        """Several statements, without parameters."""

    async def ended(self) -> bool:
        """Whether the open transaction is not the one that we began."""

    def commit(self) -> Awaitable[None]:
        """COMMIT, and prove it. See Unit.commit."""

    async def rollback(self) -> None:
        """Safe to call at any time, also twice."""

    def is_conflict(self, error: BaseException) -> bool: ...

    def to_its_end(self, work: Coroutine[Any, Any, T]) -> Awaitable[T]:
        """Await work on this session that must not be cancelled: a cancellation is heard after it."""

    async def flush(self) -> None:
        """What the handle has not sent yet is sent. HandlerEndedTransaction: it was rolled back."""

    async def forget(self) -> None:
        """The transaction goes back to a savepoint: so does the handle, which may be another one after this."""


class SessionDefaults:
    """Of a session whose handle sends everything at once, and whose work may be a task of its own."""

    goes_on = False

    def stands(self) -> bool:
        return True

    def to_its_end(self, work: Coroutine[Any, Any, T]) -> Awaitable[T]:
        return finish(work)

    async def flush(self) -> None:
        pass

    async def forget(self) -> None:
        pass


class Driver(Protocol[Tx_co]):
    @property
    def dialect(self) -> Dialect: ...

    @property
    def features(self) -> Features: ...

    @property
    def schema(self) -> str | None:
        """The schema that the user asked for; `setup` makes it."""

    async def open(self) -> None: ...

    async def close(self) -> None: ...

    def session(self, *, wait: float, read_only: bool = False) -> AbstractAsyncContextManager[Session[Tx_co]]:
        """`wait` bounds waiting for a connection or a turn; `read_only` need not wait for writers."""
