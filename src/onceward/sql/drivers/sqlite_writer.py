"""The one writer of a SQLite database in this process: turns, groups and the thread that waits for the disk.

SQLite has a single write lock, and a commit costs an fsync. So units of work take turns on one connection, each
in a savepoint of a shared transaction, and are acknowledged together after the group's COMMIT: when nobody comes
any more, or when the group is full. Short statements run on the event loop's thread, where they cost
microseconds; only COMMIT, which waits for the disk, goes to a thread. BEGIN IMMEDIATE never blocks: while another
process has the lock it is tried again every few milliseconds, which is also fairer than SQLite's own waiting.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import sqlite3
import time
from concurrent.futures import Future, ThreadPoolExecutor
from contextvars import ContextVar
from secrets import token_hex
from typing import NoReturn

from onceward.errors import NestedProcess, StoreReadOnly, StoreUnavailable, TryLater
from onceward.shield import wait_out
from onceward.sql.drivers.sqlite_line import Line, was_closed
from onceward.store import Conflict

GROUP = 100
"""Units of work that share one COMMIT, at the most."""

AGE = 0.02
"""Seconds after which a group is committed before the turn goes on, so that slow handlers make small groups."""

CLOSING = 10.0
"""Seconds that closing waits for the handler whose turn it is."""

MINIMUM = (3, 35, 0)

_BUSY = {sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED}
_READ_ONLY = {sqlite3.SQLITE_READONLY}
_AWAY = {
    sqlite3.SQLITE_CANTOPEN, sqlite3.SQLITE_IOERR, sqlite3.SQLITE_FULL, sqlite3.SQLITE_CORRUPT,
    sqlite3.SQLITE_NOTADB, sqlite3.SQLITE_PERM,
}  # fmt: skip

# Settings of the connection that would outlast the handler which makes them.
_SETTINGS = {
    "busy_timeout", "foreign_keys", "journal_mode", "locking_mode", "query_only", "synchronous", "wal_autocheckpoint",
}  # fmt: skip

# The writer whose turn this task, or the task that started it, is having.
_turn_of: ContextVar[Turn | None] = ContextVar("onceward_sqlite_turn", default=None)


def primary_code(error: BaseException) -> int:
    return getattr(error, "sqlite_errorcode", 0) & 0xFF


def translated(error: sqlite3.Error, path: str) -> Exception:
    """SQLite's error as onceward's, where the database itself is the trouble."""
    code = primary_code(error)
    if code in _BUSY:
        return TryLater(reason="store_busy", text=f"{path} is held by another process: {error}")
    if code in _READ_ONLY:
        return StoreReadOnly(f"{path} cannot be written ({error}). Check the file's and its folder's permissions.")
    if code in _AWAY:
        return StoreUnavailable(f"{path} cannot be used: {error}. Check that the folder exists and the disk has room.")
    return error


def raise_translated(error: sqlite3.Error, path: str) -> NoReturn:
    problem = translated(error, path)
    if problem is error:
        raise error
    raise problem from error


class Group:
    """Units that are committed together. What their COMMIT says is told to each."""

    def __init__(self) -> None:
        self.size = 0
        self.began = time.monotonic()
        self.committing = False
        self.doom: Exception | None = None
        """Why the members have to run again, when one of them ended the transaction for all."""
        self._settled = False
        self._error: Exception | None = None
        self._waiting: list[asyncio.Future[None]] = []

    def done(self) -> asyncio.Future[None]:
        """Ends when the COMMIT did, or fails as it did. Each who waits has one of its own, which may be cancelled."""
        mine: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        if self._settled:
            _tell(mine, self._error)
        else:
            self._waiting.append(mine)
        return mine

    def settle(self, error: Exception | None) -> None:
        if not self._settled:
            self._settled, self._error = True, error
            for waiting in self._waiting:
                _tell(waiting, error)


def _tell(waiting: asyncio.Future[None], error: Exception | None) -> None:
    if waiting.done():
        return
    if error is None:
        waiting.set_result(None)
    else:
        waiting.set_exception(error)


class Turn:
    """The right to use the writer's connection, from `take` to `give`."""

    __slots__ = ("active", "outer", "writer")

    def __init__(self, writer: Writer, outer: Turn | None) -> None:
        self.writer = writer
        self.outer = outer
        self.active = True
        _turn_of.set(self)

    def is_inside(self, writer: Writer) -> bool:
        """Whether this turn, or one around it, is a turn on the same database."""
        same = self.writer is writer or (self.writer.path == writer.path != ":memory:")
        return (self.active and same) or (self.outer is not None and self.outer.is_inside(writer))


class Writer:
    def __init__(self, path: str) -> None:
        self.path = path
        self.connection: sqlite3.Connection
        self.cursor: sqlite3.Cursor
        """For our own statements, whose rows are read at once: a new one for each costs as much as a savepoint. It
        gives tuples, because a Row looks for each name from the first column on."""
        # Our own statements carry a secret, so that a handler's "COMMIT" is never served from the statement cache,
        # where the authorizer would not see it.
        self.secret = token_hex(8)
        self.guarding = False
        self.refused_setting = False
        self.closed = False
        self.savepoint = f"SAVEPOINT onceward_{self.secret}"
        self.release = f"RELEASE onceward_{self.secret}"
        self.undo = f"ROLLBACK TO onceward_{self.secret}"
        self._begin = f"BEGIN IMMEDIATE /* {self.secret} */"
        self._commit = f"COMMIT /* {self.secret} */"
        self._rollback = f"ROLLBACK /* {self.secret} */"
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="onceward-sqlite")
        self._line = Line(path)
        self._group: Group | None = None
        self._looking = False
        """Whether it is going to be looked whether anybody has come."""
        self._crowded = False
        """The last group had several members."""
        self._coming = 0
        """How many are about to ask for a turn."""
        self._alone = 0
        """How many of the next groups have one member only, to find the one whose commit is refused."""

    # --- life -----------------------------------------------------------------------------------------------

    async def open(self) -> None:
        if sqlite3.sqlite_version_info < MINIMUM:
            raise StoreUnavailable(f"SQLite {sqlite3.sqlite_version} is too old; onceward needs 3.35 or later")
        loop = asyncio.get_running_loop()
        self.connection = await loop.run_in_executor(self._thread, self._connect)
        self.cursor = self.connection.cursor()
        self.cursor.row_factory = None

    def _connect(self) -> sqlite3.Connection:
        try:
            connection = connect(self.path)
            try:
                _set_up(connection)
            except BaseException:
                connection.close()
                raise
        except sqlite3.Error as error:
            raise_translated(error, self.path)
        connection.set_authorizer(self._authorize)
        return connection

    async def close(self) -> None:
        if hasattr(self, "connection"):
            with contextlib.suppress(TryLater):  # a handler that does not end is left without its connection
                await self._drain()
            self.closed = True
            self._line.close()
            if self._group is not None:
                self._group.settle(was_closed(self.path))
            self.connection.close()
        self._thread.shutdown(wait=False)

    async def _drain(self) -> None:
        """Wait for the turn, and commit what was done before."""
        await self._line.enter(CLOSING)
        self._line.close()
        group = self._group
        if group is not None:
            self._commit_group()
            with contextlib.suppress(Exception):
                await wait_out(group.done())

    def _authorize(self, action: int, one: str | None, two: str | None, _db: str | None, _by: str | None) -> int:
        """While a handler runs, nobody but us begins or ends a transaction or touches our savepoint."""
        if not self.guarding:
            return sqlite3.SQLITE_OK
        ours = action == sqlite3.SQLITE_SAVEPOINT and two is not None and self.secret in two
        self.refused_setting = action == sqlite3.SQLITE_PRAGMA and one in _SETTINGS and two is not None
        if action == sqlite3.SQLITE_TRANSACTION or ours or self.refused_setting:
            return sqlite3.SQLITE_DENY
        return sqlite3.SQLITE_OK

    # --- turns ----------------------------------------------------------------------------------------------

    async def take(self, wait: float) -> Turn:
        """Wait for the turn, then for the write lock. TryLater(store_busy) when that takes too long."""
        outer = self._turn_around()
        if self._crowded or self._coming:
            # Those who come together first do all that comes before their turns, and then have their turns one after
            # another. Mixed, our code and SQLite's drive each other out of the processor's caches.
            self._coming += 1
            try:
                await asyncio.sleep(0)
            finally:
                self._coming -= 1
        if self._group is None or not self._line.try_enter():
            await self._wait_for_turn(wait)
        return Turn(self, outer)

    def _turn_around(self) -> Turn | None:
        """That of a handler on another database which we are called in."""
        outer = _turn_of.get()
        while outer is not None and not outer.active:
            outer = outer.outer  # it is over, and must not be kept alive
        if outer is not None and outer.is_inside(self):
            raise NestedProcess
        return outer

    async def _wait_for_turn(self, wait: float) -> None:
        deadline = time.monotonic() + wait
        try:
            await self._line.enter(wait)
        except BaseException:
            if not self._line.busy:  # it may have been the next
                self._pass_on()
            raise
        try:
            if self._group is None:
                await self._begin_group(deadline)
        except BaseException:
            self._pass_on()
            raise

    def give(self, turn: Turn) -> None:
        """End a turn."""
        turn.active = self.guarding = False
        self._pass_on()

    def _pass_on(self) -> None:
        """The turn goes to the next, or to the COMMIT: when the group is full, or soon, when nobody waits."""
        line, group = self._line, self._group
        line.busy = line.committing = False
        if group is not None and (not self.alive or self._is_full(group)):
            self._commit_group()
        elif line.waiting:
            line.wake()
        elif group is not None and not group.size:
            self._commit_group()  # nobody is going to wait for it, so the lock is given back now
        elif group is not None and not self._looking:
            self._look_soon()

    def _commit_if_idle(self) -> None:
        """Those who were acknowledged together bring their next messages one after another, in one round of the event
        loop. So the COMMIT begins after a round in which nobody came."""
        self._looking = False
        if self._group is None or self._line.busy or self._line.waiting:
            return
        if self._coming:
            self._look_soon()
        else:
            self._commit_group()

    def _look_soon(self) -> None:
        self._looking = True
        asyncio.get_running_loop().call_soon(self._commit_if_idle)

    def _is_full(self, group: Group) -> bool:
        limit = 1 if self._alone else GROUP
        return group.size >= limit or (group.size > 0 and time.monotonic() - group.began > AGE)

    # --- groups ---------------------------------------------------------------------------------------------

    @property
    def alive(self) -> bool:
        """False after close, and when SQLite rolled the transaction back by itself: the disk is full or fails."""
        return not self.closed and self.connection.in_transaction

    def join_group(self, turn: Turn) -> Group:
        """End the turn of a unit that just released its savepoint into the open group."""
        group = self._group
        assert group is not None  # noqa: S101 - a turn always has a group
        group.size += 1
        self.give(turn)
        return group

    def uncommitted(self) -> Group | None:
        """The open group, if units that are not committed yet have written in it."""
        return self._group if self._group is not None and self._group.size else None

    async def wait_for(self, group: Group) -> None:
        """Until the group is committed. A cancellation is heard at once while neighbours still work, and after the
        COMMIT once that has begun; the effect stands either way, and the next delivery is a duplicate."""
        try:
            await group.done()
        except asyncio.CancelledError:
            if group.committing:
                with contextlib.suppress(Exception):
                    await wait_out(group.done())
            raise

    def doom_group(self, reason: Exception) -> None:
        """A handler made SQLite roll the whole transaction back: the members before it have to run again."""
        if self._group is not None:
            self._group.doom = reason

    async def _begin_group(self, deadline: float) -> None:
        pause = 0.0005
        while True:
            try:
                self.connection.execute(self._begin)
                break
            except sqlite3.Error as error:
                if primary_code(error) not in _BUSY or time.monotonic() >= deadline:
                    raise_translated(error, self.path)
            await asyncio.sleep(pause * (0.5 + random.random()))  # noqa: S311 - jitter
            pause = min(pause * 2, 0.002)  # short: the gap between two groups of another process is
        self._group = Group()

    def _commit_group(self) -> None:
        """Commit in the thread; the turn goes on when that has ended.

        Not a task: asyncio.run() cancels every task at its end, and this has to end by itself, or the members of
        the group would wait for it for ever.
        """
        group, self._group = self._group, None
        self._line.busy = self._line.committing = True
        assert group is not None  # noqa: S101 - only called with an open group
        loop = asyncio.get_running_loop()

        def ended(commit: Future[None]) -> None:
            with contextlib.suppress(RuntimeError):  # the loop is closed: nobody is left to tell
                loop.call_soon_threadsafe(self._committed, group, commit.exception())

        group.committing = True
        self._crowded = group.size > 1
        if group.size and self.alive:
            self._thread.submit(self._execute, self._commit).add_done_callback(ended)
        elif self.alive:
            self.connection.execute(self._rollback)  # nobody wrote anything
            self._committed(group, None)
        else:
            full = StoreUnavailable(f"{self.path} ended the transaction; the disk may be full")
            self._committed(group, group.doom or full)

    def _committed(self, group: Group, error: BaseException | None) -> None:
        self._alone = max(0, self._alone - 1)
        if error is not None:
            self._abandon()
        if isinstance(error, sqlite3.IntegrityError) and group.size > 1:
            # A deferred constraint of one of them. Each runs again on its own, and then it is known whose.
            self._alone = group.size
            error = Conflict("a neighbour's commit was refused")
        self._pass_on()  # first: who waits goes on before those who are acknowledged now come with their next message
        group.settle(None if error is None else _not_committed(error, self.path))

    def _abandon(self) -> None:
        with contextlib.suppress(sqlite3.Error):
            if self.alive:
                self.connection.execute(self._rollback)

    def _execute(self, sql: str) -> None:
        self.connection.execute(sql)


def _not_committed(error: BaseException, path: str) -> Exception:
    problem = translated(error, path) if isinstance(error, sqlite3.Error) else error
    if isinstance(problem, (StoreUnavailable, TryLater, Conflict, sqlite3.IntegrityError)):
        return problem
    unavailable = StoreUnavailable(f"the commit failed: {error}")
    unavailable.__cause__ = error
    return unavailable


def connect(path: str, *, timeout: float = 10.0) -> sqlite3.Connection:
    connection = sqlite3.connect(
        path, timeout=timeout, isolation_level=None, check_same_thread=False, cached_statements=512
    )
    connection.row_factory = sqlite3.Row
    return connection


def _set_up(connection: sqlite3.Connection) -> None:
    """WAL, so that readers never wait; FULL, so that an acknowledged message survives a power cut."""
    deadline = time.monotonic() + 10.0
    while True:
        try:
            connection.execute("PRAGMA journal_mode = WAL")
            break
        except sqlite3.OperationalError as error:
            # Switching to WAL needs the file alone, and does not wait by itself while other processes open it.
            if primary_code(error) not in _BUSY or time.monotonic() >= deadline:
                raise
            time.sleep(0.01)
    connection.execute("PRAGMA synchronous = FULL")
    connection.execute("PRAGMA foreign_keys = ON")
    connection.execute("PRAGMA temp_store = MEMORY")  # what a savepoint would undo is kept here, and not in a file
    connection.execute("PRAGMA busy_timeout = 0")  # from here on the writer does the waiting
