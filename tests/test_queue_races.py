"""The queue on PostgreSQL while others are at it: nothing is lost, nobody shares a lane, nobody waits in a circle."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import AsyncIterator
from typing import Any

import asyncpg
import pytest

from onceward.asyncpg import AsyncpgStore
from onceward.message import Position
from onceward.queue import LaneEnd, Then, TurnClosing
from onceward.record import Record, State
from onceward.testing import PostgresLab
from tests.queue_tools import CONSUMER, Queue, blocked_line, done_line, identity_of, lane_of, line_of, turn

ROUNDS = 60


@pytest.fixture
async def queue(postgres_lab: PostgresLab) -> AsyncIterator[Queue]:
    store = AsyncpgStore(postgres_lab.url, max_size=14)
    await store.open()
    yield Queue(store)
    await store.close()


@pytest.fixture
async def caller(postgres_lab: PostgresLab) -> AsyncIterator[asyncpg.Connection]:
    connection = await asyncpg.connect(postgres_lab.url)
    yield connection
    await connection.close()


def needed(stream: str, position: int) -> Record:
    return Record(
        identity=identity_of(f"{stream}-{position}"), message_id="n", type="t", state=State.PROCESSED, stream=stream,
        position=position,
    )  # fmt: skip


async def settle(queue: Queue, stream: str, position: int) -> None:
    async with queue.unit() as unit:
        assert await unit.claim(needed(stream, position)) is None
        await unit.commit()


async def work(queue: Queue, owner: str, ended: asyncio.Event, ran: Counter[str], *, most: int = 3) -> None:
    """Until it is told to end, and nothing is due."""
    while True:
        lanes = list(await queue.claim(owner, most=2, lease=60))
        if not lanes:
            if ended.is_set() and await queue.due_in() is None:
                return
            await asyncio.sleep(0.005)
            continue
        async with queue.unit() as unit:
            ran.update(await turn(unit, owner, lanes, most=most))


async def test_two_claimers_never_share_a_lane(queue: Queue) -> None:
    await queue.accept(*(line_of(f"o-{n}", lane=f"l-{n}") for n in range(300)))
    found = await asyncio.gather(*(queue.claim(f"w-{n}", most=40) for n in range(12)))
    lanes = [lane for claims in found for lane in claims]
    assert len(lanes) == len(set(lanes)) > 200
    assert all(claims == 1 for part in found for claims in part.values())


async def test_a_message_that_comes_while_a_turn_ends_is_not_stranded(queue: Queue) -> None:
    ran: Counter[str] = Counter()
    for n in range(ROUNDS):
        await queue.accept(line_of(f"a-{n}", lane="l"))
        claimed = list(await queue.claim("w"))

        async def end(claimed: list[bytes]) -> None:
            async with queue.unit() as unit:
                ran.update(await turn(unit, "w", claimed))

        await asyncio.gather(end(claimed), queue.accept(line_of(f"b-{n}", lane="l")))
        async with asyncio.timeout(5):
            while await queue.due_in() is not None:
                ran.update(await queue.turn())
    assert ran == Counter([f"{what}-{n}" for what in "ab" for n in range(ROUNDS)])


async def test_who_holds_a_lane_to_add_to_it_keeps_it_from_ending(queue: Queue, caller: asyncpg.Connection) -> None:
    await queue.accept(line_of("a", lane="l"))
    claimed = list(await queue.claim("w"))
    async with caller.transaction(), queue.store.join(caller) as joined:
        await joined.accept([line_of("b", lane="l")], consumer=CONSUMER, host="h")
        async with queue.unit() as unit, asyncio.timeout(5):  # nobody waits for the caller
            assert await turn(unit, "w", claimed) == ["a"]
        assert await queue.due_in() is not None
        assert await queue.turn() == []
    assert (await queue.due_in() or 0.0) < 0.1
    await asyncio.sleep(0.1)
    assert await queue.drain() == ["b"]


@pytest.mark.parametrize("shared", [True, False])
async def test_waiting_and_settling_at_once_loses_no_wake_up(queue: Queue, shared: bool) -> None:
    for n in range(ROUNDS):
        depends_on = [Position("stock", n)]
        lane = "l" if shared else f"s-{n}"
        line = line_of(f"o-{n}", lane=lane, depends_on=depends_on) if shared else line_of(
            f"o-{n}", stream=lane, position=1, depends_on=depends_on
        )  # fmt: skip
        await queue.accept(line)
        await queue.claim("w")
        (one,) = (await queue.look("w", [lane_of(lane)])).messages
        assert one.unmet is not None

        async def wait(one: Any, lane: str) -> None:
            await asyncio.sleep(random.random() * 0.004)
            end = LaneEnd(lane_of(lane).hex(), Then.NEXT if shared else Then.WAIT)
            await queue.close("w", [lane_of(lane)], TurnClosing("w", [end], [], [], [blocked_line(one)]))

        async def come(n: int) -> None:
            await asyncio.sleep(random.random() * 0.004)
            await settle(queue, "stock", n)

        await asyncio.gather(wait(one, lane), come(n))
        await asyncio.sleep(0.03)  # where it was too early it is looked at again soon
        assert await queue.due_in() == 0.0, n
        assert await queue.drain() == [f"o-{n}"]


async def test_two_turns_that_wait_for_what_the_other_has_done_do_not_wait_in_a_circle(queue: Queue) -> None:
    for n in range(10):
        await queue.accept(
            line_of(f"a1-{n}", stream=f"a-{n}", position=1),
            line_of(f"b1-{n}", stream=f"b-{n}", position=1),
            line_of(f"a2-{n}", stream=f"a-{n}", position=2, depends_on=[Position(f"b-{n}", 1)]),
            line_of(f"b2-{n}", stream=f"b-{n}", position=2, depends_on=[Position(f"a-{n}", 1)]),
        )
        await queue.claim("w")
        async with queue.unit() as one, queue.unit() as two, asyncio.timeout(0.9):  # before a deadlock is looked for
            closings = []
            for unit, lane in ((one, lane_of(f"a-{n}")), (two, lane_of(f"b-{n}"))):
                first, second = (await unit.take_lanes("w", [lane], most=9)).messages
                closings.append(
                    TurnClosing("w", [LaneEnd(lane.hex(), Then.WAIT)], [done_line(first)], [], [blocked_line(second)])
                )

            async def end(unit: Any, closing: TurnClosing) -> None:
                await unit.close_lanes(closing, consumer=CONSUMER, host="h")
                await asyncio.sleep(0.01)
                await unit.commit()

            await asyncio.gather(end(one, closings[0]), end(two, closings[1]))
        async with asyncio.timeout(5):
            ran: list[str] = []
            while len(ran) < 2:
                ran += await queue.turn()
        assert sorted(ran) == [f"a2-{n}", f"b2-{n}"]
        assert await queue.due_in() is None


async def test_two_who_wake_the_same_lanes_do_not_wait_for_each_other(queue: Queue) -> None:
    for n in range(4):
        await queue.accept(line_of(f"o-{n}", lane=f"l-{n % 2}", depends_on=[Position("stock", n)]))
    assert await queue.drain() == []

    async def wake(unit: Any, position: int) -> None:
        async with queue.store.join(unit.tx) as joined:
            assert await joined.claim(needed("stock", position)) is None
            await joined.commit()

    async with queue.unit() as one, queue.unit() as two, asyncio.timeout(0.9):  # before a deadlock is looked for
        for unit, position in ((one, 0), (two, 3)):
            assert await unit.claim(needed("stock", position)) is None
            await unit.tx.execute("SET CONSTRAINTS onceward_settled IMMEDIATE")  # as at COMMIT, but one by one
        await asyncio.gather(wake(one, 1), wake(two, 2))
        await asyncio.gather(one.commit(), two.commit())
    async with queue.unit() as unit:
        await unit.wake_overdue(CONSUMER)
    assert sorted(await queue.drain()) == [f"o-{n}" for n in range(4)]
    assert await queue.due_in() is None


@pytest.mark.parametrize("early", [True, False])
async def test_what_a_repeatable_read_settles_is_found_by_who_looks(
    queue: Queue, caller: asyncpg.Connection, early: bool
) -> None:
    await queue.accept(line_of("o-1", lane="l", depends_on=[Position("stock", 1)]))
    transaction = caller.transaction(isolation="repeatable_read")
    await transaction.start()
    await caller.fetchval("SELECT count(*) FROM onceward_waits")  # its snapshot: nobody waits yet
    assert await queue.drain() == []
    async with queue.store.join(caller) as joined:
        assert await joined.claim(needed("stock", 1)) is None
        await joined.commit()
    if early:
        async with queue.unit() as unit:
            assert await unit.wake_overdue(CONSUMER) == 0
    await transaction.commit()
    assert await queue.due_in() is None
    async with queue.unit() as unit:
        assert await unit.wake_overdue(CONSUMER) == 1
        assert await unit.wake_overdue(CONSUMER) == 0
    assert await queue.drain() == ["o-1"]


async def test_an_arrival_is_kept_while_somebody_is_about_to_wait_for_it(
    queue: Queue, caller: asyncpg.Connection
) -> None:
    await queue.accept(line_of("o-1", lane="l", depends_on=[Position("stock", 1)]))
    lanes = list(await queue.claim("w"))
    async with queue.unit() as unit:
        (one,) = (await unit.take_lanes("w", lanes, most=1)).messages
        closing = TurnClosing("w", [LaneEnd(lane_of("l").hex())], [], [], [blocked_line(one)])
        await unit.close_lanes(closing, consumer=CONSUMER, host="h")
        async with caller.transaction(isolation="repeatable_read"), queue.store.join(caller) as joined:
            assert await joined.claim(needed("stock", 1)) is None
            await joined.commit()
        async with queue.unit() as other:
            assert await other.wake_overdue(CONSUMER) == 0
        await unit.commit()
    assert await queue.due_in() is None
    async with queue.unit() as unit:
        assert await unit.wake_overdue(CONSUMER) == 1
    assert await queue.drain() == ["o-1"]


@pytest.mark.parametrize("kind", ["shared", "stream"])
async def test_a_hot_lane(queue: Queue, kind: str) -> None:
    """Eight who accept, four who work, some of it blocked: all of it runs once, and nobody deadlocks."""
    ran: Counter[str] = Counter()
    ended = asyncio.Event()
    streams = [f"s{n}" for n in range(8)]

    async def add(stream: str) -> None:
        for n in range(1, 26):
            depends_on = [Position("gate", n)] if n % 8 == 0 and stream == "s0" else []
            lane = "hot" if kind == "shared" else None
            name = stream if kind == "shared" else "hot"
            position = n if kind == "shared" else int(stream[1:]) + 8 * n
            await queue.accept(
                line_of(f"{stream}-{n}", lane=lane, stream=name, position=position, depends_on=depends_on)
            )

    async def gate() -> None:
        for n in (8, 16, 24):
            await asyncio.sleep(0.05)
            await settle(queue, "gate", n)

    async with asyncio.timeout(60):
        workers = [asyncio.ensure_future(work(queue, f"w-{n}", ended, ran)) for n in range(4)]
        await asyncio.gather(gate(), *(add(stream) for stream in streams))
        ended.set()
        await asyncio.gather(*workers)
    assert ran == Counter(f"{stream}-{n}" for stream in streams for n in range(1, 26))


async def test_a_worker_outlives_timeouts_of_its_role(postgres_lab: PostgresLab, caller: asyncpg.Connection) -> None:
    """Somebody has a table to itself for longer than `lock_timeout`: a VACUUM FULL, a migration."""
    store = AsyncpgStore(postgres_lab.url, server_settings={"lock_timeout": "50ms"})
    inbox, ran = await postgres_lab.inbox(store=store), asyncio.Event()

    async def handler(message: Any) -> None:
        ran.set()

    async with inbox.worker(handler, poll_interval=0.05) as worker:
        async with caller.transaction():
            await caller.execute("LOCK TABLE onceward_lanes")
            await asyncio.sleep(0.5)
            assert worker.running
        await inbox.accept(postgres_lab.message())
        await asyncio.wait_for(ran.wait(), 20)


@pytest.mark.parametrize("level", ["repeatable read", "serializable"])
async def test_the_default_level_of_a_role_does_not_matter(postgres_lab: PostgresLab, level: str) -> None:
    store = AsyncpgStore(postgres_lab.url, server_settings={"default_transaction_isolation": level})
    inbox, ran = await postgres_lab.inbox(store=store), Counter[str]()

    async def handler(message: Any) -> None:
        ran[message.id] += 1

    async def accepting(some: int) -> None:
        for number in range(40):
            id_ = f"{some}-{number}"
            await inbox.accept(postgres_lab.message(id_, stream=f"s{number % 5}", position=number * 10 + some))

    async with inbox.worker(handler, concurrency=3) as worker:
        await asyncio.gather(*map(accepting, range(4)))
        async with asyncio.timeout(20):
            while len(ran) < 160:
                await asyncio.sleep(0.01)
        assert worker.running
    assert set(ran.values()) == {1}


async def test_a_worker_that_fails_does_not_stop_others_that_share_its_event(postgres_lab: PostgresLab) -> None:
    inbox, stop = await postgres_lab.inbox(), asyncio.Event()
    await postgres_lab.query("ALTER TABLE onceward_lanes RENAME COLUMN owner TO other")
    with pytest.raises(Exception, match="owner"):
        await inbox.run(lambda message: None, concurrency=2, stop=stop)
    assert not stop.is_set()


@pytest.mark.parametrize("level", ["read committed", "repeatable read", "serializable"])
async def test_a_worker_gives_back_its_lanes_whatever_the_default_level(postgres_lab: PostgresLab, level: str) -> None:
    store = AsyncpgStore(postgres_lab.url, server_settings={"default_transaction_isolation": level})
    async with await postgres_lab.inbox(store=store) as inbox:
        await inbox.accept([postgres_lab.message() for _ in range(3)])
        began = asyncio.Event()

        async def for_ever(_message: Any, _tx: Any) -> None:
            began.set()
            await asyncio.Event().wait()

        worker = asyncio.ensure_future(inbox.run(for_ever, batch=1))
        await began.wait()
        worker.cancel()
        with pytest.raises(asyncio.CancelledError):
            await worker
        assert await postgres_lab.query("SELECT 1 FROM onceward_lanes WHERE owner IS NOT NULL OR claims > 0") == []


async def test_workers_give_back_together_what_was_left(postgres_lab: PostgresLab) -> None:
    """After the database was away each of them finds it, and none of them falls over it."""
    inbox, rounds = await postgres_lab.inbox(), 20
    crew = inbox._crew
    await asyncio.gather(*(inbox.queue_stats() for _ in range(4)))  # a connection for each
    for _ in range(rounds):
        crew._left.append(("somebody", [bytes(16)], False))
        await asyncio.gather(*(inbox.dispatch(lambda message: None) for _ in range(4)))
        assert crew._left == []
