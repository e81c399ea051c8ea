"""Inbox: the public face.

An inbox is a store and a consumer name. `process` turns a delivery into Work, with everything that is known about
it, and settles it by the decision table of docs/guarantees.md. If it returns, acknowledge; if it raises, do not.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterable, Sequence
from contextlib import asynccontextmanager
from datetime import timedelta
from typing import Any, Literal, TypeVar, overload

import msgspec

from onceward import events, keys, lanes, tenants
from onceward.attempt import is_mismatch
from onceward.batch import Batcher, Call, call_of
from onceward.claim import Claim
from onceward.errors import (
    AlreadyProcessed,
    HandlerNotFound,
    InboxClosed,
    InvalidMessage,
    NotDead,
    PayloadMismatch,
    RecordNotFound,
    Reject,
    StoreError,
    TryLater,
    UsageError,
)
from onceward.handlers import F, Handler, Router, handler_of
from onceward.idempotent import Idempotent
from onceward.identity import Identity
from onceward.intake import Intake, Unhandled
from onceward.keys import KeyLike
from onceward.lanes import LaneLike
from onceward.message import Message, check_text
from onceward.outcome import Kind, Outcome, raised
from onceward.record import Record, State
from onceward.retention import check_retention
from onceward.retry import RetryPolicy
from onceward.settle import Settler
from onceward.shield import LoopLock
from onceward.slot import OnDead, OnDeadDependency
from onceward.stats import Stats
from onceward.store import Store
from onceward.stored import RETRY, StoredInbox, StoredOptions
from onceward.tenants import TenantLike
from onceward.upkeep import Progress, Upkeep
from onceward.watch import watched
from onceward.work import Work

Tx = TypeVar("Tx")
R = TypeVar("R")

OnMismatch = Literal["report", "raise"]

MAX_PAYLOAD = 16 * 1024 * 1024


class Inbox(StoredInbox[Tx]):
    """The barrier in front of your handlers, bound to a store and a consumer name.

    It can be made at import time and opened later: `async with inbox:` or `await inbox.open()`.
    """

    def __init__(
        self,
        store: Store[Tx],
        *,
        consumer: str,
        handlers: Iterable[Router] = (),
        key: KeyLike | None = None,
        lane: LaneLike | None = None,
        tenant: TenantLike | None = None,
        retry: RetryPolicy | None = None,
        retention: timedelta = timedelta(days=30),
        wait: float = 5.0,
        on_mismatch: OnMismatch = "report",
        unhandled: Unhandled = "raise",
        on_begin: Callable[[Tx, Message[Any]], Awaitable[Any]] | None = None,
        seen_before: Callable[[Tx, Message[Any]], Awaitable[bool]] | None = None,
        fingerprint: Callable[[Message[Any]], Any] | None = None,
        record_duration: bool = False,
        max_payload: int = MAX_PAYLOAD,
        cache: int = 10_000,
        listeners: Iterable[events.Listener] = (events.log,),
        on_dead: OnDead = "block",
        strict: bool = False,
        first_position: int = 1,
        on_dead_dependency: OnDeadDependency = "wait",
        dependency_timeout: timedelta | None = timedelta(days=1),
        freeze_after: float | None = 300.0,
    ) -> None:
        _check_options(consumer, handlers)
        _one_of("on_mismatch", on_mismatch, ("report", "raise"))
        _one_of("unhandled", unhandled, ("raise", "ignore", "dead"))
        _one_of("on_dead", on_dead, ("block", "skip"))
        _one_of("on_dead_dependency", on_dead_dependency, ("wait", "dead", "run"))
        self.store = store
        self.consumer = consumer
        self._router = Router()
        for router in handlers:
            self._router.include(router)
        self._intake = Intake(
            consumer=consumer,
            router=self._router,
            key=keys.of(key),
            lane=lanes.of(lane),
            tenant=tenants.of(tenant),
            has_tenants=tenant is not None,
            retry=retry,
            unhandled=unhandled,
            raise_on_mismatch=on_mismatch == "raise",
            record_duration=record_duration,
            max_payload=max_payload,
            seen_before=seen_before,
            fingerprint=fingerprint,
        )
        self._retention = check_retention(retention)
        self._bus = events.Bus(tuple(listeners))
        keep = self._retention.total_seconds()
        self._settler = Settler(store, wait=wait, on_begin=on_begin, cache=cache, keep=keep)
        self._batcher = Batcher(self._intake, self._settler, self._bus)
        stored = StoredOptions(
            on_dead=on_dead,
            strict=strict,
            first_position=first_position,
            on_dead_dependency=on_dead_dependency,
            dependency_timeout=dependency_timeout,
            freeze_after=freeze_after,
        )
        self._init_stored(self._intake, self._settler, self._bus, stored, on_begin)
        self._open = False
        self._opening = LoopLock()

    # --- life -----------------------------------------------------------------------------------------------

    @classmethod
    def connect(cls, url: str, *, consumer: str, schema: str | None = None, **options: Any) -> Inbox[Any]:
        """An inbox on the store that the URL names: `sqlite:///shop.db`, `postgresql://...`.

        `schema` is the PostgreSQL schema of the tables; the other options are those of Inbox.
        """
        from onceward.connect import store_from_url  # noqa: PLC0415 - the only place that knows all stores

        return Inbox(store_from_url(url, schema=schema), consumer=consumer, **options)

    async def open(self) -> None:
        async with self._opening.of_this_loop():
            if not self._open:
                await self.store.open()
                await self._look_for_risks()
                self._open = True
                self._crew.closed = False

    async def _look_for_risks(self) -> None:
        """What about the database endangers the promise is told before the first message comes."""
        try:
            for finding in await self.store.check():
                self._bus.emit(events.AtRisk(consumer=self.consumer, finding=finding.name, text=finding.text))
        except BaseException:
            await self.store.close()
            raise

    async def close(self) -> None:
        if self._open:
            self._open = False
            await self._close_stored()
            await self._settler.close()
            await self.store.close()

    async def setup(self) -> None:
        """Make or upgrade the tables. On SQLite opening the inbox does it."""
        await self.store.setup()

    async def __aenter__(self) -> Inbox[Tx]:
        await self.open()
        return self

    async def __aexit__(self, *_error: object) -> None:
        await self.close()

    def subscribe(self, listener: events.Listener) -> Callable[[], None]:
        """Hear what happens, see onceward.events. Call what this returns to stop."""
        return self._bus.subscribe(listener)

    def emit(self, event: events.Event) -> None:
        """Tell those who listen. For what is around an inbox, such as `consume`."""
        self._bus.emit(event)

    @property
    def retention(self) -> timedelta:
        """How long records are kept, where nothing else is said."""
        return self._retention

    # --- handlers -------------------------------------------------------------------------------------------

    def handler(
        self,
        type: str,  # noqa: A002 - the word of the domain
        *,
        payload: Any = None,
        key: KeyLike | None = None,
        retry: RetryPolicy | None = None,
        retention: timedelta | None = None,
        concurrency: int | None = None,
        timeout: float | None = None,
        lease: float | None = None,
    ) -> Callable[[F], F]:
        """Register a function for a message type with the inbox's own router."""
        return self._router.handler(
            type, payload=payload, key=key, retry=retry, retention=retention,
            concurrency=concurrency, timeout=timeout, lease=lease,
        )  # fmt: skip

    def idempotent(
        self,
        *,
        key: str | tuple[str, ...] | Callable[..., str],
        name: str | None = None,
        retry: RetryPolicy | None = None,
        retention: timedelta | None = None,
        on_mismatch: OnMismatch = "raise",
    ) -> Callable[[Callable[..., Awaitable[R]]], Callable[..., Awaitable[R]]]:
        """Make an async function run once per key; it returns the result, the first run's for a repeated call.

        `key` names an argument, several, or is a function of the arguments. A parameter called `tx` is given by
        the inbox. Keys are unique within the function's qualified name; give `name=` so that renaming the function
        does not run history again.
        """
        _one_of("on_mismatch", on_mismatch, ("report", "raise"))
        settings = Idempotent(key=key, name=name)
        known: dict[str, Any] = {"retry": retry, "retention": retention, "raise_on_mismatch": on_mismatch == "raise"}

        def decorate(function: Callable[..., Awaitable[R]]) -> Callable[..., Awaitable[R]]:
            async def run(message: Message[Any], handler: Handler) -> Any:
                outcome = raised(await self._settle(self._work(message, handler, **known)))
                if outcome.kind is Kind.DEAD and outcome.error is not None:
                    raise outcome.error
                return outcome.result

            return settings.wrap(function, run)

        return decorate

    # --- processing -----------------------------------------------------------------------------------------

    @overload
    async def process(
        self,
        message: Message[Any],
        handler: Callable[[Message[Any], Tx], Awaitable[R]] | Callable[[Message[Any]], Awaitable[R]],
        *,
        key: KeyLike | None = ...,
        retry: RetryPolicy | None = ...,
        retention: timedelta | None = ...,
        origin: str | None = ...,
        redelivered: bool = ...,
        tx: Any = ...,
    ) -> Outcome[R]: ...

    @overload
    async def process(
        self,
        message: Message[Any],
        handler: Callable[[Message[Any], Tx], R] | Callable[[Message[Any]], R],
        *,
        key: KeyLike | None = ...,
        retry: RetryPolicy | None = ...,
        retention: timedelta | None = ...,
        origin: str | None = ...,
        redelivered: bool = ...,
        tx: Any = ...,
    ) -> Outcome[R]: ...

    @overload
    async def process(
        self,
        message: Message[Any],
        handler: None = None,
        *,
        key: KeyLike | None = ...,
        retry: RetryPolicy | None = ...,
        retention: timedelta | None = ...,
        origin: str | None = ...,
        redelivered: bool = ...,
        tx: Any = ...,
    ) -> Outcome[Any]: ...

    async def process(
        self,
        message: Message[Any],
        handler: Callable[..., Any] | None = None,
        *,
        key: KeyLike | None = None,
        retry: RetryPolicy | None = None,
        retention: timedelta | None = None,
        origin: str | None = None,
        redelivered: bool = False,
        tx: Any = None,
    ) -> Outcome[Any]:
        """Let the message take effect exactly once. If this returns, acknowledge; if it raises, do not.

        `handler` is called as handler(message, tx) or handler(message) in the transaction that records the
        message; without it the registered handler of the message's type runs. `redelivered` is what the broker
        says; with a retry policy such a delivery is counted before it runs, so that a message that kills its
        process ends as a dead letter. `origin` is kept for people: topic/partition/offset, queue and tag.
        `retention` keeps this record for so long after it is processed, whatever the inbox's own says.

        With `tx`, a transaction that you opened, the handler runs in a savepoint of that. It is deduplication only:
        nothing is kept of a failure (see `record_failure`), and nothing has happened before you commit.
        """
        self._check_message(message)
        try:
            work = self._intake.take_in(
                message, handler, key=key, retry=retry, retention=retention, redelivered=redelivered, origin=origin
            )
        except InvalidMessage as error:
            self._refused(message, error)
            raise
        if work is None:
            self._bus.emit(events.Ignored(consumer=self.consumer, type=message.type, message_id=message.id))
            return Outcome(Kind.IGNORED)
        if tx is not None:
            return await self._join(work, tx)
        return raised(await self._settle(work))

    async def process_many(
        self,
        messages: Iterable[Message[Any]],
        handler: Callable[..., Any] | None = None,
        *,
        key: KeyLike | None = None,
        retry: RetryPolicy | None = None,
        retention: timedelta | None = None,
        redelivered: bool = False,
        origins: Sequence[str | None] | None = None,
    ) -> list[Outcome[Any]]:
        """Many messages in one transaction, each with its own run of the handler and its own outcome, in their order.

        Nothing is raised for one message: `outcome.verdict` says what to do with each. What concerns all is raised,
        such as a database that is not there; what was committed before that stands, and is a duplicate next time.
        """
        asked = {"key": key, "retry": retry, "retention": retention, "redelivered": redelivered}
        return await self._batch(call_of("process_many", messages, handler, origins=origins, **asked))

    async def process_bulk(
        self,
        messages: Iterable[Message[Any]],
        handler: Callable[..., Any],
        *,
        key: KeyLike | None = None,
        retry: RetryPolicy | None = None,
        retention: timedelta | None = None,
        redelivered: bool = False,
        origins: Sequence[str | None] | None = None,
    ) -> list[Outcome[Any]]:
        """As process_many, but the handler is called once, as handler(messages, tx) or handler(messages), with the list
        of those that are new. It returns None, or a list with a result for each.

        When it raises, it is called again with halves of the list until the message that fails is alone; `BulkError`
        can name it at once.
        """
        asked = {"key": key, "retry": retry, "retention": retention, "redelivered": redelivered}
        return await self._batch(call_of("process_bulk", messages, handler, origins=origins, **asked))

    def deliver(
        self,
        messages: Sequence[Message[Any]],
        handler: Callable[..., Any] | None = None,
        *,
        bulk: Callable[..., Any] | None = None,
        redelivered: bool = False,
        origins: Sequence[str | None] | None = None,
    ) -> Coroutine[Any, Any, list[Outcome[Any]]]:
        """For loops of brokers: process_many, or process_bulk with `bulk`, with retries that end, also where nothing is
        said about them."""
        verb, given = ("process_many", handler) if bulk is None else ("process_bulk", bulk)
        asked = {"key": None, "retry": None, "retention": None, "redelivered": redelivered, "fallback": RETRY}
        return self._batch(call_of(verb, messages, given, origins=origins, **asked))

    def _batch(self, call: Call) -> Coroutine[Any, Any, list[Outcome[Any]]]:
        if not self._open:
            raise InboxClosed
        return self._batcher.run(call)

    @asynccontextmanager
    async def claim(
        self,
        message: Message[Any],
        *,
        tx: Any = None,
        key: KeyLike | None = None,
        retention: timedelta | None = None,
        origin: str | None = None,
    ) -> AsyncIterator[Claim]:
        """Claim a message inside a transaction that you opened: `if claim.first:` do the work, else it is done.

        The block is a savepoint. An error that leaves it takes the claim and what the block wrote with it; the rest of
        your transaction stands, and ends as you say. Without `tx` the claim is all that there is: on Redis a lease for
        as long as the block lasts.
        """
        work = self._claim_work("claim", message, key=key, retention=retention, origin=origin)
        async with self._telling(work), self._settler.claimed(work, tx) as claim:
            self._tell(work, claim.outcome)
            yield claim

    async def mark_processed(
        self,
        message: Message[Any],
        *,
        tx: Any = None,
        result: Any = None,
        extra: Any = None,
        key: KeyLike | None = None,
        retention: timedelta | None = None,
        origin: str | None = None,
    ) -> None:
        """Record that you processed it, in your transaction. AlreadyProcessed: somebody else has, so roll back.

        `result` is what duplicates get, `extra` anything else worth keeping. Without `tx` it is a transaction of its
        own, which protects nothing that you wrote before.
        """
        work = self._claim_work("mark_processed", message, key=key, retention=retention, origin=origin)
        async with self._telling(work), self._settler.claimed(work, tx) as claim:
            claim.save(result, extra=extra)
        if claim.outcome is not None:
            self._tell(work, claim.outcome)
            if claim.outcome.kind is Kind.DEAD and claim.outcome.error is not None:
                raise claim.outcome.error
            done = "processed" if claim.outcome.duplicate else str(claim.outcome.kind)
            raise AlreadyProcessed(f"{message.type} {message.id!r} is {done} already")

    async def is_processed(self, message: Message[Any], *, tx: Any = None, key: KeyLike | None = None) -> bool:
        """Whether it has taken effect: in your transaction with `tx`, else as far as it is committed.

        True is certain. False may be wrong a moment later; `claim` and `mark_processed` decide.
        """
        self._check_message(message)
        record = await self._find(self.identity_of(message, key=key), message, tx)
        return record is not None and record.state is State.PROCESSED

    async def record_failure(
        self,
        message: Message[Any],
        error: Exception,
        *,
        key: KeyLike | None = None,
        retry: RetryPolicy | None = None,
        origin: str | None = None,
    ) -> Outcome[Any]:
        """Count a failure after you rolled back: FAILED, with `retry_at` where a policy says when, or DEAD."""
        work = self._claim_work("record_failure", message, key=key, retry=retry, origin=origin)
        async with self._telling(work):
            outcome = await self._settler.keep_failure(work, error)
        self._tell(work, outcome)
        return outcome

    async def bury(self, message: Message[Any], error: Exception, *, origin: str | None = None) -> Outcome[Any]:
        """Keep a message as a dead letter that no handler can run: DEAD. If it was settled before, what it came to.

        One that has no usable key or tenant is kept by its id, in a scope of its own; one that is too large without its
        payload, and the error says so. InvalidMessage: not even that can be kept.
        """
        self._check_message(message, "bury")

        async def bury(_message: Message[Any]) -> None:
            raise error if isinstance(error, Reject) else Reject(str(error)) from error

        return await self._settle(self._intake.work_to_bury(message, handler_of(bury), origin))

    def _claim_work(self, verb: str, message: Message[Any], **known: Any) -> Work:
        self._check_message(message, verb)
        if not self._open:
            raise InboxClosed
        return self._work(message, self._intake.claimant(message), **known)

    def _check_message(self, message: object, verb: str = "process") -> None:
        if not isinstance(message, Message):
            raise UsageError(f"{verb} takes a Message, not {type(message).__name__}")

    async def _join(self, work: Work, tx: Any) -> Outcome[Any]:
        """In a transaction of the caller's nothing is processed before the commit, so only what is known is told."""
        if not self._open:
            raise InboxClosed
        async with self._telling(work):
            outcome = await self._settler.join(work, tx)
        if outcome.kind is not Kind.PROCESSED:
            self._tell(work, outcome)
        return outcome

    @asynccontextmanager
    async def _telling(self, work: Work) -> AsyncIterator[None]:
        """Tell of errors that are ours. Those of the caller's code are the caller's business, see record_failure."""
        try:
            yield
        except (TryLater, PayloadMismatch, StoreError) as error:
            self._bus.emit(events.of_error(self.consumer, work.message, work.identity, error))
            raise

    def _tell(self, work: Work, outcome: Outcome[Any] | None) -> None:
        if outcome is not None:
            self._bus.emit(events.of_outcome(self.consumer, work.message, work.identity, outcome))

    def _work(
        self,
        message: Message[Any],
        handler: Handler,
        *,
        origin: str | None = None,
        identity: Identity | None = None,
        **asked: Any,
    ) -> Work:
        try:
            return self._intake.maker(message.type, handler, **asked)(message, origin, identity)
        except InvalidMessage as error:
            self._refused(message, error)
            raise

    def _refused(self, message: Message[Any], error: InvalidMessage) -> None:
        self._bus.emit(events.Refused(consumer=self.consumer, type=message.type, message_id=message.id, error=error))

    def identity_of(self, message: Message[Any], *, key: KeyLike | None = None) -> Identity:
        """The identity of a message: by `key`, by its registered handler's key, or by the inbox's."""
        return self._intake.identity_of(message, key)

    def _settle(self, work: Work) -> Coroutine[Any, Any, Outcome[Any]]:
        """Settle it, and tell those who listen what happened."""
        if not self._open:
            raise InboxClosed
        if not self._bus.active:
            return self._settler.settle(work)
        return watched(self._bus, self.consumer, work, self._settler.settle)

    # --- records --------------------------------------------------------------------------------------------

    async def get_record(self, message: Message[Any] | Identity, *, tx: Any = None) -> Record | None:
        """What the store remembers of a message or identity: as you see it in `tx`, else what is committed."""
        if not isinstance(message, Identity):
            return await self._find(self.identity_of(message), message, tx)
        # For on_begin, which wants to know whose transaction it is.
        stand_in = Message(id=message.key[:100], type="onceward.lookup", payload=None, tenant=message.tenant)
        return await self._find(message, stand_in, tx)

    async def _find(self, identity: Identity, message: Message[Any], tx: Any) -> Record | None:
        if not self._open:
            raise InboxClosed
        message = msgspec.structs.replace(message, tenant=identity.tenant)
        async with self._settler.reading(message, tx) as unit:
            found = await unit.find(identity)
        return found.record if found else None

    async def replay(self, message: Message[Any] | Identity, handler: Callable[..., Any] | None = None) -> Outcome[Any]:
        """Run a dead letter again, now, with the registered handler of its type or the one given.

        PROCESSED when it succeeds. When it fails again it stays dead, with one more attempt and error. One that was
        accepted goes back to its place in the queue instead, as if it had never been tried: ACCEPTED.
        """
        record = await self._dead_letter(message)
        if record.received_position is not None and handler is None:
            return await self._requeue(record)
        kept = record.message()
        if handler is not None:
            known: Handler | None = handler_of(handler)
        else:
            known = self._router.find(kept.type)
        if known is None:
            raise HandlerNotFound(f"no handler is registered for {kept.type!r}; pass handler=", type=kept.type)
        work = self._work(kept, known, identity=record.identity, replayed=True, origin=record.origin)
        if record.payload is None and record.body is None and is_mismatch(work, record.payload_hash):
            raise UsageError(
                "the payload of this message was not kept: its worker died before it could. Let it be sent again."
            )
        return await self._settle(work)

    async def discard(self, message: Message[Any] | Identity) -> None:
        """Say that a dead letter will never run. Its record stays, so that a redelivery is still known."""
        record = await self._dead_letter(message)
        async with self._settler.unit(record.message()) as unit:
            if not await self._discarded(unit, record):
                raise NotDead("the record has changed meanwhile; look again", state=record.state.value)

    async def cleanup(
        self, older_than: timedelta | None = None, *, batch: int = 1000, progress: Progress | None = None
    ) -> int:
        """Delete the records of what was processed longer ago than `older_than` (default: the inbox's retention).

        Records that came with a retention of their own go when their time has come, and no earlier. In small
        transactions that nobody waits for; what is not processed is never touched. A message whose record is gone is
        new when it comes again, so keep records longer than your broker can deliver again. The number deleted, told
        to `progress` meanwhile; while another instance cleans up the same consumer, this one leaves it to that.
        """
        return await self._upkeep().cleanup(older_than, batch=batch, progress=progress)

    async def sweepable(self, older_than: timedelta | None = None) -> int:
        """How many records `cleanup` would delete now."""
        return await self._upkeep().sweepable(older_than)

    async def stats(self) -> Stats:
        """How many records this consumer has, by state and age. It reads an index; see docs/metrics.md for the cost."""
        return await self._upkeep().stats()

    async def records(self, *states: State, older_than: timedelta | None = None, limit: int = 100) -> list[Record]:
        """Records of this consumer, the oldest first: in any state, or in those given.

        Dead letters are `records(State.DEAD)`; what is stuck is `records(State.RUNNING, State.FAILED,
        older_than=timedelta(minutes=5))`. As `stats` and `cleanup` it is about the whole consumer, so `on_begin` is
        not called: with row-level security it sees what the role may see.
        """
        return await self._upkeep().records(*states, older_than=older_than, limit=limit)

    def _upkeep(self) -> Upkeep:
        if not self._open:
            raise InboxClosed
        return Upkeep(self.store, self.consumer, self._retention, self._bus)

    async def _dead_letter(self, message: Message[Any] | Identity) -> Record:
        record = await self.get_record(message)
        if record is None:
            raise RecordNotFound
        # Without transactions a replay that kills its process leaves the message as one that runs.
        was_left = record.state is State.RUNNING and not self.store.features.transactional
        if record.state is not State.DEAD and not was_left:
            raise NotDead(f"the record is {record.state}; only dead letters can be replayed or discarded",
                          state=record.state.value)  # fmt: skip
        return record


def _check_options(consumer: object, handlers: object) -> None:
    try:
        check_text("consumer", consumer, "Name the service, the same for all of its instances.")
    except InvalidMessage as error:
        raise UsageError(str(error)) from error
    if isinstance(handlers, Router):
        raise UsageError("handlers= takes a list of routers: handlers=[router]")


def _one_of(name: str, value: object, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise UsageError(f"{name}={value!r}: it is one of {', '.join(map(repr, allowed))}")
