"""PostgreSQL, nothing but duplicates, with a million messages known: how fast is "that was done before"?

The cache in the process is switched off: it would answer in less than a microsecond, and what is asked here is the
database. Every answer compares the payload with the first one, as onceward does.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack
from typing import Any

import asyncpg

from bench import postgres
from bench.batches import BATCH
from bench.handwritten import HANDLER, HOST, claim_of
from bench.messages import CONSUMER, order_paid
from bench.questions import World
from bench.rounds import Stage, Step, Variant
from bench.single import charge
from onceward import Inbox, Message, Outcome
from onceward.asyncpg import AsyncpgStore

# Half of the numbers each, on two connections. In the order of the identity the index is filled from left to right.
KNOWN = """
INSERT INTO onceward_records (
    identity, consumer, tenant, scope, key, message_id, type, source, topic, state, attempts, payload_hash, handler,
    host, processed_at)
SELECT
    onceward_id($3, 'default', 'source:shop', 'known-' || n), $3, 'default', 'source:shop', 'known-' || n,
    'known-' || n, 'order.paid', 'shop', 'orders', 'processed', 1,
    sha256(convert_to('{"cents":' || n % 10000 || ',"order":"o-' || n || '"}', 'UTF8')), $4, $5, now()
FROM generate_series(1 + $2::int, $1::int, 2) AS n ORDER BY 1
"""


async def fill(dsn: str, known: int) -> None:
    async def half(offset: int) -> None:
        connection = await asyncpg.connect(dsn)
        try:
            await connection.execute(KNOWN, known, offset, CONSUMER, HANDLER, HOST)
        finally:
            await connection.close()

    await asyncio.gather(half(0), half(1))
    await postgres.run(dsn, "VACUUM ANALYZE onceward_records")


class Known:
    """Messages that are known, in a random order that is the same in each run."""

    def __init__(self, known: int) -> None:
        self._known = known
        self._random = random.Random(1)

    def make(self, number: int) -> list[Message[Any]]:
        numbers = (self._random.randint(1, self._known) for _ in range(number))
        return [order_paid(f"known-{n}", n) for n in numbers]


# --- hand-written, one at a time ----------------------------------------------------------------------------------

LOOK = "SELECT payload_hash, result::text FROM onceward_records WHERE identity = $1::text::uuid AND state = 'processed'"


def select_first(pool: asyncpg.Pool) -> Step:
    """One trip, and the RESET of the pool. It may answer "duplicate", but never "new"."""

    async def step(messages: list[Message[Any]]) -> int:
        (message,) = messages
        claim = claim_of(message)
        row = await pool.fetchrow(LOOK, claim.identity.hex())
        return int(row is not None and row["payload_hash"] == claim.payload_hash)

    return step


CLAIM = """
INSERT INTO onceward_records (
    identity, consumer, tenant, scope, key, message_id, type, source, topic, state, attempts, payload_hash, handler,
    host, processed_at)
SELECT $1::text::uuid, $2, 'default', $3, $4::text, $4::text, $5, $6, $7, 'processed', 1, $8, $9, $10, now()
WHERE pg_try_advisory_xact_lock($11)
ON CONFLICT (identity) DO NOTHING
"""


def insert_first(pool: asyncpg.Pool) -> Step:
    """One trip as well: the claim as a transaction of its own, and its row count. The first record is not read."""

    async def step(messages: list[Message[Any]]) -> int:
        (message,) = messages
        claim = claim_of(message)
        tag = await pool.execute(
            CLAIM,
            claim.identity.hex(),
            CONSUMER,
            claim.scope,
            message.id,
            message.type,
            message.source,
            message.topic,
            claim.payload_hash,
            HANDLER,
            HOST,
            claim.lock,
        )
        return int(tag == "INSERT 0 0")

    return step


# --- hand-written, in batches -------------------------------------------------------------------------------------

LOOK_FOR_ALL = (
    "SELECT identity::text, payload_hash, result::text FROM onceward_records "
    "WHERE identity = ANY ($1::text[]::uuid[]) AND state = 'processed'"
)


def select_all(pool: asyncpg.Pool) -> Step:
    """One trip for a hundred. A message that is in the batch twice is answered twice."""

    async def step(messages: list[Message[Any]]) -> int:
        claims = [claim_of(message) for message in messages]
        rows = await pool.fetch(LOOK_FOR_ALL, [claim.identity.hex() for claim in claims])
        hashes = {row["identity"].replace("-", ""): row["payload_hash"] for row in rows}
        return sum(hashes.get(claim.identity.hex()) == claim.payload_hash for claim in claims)

    return step


# --- onceward -----------------------------------------------------------------------------------------------------


def recognised(outcome: Outcome[Any]) -> bool:
    return outcome.duplicate and not outcome.mismatch


def one_by_one(inbox: Inbox[Any]) -> Step:
    async def step(messages: list[Message[Any]]) -> int:
        (message,) = messages
        return int(recognised(await inbox.process(message, charge)))

    return step


def in_batches(inbox: Inbox[Any], floors: tuple[str, ...]) -> Variant:
    process = getattr(inbox, "process_many", None)
    if process is None:
        return Variant("process_many", None, missing="not available")

    async def step(messages: list[Message[Any]]) -> int:
        return sum(recognised(outcome) for outcome in await process(messages, charge))

    return Variant("process_many", step, floors)


async def stages(world: World) -> AsyncGenerator[Stage, None]:
    async with postgres.database(world.postgres_dsn) as dsn:
        await Inbox(AsyncpgStore(dsn=dsn), consumer=CONSUMER).setup()
        await fill(dsn, world.known)
        known = Known(world.known)
        for connections in (1, 16):
            async with AsyncExitStack() as stack:
                watch = await stack.enter_async_context(postgres.watching(dsn))
                pool = await stack.enter_async_context(postgres.pool(dsn, connections))
                store = AsyncpgStore(dsn=dsn, min_size=connections, max_size=connections)
                inbox = await stack.enter_async_context(Inbox(store, consumer=CONSUMER, cache=0))
                for title, batch, variants in (
                    (
                        "one at a time",
                        1,
                        (
                            Variant("select first", select_first(pool)),
                            Variant("insert first", insert_first(pool), ("select first",)),
                            Variant("onceward", one_by_one(inbox), ("select first", "insert first")),
                        ),
                    ),
                    (
                        f"batches of {BATCH}",
                        BATCH,
                        (Variant("= any()", select_all(pool)), in_batches(inbox, ("= any()",))),
                    ),
                ):
                    yield Stage(
                        question="duplicates",
                        title=f"PostgreSQL, only duplicates, {world.known:,} known, {title}",
                        workers=connections,
                        batch=batch,
                        make=known.make,
                        effects=watch.effects,
                        server_cpu=watch.server_cpu,
                        effects_per_message=0,
                        variants=variants,
                    )
