"""ascetic-ddd: `publish`, `dispatch`, `run` of its inbox, on a psycopg pool. The handler shares its transaction."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from ascetic_ddd.inbox import Inbox, InboxMessage
from ascetic_ddd.session.pg_session import PgSessionPool, extract_connection
from psycopg.types.json import Jsonb
from psycopg_pool import AsyncConnectionPool

from bench.queues.base import Work, row_of
from onceward import Message

NAME = "ascetic-ddd"
KEPT = "SELECT count(*) FROM inbox"
SETTLED = "SELECT count(*) FROM inbox WHERE processed_position IS NOT NULL"
EMPTY = "TRUNCATE inbox"
SLOWS = True

CHARGE = "INSERT INTO charges (message_id, order_id, cents) VALUES (%s, %s, %s)"
COPY = "COPY inbox (tenant_id, stream_type, stream_id, stream_position, uri, payload, metadata) FROM STDIN"


class AsceticQueue:
    def __init__(self, pool: AsyncConnectionPool[Any], poll_interval: float = 1.0) -> None:
        self._pool = pool
        self._inbox = Inbox(PgSessionPool(pool))
        self._poll_interval = poll_interval

    async def accept(self, message: Message[Any]) -> None:
        await self._inbox.publish(_of(message))

    async def accept_many(self, messages: list[Message[Any]]) -> None:
        """It takes one at a time."""
        for message in messages:
            await self._inbox.publish(_of(message))

    async def fill(self, messages: list[Message[Any]]) -> None:
        async with self._pool.connection() as connection, connection.cursor() as cursor, cursor.copy(COPY) as copy:
            copy.set_types(["varchar", "varchar", "jsonb", "int4", "varchar", "jsonb", "jsonb"])
            for one in map(_of, messages):
                await copy.write_row((
                    one.tenant_id, one.stream_type, Jsonb(one.stream_id), one.stream_position, one.uri,
                    Jsonb(one.payload), Jsonb(one.metadata),
                ))  # fmt: skip

    async def dispatch(self, work: Work) -> bool:
        return await self._inbox.dispatch(_handler(work))

    async def run(self, work: Work, stop: asyncio.Event, *, workers: int = 1, batch: int | None = None) -> None:
        assert batch in (None, 1), "it works on one at a time"
        await self._inbox.run(_handler(work), concurrency=workers, stop_event=stop, poll_interval=self._poll_interval)


def _of(message: Message[Any]) -> InboxMessage:
    return InboxMessage(
        tenant_id="default",
        stream_type="Order",
        stream_id={"id": message.id},
        stream_position=1,
        uri=f"kafka://orders/{message.id}",
        payload=message.payload,
        metadata={"event_id": message.id},
    )


def _handler(work: Work) -> Any:
    async def handle(session: Any, message: InboxMessage) -> None:
        id_ = message.stream_id["id"]
        if await work(Message(id=id_, type="order.paid", payload=message.payload)):
            async with extract_connection(session).cursor() as cursor:
                await cursor.execute(CHARGE, row_of(message.payload, id_))

    return handle


async def set_up(dsn: str) -> None:
    async with AsyncConnectionPool(dsn, min_size=1, max_size=1, open=False) as pool:
        sessions = PgSessionPool(pool)
        async with sessions.session() as session, session.atomic() as atomic:
            await Inbox(sessions).setup(atomic)


@asynccontextmanager
async def opened(dsn: str, connections: int, poll_interval: float = 1.0) -> AsyncIterator[AsceticQueue]:
    async with AsyncConnectionPool(dsn, min_size=connections, max_size=connections, open=False) as pool:
        yield AsceticQueue(pool, poll_interval)
