"""PostgreSQL, batches of 100 in one transaction: with the handler run for each message, and with one for all of them.

Without an inbox a batch is a transaction with 100 INSERTs, or with one INSERT of 100 rows. The limit is hand-written:
one claim statement for the whole batch, with one JSON parameter. In all of them the pool's reset rides with COMMIT.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack
from secrets import token_hex
from typing import Any

import asyncpg
import msgspec

from bench import postgres
from bench.handwritten import HANDLER, HOST, Claim, claim_of
from bench.messages import CONSUMER, charge_of, new_messages
from bench.postgres import Lent, commit_and_reset
from bench.questions import World
from bench.rounds import Stage, Step, Variant
from bench.single import charge, commit_if_ours
from onceward import Inbox, Message
from onceward.asyncpg import AsyncpgStore

BATCH = 100
CHARGE_ALL = "INSERT INTO charges (message_id, order_id, cents) SELECT * FROM unnest($1::text[], $2::text[], $3::int[])"


async def charge_all(messages: list[Message[Any]], tx: asyncpg.Connection) -> None:
    """The handler for a whole batch: one statement."""
    ids, orders, cents = zip(*map(charge_of, messages), strict=True)
    await tx.execute(CHARGE_ALL, ids, orders, cents)


# --- no inbox -----------------------------------------------------------------------------------------------------


def no_inbox(pool: asyncpg.Pool) -> Step:
    """BEGIN, 100 INSERTs one after another, COMMIT."""

    async def step(messages: list[Message[Any]]) -> int:
        async with Lent(pool) as connection:
            await connection.execute("BEGIN")
            for message in messages:
                await charge(message, connection)
            await connection.execute(commit_and_reset(connection))
        return len(messages)

    return step


def no_inbox_bulk(pool: asyncpg.Pool) -> Step:
    """BEGIN, one INSERT of 100 rows, COMMIT."""

    async def step(messages: list[Message[Any]]) -> int:
        async with Lent(pool) as connection:
            await connection.execute("BEGIN")
            await charge_all(messages, connection)
            await connection.execute(commit_and_reset(connection))
        return len(messages)

    return step


# --- hand-written: the same records as onceward's, by one statement -----------------------------------------------

CLAIM_ALL = """
INSERT INTO onceward_records (
    identity, consumer, tenant, scope, key, message_id, type, source, topic, origin, state, attempts,
    payload_hash, handler, host, processed_at, occurred_at, stream, position)
SELECT
    m.identity, $2, 'default', m.scope, m.key, m.key, m.type, m.source, m.topic, NULL, 'processed', 1,
    m.payload_hash, $3, $4, now(), NULL, NULL, NULL
FROM json_to_recordset($1::text::json) AS m (
    identity uuid, lock bigint, scope text, key text, type text, source text, topic text, payload_hash bytea)
WHERE pg_try_advisory_xact_lock(m.lock)
ON CONFLICT (identity) DO NOTHING
"""


def as_json(messages: list[Message[Any]]) -> str:
    """All claims as one parameter, sorted, so that two batches with the same messages cannot lock each other out."""
    claims = sorted(map(claim_of, messages))
    return msgspec.json.encode([_row(claim) for claim in claims]).decode()


def _row(claim: Claim) -> dict[str, Any]:
    message = claim.message
    return {
        "identity": claim.identity.hex(),
        "lock": claim.lock,
        "scope": claim.scope,
        "key": message.id,
        "type": message.type,
        "source": message.source,
        "topic": message.topic,
        "payload_hash": f"\\x{claim.payload_hash.hex()}",
    }


async def begin_with_claims(connection: asyncpg.Connection, messages: list[Message[Any]], token: str) -> bool:
    """Two trips. Whether all of them are new; here one would look which are not."""
    await connection.execute(
        f"BEGIN ISOLATION LEVEL READ COMMITTED; SET LOCAL bench.token = '{token}'; "
        "SET LOCAL client_connection_check_interval = '2s'"
    )
    tag = await connection.execute(CLAIM_ALL, as_json(messages), CONSUMER, HANDLER, HOST)
    return bool(tag == f"INSERT 0 {len(messages)}")


def hand_written(pool: asyncpg.Pool) -> Step:
    """One claim for all, then the handler for each message: what `process_many` has to be compared with."""

    async def step(messages: list[Message[Any]]) -> int:
        token = token_hex(8)
        async with Lent(pool) as connection:
            if not await begin_with_claims(connection, messages, token):
                await connection.execute(f"ROLLBACK; {connection.get_reset_query()}")
                return 0
            for message in messages:
                await charge(message, connection)
            await connection.execute(commit_if_ours(connection, token))
        return len(messages)

    return step


def hand_written_bulk(pool: asyncpg.Pool) -> Step:
    """One claim for all and one INSERT for all: what `process_bulk` has to be compared with."""

    async def step(messages: list[Message[Any]]) -> int:
        token = token_hex(8)
        async with Lent(pool) as connection:
            if not await begin_with_claims(connection, messages, token):
                await connection.execute(f"ROLLBACK; {connection.get_reset_query()}")
                return 0
            await charge_all(messages, connection)
            await connection.execute(commit_if_ours(connection, token))
        return len(messages)

    return step


# --- onceward -----------------------------------------------------------------------------------------------------


def in_batches(name: str, inbox: Inbox[Any], method: str, handler: Any, floors: tuple[str, ...]) -> Variant:
    """`process_many` or `process_bulk`, or the word that this onceward does not have it."""
    process = getattr(inbox, method, None)
    if process is None:
        return Variant(name, None, missing="not available")

    async def step(messages: list[Message[Any]]) -> int:
        return sum(outcome.processed for outcome in await process(messages, handler))

    return Variant(name, step, floors)


async def stages(world: World) -> AsyncGenerator[Stage, None]:
    async with postgres.database(world.postgres_dsn) as dsn:
        await Inbox(AsyncpgStore(dsn=dsn), consumer=CONSUMER).setup()
        for connections in (1, 16):
            async with AsyncExitStack() as stack:
                watch = await stack.enter_async_context(postgres.watching(dsn))
                pool = await stack.enter_async_context(postgres.riding_pool(dsn, connections))
                store = AsyncpgStore(dsn=dsn, min_size=connections, max_size=connections)
                inbox = await stack.enter_async_context(Inbox(store, consumer=CONSUMER))
                each, bulk = ("no inbox", "by hand"), ("no inbox, bulk", "by hand, bulk")
                yield Stage(
                    question="batches",
                    title=f"PostgreSQL, batches of {BATCH}",
                    workers=connections,
                    batch=BATCH,
                    make=new_messages,
                    effects=watch.effects,
                    server_cpu=watch.server_cpu,
                    variants=(
                        Variant("no inbox", no_inbox(pool)),
                        Variant("by hand", hand_written(pool), each[:1]),
                        in_batches("process_many", inbox, "process_many", charge, each),
                        Variant("no inbox, bulk", no_inbox_bulk(pool), each[:1]),
                        Variant("by hand, bulk", hand_written_bulk(pool), (*each[:1], *bulk[:1])),
                        in_batches("process_bulk", inbox, "process_bulk", charge_all, (*each[:1], *bulk)),
                    ),
                )
