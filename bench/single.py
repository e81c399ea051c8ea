"""PostgreSQL, one message at a time: what does the inbox add to the transaction that the effect needs anyway?

The floor is that transaction. The limit is a hand-written inbox with the same guarantees and the same trips. All go
through a pool of the same kind, which resets a connection when it comes back.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack
from secrets import token_hex
from typing import Any

import asyncpg

from bench import postgres
from bench.handwritten import HANDLER, HOST, Claim, claim_of, quoted
from bench.messages import CONSUMER, RESULT, charge_of, new_messages
from bench.questions import World
from bench.rounds import Stage, Step, Variant
from onceward import Inbox, Message
from onceward.asyncpg import AsyncpgStore

CHARGE = "INSERT INTO charges (message_id, order_id, cents) VALUES ($1, $2, $3)"


# --- the handler, the same for all ------------------------------------------------------------------------------


async def charge(message: Message[Any], tx: asyncpg.Connection) -> None:
    await tx.execute(CHARGE, *charge_of(message))


async def charge_with_result(message: Message[Any], tx: asyncpg.Connection) -> dict[str, Any]:
    await tx.execute(CHARGE, *charge_of(message))
    return RESULT


# --- (a) no inbox: BEGIN, the effect, COMMIT ----------------------------------------------------------------------


def no_inbox(pool: asyncpg.Pool) -> Step:
    """Three trips and the pool's RESET. A message that comes twice takes effect twice."""

    async def step(messages: list[Message[Any]]) -> int:
        (message,) = messages
        async with pool.acquire() as connection:
            await connection.execute("BEGIN")
            await charge(message, connection)
            await connection.execute("COMMIT")
        return 1

    return step


# --- (b) hand-written: what onceward does, without onceward -----------------------------------------------------


def begin_with_claim(claim: Claim, token: str) -> str:
    """BEGIN, a token that is local to the transaction, and the claim, as one text for one trip.

    The advisory lock says at once when another transaction has the message; the row count says whether it is new.
    """
    message = claim.message
    return (
        "BEGIN ISOLATION LEVEL READ COMMITTED; "
        f"SET LOCAL bench.token = '{token}'; "
        "SET LOCAL client_connection_check_interval = '2s'; "
        "INSERT INTO onceward_records (identity, consumer, tenant, scope, key, message_id, type, source, topic, "
        "origin, state, attempts, payload_hash, handler, host, processed_at, occurred_at, stream, position) "
        f"SELECT '{claim.identity.hex()}'::uuid, '{CONSUMER}', 'default', {quoted(claim.scope)}, {quoted(message.id)}, "
        f"{quoted(message.id)}, {quoted(message.type)}, {quoted(message.source)}, {quoted(message.topic)}, "
        f"NULL, 'processed', 1, '\\x{claim.payload_hash.hex()}'::bytea, '{HANDLER}', '{HOST}', now(), "
        f"NULL::timestamptz, NULL, NULL::bigint WHERE pg_try_advisory_xact_lock({claim.lock}) "
        "ON CONFLICT (identity) DO NOTHING"
    )


def commit_if_ours(token: str) -> str:
    """1/0 stops the trip before COMMIT when the handler has ended the transaction behind our back."""
    return f"SELECT 1 / (coalesce(current_setting('bench.token', true), '') = '{token}')::int; COMMIT"


def hand_written(pool: asyncpg.Pool) -> Step:
    """Three trips as well: claim with BEGIN, the effect, token and COMMIT."""

    async def step(messages: list[Message[Any]]) -> int:
        (message,) = messages
        claim, token = claim_of(message), token_hex(8)
        async with pool.acquire() as connection:
            if await connection.execute(begin_with_claim(claim, token)) != "INSERT 0 1":
                await connection.execute("ROLLBACK")
                return 0  # here one would look whether it is a duplicate, or in flight
            await charge(message, connection)
            return int(await connection.execute(commit_if_ours(token)) == "COMMIT")

    return step


KEEP_RESULT = "UPDATE onceward_records SET result = $2::text::json, duration_ms = 0 WHERE identity = $1::text::uuid"


def hand_written_with_result(pool: asyncpg.Pool, encoded: str = '{"charged":true}') -> Step:
    """Four trips: the result is an UPDATE after the handler."""

    async def step(messages: list[Message[Any]]) -> int:
        (message,) = messages
        claim, token = claim_of(message), token_hex(8)
        async with pool.acquire() as connection:
            if await connection.execute(begin_with_claim(claim, token)) != "INSERT 0 1":
                await connection.execute("ROLLBACK")
                return 0
            await charge_with_result(message, connection)
            await connection.execute(KEEP_RESULT, claim.identity.hex(), encoded)
            return int(await connection.execute(commit_if_ours(token)) == "COMMIT")

    return step


# --- (c) naive: look, write, remember -----------------------------------------------------------------------------

NAIVE = "CREATE TABLE processed_messages (message_id text PRIMARY KEY, processed_at timestamptz DEFAULT now())"


def naive(pool: asyncpg.Pool) -> Step:
    """What is in most code bases: five trips, no record to read, and two that look at the same time both go on."""

    async def step(messages: list[Message[Any]]) -> int:
        (message,) = messages
        async with pool.acquire() as connection, connection.transaction():
            if await connection.fetchval("SELECT 1 FROM processed_messages WHERE message_id = $1", message.id):
                return 0
            await charge(message, connection)
            await connection.execute("INSERT INTO processed_messages (message_id) VALUES ($1)", message.id)
        return 1

    return step


# --- (d), (e) onceward --------------------------------------------------------------------------------------------


def processed(inbox: Inbox[Any], handler: Any) -> Step:
    async def step(messages: list[Message[Any]]) -> int:
        (message,) = messages
        return int((await inbox.process(message, handler)).processed)

    return step


async def stages(world: World) -> AsyncGenerator[Stage, None]:
    async with postgres.database(world.postgres_dsn) as dsn:
        await postgres.run(dsn, NAIVE)
        await Inbox(AsyncpgStore(dsn=dsn), consumer=CONSUMER).setup()
        for connections in (1, 16):
            async with AsyncExitStack() as stack:
                watch = await stack.enter_async_context(postgres.watching(dsn))
                pool = await stack.enter_async_context(postgres.pool(dsn, connections))
                store = AsyncpgStore(dsn=dsn, min_size=connections, max_size=connections)
                inbox = await stack.enter_async_context(Inbox(store, consumer=CONSUMER))
                yield Stage(
                    question="single",
                    title="PostgreSQL, one message at a time",
                    workers=connections,
                    make=new_messages,
                    effects=watch.effects,
                    server_cpu=watch.server_cpu,
                    variants=(
                        Variant("no inbox", no_inbox(pool)),
                        Variant("by hand", hand_written(pool), ("no inbox",)),
                        Variant("onceward", processed(inbox, charge), ("no inbox", "by hand")),
                        Variant("by hand, result", hand_written_with_result(pool), ("no inbox",)),
                        Variant(
                            "onceward, result",
                            processed(inbox, charge_with_result),
                            ("no inbox", "by hand, result"),
                        ),
                        Variant("naive", naive(pool), ("no inbox", "by hand")),
                    ),
                )
