"""A queue as one writes it by hand: one table, FOR UPDATE SKIP LOCKED. It has the columns of onceward's record, finds
duplicates by the same identity, and nothing else: no lanes, no order, no dependencies, no retries, no crash counting.

The reset of the pool rides with COMMIT, where there is one.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any
from uuid import UUID

import asyncpg
import msgspec

from bench import postgres
from bench.handwritten import HOST, claim_of
from bench.messages import CONSUMER
from bench.postgres import Lent, commit_and_reset
from bench.queues.base import CHARGE, Work, row_of
from onceward import Message

NAME = "by hand"
KEPT = "SELECT count(*) FROM queue"
SETTLED = "SELECT count(*) FROM queue WHERE state = 'processed'"
EMPTY = "TRUNCATE queue"
SLOWS = False

TABLE = """
CREATE TABLE queue (
    seq bigserial PRIMARY KEY, identity uuid NOT NULL UNIQUE, consumer text NOT NULL, tenant text NOT NULL,
    scope text NOT NULL, key text NOT NULL, message_id text NOT NULL, type text NOT NULL, source text NOT NULL,
    topic text NOT NULL, state text NOT NULL DEFAULT 'accepted', payload json, payload_hash bytea NOT NULL, host text,
    received_at timestamptz NOT NULL DEFAULT now(), processed_at timestamptz);
CREATE INDEX queue_ready ON queue (seq) WHERE state = 'accepted';
"""
COLUMNS = "identity, consumer, tenant, scope, key, message_id, type, source, topic, payload, payload_hash, host"
INSERT = f"""
INSERT INTO queue ({COLUMNS})
VALUES ($1, '{CONSUMER}', 'default', $2, $3, $3, $4, $5, $6, $7::text::json, $8, $9)
ON CONFLICT (identity) DO NOTHING
"""
INSERT_ALL = f"""
INSERT INTO queue ({COLUMNS})
SELECT identity, '{CONSUMER}', 'default', scope, key, key, type, source, topic, payload::json,
       decode(payload_hash, 'base64'), $2
FROM json_to_recordset($1::text::json) AS (
    identity uuid, scope text, key text, type text, source text, topic text, payload text, payload_hash text)
ORDER BY identity
ON CONFLICT (identity) DO NOTHING
"""
TAKE = """
SELECT seq, message_id, payload::text FROM queue WHERE state = 'accepted' ORDER BY seq LIMIT $1 FOR UPDATE SKIP LOCKED
"""
DONE = "UPDATE queue SET state = 'processed', processed_at = now(), payload = NULL WHERE seq = ANY ($1::bigint[])"


class HandQueue:
    def __init__(self, pool: asyncpg.Pool) -> None:
        self._pool = pool

    async def accept(self, message: Message[Any]) -> None:
        """One INSERT that commits itself: nothing has to be reset after it."""
        claim = claim_of(message)
        async with Lent(self._pool) as connection:
            await connection.execute(
                INSERT, UUID(bytes=claim.identity), claim.scope, message.id, message.type, message.source,
                message.topic, _json(message.payload), claim.payload_hash, HOST,
            )  # fmt: skip

    async def accept_many(self, messages: list[Message[Any]]) -> None:
        """One INSERT with one JSON parameter."""
        async with Lent(self._pool) as connection:
            await connection.execute(INSERT_ALL, _json([_line(message) for message in messages]), HOST)

    fill = accept_many

    async def copy(self, messages: list[Message[Any]]) -> None:
        """COPY into the table itself, which cannot skip what it knows already."""
        rows = []
        for message in messages:
            claim = claim_of(message)
            rows.append((
                UUID(bytes=claim.identity), CONSUMER, "default", claim.scope, message.id, message.id, message.type,
                message.source, message.topic, _json(message.payload), claim.payload_hash, HOST,
            ))  # fmt: skip
        async with Lent(self._pool) as connection:
            await connection.copy_records_to_table("queue", records=rows, columns=COLUMNS.split(", "))

    async def dispatch(self, work: Work) -> bool:
        return await self._some(work, 1) > 0

    async def run(self, work: Work, stop: asyncio.Event, *, workers: int = 1, batch: int | None = None) -> None:
        async def one() -> None:
            while not stop.is_set():
                if not await self._some(work, batch or 1):
                    await asyncio.sleep(0.01)

        await asyncio.gather(*(one() for _ in range(workers)))

    async def _some(self, work: Work, number: int) -> int:
        async with Lent(self._pool) as connection:
            await connection.execute("BEGIN")
            rows = await connection.fetch(TAKE, number)
            for row in rows:
                payload = msgspec.json.decode(row["payload"])
                if await work(Message(id=row["message_id"], type="order.paid", payload=payload)):
                    await connection.execute(CHARGE, *row_of(payload, row["message_id"]))
            if rows:
                await connection.execute(DONE, [row["seq"] for row in rows])
            await connection.execute(commit_and_reset(connection))
        return len(rows)


def _line(message: Message[Any]) -> dict[str, Any]:
    claim = claim_of(message)
    return {
        "identity": claim.identity.hex(),
        "scope": claim.scope,
        "key": message.id,
        "type": message.type,
        "source": message.source,
        "topic": message.topic,
        "payload": _json(message.payload),
        "payload_hash": claim.payload_hash,
    }


def _json(value: Any) -> str:
    return msgspec.json.encode(value).decode()


async def set_up(dsn: str) -> None:
    await postgres.run(dsn, TABLE)


@asynccontextmanager
async def opened(dsn: str, connections: int) -> AsyncIterator[HandQueue]:
    pool: asyncpg.Pool
    async with postgres.riding_pool(dsn, connections) as pool:
        yield HandQueue(pool)
