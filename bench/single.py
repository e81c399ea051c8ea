"""PostgreSQL, one message at a time: what does the inbox add to the transaction that the effect needs anyway?

The floor is that transaction, with the pool as most people have it: it resets a connection that comes back, with a trip
of its own. In a pool of its own onceward sends the reset together with COMMIT, so there is a second floor that does so
too, and onceward is measured on a given pool as well. The limit is a hand-written inbox with the same guarantees and
the same trips.
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
from bench.postgres import Lent, commit_and_reset
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
    """Three trips and the pool's reset, a fourth. A message that comes twice takes effect twice."""

    async def step(messages: list[Message[Any]]) -> int:
        (message,) = messages
        async with pool.acquire() as connection:
            await connection.execute("BEGIN")
            await charge(message, connection)
            await connection.execute("COMMIT")
        return 1

    return step


def no_inbox_riding(pool: asyncpg.Pool) -> Step:
    """Three trips: the reset rides with COMMIT."""

    async def step(messages: list[Message[Any]]) -> int:
        (message,) = messages
        async with Lent(pool) as connection:
            await connection.execute("BEGIN")
            await charge(message, connection)
            await connection.execute(commit_and_reset(connection))
        return 1

    return step


# --- (b) hand-written: what onceward does, without onceward -----------------------------------------------------

CLAIM = """
by_hand (uuid, text, text, text, text, text, text, bytea, text, text, bigint) AS
INSERT INTO onceward_records (
    identity, consumer, tenant, scope, key, message_id, type, source, topic, origin, state, attempts,
    payload_hash, handler, host, processed_at, occurred_at, stream, position)
SELECT
    $1, $2, 'default', $3, $4, $4, $5, $6, $7, NULL, 'processed', 1, $8, $9, $10, now(), NULL, NULL, NULL
WHERE pg_try_advisory_xact_lock($11)
ON CONFLICT (identity) DO NOTHING
"""
"""Prepared once on each connection, so that the server need not parse and plan it for each message."""


def begin_with_claim(claim: Claim, token: str) -> str:
    """BEGIN, a token that is local to the transaction, and the claim, as one text for one trip.

    The advisory lock says at once when another transaction has the message; the row count says whether it is new.
    """
    message = claim.message
    return (
        "BEGIN ISOLATION LEVEL READ COMMITTED; "
        f"SET LOCAL bench.token = '{token}'; "
        "SET LOCAL client_connection_check_interval = '2s'; "
        f"EXECUTE by_hand ('{claim.identity.hex()}', '{CONSUMER}', {quoted(claim.scope)}, {quoted(message.id)}, "
        f"{quoted(message.type)}, {quoted(message.source)}, {quoted(message.topic)}, "
        f"'\\x{claim.payload_hash.hex()}', '{HANDLER}', '{HOST}', {claim.lock})"
    )


def commit_if_ours(connection: asyncpg.Connection, token: str) -> str:
    """1/0 stops the trip before COMMIT when the handler has ended the transaction behind our back, or broken it."""
    stands = f"coalesce(current_setting('bench.token', true), '') = '{token}'"
    return f"SELECT 1 / ({stands})::int; {commit_and_reset(connection)}"


def hand_written(pool: asyncpg.Pool) -> Step:
    """Three trips as well: claim with BEGIN, the effect, token and COMMIT and reset."""

    async def step(messages: list[Message[Any]]) -> int:
        (message,) = messages
        claim, token = claim_of(message), token_hex(8)
        async with Lent(pool) as connection:
            if await connection.execute(begin_with_claim(claim, token)) != "INSERT 0 1":
                await connection.execute(f"ROLLBACK; {connection.get_reset_query()}")
                return 0  # here one would look whether it is a duplicate, or in flight
            await charge(message, connection)
            await connection.execute(commit_if_ours(connection, token))
        return 1

    return step


KEEP_RESULT = "UPDATE onceward_records SET result = $2::text::json, duration_ms = 0 WHERE identity = $1::text::uuid"


def hand_written_with_result(pool: asyncpg.Pool, encoded: str = '{"charged":true}') -> Step:
    """Four trips: the result is an UPDATE after the handler."""

    async def step(messages: list[Message[Any]]) -> int:
        (message,) = messages
        claim, token = claim_of(message), token_hex(8)
        async with Lent(pool) as connection:
            if await connection.execute(begin_with_claim(claim, token)) != "INSERT 0 1":
                await connection.execute(f"ROLLBACK; {connection.get_reset_query()}")
                return 0
            await charge_with_result(message, connection)
            await connection.execute(KEEP_RESULT, claim.identity.hex(), encoded)
            await connection.execute(commit_if_ours(connection, token))
        return 1

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
                riding = await stack.enter_async_context(postgres.riding_pool(dsn, connections, [CLAIM]))
                given = await stack.enter_async_context(postgres.pool(dsn, connections))
                own = AsyncpgStore(dsn=dsn, min_size=connections, max_size=connections)
                inbox = await stack.enter_async_context(Inbox(own, consumer=CONSUMER))
                on_given = await stack.enter_async_context(Inbox(AsyncpgStore(pool=given), consumer=CONSUMER))
                floors = ("no inbox", "no inbox, riding")
                yield Stage(
                    question="single",
                    title="PostgreSQL, one message at a time",
                    workers=connections,
                    make=new_messages,
                    effects=watch.effects,
                    server_cpu=watch.server_cpu,
                    variants=(
                        Variant("no inbox", no_inbox(pool)),
                        Variant("no inbox, riding", no_inbox_riding(riding), floors[:1]),
                        Variant("by hand", hand_written(riding), floors),
                        Variant("onceward", processed(inbox, charge), (*floors, "by hand")),
                        Variant("onceward, your pool", processed(on_given, charge), floors[:1]),
                        Variant("by hand, result", hand_written_with_result(riding), floors),
                        Variant("onceward, result", processed(inbox, charge_with_result), (*floors, "by hand, result")),
                        Variant("naive", naive(pool), floors[:1]),
                    ),
                )
