"""A documented idempotent consumer: look, BEGIN, look again FOR UPDATE SKIP LOCKED, handle, insert, COMMIT.

Written from its description, on asyncpg. The lock is taken on a row that is not there yet, so it locks nothing, and the
INSERT does nothing on a conflict, so nobody notices.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from typing import Any

import asyncpg

from bench import postgres
from bench.flows.base import CHARGE, Handler, Process
from bench.messages import CONSUMER, charge_of
from onceward import Message

NAME = "processed_events"

TENANT = "00000000-0000-0000-0000-000000000001"
TABLES = f"""
CREATE TABLE tenants (id UUID PRIMARY KEY);
INSERT INTO tenants VALUES ('{TENANT}');
CREATE TABLE processed_events (
    id UUID PRIMARY KEY DEFAULT gen_random_uuid(),
    idempotency_key VARCHAR(255) NOT NULL,
    event_type VARCHAR(100) NOT NULL,
    consumer_group VARCHAR(100) NOT NULL,
    tenant_id UUID NOT NULL REFERENCES tenants(id),
    event_id UUID NOT NULL,
    event_timestamp TIMESTAMPTZ NOT NULL,
    processed_at TIMESTAMPTZ NOT NULL DEFAULT NOW(),
    result_status VARCHAR(20) NOT NULL DEFAULT 'success',
    result_payload JSONB,
    CONSTRAINT uq_processed_event_key UNIQUE (idempotency_key, consumer_group, tenant_id)
);
CREATE INDEX idx_processed_events_timestamp ON processed_events(processed_at);
CREATE INDEX idx_processed_events_lookup ON processed_events(idempotency_key, consumer_group, tenant_id);
"""
KEY = "WHERE idempotency_key = $1 AND consumer_group = $2 AND tenant_id = $3"
MARK = """
INSERT INTO processed_events (
    idempotency_key, event_type, consumer_group, tenant_id, event_id, event_timestamp, result_status, result_payload)
VALUES ($1, $2, $3, $4, $5, $6, $7, $8)
ON CONFLICT (idempotency_key, consumer_group, tenant_id) DO NOTHING
"""


async def set_up(dsn: str) -> None:
    await postgres.run(dsn, TABLES)


@asynccontextmanager
async def consumer(dsn: str, connections: int) -> AsyncIterator[Process]:
    pool: asyncpg.Pool
    async with postgres.pool(dsn, connections) as pool:

        async def process(message: Message[Any], handler: Handler) -> None:
            key = (message.id, CONSUMER, TENANT)
            if await pool.fetchrow(f"SELECT * FROM processed_events {KEY}", *key):
                return
            async with pool.acquire() as connection, connection.transaction():
                if await connection.fetchrow(f"SELECT 1 FROM processed_events {KEY} FOR UPDATE SKIP LOCKED", *key):
                    return

                async def write(message: Message[Any]) -> None:
                    await connection.execute(CHARGE, *charge_of(message))

                result = await handler(message, write)
                await connection.execute(
                    MARK,
                    message.id,
                    message.type,
                    CONSUMER,
                    TENANT,
                    message.id,
                    datetime.now(UTC),
                    "success",
                    None if result is None else json.dumps(result),
                )

        yield process
