"""What is asyncpg's own: pools, schemas, settings of the server."""

from __future__ import annotations

import asyncio
import inspect
import json
import sys
import time
import warnings
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from typing import Any
from urllib.parse import urlsplit
from uuid import uuid4

import asyncpg
import pytest

from onceward import Inbox, Message, Reject, RetryPolicy, State, StoreReadOnly, StoreUnavailable, TryLater
from onceward.asyncpg import AsyncpgStore
from onceward.errors import HandlerEndedTransaction, UsageError
from onceward.sql.drivers import asyncpg_pool
from onceward.sql.drivers.postgresql import make_reads_cheap
from onceward.testing import PostgresLab, Proxy
from onceward.testing.lab import Gate, Recorder
from tests.services.postgres import free_port


async def test_a_given_pool_is_used_and_left_open(postgres_lab: PostgresLab) -> None:
    async with asyncpg.create_pool(postgres_lab.url, min_size=1, max_size=2) as pool:
        before = type(pool)
        async with Inbox(AsyncpgStore(pool=pool), consumer="billing") as inbox:
            assert (await inbox.process(postgres_lab.message(), Recorder(postgres_lab))).processed
        assert type(pool) is before
        assert await pool.fetchval("SELECT 1") == 1


async def test_codecs_of_a_given_pool_do_not_disturb(postgres_lab: PostgresLab) -> None:
    async def set_codecs(connection: asyncpg.Connection) -> None:
        for name in ("json", "jsonb"):
            await connection.set_type_codec(name, encoder=json.dumps, decoder=json.loads, schema="pg_catalog")
        await connection.set_type_codec("uuid", encoder=str, decoder=str, schema="pg_catalog")

    async with asyncpg.create_pool(postgres_lab.url, min_size=1, max_size=2, init=set_codecs) as pool:
        message = postgres_lab.message(payload={"a": [1, None]}, headers={"h": "x"})
        async with Inbox(AsyncpgStore(pool=pool), consumer="billing", cache=0) as inbox:
            with pytest.raises(ValueError, match="no"):
                await inbox.process(message, Recorder(postgres_lab, error=ValueError("no")))
            kept = await inbox.get_record(message)
            assert (await inbox.process(message, Recorder(postgres_lab))).processed
            assert (await inbox.process(message, Recorder(postgres_lab))).result == {"charged": message.id}
        record = await (await postgres_lab.inbox()).get_record(message)
    assert kept is not None
    assert (kept.payload, kept.headers, kept.errors[0].text) == ({"a": [1, None]}, {"h": "x"}, "no")
    assert record is not None
    assert record.result == {"charged": message.id}


async def test_outside_of_a_handler_the_pool_is_nobodys_business(postgres_lab: PostgresLab) -> None:
    inbox, gate = await postgres_lab.inbox(), Gate(postgres_lab)
    running = asyncio.ensure_future(inbox.process(postgres_lab.message(), gate))
    await gate.started.wait()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert await inbox.store.pool.fetchval("SELECT 1") == 1  # type: ignore[attr-defined]
    gate.go.set()
    assert (await running).processed


async def test_a_connection_that_the_user_took_is_reset(postgres_lab: PostgresLab) -> None:
    store = AsyncpgStore(postgres_lab.url, min_size=1, max_size=1)
    inbox = await postgres_lab.inbox(store=store)
    assert (await inbox.process(postgres_lab.message(), Recorder(postgres_lab))).processed
    async with store.pool.acquire() as connection:
        await connection.execute("SET search_path = pg_catalog; SELECT pg_advisory_lock(77)")
    assert await store.pool.fetchval("SHOW search_path") != "pg_catalog"
    assert await postgres_lab.query("SELECT 1 FROM pg_locks WHERE locktype = 'advisory' AND objid = 77") == []


class TestTheShelf:
    """A connection that was just used is kept for the next unit, for a moment."""

    @pytest.fixture(autouse=True)
    def moment(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("onceward.sql.drivers.asyncpg_pool.ROUND", 60.0)

    @staticmethod
    async def used(lab: PostgresLab) -> tuple[Inbox[Any], asyncpg.Pool]:
        """An inbox whose only connection has just been used."""
        store = AsyncpgStore(lab.url, min_size=1, max_size=1)
        inbox = await lab.inbox(store=store)
        assert (await inbox.process(lab.message("first"), Recorder(lab))).processed
        assert store.pool.get_idle_size() == 0, "it is on the shelf"
        return inbox, store.pool

    async def test_after_a_moment_the_pool_has_it_back(
        self, postgres_lab: PostgresLab, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("onceward.sql.drivers.asyncpg_pool.ROUND", 1.0)
        _, pool = await self.used(postgres_lab)
        await asyncio.sleep(1.5)
        assert pool.get_idle_size() == 1

    async def test_nobody_else_waits_for_it(self, postgres_lab: PostgresLab) -> None:
        _, pool = await self.used(postgres_lab)
        began = time.perf_counter()
        assert await pool.fetchval("SELECT 1") == 1
        assert time.perf_counter() - began < 30

    async def test_under_load_others_get_their_turn(self, postgres_lab: PostgresLab) -> None:
        inbox, pool = await self.used(postgres_lab)

        async def keep_busy() -> None:
            while True:
                await inbox.process(postgres_lab.message(uuid4().hex), Recorder(postgres_lab))

        load = asyncio.gather(*(keep_busy() for _ in range(2)))
        await asyncio.sleep(0.05)
        for _ in range(3):
            assert await asyncio.wait_for(pool.fetchval("SELECT 1"), 20) == 1
        load.cancel()
        await asyncio.gather(load, return_exceptions=True)

    async def test_one_that_was_lost_there_is_replaced(self, postgres_lab: PostgresLab) -> None:
        inbox, _ = await self.used(postgres_lab)
        await postgres_lab.query(
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity "
            "WHERE datname = current_database() AND pid <> pg_backend_pid()"
        )
        await asyncio.sleep(0.02)
        assert (await inbox.process(postgres_lab.message("second"), Recorder(postgres_lab))).processed

    async def test_what_a_handler_kept_of_it_is_dead(self, postgres_lab: PostgresLab) -> None:
        kept = []

        async def keep(_message: Message[Any], tx: asyncpg.Connection) -> None:
            kept.append(await tx.prepare("SELECT 1"))

        inbox, pool = await self.used(postgres_lab)
        assert (await inbox.process(postgres_lab.message("second"), keep)).processed
        assert pool.get_idle_size() == 0, "it is on the shelf"
        with pytest.raises(asyncpg.InterfaceError, match="released"):
            await kept[0].fetchval()

    async def test_what_a_handler_left_in_the_driver_goes_with_the_pool(self, postgres_lab: PostgresLab) -> None:
        heard: list[Any] = []

        async def listen(_message: Message[Any], tx: asyncpg.Connection) -> None:
            await tx.add_listener("bells", lambda *said: heard.append(said))

        inbox, pool = await self.used(postgres_lab)
        with pytest.warns(asyncpg.InterfaceWarning, match="listener"):
            assert (await inbox.process(postgres_lab.message("second"), listen)).processed
        assert pool.get_idle_size() == 1, "it went through the pool, which forgets them"
        assert (await inbox.process(postgres_lab.message("third"), Recorder(postgres_lab))).processed
        await postgres_lab.query("SELECT pg_notify('bells', 'ding')")
        assert await pool.fetchval("SELECT 1") == 1
        assert heard == []

    async def test_an_inbox_that_is_closed_leaves_nothing_there(self, postgres_lab: PostgresLab) -> None:
        inbox, pool = await self.used(postgres_lab)
        began = time.perf_counter()
        await inbox.close()
        assert time.perf_counter() - began < 5, "it did not wait for a connection that nobody uses"
        assert pool.get_size() == 0


async def test_what_setup_sets_holds_in_every_transaction(postgres_lab: PostgresLab) -> None:
    async def setup(connection: asyncpg.Connection) -> None:
        await connection.execute("SET app.region = 'north'")

    store, seen = AsyncpgStore(postgres_lab.url, setup=setup), []
    inbox = await postgres_lab.inbox(store=store, retry=RetryPolicy(max_attempts=3))

    async def looking(message: Message[Any], tx: Any) -> None:
        seen.append(await tx.fetchval("SELECT current_setting('app.region', true)"))

    await inbox.process(postgres_lab.message(), looking)
    await inbox.process(postgres_lab.message(), looking, redelivered=True)  # the start mark is committed before
    assert seen == ["north", "north"]


async def test_a_connection_whose_commit_was_refused_is_reset(postgres_lab: PostgresLab) -> None:
    await postgres_lab.query("CREATE TABLE nodes (id int PRIMARY KEY, above int REFERENCES nodes INITIALLY DEFERRED)")
    inbox, held = await postgres_lab.inbox(store=AsyncpgStore(postgres_lab.url, min_size=1, max_size=1)), []

    async def locking(message: Message[Any], tx: Any) -> None:
        held.append(await tx.fetchval("SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND objid = 77"))
        if message.id == "bad":
            await tx.execute("SELECT pg_advisory_lock(77)")
            await tx.execute("INSERT INTO nodes VALUES (1, 99)")

    outcomes = await inbox.process_many([postgres_lab.message("good"), postgres_lab.message("bad")], locking)
    assert [outcome.kind.value for outcome in outcomes] == ["processed", "failed"]
    assert held == [0, 0, 0, 0]


async def test_a_task_that_outlives_its_handler_may_use_the_pool(postgres_lab: PostgresLab) -> None:
    inbox, go, tasks = await postgres_lab.inbox(), asyncio.Event(), []

    async def starting(message: Message[Any], tx: Any) -> None:
        async def later() -> Any:
            await go.wait()
            return await inbox.store.pool.fetchval("SELECT 7")  # type: ignore[attr-defined]

        tasks.append(asyncio.ensure_future(later()))

    await inbox.process(postgres_lab.message(), starting)
    go.set()
    assert await tasks[0] == 7


async def test_the_handle_does_what_a_connection_does(postgres_lab: PostgresLab) -> None:
    async def use(message: Message[Any], tx: asyncpg.Connection) -> None:
        await tx.executemany("INSERT INTO effects VALUES ($1)", [("b",), ("a",)])
        await tx.copy_records_to_table("effects", records=[("c",)])
        assert [row["what"] async for row in tx.cursor("SELECT what FROM effects ORDER BY 1")] == ["a", "b", "c"]
        statement = await tx.prepare("SELECT $1::int + 1")
        assert await statement.fetchval(1) == 2
        assert await tx.fetchrow("SELECT 1 WHERE false") is None
        assert tx.is_in_transaction()
        for name in ("close", "terminate", "reset"):
            with pytest.raises(UsageError, match="belongs to the inbox"):
                getattr(tx, name)

    assert (await (await postgres_lab.inbox()).process(postgres_lab.message(), use)).processed
    assert await postgres_lab.effects() == ["a", "b", "c"]


async def test_tables_can_live_in_a_schema_of_their_own(postgres_dsn: str) -> None:
    store = AsyncpgStore(postgres_dsn, schema='my "inbox"')
    inbox = Inbox(store, consumer="billing", cache=0)
    await inbox.setup()
    async with inbox:
        message: Message[Any] = Message("m", "t", 1)

        async def failing(message: Message[Any]) -> None:
            raise ValueError("no")

        with pytest.raises(ValueError, match="no"):
            await inbox.process(message, failing)
        assert (await inbox.process(message, lambda message: "ok")).processed
        assert (await inbox.process(message, lambda message: "ok")).duplicate
        tables = await store.pool.fetch("SELECT schemaname FROM pg_tables WHERE tablename LIKE 'onceward%'")
        assert {row[0] for row in tables} == {'my "inbox"'}


async def test_a_database_that_is_down_is_told() -> None:
    dsn = f"postgresql://nobody@127.0.0.1:{free_port()}/none"
    with pytest.raises(StoreUnavailable, match="cannot connect"):
        await Inbox(AsyncpgStore(dsn), consumer="billing").open()


async def test_a_read_only_database_is_told_and_works_again(postgres_lab: PostgresLab) -> None:
    name = urlsplit(postgres_lab.url).path[1:]
    await postgres_lab.query(f"ALTER DATABASE {name} SET default_transaction_read_only = on")
    inbox = await postgres_lab.inbox()
    with pytest.raises(StoreReadOnly, match="primary"):
        await inbox.process(postgres_lab.message("m"), Recorder(postgres_lab))
    await inbox.close()
    connection = await asyncpg.connect(postgres_lab.url)
    await connection.execute(f"BEGIN; SET TRANSACTION READ WRITE; ALTER DATABASE {name} RESET ALL; COMMIT")
    await connection.close()
    inbox = await postgres_lab.inbox()
    assert (await inbox.process(postgres_lab.message("m"), Recorder(postgres_lab))).processed


async def test_a_pool_without_a_free_connection_is_tried_later(postgres_lab: PostgresLab) -> None:
    inbox, gate = await postgres_lab.inbox(store=postgres_lab.store(max_size=1), wait=0.2), Gate(postgres_lab)
    running = asyncio.ensure_future(inbox.process(postgres_lab.message("slow"), gate))
    await gate.started.wait()
    with pytest.raises(TryLater, match="connection") as caught:
        await inbox.process(postgres_lab.message("other"), Recorder(postgres_lab))
    assert caught.value.reason == "store_busy"
    gate.go.set()
    assert (await running).processed
    assert (await inbox.process(postgres_lab.message("other"), Recorder(postgres_lab))).processed


@pytest.mark.parametrize(
    "settings",
    [
        {"default_transaction_isolation": "serializable"},
        {"standard_conforming_strings": "off"},
        {"DateStyle": "SQL, DMY", "TimeZone": "Asia/Kolkata"},
    ],
)
async def test_it_works_whatever_the_session_is_set_to(postgres_lab: PostgresLab, settings: dict[str, str]) -> None:
    store = AsyncpgStore(postgres_lab.url, server_settings=settings)
    inbox, handler = await postgres_lab.inbox(store=store, cache=0, wait=20), Recorder(postgres_lab)
    message = postgres_lab.message("it's \\'; --")
    outcomes = await asyncio.gather(*(inbox.process(message, handler) for _ in range(5)))
    assert sum(outcome.processed for outcome in outcomes) == 1
    assert handler.runs == [message.id]
    record = await inbox.get_record(message)
    assert record is not None
    assert record.message_id == message.id


async def test_a_deferred_constraint_that_fails_at_commit_is_the_handlers_failure(postgres_lab: PostgresLab) -> None:
    await postgres_lab.query("CREATE TABLE parents (id int PRIMARY KEY)")
    await postgres_lab.query("CREATE TABLE children (parent int REFERENCES parents DEFERRABLE INITIALLY DEFERRED)")

    async def orphan(message: Message[Any], tx: asyncpg.Connection) -> None:
        await tx.execute("INSERT INTO children VALUES (1)")

    inbox, message = await postgres_lab.inbox(), postgres_lab.message()
    with pytest.raises(asyncpg.ForeignKeyViolationError):
        await inbox.process(message, orphan)
    record = await inbox.get_record(message)
    assert record is not None
    assert (record.state, record.attempts, record.errors[0].type) == ("failed", 1, "ForeignKeyViolationError")


async def test_a_serialization_failure_is_run_again(postgres_lab: PostgresLab) -> None:
    runs = []

    async def unlucky(message: Message[Any], tx: asyncpg.Connection) -> None:
        runs.append(message.id)
        if len(runs) < 3:
            await tx.execute("DO $$ BEGIN RAISE EXCEPTION 'again' USING ERRCODE = '40001'; END $$")

    inbox, message = await postgres_lab.inbox(), postgres_lab.message()
    assert (await inbox.process(message, unlucky)).processed
    record = await inbox.get_record(message)
    assert record is not None
    assert (len(runs), record.attempts) == (3, 1)


async def test_conflicts_without_end_are_tried_later(postgres_lab: PostgresLab) -> None:
    async def doomed(message: Message[Any], tx: asyncpg.Connection) -> None:
        await tx.execute("DO $$ BEGIN RAISE EXCEPTION 'again' USING ERRCODE = '40P01'; END $$")

    inbox, message = await postgres_lab.inbox(), postgres_lab.message()
    with pytest.raises(TryLater, match="run the transaction again") as caught:
        await inbox.process(message, doomed)
    assert caught.value.reason == "store_busy"
    assert await inbox.get_record(message) is None


async def test_nothing_stays_open_on_the_server(postgres_lab: PostgresLab) -> None:
    inbox = await postgres_lab.inbox()
    for error in (ValueError("no"), KeyboardInterrupt(), TryLater(1)):
        with pytest.raises(type(error)):
            await inbox.process(postgres_lab.message(), Recorder(postgres_lab, error=error))
    gate = Gate(postgres_lab)
    task = asyncio.ensure_future(inbox.process(postgres_lab.message(), gate))
    await gate.started.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    states = await postgres_lab.query("SELECT state FROM pg_stat_activity WHERE state LIKE 'idle in transaction%'")
    locks = await postgres_lab.query("SELECT 1 FROM pg_locks WHERE locktype = 'advisory'")
    assert (states, locks) == ([], [])


async def test_a_task_left_on_the_connection_does_not_hang_the_inbox(postgres_lab: PostgresLab) -> None:
    tasks = []

    async def leaving(message: Message[Any], tx: asyncpg.Connection) -> None:
        tasks.append(asyncio.ensure_future(tx.execute("SELECT pg_sleep(60)")))
        await asyncio.sleep(0)

    inbox, message = await postgres_lab.inbox(), postgres_lab.message()
    with pytest.raises(UsageError, match="left behind"):
        await asyncio.wait_for(inbox.process(message, leaving), 5)
    await asyncio.gather(*tasks, return_exceptions=True)
    assert (await inbox.process(message, Recorder(postgres_lab))).processed, "the server has noticed"


async def test_a_statement_that_nobody_awaits_is_not_said_later(postgres_lab: PostgresLab) -> None:
    """With parameters nothing is put around it, and the transaction may be over when it starts."""
    kept = []

    async def forgetful(message: Message[Any], tx: asyncpg.Connection) -> None:
        kept.append(tx.execute("INSERT INTO effects VALUES ($1)", "late"))

    inbox = await postgres_lab.inbox()
    with pytest.warns(RuntimeWarning, match="never awaited"):
        assert (await inbox.process(postgres_lab.message(), forgetful)).processed
    with pytest.raises(RuntimeError, match="cannot reuse"):
        await kept[0]
    assert await postgres_lab.effects() == []


async def test_a_statement_made_before_the_end_of_the_transaction_is_not_said_after_it(
    postgres_lab: PostgresLab,
) -> None:
    async def late(message: Message[Any], tx: asyncpg.Connection) -> None:
        later = tx.execute("INSERT INTO effects VALUES ($1)", "outside")
        with pytest.raises(HandlerEndedTransaction):
            await tx.execute("ROLLBACK")
        with pytest.raises(RuntimeError, match="cannot reuse"):
            await later

    inbox = await postgres_lab.inbox()
    with pytest.raises(HandlerEndedTransaction):
        await inbox.process(postgres_lab.message(), late)
    assert await postgres_lab.effects() == []


async def test_statements_made_in_advance_fail_with_the_handler_and_nobody_waits(postgres_lab: PostgresLab) -> None:
    async def ahead(message: Message[Any], tx: asyncpg.Connection) -> None:
        for verb in [tx.fetchval("SELECT 1 / $1::int", number) for number in (1, 0, 2, 3)]:
            await verb

    inbox = await postgres_lab.inbox(retry=RetryPolicy(max_attempts=1))
    await inbox.accept([postgres_lab.message("m"), postgres_lab.message("n")])
    async with asyncio.timeout(1.5):  # a wait for what will never run would take a second each
        outcomes = [await inbox.dispatch(ahead) for _ in range(3)]
    assert [outcome and outcome.kind.value for outcome in outcomes] == ["dead", "dead", None]


async def test_a_task_of_a_failed_handler_does_not_write_in_its_neighbours_time(postgres_lab: PostgresLab) -> None:
    """They share a transaction, and what the failed one wrote was undone before."""
    runs: Counter[str] = Counter()
    refused: list[asyncio.Task[Any]] = []
    now = asyncio.Event()

    async def handle(message: Message[Any], tx: asyncpg.Connection) -> None:
        async def late() -> None:
            await now.wait()
            await tx.execute("INSERT INTO effects VALUES ($1)", message.id)

        runs[message.id] += 1
        if message.id == "bad" and runs["bad"] < 3:  # alone, and then with a savepoint before each
            refused.append(asyncio.ensure_future(late()))
            raise ValueError("no")
        now.set()
        await asyncio.sleep(0.02)
        await tx.execute("INSERT INTO effects VALUES ($1)", message.id)

    inbox = await postgres_lab.inbox(retry=RetryPolicy(max_attempts=5, base=0.01, cap=0.01))
    await inbox.accept([postgres_lab.message(id_) for id_ in ("a", "bad", "other", "z")])
    async with inbox.worker(handle, batch=10):
        async with asyncio.timeout(10):
            while len(await postgres_lab.effects()) < 4:
                await asyncio.sleep(0.02)
    assert {type(error) for error in await asyncio.gather(*refused, return_exceptions=True)} == {UsageError}
    assert await postgres_lab.effects() == ["a", "bad", "other", "z"]


async def test_a_failed_handler_of_the_queue_is_counted_although_a_statement_still_runs(
    postgres_lab: PostgresLab,
) -> None:
    left: list[asyncio.Task[Any]] = []

    async def leaving(message: Message[Any], tx: asyncpg.Connection) -> None:
        left.append(asyncio.ensure_future(tx.execute("SELECT pg_sleep($1)", 0.2)))
        await asyncio.sleep(0)
        raise ValueError("no")

    inbox = await postgres_lab.inbox(retry=RetryPolicy(max_attempts=1))
    await inbox.accept(postgres_lab.message())
    outcome = await inbox.dispatch(leaving)
    assert outcome is not None
    assert (outcome.kind.value, outcome.attempts) == ("dead", 1)
    await asyncio.gather(*left, return_exceptions=True)


@pytest.mark.parametrize("then", ["raises", "returns"])
async def test_a_task_of_the_queue_that_does_not_end_costs_its_connection(postgres_lab: PostgresLab, then: str) -> None:
    """The message is not settled, and the error says why; its lane is free when the claim is over."""
    left: list[asyncio.Task[Any]] = []

    async def leaving(message: Message[Any], tx: asyncpg.Connection) -> None:
        left.append(asyncio.ensure_future(tx.execute("SELECT pg_sleep($1)", 60)))
        await asyncio.sleep(0)
        if then == "raises":
            raise ValueError("no")

    inbox, message = await postgres_lab.inbox(), postgres_lab.message()
    await inbox.accept(message)
    with pytest.raises(StoreUnavailable):
        await inbox.dispatch(leaving)
    await asyncio.gather(*left, return_exceptions=True)
    record = await inbox.get_record(message)
    assert record is not None
    assert record.state is State.ACCEPTED


async def test_what_a_kept_verb_sets_later_is_reset(postgres_lab: PostgresLab) -> None:
    kept: list[Any] = []
    found: list[str] = []

    async def keeping(message: Message[Any], tx: asyncpg.Connection) -> None:
        kept.append(tx.prepare)

    async def setting(message: Message[Any]) -> None:
        await (await kept[0]("SELECT set_config('app.tenant', 'a', false)")).fetch()

    async def looking(message: Message[Any], tx: asyncpg.Connection) -> None:
        found.append(await tx.fetchval("SELECT coalesce(current_setting('app.tenant', true), '')"))

    inbox = await postgres_lab.inbox(store=postgres_lab.store(max_size=1))
    for handler in (keeping, setting, looking):
        await inbox.process(postgres_lab.message(), handler)
    assert found == [""]


async def test_a_claim_of_many_that_cannot_tell_what_is_new_is_made_again(postgres_lab: PostgresLab) -> None:
    """Another transaction with the same time and host has the message: here it is our own, by the hook."""
    inbox: Any = None

    async def on_begin(tx: asyncpg.Connection, message: Message[Any]) -> None:
        identity = inbox.identity_of(known)
        await tx.execute(
            "INSERT INTO onceward_records (identity, consumer, tenant, scope, key, message_id, type, state, host, "
            "processed_at) VALUES ($1, 'billing', 'default', $2, 'known', 'known', 't', 'processed', $3, now())",
            str(identity), identity.scope, inbox._intake.host,
        )  # fmt: skip

    inbox, known = await postgres_lab.inbox(on_begin=on_begin), postgres_lab.message("known")
    handler = Recorder(postgres_lab)
    outcomes = await inbox.process_many([known, postgres_lab.message("new")], handler)
    assert [outcome.kind.value for outcome in outcomes] == ["busy", "busy"]
    assert handler.runs == []


LEAVES_STATE = "SET app.tenant = 'a'; SELECT pg_advisory_lock(42)"


@pytest.mark.parametrize("how", ["process", "process_many", "process_bulk", "dispatch", "run"])
@pytest.mark.parametrize("then", ["raises", "commits"])
async def test_what_a_failed_handler_left_in_the_session_is_reset(
    postgres_lab: PostgresLab, how: str, then: str
) -> None:
    """Its transaction is rolled back, and another one begins in the same session that nobody uses."""
    left: list[tuple[Any, ...]] = []
    handled = asyncio.Event()

    async def handle(message: Message[Any], tx: asyncpg.Connection) -> None:
        if message.id == "bad":
            await tx.execute(LEAVES_STATE)
            if then == "commits":
                await tx.execute("COMMIT")
            raise Reject("no")
        left.append(tuple(await tx.fetchrow(
            "SELECT coalesce(current_setting('app.tenant', true), ''), count(*) FROM pg_locks "
            "WHERE locktype = 'advisory' AND objid = 42"
        )))  # fmt: skip
        handled.set()

    async def handle_all(messages: list[Message[Any]], tx: asyncpg.Connection) -> None:
        for message in sorted(messages, key=lambda one: one.id != "bad"):
            await handle(message, tx)

    inbox = await postgres_lab.inbox(store=postgres_lab.store(max_size=1))
    bad, good = postgres_lab.message("bad"), postgres_lab.message("good")
    if how == "process":
        with suppress(HandlerEndedTransaction):
            await inbox.process(bad, handle)
        await inbox.process(good, handle)
    elif how in {"dispatch", "run"}:
        await inbox.accept(bad)
        await inbox.accept(good)
        if how == "dispatch":
            assert [(await inbox.dispatch(handle)).kind.value for _ in range(2)] == ["dead", "processed"]
        else:
            async with inbox.worker(handle, batch=1):
                await asyncio.wait_for(handled.wait(), 10)
    else:
        process = getattr(inbox, how)
        await process([bad, postgres_lab.message("other")], handle_all if how == "process_bulk" else handle)
        await inbox.process(good, handle)
    assert left[-1] == ("", 0)
    assert await postgres_lab.query("SELECT 1 FROM pg_locks WHERE locktype = 'advisory' AND objid = 42") == []


async def test_the_first_of_two_statements_at_once_is_not_forgotten(postgres_lab: PostgresLab) -> None:
    tasks = []

    async def leaving(message: Message[Any], tx: asyncpg.Connection) -> None:
        tasks.append(asyncio.ensure_future(tx.execute("SELECT pg_sleep($1)", 60)))
        await asyncio.sleep(0)
        with pytest.raises(asyncpg.InterfaceError, match="in progress"):
            await tx.fetchval("SELECT $1::int", 1)

    inbox, message = await postgres_lab.inbox(), postgres_lab.message()
    with pytest.raises(UsageError, match="left behind"):
        await asyncio.wait_for(inbox.process(message, leaving), 5)
    await asyncio.gather(*tasks, return_exceptions=True)
    assert (await inbox.process(message, Recorder(postgres_lab))).processed


async def test_a_statement_after_the_end_of_the_transaction_is_refused_with_parameters_too(
    postgres_lab: PostgresLab,
) -> None:
    taken = []

    async def keeping(message: Message[Any], tx: asyncpg.Connection) -> None:
        taken.append(tx)
        await (await tx.prepare("ROLLBACK")).fetch()
        for verb in (tx.execute, tx.fetch, tx.fetchrow, tx.fetchval):
            with pytest.raises(HandlerEndedTransaction):
                await verb("SELECT $1::int", 1)

    inbox, message = await postgres_lab.inbox(), postgres_lab.message()
    with pytest.raises(HandlerEndedTransaction):
        await inbox.process(message, keeping)
    with pytest.raises(UsageError, match="is over"):
        taken[0].execute("SELECT $1::int", 1)


async def test_a_task_left_behind_is_counted_also_with_a_result(postgres_lab: PostgresLab) -> None:
    tasks = []

    async def leaving(message: Message[Any], tx: asyncpg.Connection) -> int:
        tasks.append(asyncio.ensure_future(tx.execute("SELECT pg_sleep(0.2)")))
        await asyncio.sleep(0)
        return 1

    inbox, message = await postgres_lab.inbox(), postgres_lab.message()
    with pytest.raises(UsageError, match="left behind"):
        await inbox.process(message, leaving)
    await asyncio.gather(*tasks, return_exceptions=True)


async def test_a_handler_that_gathers_on_tx_fails_and_is_counted(postgres_lab: PostgresLab) -> None:
    async def greedy(message: Message[Any], tx: asyncpg.Connection) -> None:
        await asyncio.gather(tx.execute("SELECT pg_sleep(0.1)"), tx.execute("SELECT 1"))

    inbox, message = await postgres_lab.inbox(), postgres_lab.message()
    for attempt in (1, 2):
        with pytest.raises(asyncpg.InterfaceError, match="another operation"):
            await inbox.process(message, greedy)
        record = await inbox.get_record(message)
        assert record is not None
        assert (record.state, record.attempts) == ("failed", attempt)
    assert (await inbox.process(message, Recorder(postgres_lab))).processed


async def test_a_closing_write_that_is_refused_is_the_handlers_failure(postgres_lab: PostgresLab) -> None:
    await postgres_lab.query(
        "CREATE FUNCTION refuse() RETURNS trigger LANGUAGE plpgsql AS 'BEGIN RAISE EXCEPTION ''refused''; END'"
    )
    await postgres_lab.query(
        "CREATE TRIGGER refuse BEFORE UPDATE ON onceward_records FOR EACH ROW EXECUTE FUNCTION refuse()"
    )
    inbox = await postgres_lab.inbox()
    with pytest.raises(asyncpg.RaiseError, match="refused"):
        await asyncio.wait_for(inbox.process(postgres_lab.message(), Recorder(postgres_lab)), 10)


async def test_a_handler_may_set_another_search_path(postgres_lab: PostgresLab) -> None:
    await postgres_lab.query("CREATE SCHEMA elsewhere")

    async def wandering(message: Message[Any], tx: asyncpg.Connection) -> str:
        await tx.execute("SET LOCAL search_path TO elsewhere")
        return "result"

    inbox, message = await postgres_lab.inbox(cache=0), postgres_lab.message()
    assert (await inbox.process(message, wandering)).processed
    assert (await inbox.process(message, wandering)).result == "result"


async def test_setup_needs_no_right_to_make_schemas(postgres_lab: PostgresLab) -> None:
    """As an application's role has it: it owns our tables, and may not make schemas."""
    name = f"app_{uuid4().hex}"
    await postgres_lab.query(f"CREATE ROLE {name} LOGIN")
    for table in ("records", "schema"):
        await postgres_lab.query(f"ALTER TABLE onceward_{table} OWNER TO {name}")
    try:
        store = AsyncpgStore(postgres_lab.url.replace("onceward@", f"{name}@"))
        await store.setup()
        inbox = await postgres_lab.inbox(store=store)
        await inbox.setup()
        assert (await inbox.process(postgres_lab.message(), lambda message: "ok")).processed
        await inbox.close()
    finally:
        for table in ("records", "schema"):
            await postgres_lab.query(f"ALTER TABLE onceward_{table} OWNER TO CURRENT_USER")
        await postgres_lab.query(f"DROP ROLE {name}")


async def test_a_rerun_sees_the_payload_as_it_came(postgres_lab: PostgresLab) -> None:
    seen = []

    async def meddling(message: Message[Any], tx: asyncpg.Connection) -> None:
        seen.append(message.payload["amount"])
        message.payload["amount"] += 1
        if len(seen) < 3:
            await tx.execute("DO $$ BEGIN RAISE EXCEPTION 'again' USING ERRCODE = '40001'; END $$")

    assert (await (await postgres_lab.inbox()).process(postgres_lab.message(), meddling)).processed
    assert seen == [7, 7, 7]


async def test_a_rerun_does_not_mind_what_the_handler_put_into_the_payload(postgres_lab: PostgresLab) -> None:
    seen = []

    async def meddling(message: Message[Any], tx: asyncpg.Connection) -> None:
        seen.append(dict(message.payload))
        message.payload["client"] = object()
        if len(seen) < 2:
            await tx.execute("DO $$ BEGIN RAISE EXCEPTION 'again' USING ERRCODE = '40001'; END $$")

    assert (await (await postgres_lab.inbox()).process(postgres_lab.message(), meddling)).processed
    assert seen == [{"amount": 7}, {"amount": 7}]


async def test_not_waiting_at_all_still_works(postgres_lab: PostgresLab) -> None:
    inbox = await postgres_lab.inbox(wait=0)
    assert (await inbox.process(postgres_lab.message(), Recorder(postgres_lab))).processed


async def test_a_connection_that_dies_after_commit_does_not_undo_the_answer(postgres_lab: PostgresLab) -> None:
    proxy = Proxy(*postgres_lab.address)
    async with proxy.running():

        async def reached(point: str) -> None:
            if point == "after commit":
                proxy.cut()

        inbox = await postgres_lab.inbox(store=postgres_lab.store_behind(proxy.port), reached=reached)
        assert (await inbox.process(postgres_lab.message("m"), Recorder(postgres_lab))).processed
        assert (await inbox.process(postgres_lab.message("m"), Recorder(postgres_lab))).duplicate
        await inbox.close()


async def test_a_process_killed_inside_a_long_statement_is_taken_over_within_five_seconds(
    postgres_lab: PostgresLab,
) -> None:
    child = await postgres_lab.start_child(ids=["m"], long_sql="SELECT pg_sleep(120)")
    assert child.stdout is not None
    assert b"running" in await child.stdout.readline()
    child.kill()
    await child.wait()
    died = time.monotonic()
    inbox = await postgres_lab.inbox(wait=10)
    assert (await inbox.process(postgres_lab.message("m"), Recorder(postgres_lab))).processed
    assert time.monotonic() - died < 5
    assert await postgres_lab.effects() == ["m"]


@pytest.mark.parametrize(
    "options", [{}, {"dsn": "postgresql://x", "pool": object()}, {"dsn": "x", "second_connection": "no"}]
)
def test_options_that_make_no_sense_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(UsageError):
        AsyncpgStore(**options)


READING = """
import resource, socket

{before}
here, there = socket.socketpair()
faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(1000):
    here.send(b"x")
    there.recv(256 * 1024)
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - faults)
"""


async def faults_of_a_thousand_reads(before: str = "") -> int:
    """As asyncio reads, in a process in which nothing large was freed yet."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", READING.format(before=before), stdout=asyncio.subprocess.PIPE
    )
    out, _ = await process.communicate()
    return int(out)


async def test_reads_do_not_get_their_memory_from_the_system_each_time() -> None:
    if await faults_of_a_thousand_reads() < 1000:
        pytest.skip("not with this allocator")
    assert await faults_of_a_thousand_reads(f"{inspect.getsource(make_reads_cheap)}make_reads_cheap()") < 100


class TestAStatementThatIsPreparedAlready:
    """Goes to the server by a shorter way than asyncpg's own, and nobody may notice."""

    @staticmethod
    async def connection(lab: PostgresLab) -> tuple[asyncpg.Pool, Any]:
        store = AsyncpgStore(lab.url, min_size=1, max_size=1)
        await lab.inbox(store=store)
        await lab.query("CREATE TABLE numbers (n int PRIMARY KEY)")
        return store.pool, await store.pool.acquire()

    def test_the_inside_of_this_asyncpg_was_looked_at(self) -> None:
        """If not: read its Connection.execute, and Protocol.bind_execute, beside `Riding.execute`."""
        assert asyncpg_pool.KNOWN[0] <= tuple(map(int, asyncpg.__version__.split(".")[:2])) <= asyncpg_pool.KNOWN[1]

    async def test_it_says_what_it_did_and_what_went_wrong(self, postgres_lab: PostgresLab) -> None:
        pool, connection = await self.connection(postgres_lab)
        insert = "INSERT INTO numbers VALUES ($1)"
        assert [await connection.execute(insert, n) for n in (1, 2)] == ["INSERT 0 1", "INSERT 0 1"]
        with pytest.raises(asyncpg.UniqueViolationError):
            await connection.execute(insert, 2)
        with pytest.raises(asyncpg.DataError):
            await connection.execute(insert, "three")
        assert await connection.execute("DELETE FROM numbers WHERE n > $1", 0) == "DELETE 2"
        await pool.release(connection)

    async def test_two_at_a_time_are_refused(self, postgres_lab: PostgresLab) -> None:
        pool, connection = await self.connection(postgres_lab)
        pause = "SELECT pg_sleep($1)"
        await connection.execute(pause, 0.0)
        both = await asyncio.gather(*(connection.execute(pause, 0.05) for _ in range(2)), return_exceptions=True)
        assert [type(one) for one in both] == [str, asyncpg.InterfaceError]
        await pool.release(connection)

    async def test_who_logs_queries_sees_it(self, postgres_lab: PostgresLab) -> None:
        pool, connection = await self.connection(postgres_lab)
        seen: list[Any] = []
        await connection.execute("SELECT $1::int", 1)
        with connection.query_logger(lambda record: seen.append(record.args)):
            await connection.execute("SELECT $1::int", 2)
            await asyncio.sleep(0)
        assert seen == [(2,)]
        await pool.release(connection)

    async def test_a_timeout_of_the_pool_holds(self, postgres_lab: PostgresLab) -> None:
        store = AsyncpgStore(postgres_lab.url, min_size=1, max_size=1, command_timeout=0.2)
        await postgres_lab.inbox(store=store)
        async with store.pool.acquire() as connection:
            await connection.execute("SELECT pg_sleep($1)", 0.0)
            with pytest.raises(TimeoutError):
                await connection.execute("SELECT pg_sleep($1)", 20.0)

    async def test_after_a_table_has_changed_it_is_prepared_anew(self, postgres_lab: PostgresLab) -> None:
        """Once it fails, because inside a transaction nothing can be tried again; the next delivery finds it mended."""
        store = AsyncpgStore(postgres_lab.url, min_size=1, max_size=1)
        inbox = await postgres_lab.inbox(store=store)
        await postgres_lab.query("CREATE TABLE numbers (n int)")

        async def look(_message: Message[Any], tx: asyncpg.Connection) -> str:
            return await tx.execute("SELECT * FROM numbers WHERE n <> $1", 0)

        assert (await inbox.process(postgres_lab.message("a"), look)).result == "SELECT 0"
        await postgres_lab.query("ALTER TABLE numbers ADD COLUMN more text")
        with pytest.raises(asyncpg.InvalidCachedStatementError):
            await inbox.process(postgres_lab.message("b"), look)
        assert (await inbox.process(postgres_lab.message("b"), look)).result == "SELECT 0"

    async def test_outside_of_a_transaction_nobody_hears_of_it(self, postgres_lab: PostgresLab) -> None:
        pool, connection = await self.connection(postgres_lab)
        look = "SELECT * FROM numbers WHERE n <> $1"
        await connection.execute(look, 0)
        await postgres_lab.query("ALTER TABLE numbers ADD COLUMN more text")
        assert await connection.execute(look, 0) == "SELECT 0"
        await pool.release(connection)

    @pytest.mark.parametrize("verb", ["execute", "_execute", "_do_execute", "_get_statement"])
    async def test_a_class_of_the_users_is_asked_each_time(self, postgres_lab: PostgresLab, verb: str) -> None:
        seen: list[str] = []

        def override(self: Any, *args: Any, **options: Any) -> Any:
            seen.append(args[0])
            return getattr(asyncpg.Connection, verb)(self, *args, **options)

        mine = type("Mine", (asyncpg.Connection,), {verb: override})
        await self.check_that_all_are_seen(postgres_lab, seen, connection_class=mine)

    async def test_whoever_watches_asyncpg_sees_it_each_time(
        self, postgres_lab: PostgresLab, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """As tracers do, also long after the pool was made."""
        seen: list[str] = []
        original = asyncpg.Connection.execute

        async def watched(self: Any, query: str, *args: Any, **options: Any) -> Any:
            seen.append(query)
            return await original(self, query, *args, **options)

        await self.check_that_all_are_seen(
            postgres_lab, seen, lambda: monkeypatch.setattr(asyncpg.Connection, "execute", watched)
        )

    @staticmethod
    async def check_that_all_are_seen(
        lab: PostgresLab, seen: list[str], before: Callable[[], None] = lambda: None, **options: Any
    ) -> None:
        inbox = await lab.inbox(store=AsyncpgStore(lab.url, min_size=1, max_size=1, **options))
        before()

        async def look(_message: Message[Any], tx: asyncpg.Connection) -> None:
            await tx.execute("SELECT $1::text", "seen")

        outcomes = await inbox.process_many([lab.message() for _ in range(5)], look)
        assert [outcome.kind for outcome in outcomes] == ["processed"] * 5
        assert seen.count("SELECT $1::text") == 5

    async def test_a_connection_that_is_closed_says_so(self, postgres_lab: PostgresLab) -> None:
        pool, connection = await self.connection(postgres_lab)
        await connection.execute("SELECT $1::int", 1)
        behind = connection._con
        connection.terminate()
        with pytest.raises(asyncpg.InterfaceError, match="closed"):
            await behind.execute("SELECT $1::int", 1)
        await pool.release(connection)


@pytest.mark.parametrize("many", ["process_many", "process_bulk"])
async def test_a_statement_that_one_of_a_batch_forgot_to_await_harms_nobody(
    postgres_lab: PostgresLab, many: str
) -> None:
    """Also where results are written afterwards, through the same connection."""
    inbox, messages = await postgres_lab.inbox(), [postgres_lab.message() for _ in range(3)]

    async def one(message: Message[Any], tx: asyncpg.Connection) -> dict[str, bool]:
        if message is messages[1]:
            tx.execute("INSERT INTO effects (message_id) VALUES ($1)", message.id)  # type: ignore[unused-coroutine]
        return {"ok": True}

    async def bulk(found: list[Message[Any]], tx: asyncpg.Connection) -> list[dict[str, bool]]:
        return [await one(message, tx) for message in found]

    with pytest.warns(RuntimeWarning, match="never awaited"):
        outcomes = await getattr(inbox, many)(messages, one if many == "process_many" else bulk)
    assert [(outcome.kind, outcome.result) for outcome in outcomes] == [("processed", {"ok": True})] * 3
    assert await postgres_lab.effects() == []
