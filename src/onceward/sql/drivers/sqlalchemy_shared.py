"""Sessions of repositories on the connection that a handler has.

Each of them gets a Connection of its own, whose transactions are savepoints: `commit()` keeps what it wrote as part of
the handler's transaction, `rollback()` and a `close()` without commit undo it. Savepoints are a stack and sessions are
not: they may be open at the same time and end in any order. So a ledger knows the order of the writes and whose they
are. Undoing the writes of one must never take those of another with it; where it would, that is an error.
"""

from __future__ import annotations

import re
from secrets import token_hex
from typing import Any
from weakref import WeakKeyDictionary, ref

from sqlalchemy import Connection, event
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncSession
from sqlalchemy.orm import Session

from onceward.errors import UsageError
from onceward.sql.drivers.pool_watch import Hold

_READS = re.compile(r"\s*(SELECT|WITH|VALUES|SHOW|EXPLAIN|PRAGMA|SAVEPOINT|RELEASE|ROLLBACK TO)\b", re.IGNORECASE)
_WRITES = re.compile(r"\b(INSERT|(?<!FOR )(?<!NO KEY )UPDATE|DELETE|MERGE|INTO)\b", re.IGNORECASE)


class Frame:
    """A savepoint, from the moment it is made until it is released."""

    def __init__(self, owner: str, began: int) -> None:
        self.name = f"onceward_{token_hex(8)}"
        self.owner = owner
        self.began = began
        """How many writes there were before."""
        self.open = True


class Ledger:
    """Who wrote what on one connection while sessions share it."""

    def __init__(self, main: Connection) -> None:
        self._main = ref(main)  # it is what keeps the ledger
        self._frames: list[Frame] = []
        self._writers: list[str] = []
        self._broken = ""
        self.watch(main)

    def watch(self, connection: Connection) -> str:
        """Notice its writes, under the name that this gives: nothing here must keep the connection alive."""
        owner = token_hex(8)

        def before(_connection: Any, _cursor: Any, statement: str, *_: Any) -> None:
            if self._frames and (_WRITES.search(statement) or not _READS.match(statement)):
                self._writers.append(owner)

        event.listen(connection, "before_cursor_execute", before)
        return owner

    def _execute(self, sql: str) -> None:
        main = self._main()
        if main is None:
            raise UsageError("the connection that this session shares is gone")
        main.exec_driver_sql(sql)

    def make(self, owner: str) -> Frame:
        frame = Frame(owner, len(self._writers))
        self._frames.append(frame)  # before it is sent: what another task sends meanwhile comes after it
        try:
            self._execute(f"SAVEPOINT {frame.name}")
        except BaseException:
            self._frames.remove(frame)
            raise
        return frame

    def keep(self, frame: Frame) -> None:
        if frame not in self._frames:
            raise UsageError("what this session wrote is gone: the transaction that it was part of has ended")
        frame.open = False
        self._release()

    def undo(self, frame: Frame) -> None:
        if not frame.open or frame not in self._frames:
            return
        since = self._writers[frame.began :]
        of_others = any(writer != frame.owner for writer in since)
        if of_others and frame.owner in since:
            self._broken = (
                "a session was rolled back, or closed without commit, and others have written since it began: its "
                "writes cannot be undone without theirs. End the inner one first, or use one session for both."
            )
            raise UsageError(self._broken)
        if not of_others:
            del self._writers[frame.began :]
            self._execute(f"ROLLBACK TO {frame.name}")
            for above in self._frames[self._frames.index(frame) + 1 :]:  # those went too; they had written nothing
                self._execute(f"SAVEPOINT {above.name}")
                above.began = frame.began
        frame.open = False
        self._release()

    def _release(self) -> None:
        """A savepoint that is done is released when none is above it, or those would go with it."""
        while self._frames and not self._frames[-1].open:
            self._execute(f"RELEASE {self._frames[-1].name}")
            self._frames.pop()
        if not self._frames:
            self._writers.clear()

    def mark(self) -> tuple[int, str]:
        return len(self._frames), self._broken

    def undone_to(self, mark: tuple[int, str]) -> None:
        """What was around all of this has been rolled back."""
        frames, self._broken = mark
        del self._frames[frames:]

    def ended(self) -> None:
        """The whole transaction has, one way or the other."""
        self.undone_to((0, ""))
        self._writers.clear()

    def check(self) -> None:
        """Whether what is there now may be committed."""
        if self._broken:
            raise UsageError(self._broken)
        if any(frame.open and frame.owner in self._writers[frame.began :] for frame in self._frames):
            raise UsageError("a session that has written is still open: commit it, or close it, before the end")


_ledgers: WeakKeyDictionary[Connection, Ledger] = WeakKeyDictionary()
_sessions: WeakKeyDictionary[Connection, ref[Session]] = WeakKeyDictionary()


def shared_by(main: AsyncConnection, session: AsyncSession) -> None:
    """This is the session whose connection others may share."""
    if main.sync_connection is not None:
        _sessions[main.sync_connection] = ref(session.sync_session)


class SharedConnection(Connection):
    """A connection for one session, on the database connection of another. Its transactions are savepoints there.

    The five methods are SQLAlchemy's own seam between a Connection and its dialect.
    """

    def __init__(self, main: Connection, held: Hold) -> None:
        ledger = _ledgers.get(main)
        if ledger is None:
            ledger = _ledgers[main] = Ledger(main)
        self._ledger = ledger
        self._held = held
        self._main = ref(main)
        self._root: Frame | None = None
        self._nested: dict[str, Frame] = {}
        super().__init__(main.engine, connection=main.connection)
        self._owner = ledger.watch(self)
        event.listen(self, "before_execute", self._check)

    def _check(self, *_: Any) -> None:
        if not self._held.active:
            raise UsageError("this session was opened inside of a handler that is over; open another one")

    def _begin_impl(self, transaction: Any) -> None:  # noqa: ARG002
        self._check()
        self._send_savepoints()
        self._root = self._ledger.make(self._owner)

    def _send_savepoints(self) -> None:
        """A session sends the SAVEPOINT of its begin_nested() only when it needs it. This is to be inside of it."""
        main = self._main()
        session = _sessions.get(main) if main is not None else None
        owner = session() if session is not None else None
        if owner is not None and owner.in_nested_transaction():
            owner.connection()

    def _commit_impl(self) -> None:
        self._check()
        if self._root is not None:
            self._ledger.keep(self._root)

    def _rollback_impl(self) -> None:
        if self._root is not None and self._held.active:
            self._ledger.undo(self._root)

    def _savepoint_impl(self, name: str | None = None) -> str:  # noqa: ARG002
        self._check()
        frame = self._ledger.make(self._owner)
        self._nested[frame.name] = frame
        return frame.name

    def _rollback_to_savepoint_impl(self, name: str) -> None:
        if self._held.active:
            self._ledger.undo(self._nested.pop(name))

    def _release_savepoint_impl(self, name: str) -> None:
        self._check()
        self._ledger.keep(self._nested.pop(name))


def shared(held: Hold) -> AsyncConnection:
    """A connection for a session that joins."""
    main: AsyncConnection = held.connection
    if main.sync_connection is None:
        raise UsageError("the handler's connection is closed")
    return AsyncConnection(main.engine, SharedConnection(main.sync_connection, held))


def ledger_of(main: AsyncConnection) -> Ledger | None:
    return None if main.sync_connection is None else _ledgers.get(main.sync_connection)


def check_shared(main: AsyncConnection) -> None:
    """UsageError: sessions that share this connection have left it in a state that must not be committed."""
    ledger = ledger_of(main)
    if ledger is not None:
        ledger.check()
