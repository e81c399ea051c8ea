"""A million old records, five processes that clean up at once, and traffic that must not notice (rule 20)."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from datetime import timedelta
from itertools import pairwise
from pathlib import Path
from time import monotonic
from typing import Any, NamedTuple

import asyncpg
import pytest

from onceward import Inbox, Message, State
from onceward.asyncpg import AsyncpgStore
from onceward.sql.upkeep import sweep_lock
from tests.services import postgres
from tests.sweepers import KNOWN

OLD = 1_000_000
SWEEPERS = 5
UNFINISHED = ("accepted", "running", "failed", "dead", "discarded")

# What a statement that deletes must have in its hands, and when it began and ended. No lock, no delete.
WATCH = f"""
CREATE TABLE deletes (pid int, began timestamptz, ended timestamptz);
CREATE FUNCTION began() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN
    IF NOT EXISTS (SELECT FROM pg_locks WHERE locktype = 'advisory' AND granted AND pid = pg_backend_pid()
                   AND (classid::bigint << 32 | objid::bigint) = {sweep_lock("billing")}) THEN
        RAISE EXCEPTION 'a delete without the lock of the sweeper';
    END IF;
    INSERT INTO deletes VALUES (pg_backend_pid(), clock_timestamp());
    RETURN NULL;
END $$;
CREATE FUNCTION ended() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN
    UPDATE deletes SET ended = clock_timestamp() WHERE pid = pg_backend_pid() AND ended IS NULL;
    RETURN NULL;
END $$;
CREATE TRIGGER began BEFORE DELETE ON onceward_records EXECUTE FUNCTION began();
CREATE TRIGGER ended AFTER DELETE ON onceward_records EXECUTE FUNCTION ended();
"""

LEFT = """
SELECT EXISTS (SELECT FROM onceward_records WHERE consumer = 'billing' AND state = 'processed' AND expires_at IS NULL
               AND processed_at < now() - interval '30 days')
"""


class Place(NamedTuple):
    dsn: str
    log: Path


@pytest.fixture
def server() -> Iterator[Place]:
    """One of its own: it logs every wait for a lock of more than 50 ms."""
    if postgres.binaries() is None:
        pytest.skip("needs PostgreSQL on this machine, to read its log")
    with postgres.throwaway() as server:
        yield Place(server.dsn, server.log)


@pytest.fixture
async def admin(server: Place) -> AsyncIterator[asyncpg.Connection]:
    connection = await asyncpg.connect(server.dsn)
    await connection.execute("ALTER DATABASE postgres SET log_lock_waits = on")
    await connection.execute("ALTER DATABASE postgres SET deadlock_timeout = '50ms'")
    await connection.close()
    connection = await asyncpg.connect(server.dsn)
    yield connection
    await connection.close()


async def fill(admin: asyncpg.Connection, dsn: str) -> None:
    store = AsyncpgStore(dsn)
    await store.setup()
    scope = Inbox(store, consumer="billing").identity_of(Message("old-1", "order.paid", None)).scope
    columns = "identity, consumer, tenant, scope, key, message_id, type, state, attempts, processed_at, received_at"
    old = "now() - interval '60 days' + n * interval '1 second'"
    one = f"'billing', 'default', '{scope}', 'old-' || n, 'old-' || n, 'order.paid'"
    await admin.execute(
        f"""
        INSERT INTO onceward_records ({columns})
        SELECT CASE WHEN n % {OLD // KNOWN} = 0
                    THEN onceward_id('billing', 'default', '{scope}', 'old-' || n / {OLD // KNOWN})
                    ELSE gen_random_uuid() END, {one}, 'processed', 1, {old}, {old}
        FROM generate_series(0, {OLD - 1}) AS n
        """
    )
    for state in UNFINISHED:
        await admin.execute(
            f"INSERT INTO onceward_records ({columns}) "
            f"SELECT gen_random_uuid(), {one}, '{state}', 1, NULL, {old} FROM generate_series(1, 100) AS n"
        )
    await admin.execute(
        f"INSERT INTO onceward_records ({columns}, expires_at) SELECT gen_random_uuid(), {one}, 'processed', 1, {old}, "
        f"{old}, now() + interval '1 day' FROM generate_series(1, 100) AS n"
    )
    await admin.execute("CREATE TABLE effects (what text)")
    await admin.execute(WATCH)
    await admin.execute("VACUUM ANALYZE onceward_records")


def start(what: str, dsn: str) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "tests.sweepers", what, dsn]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=os.environ)


def ended(process: subprocess.Popen[bytes]) -> Any:
    out, _ = process.communicate(timeout=100)
    assert process.returncode == 0
    return json.loads(out)


def waits(log: Path) -> list[str]:
    """What the server says of waits for locks that took more than 50 ms."""
    return [line for line in log.read_text(errors="replace").splitlines() if "still waiting for" in line]


async def wait_on_purpose(dsn: str) -> None:
    """So that we know that the log would tell."""
    one, two = await asyncpg.connect(dsn), await asyncpg.connect(dsn)
    await one.execute("BEGIN; SELECT pg_advisory_xact_lock(1)")
    waiting = asyncio.ensure_future(two.execute("SELECT pg_advisory_xact_lock(1)"))
    await asyncio.sleep(0.2)
    await one.execute("COMMIT")
    await waiting
    await one.close()
    await two.close()


@pytest.mark.slow
@pytest.mark.timeout(300)
async def test_a_million_records_are_swept_by_one_of_five_while_traffic_goes_on(
    server: Place, admin: asyncpg.Connection, record_property: Any
) -> None:
    await wait_on_purpose(server.dsn)
    assert len(waits(server.log)) == 1
    await fill(admin, server.dsn)
    began = monotonic()
    processes = [start("traffic", server.dsn), *(start("sweep", server.dsn) for _ in range(SWEEPERS))]
    try:
        while await admin.fetchval(LEFT):
            assert monotonic() - began < 150
            await asyncio.sleep(1)
        took = monotonic() - began
        traffic, *told = await asyncio.gather(*(asyncio.to_thread(ended, process) for process in processes))
    finally:
        for process in processes:
            process.kill()
    gone = sum(one["deleted"] for one in told)
    turns = await admin.fetch("SELECT pid, began, ended FROM deletes ORDER BY began")
    print(f"\n{gone} records in {took:.1f} s, by {told}; {len(turns)} deletes; traffic: {traffic}")

    # Each record was deleted once, by one sweeper at a time.
    assert gone == OLD
    assert all(before["ended"] <= after["began"] for before, after in pairwise(turns))
    # Nothing else was touched.
    async with Inbox(AsyncpgStore(server.dsn), consumer="billing") as inbox:
        stats = await inbox.stats()
        assert {state: getattr(stats, state) for state in UNFINISHED} == dict.fromkeys(UNFINISHED, 100)
        kept = await admin.fetchval("SELECT count(*) FROM onceward_records WHERE expires_at IS NOT NULL")
        assert kept == 100
        # What was processed meanwhile is all there, once.
        effects = await admin.fetchval("SELECT count(*) FROM effects")
        assert stats.processed == effects + 100
        assert effects == await admin.fetchval("SELECT count(DISTINCT what) FROM effects")
        left = await inbox.records(State.PROCESSED, older_than=timedelta(days=30), limit=1000)
        assert [record.expires_at is not None for record in left] == [True] * 100
    # Traffic flowed, with nothing but the outcomes that it should have, and nobody waited for a lock.
    assert set(traffic) == {"processed", "duplicate"}
    assert traffic["processed"] == effects
    assert traffic["processed"] > 500
    assert traffic["duplicate"] > 100
    assert waits(server.log)[1:] == []
