"""sagaz: `ConsumerInbox.process_idempotent`. The row is committed first; the handler gets the payload only."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from sagaz.core.outbox.consumer_inbox import ConsumerInbox
from sagaz.core.storage.backends.postgresql.outbox import PostgreSQLOutboxStorage

from bench.flows.base import Handler, Process, writing_elsewhere
from bench.messages import CONSUMER
from onceward import Message

NAME = "sagaz"


async def set_up(dsn: str) -> None:
    storage = PostgreSQLOutboxStorage(dsn, pool_min_size=1, pool_max_size=1)
    await storage.initialize()
    await storage.close()


@asynccontextmanager
async def consumer(dsn: str, connections: int) -> AsyncIterator[Process]:
    logging.getLogger("sagaz").setLevel(logging.CRITICAL)  # errors that are made on purpose
    storage = PostgreSQLOutboxStorage(dsn, pool_min_size=connections, pool_max_size=connections)
    await storage.initialize()
    inbox = ConsumerInbox(storage, CONSUMER)
    try:
        async with writing_elsewhere(dsn, connections) as write:

            async def process(message: Message[Any], handler: Handler) -> None:
                async def handle(_payload: dict[str, Any]) -> None:
                    await handler(message, write)

                await inbox.process_idempotent(message.id, message.topic, message.type, message.payload, handle)

            yield process
    finally:
        await storage.close()
