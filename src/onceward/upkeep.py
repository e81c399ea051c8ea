"""Upkeep of one consumer's records: sweeping what is old, and looking at what is there."""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime, timedelta
from time import perf_counter
from typing import Any, TypeAlias

import msgspec

from onceward.errors import UsageError
from onceward.events import Bus, SweepFailed, Swept
from onceward.record import Record, State
from onceward.retention import check_age
from onceward.stats import Stats
from onceward.store import Store, Sweepable

MAX_BATCH = 5000
"""Records in one transaction of a sweep. PostgreSQL keeps a lock in memory for each of them."""

Progress: TypeAlias = Callable[[int], Any]


class Upkeep(msgspec.Struct, frozen=True):
    store: Store[Any]
    consumer: str
    retention: timedelta
    bus: Bus

    async def cleanup(self, older_than: timedelta | None, *, batch: int, progress: Progress | None) -> int:
        """Delete what is expired, then what is old, in small transactions, and tell how it went."""
        older = self._seconds(older_than)
        check_batch(batch)
        began, total = perf_counter(), 0

        def count(deleted: int) -> None:
            nonlocal total
            total += deleted
            if progress is not None and deleted:
                progress(total)

        failed: Exception | None = None
        try:
            await self._sweep(older, batch, count)
        except Exception as error:
            failed = error
            raise
        finally:  # a sweep that is cancelled is none that failed: it got as far as this
            self._tell(failed, total, (perf_counter() - began) * 1000)
        return total

    async def now(self) -> datetime:
        """The database's time, for the janitor. When it cannot be asked, there will be no sweep either."""
        began = perf_counter()
        try:
            async with self.store.unit(read_only=True) as unit:
                return await unit.now()
        except Exception as error:
            self._tell(error, 0, (perf_counter() - began) * 1000)
            raise

    def _tell(self, failed: Exception | None, deleted: int, spent: float) -> None:
        if failed is None:
            self.bus.emit(Swept(consumer=self.consumer, deleted=deleted, duration_ms=spent))
        else:
            self.bus.emit(SweepFailed(consumer=self.consumer, error=failed, deleted=deleted, duration_ms=spent))

    async def _sweep(self, older: float, batch: int, count: Callable[[int], None]) -> None:
        for what in Sweepable:
            after = None
            while True:
                async with self.store.unit() as unit:
                    swept = await unit.sweep(self.consumer, what, older, batch=batch, after=after)
                if swept is None:
                    return  # another sweeper is at it
                count(swept.deleted)
                if not swept.more:
                    break
                after = swept.last

    async def sweepable(self, older_than: timedelta | None) -> int:
        async with self.store.unit(read_only=True) as unit:
            return await unit.sweepable(self.consumer, self._seconds(older_than))

    async def stats(self) -> Stats:
        async with self.store.unit(read_only=True) as unit:
            stats = await unit.stats(self.consumer)
            return msgspec.structs.replace(stats, queue=await unit.queue_stats(self.consumer))

    async def records(self, *states: State, older_than: timedelta | None, limit: int) -> list[Record]:
        if limit < 1:
            raise UsageError(f"limit={limit}: it is at least 1")
        older = None if older_than is None else check_age(older_than).total_seconds()
        wanted = tuple(_state(state) for state in states) or tuple(State)
        async with self.store.unit(read_only=True) as unit:
            return await unit.records(self.consumer, wanted, older=older, limit=limit)

    def _seconds(self, older_than: timedelta | None) -> float:
        return (self.retention if older_than is None else check_age(older_than)).total_seconds()


def check_batch(batch: int) -> int:
    if not 1 <= batch <= MAX_BATCH:
        raise UsageError(f"batch={batch}: a batch is from 1 to {MAX_BATCH} records")
    return batch


def _state(given: State) -> State:
    try:
        return State(given)
    except ValueError:
        raise UsageError(f"{given!r} is not a state; there are {', '.join(State)}") from None
