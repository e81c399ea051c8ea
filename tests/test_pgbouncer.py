"""PgBouncer in transaction mode, with the settings that docs/postgresql.md gives.

One connection of ours is many of the server's there, one transaction after the other, and the throwaway bouncer sees to
it that they differ. So the suite shows that nothing of onceward outlives its transaction on a connection.
"""

from __future__ import annotations

import asyncio
import re
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator
from configparser import ConfigParser
from pathlib import Path
from typing import Any

import asyncpg
import psycopg
import pytest

from onceward import Inbox, Message, StoreUnavailable, Verdict, verdict_of
from onceward.connect import store_from_url
from onceward.errors import UsageError
from onceward.outcome import Kind
from onceward.testing.contract.batches import BatchContract
from onceward.testing.contract.crashes import CrashContract
from onceward.testing.contract.failures import FailureContract
from onceward.testing.contract.racing import RacingContract
from onceward.testing.contract.transactions import TransactionContract
from onceward.testing.lab import Gate, Recorder
from tests.pgbouncer_labs import BouncedAsyncpgLab, BouncedLab, BouncedPsycopgLab
from tests.services import pgbouncer
from tests.services.pgbouncer import POOL_SIZE, Bouncer

PAGE = Path(__file__).parents[1] / "docs" / "postgresql.md"


@pytest.fixture
async def asyncpg_lab(ready_dsn: str, bouncer: Bouncer) -> AsyncIterator[BouncedAsyncpgLab]:
    lab = BouncedAsyncpgLab(ready_dsn, bouncer.dsn(ready_dsn))
    async with lab.stack:
        yield lab


@pytest.fixture
async def psycopg_lab(ready_dsn: str, bouncer: Bouncer) -> AsyncIterator[BouncedPsycopgLab]:
    lab = BouncedPsycopgLab(ready_dsn, bouncer.dsn(ready_dsn))
    async with lab.stack:
        yield lab


@pytest.fixture(params=["asyncpg_lab", "psycopg_lab"])
def either_lab(request: pytest.FixtureRequest) -> BouncedLab:
    lab: BouncedLab = request.getfixturevalue(request.param)
    return lab


@pytest.mark.slow
class TestAsyncpg(TransactionContract, RacingContract, FailureContract, BatchContract, CrashContract):
    """All that is about connections, transactions and statements."""

    @pytest.fixture
    def lab(self, asyncpg_lab: BouncedAsyncpgLab) -> BouncedAsyncpgLab:
        return asyncpg_lab


@pytest.mark.slow
class TestPsycopg(TransactionContract, RacingContract):
    """What a bouncer could break: the transaction, and who may run when many want to."""

    @pytest.fixture
    def lab(self, psycopg_lab: BouncedPsycopgLab) -> BouncedPsycopgLab:
        return psycopg_lab


# --- many clients, few connections ----------------------------------------------------------------------------------


async def fill(dsn: str) -> None:
    """Make the bouncer open all connections that it may, by transactions that are open at the same time."""
    connections = [await asyncpg.connect(dsn, statement_cache_size=0) for _ in range(POOL_SIZE)]
    for connection in connections:
        await connection.execute("BEGIN; SELECT 1")
    for connection in connections:
        await connection.execute("ROLLBACK")  # closed without, it would take the server's connection along
        await connection.close()


class Where(Recorder):
    """A handler that remembers which of the server's processes it ran on."""

    def __init__(self, lab: BouncedLab) -> None:
        super().__init__(lab)
        self.backends: list[int] = []

    async def __call__(self, message: Message[Any], tx: Any) -> dict[str, str]:
        result = await super().__call__(message, tx)
        self.backends += [row[0] for row in await self.lab.run(tx, "SELECT pg_backend_pid()")]
        return result


async def test_one_connection_of_ours_is_many_of_the_servers(asyncpg_lab: BouncedAsyncpgLab) -> None:
    await fill(asyncpg_lab.bounced)
    inbox, handler = await asyncpg_lab.inbox(store=asyncpg_lab.store(max_size=1), cache=0), Where(asyncpg_lab)
    for number in range(8):
        assert (await inbox.process(asyncpg_lab.message(f"{number}"), handler)).processed
        assert (await inbox.process(asyncpg_lab.message(f"{number}"), handler)).duplicate
    assert len(set(handler.backends)) > 1, "or this file shows nothing"
    assert await asyncpg_lab.effects() == [f"{number}" for number in range(8)]


async def test_more_clients_than_connections_run_each_message_once(asyncpg_lab: BouncedAsyncpgLab) -> None:
    clients = 5 * POOL_SIZE
    stores = [asyncpg_lab.store(min_size=clients, max_size=clients) for _ in range(2)]
    inboxes = [await asyncpg_lab.inbox(store=store, cache=0, wait=60) for store in stores]
    handler, ids = Where(asyncpg_lab), [f"{number:03}" for number in range(100)]
    jobs = [inbox.process(asyncpg_lab.message(id_), handler) for id_ in ids for inbox in inboxes]
    outcomes = await asyncio.gather(*jobs)
    assert Counter(outcome.kind for outcome in outcomes) == {Kind.PROCESSED: 100, Kind.DUPLICATE: 100}
    assert sorted(handler.runs) == await asyncpg_lab.effects() == ids
    assert 1 < len(set(handler.backends)) <= POOL_SIZE < sum(store.pool.get_size() for store in stores)  # type: ignore[attr-defined]


async def test_a_bouncer_without_a_free_connection_is_told(postgres_server: str, ready_dsn: str) -> None:
    """PgBouncer lets a client wait at BEGIN, where our own patience does not reach. query_wait_timeout is its own."""
    with pgbouncer.throwaway(postgres_server, default_pool_size=1, query_wait_timeout=1) as narrow:
        lab = BouncedAsyncpgLab(ready_dsn, narrow.dsn(ready_dsn))
        async with lab.stack:
            inbox, gate = await lab.inbox(), Gate(lab)
            running = asyncio.ensure_future(inbox.process(lab.message("slow"), gate))
            await gate.started.wait()
            with pytest.raises(StoreUnavailable, match="query_wait_timeout") as caught:
                await inbox.process(lab.message("other"), Recorder(lab))
            assert verdict_of(caught.value) is Verdict.PAUSE
            gate.go.set()
            assert (await running).processed
            assert (await inbox.process(lab.message("other"), Recorder(lab))).processed


async def test_a_process_killed_inside_a_long_statement_is_taken_over_within_five_seconds(
    asyncpg_lab: BouncedAsyncpgLab,
) -> None:
    """The bouncer drops the connection of a client that has gone, and PostgreSQL looks after two seconds."""
    child = await asyncpg_lab.start_child(ids=["m"], long_sql="SELECT pg_sleep(120)")
    assert child.stdout is not None
    assert b"running" in await child.stdout.readline()
    child.kill()
    await child.wait()
    died = time.monotonic()
    inbox = await asyncpg_lab.inbox(wait=10)
    assert (await inbox.process(asyncpg_lab.message("m"), Recorder(asyncpg_lab))).processed
    assert time.monotonic() - died < 5
    assert await asyncpg_lab.effects() == ["m"]


# --- without the settings -------------------------------------------------------------------------------------------


async def test_a_store_that_prepares_statements_fails_and_nothing_is_lost(either_lab: BouncedLab) -> None:
    """What is prepared on one connection is not known on the next, where the transaction goes."""
    handler, message = Recorder(either_lab), either_lab.message()
    await fill(either_lab.bounced)
    wrong = await either_lab.inbox(store=either_lab.careless_store(max_size=1))
    with pytest.raises((asyncpg.InvalidSQLStatementNameError, psycopg.errors.InvalidSqlStatementName)):
        await wrong.process(message, handler)
    assert (handler.runs, await either_lab.effects()) == ([], [])
    assert (await (await either_lab.inbox()).process(message, handler)).processed
    assert await either_lab.effects() == [message.id]


async def test_a_setting_that_the_bouncer_does_not_pass_on_is_told(asyncpg_lab: BouncedAsyncpgLab) -> None:
    store = asyncpg_lab.store(server_settings={"search_path": "inbox"})
    with pytest.raises(StoreUnavailable, match="unsupported startup parameter: search_path"):
        await Inbox(store, consumer="billing").open()


# --- by URL, and by the page ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("scheme", ["postgresql", "postgresql+psycopg"])
async def test_setup_works_again_and_again_by_url(postgres_dsn: str, bouncer: Bouncer, scheme: str) -> None:
    """Processes number their prepared statements alike, so the second one would meet those of the first."""
    url = bouncer.dsn(postgres_dsn).replace("postgresql", scheme, 1)
    for _ in range(2):
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "onceward", "setup", f"{url}?pgbouncer=true", stdout=asyncio.subprocess.DEVNULL
        )
        assert await process.wait() == 0
    async with Inbox.connect(f"{url}?application_name=shop&pgbouncer=true", consumer="billing") as inbox:
        assert (await inbox.process(Message("m", "t", None), lambda message: None)).processed


@pytest.mark.parametrize("value", ["", "yes", "1"])
def test_a_url_says_true_or_false(value: str) -> None:
    with pytest.raises(UsageError, match="true or false"):
        store_from_url(f"postgresql://localhost/shop?pgbouncer={value}")


async def test_a_url_that_says_false_goes_straight_to_postgresql(ready_dsn: str) -> None:
    async with Inbox.connect(f"{ready_dsn}?pgbouncer=false", consumer="billing") as inbox:
        assert (await inbox.process(Message("m", "t", None), lambda message: None)).processed


async def test_the_settings_on_the_page_work(postgres_server: str, ready_dsn: str) -> None:
    (block,) = re.findall(r"^```ini\n(.*?)^```$", PAGE.read_text("utf-8"), re.MULTILINE | re.DOTALL)
    page = ConfigParser()
    page.read_string(block)
    settings = dict(page["pgbouncer"])
    assert settings["pool_mode"] == "transaction"
    with pgbouncer.throwaway(postgres_server, **settings) as running:
        lab = BouncedAsyncpgLab(ready_dsn, running.dsn(ready_dsn))
        async with lab.stack:
            assert (await (await lab.inbox()).process(lab.message(), Recorder(lab))).processed


async def test_the_stored_inbox_works_by_polling(either_lab: BouncedLab) -> None:
    """LISTEN does not reach through PgBouncer, so nobody listens."""
    inbox, handler = await either_lab.inbox(), Recorder(either_lab)
    assert not inbox.store.features.listens
    messages = [either_lab.message(f"m{n}", stream=f"s{n % 3}", position=n // 3 + 1) for n in range(30)]
    async with inbox.worker(handler, concurrency=3, poll_interval=0.05):
        for start in range(0, 30, 10):
            await inbox.accept(messages[start : start + 10])
        async with asyncio.timeout(60):
            while (await inbox.queue_stats()).lanes:
                await asyncio.sleep(0.02)
    assert sorted(handler.runs) == sorted(message.id for message in messages)
    for stream in range(3):
        assert [run for run in handler.runs if int(run[1:]) % 3 == stream] == [f"m{n}" for n in range(stream, 30, 3)]
