"""What every PostgreSQL driver does: one session, over a few primitives of the driver.

We send BEGIN and COMMIT ourselves: the claim rides with BEGIN in one trip, and the command tag of COMMIT tells the
truth, which the transaction helpers of all drivers hide (a COMMIT that rolled back returns normally). A token set with
BEGIN, local to the transaction, is tested in the same trip as COMMIT, so a handler that ended the transaction behind
our back is found out by state, not by reading its SQL.
"""

from __future__ import annotations

import itertools
import warnings
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from functools import lru_cache
from operator import itemgetter
from secrets import token_hex
from typing import Any, Generic, NoReturn, TypeVar
from weakref import WeakKeyDictionary

from onceward.errors import (
    CommitNotApplied,
    CommitUnknown,
    HandlerEndedTransaction,
    OncewardError,
    SchemaMissing,
    StoreReadOnly,
    StoreUnavailable,
    TryLater,
    UsageError,
)
from onceward.identity import digest
from onceward.sql import dialect
from onceward.sql.driver import SessionDefaults
from onceward.sql.drivers.guard import Guard
from onceward.sql.drivers.pool_watch import PoolWatch, hold, unhold
from onceward.sql.plan import Result, Statement, gives_rows, inlined, literals, numbered
from onceward.store import Features

Tx = TypeVar("Tx")

_CONFLICTS = {"40001", "40P01"}
_NO_TABLE = {"42P01", "3F000"}
_READ_ONLY = "25006"
_ABORTED = "25P02"
_DIVISION_BY_ZERO = "22012"
_NO_SAVEPOINT = {"3B001", "25P01"}
_NO_STATEMENT = "26000"
_GONE = "OW001"
"""Of our own: what is to be written down is not there, or this is not our transaction."""
_STATEMENT_EXISTS = "42P05"
_AWAY = ("08", "57P")  # connection exceptions; shutdown, crash, cannot connect now

_TOKENS, _numbers = token_hex(8), itertools.count()
"""Each transaction has a token that no other has."""

_LEFT_BEHIND = "the handler left behind a task or a statement that still uses tx; await it before it returns"

LOCATE = Statement(
    "SELECT nspname::text AS schema FROM pg_class JOIN pg_namespace n ON n.oid = relnamespace "
    "WHERE pg_class.oid = to_regclass('onceward_records')"
)
"""The schema of our tables, so that a handler may set another search path."""


_SETTINGS = Statement(
    "SELECT setting::bigint AS idle_limit, current_setting('default_transaction_isolation') AS level "
    "FROM pg_settings WHERE name = 'idle_in_transaction_session_timeout'"
)


class Known:
    """What is known about a connection for as long as it lives."""

    __slots__ = ("begin", "idle_limit", "is_lent", "level", "prepared")

    def __init__(self, server_version: int, *, prepares: bool) -> None:
        # A killed process must not hold its claim until a long statement of its handler ends.
        check = "SET LOCAL client_connection_check_interval = '2s'; " if server_version >= 14 else ""
        self.begin = f"BEGIN ISOLATION LEVEL READ COMMITTED; {check}SET LOCAL onceward.token = "
        """A token has to follow."""
        self.idle_limit: int | None = None
        self.level = ""
        """Of a statement that is not in a transaction of ours."""
        self.is_lent = False
        """A handler has got a verb of the connection itself, and may keep it."""
        self.prepared: set[str] | None = set() if prepares else None
        """The statements that were prepared. None behind a pooler, where it may be another connection each time."""


_known: WeakKeyDictionary[Any, Known] = WeakKeyDictionary()


class PostgresSession(SessionDefaults, ABC, Generic[Tx]):
    """One connection for a unit of work. Drivers fill in the primitives at the end."""

    _token = ""
    _guard: Guard | None = None
    _abandoned = False
    _used = False
    """By handlers, since the last reset."""

    def __init__(self, connection: Any) -> None:
        self._connection = connection
        known = _known.get(connection)
        if known is None:
            known = _known[connection] = Known(self._server_version(), prepares=self._prepares())
        self._known = known

    @property
    def lost(self) -> bool:
        return self.gone and not self._abandoned

    def stands(self) -> bool:
        guard = self._guard
        return guard is not None and not guard.has_ended and not self._abandoned and self._in_transaction()

    claiming: Statement | None = None
    """A transaction of its own, said before the next BEGIN in the same trip."""
    opening: Sequence[Statement] = ()
    """What else is said in the trip of the next BEGIN; its rows are not wanted. COMMIT goes on with it at once."""
    _riding = _released = ""

    idle_limit: float | None = None
    """Seconds that a transaction may be silent: then the server ends it, and whoever froze in it holds nobody up."""

    async def begin(self, first: Statement | None = None) -> Result:
        claiming, opening = self._take_riding()
        if self.gone:
            raise StoreUnavailable("the connection to PostgreSQL was closed")
        self._start(_new_token())
        if self.idle_limit is not None:
            await self._settings()
        trip = self._beginning(self._token)
        if first is None:
            await self._say_begin(trip, claiming, opening)
            return Result((), 0)
        if gives_rows(first.sql):
            await self._say_begin(trip, claiming, opening)
            return await self.execute(first)
        return Result((), count(await self._say_begin(trip, claiming, [*opening, first])))

    def _take_riding(self) -> tuple[Statement | None, Sequence[Statement]]:
        """Whatever becomes of the trip, it is not said again."""
        claiming, opening = self.claiming, self.opening
        self.claiming, self.opening, self._riding, self._released = None, (), "", ""
        return claiming, opening

    def _start(self, token: str) -> None:
        self._token = token
        self._guard = self._new_guard()

    def _beginning(self, token: str) -> str:
        known, begin = self._known, f"{self._known.begin}'{token}'"
        if self.idle_limit is None:
            return begin
        limit = int(self.idle_limit * 1000)  # what is set for the role or the database stays, where it is stricter
        return f"{begin}; SET LOCAL idle_in_transaction_session_timeout = {min(limit, known.idle_limit or limit)}"

    async def _say_begin(self, begin: str, claiming: Statement | None, opening: Sequence[Statement]) -> str:
        """BEGIN and all that rides with it; the tag of the last. As EXECUTE of a prepared statement it costs the server
        half as much."""
        prepared, riding = self._known.prepared, opening if claiming is None else [claiming, *opening]
        if prepared is None:
            return await self._say(_trip(begin, claiming, opening, inlined))
        await self._prepare_all(riding, prepared)
        try:
            return await self._send(_trip(begin, claiming, opening, executing))
        except Exception as error:  # noqa: BLE001 - told apart there
            if getattr(error, "sqlstate", None) != _NO_STATEMENT:
                self._raise(error)
        # A handler said DISCARD ALL or DEALLOCATE ALL. Nothing was done yet.
        await self._say("ROLLBACK")
        prepared.clear()
        await self._prepare_all(riding, prepared)
        return await self._say(_trip(begin, claiming, opening, executing))

    async def _prepare_all(self, statements: Sequence[Statement], prepared: set[str]) -> None:
        for statement in statements:
            if statement.sql not in prepared and statement.params:
                await self._prepare(statement, prepared)

    async def is_plain(self) -> bool:
        """Whether a statement by itself is a transaction of the level that we work at."""
        return (await self._settings()).level == "read committed"

    async def _settings(self) -> Known:
        known = self._known
        if known.idle_limit is None:
            row = (await self.execute(_SETTINGS)).rows[0]
            known.idle_limit, known.level = int(row["idle_limit"]), row["level"]
        return known

    async def _prepare(self, statement: Statement, prepared: set[str]) -> None:
        name, sql, _ = preparable(statement.sql)
        try:
            await self._send(f"PREPARE {name} AS {sql}")
        except Exception as error:  # noqa: BLE001 - told apart there
            if getattr(error, "sqlstate", None) != _STATEMENT_EXISTS:  # a first try that was cancelled
                self._raise(error)
        prepared.add(statement.sql)

    async def execute(self, statement: Statement) -> Result:
        if self._guard is not None and self._guard.running:
            self._guard.close_unstarted()
            if self._guard.running:
                self._refuse_left_behind()
        try:
            return await self._run(statement)
        except Exception as error:  # noqa: BLE001 - told apart there
            if getattr(error, "sqlstate", None) == _NO_STATEMENT:
                self._abandon()  # a handler said DEALLOCATE ALL, and the driver will not notice: use another connection
            self._raise(error)

    async def forget(self) -> None:
        await super().forget()
        guard = self._guard
        if guard is None or guard.has_ended:
            return
        guard.forget()
        if not await guard.is_idle():
            self._abandon()
            raise StoreUnavailable(f"{_LEFT_BEHIND}; its connection was closed")
        # A task that the failed handler left behind must not write in its neighbours' time.
        self._remember(guard)
        guard.end_of_run()
        self._guard = self._new_guard()

    async def script(self, sql: str) -> None:
        await self._say(sql)

    async def _say(self, sql: str) -> str:
        try:
            return await self._send(sql)
        except Exception as error:  # noqa: BLE001 - told apart there
            self._raise(error)

    def _raise(self, error: Exception) -> NoReturn:
        problem = self.translated(error, lost=self.lost)
        if problem is error:
            raise error
        raise problem from error

    async def ended(self) -> bool:
        if self._guard is None or self.gone:
            return False
        ended = self._guard.end_of_run()
        if not await self._guard.is_idle():
            return False
        if ended or not self._in_transaction():
            return not self.gone
        try:
            result = await self._run(Statement(f"SELECT {self._token_stands()} AS stands"))
        except Exception:  # noqa: BLE001 - an error inside of our transaction, or the connection is lost
            return False
        return not result.rows[0]["stands"]

    def _token_stands(self) -> str:
        return f"coalesce(current_setting('onceward.token', true), '') = '{self._token}'"

    def commit(self) -> Awaitable[None]:
        trip, token = self._last_trip()
        if self.lost:
            raise StoreUnavailable("the connection to PostgreSQL was lost before COMMIT; nothing was written")
        guard, self._guard = self._guard, None
        if guard is None:
            raise UsageError("there is no transaction to commit")
        self._remember(guard)
        ended = guard.end_of_run()
        if guard.running:
            self._refuse_left_behind()
        if ended or not self._in_transaction():
            raise HandlerEndedTransaction
        if guard.forgotten:
            warnings.warn("a statement of the handler was never awaited, and has done nothing", RuntimeWarning, 2)
        if guard.broken:
            raise UsageError("two tasks of the handler used tx.transaction() at the same time, and one was not undone")
        return self.to_its_end(self._commit(trip, token))

    def ride(self, statement: Statement, *, after: bool) -> None:
        """Say it in the trip of COMMIT, before it. It looks at our token itself, and an error stops the trip.

        A row that was locked before a savepoint and deleted `after` it has two owners, and PostgreSQL would read over
        it until VACUUM. So the savepoint ends first.
        """
        self._released = "RELEASE onceward_turn; " if after else ""
        self._riding = inlined(Statement(statement.sql, {**statement.params, "token": self._token}))

    def _remember(self, guard: Guard) -> None:
        """What there is to reset, also when this transaction is rolled back and another one begins."""
        self._used = self._used or guard.used
        self._known.is_lent = self._known.is_lent or guard.is_lent

    def _refuse_left_behind(self) -> NoReturn:
        self._abandon()
        raise UsageError(_LEFT_BEHIND)

    def _last_trip(self) -> tuple[str, str]:
        """What is said to end the transaction; and where the next turn begins with it, its token."""
        # 1/0 stops the trip before COMMIT when this is not the transaction that we began.
        check = self._riding or f"SELECT 1 / CASE WHEN {self._token_stands()} THEN 1 ELSE 0 END"
        if self._guard is not None:
            self._remember(self._guard)
        trip = f"{self._released}{check}; {self._ending() if self._used or self._known.is_lent else 'COMMIT'}"
        claiming, opening = self._take_riding()
        if not opening:
            return trip, ""
        token, told = _new_token(), inlined if self._known.prepared is None else executing
        return f"{trip}; {_trip(self._beginning(token), claiming, opening, told)}", token

    async def _commit(self, trip: str, token: str) -> None:
        try:
            tag = await self._send(trip)
        except Exception as error:
            state = getattr(error, "sqlstate", None)
            if state in {_DIVISION_BY_ZERO, _GONE} or state in _NO_SAVEPOINT:
                raise HandlerEndedTransaction from error
            if state == _ABORTED:
                raise CommitNotApplied from error
            if self.lost:
                raise CommitUnknown from error
            raise  # the database refused: a deferred constraint, a serialization failure
        if tag == "ROLLBACK":
            raise CommitNotApplied(f"COMMIT was answered with {tag}: nothing was written")
        self._committed()
        self._used = False
        if token:
            self._start(token)

    async def rollback(self) -> None:
        guard, self._guard = self._guard, None
        if guard is not None:
            self._remember(guard)
            guard.end_of_run()
        # A BEGIN that was cancelled on its way may have begun: what the driver heard last does not tell.
        if not self.gone and (guard is not None or self._in_transaction()):
            await self.to_its_end(self._rollback(guard))

    async def _rollback(self, guard: Guard | None) -> None:
        if guard is not None and not await guard.is_idle():
            self._abandon()
            return
        try:
            await self._send("ROLLBACK")
        except Exception:  # noqa: BLE001 - closing the connection rolls back too
            if not self.gone:
                self._abandon()

    def _abandon(self) -> None:
        """Closing the connection rolls back too."""
        self._abandoned = True
        self._terminate()

    def is_conflict(self, error: BaseException | None) -> bool:
        """Also when the handler wrapped it: SQLAlchemy and others keep the driver's error as cause."""
        seen: set[int] = set()
        while error is not None and id(error) not in seen:
            if getattr(error, "sqlstate", None) in _CONFLICTS:
                return True
            seen.add(id(error))
            error = error.__cause__
        return False

    @staticmethod
    def translated(error: Exception, *, lost: bool = False) -> Exception:
        """The driver's error as onceward's, where the database itself is the trouble."""
        state = getattr(error, "sqlstate", None) or ""
        if state in _NO_TABLE:
            return SchemaMissing()
        if state == _READ_ONLY:
            return StoreReadOnly(f"PostgreSQL is read-only ({error}). Point the inbox at the primary.")
        if state == _ABORTED:
            return CommitNotApplied()
        if state == _GONE:
            text = "a message is gone: a handler removed it, or changed where tables are found"
            return HandlerEndedTransaction(text)
        if state in _NO_SAVEPOINT:
            return HandlerEndedTransaction("a handler has ended the savepoint of its turn")
        if lost or state.startswith(_AWAY) or isinstance(error, OSError):
            return StoreUnavailable(f"PostgreSQL is not available: {error or type(error).__name__}")
        return error

    # --- primitives of the driver -----------------------------------------------------------------------------

    @property
    @abstractmethod
    def tx(self) -> Tx:
        """The handle for the handler."""

    @property
    @abstractmethod
    def gone(self) -> bool: ...

    @abstractmethod
    def _new_guard(self) -> Guard: ...

    @abstractmethod
    def _in_transaction(self) -> bool:
        """What the server said last, also for a transaction that has failed."""

    @abstractmethod
    def _server_version(self) -> int:
        """The major version."""

    @abstractmethod
    def _prepares(self) -> bool:
        """Whether the connection remembers prepared statements. Behind a pooler it may be another one each time."""

    @abstractmethod
    def _send(self, sql: str) -> Coroutine[Any, Any, str]:
        """Several statements without parameters, in one trip. The last command tag."""

    @abstractmethod
    async def _run(self, statement: Statement) -> Result:
        """One statement with parameters."""

    @abstractmethod
    def _terminate(self) -> None: ...

    def _ending(self) -> str:
        """COMMIT, and what may ride with it when handlers have used the connection. It is reached only by a
        transaction that is alive."""
        return "COMMIT"

    def _committed(self) -> None:
        """After that trip, when it came to its end."""


class PostgresDriver(ABC, Generic[Tx]):
    """A pool of ours or of the user's, and sessions on its connections. Drivers fill in the primitives at the end."""

    def __init__(self, given: Any, schema: str | None, watch: PoolWatch) -> None:
        self.features = Features(guards_pool=True, errors_abort=True)
        self.schema = schema
        self.dialect = dialect.postgresql(schema)
        self.watch = watch
        self.marks: dict[Any, Any] = {}
        """Where claims of the queue begin to look."""
        self._given = given
        self._pool: Any = None

    @property
    def pool(self) -> Any:
        if self._pool is None:
            raise StoreUnavailable("the store is not open")
        return self._pool

    async def open(self) -> None:
        make_reads_cheap()
        self._pool = self._given if self._given is not None else await self._create_pool()
        self.watch.attach(self._pool)
        self.dialect = dialect.postgresql(self.schema)
        if self.schema is None:
            await self._locate()

    async def _locate(self) -> None:
        """Name the schema of our tables from now on, so that a handler may set another search path."""
        async with self.session(wait=30.0) as session:
            found = await session.execute(LOCATE)
        if found.rows:
            self.dialect = dialect.postgresql(found.rows[0]["schema"])

    async def close(self) -> None:
        pool, self._pool = self._pool, None
        if pool is None:
            return
        self.watch.detach(pool)
        if self._given is None:
            await self._close_pool(pool)

    def session(self, *, wait: float, read_only: bool = False) -> Connected[Tx]:  # noqa: ARG002
        return Connected(self, wait)

    def not_connected(self, error: Exception, wait: float) -> Exception:
        """Why there is no session."""
        if isinstance(error, self.timeouts):
            text = f"waited {wait:g} s for a connection: all of the pool are in use, or PostgreSQL does not answer"
            return TryLater(reason="store_busy", text=text)
        return PostgresSession.translated(error, lost=True)

    # --- primitives of the driver -----------------------------------------------------------------------------

    timeouts: tuple[type[Exception], ...] = (TimeoutError,)
    """What the pool raises when no connection is free in time."""

    def at_hand(self) -> Any:
        """A connection that need not be waited for, where there is one."""
        return None

    def keeps(self, _connection: Any) -> bool:
        """Whether it is kept at hand for the next unit, and not given back yet."""
        return False

    @abstractmethod
    async def _create_pool(self) -> Any:
        """StoreUnavailable when the server is not there."""

    @abstractmethod
    async def _close_pool(self, pool: Any) -> None: ...

    @abstractmethod
    def session_on(self, connection: Any) -> PostgresSession[Tx]:
        """Around what the watch has acquired."""


class Connected(Generic[Tx]):
    """A session on a connection of the pool; what is left open is rolled back, and the connection given back."""

    __slots__ = ("_connection", "_driver", "_held", "_pool", "_session", "_wait")

    def __init__(self, driver: PostgresDriver[Tx], wait: float) -> None:
        self._driver = driver
        self._wait = wait

    async def __aenter__(self) -> PostgresSession[Tx]:
        driver, watch = self._driver, self._driver.watch
        pool = self._pool = driver.pool
        connection = driver.at_hand()
        if connection is None:
            try:
                # With 0 even a free connection comes too late.
                connection = await watch.acquire(pool, max(self._wait, 0.05))
            except OncewardError:
                raise
            except Exception as error:
                raise driver.not_connected(error, self._wait) from error
        self._connection = connection
        self._held = hold(pool, connection.joinable if watch.joins else None)
        session = self._session = driver.session_on(connection)
        return session

    async def __aexit__(self, *_error: object) -> None:
        try:
            await self._session.rollback()
        finally:
            unhold(self._held)
            if not self._driver.keeps(self._connection):
                await self._driver.watch.release(self._pool, self._connection)


@lru_cache(maxsize=256)
def preparable(sql: str) -> tuple[str, str, Callable[[Mapping[str, Any]], Sequence[Any]]]:
    """A name for it, its text with $1, and what picks its parameters in their order."""
    text, names = numbered(sql)
    pick = itemgetter(*names) if len(names) > 1 else lambda params: [params[name] for name in names]
    return f"onceward_{digest(sql)[:8].hex()}", text, pick


def make_reads_cheap() -> None:
    """asyncio asks for 256 KB at each read. glibc gets such a block from the system and gives it back each time, which
    takes 20 us, until a larger one was freed; then it keeps some at hand. So free one."""
    bytes(1 << 20)


def _new_token() -> str:
    return f"{_TOKENS}{next(_numbers)}"


def _trip(
    begin: str, claiming: Statement | None, opening: Sequence[Statement], told: Callable[[Statement], str]
) -> str:
    if claiming is not None:
        begin = f"BEGIN ISOLATION LEVEL READ COMMITTED; {told(claiming)}; COMMIT; {begin}"
    for statement in opening:
        begin += f"; {told(statement)}"
    return begin


def executing(statement: Statement) -> str:
    if not statement.params:
        return statement.sql
    name, _, pick = preparable(statement.sql)
    return f"EXECUTE {name}({literals(pick(statement.params))})"


def count(tag: str) -> int:
    """The number of rows at the end of a command tag such as INSERT 0 1."""
    last = tag.rpartition(" ")[2]
    return int(last) if last.isdigit() else 0
