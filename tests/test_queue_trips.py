"""Claim and BEGIN are one trip on PostgreSQL. What can go wrong with it leaves nothing behind."""

from __future__ import annotations

import asyncio
from typing import Any

import asyncpg
import pytest

from onceward import Inbox, Message, Outcome, RetryPolicy, State
from onceward.testing import PostgresLab

SOON = RetryPolicy(max_attempts=3, base=0.01, cap=0.01)


async def done(_message: Message[Any]) -> None:
    pass


def message(number: int, **more: Any) -> Message[Any]:
    return Message(id=f"m{number}", type="order.paid", payload={"n": number}, **more)


async def claimed(lab: PostgresLab) -> list[tuple[Any, ...]]:
    return list(await lab.query("SELECT lane FROM onceward_lanes WHERE owner IS NOT NULL OR claims > 0"))


@pytest.mark.parametrize("style", ["German", "SQL, DMY", "Postgres, MDY"])
async def test_a_database_may_write_its_dates_as_it_likes(postgres_lab: PostgresLab, style: str) -> None:
    await postgres_lab.query(
        f"ALTER ROLE CURRENT_USER IN DATABASE {await _name(postgres_lab)} SET datestyle = '{style}'"
    )
    await postgres_lab.query(
        f"ALTER ROLE CURRENT_USER IN DATABASE {await _name(postgres_lab)} SET timezone = 'Africa/Harare'"
    )
    async with await postgres_lab.inbox() as inbox:
        await inbox.accept([message(number) for number in range(3)])
        assert [_kind(await inbox.dispatch(done)) for _ in range(4)] == ["processed"] * 3 + [None]


async def _name(lab: PostgresLab) -> str:
    ((name,),) = await lab.query("SELECT current_database()")
    return str(name)


def _kind(outcome: Outcome[Any] | None) -> str | None:
    return None if outcome is None else outcome.kind.value


async def test_a_claim_whose_turn_cannot_begin_is_given_back(postgres_lab: PostgresLab) -> None:
    await postgres_lab.query(f"ALTER DATABASE {await _name(postgres_lab)} SET lock_timeout = '100ms'")
    async with await postgres_lab.inbox() as inbox:
        await inbox.accept([message(1), message(2)])
        other = await asyncpg.connect(postgres_lab.url)
        try:
            async with other.transaction():
                await other.execute("LOCK TABLE onceward_records IN ACCESS EXCLUSIVE MODE")
                with pytest.raises(asyncpg.LockNotAvailableError):
                    await inbox.dispatch(done)
                assert await claimed(postgres_lab) == []
        finally:
            await other.close()
        assert [_kind(await inbox.dispatch(done)) for _ in range(3)] == ["processed", "processed", None]


@pytest.mark.parametrize("hook", [False, True])
async def test_cancellations_at_any_time_burn_nothing(postgres_lab: PostgresLab, *, hook: bool) -> None:
    """With on_begin the turn begins in a trip of its own, which can be cancelled on its way."""

    async def begin(_tx: Any, _message: Message[Any]) -> None:
        pass

    async def never(_message: Message[Any], tx: Any) -> None:
        await tx.execute("SELECT pg_sleep(0.002)")
        await asyncio.Event().wait()

    async with await postgres_lab.inbox(retry=SOON, on_begin=begin if hook else None) as inbox:
        await inbox.accept(message(1))
        for number in range(120):
            running = asyncio.ensure_future(inbox.dispatch(never))
            await asyncio.sleep(number % 40 * 0.0003)
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)
            assert await claimed(postgres_lab) == []
        record = await inbox.get_record(message(1))
        assert record is not None
        assert (record.state, record.attempts, record.started) == (State.ACCEPTED, 0, 0)
        assert _kind(await inbox.dispatch(done)) == "processed"


@pytest.mark.parametrize("ending", ["RELEASE onceward_turn", "ROLLBACK; BEGIN", "ROLLBACK AND CHAIN"])
@pytest.mark.parametrize("raises", [False, True])
async def test_a_handler_that_ends_the_savepoint_is_found_out_and_the_worker_goes_on(
    postgres_lab: PostgresLab, ending: str, *, raises: bool
) -> None:
    runs: list[str] = []

    async def handle(message: Message[Any], tx: Any) -> None:
        runs.append(message.id)
        if message.id == "m3":
            await tx.execute(ending)
            if raises:
                raise ValueError("and then it failed")

    inbox: Inbox[Any] = await postgres_lab.inbox(retry=SOON)
    async with inbox:
        await inbox.accept([message(number) for number in range(6)])
        async with inbox.worker(handle, poll_interval=0.05) as worker:
            async with asyncio.timeout(20):
                while await postgres_lab.query("SELECT 1 FROM onceward_lanes LIMIT 1"):
                    await asyncio.sleep(0.02)
            assert worker.running
        rows = await postgres_lab.query("SELECT message_id, state FROM onceward_records ORDER BY message_id")
        assert rows == [(f"m{number}", "dead" if number == 3 else "processed") for number in range(6)]
