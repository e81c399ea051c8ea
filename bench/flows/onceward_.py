"""onceward itself, behind the same lines as the others."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import cache
from typing import Any

from bench.flows.base import CHARGE, Handler, Process
from bench.messages import CONSUMER, charge_of
from onceward import Inbox, Message
from onceward.asyncpg import AsyncpgStore

NAME = "onceward"


async def set_up(dsn: str) -> None:
    await Inbox(AsyncpgStore(dsn=dsn), consumer=CONSUMER).setup()


@asynccontextmanager
async def consumer(dsn: str, connections: int) -> AsyncIterator[Process]:
    store = AsyncpgStore(dsn=dsn, min_size=connections, max_size=connections)
    # The errors that are made on purpose here need not be logged.
    async with Inbox(store, consumer=CONSUMER, listeners=()) as inbox:

        async def process(message: Message[Any], handler: Handler) -> None:
            await inbox.process(message, adapted(handler))

        yield process


@cache
def adapted(handler: Handler) -> Any:
    """As onceward calls it. Once for each handler: a function that is new for each message is looked at each time."""

    async def handle(message: Message[Any], tx: Any) -> None:
        async def write(message: Message[Any]) -> None:
            await tx.execute(CHARGE, *charge_of(message))

        await handler(message, write)

    return handle
