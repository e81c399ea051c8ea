"""onceward's own queue, through the public API."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import cache
from typing import Any

from bench.batches import charge_all
from bench.messages import CONSUMER, charge_of
from bench.queues.base import CHARGE, Tally, Work
from onceward import Inbox, Message, RetryPolicy
from onceward.asyncpg import AsyncpgStore

NAME = "onceward"
KEPT = "SELECT count(*) FROM onceward_records"
SETTLED = "SELECT count(*) FROM onceward_records WHERE state = 'processed'"
EMPTY = "TRUNCATE onceward_records, onceward_pending, onceward_lanes, onceward_waits"
SLOWS = False

# What is lost for a moment in these comparisons must come back while we look.
SOON = RetryPolicy(max_attempts=10, base=0.02, cap=0.1)


class OncewardQueue:
    def __init__(self, inbox: Inbox[Any]) -> None:
        self.inbox = inbox

    async def accept(self, message: Message[Any]) -> None:
        await self.inbox.accept(message)

    async def accept_many(self, messages: list[Message[Any]]) -> None:
        await self.inbox.accept(messages)

    fill = accept_many

    async def dispatch(self, work: Work) -> bool:
        return await self.inbox.dispatch(_handler(work)) is not None

    async def run(self, work: Work, stop: asyncio.Event, *, workers: int = 1, batch: int | None = None) -> None:
        size = {} if batch is None else {"batch": batch}
        await self.inbox.run(_handler(work), stop=stop, concurrency=workers, **size)

    async def run_by_dispatch(self, tally: Tally, stop: asyncio.Event) -> None:
        """A loop of one's own, around `dispatch`."""
        while not stop.is_set():
            await self.inbox.dispatch(_handler(tally.work))

    async def run_bulk(self, tally: Tally, stop: asyncio.Event, *, write: bool, workers: int = 1) -> None:
        """One handler for the list."""

        async def handle(messages: list[Message[Any]], tx: Any) -> None:
            if write:
                await charge_all(messages, tx)
            tally.count(len(messages))

        await self.inbox.run(bulk=handle, stop=stop, concurrency=workers)


@cache
def _handler(work: Work) -> Any:
    """Once, as a service has it: onceward looks at a function when it sees it first."""

    async def handle(message: Message[Any], tx: Any) -> None:
        if await work(message):
            await tx.execute(CHARGE, *charge_of(message))

    return handle


async def set_up(dsn: str) -> None:
    await Inbox(AsyncpgStore(dsn=dsn), consumer=CONSUMER).setup()


@asynccontextmanager
async def opened(dsn: str, connections: int, **options: Any) -> AsyncIterator[OncewardQueue]:
    store = AsyncpgStore(dsn=dsn, min_size=connections, max_size=connections + 2)
    async with Inbox(store, consumer=CONSUMER, listeners=(), retry=SOON, **options) as inbox:
        yield OncewardQueue(inbox)
