"""The stored half of an inbox: keep first, work later."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Sequence
from contextlib import AbstractAsyncContextManager, contextmanager, suppress
from datetime import datetime, timedelta
from time import monotonic
from typing import Any, Generic, TypeVar, overload

import msgspec

from onceward import events
from onceward.accept import Acceptor, asked
from onceward.brake import Brake
from onceward.crew import LARGEST, Crew, Options, check_share, outcome_of_slot
from onceward.errors import InboxClosed, InvalidMessage, NotDead, OncewardError, UsageError
from onceward.handlers import bulk_handler_of
from onceward.identity import digest
from onceward.intake import Intake
from onceward.iterate import StoredWork, works
from onceward.keys import KeyLike
from onceward.message import Message, check_position
from onceward.outcome import Kind, Outcome
from onceward.record import Record
from onceward.retention import LONGEST
from onceward.retry import RetryPolicy
from onceward.settle import Settler
from onceward.slot import OnDead, OnDeadDependency, Settings
from onceward.stats import QueueStats
from onceward.store import Store
from onceward.wake import Bell, Herald
from onceward.worker import RunningWorker, in_background, run

Tx = TypeVar("Tx")

RETRY = RetryPolicy(max_attempts=10)
"""Of what comes from the queue, where nothing else is said."""


class StoredOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Options of an inbox that are about its queue."""

    on_dead: OnDead = "block"
    strict: bool = False
    first_position: int = 1
    on_dead_dependency: OnDeadDependency = "wait"
    dependency_timeout: timedelta | None = timedelta(days=1)
    freeze_after: float | None = 300.0


class SourceHealth(msgspec.Struct, frozen=True):
    """How it goes with one source that `consume` reads from."""

    name: str
    ok: bool
    """Its broker is reached, as far as is known, and it is not stuck."""
    state: str
    """running, paused (the database is away), braking (everything fails) or draining."""
    received: int
    """Deliveries so far."""
    settled: int
    in_flight: int
    """Received and not settled."""
    held: int
    """Of these: put off, to be tried again."""
    trouble: str | None = None


class Health(msgspec.Struct, frozen=True):
    """Whether an inbox can do its part, for probes."""

    ok: bool
    """The database answers, the workers of this process, if there are any, go on, and so do its sources."""
    store: bool
    workers: int
    idle_for: float | None = None
    """Seconds since a worker of this process last looked for work; None without workers."""
    error: str | None = None
    sources: tuple[SourceHealth, ...] = ()
    """The brokers that `consume` reads from in this process."""


class QueuedLanes(msgspec.Struct, frozen=True):
    lanes: frozenset[tuple[str, str]]
    """A tenant and a name each."""
    any: bool
    """The consumer has something in its queue, in whatever lane."""


STUCK = 60.0
"""Seconds. Workers that did nothing for longer, not even look for work, are stuck, or in a very long handler without
a lease."""


class StoredInbox(Generic[Tx]):
    """What Inbox inherits: accept, dispatch, run, worker, the iterator."""

    store: Store[Tx]
    consumer: str
    _open: bool

    def _init_stored(
        self,
        intake: Intake,
        settler: Settler[Tx],
        bus: events.Bus,
        options: StoredOptions,
        on_begin: Callable[..., Any] | None,
    ) -> None:
        _check(options, intake.retry)
        self._acceptor = Acceptor(intake, settler, bus, strict=options.strict, first=options.first_position)
        self._bell = Bell()
        settings = Settings(
            intake=intake,
            retry=intake.retry or RETRY,
            on_dead=options.on_dead,
            on_dead_dependency=options.on_dead_dependency,
            dependency_timeout=options.dependency_timeout,
            on_begin=on_begin,
            freeze_after=options.freeze_after,
        )
        self._intake = intake
        self._crew = Crew(settler, settings, bus, self._bell)
        self._herald = Herald(self._tell_others)
        self._reports: list[Callable[[], SourceHealth]] = []

    # --- keeping --------------------------------------------------------------------------------------------

    @overload
    async def accept(
        self,
        message: Message[Any],
        *,
        lane: str | None = ...,
        not_before: datetime | timedelta | None = ...,
        key: KeyLike | None = ...,
        origin: str | None = ...,
        tx: Any = ...,
    ) -> Outcome[Any]: ...

    @overload
    async def accept(
        self,
        message: Iterable[Message[Any]],
        *,
        lane: str | None = ...,
        not_before: datetime | timedelta | None = ...,
        key: KeyLike | None = ...,
        origin: str | None = ...,
        origins: Sequence[str | None] | None = ...,
        tx: Any = ...,
    ) -> list[Outcome[Any]]: ...

    async def accept(
        self,
        message: Message[Any] | Iterable[Message[Any]],
        *,
        lane: str | None = None,
        not_before: datetime | timedelta | None = None,
        key: KeyLike | None = None,
        origin: str | None = None,
        origins: Sequence[str | None] | None = None,
        tx: Any = None,
    ) -> Outcome[Any] | list[Outcome[Any]]:
        """Keep a message, or a list of them, exactly once, to be worked on later. If this returns, acknowledge.

        ACCEPTED: it is durable, and workers (`run`) will have it. DUPLICATE: it was accepted or processed before.
        With `tx`, a transaction that you opened, it is kept when you commit. `lane` names its lane, in place of the
        inbox's strategy; with `not_before` it waits, and its lane with it. `origin` is kept for people; of a list, each
        has its own in `origins`.

        For a list nothing is raised for one message: its outcome is FAILED or BUSY, and `outcome.verdict` says what to
        do with it.
        """
        self._check_queue("accept")
        about = asked(lane=lane, not_before=not_before, origin=origin, origins=origins, key=key, tx=tx)
        if isinstance(message, Message):
            (outcome,) = await self._acceptor.accept([message], about)
            self._ring([outcome], tx)
            if outcome.kind in (Kind.FAILED, Kind.BUSY) and outcome.error is not None:
                raise outcome.error
            return outcome
        if isinstance(message, (str, bytes)) or not isinstance(message, Iterable):
            raise UsageError(f"accept takes a Message or several, not {type(message).__name__}")
        listed = list(message)
        if origins is not None and len(origins) != len(listed):
            raise UsageError(f"accept got {len(listed)} messages and {len(origins)} origins")
        outcomes = await self._acceptor.accept(listed, about)
        self._ring(outcomes, tx)
        return outcomes

    def _ring(self, outcomes: list[Outcome[Any]], tx: Any) -> None:
        if tx is None and any(one.kind is Kind.ACCEPTED for one in outcomes):
            self._bell.ring()
            if self.store.features.listens:
                self._herald.call()

    async def _tell_others(self) -> None:
        """Other processes that work on this consumer's queue."""
        async with self._crew.unit() as unit:
            await unit.call(self.consumer)

    def lane_of(self, message: Message[Any]) -> tuple[str, str] | None:
        """The tenant and the name of its lane. None: it needs no order, or its tenant or key is missing."""
        return self._intake.lane_of(message)

    async def queued_lanes(self, lanes: Iterable[tuple[str, str]]) -> QueuedLanes:
        """Which of these lanes have messages in the queue that are not settled: what comes later in one of them has to
        be accepted too, or it would overtake them."""
        self._check_queue("queued_lanes")
        names = {digest(self.consumer, tenant, "lane", name): (tenant, name) for tenant, name in lanes}
        async with self._crew.unit(read_only=True) as unit:
            busy = await unit.busy_lanes(self.consumer, list(names))
        return QueuedLanes(frozenset(names[lane] for lane in busy.lanes), busy.any)

    # --- working --------------------------------------------------------------------------------------------

    async def dispatch(
        self, handler: Callable[..., Any] | None = None, *, share: tuple[int, int] | None = None
    ) -> Outcome[Any] | None:
        """Work on one message of the queue. None: nothing is ready.

        A handler that fails is an outcome, FAILED or DEAD; its lane waits for the next try.
        """
        crew = self._working("dispatch")
        return outcome_of_slot(await crew.dispatch(Options(given=handler, share=check_share(share))))

    async def run(
        self,
        handler: Callable[..., Any] | None = None,
        *,
        bulk: Callable[..., Any] | None = None,
        concurrency: int = 1,
        stop: asyncio.Event | None = None,
        grace: float = 25.0,
        share: tuple[int, int] | None = None,
        poll_interval: float = 1.0,
        batch: int = LARGEST,
    ) -> None:
        """Work on the queue until `stop` is set, or for ever.

        Each message runs once, with `handler` or with the registered handler of its type, in the order of its lane;
        `bulk` is a handler that gets a list. `concurrency` workers take up to `batch` messages in one transaction. Run
        as many processes as you like; with `share=(0, 3)` this one has a fixed third of the lanes. After `stop`, what
        was begun has `grace` seconds to end, and is then undone and left to others.
        """
        options = _options(
            handler, bulk, share=share,
            concurrency=concurrency, grace=grace, poll_interval=poll_interval, batch=batch,
        )  # fmt: skip
        await run(self._working("run"), options, stop or asyncio.Event())

    def worker(
        self,
        handler: Callable[..., Any] | None = None,
        *,
        bulk: Callable[..., Any] | None = None,
        concurrency: int = 1,
        grace: float = 25.0,
        share: tuple[int, int] | None = None,
        poll_interval: float = 1.0,
        batch: int = LARGEST,
        brake: Brake | None = None,
    ) -> AbstractAsyncContextManager[RunningWorker]:
        """`run` in the background, for as long as the block lasts. With a `brake` it goes slowly while all fails."""
        options = _options(
            handler, bulk, share=share, brake=brake,
            concurrency=concurrency, grace=grace, poll_interval=poll_interval, batch=batch,
        )  # fmt: skip
        return in_background(self._working("worker"), options)

    def works(
        self,
        *,
        stop: asyncio.Event | None = None,
        share: tuple[int, int] | None = None,
        poll_interval: float = 1.0,
    ) -> AsyncIterator[StoredWork]:
        """The messages of the queue, one after another; `async for work in inbox` is the same.

        `async with work as (message, tx)`: processed when the block ends without an error.
        """
        options = Options(share=check_share(share), poll_interval=poll_interval)
        return works(self._working("works"), options, stop or asyncio.Event())

    def __aiter__(self) -> AsyncIterator[StoredWork]:
        return self.works()

    def _working(self, verb: str) -> Crew:
        self._check_queue(verb)
        return self._crew

    def _check_queue(self, verb: str) -> None:
        if not self.store.features.queue:
            raise UsageError(
                f"{verb}: {type(self.store).__name__} cannot keep messages to be worked on later. SqliteStore, "
                "AsyncpgStore, PsycopgStore and SqlAlchemyStore can; here, process them as they come."
            )
        if not self._open:
            raise InboxClosed

    # --- dead letters ---------------------------------------------------------------------------------------

    async def _requeue(self, record: Record) -> Outcome[Any]:
        """Back to its place in the queue."""
        async with self._crew.unit() as unit:
            if not await unit.requeue(record.identity, self._acceptor.line_of(record)):
                raise NotDead("the record has changed meanwhile; look again", state=record.state.value)
        outcome: Outcome[Any] = Outcome(Kind.ACCEPTED)
        self._ring([outcome], None)
        return outcome

    async def _discarded(self, unit: Any, record: Record) -> bool:
        """Its lane goes on, where it was in one."""
        if record.received_position is None:
            return bool(await unit.discard(record.identity))
        done = await unit.drop(record.identity, self._acceptor.line_of(record))
        self._ring([Outcome(Kind.ACCEPTED)], None)
        return bool(done)

    # --- looking --------------------------------------------------------------------------------------------

    async def queue_stats(self) -> QueueStats:
        """What is in the queue: pending, ready, running, retrying, waiting and for what, blocked by a dead letter."""
        if not self._open:
            raise InboxClosed
        async with self._crew.unit(read_only=True) as unit:
            stats: QueueStats = await unit.queue_stats(self.consumer)
        return stats

    async def health(self) -> Health:
        """For a probe: does the database answer, and do the workers of this process go on?"""
        workers = self._crew.running
        idle_for = monotonic() - self._crew.last_step if workers else None
        error: str | None = None
        try:
            if not self._open:
                raise InboxClosed
            async with asyncio.timeout(5.0), self._crew.unit(read_only=True) as unit:
                await unit.now()
        except (OncewardError, TimeoutError, OSError) as problem:
            error = f"{type(problem).__name__}: {problem}"
        stuck = idle_for is not None and idle_for > STUCK and self._crew.leased < workers
        sources = tuple(report() for report in self._reports)
        ok = error is None and not stuck and all(source.ok for source in sources)
        return Health(ok, error is None, workers, idle_for, error, sources)

    @contextmanager
    def reporting(self, report: Callable[[], SourceHealth]) -> Iterator[None]:
        """While it lasts, `health` asks it too. For `consume`."""
        self._reports.append(report)
        try:
            yield
        finally:
            self._reports.remove(report)

    async def _close_stored(self) -> None:
        self._crew.closed = True
        self._bell.ring()
        with suppress(Exception):
            await self._herald.close()


def _options(
    handler: Callable[..., Any] | None, bulk: Callable[..., Any] | None, *, share: Any, **numbers: Any
) -> Options:
    if handler is not None and bulk is not None:
        raise UsageError("give either a handler, or a bulk handler")
    many = None if bulk is None else bulk_handler_of(bulk)
    for name in ("concurrency", "batch"):
        if type(numbers[name]) is not int or numbers[name] < 1:
            raise UsageError(f"{name}={numbers[name]!r}: it is a whole number, at least 1")
    for name in ("poll_interval", "grace"):
        if not _is_time(numbers[name]) or (name == "poll_interval" and not numbers[name]):
            raise UsageError(
                f"{name}={numbers[name]!r}: it is a number of seconds, not negative; poll_interval above 0"
            )
    return Options(given=handler, bulk=many, share=check_share(share), **numbers)


def _check(options: StoredOptions, retry: object) -> None:
    try:
        check_position(options.first_position)
    except InvalidMessage as error:
        raise UsageError(f"first_position: {error}") from error
    timeout, freeze_after = options.dependency_timeout, options.freeze_after
    if timeout is not None and not (isinstance(timeout, timedelta) and timedelta(0) <= timeout <= LONGEST):
        raise UsageError(f"dependency_timeout={timeout!r}: it is a timedelta of at most a thousand years, or None")
    if freeze_after is not None and not (_is_time(freeze_after) and freeze_after):
        raise UsageError(f"freeze_after={freeze_after!r}: it is a number of seconds, above 0, or None")
    if retry is not None and not isinstance(retry, RetryPolicy):
        raise UsageError(f"retry={retry!r}: it is a RetryPolicy, such as RetryPolicy(max_attempts=5)")


def _is_time(value: object) -> bool:
    """In seconds. Neither NaN nor a word."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and value >= 0
