"""Joining a transaction of the caller's: a savepoint in it, and nothing else is begun, committed or rolled back."""

from __future__ import annotations

from abc import ABC, abstractmethod
from contextlib import suppress
from secrets import token_hex
from typing import Any
from weakref import WeakKeyDictionary

from onceward.errors import HandlerEndedTransaction, TransactionUnusable, UsageError
from onceward.shield import finish
from onceward.sql.driver import SessionDefaults
from onceward.sql.plan import Result, Statement

FAILED = "the transaction that you gave has failed: roll it back, and begin another one"
NOT_BEGUN = "the connection that you gave is not in a transaction: begin one first, the claim belongs to it"
CLOSED = "the connection that you gave is closed, or was given back to its pool"
ELSEWHERE = (
    "the transaction that you gave is on another database than the inbox's, so the claim would not protect what you "
    "write. Give both the same database."
)

# Connections that are known to be on the database with this token.
_known: WeakKeyDictionary[Any, str] = WeakKeyDictionary()


class SavepointGone(Exception):
    """Our savepoint is not there any more: the caller ended it, or the transaction around it."""


class JoinedSession(SessionDefaults, ABC):
    """What every kind of handle does; the primitives are at the end."""

    lost = gone = False
    dialect: str

    def __init__(self, tx: Any, *, read_only: bool = False) -> None:
        self.tx = tx
        self.read_only = read_only
        self.entered = False
        """Our savepoint is made, and the database is the right one."""
        self._savepoint = ""
        self._vanished = False
        self._token = ""
        self._whose: Statement | None = None

    def expect(self, token: str, whose: Statement) -> None:
        """The right database is the one in which the statement `whose` gives this token."""
        self._token, self._whose = token, whose

    async def begin(self, first: Statement | None = None) -> Result:
        self._check()
        self._savepoint = f"onceward_{token_hex(8)}"  # from now on there may be something to undo
        result = await self._begin(self._savepoint, first)
        self.entered = True
        return result

    async def _begin(self, savepoint: str, first: Statement | None) -> Result:
        await self._enter(savepoint)
        await self.check_database()
        return await self.execute(first) if first is not None else Result((), 0)

    async def check_database(self) -> None:
        if self.is_known:
            return
        found = await self.execute(self._whose) if self._whose is not None else Result((), 0)
        if not found.rows or found.rows[0]["token"] != self._token:
            raise TransactionUnusable(ELSEWHERE)
        with suppress(TypeError):  # it cannot be referred to weakly: ask each time
            _known[self._connection()] = self._token

    @property
    def is_known(self) -> bool:
        """Whether this connection was asked before which database it is on."""
        with suppress(TypeError):
            return _known.get(self._connection()) == self._token
        return False

    async def script(self, _sql: str) -> None:
        raise UsageError("scripts do not run in a transaction of the caller's")

    async def commit(self) -> None:
        """The end of our savepoint; the caller's COMMIT is the caller's."""
        self.check_stands()
        await finish(self._ended(self._savepoint))
        self._savepoint = ""

    async def _ended(self, savepoint: str) -> None:
        try:
            await self._release(savepoint)
        except SavepointGone as gone:
            raise HandlerEndedTransaction from gone.__cause__

    async def rollback(self) -> None:
        savepoint, self._savepoint = self._savepoint, ""
        if savepoint:
            await finish(self._undo_quietly(savepoint))

    async def _undo_quietly(self, savepoint: str) -> None:
        if self.entered and not self._in_transaction():
            self._vanished = True
            return
        try:
            await self._undo(savepoint)
        except SavepointGone:
            self._vanished = True
        except Exception:  # noqa: BLE001, S110 - lost, or over: nothing of ours is left in it
            pass

    async def ended(self) -> bool:
        """To undo it is to find out."""
        await self.rollback()
        if self._vanished and self._in_transaction():
            raise HandlerEndedTransaction("the transaction was ended inside of the block, and another one begun")
        return self._vanished

    def check_stands(self) -> None:
        if self.entered and not self._in_transaction():
            raise HandlerEndedTransaction

    def is_conflict(self, _error: BaseException) -> bool:
        return False  # the caller's transaction has to be run again, by the caller

    # --- primitives -------------------------------------------------------------------------------------------

    async def prepare(self) -> None:
        """Find out which dialect it is."""

    def _check(self) -> None:
        """TransactionUnusable, where that is known without asking the database."""

    def _connection(self) -> Any:
        """The object that stands for the physical connection."""
        return self.tx

    @abstractmethod
    def _in_transaction(self) -> bool:
        """Whether the handle is in a transaction now: ours, or another one."""

    @abstractmethod
    async def execute(self, statement: Statement) -> Result: ...

    @abstractmethod
    async def _enter(self, savepoint: str) -> None: ...

    @abstractmethod
    async def _release(self, savepoint: str) -> None: ...

    @abstractmethod
    async def _undo(self, savepoint: str) -> None: ...
