"""SqlStore: the store protocol over any driver and dialect."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from datetime import datetime
from typing import Any, Generic, TypeVar

from onceward.errors import CommitUnknown, HandlerEndedTransaction, OncewardError
from onceward.identity import Identity
from onceward.message import Position
from onceward.queue import Begun, Claiming, KeptLine, LaneClaim, Queued, QueueLine, Share, Taken, TurnClosing, Unmet
from onceward.record import Change, Failure, Record, State, from_states
from onceward.shield import LoopLock, finish
from onceward.sql import queue_postgresql, queue_rows, queue_sqlite, queue_stats, upkeep, verbs
from onceward.sql.catalog import migrations
from onceward.sql.dialect import DIALECTS, Dialect, quoted
from onceward.sql.driver import Driver, Session
from onceward.sql.joined import joined
from onceward.sql.plan import Plan, Result, Statement, inlined, run
from onceward.stats import QueueStats, Stats
from onceward.store import (
    Begin,
    Claims,
    Closing,
    Done,
    Features,
    Found,
    InFlight,
    Sweepable,
    SweptBatch,
)

Tx = TypeVar("Tx")
T = TypeVar("T")

QUEUES: dict[str, Any] = {"postgresql": queue_postgresql, "sqlite": queue_sqlite}
"""The plans of the queue, by dialect."""
PATIENCE = (1.0, 2.0, 4.0, 8.0, 16.0, None)
"""Seconds that a migration waits for a lock; at last, for as long as it takes."""
LOCK_NOT_AVAILABLE = "55P03"


class SqlStore(Generic[Tx]):
    """Opened once for each inbox that shares it; the last to close it closes the driver."""

    def __init__(self, driver: Driver[Tx]) -> None:
        self._driver = driver
        self._users = 0
        self._token = ""
        self._opening = LoopLock()

    @property
    def features(self) -> Features:
        return self._driver.features

    async def open(self) -> None:
        async with self._opening.of_this_loop():
            if self._users == 0:
                await self._open()
            self._users += 1

    async def _open(self) -> None:
        try:
            await self._driver.open()
            if self.features.automatic_setup:
                await self._migrate()
            async with self._driver.session(wait=30.0) as session:
                await _transaction(session, verbs.check_version(self._driver.dialect))
                self._token = await _transaction(session, verbs.token(self._driver.dialect))
        except BaseException:
            await finish(self._driver.close())
            raise

    async def close(self) -> None:
        async with self._opening.of_this_loop():
            self._users = max(0, self._users - 1)
            if self._users == 0:
                await finish(self._driver.close())

    async def setup(self) -> None:
        """Make or upgrade the tables. Safe with many instances starting at once; the store need not be open."""
        await self._opened(self._migrate)

    async def stamp(self) -> None:
        """Mark tables that another migration tool has made as ours, up to date; see `onceward stamp`."""
        await self._opened(self._stamp)

    async def _opened(self, work: Callable[[], Awaitable[None]]) -> None:
        async with self._opening.of_this_loop():
            if self._users:
                await work()
                return
            try:
                await self._driver.open()
                await work()
            finally:
                await finish(self._driver.close())

    async def _migrate(self) -> None:
        """A migration waits for handlers at work, and whoever writes meanwhile waits for the migration: so it waits
        briefly at first, and lets them go on before it tries again."""
        for patience in PATIENCE:
            try:
                await self._migrate_within(patience)
                return
            except Exception as error:
                if patience is None or getattr(error, "sqlstate", None) != LOCK_NOT_AVAILABLE:
                    raise
            await asyncio.sleep(patience)

    async def _migrate_within(self, patience: float | None) -> None:
        dialect = self._driver.dialect
        async with self._driver.session(wait=30.0) as session:
            try:
                await session.begin()
                if self._driver.schema is not None:
                    await session.script(f"CREATE SCHEMA IF NOT EXISTS {quoted(self._driver.schema)}")
                for migration in await run(verbs.pending_migrations(dialect), session.execute):
                    await session.script(_patient(dialect, patience) + _placed(dialect.schema) + migration.sql)
                    await run(verbs.migrated(dialect, migration), session.execute)
                await session.commit()
            finally:
                await session.rollback()

    async def _stamp(self) -> None:
        dialect = self._driver.dialect
        async with self._driver.session(wait=30.0) as session:
            try:
                await session.begin()
                if dialect.schema is not None:
                    await session.script(_placed(dialect.schema))
                for statement in await run(upkeep.stamp(dialect), session.execute):
                    await session.script(statement)
                await session.commit()
            finally:
                await session.rollback()

    def unit(
        self, *, begin: Begin[Tx] | None = None, wait: float = 5.0, read_only: bool = False
    ) -> AbstractAsyncContextManager[SqlUnit[Tx]]:
        return SqlUnit(self._driver, begin, wait, read_only=read_only)

    @asynccontextmanager
    async def listening(self, consumer: str, ring: Callable[[], None]) -> AsyncIterator[None]:
        if not self.features.listens:
            yield
            return
        driver: Any = self._driver  # of PostgreSQL
        async with driver.listening(queue_postgresql.channel(driver.dialect, consumer), ring):
            yield

    @asynccontextmanager
    async def join(
        self, tx: Any, *, begin: Begin[Any] | None = None, read_only: bool = False
    ) -> AsyncIterator[SqlUnit[Any]]:
        dialect = self._driver.dialect
        session = await joined(tx, dialect.name, read_only=read_only)
        session.expect(self._token, dialect("schema_token"))
        unit: SqlUnit[Any] = SqlUnit(self._driver, begin, 0.0, joined=session)
        try:
            yield unit
        finally:
            await unit.rollback()


def schema(dialect: str, version: int | None = None) -> str:
    """The whole schema as SQL text, as `onceward setup` would apply it; or as it was with an older version."""
    known = DIALECTS[dialect]()
    parts = [f"{known('schema_table').sql};\n"]
    for migration in migrations(dialect)[:version]:
        applied = verbs.migrated(known, migration)
        parts.append(f"-- {migration.name}\n{migration.sql}\n{inlined(next(applied))};\n")
    return "\n".join(parts)


def _patient(dialect: Dialect, seconds: float | None) -> str:
    if dialect.name != "postgresql" or seconds is None:
        return ""
    return f"SET LOCAL lock_timeout = '{seconds:g}s';\n"


def _placed(schema: str | None) -> str:
    return "" if schema is None else f"SET LOCAL search_path TO {quoted(schema)};\n"


async def _transaction(session: Session[Any], plan: Plan[T]) -> T:
    """A plan as a transaction of its own."""
    try:
        value = await run(plan, session.execute, first=session.begin)
        await session.commit()
        return value
    finally:
        await session.rollback()


class SqlUnit(Generic[Tx]):
    """See onceward.store.Unit. On a session of its own, which is there while the block lasts, or on a joined one."""

    _placed = False
    """There is a savepoint in the open transaction."""

    def __init__(
        self,
        driver: Driver[Tx],
        begin: Begin[Tx] | None,
        wait: float,
        *,
        read_only: bool = False,
        joined: Session[Tx] | None = None,
    ) -> None:
        self.joined = joined is not None
        self._driver = driver
        self._wait = wait
        self._dialect = driver.dialect
        self._begin = begin
        if joined is not None:
            self._session = joined
        else:
            self._sessions = driver.session(wait=wait, read_only=read_only)

    async def __aenter__(self) -> SqlUnit[Tx]:
        self._session = await self._sessions.__aenter__()
        return self

    def __aexit__(self, *_error: object) -> Coroutine[Any, Any, bool | None]:
        return self._sessions.__aexit__(None, None, None)  # which rolls back what is left open

    @property
    def tx(self) -> Tx:
        return self._session.tx

    @property
    def lost(self) -> bool:
        return self._session.lost

    async def ended(self) -> bool:
        return await self._session.ended()

    def is_conflict(self, error: BaseException) -> bool:
        return self._session.is_conflict(error)

    async def claim(self, record: Record) -> Found | None:
        """The insert decides. Only when it did not insert do we look, and a look never answers "new"."""
        inserted = await self._first(verbs.claim(self._dialect, record))
        if inserted.changed == 1:
            return None
        found = await self._say(verbs.find(self._dialect, record.identity))
        if found is None:
            raise InFlight
        return found

    async def take(self, found: Record, record: Record) -> bool:
        return await self._say(verbs.take(self._dialect, found, record))

    async def unmet(self, record: Record) -> Position | None:
        return await self._say(verbs.unmet(self._dialect, record.identity, record.depends_on))

    async def complete(self, record: Record) -> None:
        await self._say(verbs.complete(self._dialect, record))

    def commit(self) -> Awaitable[None]:
        return self._session.commit()

    def rollback(self) -> Coroutine[Any, Any, None]:
        return self._session.rollback()

    async def find(self, identity: Identity) -> Found | None:
        return await self._alone(verbs.find(self._dialect, identity))

    async def mark(self, found: Record | None, record: Record) -> bool:
        return await self._alone(verbs.mark(self._dialect, found, record))

    async def unmark(self, record: Record) -> bool:
        return await self._alone(verbs.unmark(self._dialect, record))

    async def fail(
        self, record: Record, failure: Failure, state: State, delay: float | None, *, replayed: bool = False
    ) -> Record | None:
        over = (State.DEAD,) if replayed else from_states(Change.FAIL)
        return await self._alone(verbs.fail(self._dialect, record, failure, state=state, over=over, delay=delay))

    async def bury(self, record: Record, failure: Failure, *, over: tuple[State, ...]) -> Record | None:
        return await self._alone(verbs.fail(self._dialect, record, failure, state=State.DEAD, over=over, counted=False))

    async def sweep(
        self, consumer: str, what: Sweepable, older: float, *, batch: int, after: tuple[Any, Any] | None = None
    ) -> SweptBatch | None:
        return await self._alone(upkeep.sweep(self._dialect, consumer, what, older, batch=batch, after=after))

    async def sweepable(self, consumer: str, older: float) -> int:
        return await self._alone(upkeep.sweepable(self._dialect, consumer, older))

    async def now(self) -> datetime:
        return await self._alone(upkeep.now(self._dialect))

    async def consumers(self) -> list[str]:
        return await self._alone(upkeep.consumers(self._dialect))

    async def stats(self, consumer: str) -> Stats:
        return await self._alone(upkeep.stats(self._dialect, consumer))

    async def records(
        self, consumer: str, states: tuple[State, ...], *, older: float | None, limit: int
    ) -> list[Record]:
        return await self._alone(upkeep.records(self._dialect, consumer, states, older=older, limit=limit))

    async def discard(self, identity: Identity) -> bool:
        return await self._alone(verbs.discard(self._dialect, identity))

    # --- many -----------------------------------------------------------------------------------------------

    @property
    def stands(self) -> Callable[[], bool]:
        return self._session.stands

    async def claim_many(self, claims: Claims) -> set[bytes]:
        return await self._start(verbs.claim_many(self._dialect, claims))

    async def find_done(self, identities: Sequence[Identity]) -> dict[bytes, Done]:
        return await self._say(verbs.find_done(self._dialect, identities))

    async def find_many(self, identities: Sequence[Identity]) -> dict[bytes, Found]:
        return await self._say(verbs.find_many(self._dialect, identities))

    async def unclaim(self, identities: Sequence[Identity]) -> None:
        await self._say(verbs.unclaim(self._dialect, identities))

    async def complete_many(self, closings: Sequence[Closing]) -> None:
        await self._say(verbs.complete_many(self._dialect, closings))

    async def look_done(self, identities: Sequence[Identity]) -> dict[bytes, Done]:
        plan = verbs.find_done(self._dialect, identities)
        if self._begin is None and self._driver.features.concurrent_units and not self._session.gone:
            return await self._say(plan)  # one statement on a connection of its own sees only what is committed
        return await self._alone(plan)

    async def look_many(self, identities: Sequence[Identity]) -> dict[bytes, Found]:
        return await self._alone(verbs.find_many(self._dialect, identities))

    async def repair(
        self, *, unclaim: Sequence[Identity], complete: Sequence[Closing], bury: Sequence[tuple[Record, Failure]]
    ) -> None:
        await self._alone(verbs.repair(self._dialect, unclaim, complete, bury))

    # --- the queue ------------------------------------------------------------------------------------------

    @property
    def _queue(self) -> Any:
        return QUEUES[self._dialect.name]

    async def accept(self, lines: Sequence[QueueLine], *, consumer: str, host: str) -> list[KeptLine]:
        plan = self._queue.accept(self._dialect, lines, consumer, host)
        if not self.joined:
            return await self._at_once(plan)
        kept: list[KeptLine] = await self._start(plan)
        if self._dialect.sets:
            await self._say(self._queue.call(self._dialect, consumer))  # heard when the caller commits
        await self.commit()
        return kept

    async def claim_lanes(
        self, consumer: str, owner: str, *, most: int, lease: float, share: Share | None = None
    ) -> list[LaneClaim]:
        marks = {"marks": self._driver.marks} if self._dialect.sets else {}  # type: ignore[attr-defined]
        plan = self._queue.claim_lanes(self._dialect, consumer, owner, most=most, lease=lease, share=share, **marks)
        return await self._at_once(plan)

    async def take_lanes(
        self, owner: str, lanes: Sequence[bytes], *, most: int, idle_limit: float | None = None
    ) -> Taken:
        if self._dialect.sets:
            session: Any = self._session
            session.idle_limit = idle_limit
        return await self._start(self._queue.take_lanes(self._dialect, owner, lanes, most))

    async def begin_turn(self, claiming: Claiming, *, apart: bool = False) -> Begun:
        if apart or self._begin is not None or not self._rides():
            claims = await self.claim_lanes(
                claiming.consumer, claiming.owner, most=claiming.lanes, lease=claiming.lease, share=claiming.share
            )
            sound = [claim.lane for claim in claims if claim.claims == 1]
            return Begun(sound, [claim.lane for claim in claims if claim.claims > 1])
        plan = self._plan_turn(claiming)
        try:
            return await self._unless_empty(await self._start(plan))
        except Exception:
            await self._give_up_claim(claiming.owner)
            raise

    def _plan_turn(self, claiming: Claiming) -> Plan[Begun]:
        """The claim rides with the next BEGIN; what is left to do is this."""
        session: Any = self._session
        marks = self._driver.marks  # type: ignore[attr-defined]
        session.claiming = self._queue.claiming(self._dialect, claiming, marks)
        session.idle_limit = claiming.idle_limit
        plan: Plan[Begun] = self._queue.take_claimed(self._dialect, claiming, marks)
        return plan

    async def _unless_empty(self, begun: Begun) -> Begun:
        if not begun.lanes:
            await self.rollback()
        return begun

    async def _give_up_claim(self, owner: str) -> None:
        await self.rollback()
        with suppress(Exception):  # the claim is over in a moment; what went wrong first is what to tell
            await self._at_once(self._queue.release_claimed(self._dialect, owner))

    def to_its_end(self, work: Coroutine[Any, Any, T]) -> Awaitable[T]:
        return self._session.to_its_end(work)

    async def hold_lanes(self, owner: str, lanes: Sequence[bytes]) -> frozenset[bytes]:
        return await self._start(self._queue.hold_lanes(self._dialect, owner, lanes))

    async def unmet_of(self, queued: Queued, depends_on: Sequence[Position]) -> Unmet | None:
        return await self._say(queue_rows.unmet_of(self._dialect, queued, depends_on))

    async def waits_in_circle(self, queued: Queued, needed: Position) -> bool:
        return await self._say(queue_rows.waits_in_circle(self._dialect, queued, needed))

    async def stood(self, taken: Taken) -> bool | None:
        if taken.xid is None:
            return False if self._driver.features.refuses_end else None
        return await self._at_once(self._queue.stood(self._dialect, taken.xid))

    async def savepoint(self) -> None:
        await self._session.flush()
        # Released first: a thousand savepoints, one in the other, are slow everywhere.
        await self._session.script(("RELEASE onceward_turn;\n" if self._placed else "") + "SAVEPOINT onceward_turn;")
        self._placed = True

    async def back_to_savepoint(self) -> None:
        await self._session.forget()
        if not self._session.stands():
            raise HandlerEndedTransaction
        await self._session.script("ROLLBACK TO onceward_turn;")

    async def take_again(self, owner: str, taken: Taken) -> Taken:
        if await self._session.ended():
            raise HandlerEndedTransaction
        await self._session.forget()
        await self.rollback()
        again: Taken | None = await self._start(self._queue.take_again(self._dialect, owner, taken))
        if again is None:
            raise HandlerEndedTransaction
        return again

    async def close_lanes(self, closing: TurnClosing, *, consumer: str, host: str) -> None:
        await self._say(self._queue.close_lanes(self._dialect, closing, consumer, host))

    async def close_and_commit(
        self, closing: TurnClosing, *, consumer: str, host: str, then: Claiming | None = None
    ) -> Begun | None:
        if not self._rides():
            await self.close_lanes(closing, consumer=consumer, host=host)
            await self.commit()
            return None
        session: Any = self._session
        session.ride(self._queue.closing(self._dialect, closing, consumer, host), after=self._placed)
        if then is None or not self.goes_on:
            await self.commit()
            return None
        plan, self._placed = self._plan_turn(then), False
        try:
            await self.commit()
        except OncewardError:
            raise  # nothing was sent, or it is known what became of it
        except Exception as error:
            if not await self._committed(closing.xid, error):
                raise
            await self._give_up_claim(then.owner)
            return None
        try:
            begun = await self._say(plan)
            return await self._unless_empty(begun)
        except Exception:  # noqa: BLE001 - what was committed stands; who begins the next turn will hear of it
            await self._give_up_claim(then.owner)
            return None

    async def _committed(self, xid: str | None, error: Exception) -> bool:
        """Whether it was what came after the COMMIT that has failed."""
        try:
            await self.rollback()
            return bool(xid and await self._at_once(self._queue.stood(self._dialect, xid)))
        except Exception:  # noqa: BLE001 - nobody answers
            raise CommitUnknown from error

    @property
    def goes_on(self) -> bool:
        return self._begin is None and self._rides() and bool(self._session.goes_on)

    def _rides(self) -> bool:
        """Whether statements can be said in the trips of BEGIN and COMMIT."""
        return self._dialect.sets and not self.joined

    async def release(self, owner: str, lanes: Sequence[bytes], *, delay: float = 0.0) -> None:
        await self._at_once(self._queue.release(self._dialect, owner, lanes, delay))

    async def extend(self, owner: str, lanes: Sequence[bytes], lease: float) -> frozenset[bytes]:
        return await self._at_once(self._queue.extend(self._dialect, owner, lanes, lease))

    async def mark_start(self, owner: str, lane: bytes, identity: Identity) -> Record | None:
        return await self._at_once(self._queue.mark_start(self._dialect, owner, lane, identity))

    async def unmark_start(self, identity: Identity) -> None:
        await self._at_once(self._queue.unmark_start(self._dialect, identity))

    async def call(self, consumer: str) -> None:
        if self._driver.features.listens:
            await self._at_once(self._queue.call(self._dialect, consumer))

    async def due_in(self, consumer: str, share: Share | None = None) -> float | None:
        return await self._at_once(self._queue.due_in(self._dialect, consumer, share))

    async def wake_overdue(self, consumer: str) -> int:
        return await self._at_once(self._queue.wake_overdue(self._dialect, consumer))

    async def requeue(self, identity: Identity, line: QueueLine) -> bool:
        return await self._at_once(self._queue.requeue(self._dialect, identity, line))

    async def drop(self, identity: Identity, line: QueueLine) -> bool:
        return await self._at_once(self._queue.drop(self._dialect, identity, line))

    async def queue_stats(self, consumer: str, *, worst: int = 20) -> QueueStats:
        return await self._at_once(queue_stats.queue_stats(self._dialect, consumer, worst))

    # --- how plans are run ----------------------------------------------------------------------------------

    async def _say(self, plan: Plan[T]) -> T:
        return await run(plan, self._session.execute)

    async def _start(self, plan: Plan[T]) -> T:
        """Begin a transaction with this plan; the caller ends it."""
        self._placed = False
        return await run(plan, self._session.execute, first=self._first)

    def _first(self, statement: Statement) -> Coroutine[Any, Any, Result]:
        """Begin a transaction with this statement, behind `on_begin` where there is one."""
        return self._session.begin(statement) if self._begin is None else self._behind(self._begin, statement)

    async def _behind(self, begin: Begin[Tx], statement: Statement) -> Result:
        await self._session.begin()
        await begin(self._session.tx)
        return await self._session.execute(statement)

    async def _at_once(self, plan: Plan[T]) -> T:
        """A transaction of its own; one statement is one by itself, and needs one trip."""
        session: Any = self._session  # of PostgreSQL
        if self._begin is None and self._dialect.sets and not session.gone and await session.is_plain():
            return await self._say(plan)
        return await self._alone(plan)

    async def _alone(self, plan: Plan[T]) -> T:
        """A transaction of its own, with `on_begin` in it: row-level security applies to our tables too."""
        if self._session.gone:
            async with SqlUnit(self._driver, self._begin, self._wait) as unit:
                return await unit._alone(plan)
        try:
            value = await self._start(plan)
            await self.commit()
            return value
        finally:
            await self.rollback()
