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
from time import perf_counter
from typing import Any

from onceward.current import enter, leave
from onceward.errors import HandlerEndedTransaction, LeaseLost, OncewardError, StoreError, UsageError
from onceward.outcome import Kind, Outcome
from onceward.queue import LaneEnd, TurnClosing
from onceward.settle import Settler
from onceward.shield import finish
from onceward.slot import Settings, Slot, awaited, told_apart
from onceward.store import Closing


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
            with suppress(Exception):  # the database has trouble: the next beat may succeed, or the lease ends
                if not self.completed and not await self._extend():
                    self._lost = True

    @asynccontextmanager
    async def complete(self) -> AsyncIterator[Any]:
        """The transaction in which the effect is written and the message is done, both or neither."""
        if self.completed:
            raise UsageError("the lease is completed already; there is one complete() for a message")
        slot, intake = self._slot, self._settings.intake
        lane = slot.queued.lane
        async with self._held() as unit:
            yield unit.tx
            slot.keep_result(self.result)
            closing = TurnClosing(self._owner, [LaneEnd(lane.hex())], [slot.done_line()], settled=slot.settled())
            await unit.close_lanes(closing, consumer=intake.consumer, host=intake.host)
            await unit.commit()
        self.completed = True

    async def seen_before(self) -> bool:
        """What the inbox's hook says, in a transaction like that of `complete`."""
        hook = self._settings.intake.seen_before
        if hook is None:
            return False
        async with self._held() as unit:
            return bool(await hook(unit.tx, self._slot.message))

    @asynccontextmanager
    async def _held(self) -> AsyncIterator[Any]:
        """A transaction that has locked the lane. LeaseLost: it is another worker's."""
        lane, on_begin = self._slot.queued.lane, self._settings.on_begin
        async with self._settler.plain_unit() as unit:
            if lane not in await unit.hold_lanes(self._owner, [lane]):
                self._lost = True
                raise LeaseLost
            if on_begin is not None:
                await on_begin(unit.tx, self._slot.message)
            yield unit

    async def keep_result(self, result: Any) -> None:
        """What a handler returned after it had completed: for duplicates, and no more than that."""
        slot, self.result = self._slot, result
        slot.keep_result(result)
        closing = Closing(slot.queued.identity, slot.encoded, slot.duration_ms)
        async with self._settler.plain_unit() as unit:
            await unit.repair(unclaim=(), complete=[closing], bury=())

    # --- when it is not completed ---------------------------------------------------------------------------

    async def fail(self, error: BaseException) -> None:
        """Settle what the handler raised: a failure of its own, or nobody's."""
        slot = self._slot
        if isinstance(error, LeaseLost) or self._lost:
            slot.outcome = Outcome(Kind.BUSY, error=error if isinstance(error, LeaseLost) else LeaseLost())
        elif isinstance(error, SystemExit):
            raise error  # as a crash: see Crew._claim
        elif not isinstance(error, Exception):
            await finish(self._give_back())
            raise error
        elif isinstance(error, StoreError) and not isinstance(error, HandlerEndedTransaction):
            await finish(self._give_back())
            slot.outcome = Outcome(Kind.BUSY, error=error)
        elif not await finish(self._write_failure(error)):
            slot.outcome = Outcome(Kind.BUSY, error=LeaseLost())

    async def _give_back(self) -> None:
        """Shut down, or the database is away: nobody failed. If it cannot be said, the lease ends by itself."""
        lane = self._slot.queued.lane
        with suppress(OncewardError):
            async with self._settler.plain_unit() as unit:
                if self._slot.marked and lane in await unit.extend(self._owner, [lane], 1.0):
                    await unit.unmark_start(self._slot.queued.identity)
                await unit.release(self._owner, [lane])

    async def _write_failure(self, error: Exception) -> bool:
        """Whether it was still ours to write."""
        slot, intake = self._slot, self._settings.intake
        lane = slot.queued.lane
        end = slot.fail(error, self._settings) or LaneEnd(lane.hex())
        async with self._settler.plain_unit() as unit:
            if slot.outcome is None or lane not in await unit.hold_lanes(self._owner, [lane]):
                return False
            closing = TurnClosing(self._owner, [end], failed=[slot.failed_line(slot.outcome)], settled=slot.settled())
            await unit.close_lanes(closing, consumer=intake.consumer, host=intake.host)
            await unit.commit()
        return True


async def run_leased(settler: Settler[Any], settings: Settings, owner: str, slot: Slot) -> Slot:
    """Run the handler with the lease of its message, and settle what becomes of it."""
    handler = slot.handler
    assert handler is not None  # noqa: S101 - see Turn
    assert handler.lease is not None  # noqa: S101
    lease = Lease(settler, settings, owner, slot, handler.lease)
    began, token, kind = perf_counter(), enter(slot.run(handler)), Kind.PROCESSED
    beat: asyncio.Task[None] | None = None
    try:
        await lease.extend()
        beat = asyncio.ensure_future(lease.heartbeat())
        if await lease.seen_before():
            result, kind = None, Kind.DUPLICATE
        else:
            result = await awaited(handler, handler.call_with(slot.message, lease))
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
            await lease.fail(told_apart(error))
            return slot
        if not isinstance(error, Exception):
            raise
    finally:
        leave(token)
        if beat is not None:
            await finish(_ended(beat))
    slot.succeed(lease.result, kind)
    return slot


async def _ended(task: asyncio.Task[None]) -> None:
    """It may be talking to the database: its connection is given back before anybody goes on."""
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
