"""Several messages through a store without transactions: claimed in one trip, then each ends by itself.

Nothing that ran can be undone there, so nobody runs again because a neighbour failed. A failure is kept at once, a
success with the next few, in one trip: before the next handler runs if handlers are slow, and at the end at the latest.
What the process has done and not yet said when it dies is done again.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress
from inspect import isawaitable
from time import perf_counter
from types import CoroutineType
from typing import Any

from onceward import codec
from onceward.attempt import bury_ended, keep_failure
from onceward.current import Current, enter, leave
from onceward.errors import HandlerEndedTransaction, LeaseLost, OncewardError, ResultInvalid
from onceward.outcome import Kind, Outcome
from onceward.shield import finish
from onceward.store import Closing, InFlight, LeaseUnit
from onceward.together import Lanes, Segment, Slot, comes_again

AT_LEAST_EVERY = 0.005
"""Seconds after which what is done is said, before the next handler runs."""


class Severally(Segment):
    """`work` gives what has to be worked on alone: after a crash nobody knows which of its messages was the reason."""

    def __init__(self, unit: LeaseUnit[Any], slots: list[Slot], lanes: Lanes) -> None:
        super().__init__(unit, slots, lanes, None)
        self._leases = unit
        self._unsaid: list[Slot] = []

    async def work(self) -> list[list[Slot]]:
        alone = await self._claim()
        for slot in alone:
            self._lanes.hold(slot)
        try:
            await self._run_all({id(slot) for slot in alone})
        except BaseException:
            with suppress(OncewardError):  # what is on its way is heard, and not this
                await finish(self._say())
            raise
        await finish(self._say())  # what was claimed and has not run is given back with the unit
        return [[slot] for slot in alone]

    async def _run_all(self, alone: set[int]) -> None:
        last = perf_counter()
        for slot in self._slots:
            if id(slot) in alone:
                continue
            if slot.lane is not None and any(one.lane == slot.lane for one in self._unsaid):
                await self._say()  # it may be refused, and then this one must not run
            if await self._admits(slot):
                await self._run(slot)
                if perf_counter() - last > AT_LEAST_EVERY:
                    await self._say()
                    last = perf_counter()

    async def _run(self, slot: Slot) -> None:
        work, before = slot.work, slot.before
        handler, began = work.handler, perf_counter()
        number = 1 if before is None else before.attempts + 1
        token, result = None, None
        failed: Exception | None = None
        try:
            tx, fence = self._leases.begin_one(work.identity)
            token = enter(Current(work.identity, handler.shape.name, number, work.redelivered, work.origin, fence))
            if work.seen_before is not None and await work.seen_before(tx, work.message):
                slot.seen_before, result = True, None
            else:
                result = handler.to_call(work.message, tx)
                if type(result) is CoroutineType or isawaitable(result):
                    result = await result
            slot.encoded = None if result is None else codec.encode(result, "result", ResultInvalid)
        except asyncio.CancelledError:
            if not self._leases.was_stopped():
                raise
            failed = LeaseLost()
        except Exception as error:  # noqa: BLE001 - it is the handler's
            failed = error
        finally:
            self._leases.handled()
            if token is not None:
                leave(token)
        if failed is not None:
            await self._failed(slot, failed, (perf_counter() - began) * 1000)
            return
        slot.result, slot.duration_ms = result, (perf_counter() - began) * 1000
        self._unsaid.append(slot)

    async def _failed(self, slot: Slot, error: Exception, duration_ms: float) -> None:
        if isinstance(error, LeaseLost):
            slot.outcome = Outcome(Kind.BUSY, error=error)
        elif isinstance(error, HandlerEndedTransaction):
            await bury_ended(self._unit, slot.work, error)
            slot.outcome = Outcome(Kind.FAILED, error=error)
        else:
            try:
                slot.outcome = await keep_failure(self._unit, slot.work, slot.before, error, duration_ms)
            except InFlight:
                slot.outcome = Outcome(Kind.BUSY, error=LeaseLost())
        if comes_again(slot.outcome):
            self._lanes.stop(slot)

    async def _say(self) -> None:
        """What is done since the last time."""
        slots, self._unsaid = self._unsaid, []
        if not slots:
            return
        await self._unit.complete_many([_closing(slot) for slot in slots if _has_closing(slot)])
        refused: list[tuple[Slot, OncewardError]] = []
        outcomes = await self._leases.end_some([slot.work.identity for slot in slots])
        for slot, error in zip(slots, outcomes, strict=True):
            if error is None:
                self._settle([slot])
            else:
                refused.append((slot, error))
        for slot, error in refused:
            await self._failed(slot, error, slot.duration_ms)


def _has_closing(slot: Slot) -> bool:
    return slot.encoded is not None or slot.before is not None or slot.work.record_duration


def _closing(slot: Slot) -> Closing:
    return Closing(slot.work.identity, slot.encoded, slot.duration_ms)
