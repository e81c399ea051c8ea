"""What is psycopg's own: pools, autocommit, cursors."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any

import psycopg
import pytest
from psycopg_pool import AsyncConnectionPool

from onceward import Inbox, Message, RetryPolicy
from onceward.errors import HandlerEndedTransaction, UsageError
from onceward.psycopg import PsycopgStore
from onceward.testing import PsycopgLab
from onceward.testing.lab import Recorder


@pytest.mark.parametrize("autocommit", [True, False])
async def test_a_given_pool_is_used_and_left_as_it_was(psycopg_lab: PsycopgLab, autocommit: bool) -> None:
    options = {"autocommit": autocommit}
    pool: AsyncConnectionPool[Any] = AsyncConnectionPool(psycopg_lab.dsn, min_size=1, open=False, kwargs=options)
    async with pool:
        async with Inbox(PsycopgStore(pool=pool), consumer="billing") as inbox:
            assert (await inbox.process(psycopg_lab.message(), Recorder(psycopg_lab))).processed
        assert "getconn" not in vars(pool)
        async with pool.connection() as connection:
            assert connection.autocommit is autocommit
            assert (await (await connection.execute("SELECT 1")).fetchone()) == (1,)


async def test_the_handle_does_what_a_connection_does(psycopg_lab: PsycopgLab) -> None:
    async def use(message: Message[Any], tx: psycopg.AsyncConnection[Any]) -> list[str]:
        async with tx.cursor() as cursor:
            await cursor.executemany("INSERT INTO effects VALUES (%s)", [("b",), ("a",)])
        async with tx.cursor() as cursor, cursor.copy("COPY effects FROM STDIN") as copy:
            await copy.write_row(("c",))
        async with tx.transaction():
            await tx.execute("INSERT INTO effects VALUES (%(x)s)", {"x": "d"})
        rows = await (await tx.execute("SELECT what FROM effects ORDER BY 1")).fetchall()
        with pytest.raises(UsageError, match="belongs to the inbox"):
            await tx.close()
        return [row[0] for row in rows]

    outcome = await (await psycopg_lab.inbox()).process(psycopg_lab.message(), use)
    assert outcome.result == ["a", "b", "c", "d"]
    assert await psycopg_lab.effects() == ["a", "b", "c", "d"]


@pytest.mark.parametrize("verb", ["commit", "rollback"])
async def test_a_handler_cannot_end_the_transaction_by_method(psycopg_lab: PsycopgLab, verb: str) -> None:
    async def meddling(message: Message[Any], tx: psycopg.AsyncConnection[Any]) -> None:
        await psycopg_lab.write(tx, message.id)
        await getattr(tx, verb)()

    inbox, message = await psycopg_lab.inbox(), psycopg_lab.message()
    with pytest.raises(HandlerEndedTransaction, match=verb):
        await inbox.process(message, meddling)
    assert await psycopg_lab.effects() == []
    record = await inbox.get_record(message)
    assert record is not None
    assert record.state == "dead"


async def test_a_cancellation_that_the_pool_swallows_is_heard(
    psycopg_lab: PsycopgLab, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The pool waits with asyncio.wait_for, which before Python 3.12 forgets one that comes with the connection."""
    inbox, handler = await psycopg_lab.inbox(store=psycopg_lab.store(max_size=1)), Recorder(psycopg_lab)
    pool: Any = inbox.store.pool  # type: ignore[attr-defined]
    getconn = pool.getconn

    async def swallowing(**options: Any) -> Any:
        connection = await getconn(**options)
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.sleep(0)
        return connection

    with monkeypatch.context() as patch:
        patch.setattr(pool, "getconn", swallowing)
        task = asyncio.ensure_future(inbox.process(psycopg_lab.message("m"), handler))
        with pytest.raises(asyncio.CancelledError):
            await task
    assert handler.runs == []
    assert (await inbox.process(psycopg_lab.message("m"), handler)).processed, "the one connection was given back"


async def test_percent_signs_in_ids_stay(psycopg_lab: PsycopgLab) -> None:
    inbox = await psycopg_lab.inbox(cache=0)
    message = psycopg_lab.message("100% %s %(x)s")
    assert (await inbox.process(message, Recorder(psycopg_lab))).processed
    assert (await inbox.process(message, Recorder(psycopg_lab))).duplicate
    assert await psycopg_lab.effects() == ["100% %s %(x)s"]


def test_options_that_make_no_sense_are_refused() -> None:
    for options in ({}, {"dsn": "x", "second_connection": "no"}):
        with pytest.raises(UsageError):
            PsycopgStore(**options)  # type: ignore[arg-type]


@pytest.mark.parametrize("seconds", [0.0, 0.005, 0.03])
async def test_a_block_that_a_failed_handler_left_open_costs_its_neighbours_nothing(
    psycopg_lab: PsycopgLab, seconds: float
) -> None:
    """Its end is a RELEASE, which must not be said in their time."""
    left: list[asyncio.Future[None]] = []

    async def handle(message: Message[Any], tx: Any) -> None:
        await psycopg_lab.write(tx, message.id)
        if message.id == "m2" and len(left) < 3:

            async def leave() -> None:
                async with tx.transaction():
                    await asyncio.sleep(seconds)

            left.append(asyncio.ensure_future(leave()))
            await asyncio.sleep(0.002)
            raise ValueError("no")
        await asyncio.sleep(0.01)

    retry = RetryPolicy(max_attempts=5, base=0.01, cap=0.01)
    async with await psycopg_lab.inbox(retry=retry) as inbox:
        await inbox.accept([Message(f"m{number}", "order.paid", {}) for number in range(6)])
        async with inbox.worker(handle, poll_interval=0.1) as worker, asyncio.timeout(20):
            while await psycopg_lab.query("SELECT 1 FROM onceward_lanes LIMIT 1"):
                await asyncio.sleep(0.02)
            assert worker.running
        others = "SELECT DISTINCT state, attempts, started FROM onceward_records WHERE message_id <> 'm2'"
        assert await psycopg_lab.query(others) == [("processed", 1, 0)]
        assert sorted(await psycopg_lab.effects()) == [f"m{number}" for number in range(6)]
    await asyncio.gather(*left, return_exceptions=True)
