"""Settling one delivery: through the cache, behind a twin in this process, into the store, and again while another
process has it. Between the tries nothing is held.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager, suppress
from time import monotonic
from typing import Any, Generic, TypeVar

import msgspec

from onceward import codec
from onceward.attempt import attempt, bury_ended, claim, closing_of, compare, duplicate, keep_failure, settled_by
from onceward.claim import Claim
from onceward.errors import HandlerEndedTransaction, OncewardError, TryLater
from onceward.flights import Cache, Flights, busy, in_flight
from onceward.message import Message
from onceward.outcome import Kind, Outcome
from onceward.record import State
from onceward.store import Begin, Busy, Conflict, Done, Ended, Features, InFlight, Store, Unit
from onceward.work import Work

Tx = TypeVar("Tx")
T = TypeVar("T")

MARK_PAUSES = (0.05, 0.2, 1.0, 5.0, 10.0)
"""Seconds before each further try to take back a start mark, while the store is busy or away."""

CONFLICTS = 20
"""How often a transaction that the database asks to run again is run again, before TryLater(store_busy)."""


class Settler(Generic[Tx]):
    def __init__(
        self,
        store: Store[Tx],
        *,
        wait: float,
        on_begin: Callable[[Tx, Message[Any]], Awaitable[Any]] | None,
        cache: int,
        keep: float | None = None,
    ) -> None:
        self._store = store
        self._keep = keep
        self._wait = wait
        self._on_begin = on_begin
        self._flights = Flights()
        self._cache = Cache(cache)
        self._marks_left: dict[asyncio.Task[None], Work] = {}

    def unit(
        self, message: Message[Any], *, read_only: bool = False, around: Callable[[Any], Any] | None = None
    ) -> AbstractAsyncContextManager[Unit[Tx]]:
        """A unit of work for this message, with the user's `on_begin`, and `around` it, in each of its transactions."""
        begin = None if self._on_begin is None else self._begin(message)
        if begin is not None and around is not None:
            begin = around(begin)
        return self._store.unit(begin=begin, wait=self._wait, read_only=read_only, keep=self._keep)

    def listening(self, consumer: str, ring: Callable[[], None]) -> AbstractAsyncContextManager[None]:
        return self._store.listening(consumer, ring)

    def plain_unit(self, *, read_only: bool = False) -> AbstractAsyncContextManager[Any]:
        """A unit for the queue, without the user's `on_begin`: it is not about one message."""
        return self._store.unit(wait=self._wait, read_only=read_only)

    def reading(self, message: Message[Any], tx: Any) -> AbstractAsyncContextManager[Unit[Any]]:
        """To look something up: in the caller's transaction, or what is committed."""
        if tx is None:
            return self.unit(message, read_only=True)
        return self._store.join(tx, begin=self._begin(message), read_only=True)

    def joined(self, message: Message[Any], tx: Any) -> AbstractAsyncContextManager[Unit[Any]]:
        """A unit in the caller's transaction."""
        return self._store.join(tx, begin=self._begin(message))

    def _begin(self, message: Message[Any]) -> Begin[Any] | None:
        hook = self._on_begin
        return None if hook is None else lambda tx: hook(tx, message)

    async def close(self) -> None:
        """Take back what marks are left, and forget: the database may be another one when it is opened again."""
        self._cache.clear()
        left = list(self._marks_left.items())
        for task, work in left:
            task.cancel()
            with suppress(OncewardError):
                await self._take_mark_back(work)
        await asyncio.gather(*(task for task, _ in left), return_exceptions=True)

    def _mark_left(self, work: Work) -> None:
        task = asyncio.ensure_future(self._take_mark_back_later(work))
        self._marks_left[task] = work
        task.add_done_callback(lambda ended: self._marks_left.pop(ended, None))

    async def _take_mark_back_later(self, work: Work) -> None:
        for pause in MARK_PAUSES:
            await asyncio.sleep(pause)
            with suppress(OncewardError):
                if await self._take_mark_back(work):
                    return

    async def _take_mark_back(self, work: Work) -> bool:
        async with self.unit(work.message) as unit:
            return await unit.unmark(work.draft())

    async def settle(self, work: Work) -> Outcome[Any]:
        digest = work.identity.digest
        known = self._known(work, digest)
        if known is not None:
            return known
        deadline = monotonic() + self._wait
        while not self._flights.begin(digest):
            if not await self._flights.wait_for(digest, deadline):
                raise in_flight(self._wait)
            known = self._known(work, digest)
            if known is not None:
                return known
        try:
            return await self.settle_now(work, deadline)
        finally:
            self._flights.end(digest)

    async def join(self, work: Work, tx: Any) -> Outcome[Any]:
        """In a transaction of the caller's. Nothing is remembered: the caller may still roll back."""
        async with self._ended_buried(work):
            return await self._patiently(lambda: self._attempt_joined(work, tx))

    async def _attempt_joined(self, work: Work, tx: Any) -> Outcome[Any]:
        async with self.joined(work.message, tx) as unit:
            return await attempt(unit, work)

    @asynccontextmanager
    async def claimed(self, work: Work, tx: Any) -> AsyncIterator[Claim]:
        """The claim in a savepoint of the caller's transaction, or, without one, in a transaction of its own."""
        async with self._ended_buried(work), AsyncExitStack() as stack:

            async def enter() -> tuple[Unit[Any], Claim]:
                async with AsyncExitStack() as entering:
                    unit = await entering.enter_async_context(
                        self.unit(work.message) if tx is None else self.joined(work.message, tx)
                    )
                    settled, before = await claim(unit, work)
                    if (
                        settled is None
                        and work.seen_before is not None
                        and await work.seen_before(unit.tx, work.message)
                    ):
                        settled = Outcome(Kind.DUPLICATE)
                        await unit.commit()
                    await stack.enter_async_context(entering.pop_all())
                    return unit, Claim(work.identity, settled, before)

            unit, mine = await self._patiently(enter)
            if not mine.first:
                await unit.rollback()
                yield mine
                return
            try:
                yield mine
            except BaseException as error:
                if await unit.ended():
                    raise Ended from error
                raise
            result, extra = mine.saved
            closing = closing_of(work, mine.record, result, None, extra)
            if closing is not None:
                await unit.complete(closing)
            await unit.commit()

    @asynccontextmanager
    async def _ended_buried(self, work: Work) -> AsyncIterator[None]:
        """Whoever ended a joined transaction is told, and the message is kept as a dead letter by a unit of our own.

        A block that rolled back and then failed is left alone: nothing of it stands, so it can be run again.
        """
        try:
            yield
        except HandlerEndedTransaction as error:
            await self._bury_ended(work, error)
            raise
        except Ended as signal:
            failed: Any = signal.__cause__
            if await self._is_committed(work):
                await self._bury_ended(work, HandlerEndedTransaction())
                raise HandlerEndedTransaction from failed
            raise failed from failed.__cause__

    async def _bury_ended(self, work: Work, error: HandlerEndedTransaction) -> None:
        with suppress(OncewardError):
            async with self.unit(work.message) as unit:
                await bury_ended(unit, work, error)

    async def _is_committed(self, work: Work) -> bool:
        """Whether the claim stands. It does, for all we know, when the store cannot say."""
        try:
            async with self.unit(work.message, read_only=True) as unit:
                found = await unit.find(work.identity)
        except OncewardError:
            return True
        return found is not None and found.record.state is State.PROCESSED

    async def keep_failure(self, work: Work, error: Exception) -> Outcome[Any]:
        """What a run of the caller's came to, unless somebody else has settled the message meanwhile."""

        async def keep() -> Outcome[Any]:
            async with self.unit(work.message) as unit:
                found = await unit.find(work.identity)
                settled = None if found is None else settled_by(work, found.record)
                if settled is not None:
                    return settled
                outcome = await keep_failure(unit, work, found.record if found else None, error)
            if outcome.record is None:
                raise InFlight  # another runner has it, or the caller's own claim is still there
            return outcome

        return await self._patiently(keep)

    async def _patiently(self, step: Callable[[], Awaitable[T]]) -> T:
        """Again while another runner has the message, for as long as the inbox waits."""
        deadline, pause = monotonic() + self._wait, 0.005
        while True:
            try:
                return await step()
            except InFlight as error:
                if monotonic() + pause > deadline:
                    raise (busy(self._wait) if isinstance(error, Busy) else in_flight(self._wait)) from None
            await asyncio.sleep(pause * (0.5 + random.random()))  # noqa: S311 - jitter
            pause = min(pause * 2, 0.25)

    def _known(self, work: Work, digest: bytes) -> Outcome[Any] | None:
        """A duplicate of something that this process has seen committed."""
        done = None if work.replayed else self._cache.get(digest)
        if done is None:
            return None
        return duplicate(work, done, mismatch=compare(work, done.payload_hash))

    async def settle_now(self, work: Work, deadline: float = 0.0) -> Outcome[Any]:
        """For a caller that has entered the flight. Without a deadline another runner is not waited for."""
        pause, conflicts = 0.005, 0
        if work.redelivered:
            work = msgspec.structs.replace(work, mark_left=self._mark_left)
        while True:
            try:
                async with self.unit(work.message) as unit:
                    outcome = await attempt(unit, work)
            except InFlight:
                if monotonic() + pause > deadline:
                    raise in_flight(self._wait) from None
                work = work.afresh()
            except Conflict as conflict:
                conflicts += 1
                if conflicts >= CONFLICTS:
                    text = f"the database asked {conflicts} times to run the transaction again"
                    raise TryLater(reason="store_busy", text=text) from conflict.__cause__
                work = work.afresh()
            else:
                self._remember(work, outcome)
                return outcome
            await asyncio.sleep(pause * (0.5 + random.random()))  # noqa: S311 - jitter
            pause = min(pause * 2, 0.25)

    def _remember(self, work: Work, outcome: Outcome[Any]) -> None:
        if outcome.kind is Kind.PROCESSED:
            payload_hash: bytes | None = work.payload_hash
        elif outcome.kind is Kind.DUPLICATE and outcome.record is not None:
            payload_hash = outcome.record.payload_hash
        else:
            return
        if payload_hash is not None:
            result = None if outcome.result is None else codec.encode(outcome.result, "result")
            self._cache.put(work.identity.digest, Done(payload_hash, result))

    # --- for batches ----------------------------------------------------------------------------------------

    @property
    def features(self) -> Features:
        return self._store.features

    @property
    def wait(self) -> float:
        return self._wait

    @property
    def has_hook(self) -> bool:
        """Each transaction begins with the user's `on_begin`."""
        return self._on_begin is not None

    @property
    def flights(self) -> Flights:
        return self._flights

    @property
    def cache(self) -> Cache:
        return self._cache
