"""Upkeep of one consumer's records: sweeping what is old."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any, TypeAlias

from onceward.errors import UsageError
from onceward.retention import check_age
from onceward.store import Store, Sweepable

MAX_BATCH = 5000
"""Records in one transaction of a sweep. PostgreSQL keeps a lock in memory for each of them."""

Progress: TypeAlias = Callable[[int], Any]


async def sweep(
    store: Store[Any], consumer: str, older_than: timedelta, batch: int, progress: Progress | None = None
) -> int:
    """Delete what is expired, then what is old, in small transactions. How many; fewer when another sweeper came."""
    older = check_age(older_than).total_seconds()
    if not 1 <= batch <= MAX_BATCH:
        raise UsageError(f"batch={batch}: a batch is from 1 to {MAX_BATCH} records")
    total = 0
    for what in Sweepable:
        after = None
        while True:
            async with store.unit() as unit:
                swept = await unit.sweep(consumer, what, older, batch=batch, after=after)
            if swept is None:
                return total
            total += swept.deleted
            if progress is not None and swept.deleted:
                progress(total)
            if swept.seen < batch:
                break
            after = swept.last
    return total
