"""Where a turn is one message (`batch=1`), a worker under backlog claims the lanes of several turns at once. Each
message still has its own transaction, and lanes that are not worked on after all go back at once."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from onceward import Inbox, Message, RetryPolicy
from onceward.pace import AHEAD, LONG, Pace
from onceward.queue import Begun, Claiming, Spare
from onceward.spares import Spares
from onceward.testing import PostgresLab
from tests.test_queue_trips import Counted, claimed, message, run_until

MANY = 40


@pytest.fixture(autouse=True)
def _go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """For as long as there is something to do."""
    monkeypatch.setattr("onceward.crew.ROUND", 60.0)


async def spare_lanes(lab: PostgresLab) -> int:
    """Lanes that somebody has claimed and not begun: nobody holds their rows."""
    rows = await lab.query(
        "SELECT count(*) FROM (SELECT 1 FROM onceward_lanes WHERE owner IS NOT NULL FOR NO KEY UPDATE SKIP LOCKED) free"
    )
    return int(rows[0][0])


async def all_states(lab: PostgresLab) -> list[tuple[Any, ...]]:
    return sorted(await lab.query("SELECT DISTINCT state, attempts, started FROM onceward_records"))


async def all_done(lab: PostgresLab, worker: asyncio.Future[None], stop: asyncio.Event) -> None:
    async with asyncio.timeout(20):
        while len(await lab.effects()) < MANY:
            await asyncio.sleep(0.01)
    stop.set()
    await worker


async def waits_with_spares(lab: PostgresLab, inbox: Inbox[Any], stop: asyncio.Event, **options: Any) -> Any:
    """A worker in a handler that waits for `gate`, with lanes claimed ahead; and how many those are."""
    gate, reached, runs = asyncio.Event(), asyncio.Event(), list[str]()
    spares = 0

    async def handle(one: Message[Any], tx: Any) -> None:
        nonlocal spares
        runs.append(one.id)
        await lab.write(tx, one.id)
        if not reached.is_set() and len(runs) > 3:
            spares = await spare_lanes(lab)
            if spares:
                reached.set()
                await gate.wait()

    worker = asyncio.ensure_future(inbox.run(handle, stop=stop, batch=1, **options))
    async with asyncio.timeout(20):
        await asyncio.wait([worker, asyncio.ensure_future(reached.wait())], return_when=asyncio.FIRST_COMPLETED)
    assert reached.is_set(), "the worker ended, or never claimed ahead"
    return worker, gate, runs, spares


async def test_lanes_are_claimed_for_several_turns_and_each_message_has_its_transaction(
    postgres_lab: PostgresLab, monkeypatch: pytest.MonkeyPatch
) -> None:
    counted, transactions = Counted(monkeypatch), set[int]()

    async def handle(_one: Message[Any], tx: Any) -> None:
        transactions.add(await tx.fetchval("SELECT txid_current()"))

    async with await postgres_lab.inbox() as inbox:
        await inbox.accept([message(number) for number in range(MANY)])
        counted.sent.clear()
        runs = await run_until(inbox, handle, MANY)
        assert sorted(runs) == sorted(f"m{number}" for number in range(MANY))
        assert len(transactions) == MANY
        assert await claimed(postgres_lab) == []
    claims = sum("until = clock_timestamp()" in sql or "onceward_claim" in sql for sql in counted.sent)
    claims += sum("COMMIT; BEGIN" in sql and sql.count("EXECUTE") == 2 for sql in counted.sent)
    assert claims < MANY / 3


@pytest.mark.parametrize("how", ["stop", "cancel", "error"])
async def test_lanes_that_were_claimed_ahead_are_given_back_at_once(postgres_lab: PostgresLab, how: str) -> None:
    async with await postgres_lab.inbox(retry=RetryPolicy(base=60.0, cap=60.0)) as inbox:
        await inbox.accept([message(number) for number in range(MANY)])
        stop = asyncio.Event()
        worker, gate, runs, spares = await waits_with_spares(postgres_lab, inbox, stop)
        assert spares > 0
        if how == "stop":
            stop.set()
            gate.set()
            await worker
        elif how == "cancel":
            worker.cancel()
            await asyncio.wait([worker])
        else:
            others = "FROM pg_stat_activity WHERE pid <> pg_backend_pid() AND datname = current_database()"
            await postgres_lab.query(f"SELECT pg_terminate_backend(pid) {others} AND state = 'idle in transaction'")
            stop.set()
            gate.set()
            await asyncio.wait([worker])
        # The lane whose handler was running when the connection was lost is to be worked alone.
        assert len(await claimed(postgres_lab)) == (how == "error")
        assert await postgres_lab.query("SELECT lane FROM onceward_lanes WHERE owner IS NOT NULL") == []
        assert await all_states(postgres_lab) == [("accepted", 0, 0), ("processed", 1, 0)]
        before = len(await postgres_lab.effects())
        assert before == len(runs) - (how != "stop")
        left = asyncio.Event()

        async def handle(one: Message[Any], tx: Any) -> None:
            await postgres_lab.write(tx, one.id)
            if len(set(await postgres_lab.effects())) == MANY - 1:
                left.set()

        async with asyncio.timeout(2.5):  # and not when their claim would have been over
            await inbox.run(handle, stop=left, batch=1)
        assert sorted(await postgres_lab.effects()) == sorted(f"m{number}" for number in range(MANY))
        assert await all_states(postgres_lab) == [("processed", 1, 0)]


async def test_lanes_do_not_wait_behind_a_slow_handler_and_nobody_suspects_them(
    postgres_lab: PostgresLab, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They go back while it runs. When their claim runs out they would look like those of a dead worker."""
    monkeypatch.setattr("onceward.spares.SPARE_FOR", 0.1)
    async with await postgres_lab.inbox() as inbox:
        await inbox.accept([message(number) for number in range(MANY)])
        stop = asyncio.Event()
        worker, gate, runs, spares = await waits_with_spares(postgres_lab, inbox, stop)
        assert spares > 0
        async with asyncio.timeout(20):
            while await spare_lanes(postgres_lab):
                await asyncio.sleep(0.01)
        assert await postgres_lab.query("SELECT max(claims) FROM onceward_lanes WHERE owner IS NULL") == [(0,)]
        others = await postgres_lab.inbox()
        taken: list[str] = []

        async def handle(one: Message[Any], tx: Any) -> None:
            taken.append(one.id)
            await postgres_lab.write(tx, one.id)

        while await others.dispatch(handle) is not None:
            pass
        assert len(taken) == MANY - len(runs)
        stop.set()
        gate.set()
        await worker
        assert sorted(await postgres_lab.effects()) == sorted(f"m{number}" for number in range(MANY))
        assert await all_states(postgres_lab) == [("processed", 1, 0)]


async def test_who_is_told_to_stop_begins_no_lane_of_a_dead_worker(postgres_lab: PostgresLab) -> None:
    stop, after = asyncio.Event(), list[str]()

    async def handle(one: Message[Any], _tx: Any) -> None:
        if stop.is_set():
            after.append(one.id)
        if one.payload["n"] >= 28:
            stop.set()

    async with await postgres_lab.inbox() as inbox:
        await inbox.accept([message(number) for number in range(68)])
        await postgres_lab.query(
            "UPDATE onceward_lanes SET owner = 'dead', claims = 1, state = 'running', until = now() - interval '1 s', "
            "run_at = clock_timestamp() WHERE lane IN "
            "(SELECT identity FROM onceward_records WHERE substr(message_id, 2)::int >= 28)"
        )
        await inbox.run(handle, stop=stop, batch=1)
        assert after == []
        left = await postgres_lab.query("SELECT DISTINCT claims, until < now() FROM onceward_lanes ORDER BY 1")
        assert left in ([(1, None)], [(1, True)], [(1, None), (1, True)], [(1, True), (1, None)]), "still suspect"


async def test_one_that_fails_or_cannot_begin_keeps_no_spare_lane_from_its_turn(
    postgres_lab: PostgresLab, monkeypatch: pytest.MonkeyPatch
) -> None:
    failed: set[str] = set()

    async def handle(one: Message[Any], tx: Any) -> None:
        await postgres_lab.write(tx, one.id)
        number = one.payload["n"]
        if number % 7 == 3 and one.id not in failed:
            failed.add(one.id)
            raise ValueError("not yet")
        if number % 7 == 5:
            await tx.execute("DEALLOCATE ALL")  # what is said behind its COMMIT is an error

    retry = RetryPolicy(max_attempts=3, base=0.01, cap=0.01)
    async with await postgres_lab.inbox(retry=retry) as inbox:
        await inbox.accept([message(number) for number in range(MANY)])
        async with asyncio.timeout(2.9):  # and not when their claims are over
            await run_until(inbox, handle, MANY + 6)
        assert await claimed(postgres_lab) == []
        assert sorted(await postgres_lab.effects()) == sorted(f"m{number}" for number in range(MANY))
        rows = await postgres_lab.query("SELECT attempts, started, count(*) FROM onceward_records GROUP BY 1, 2")
        assert sorted(rows) == [(1, 0, MANY - 6), (2, 0, 6)]


async def test_a_worker_that_woke_up_too_late_has_lost_its_spare_lanes(postgres_lab: PostgresLab) -> None:
    """Others have them, and have done them: the turn that begins with one finds out before it has done anything."""
    async with await postgres_lab.inbox() as inbox:
        await inbox.accept([message(number) for number in range(MANY)])
        stop = asyncio.Event()
        worker, gate, runs, spares = await waits_with_spares(postgres_lab, inbox, stop)
        # As if it had frozen: its claims are over. Its transaction, and with it one lane, is still there.
        await postgres_lab.query(
            "UPDATE onceward_lanes SET until = now() - interval '1 second' WHERE ctid = ANY (ARRAY ("
            "SELECT ctid FROM onceward_lanes WHERE owner IS NOT NULL FOR NO KEY UPDATE SKIP LOCKED))"
        )
        others = await postgres_lab.inbox()
        taken: list[str] = []

        async def handle(one: Message[Any], tx: Any) -> None:
            taken.append(one.id)
            await postgres_lab.write(tx, one.id)

        async with others:
            while await others.dispatch(handle) is not None:
                pass
        assert len(taken) == MANY - len(runs) >= spares
        gate.set()
        await all_done(postgres_lab, worker, stop)
        assert sorted(await postgres_lab.effects()) == sorted(f"m{number}" for number in range(MANY))
        assert not set(taken) & set(runs)


async def test_a_row_that_has_moved_is_found_when_its_claim_is_over(postgres_lab: PostgresLab) -> None:
    """VACUUM FULL writes the table anew: a lane is not where it was claimed, and nobody takes another for it."""
    async with await postgres_lab.inbox() as inbox:
        await inbox.accept([message(number) for number in range(MANY)])
        stop = asyncio.Event()
        worker, gate, runs, _ = await waits_with_spares(postgres_lab, inbox, stop)
        await postgres_lab.query(
            "UPDATE onceward_lanes SET share = share WHERE ctid = ANY (ARRAY ("
            "SELECT ctid FROM onceward_lanes WHERE owner IS NOT NULL FOR NO KEY UPDATE SKIP LOCKED))"
        )
        gate.set()
        await all_done(postgres_lab, worker, stop)
        assert len(runs) == len(set(runs)) == MANY
        assert await claimed(postgres_lab) == []


async def test_a_place_that_another_lane_has_now_is_not_taken_for_ours(postgres_lab: PostgresLab) -> None:
    async with await postgres_lab.inbox() as inbox:
        await inbox.accept(message(1))
        ((place,),) = await postgres_lab.query("SELECT ctid::text FROM onceward_lanes")
        claiming = Claiming(inbox.consumer, "me", 1, 1, 3.0, None, 300.0, 1, (Spare(b"another", place),))
        async with inbox._settler.plain_unit() as unit:
            begun = await unit.begin_turn(claiming)
            assert begun.claimed == []


async def test_a_leased_handler_keeps_no_spare_lanes(postgres_lab: PostgresLab) -> None:
    held: list[int] = []
    stop = asyncio.Event()
    async with await postgres_lab.inbox() as inbox:

        async def quick(_one: Message[Any], _tx: Any) -> None:
            if await postgres_lab.query("SELECT 1 FROM onceward_records WHERE state <> 'processed'") == [(1,)]:
                stop.set()

        async def slow(_one: Message[Any], lease: Any) -> None:
            held.append(await spare_lanes(postgres_lab))
            async with lease.complete():
                pass

        inbox.handler("order.paid")(quick)
        inbox.handler("order.shipped", lease=30)(slow)
        shipped = [Message(f"s{number}", "order.shipped", {}) for number in range(3)]
        await inbox.accept([*[message(number) for number in range(MANY)], *shipped])
        await inbox.accept([message(number) for number in range(MANY, 2 * MANY)])
        async with asyncio.timeout(20):
            await inbox.run(stop=stop, batch=1)
    assert held == [1, 1, 1], "its own lane, and no other"


async def test_what_a_turn_was_to_begin_with_is_given_back_where_it_could_not() -> None:
    async def never(_owner: str, _lanes: list[bytes]) -> None:
        raise AssertionError("there was time enough")

    spares, claiming = Spares(never), Claiming("billing", "me", 3, 1, 3.0, in_turn=1)
    spares.went_on(claiming, Begun([b"1"], spare=[Spare(b"2", "(0,2)"), Spare(b"3", "(0,3)")]))
    following = spares.next(claiming, 1)
    assert following is not None
    assert [one.lane for one in following.spare] == [b"2"]
    assert await spares.end() == [b"2", b"3"]


async def test_nothing_is_given_back_where_all_are_worked_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("onceward.spares.SPARE_FOR", 0.0)
    given: list[list[bytes]] = []

    async def give_back(_owner: str, lanes: list[bytes]) -> None:
        given.append(lanes)

    spares, claiming = Spares(give_back), Claiming("billing", "me", 2, 1, 3.0, in_turn=1)
    spares.went_on(claiming, Begun([b"1"], spare=[Spare(b"2", "(0,2)")]))
    following = spares.next(claiming, 1)
    assert following is not None
    spares.went_on(following, Begun([b"2"]))
    await asyncio.sleep(0.01)
    assert await spares.end() == []
    assert given == []


# --- how many --------------------------------------------------------------------------------------------------------


class Clock:
    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 0.0
        monkeypatch.setattr("onceward.pace.monotonic", lambda: self.now)

    def turn(self, pace: Pace, seconds: float, *, again: bool = False) -> int:
        """What is claimed after a turn that took so long."""
        pace.begin()
        self.now += seconds
        pace.went(pace.lanes, pace.size, full=True, again=again)
        return pace.ahead


def test_quick_turns_claim_more_ahead_and_slow_ones_less(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, pace = Clock(monkeypatch), Pace(1)
    assert pace.ahead == 1
    assert [clock.turn(pace, 0.001) for _ in range(6)] == [2, 4, 8, AHEAD, AHEAD, AHEAD]
    assert clock.turn(pace, 0.2) == 1
    assert clock.turn(pace, 0.001) == 2
    assert clock.turn(pace, 0.001, again=True) == 1
    assert [clock.turn(pace, LONG) for _ in range(3)] == [1, 1, 1]


def test_what_does_not_fill_a_claim_is_not_taken_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, pace = Clock(monkeypatch), Pace(1)
    assert [clock.turn(pace, 0.001) for _ in range(4)][-1] == AHEAD
    asked = Claiming("billing", "me", AHEAD, 1, 3.0, in_turn=1)
    pace.claimed(AHEAD, asked)
    assert pace.ahead == AHEAD
    pace.claimed(1, Claiming("billing", "me", AHEAD, 1, 3.0, spare=(Spare(b"", "(0,1)"),)))
    assert pace.ahead == AHEAD
    pace.claimed(AHEAD - 1, asked)
    assert pace.ahead == 1


def test_large_turns_claim_only_their_own_lanes(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, pace = Clock(monkeypatch), Pace(500)
    while pace.size < 500:
        clock.turn(pace, 0.001)
    clock.turn(pace, 0.001)
    assert pace.ahead == pace.lanes
