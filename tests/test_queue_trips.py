"""On PostgreSQL claim and BEGIN are one trip, and so are COMMIT and the next claim. What goes wrong leaves nothing."""

from __future__ import annotations

import asyncio
from datetime import timedelta
from itertools import pairwise
from typing import Any

import asyncpg
import pytest

from onceward import Inbox, Message, Outcome, RetryPolicy, State
from onceward.handlers import bulk_handler_of
from onceward.queue import Claiming
from onceward.sql import queue_postgresql
from onceward.sql.drivers.asyncpg import AsyncpgSession
from onceward.sql.plan import Statement
from onceward.testing import PostgresLab
from onceward.testing.contract.base import Listener
from onceward.turn import Turn

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


@pytest.mark.parametrize(("sound", "most"), [(0, 1), (0, 10), (1, 10), (2, 10)])
async def test_lanes_of_a_dead_worker_are_told_beside_sound_ones(
    postgres_lab: PostgresLab, sound: int, most: int
) -> None:
    """Claimed together, and each of them has a turn of its own, at once and not when the claim is over."""
    inbox = await postgres_lab.inbox()
    await inbox.accept([message(number) for number in range(sound + 1)])
    await postgres_lab.query(
        "UPDATE onceward_lanes SET owner = 'dead', claims = 1, state = 'running', until = now() - interval '1 second' "
        "WHERE lane = (SELECT identity FROM onceward_records WHERE message_id = 'm0')"
    )
    async with inbox._settler.plain_unit() as unit:
        claiming = Claiming(inbox.consumer, "me", most, 10, 3.0, None, 300.0)
        begun = await unit.begin_turn(claiming, apart=False)
        assert (len(begun.lanes), len(begun.suspects)) == (sound, 1)


@pytest.mark.parametrize("number", [1, 2])
async def test_a_record_that_others_have_moved_is_found_again(postgres_lab: PostgresLab, number: int) -> None:
    async def moving(one: Message[Any], _tx: Any) -> None:
        await postgres_lab.query(f"UPDATE onceward_records SET extra = '1' WHERE message_id = '{one.id}'")

    async with await postgres_lab.inbox() as inbox:
        await inbox.accept([message(one) for one in range(number)])
        async with inbox.worker(moving, batch=number), asyncio.timeout(20):
            while await postgres_lab.query("SELECT 1 FROM onceward_lanes LIMIT 1"):
                await asyncio.sleep(0.02)
        states = await postgres_lab.query("SELECT state, attempts FROM onceward_records")
        assert states == [("processed", 1)] * number


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
async def test_a_handler_that_ends_the_transaction_is_found_out_and_the_worker_goes_on(
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


async def test_a_turn_knows_its_own_transaction_by_more_than_the_savepoint(postgres_lab: PostgresLab) -> None:
    async def forging(_message: Message[Any], tx: Any) -> None:
        await tx.execute("ROLLBACK; BEGIN; SAVEPOINT onceward_turn")

    async with await postgres_lab.inbox() as inbox:
        await inbox.accept(message(1))
        assert _kind(await inbox.dispatch(forging)) == "dead"


@pytest.mark.parametrize("batch", [1, 50])
async def test_a_handler_that_forges_its_savepoint_and_fails_does_not_run_for_ever(
    postgres_lab: PostgresLab, batch: int
) -> None:
    runs: list[str] = []

    async def handle(one: Message[Any], tx: Any) -> None:
        runs.append(one.id)
        if one.id == "m2":
            await tx.execute("ROLLBACK; BEGIN; SAVEPOINT onceward_turn")
            raise ValueError("and then it failed")

    async with await postgres_lab.inbox(retry=SOON) as inbox:
        await inbox.accept([message(number) for number in range(4)])
        async with inbox.worker(handle, batch=batch), asyncio.timeout(20):
            while await postgres_lab.query("SELECT 1 FROM onceward_lanes LIMIT 1"):
                await asyncio.sleep(0.02)
        rows = await postgres_lab.query("SELECT message_id, state FROM onceward_records ORDER BY message_id")
        assert rows == [(f"m{number}", "dead" if number == 2 else "processed") for number in range(4)]
        assert runs.count("m2") <= 3


@pytest.mark.parametrize("fails", [False, True])
async def test_a_handler_that_leaves_a_long_statement_running_is_counted_and_holds_up_nobody(
    postgres_lab: PostgresLab, *, fails: bool
) -> None:
    """Its connection cannot be used again. One try is enough to tell, and the neighbours are not in it."""
    left: list[asyncio.Future[Any]] = []

    async def handle(one: Message[Any], tx: Any) -> None:
        await postgres_lab.write(tx, one.id)
        if one.id == "m2":
            left.append(asyncio.ensure_future(tx.execute("SELECT pg_sleep($1)", 60)))
            await asyncio.sleep(0.01)
            if fails:
                raise ValueError("no")

    async with await postgres_lab.inbox(retry=RetryPolicy(max_attempts=1)) as inbox:
        await inbox.accept([message(number) for number in range(4)])
        async with inbox.worker(handle, poll_interval=0.1), asyncio.timeout(20):
            while await postgres_lab.query("SELECT 1 FROM onceward_lanes LIMIT 1"):
                await asyncio.sleep(0.02)
        rows = await postgres_lab.query("SELECT message_id, state FROM onceward_records ORDER BY message_id")
        assert rows == [(f"m{number}", "dead" if number == 2 else "processed") for number in range(4)]
        assert sorted(await postgres_lab.effects()) == ["m0", "m1", "m3"]
    await asyncio.gather(*left, return_exceptions=True)


# --- a turn whose first handler fails -------------------------------------------------------------------------------


@pytest.mark.parametrize("ending", ["COMMIT; BEGIN", "COMMIT; BEGIN; SELECT 1/0", "ROLLBACK; BEGIN", "COMMIT"])
async def test_a_first_handler_that_ends_the_transaction_and_fails_is_found_out(
    postgres_lab: PostgresLab, ending: str
) -> None:
    """Also in a transaction that has failed, where nothing can be asked."""

    async def handle(_message: Message[Any], tx: Any) -> None:
        await tx.execute("CREATE TABLE written (n int)")
        await tx.execute(ending)
        raise ValueError("and then it failed")

    async with await postgres_lab.inbox(retry=SOON) as inbox:
        await inbox.accept(message(1))
        assert _kind(await inbox.dispatch(handle)) == "dead"
        record = await inbox.get_record(message(1))
        assert record is not None
        assert record.errors[-1].type == "HandlerEndedTransaction"


async def test_the_others_go_on_in_the_same_turn_and_nothing_runs_twice(postgres_lab: PostgresLab) -> None:
    await postgres_lab.query("CREATE TABLE written (id text, turn bigint)")
    runs: list[str] = []

    async def handle(one: Message[Any], tx: Any) -> None:
        runs.append(one.id)
        await tx.execute("INSERT INTO written VALUES ($1, txid_current())", one.id)
        if len(runs) in {1, 4}:
            raise ValueError("not yet")

    async with await postgres_lab.inbox(retry=RetryPolicy(base=60.0, cap=60.0), lane=lambda one: one.id) as inbox:
        await inbox.accept([message(number) for number in range(5)])
        claiming = Claiming(inbox.consumer, "me", 5, 5, 3.0, None, 300.0)
        async with inbox._settler.plain_unit() as unit:
            begun = await unit.begin_turn(claiming)
            turn = Turn(unit, "me", inbox._crew._settings, lanes=begun.lanes, most=1, given=handle, taken=begun.taken)
            slots = await turn.work()
        assert [slot.message.id for slot in slots] == runs
        failed = {runs[0], runs[3]}
        written = await postgres_lab.query("SELECT id, turn FROM written")
        assert {id_ for id_, _ in written} == {*runs} - failed
        assert len({turn for _, turn in written}) == 1
        states = await postgres_lab.query("SELECT message_id, state, attempts FROM onceward_records ORDER BY 1")
        assert states == [(id_, "failed" if id_ in failed else "processed", 1) for id_ in sorted(runs)]


async def test_what_was_committed_by_a_handler_after_that_is_known(postgres_lab: PostgresLab) -> None:
    """It is another transaction then; what ran in it before stands, and must not run again."""
    await postgres_lab.query("CREATE TABLE written (id text)")
    runs: list[str] = []

    async def handle(one: Message[Any], tx: Any) -> None:
        runs.append(one.id)
        await tx.execute("INSERT INTO written VALUES ($1)", one.id)
        if len(runs) == 1:
            raise ValueError("not yet")
        if len(runs) == 3:
            await tx.execute("COMMIT")

    async with await postgres_lab.inbox(retry=RetryPolicy(base=60.0, cap=60.0), lane=lambda one: one.id) as inbox:
        await inbox.accept([message(number) for number in range(3)])
        async with inbox._settler.plain_unit() as unit:
            begun = await unit.begin_turn(Claiming(inbox.consumer, "me", 3, 3, 3.0, None, 300.0))
            turn = Turn(unit, "me", inbox._crew._settings, lanes=begun.lanes, most=1, given=handle, taken=begun.taken)
            await turn.work()
        await run_until(inbox, handle, 1)
        states = dict(await postgres_lab.query("SELECT message_id, state FROM onceward_records"))
        assert [states[id_] for id_ in runs[1:3]] == ["processed", "dead"]
        assert sorted(await postgres_lab.query("SELECT id FROM written")) == sorted([(id_,) for id_ in runs[1:]])


async def test_a_failure_is_written_in_the_transaction_that_holds_the_lane(
    postgres_lab: PostgresLab, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A turn that was rolled back and begun once more would have let go of its lane in between; and where it had lasted
    longer than its claim, another worker would run the message before its failure was counted."""
    said: list[str] = []
    send = AsyncpgSession._send

    def told(self: AsyncpgSession, sql: str) -> Any:
        said.append(sql)
        return send(self, sql)

    async def failing(_message: Message[Any], tx: Any) -> None:
        await tx.execute("SELECT 1/$1::int", 0)

    async with await postgres_lab.inbox(retry=SOON) as inbox:
        await inbox.accept(message(1))
        monkeypatch.setattr(AsyncpgSession, "_send", told)
        assert _kind(await inbox.dispatch(failing)) == "failed"
    turn = said[: next(place for place, sql in enumerate(said) if "COMMIT" in sql and "onceward_close" in sql) + 1]
    assert any("ROLLBACK TO" in sql for sql in turn)
    assert not any(sql.startswith("ROLLBACK") and "ROLLBACK TO" not in sql for sql in turn)


@pytest.mark.parametrize("then", ["raise ValueError", "SELECT 1/0", "40001"])
@pytest.mark.parametrize("size", [1, 3])
async def test_a_handler_that_commits_and_then_fails_doubles_nothing(
    postgres_lab: PostgresLab, then: str, size: int
) -> None:
    """It has begun another transaction, so only what became of the first one tells. Its neighbours stand."""
    await postgres_lab.query("CREATE TABLE written (id text)")
    runs: list[str] = []

    async def handle(one: Message[Any], tx: Any) -> None:
        runs.append(one.id)
        await tx.execute("INSERT INTO written VALUES ($1)", one.id)
        if len(runs) == size:
            await tx.execute("COMMIT; BEGIN")
            if then == "SELECT 1/0":
                await tx.execute(then)
            elif then == "40001":
                await tx.execute("DO $$ BEGIN RAISE 'again' USING ERRCODE = '40001'; END $$")
            raise ValueError("and then it failed")

    async with await postgres_lab.inbox(retry=SOON, lane=lambda one: one.id) as inbox:
        await inbox.accept([message(number) for number in range(3)])
        claiming = Claiming(inbox.consumer, "me", 3, 3, 3.0, None, 300.0)
        async with inbox._settler.plain_unit() as unit:
            begun = await unit.begin_turn(claiming)
            turn = Turn(unit, "me", inbox._crew._settings, lanes=begun.lanes, most=1, given=handle, taken=begun.taken)
            await turn.work()
        first, culprit = runs[: size - 1], runs[size - 1]
        if size < 3:
            await run_until(inbox, handle, 3 - size)
        states = dict(await postgres_lab.query("SELECT message_id, state FROM onceward_records"))
        assert {id_: states[id_] for id_ in first} == dict.fromkeys(first, "processed")
        assert states[culprit] == "dead"
        assert sorted(await postgres_lab.query("SELECT id FROM written")) == sorted({(id_,) for id_ in runs})


async def test_a_bulk_handler_that_commits_and_meets_a_conflict_doubles_nothing(postgres_lab: PostgresLab) -> None:
    """All of it is committed, and nobody can say whose fault it was: a person has to look at each."""
    await postgres_lab.query("CREATE TABLE written (id text)")

    async def handle(messages: list[Message[Any]], tx: Any) -> None:
        for one in messages:
            await tx.execute("INSERT INTO written VALUES ($1)", one.id)
        await tx.execute("COMMIT; BEGIN")
        await tx.execute("DO $$ BEGIN RAISE 'again' USING ERRCODE = '40001'; END $$")

    async with await postgres_lab.inbox(retry=SOON) as inbox:
        await inbox.accept([message(number) for number in range(3)])
        async with inbox._settler.plain_unit() as unit:
            begun = await unit.begin_turn(Claiming(inbox.consumer, "me", 3, 3, 3.0, None, 300.0))
            bulk = bulk_handler_of(handle)
            turn = Turn(unit, "me", inbox._crew._settings, lanes=begun.lanes, most=1, bulk=bulk, taken=begun.taken)
            await turn.work()
        assert await postgres_lab.query("SELECT state FROM onceward_records") == [("dead",)] * 3
        assert await postgres_lab.query("SELECT count(*) FROM written") == [(3,)]


async def test_what_comes_before_a_deleted_record_runs_and_what_comes_after_waits(
    postgres_lab: PostgresLab,
) -> None:
    async with await postgres_lab.inbox() as inbox:
        await inbox.accept([message(number) for number in range(3)], lane="one")
        await postgres_lab.query(f"DELETE FROM onceward_records WHERE message_id = '{message(1).id}'")
        async with inbox._settler.plain_unit() as unit:
            begun = await unit.begin_turn(Claiming(inbox.consumer, "me", 1, 3, 3.0, None, 300.0))
            assert begun.taken is not None
            assert [queued.message.id for queued in begun.taken.messages] == [message(0).id]
            assert begun.taken.recordless == frozenset()


async def test_a_message_that_is_done_alone_is_kept_for_its_own_time(postgres_lab: PostgresLab) -> None:
    async with await postgres_lab.inbox() as inbox:
        inbox.handler(message(1).type, retention=timedelta(days=2))(nothing)
        await inbox.accept(message(1))
        assert _kind(await inbox.dispatch()) == "processed"
        record = await inbox.get_record(message(1))
        assert record is not None
        assert record.expires_at is not None
        assert record.processed_at is not None
        assert (record.expires_at - record.processed_at).days == 2


async def nothing(_message: Message[Any]) -> None:
    """Runs."""


# --- the next turn begins in the trip that ends the one before it ----------------------------------------------------


class Counted:
    """All that is sent to PostgreSQL from now on."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.sent: list[str] = []
        send, run = AsyncpgSession._send, AsyncpgSession._run

        def counted_send(session: AsyncpgSession, sql: str) -> Any:
            self.sent.append(sql)
            return send(session, sql)

        def counted_run(session: AsyncpgSession, statement: Any) -> Any:
            self.sent.append(statement.sql)
            return run(session, statement)

        monkeypatch.setattr(AsyncpgSession, "_send", counted_send)
        monkeypatch.setattr(AsyncpgSession, "_run", counted_run)


async def run_until(inbox: Inbox[Any], handle: Any, number: int, **options: Any) -> list[str]:
    """Which messages were handled, in their order; until there were so many."""
    stop, runs = asyncio.Event(), list[str]()

    async def counted(message: Message[Any], tx: Any) -> None:
        runs.append(message.id)
        if len(runs) == number:
            stop.set()
        await handle(message, tx)

    async with asyncio.timeout(20):
        await inbox.run(counted, stop=stop, batch=1, **options)
    return runs


@pytest.mark.parametrize("stream", [None, "s"])
async def test_turns_that_follow_each_other_need_two_trips_each(
    postgres_lab: PostgresLab, monkeypatch: pytest.MonkeyPatch, stream: str | None
) -> None:
    """Also when the next message is in the lane that the turn gives back in the same trip."""
    counted, trips = Counted(monkeypatch), list[int]()

    async def handle(_message: Message[Any], _tx: Any) -> None:
        trips.append(len(counted.sent))

    async with await postgres_lab.inbox() as inbox:
        monkeypatch.setattr("onceward.crew.ROUND", 60.0)
        places = [{} if stream is None else {"stream": stream, "position": number} for number in range(10)]
        await inbox.accept([message(number, **place) for number, place in enumerate(places)])
        assert len(set(await run_until(inbox, handle, 10))) == 10
    assert [after - before for before, after in pairwise(trips)] == [2] * 9


async def test_what_a_handler_sets_in_its_session_is_gone_in_the_next_turn(
    postgres_lab: PostgresLab, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("onceward.crew.ROUND", 60.0)
    seen: list[tuple[str, int]] = []

    async def handle(_message: Message[Any], tx: Any) -> None:
        name = await tx.fetchval("SELECT current_setting('application_name')")
        locks = await tx.fetchval(
            "SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND pid = pg_backend_pid() AND objid = 4711"
        )
        seen.append((name, locks))
        await tx.execute("SET application_name = 'left behind'; SELECT pg_advisory_lock(4711)")

    async with await postgres_lab.inbox() as inbox:
        await inbox.accept([message(number) for number in range(6)])
        await run_until(inbox, handle, 6)
    assert seen == [("", 0)] * 6


@pytest.mark.parametrize("why", ["the claim", "the handler"])
async def test_a_claim_that_fails_after_the_commit_is_no_failure_of_what_was_committed(
    postgres_lab: PostgresLab, monkeypatch: pytest.MonkeyPatch, why: str
) -> None:
    """Or the handler makes the connection forget what is said behind its COMMIT."""
    claims, claiming = 0, queue_postgresql.claiming

    def sometimes(*args: Any) -> Statement:
        nonlocal claims
        claims += 1
        return Statement("SELECT 'no'::integer") if why == "the claim" and claims == 2 else claiming(*args)

    async def handle(message: Message[Any], tx: Any) -> None:
        await postgres_lab.write(tx, message.id)
        if message.id == "m0" and why == "the handler":
            await tx.execute("DEALLOCATE ALL")

    monkeypatch.setattr(queue_postgresql, "claiming", sometimes)
    monkeypatch.setattr("onceward.crew.ROUND", 60.0)
    told = Listener()
    async with await postgres_lab.inbox(retry=SOON, listeners=[told]) as inbox:
        await inbox.accept([message(number, stream="s", position=number + 1) for number in range(4)])
        assert await run_until(inbox, handle, 4) == ["m0", "m1", "m2", "m3"]
        records = await postgres_lab.query("SELECT state, attempts FROM onceward_records")
        assert records == [("processed", 1)] * 4
        assert await claimed(postgres_lab) == []
    assert sorted(await postgres_lab.effects()) == ["m0", "m1", "m2", "m3"]
    assert told.names().count("Processed") == 4


@pytest.mark.parametrize("turn", [1, 2, 3, 4])
async def test_what_was_claimed_ahead_is_given_back_when_a_worker_is_cancelled(
    postgres_lab: PostgresLab, monkeypatch: pytest.MonkeyPatch, turn: int
) -> None:
    """During the trip that commits one turn and begins the next."""
    monkeypatch.setattr("onceward.crew.ROUND", 60.0)
    ended = 0

    async def reached(point: str) -> None:
        nonlocal ended
        if point == "before close_and_commit":
            ended += 1
            worker = asyncio.current_task()
            if ended == turn and worker is not None:
                worker.cancel()

    async def handle(message: Message[Any], tx: Any) -> None:
        await postgres_lab.write(tx, message.id)

    async with await postgres_lab.inbox(reached=reached, retry=SOON) as inbox:
        await inbox.accept([message(number) for number in range(2 * turn + 10)])
        for _ in range(2):
            ended = 0
            await asyncio.wait([asyncio.ensure_future(inbox.run(handle, batch=1))])
            assert await claimed(postgres_lab) == []
        records = await postgres_lab.query("SELECT attempts, started FROM onceward_records WHERE state = 'accepted'")
        assert records == [(0, 0)] * 10
        assert len(await postgres_lab.effects()) == 2 * turn


async def test_what_was_claimed_for_a_turn_whose_connection_is_lost_is_given_back_at_once(
    postgres_lab: PostgresLab, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The session that knew what it had claimed is gone."""
    takes, run = 0, AsyncpgSession._run

    async def lost(session: AsyncpgSession, statement: Statement) -> Any:
        nonlocal takes
        if "onceward_take" in statement.sql:
            takes += 1
            if takes in {1, 5}:
                session._connection.terminate()
        return await run(session, statement)

    async with await postgres_lab.inbox() as inbox:
        await inbox.accept([message(number) for number in range(30)])
        monkeypatch.setattr(AsyncpgSession, "_run", lost)
        async with inbox.worker(nothing, batch=1), asyncio.timeout(2.5):  # and not when the claims are over
            while await postgres_lab.query("SELECT 1 FROM onceward_lanes LIMIT 1"):
                await asyncio.sleep(0.02)
        rows = await postgres_lab.query("SELECT DISTINCT state, attempts, started FROM onceward_records")
        assert rows == [("processed", 1, 0)]
    assert takes > 5


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("cached", [0, 100])
async def test_with_on_begin_each_lane_has_a_transaction_of_its_own(
    postgres_lab: PostgresLab, batch: int, cached: int
) -> None:
    whose: dict[int, set[str]] = {}

    async def begin(_tx: Any, _message: Message[Any]) -> None: ...

    async def handle(one: Message[Any], tx: Any) -> None:
        whose.setdefault(await tx.fetchval("SELECT txid_current()"), set()).add(one.id)

    store = postgres_lab.store(statement_cache_size=cached)
    async with await postgres_lab.inbox(store=store, on_begin=begin) as inbox:
        await inbox.accept([message(number) for number in range(10)])
        async with inbox.worker(handle, batch=batch) as worker, asyncio.timeout(20):
            while await postgres_lab.query("SELECT 1 FROM onceward_lanes LIMIT 1"):
                await asyncio.sleep(0.02)
            assert worker.running
    assert sorted(map(sorted, whose.values())) == [[f"m{number}"] for number in range(10)]


async def test_with_on_begin_who_is_told_to_stop_begins_no_other_lane(postgres_lab: PostgresLab) -> None:
    stop, runs = asyncio.Event(), list[bool]()

    async def begin(_tx: Any, _message: Message[Any]) -> None: ...

    async def handle(_message: Message[Any]) -> None:
        runs.append(stop.is_set())
        if len(runs) == 6:  # the first claims are for one lane, and for four
            stop.set()

    async with await postgres_lab.inbox(on_begin=begin) as inbox:
        await inbox.accept([message(number) for number in range(30)])
        await inbox.run(handle, stop=stop)
        assert runs == [False] * 6
        assert await claimed(postgres_lab) == []


async def test_what_somebody_has_deleted_can_be_accepted_again(postgres_lab: PostgresLab) -> None:
    async with await postgres_lab.inbox() as inbox:
        await inbox.accept([message(1), message(2)])
        await postgres_lab.query("DELETE FROM onceward_records WHERE message_id = 'm1'")
        await inbox.accept(message(1))
        assert [_kind(await inbox.dispatch(done)) for _ in range(3)] == ["processed", "processed", None]
        assert await postgres_lab.query("SELECT lane FROM onceward_lanes") == []
