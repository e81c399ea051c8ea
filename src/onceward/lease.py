"""Leases: a long handler holds no transaction. It has the message for a while, which a heartbeat extends.

    @inbox.handler("video.uploaded", lease=30)
    async def transcode(message, lease):
        file = await encode(message.payload)          # minutes; nothing is locked
        async with lease.complete() as tx:            # here the effect becomes exactly-once
            await tx.execute("INSERT INTO videos ...")

A worker that lost its lease, because it froze or was cut off, finds out in `complete`: the lane has another owner,
which is checked and locked in the transaction of the effect. So two may have worked, and one of them took effect.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from inspect import isawaitable
from time import perf_counter
from typing import Any

from onceward import codec
from onceward.attempt import LONGEST_DELAY, failure_of
from onceward.current import Current, enter, leave
from onceward.errors import (
    HandlerEndedTransaction,
    HandlerTimeout,
    LeaseLost,
    OncewardError,
    Reject,
    ResultInvalid,
    StoreError,
    TryLater,
    UsageError,
)
from onceward.handlers import Handler
from onceward.message import Message
from onceward.outcome import Kind, Outcome
from onceward.queue import Closing, DoneLine, FailedLine, LaneEnd, Then
from onceward.retention import milliseconds
from onceward.settle import Settler
from onceward.shield import finish
from onceward.store import Closing as Written
from onceward.turn import Settings, Slot, told_apart


class Lease:
    """That a message is ours for a while. The second argument of a handler with `lease=`."""

    def __init__(self, settler: Settler[Any], settings: Settings, owner: str, slot: Slot, seconds: float) -> None:
        self._settler = settler
        self._settings = settings
        self._owner = owner
        self._slot = slot
        self._seconds = seconds
        self._lost = False
        self.completed = False
        """Whether the effect is committed."""
        self.result: Any = None
        """What duplicates get; set it, or return it from the handler, before `complete` ends."""

    @property
    def lost(self) -> bool:
        """Another worker has the message, or may have it: what you do now is in vain."""
        return self._lost

    async def extend(self) -> None:
        """Have it for the whole time again. A heartbeat does this every third of it; LeaseLost when it is over."""
        if not await self._extend():
            self._lost = True
            raise LeaseLost

    async def _extend(self) -> bool:
        lane = self._slot.queued.lane
        async with self._settler.plain_unit() as unit:
            return lane in await unit.extend(self._owner, [lane], self._seconds)

    async def heartbeat(self) -> None:
        while not self.completed and not self._lost:
            await asyncio.sleep(self._seconds / 3)
            with suppress(OncewardError):  # the database is away: the lease ends when its time is over
                if not self.completed and not await self._extend():
                    self._lost = True

    @asynccontextmanager
    async def complete(self) -> AsyncIterator[Any]:
        """The transaction in which the effect is written and the message is done, both or neither."""
        if self.completed:
            raise UsageError("the lease is completed already; there is one complete() for a message")
        slot, settings = self._slot, self._settings
        lane, intake = slot.queued.lane, settings.intake
        async with self._settler.plain_unit() as unit:
            if lane not in await unit.hold_lanes(self._owner, [lane]):
                self._lost = True
                raise LeaseLost
            if settings.on_begin is not None:
                await settings.on_begin(unit.tx, slot.message)
            yield unit.tx
            encoded = None if self.result is None else codec.encode(self.result, "result", ResultInvalid)
            handler = slot.handler
            line = DoneLine(
                seq=slot.queued.seq,
                identity=slot.identity,
                handler=None if handler is None else handler.name,
                result=None if encoded is None else encoded.decode(),
                duration_ms=slot.duration_ms or None,
                keep_ms=None if handler is None else milliseconds(handler.retention),
                started=slot.marked,
            )
            closing = Closing(self._owner, [LaneEnd(lane.hex())], [line])
            await unit.close_lanes(closing, consumer=intake.consumer, host=intake.host)
            await unit.commit()
        self.completed = True

    async def seen_before(self) -> bool:
        """What the inbox's hook says, in a transaction like that of `complete`."""
        hook = self._settings.intake.seen_before
        if hook is None:
            return False
        slot, lane = self._slot, self._slot.queued.lane
        async with self._settler.plain_unit() as unit:
            if lane not in await unit.hold_lanes(self._owner, [lane]):
                self._lost = True
                raise LeaseLost
            if self._settings.on_begin is not None:
                await self._settings.on_begin(unit.tx, slot.message)
            seen = bool(await hook(unit.tx, slot.message))
            await unit.rollback()
        return seen

    async def keep_result(self, result: Any) -> None:
        """What a handler returned after it had completed: for duplicates, and no more than that."""
        self.result = result
        encoded = codec.encode(result, "result", ResultInvalid)
        identity, duration_ms = self._slot.queued.record.identity, self._slot.duration_ms
        async with self._settler.plain_unit() as unit:
            await unit.repair(unclaim=(), complete=[Written(identity, encoded, duration_ms)], bury=())


async def run_leased(settler: Settler[Any], settings: Settings, owner: str, slot: Slot) -> Slot:
    """Run the handler with the lease of its message, and settle what becomes of it."""
    handler, record = slot.handler, slot.queued.record
    assert handler is not None  # noqa: S101 - see Turn
    assert handler.lease is not None  # noqa: S101
    lease = Lease(settler, settings, owner, slot, handler.lease)
    began = perf_counter()
    run = Current(record.identity, handler.name, slot.attempts, slot.attempts > 1 or record.started > 0, record.origin)
    token, beat, kind = enter(run), None, Kind.PROCESSED
    try:
        await lease.extend()
        beat = asyncio.ensure_future(lease.heartbeat())
        if await lease.seen_before():
            result, kind = None, Kind.DUPLICATE
        else:
            result = await _called(handler, slot.message, lease)
        slot.duration_ms = (perf_counter() - began) * 1000
        if not lease.completed:
            lease.result = result
            async with lease.complete():
                pass
        elif result is not None and lease.result is None:
            await lease.keep_result(result)
    except BaseException as error:
        slot.duration_ms = (perf_counter() - began) * 1000
        if not lease.completed:
            await _failed(settler, settings, owner, slot, lease=lease, error=error)
            return slot
        if not isinstance(error, Exception):
            raise
    finally:
        leave(token)
        if beat is not None:
            beat.cancel()
    slot.outcome = Outcome(kind, result=lease.result, attempts=slot.attempts, duration_ms=slot.duration_ms)
    return slot


async def _called(handler: Handler, message: Message[Any], lease: Lease) -> Any:
    patience = asyncio.timeout(handler.timeout)
    try:
        async with patience:
            result = handler.call_with(message, lease)
            return await result if isawaitable(result) else result
    except TimeoutError as error:
        if not patience.expired():
            raise
        raise HandlerTimeout(f"{handler.name} did not end within {handler.timeout:g} s") from error


async def _failed(
    settler: Settler[Any], settings: Settings, owner: str, slot: Slot, *, lease: Lease, error: BaseException
) -> None:
    lane, intake, record = slot.queued.lane, settings.intake, slot.queued.record
    error = told_apart(error)
    if isinstance(error, LeaseLost) or lease.lost:
        slot.outcome = Outcome(Kind.BUSY, error=error if isinstance(error, LeaseLost) else LeaseLost())
        return
    if not isinstance(error, Exception) or (
        isinstance(error, StoreError) and not isinstance(error, HandlerEndedTransaction)
    ):
        # Shut down, or the database is away: nobody failed.

        async def give_back() -> None:
            with suppress(OncewardError):
                async with settler.plain_unit() as unit:
                    if slot.marked and lane in await unit.extend(owner, [lane], 1.0):
                        await unit.unmark_start(record.identity)
                    await unit.release(owner, [lane])

        if isinstance(error, SystemExit):
            raise error  # as a crash: see Crew.step
        await finish(give_back())
        if not isinstance(error, Exception):
            raise error
        slot.outcome = Outcome(Kind.BUSY, error=error)
        return
    crashes = max(0, record.started - slot.marked)
    retry = (slot.handler.retry if slot.handler is not None else None) or settings.retry
    dead = isinstance(error, (Reject, HandlerEndedTransaction)) or retry.exhausted(slot.attempts + crashes)
    delay = None
    if not dead:
        asked = error.delay if isinstance(error, TryLater) else None
        delay = retry.delay(slot.attempts) if asked is None else min(max(asked, 0.0), LONGEST_DELAY)
    slot.fails(error, Kind.DEAD if dead else Kind.FAILED, delay)
    end = LaneEnd(lane.hex(), Then.RETRY, delay or 0.0)
    if dead:
        blocks = settings.on_dead == "block" and slot.is_ordered
        end = LaneEnd(lane.hex(), Then.BLOCKED, blocker=slot.identity) if blocks else LaneEnd(lane.hex())
    line = FailedLine(
        seq=slot.queued.seq,
        identity=slot.identity,
        error=codec.encode(failure_of(error), "error").decode(),
        handler=None if slot.handler is None else slot.handler.name,
        delay=delay,
        dead=dead,
        duration_ms=slot.duration_ms,
        started=slot.marked,
    )

    async def write() -> bool:
        async with settler.plain_unit() as unit:
            if lane not in await unit.hold_lanes(owner, [lane]):
                return False
            closing = Closing(owner, [end], failed=[line])
            await unit.close_lanes(closing, consumer=intake.consumer, host=intake.host)
            await unit.commit()
            return True

    if not await finish(write()):
        slot.outcome = Outcome(Kind.BUSY, error=LeaseLost())
