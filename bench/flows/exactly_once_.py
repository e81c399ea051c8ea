"""exactly-once: `@once(store, key=...)`. The claim is committed first; its store has one connection for all callers.

What its handler did is not known after an error, so it refuses to run again until a person or a prober has decided.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from exactly_once import once
from exactly_once.stores.postgres import PostgresStore

from bench.flows.base import Handler, Process, writing_elsewhere
from onceward import Message

NAME = "exactly-once"


async def set_up(dsn: str) -> None:
    PostgresStore(dsn).close()


@asynccontextmanager
async def consumer(dsn: str, connections: int) -> AsyncIterator[Process]:
    store = PostgresStore(dsn)
    try:
        async with writing_elsewhere(dsn, connections) as write:

            @once(store, key=lambda message, _handler: message.id)
            async def process(message: Message[Any], handler: Handler) -> None:
                await handler(message, write)

            yield process
    finally:
        await store.aclose()
        store.close()
