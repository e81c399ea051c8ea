"""Taking over from a processed-messages table: what docs/adopting.md says, done to real tables with real traffic.

The SQL and the script of the page are taken from the page. The consumer that is replaced is the one that people write
by hand: its row and its effect in one transaction, the row first.
"""

from __future__ import annotations

import asyncio
import random
import re
import sqlite3
import threading
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, closing
from datetime import timedelta
from pathlib import Path
from typing import Any
from uuid import UUID, uuid4

import asyncpg
import psycopg
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry

import onceward
from onceward import (
    AlreadyProcessed,
    Identity,
    Inbox,
    Kind,
    Message,
    Position,
    RetryPolicy,
    State,
    TryLater,
    keys,
    stream_of,
)
from onceward.observe.prometheus import PrometheusMetrics
from onceward.sqlalchemy import InboxRecord
from onceward.sqlite import SqliteStore
from onceward.testing import Lab, PostgresLab, SqliteLab
from onceward.testing.lab import Recorder
from tests.test_docs import DOCS, blocks

PAGE = DOCS / "adopting.md"
STORES = ["sqlite", "postgres", "psycopg", "sqlalchemy_asyncpg"]
OLD_TABLE = (
    "CREATE TABLE processed_events (event_id text PRIMARY KEY, event_type text NOT NULL, "
    "processed_at {time} NOT NULL DEFAULT {now})"
)
SOURCE = "shop"
"""As on the page: the copy writes it, so messages have to have it."""


def with_old_table(request: pytest.FixtureRequest) -> Lab:
    lab: Lab = request.getfixturevalue(f"{request.param}_lab")
    if isinstance(lab, SqliteLab):
        with closing(sqlite3.connect(lab.path)) as db:
            db.execute(OLD_TABLE.format(time="text", now="(datetime('now'))"))
    else:
        with psycopg.connect(dsn_of(lab), autocommit=True) as connection:
            connection.execute(OLD_TABLE.format(time="timestamptz", now="now()"))
    return lab


@pytest.fixture(params=STORES)
def lab(request: pytest.FixtureRequest) -> Lab:
    """Every kind of tx, and an old table that is empty."""
    return with_old_table(request)


@pytest.fixture(params=["sqlite", "postgres"])
def database(request: pytest.FixtureRequest) -> Lab:
    """One lab for each database: the driver does not matter for a copy."""
    return with_old_table(request)


def page_sql(first_line: str) -> str:
    [text] = [block.text for block in blocks(PAGE) if block.language == "sql" and block.text.startswith(first_line)]
    return text


def page_script() -> dict[str, Any]:
    """The names that the page's script for SQLite defines."""
    [text] = [block.text for block in blocks(PAGE) if "def adopt_processed_events" in block.text]
    names: dict[str, Any] = {}
    exec(compile(text, PAGE, "exec"), names)
    return names


def message(id_: str, **fields: Any) -> Message[Any]:
    return Message(id_, **{"type": "order.paid", "source": SOURCE, "payload": {"amount": 7}} | fields)


def dsn_of(lab: Lab) -> str:
    return str(getattr(lab, "dsn", lab.url))


@asynccontextmanager
async def connected(lab: Lab) -> AsyncIterator[Any]:
    connection = await asyncpg.connect(dsn_of(lab))
    try:
        yield connection
    finally:
        await connection.close()


async def adopt(lab: Lab, change: Callable[[str], str] = str, **options: Any) -> int:
    """The copy of the page, with the changes of the reader. How many old rows have no record after it."""
    if isinstance(lab, SqliteLab):
        missing: int = await asyncio.to_thread(page_script()["adopt_processed_events"], lab.path, **options)
        return missing
    create, call, rest = page_sql("-- PostgreSQL: the copy").partition("CALL adopt_processed_events();")
    assert (call, rest) == ("CALL adopt_processed_events();", "\n")
    async with connected(lab) as connection:
        await connection.execute(change(create).replace("CREATE PROCEDURE", "CREATE OR REPLACE PROCEDURE"))
        await connection.execute(f"CALL adopt_processed_events({options.get('batch', '')})")
        return int(await connection.fetchval(change(page_sql("-- PostgreSQL: what is missing"))))


async def fill(lab: Lab, count: int) -> list[str]:
    """So many rows of the last days in the old table."""
    if isinstance(lab, SqliteLab):
        await lab.query(
            f"WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n WHERE i < {count}) "
            "INSERT INTO processed_events "
            "SELECT 'old-' || i, 'order.paid', datetime('now', '-' || i || ' seconds') FROM n"
        )
    else:
        await lab.query(
            "INSERT INTO processed_events SELECT 'old-' || i, 'order.paid', now() - i * interval '1 second' "
            f"FROM generate_series(1, {count}) AS i"
        )
    return [f"old-{i}" for i in range(1, count + 1)]


# --- asking the old table -------------------------------------------------------------------------------------------

SeenBefore = Callable[[Any, Message[Any]], Awaitable[bool]]


def reading(lab: Lab) -> SeenBefore:
    async def in_the_old_table(tx: Any, message: Message[Any]) -> bool:
        return bool(await lab.run(tx, "SELECT 1 FROM processed_events WHERE event_id = $1", message.id))

    return in_the_old_table


async def claiming(tx: Any, message: Message[Any]) -> bool:
    """As on the page, for each kind of tx."""
    insert = "INSERT INTO processed_events (event_id, event_type) VALUES {} ON CONFLICT DO NOTHING"
    if hasattr(tx, "begin_nested"):
        from sqlalchemy import text

        result = await tx.execute(text(insert.format("(:id, :type)")), {"id": message.id, "type": message.type})
        return bool(result.rowcount == 0)
    if getattr(tx, "fetchval", None) is None:
        return bool((await tx.execute(insert.format("(%s, %s)"), (message.id, message.type))).rowcount == 0)
    mine = await tx.fetchval(insert.format("($1, $2)") + " RETURNING 1", message.id, message.type)
    return mine is None


# --- the consumer that is replaced ----------------------------------------------------------------------------------


class Unlucky(Exception):
    """What a handler says in a test."""


class OldConsumer:
    """INSERT the id, do the work, COMMIT. It knows nothing of onceward."""

    def __init__(self, lab: Lab, *, error: Callable[[], bool] = lambda: False) -> None:
        self.lab = lab
        self.error = error
        self.working = asyncio.Event()
        """It has its row and its effect, and has not committed."""
        self.go: threading.Event | None = None
        self._connection: Any = None

    async def deliver(self, id_: str) -> Kind:
        if isinstance(self.lab, SqliteLab):
            loop = asyncio.get_running_loop()
            return await asyncio.to_thread(self._on_sqlite, id_, lambda: loop.call_soon_threadsafe(self.working.set))
        return await self._on_postgresql(id_)

    def _on_sqlite(self, id_: str, tell: Callable[[], Any]) -> Kind:
        with closing(sqlite3.connect(self.lab.path, timeout=60, isolation_level=None)) as db:  # type: ignore[attr-defined]
            db.execute("BEGIN IMMEDIATE")
            row = (id_, "order.paid")
            insert = "INSERT INTO processed_events (event_id, event_type) VALUES (?, ?) ON CONFLICT DO NOTHING"
            if db.execute(insert, row).rowcount == 0:
                db.execute("ROLLBACK")
                return Kind.DUPLICATE
            db.execute("INSERT INTO effects VALUES (?)", (id_,))
            tell()
            if self.go is not None:
                self.go.wait(30)
            if self.error():
                db.execute("ROLLBACK")
                raise Unlucky
            db.execute("COMMIT")
            return Kind.PROCESSED

    async def _on_postgresql(self, id_: str) -> Kind:
        if self._connection is None:
            self._connection = await self.lab.stack.enter_async_context(connected(self.lab))
        connection = self._connection
        async with connection.transaction():
            insert = "INSERT INTO processed_events (event_id, event_type) VALUES ($1, $2) ON CONFLICT DO NOTHING"
            if await connection.execute(insert, id_, "order.paid") == "INSERT 0 0":
                return Kind.DUPLICATE
            await connection.execute("INSERT INTO effects VALUES ($1)", id_)
            self.working.set()
            if self.go is not None:
                await asyncio.to_thread(self.go.wait, 30)
            if self.error():
                raise Unlucky
            return Kind.PROCESSED


class NewConsumer:
    """onceward, with the same work."""

    def __init__(self, inbox: Inbox[Any], lab: Lab, *, error: Callable[[], bool] = lambda: False) -> None:
        self.inbox = inbox
        self.lab = lab
        self.error = error

    async def deliver(self, id_: str) -> Kind:
        return (await self.inbox.process(message(id_), self.handler)).kind

    async def handler(self, message: Message[Any], tx: Any) -> None:
        await self.lab.write(tx, message.id)
        await asyncio.sleep(random.random() / 200)
        if self.error():
            raise Unlucky


async def work_off(deliveries: list[str], *consumers: Any) -> None:
    """All of them take from one queue. What was not settled comes again."""

    async def consume(consumer: Any) -> None:
        while deliveries:
            id_ = deliveries.pop()
            try:
                await consumer.deliver(id_)
            except Unlucky:
                deliveries.insert(0, id_)

    await asyncio.gather(*(consume(consumer) for consumer in consumers))


def delivered(ids: list[str], times: int, seed: int) -> list[str]:
    shuffled = ids * times
    random.Random(seed).shuffle(shuffled)
    return shuffled


async def twice(lab: Lab) -> list[str]:
    return [id_ for id_, count in Counter(await lab.effects()).items() if count > 1]


# --- seen_before ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["reading", "claiming"])
async def test_old_messages_are_duplicates_with_a_record_and_new_ones_run(lab: Lab, how: str) -> None:
    old = await fill(lab, 20)
    seen_before = claiming if how == "claiming" else reading(lab)
    inbox, handler = await lab.inbox(seen_before=seen_before), Recorder(lab)
    new = [f"new-{i}" for i in range(20)]
    for expected in (Kind.PROCESSED, Kind.DUPLICATE):
        kinds = {id_: (await inbox.process(message(id_), handler)).kind for id_ in old + new}
        assert {kinds[id_] for id_ in old} == {Kind.DUPLICATE}
        assert {kinds[id_] for id_ in new} == {expected}
    assert sorted(handler.runs) == sorted(await lab.effects()) == sorted(new)
    record = await inbox.get_record(message(old[0]))
    assert record is not None
    assert (record.state, record.result) == (State.PROCESSED, None)
    later = await lab.inbox()
    kinds = {(await later.process(message(id_), handler)).kind for id_ in old}
    assert kinds == {Kind.DUPLICATE}, "without the hook too: they have records now"


async def test_without_seen_before_old_messages_run_again(lab: Lab) -> None:
    """The control: a test that passes with nothing in place would prove nothing."""
    old, handler = await fill(lab, 5), Recorder(lab)
    inbox = await lab.inbox()
    kinds = {(await inbox.process(message(id_), handler)).kind for id_ in old}
    assert kinds == {Kind.PROCESSED}
    assert sorted(await lab.effects()) == sorted(old)


@pytest.mark.parametrize("how", ["reading", "claiming"])
async def test_one_old_message_delivered_to_many_at_once_is_a_duplicate_for_all(lab: Lab, how: str) -> None:
    [old] = await fill(lab, 1)
    seen_before = claiming if how == "claiming" else reading(lab)
    inboxes = [await lab.inbox(seen_before=seen_before, wait=30) for _ in range(3)]
    handler = Recorder(lab)
    outcomes = await asyncio.gather(*(inbox.process(message(old), handler) for inbox in inboxes for _ in range(4)))
    assert {outcome.kind for outcome in outcomes} == {Kind.DUPLICATE}
    new = await asyncio.gather(*(inbox.process(message("new"), handler) for inbox in inboxes for _ in range(4)))
    assert Counter(outcome.kind for outcome in new) == {Kind.PROCESSED: 1, Kind.DUPLICATE: 11}
    assert await lab.effects() == handler.runs == ["new"]


async def test_a_claim_in_the_old_table_goes_with_a_failed_handler(lab: Lab) -> None:
    inbox = await lab.inbox(seen_before=claiming)
    with pytest.raises(Unlucky):
        await inbox.process(message("m"), Recorder(lab, error=Unlucky()))
    assert await lab.query("SELECT event_id FROM processed_events") == []
    assert (await inbox.process(message("m"), Recorder(lab))).processed
    assert await lab.query("SELECT event_id FROM processed_events") == [("m",)]
    assert await lab.effects() == ["m"]


async def test_a_message_that_failed_here_and_was_processed_by_the_old_code_is_a_duplicate(lab: Lab) -> None:
    inbox = await lab.inbox(seen_before=claiming, retry=RetryPolicy(base=0.0))
    with pytest.raises(Unlucky):
        await inbox.process(message("m"), Recorder(lab, error=Unlucky()))
    assert await OldConsumer(lab).deliver("m") is Kind.PROCESSED
    assert (await inbox.process(message("m"), Recorder(lab), redelivered=True)).duplicate
    record = await inbox.get_record(message("m"))
    assert record is not None
    assert record.state is State.PROCESSED
    assert await lab.effects() == ["m"]


async def test_is_processed_knows_records_only_and_writes_nothing_into_the_old_table(lab: Lab) -> None:
    """Were it to ask a hook that claims, mark_processed after it would find its own claim."""
    [old] = await fill(lab, 1)
    inbox = await lab.inbox(seen_before=claiming)
    assert not await inbox.is_processed(message(old))
    assert not await inbox.is_processed(message("new"))
    assert await lab.query("SELECT event_id FROM processed_events") == [(old,)]
    await inbox.mark_processed(message("new"))
    with pytest.raises(AlreadyProcessed):
        await inbox.mark_processed(message(old))
    assert await inbox.is_processed(message(old))


@pytest.mark.parametrize("how", ["reading", "claiming"])
async def test_claims_in_a_transaction_of_the_callers_ask_too(postgres_lab: PostgresLab, how: str) -> None:
    lab = postgres_lab
    await lab.query(OLD_TABLE.format(time="timestamptz", now="now()"))
    [old] = await fill(lab, 1)
    inbox = await lab.inbox(seen_before=claiming if how == "claiming" else reading(lab))
    firsts = []
    async with connected(lab) as connection, connection.transaction():
        for id_ in (old, "new", old, "new"):
            async with inbox.claim(message(id_), tx=connection) as claim:
                firsts.append(claim.first)
        with pytest.raises(AlreadyProcessed):
            await inbox.mark_processed(message(old), tx=connection)
    assert firsts == [False, True, False, False]
    assert await inbox.is_processed(message(old))


async def test_a_row_with_a_status_that_is_not_processed_is_taken_over(postgres_lab: PostgresLab) -> None:
    lab = postgres_lab
    await lab.query("CREATE TABLE processed_events (event_id text PRIMARY KEY, event_type text, status text)")
    await lab.query("INSERT INTO processed_events VALUES ('done', 't', 'Processed'), ('failed', 't', 'Failed')")
    statement = page_sql("INSERT INTO processed_events (event_id, event_type, status)")

    async def seen_before(tx: Any, message: Message[Any]) -> bool:
        return await tx.fetchval(statement, message.id, message.type) is None

    inbox, handler = await lab.inbox(seen_before=seen_before), Recorder(lab)
    kinds = [(await inbox.process(message(id_), handler)).kind for id_ in ("done", "failed", "new")]
    assert kinds == [Kind.DUPLICATE, Kind.PROCESSED, Kind.PROCESSED]
    assert await lab.query("SELECT DISTINCT status FROM processed_events") == [("Processed",)]


# --- old and new side by side ---------------------------------------------------------------------------------------


async def test_a_message_in_the_hands_of_the_old_code_is_waited_for(lab: Lab) -> None:
    old = OldConsumer(lab)
    old.go = threading.Event()
    new = NewConsumer(await lab.inbox(seen_before=claiming, wait=30), lab)
    first = asyncio.ensure_future(old.deliver("m"))
    await old.working.wait()
    second = asyncio.ensure_future(new.deliver("m"))
    await asyncio.sleep(0.2)
    assert not second.done()
    old.go.set()
    assert [await first, await second] == [Kind.PROCESSED, Kind.DUPLICATE]
    assert await lab.effects() == ["m"]


async def test_when_the_old_code_fails_after_all_the_new_one_takes_over(lab: Lab) -> None:
    old = OldConsumer(lab, error=lambda: True)
    old.go = threading.Event()
    new = NewConsumer(await lab.inbox(seen_before=claiming, wait=30), lab)
    first = asyncio.ensure_future(old.deliver("m"))
    await old.working.wait()
    second = asyncio.ensure_future(new.deliver("m"))
    await asyncio.sleep(0.1)
    old.go.set()
    with pytest.raises(Unlucky):
        await first
    assert await second is Kind.PROCESSED
    assert await lab.effects() == ["m"]


async def test_the_old_code_finds_what_the_new_one_has_processed(lab: Lab) -> None:
    new = NewConsumer(await lab.inbox(seen_before=claiming), lab)
    assert await new.deliver("m") is Kind.PROCESSED
    assert await OldConsumer(lab).deliver("m") is Kind.DUPLICATE
    assert await lab.effects() == ["m"]


async def test_reading_alone_lets_the_old_code_run_it_again(lab: Lab) -> None:
    """The second hole of the page, and why `seen_before` has to write."""
    new = NewConsumer(await lab.inbox(seen_before=reading(lab)), lab)
    assert await new.deliver("m") is Kind.PROCESSED
    assert await OldConsumer(lab).deliver("m") is Kind.PROCESSED
    assert await lab.effects() == ["m", "m"]


async def test_reading_alone_does_not_see_what_is_not_committed(postgres_lab: PostgresLab) -> None:
    """The first hole. SQLite does not have it, having one writer."""
    lab = postgres_lab
    await lab.query(OLD_TABLE.format(time="timestamptz", now="now()"))
    old = OldConsumer(lab)
    old.go = threading.Event()
    new = NewConsumer(await lab.inbox(seen_before=reading(lab)), lab)
    first = asyncio.ensure_future(old.deliver("m"))
    await old.working.wait()
    assert await new.deliver("m") is Kind.PROCESSED
    old.go.set()
    assert await first is Kind.PROCESSED
    assert await lab.effects() == ["m", "m"]


class OldConsumerThatInsertsLast:
    """Look, do the work, INSERT, COMMIT: of two at once, one is stopped by the primary key after its work."""

    def __init__(self, lab: PostgresLab) -> None:
        self.lab = lab
        self.stopped = 0

    async def deliver(self, id_: str) -> Kind:
        try:
            async with connected(self.lab) as connection, connection.transaction():
                if await connection.fetchval("SELECT 1 FROM processed_events WHERE event_id = $1", id_):
                    return Kind.DUPLICATE
                await connection.execute("INSERT INTO effects VALUES ($1)", id_)
                await asyncio.sleep(0.003)
                await connection.execute("INSERT INTO processed_events VALUES ($1, 'order.paid')", id_)
        except asyncpg.UniqueViolationError as error:
            self.stopped += 1
            raise Unlucky from error
        return Kind.PROCESSED


async def test_old_code_that_inserts_its_row_last_is_stopped_by_its_primary_key(postgres_lab: PostgresLab) -> None:
    lab, ids = postgres_lab, [f"m-{i}" for i in range(40)]
    await lab.query(OLD_TABLE.format(time="timestamptz", now="now()"))
    old = [OldConsumerThatInsertsLast(lab) for _ in range(2)]
    new = [NewConsumer(await lab.inbox(seen_before=claiming, wait=60), lab) for _ in range(2)]
    neighbours = [id_ for id_ in ids for _ in range(4)]  # so that all four have the same one at once
    await work_off(neighbours, *old, *new)
    assert sorted(await lab.effects()) == sorted(ids)
    assert sum(consumer.stopped for consumer in old), "or nothing was tried"


@pytest.mark.parametrize("how", ["claiming", "reading", "nothing"])
async def test_a_rolling_deploy_has_no_effect_twice(lab: Lab, how: str) -> None:
    """Two old and two new instances, one stream in which everything comes three times, and handlers that fail."""
    hook = {"claiming": claiming, "reading": reading(lab), "nothing": None}[how]
    luck = random.Random(7)

    def error() -> bool:
        return luck.random() < 0.15

    ids = [f"m-{i}" for i in range(60)]
    old = [OldConsumer(lab, error=error) for _ in range(2)]
    new = [NewConsumer(await lab.inbox(seen_before=hook, wait=60), lab, error=error) for _ in range(2)]
    await work_off(delivered(ids, 3, seed=1), *old, *new, *new)
    assert set(await lab.effects()) == set(ids), "nothing is lost"
    if how == "claiming":
        assert await twice(lab) == []
    else:
        assert await twice(lab), "the controls"


async def test_the_order_of_things_from_the_first_step_to_the_last(lab: Lab) -> None:
    """The steps of the page. Every message is delivered again in every later step."""
    ids = [f"m-{i}" for i in range(80)]
    old = [OldConsumer(lab), OldConsumer(lab)]
    await work_off(delivered(ids[:20], 2, seed=1), *old)

    new = [NewConsumer(await lab.inbox(seen_before=claiming, wait=60), lab) for _ in range(2)]  # step 2
    await work_off(delivered(ids[:40], 2, seed=2), *old, *new)
    await work_off(delivered(ids[:60], 2, seed=3), *new)  # step 3
    assert await adopt(lab, batch=7) == 0  # step 4

    without = [NewConsumer(await lab.inbox(wait=60), lab) for _ in range(2)]  # step 5
    await work_off(delivered(ids[:70], 2, seed=4), *new, *without)
    await lab.query("DROP TABLE processed_events")  # step 6
    await work_off(delivered(ids, 2, seed=5), *without)
    assert sorted(await lab.effects()) == sorted(ids)


async def test_rolling_back_is_a_rolling_deploy_too(lab: Lab) -> None:
    ids = [f"m-{i}" for i in range(60)]
    new = [NewConsumer(await lab.inbox(seen_before=claiming, wait=60), lab) for _ in range(2)]
    await work_off(delivered(ids[:30], 2, seed=1), *new)
    old = [OldConsumer(lab), OldConsumer(lab)]
    await work_off(delivered(ids[:45], 2, seed=2), *new, *old)
    await work_off(delivered(ids, 2, seed=3), *old)
    assert sorted(await lab.effects()) == sorted(ids)


async def test_what_the_old_table_has_missed_can_be_written_back(lab: Lab) -> None:
    ids = [f"m-{i}" for i in range(10)]
    await work_off(list(ids), NewConsumer(await lab.inbox(), lab))
    other = await lab.inbox(consumer="shipping")
    await other.process(message("of-another-consumer"), Recorder(lab))
    with pytest.raises(Unlucky):
        await (await lab.inbox()).process(message("failed"), Recorder(lab, error=Unlucky()))
    await lab.query(page_sql("-- Back into the old table"))
    assert sorted(await lab.query("SELECT event_id FROM processed_events")) == sorted((id_,) for id_ in ids)
    assert {await OldConsumer(lab).deliver(id_) for id_ in ids} == {Kind.DUPLICATE}


# --- copying --------------------------------------------------------------------------------------------------------


async def identities(lab: Lab) -> set[bytes]:
    rows = await lab.query("SELECT identity FROM onceward_records WHERE origin = 'processed_events'")
    return {value if isinstance(value, bytes) else UUID(str(value)).bytes for (value,) in rows}


@pytest.mark.slow
async def test_after_the_copy_of_fifty_thousand_rows_each_of_them_is_a_duplicate(database: Lab) -> None:
    lab, old = database, await fill(database, 50_000)
    assert await adopt(lab) == 0
    inbox, handler = await lab.inbox(), Recorder(lab)
    assert await identities(lab) == {inbox.identity_of(message(id_)).digest for id_ in old}
    sample = iter(random.Random(3).sample(old, 1500))

    async def deliver() -> None:
        for id_ in sample:
            outcome = await inbox.process(message(id_), handler)
            assert (outcome.kind, outcome.mismatch) == (Kind.DUPLICATE, False)

    await asyncio.gather(*(deliver() for _ in range(8)))
    assert (await inbox.process(message("new"), handler)).processed
    assert handler.runs == await lab.effects() == ["new"]
    assert await adopt(lab) == 0, "again does no harm"
    stats = await inbox.stats()
    assert (stats.total, stats.processed) == (50_001, 50_001)


async def test_without_the_copy_old_messages_run_again(database: Lab) -> None:
    old, handler = await fill(database, 3), Recorder(database)
    inbox = await database.inbox()
    assert {(await inbox.process(message(id_), handler)).kind for id_ in old} == {Kind.PROCESSED}


async def test_a_copy_under_another_scope_is_found_out_by_asking_the_inbox(database: Lab) -> None:
    """Counts are right and identities are wrong: the producer's name is on the messages, and not in the copy."""
    [old] = await fill(database, 1)
    assert await adopt(database) == 0
    inbox = await database.inbox()
    assert await inbox.is_processed(message(old))
    assert not await inbox.is_processed(message(old, source=""))


@pytest.mark.parametrize("batch", [1, 7, 100, 101])
async def test_batches_of_any_size_copy_everything(database: Lab, batch: int) -> None:
    lab, old = database, await fill(database, 100)
    assert await adopt(lab, batch=batch) == 0
    assert len(await identities(lab)) == len(old)


async def test_a_copy_leaves_out_what_cleanup_would_delete(database: Lab) -> None:
    lab = database
    young, ancient = await fill(lab, 2)
    age = "datetime('now', '-31 days')" if isinstance(lab, SqliteLab) else "now() - interval '31 days'"
    await lab.query(f"UPDATE processed_events SET processed_at = {age} WHERE event_id = '{ancient}'")
    assert await adopt(lab) == 0
    inbox = await lab.inbox()
    assert [await inbox.is_processed(message(id_)) for id_ in (young, ancient)] == [True, False]
    assert await inbox.cleanup() == 0


async def test_copied_records_age_from_when_they_were_processed(database: Lab) -> None:
    lab = database
    young, old = await fill(lab, 2)
    age = "datetime('now', '-29 days')" if isinstance(lab, SqliteLab) else "now() - interval '29 days'"
    await lab.query(f"UPDATE processed_events SET processed_at = {age} WHERE event_id = '{old}'")
    assert await adopt(lab) == 0
    inbox = await lab.inbox()
    record = await inbox.get_record(message(old))
    assert record is not None
    assert record.processed_at == record.received_at
    assert await inbox.cleanup(timedelta(days=28)) == 1
    assert [await inbox.is_processed(message(id_)) for id_ in (young, old)] == [True, False]


async def test_a_copy_under_traffic_runs_nothing_and_misses_nothing(database: Lab) -> None:
    lab, old = database, await fill(database, 3000)
    inboxes = [await lab.inbox(seen_before=claiming, wait=60) for _ in range(2)]
    handler, new = Recorder(lab), [f"new-{i}" for i in range(100)]
    stream = iter(delivered(old[:300] + new, 2, seed=1))

    async def consume(inbox: Inbox[Any]) -> None:
        for id_ in stream:
            await inbox.process(message(id_), handler)

    missing, *_ = await asyncio.gather(adopt(lab, batch=100), *(consume(inbox) for inbox in inboxes))
    assert missing == 0
    assert sorted(handler.runs) == sorted(await lab.effects()) == sorted(new)
    ((count,),) = await lab.query("SELECT count(*) FROM onceward_records")
    assert count == len(old) + len(new)


async def test_what_was_copied_can_be_counted(postgres_lab: PostgresLab) -> None:
    lab = postgres_lab
    await lab.query(OLD_TABLE.format(time="timestamptz", now="now()"))
    first, *_ = await fill(lab, 5)
    await (await lab.inbox(seen_before=reading(lab))).process(message(first), Recorder(lab))
    assert await adopt(lab) == 0
    [(copied, oldest, newest)] = await lab.query(page_sql("-- PostgreSQL: what was copied"))
    assert (copied, oldest < newest) == (4, True)


async def test_a_uuid_key_is_copied_as_the_page_says(postgres_lab: PostgresLab) -> None:
    lab, ids = postgres_lab, [uuid4() for _ in range(50)]
    await lab.query(
        "CREATE TABLE processed_events (event_id uuid PRIMARY KEY, event_type text, processed_at timestamptz)"
    )
    async with connected(lab) as connection:
        await connection.executemany("INSERT INTO processed_events VALUES ($1, 't', now())", [(id_,) for id_ in ids])

    def change(sql: str) -> str:
        sql = sql.replace("after text := ''", "after uuid := '00000000-0000-0000-0000-000000000000'")
        sql = sql.replace("upto  text", "upto uuid").replace("'source:shop', event_id", "'source:shop', event_id::text")
        return re.sub(r"^(\s+)event_id, event_type", r"\1event_id::text, event_type", sql, flags=re.MULTILINE)

    assert await adopt(lab, change, batch=7) == 0
    inbox = await lab.inbox()
    assert all([await inbox.is_processed(message(str(id_))) for id_ in ids])


async def test_a_null_in_the_identity_stops_the_copy(postgres_lab: PostgresLab) -> None:
    lab = postgres_lab
    await lab.query(OLD_TABLE.format(time="timestamptz", now="now()"))
    await fill(lab, 1)
    with pytest.raises(asyncpg.NotNullViolationError):
        await adopt(lab, lambda sql: sql.replace("'source:shop'", "'source:' || NULL"))


async def test_results_of_the_old_table_can_be_handed_out(postgres_lab: PostgresLab) -> None:
    lab = postgres_lab
    await lab.query(OLD_TABLE.format(time="timestamptz", now="now()"))
    await lab.query("ALTER TABLE processed_events ADD COLUMN result_payload jsonb")
    await lab.query("INSERT INTO processed_events VALUES ('m', 'order.paid', now(), '{\"trade\": 1}')")

    def change(sql: str) -> str:
        sql = sql.replace("received_at, processed_at)", "received_at, processed_at, result)")
        return sql.replace("processed_at, processed_at\n", "processed_at, processed_at, result_payload::json\n")

    assert await adopt(lab, change) == 0
    outcome = await (await lab.inbox()).process(message("m"), Recorder(lab))
    assert (outcome.kind, outcome.result) == (Kind.DUPLICATE, {"trade": 1})


# --- the identity in SQL --------------------------------------------------------------------------------------------

# Anything that a Message and PostgreSQL can hold: not NUL, not a lone surrogate.
TEXT = st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]))
NASTY = [
    "", "'", '"', "\\", "''--", "$1", ":a", "a\tb\nc\r", "\x01\x7f\x1f\b\f", "é", "e\u0301", "日本", "🧾", "\u2028",
    "\ufeff", "x" * 2048, "ß" * 1024, "A", "a", "a ", " a", "%s", "null", "/", "</script>",
]  # fmt: skip


def collected(strategy: Any, examples: list[Any], count: int = 200) -> list[Any]:
    values = list(examples)

    @settings(max_examples=count, deadline=None, suppress_health_check=list(HealthCheck), database=None)
    @given(strategy)
    @example(examples[0])
    def collect(value: Any) -> None:
        values.append(value)

    collect()
    return values


async def test_sql_and_python_agree_on_every_identity(postgres_lab: PostgresLab) -> None:
    nasty = [tuple(random.Random(n).choices(NASTY, k=4)) for n in range(150)]
    nasty += [("billing", "default", f"source:{text}", text) for text in NASTY]
    parts = collected(st.tuples(TEXT, TEXT, TEXT, TEXT), nasty)
    async with connected(postgres_lab) as connection:
        query = await connection.prepare("SELECT onceward_id($1, $2, $3, $4)")
        for part in parts:
            identity = Identity(*part)
            found = await query.fetchval(*part)
            assert (found.bytes, str(found)) == (identity.digest, str(identity)), part


async def test_an_identity_by_name_is_the_one_of_the_message(postgres_lab: PostgresLab) -> None:
    """From a Message, through the inbox, to the row: for ids, sources, tenants and types that are hard to write."""
    inbox = await postgres_lab.inbox()
    words = [text for text in NASTY if text]
    async with connected(postgres_lab) as connection:
        for n, id_ in enumerate(words):
            source, tenant = NASTY[-n], words[n - 3]
            identity = inbox.identity_of(message(id_, source=source, tenant=tenant))
            sql = "SELECT onceward_id('billing', $1, 'source:' || $2, $3)"
            assert str(await connection.fetchval(sql, tenant, source, id_)) == str(identity)


async def test_keys_of_fields_can_be_said_in_sql(postgres_lab: PostgresLab) -> None:
    """The table of the page: to_json writes a text as keys do, to the last escape."""
    one, two = keys.field("a"), keys.fields("a", "b")
    values = collected(st.tuples(TEXT, st.integers(-(2**63), 2**63 - 1)), [(text, 1) for text in NASTY])
    async with connected(postgres_lab) as connection:
        for text, number in values:
            if not text:
                continue
            payload = message("m", payload={"a": text, "b": number})
            sql = "SELECT to_json($1::text)::text, '[' || to_json($1::text)::text || ',' || ($2::bigint)::text || ']'"
            assert tuple(await connection.fetchrow(sql, text, number)) == (one(payload), two(payload)), repr(text)
            at = message("m", stream=text[:500] or "s", position=abs(number) // 2)
            sql = "SELECT '[' || to_json($1::text)::text || ',' || ($2::bigint)::text || ']'"
            assert await connection.fetchval(sql, at.stream, at.position) == keys.stream_position(at)
        blank = await connection.fetchval("SELECT json_build_array('o-1', 2)::text")
        assert blank != two(message("m", payload={"a": "o-1", "b": 2})), "the page warns of it"


async def test_sqlite_is_lent_the_same_function(tmp_path: Path) -> None:
    async with Inbox(SqliteStore(tmp_path / "shop.db"), consumer="billing") as inbox:
        old = [text for text in NASTY if text]
        with closing(sqlite3.connect(tmp_path / "shop.db")) as db, db:
            db.execute(OLD_TABLE.format(time="text", now="(datetime('now'))"))
            db.executemany("INSERT INTO processed_events VALUES (?, 't', datetime('now'))", [(id_,) for id_ in old])
        assert page_script()["adopt_processed_events"](tmp_path / "shop.db", batch=3) == 0
        assert all([await inbox.is_processed(message(id_)) for id_ in old])


# --- positions, as docs/coming-from.md copies them ------------------------------------------------------------------


async def test_copied_positions_satisfy_what_depends_on_them(postgres_lab: PostgresLab) -> None:
    lab, odd = postgres_lab, 'user "1" \\ é'
    await lab.query(
        "CREATE TABLE inbox (tenant_id varchar(128), stream_type varchar(128), stream_id jsonb, "
        "stream_position integer, uri varchar(60), payload jsonb, metadata jsonb, processed_position bigint)"
    )
    rows = [("User", "user-1", 5, 1), ("User", odd, 5, 2), ("User", "user-1", 6, None)]
    async with connected(lab) as connection:
        for type_, id_, position, processed in rows:
            await connection.execute(
                "INSERT INTO inbox VALUES ('north', $1, jsonb_build_object('id', $2::text), $3, 'kafka://users', "
                "'{\"type\": \"UserCreated\"}', NULL, $4)", type_, id_, position, processed,
            )  # fmt: skip
        [statement] = [block.text for block in blocks(DOCS / "coming-from.md") if "'position'" in block.text]
        assert await connection.execute(statement) == "INSERT 0 2"
        assert await connection.execute(statement) == "INSERT 0 0"
    inbox, handler = await lab.inbox(consumer="projections", key=keys.stream_position), Recorder(lab)
    for number, (type_, id_, position, processed) in enumerate(rows):
        stream = stream_of(type_, {"id": id_})
        waiting = message(
            f"w-{number}", tenant="north", stream="s", position=number, depends_on=[Position(stream, position)]
        )
        again = message("again", tenant="north", stream=stream, position=position)
        if processed:
            assert (await inbox.process(waiting, handler)).processed
            assert (await inbox.process(again, handler)).duplicate
        else:
            with pytest.raises(TryLater):
                await inbox.process(waiting, handler)
            assert (await inbox.process(again, handler)).processed


# --- names ----------------------------------------------------------------------------------------------------------


def test_the_names_that_the_pages_give_exist() -> None:
    pages = "\n".join((DOCS / name).read_text("utf-8") for name in ("adopting.md", "coming-from.md"))
    for module, name in re.findall(r"`(keys|lanes|tenants)\.(\w+)", pages):
        assert hasattr(getattr(onceward, module), name), name
    for verb in re.findall(r"inbox\.(\w+)\(", pages):
        assert hasattr(Inbox, verb) or verb == "process_idempotent", verb
    registry = CollectorRegistry()
    PrometheusMetrics(registry)
    known = {metric.name for metric in registry.collect()}
    told = set(re.findall(r"\bconsumer_inbox_\w+", pages))
    assert len(told) >= 8
    assert {name.removesuffix("_total") for name in told} <= known


def test_the_columns_that_the_tables_give_exist() -> None:
    page = (DOCS / "coming-from.md").read_text("utf-8")
    tables = re.findall(r"column of `onceward_records` \|\n\|[-|]+\n((?:\|.*\n)+)", page)
    ours = [row.split("|")[2] for table in tables for row in table.splitlines()]
    named = {name for column in ours for name in re.findall(r"`([a-z_]+)`", column)}
    assert len(named) > 10
    assert named <= set(InboxRecord.__table__.columns.keys())
