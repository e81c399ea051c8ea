"""PostgreSQL, stored mode: does a message cost more when there is more in the tables?

By work done, and not by the clock: how many buffers and rows of our tables the server touched for each message, and how
many trips there were, from the server's own counters, which count a session's work when it ends. Autovacuum is off for
these tables while this is counted, so that nobody else's work is in it; each situation begins with VACUUM and ANALYZE.
Times are beside it.

Then bloat: what the tables and indexes weigh after many messages went through them, with autovacuum as it comes.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterable
from contextlib import asynccontextmanager
from typing import Any

import asyncpg
import msgspec

from bench import postgres
from bench.messages import CONSUMER, new_messages
from bench.questions import Facts, World
from bench.queues import onceward_
from bench.queues.base import Tally, peer
from bench.stored import until
from onceward import Inbox, Message, Position, lanes
from onceward.asyncpg import AsyncpgStore

SINGLES = 200
MANY = 2_000
TABLES = ("records", "pending", "lanes", "waits", "floors", "arrivals")


class Cost(msgspec.Struct, frozen=True):
    """Of one message."""

    looks: float
    """Into indexes."""
    rows: float
    """Read or written; of an index all that were looked at, also those that are gone."""
    buffers: float
    trips: float
    ms: float

    def of(self, other: Cost) -> float:
        """The work, of another's: of looks and rows what grew most."""
        return max(self.looks / other.looks, self.rows / other.rows)


# --- what the server has touched ----------------------------------------------------------------------------------

TOUCHED = """
SELECT coalesce(sum(idx_scan), 0),
       coalesce(sum(seq_tup_read + n_tup_ins + n_tup_upd + n_tup_del), 0)
           + coalesce((SELECT sum(idx_tup_read) FROM pg_stat_user_indexes WHERE relname LIKE 'onceward%'), 0),
       coalesce((SELECT sum(heap_blks_hit + heap_blks_read + coalesce(idx_blks_hit + idx_blks_read, 0)
                            + coalesce(toast_blks_hit + toast_blks_read, 0)
                            + coalesce(tidx_blks_hit + tidx_blks_read, 0))
                 FROM pg_statio_user_tables WHERE relname LIKE 'onceward%'), 0)
FROM pg_stat_user_tables WHERE relname LIKE 'onceward%'
"""
OTHERS = """
SELECT count(*) FROM pg_stat_activity
WHERE datname = current_database() AND pid <> pg_backend_pid() AND backend_type = 'client backend'
"""


async def touched(connection: asyncpg.Connection) -> tuple[int, ...]:
    """Looks, rows and buffers, when all other sessions are over and have said what they did."""
    while await connection.fetchval(OTHERS):
        await asyncio.sleep(0.02)
    before = None
    while (now := tuple(map(int, await connection.fetchrow(TOUCHED)))) != before:
        before = now
        await asyncio.sleep(0.05 if int(connection.get_server_version().major) >= 15 else 0.6)
    return now


class Trips:
    """Counts what goes over the connections of a pool."""

    def __init__(self) -> None:
        self.number = 0

    async def watch(self, connection: asyncpg.Connection) -> None:
        connection.add_query_logger(self._count)

    def _count(self, _query: Any) -> None:
        self.number += 1


@asynccontextmanager
async def opened(dsn: str, trips: Trips | None = None, **options: Any) -> AsyncIterator[Inbox[Any]]:
    store = AsyncpgStore(dsn=dsn, min_size=1, max_size=3, **({"init": trips.watch} if trips else {}))
    async with Inbox(store, consumer=CONSUMER, listeners=(), **options) as inbox:
        yield inbox


async def one_by_one(inbox: Inbox[Any], number: int) -> int:
    async def handle(_message: Message[Any]) -> None:
        pass

    for _ in range(number):
        outcome = await inbox.dispatch(handle)
        assert outcome is not None
        assert outcome.processed
    return number


async def together(inbox: Inbox[Any], number: int) -> int:
    """How many it were: some more, where there are more."""

    async def loop(tally: Tally, stop: asyncio.Event) -> None:
        async def handle(message: Message[Any]) -> None:
            await tally.work(message)

        await inbox.run(handle, stop=stop)

    tally = Tally(number, write=False)
    await until(tally.all_done, loop, tally)
    return tally.done


async def cost_of(
    dsn: str,
    connection: asyncpg.Connection,
    work: Callable[[Inbox[Any], int], Awaitable[int]],
    messages: list[Message[Any]],
    **options: Any,
) -> Cost:
    """Accept some, and see what it takes to work on them. The first few are not counted: plans are made, and caches
    of the catalogue filled."""
    trips = Trips()
    async with opened(dsn, **options) as inbox:
        await inbox.accept(messages)
    before = await touched(connection)
    async with opened(dsn, trips, **options) as inbox:
        trips.number, began = 0, time.perf_counter()
        number = await work(inbox, len(messages))
        seconds, counted = time.perf_counter() - began, trips.number
    looks, rows, buffers = ((now - then) / number for now, then in zip(await touched(connection), before, strict=True))
    return Cost(looks, rows, buffers, counted / number, seconds / number * 1000)


# --- what is in the tables before ---------------------------------------------------------------------------------

# Numbers from $1 to $2.
FINISHED = f"""
INSERT INTO onceward_records (
    identity, consumer, tenant, scope, key, message_id, type, source, topic, state, attempts, payload_hash, handler,
    host, processed_at, received_position, processed_position, stream, "position")
SELECT onceward_id('{CONSUMER}', 'default', 'source:shop', 'f' || i),
           '{CONSUMER}', 'default', 'source:shop', 'f' || i, 'f' || i, 'order.paid', 'shop', 'orders',
       'processed', 1, sha256('x'), 'handle', 'h:1', now(), nextval('onceward_received'), nextval('onceward_processed'),
       CASE WHEN $3 THEN 'order-' || gen_random_uuid() END, CASE WHEN $3 THEN 1 END
FROM generate_series($1::bigint, $2) i
"""
WAITING = f"""
WITH message AS (
    INSERT INTO onceward_records (
        identity, consumer, tenant, scope, key, message_id, type, source, topic, state, payload, payload_hash, host,
        stream, "position", depends_on, received_position)
    SELECT onceward_id('{CONSUMER}', 'default', 'source:shop', 'w' || i),
           '{CONSUMER}', 'default', 'source:shop', 'w' || i, 'w' || i, 'order.paid', 'shop',
           'orders', 'accepted', '{{"order": "o", "cents": 1}}', sha256('x'), 'h:1', 'waiting-' || i, 1,
           json_build_array(json_build_object('stream', 'never', 'position', i)), nextval('onceward_received')
    FROM generate_series($1::bigint, $2) i
    RETURNING *, ctid::text AS place),
line AS (
    INSERT INTO onceward_pending (seq, identity, lane, rank, track, "position", aside, record)
    SELECT received_position, identity, coalesce($3, identity), CASE WHEN $3 IS NULL THEN 1 ELSE -1 END,
           CASE WHEN $3 IS NULL THEN NULL ELSE stream END, 1, $3 IS NOT NULL, place
    FROM message),
lane AS (
    INSERT INTO onceward_lanes (lane, consumer, tenant, name, share, state, run_at)
    SELECT identity, consumer, tenant, stream, 1, 'waiting', NULL FROM message WHERE $3 IS NULL)
INSERT INTO onceward_waits (seq, consumer, tenant, stream, "position", place, lane, deadline)
SELECT received_position, consumer, tenant, 'never', substr(key, 2)::bigint,
       onceward_place(consumer, tenant, 'never', substr(key, 2)::bigint), coalesce($3, identity),
       now() + interval '1 day'
FROM message
"""
READY = f"""
WITH message AS (
    INSERT INTO onceward_records (
        identity, consumer, tenant, scope, key, message_id, type, source, topic, state, payload, payload_hash, host,
        received_position)
    SELECT onceward_id('{CONSUMER}', 'default', 'source:shop', 'r' || i),
           '{CONSUMER}', 'default', 'source:shop', 'r' || i, 'r' || i, 'order.paid', 'shop',
           'orders', 'accepted', '{{"order": "o", "cents": 1}}', sha256('x'), 'h:1', nextval('onceward_received')
    FROM generate_series($1::bigint, $2) i
    RETURNING *, ctid::text AS place)
INSERT INTO onceward_lanes (lane, consumer, tenant, share, run_at, seq, record)
SELECT identity, consumer, tenant, 1, now() + received_position * interval '1 microsecond' - interval '1 hour',
       received_position, place
FROM message
"""
STEP = 250_000


class Ground:
    """A database of its own, whose tables fill up."""

    def __init__(self, dsn: str, connection: asyncpg.Connection) -> None:
        self.dsn = dsn
        self.connection = connection
        self._filled = 0

    async def fill(self, sql: str, number: int, *more: Any) -> None:
        """Up to so many in all. On a connection of its own, which tells what it did when it is closed."""
        connection = await asyncpg.connect(self.dsn)
        try:
            while self._filled < number:
                upto = min(number, self._filled + STEP)
                await connection.execute(sql, self._filled + 1, upto, *more)
                self._filled = upto
            for table in TABLES:  # the indexes too, which VACUUM leaves alone where little is gone
                await connection.execute(f"VACUUM (ANALYZE, INDEX_CLEANUP ON) onceward_{table}")
        finally:
            await connection.close()

    async def finish(self, number: int, *, streams: bool = False) -> None:
        """Processed before, each of a stream of its own or of none."""
        await self.fill(FINISHED, number, streams)

    def again(self) -> None:
        """Begin to count from 0."""
        self._filled = 0


@asynccontextmanager
async def ground(server_dsn: str, finished: int = 0, *, streams: bool = False) -> AsyncIterator[Ground]:
    async with postgres.database(server_dsn) as dsn:
        await onceward_.set_up(dsn)
        connection = await asyncpg.connect(dsn)
        try:
            for table in TABLES:
                await connection.execute(f"ALTER TABLE onceward_{table} SET (autovacuum_enabled = off)")
            place = Ground(dsn, connection)
            await place.finish(finished, streams=streams)
            place.again()
            yield place
        finally:
            await connection.close()


def in_one_lane(number: int) -> list[Message[Any]]:
    """Of the same topic, each of an order of its own."""
    return [
        msgspec.structs.replace(message, stream=f"order-{message.id}", position=1) for message in new_messages(number)
    ]


class Situations:
    """The same work with more and more before it; the first of them is what the others are compared with."""

    def __init__(self, world: World) -> None:
        self._scale = 1 if world.full else 1_000
        self._singles, self._many = (SINGLES, MANY) if world.full else (20, 200)
        self.rows: list[tuple[str, ...]] = []
        self._first: tuple[Cost, Cost] | None = None

    def number(self, full: int) -> int:
        return max(1, full // self._scale) if full else 0

    def begin(self) -> None:
        self._first = None

    async def measure(
        self, name: str, place: Ground, make: Callable[[int], list[Message[Any]]] = new_messages, **options: Any
    ) -> None:
        single = await cost_of(place.dsn, place.connection, one_by_one, make(self._singles), **options)
        many = await cost_of(place.dsn, place.connection, together, make(self._many), **options)
        first = self._first = self._first or (single, many)
        self.rows.append((
            name,
            *_texts(single.looks, single.rows, single.trips, single.buffers, single.ms),
            f"{single.of(first[0]):.2f}",
            *_texts(many.looks, many.rows, many.buffers, many.ms),
            f"{many.of(first[1]):.2f}",
        ))  # fmt: skip


def _texts(*numbers: float) -> list[str]:
    return [f"{number:.1f}" if number >= 1 else f"{number:.2f}" for number in numbers]


async def processed(world: World, found: Situations, numbers: Iterable[int]) -> None:
    found.begin()
    async with ground(world.postgres_dsn) as place:
        for number in numbers:
            await place.finish(number)
            await found.measure(f"{number:,} processed", place)


async def blocked_beside(world: World, found: Situations, numbers: Iterable[int]) -> None:
    found.begin()
    async with ground(world.postgres_dsn, found.number(10_000)) as place:
        for number in numbers:
            await place.fill(WAITING, number, None)
            await found.measure(f"{number:,} blocked, in lanes of their own", place)


async def blocked_ahead(world: World, found: Situations, numbers: Iterable[int]) -> None:
    found.begin()
    async with ground(world.postgres_dsn, found.number(10_000), streams=True) as place:
        first = Message(
            id="first", type="order.paid", payload={}, source="shop", topic="orders", stream="first", position=1,
            depends_on=[Position("never", 1)],
        )  # fmt: skip
        async with opened(place.dsn, lane=lanes.by_topic) as inbox:
            await inbox.accept(first)
            await inbox.dispatch(_nothing)
        lane = await place.connection.fetchval("SELECT lane FROM onceward_lanes")
        for number in numbers:
            await place.fill(WAITING, number, lane)
            await found.measure(f"{number:,} blocked, ahead in the same lane", place, in_one_lane, lane=lanes.by_topic)


async def pending(world: World, found: Situations, numbers: Iterable[int]) -> None:
    """What is worked on was there before VACUUM, in all of these lines: on a page that VACUUM has seen, the first write
    has to say so in the visibility map, which is a buffer more for a message, however many there are."""
    found.begin()
    async with ground(world.postgres_dsn, found.number(10_000)) as place:
        for number in numbers:
            await place.fill(READY, number)
            await found.measure(f"{number:,} pending", place)


async def remains(world: World, found: Situations, numbers: Iterable[int]) -> None:
    """Rows that are gone stay in tables and indexes until VACUUM, which does not come here."""
    found.begin()
    async with ground(world.postgres_dsn, found.number(10_000)) as place:
        gone = 0
        for number in numbers:
            await through(place.dsn, number - gone)
            gone = number
            async with opened(place.dsn) as inbox:  # what ended last is read over once, by whoever looks next
                assert await inbox.dispatch(_nothing) is None
            await found.measure(f"{number:,} done since VACUUM", place)


async def grown(world: World) -> AsyncGenerator[Facts, None]:
    found = Situations(world)
    await processed(world, found, map(found.number, (10_000, 100_000, 1_000_000, 5_000_000)))
    await blocked_beside(world, found, map(found.number, (0, 1_000, 10_000, 100_000)))
    await blocked_ahead(world, found, map(found.number, (0, 1_000, 10_000, 100_000)))
    await pending(world, found, map(found.number, (5_000, 100_000, 1_000_000)))
    await remains(world, found, map(found.number, (0, 10_000, 100_000)))
    yield Facts(
        question="growth",
        title="PostgreSQL, what one message costs when there is more in the tables",
        columns=("before it", "looks", "rows", "trips", "buffers", "ms", "work",
                 "batch: looks", "rows", "buffers", "ms", "work"),
        rows=tuple(found.rows),
        note="For each message, alone and in batches: looks into our indexes, rows of our tables that were read or "
        "written, trips, and buffers, by the server's own counters. Work: of looks and rows what grew most since the "
        "first line of its kind. A look takes as many buffers as the index has levels: one or two "
        "in a table that is nearly empty, three or four in one of millions.",
    )  # fmt: skip


async def _nothing(_message: Message[Any]) -> None:
    pass


# --- the others, by the clock -------------------------------------------------------------------------------------


async def others(world: World) -> AsyncGenerator[Facts, None]:
    """One message behind some that are blocked, for the peer that has dependencies."""
    kind = peer("ascetic_")
    if kind is None:
        return
    rows = []
    async with postgres.database(world.postgres_dsn) as dsn:
        await kind.set_up(dsn)
        connection = await asyncpg.connect(dsn)
        try:
            for blocked in (0, 100, 1_000) if world.full else (0, 10):
                await connection.execute("TRUNCATE inbox")
                await connection.execute(ASCETIC_BLOCKED, blocked)
                async with kind.opened(dsn, 1) as queue:
                    await queue.fill(new_messages(1))
                    began = time.perf_counter()
                    tally = Tally(1, write=False)
                    assert await queue.dispatch(tally.work)
                    rows.append((f"ascetic-ddd, {blocked:,} blocked", f"{(time.perf_counter() - began) * 1000:,.1f}"))
        finally:
            await connection.close()
    yield Facts(
        question="growth",
        title="One message behind blocked ones, in milliseconds",
        columns=("before it", "ms"),
        rows=tuple(rows),
        note="It looks at each blocked message again, for each message.",
    )


ASCETIC_BLOCKED = """
INSERT INTO inbox (tenant_id, stream_type, stream_id, stream_position, uri, payload, metadata)
SELECT 'default', 'Order', json_build_object('id', 'w' || i)::jsonb, 1, 'kafka://orders', '{}',
       json_build_object('causal_dependencies', json_build_array(json_build_object(
           'tenant_id', 'default', 'stream_type', 'Order', 'stream_id', json_build_object('id', 'never'),
           'stream_position', i)))::jsonb
FROM generate_series(1, $1::int) i
"""


# --- bloat --------------------------------------------------------------------------------------------------------

SIZES = """
SELECT relname, pg_table_size(relid) AS heap, pg_indexes_size(relid) AS indexes, n_dead_tup AS dead, n_live_tup AS live
FROM pg_stat_user_tables WHERE relname = ANY ($1) ORDER BY 1
"""
SEEN = [f"onceward_{table}" for table in ("records", "pending", "lanes")]
GROUP = 1_000


async def bloat(world: World) -> AsyncGenerator[Facts, None]:
    number = 1_000_000 if world.full else 2_000
    async with postgres.database(world.postgres_dsn) as dsn:
        await onceward_.set_up(dsn)
        connection = await asyncpg.connect(dsn)
        try:
            began = time.perf_counter()
            await through(dsn, number)
            seconds = time.perf_counter() - began
            await asyncio.sleep(1.5)  # until what the sessions did is counted
            after = await connection.fetch(SIZES, SEEN)
            for table in SEEN:
                await connection.execute(f"VACUUM {table}")
            await asyncio.sleep(1.5)
            vacuumed = {row["relname"]: row for row in await connection.fetch(SIZES, SEEN)}
        finally:
            await connection.close()
    yield Facts(
        question="growth",
        title=f"What the tables weigh after {number:,} messages, in MB ({number / seconds:,.0f} messages/s in and out)",
        columns=("table", "heap", "indexes", "dead rows", "rows", "after VACUUM: heap", "indexes"),
        rows=tuple(
            (
                row["relname"], _mb(row["heap"]), _mb(row["indexes"]), f"{row['dead']:,}", f"{row['live']:,}",
                _mb(vacuumed[row["relname"]]["heap"]), _mb(vacuumed[row["relname"]]["indexes"]),
            )
            for row in after
        ),
        note="Each message was accepted in a list, worked on in a batch, and its record kept. Autovacuum as it comes.",
    )  # fmt: skip


def _mb(size: int) -> str:
    return f"{size / 2**20:,.1f}"


async def through(dsn: str, number: int) -> None:
    """So many messages, in and out again, with a short queue in between."""
    if not number:
        return
    room = asyncio.Semaphore(5)

    async def bulk(tally: Tally, stop: asyncio.Event) -> None:
        done = 0

        async def handle(messages: list[Message[Any]], _tx: Any) -> None:
            nonlocal done
            done += len(messages)
            while done >= GROUP:
                done -= GROUP
                room.release()
            tally.count(len(messages))

        async with opened(dsn) as worker:
            await worker.run(bulk=handle, stop=stop, concurrency=2)

    async def accept() -> None:
        async with opened(dsn) as inbox:
            for start in range(0, number, GROUP):
                await room.acquire()
                await inbox.accept(new_messages(min(GROUP, number - start)))

    tally = Tally(number, write=False)
    accepting = asyncio.ensure_future(accept())
    await until(tally.all_done, bulk, tally)
    await accepting


async def stages(world: World) -> AsyncGenerator[Facts, None]:
    for part in (grown, others, bloat):
        async for facts in part(world):
            yield facts
