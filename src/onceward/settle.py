"""Settling one delivery: through the cache, behind a twin in this process, into the store, and again while another
process has it. Between the tries nothing is held.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager, suppress
from typing import Any, Generic, TypeVar

import msgspec

from onceward import codec
from onceward.attempt import attempt, compare, duplicate
from onceward.errors import OncewardError, TryLater
from onceward.flights import Cache, Flights, in_flight
from onceward.message import Message
from onceward.outcome import Kind, Outcome
from onceward.store import Conflict, Done, InFlight, Store, Unit
from onceward.work import Work

Tx = TypeVar("Tx")

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
    ) -> None:
        self._store = store
        self._wait = wait
        self._on_begin = on_begin
        self._flights = Flights()
        self._cache = Cache(cache)
        self._marks_left: dict[asyncio.Task[None], Work] = {}

    def unit(
        self, message: Message[Any], *, read_only: bool = False, around: Callable[[Any], Any] | None = None
    ) -> AbstractAsyncContextManager[Unit[Tx]]:
        """A unit of work for this message, with the user's `on_begin`, and `around` it, in each of its transactions."""
        hook = self._on_begin
        begin: Callable[[Tx], Awaitable[Any]] | None = None if hook is None else lambda tx: hook(tx, message)
        if begin is not None and around is not None:
            begin = around(begin)
        return self._store.unit(begin=begin, wait=self._wait, read_only=read_only)

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
        known = self._known(work)
        if known is not None:
            return known
        deadline = asyncio.get_running_loop().time() + self._wait
        async with self._flights.enter(work.identity.digest, self._wait):
            return self._known(work) or await self._try(work, deadline)

    def _known(self, work: Work) -> Outcome[Any] | None:
        """A duplicate of something that this process has seen committed."""
        done = None if work.replayed else self._cache.get(work.identity.digest)
        if done is None:
            return None
        return duplicate(work, done, mismatch=compare(work, done.payload_hash))

    async def _try(self, work: Work, deadline: float) -> Outcome[Any]:
        loop = asyncio.get_running_loop()
        pause, conflicts = 0.005, 0
        while True:
            try:
                async with self.unit(work.message) as unit:
                    outcome = await attempt(unit, msgspec.structs.replace(work, mark_left=self._mark_left))
            except InFlight:
                if loop.time() + pause > deadline:
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

    def known(self, work: Work) -> Outcome[Any] | None:
        return self._known(work)

    async def settle_now(self, work: Work) -> Outcome[Any]:
        """Without waiting for another runner, and for a caller that has entered the flight itself."""
        return await self._try(work, 0.0)
