"""The queue at the level of units: every verb, and both dialects say the same."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from datetime import UTC, datetime, timedelta
from typing import Any

import msgspec
import pytest

from onceward import Inbox, Message
from onceward.errors import HandlerEndedTransaction
from onceward.message import Position
from onceward.queue import SHARED, Kept, LaneEnd, Then, TurnClosing
from onceward.record import Decision, Failure, Record, State, decide
from onceward.retry import RetryPolicy
from onceward.stats import QueueStats
from onceward.store import Claims, Sweepable
from onceward.testing import AiosqliteLab, Lab, PostgresLab, PsycopgLab, SqliteLab
from tests.queue_tools import (
    CONSUMER,
    Queue,
    blocked_line,
    done_line,
    failed_line,
    identity_of,
    lane_of,
    line_of,
)

SOON = timedelta(seconds=60)


def now() -> datetime:
    return datetime.now(UTC)


class QueueUnits:
    @pytest.fixture
    async def queue(self, lab: Lab) -> AsyncIterator[Queue]:
        store = lab.store()
        await store.open()
        yield Queue(store)
        await store.close()

    # --- accept ---------------------------------------------------------------------------------------------

    async def test_a_new_message_is_kept_whole(self, queue: Queue) -> None:
        needed = Position("stock", 3, "acme")
        line = line_of("o-1", stream="order-1", position=7, depends_on=[needed], payload='{"text":"\\u0000"}')
        assert await queue.accept(line) == [Kept.NEW]
        record = await queue.find("o-1")
        assert record.state is State.ACCEPTED
        assert (record.attempts, record.message_id, record.payload) == (0, "o-1", {"text": "\0"})
        assert (record.stream, record.position, record.depends_on) == ("order-1", 7, (needed,))
        assert record.received_position is not None

    async def test_a_message_accepted_twice_is_kept_once(self, queue: Queue) -> None:
        assert await queue.accept(line_of("o-1"), line_of("o-2")) == [Kept.NEW, Kept.NEW]
        told = await queue.kept(line_of("o-2", payload_hash=b"2"), line_of("o-3"), line_of("o-1"))
        assert [one.how for one in told] == [Kept.ACCEPTED, Kept.NEW, Kept.ACCEPTED]
        assert [one.payload_hash for one in (told[0], told[2])] == [b"1", b"1"]
        assert sorted(await queue.drain()) == ["o-1", "o-2", "o-3"]

    async def test_what_is_settled_is_said(self, queue: Queue) -> None:
        await queue.accept(line_of("o-1"), line_of("dead"))
        await queue.drain()
        again = await queue.kept(line_of("dead"), line_of("o-1", payload_hash=b"2"))
        assert [one.how for one in again] == [Kept.DEAD, Kept.PROCESSED]
        assert again[1].payload_hash == b"1"
        assert await queue.due_in() is None

    async def test_what_failed_inline_joins(self, queue: Queue, lab: Lab) -> None:
        inbox = Inbox(lab.store(), consumer=CONSUMER)
        message = Message("o-1", "order.paid", {"n": 1})

        async def refuse(_message: Any, _tx: Any) -> None:
            raise ValueError("no")

        async with inbox:
            with pytest.raises(ValueError, match="no"):
                await inbox.process(message, refuse)
            identity = inbox.identity_of(message)
        digest = identity.digest.hex()
        line = msgspec.structs.replace(line_of("o-1"), identity=digest, lane=digest, scope=identity.scope)
        assert await queue.accept(line) == [Kept.PARKED]
        assert await queue.accept(line) == [Kept.ACCEPTED]
        lanes = await queue.claim()
        (one,) = (await queue.look("w", lanes)).messages
        assert (one.attempts, one.message.payload) == (1, {"n": 1})

    async def test_a_start_mark_is_in_flight_until_its_runner_is_dead(self, queue: Queue, lab: Lab) -> None:
        record = await self._draft("o-1", payload={"n": 1})
        async with queue.unit() as unit:
            assert await unit.mark(None, record)
        assert await queue.accept(line_of("o-1")) == [Kept.IN_FLIGHT]
        await lab.query("UPDATE onceward_records SET next_try_at = received_at WHERE key = 'o-1'")
        assert await queue.accept(line_of("o-1")) == [Kept.PARKED]
        assert (await queue.find("o-1")).started == 1
        async with queue.unit() as unit:
            assert not await unit.mark(record, record)

    async def test_the_order_of_arrival_is_never_given_out_twice(self, queue: Queue) -> None:
        await queue.accept(line_of("o-1"), line_of("o-2"))
        first = [(await queue.find(key)).received_position or 0 for key in ("o-1", "o-2")]
        assert first == sorted(set(first))
        await queue.drain()
        await queue.accept(line_of("o-3"))
        assert ((await queue.find("o-3")).received_position or 0) > first[-1]

    async def test_what_is_not_due_lets_its_lane_be_due_later(self, queue: Queue) -> None:
        await queue.accept(line_of("o-1", lane="a", not_before=now() + SOON))
        assert 50 < (await queue.due_in() or 0) <= 60.1
        assert await queue.claim() == {}
        # The one that comes next may have to run before it: somebody looks.
        await queue.accept(line_of("o-2", lane="a"))
        assert await queue.due_in() == 0.0
        assert await queue.turn() == []
        assert 50 < (await queue.due_in() or 0) <= 60.1

    async def test_of_a_list_the_first_that_is_due_counts(self, queue: Queue) -> None:
        late = line_of("o-2", stream="s", position=2, not_before=now() + SOON)
        await queue.accept(late, line_of("o-1", stream="s", position=1))
        assert await queue.turn() == ["o-1"]
        assert 50 < (await queue.due_in() or 0) <= 60.1

    async def test_what_is_joined_to_a_transaction_is_kept_with_it(self, queue: Queue, lab: Lab) -> None:
        async with queue.unit() as outer:
            await outer.claim(await self._draft("effect"))
            async with queue.store.join(outer.tx) as unit:
                (kept,) = await unit.accept([line_of("o-1")], consumer=CONSUMER, host="h")
                assert kept.how is Kept.NEW
            await outer.rollback()
        assert await queue.due_in() is None
        async with queue.unit() as outer:
            await outer.claim(await self._draft("effect"))
            async with queue.store.join(outer.tx) as unit:
                await unit.accept([line_of("o-1")], consumer=CONSUMER, host="h")
            await outer.commit()
        assert await queue.drain() == ["o-1"]

    async def _draft(self, key: str, **fields: Any) -> Any:
        return Record(identity=identity_of(key), message_id=key, type="order.paid", state=State.PROCESSED, **fields)

    # --- order ----------------------------------------------------------------------------------------------

    async def test_a_lane_of_one_stream_runs_by_position(self, queue: Queue) -> None:
        lines = [line_of(f"o-{n}", stream="s", position=n) for n in (3, 1)]
        await queue.accept(*lines, line_of("o-x", stream="s"))
        await queue.accept(line_of("o-2", stream="s", position=2))
        assert await queue.peek() == ["o-1", "o-2", "o-3", "o-x"]
        assert await queue.peek(most=2) == ["o-1", "o-2"]

    async def test_a_shared_lane_runs_as_they_came_and_each_stream_by_position(self, queue: Queue) -> None:
        await queue.accept(
            line_of("a2", lane="l", stream="a", position=2),
            line_of("x", lane="l"),
            line_of("b1", lane="l", stream="b", position=1),
            line_of("a1", lane="l", stream="a", position=1),
            line_of("a", lane="l", stream="a"),
            line_of("a0", lane="l", stream="a", position=0),
        )
        assert await queue.peek() == ["a0", "x", "b1", "a1", "a2", "a"]
        assert await queue.peek(most=1) == ["a0"]
        assert await queue.drain() == ["a0", "x", "b1", "a1", "a2", "a"]
        assert await queue.due_in() is None

    async def test_lanes_do_not_mix(self, queue: Queue) -> None:
        await queue.accept(
            line_of("a1", lane="l", stream="s", position=1),
            line_of("b1", lane="m", stream="s", position=1),
            line_of("c1", lane="l", stream="s", position=1, tenant="acme"),
        )
        assert len(await queue.claim()) == 3

    # --- claims ---------------------------------------------------------------------------------------------

    async def test_a_lane_has_one_owner_until_its_lease_ends(self, queue: Queue) -> None:
        await queue.accept(line_of("o-1", lane="a"))
        lane = lane_of("a")
        assert await queue.claim("one", lease=5) == {lane: 1}
        assert await queue.claim("two") == {}
        assert 0 <= (await queue.due_in() or 0) <= 5.001  # julianday() is a float: days with fifteen digits
        async with queue.unit() as unit:
            assert await unit.extend("one", [lane], 0.2) == {lane}
        await asyncio.sleep(0.25)
        assert await queue.claim("two", lease=30) == {lane: 2}

        # Who froze finds out, in whatever it tries.
        taken = await queue.look("one", [lane])
        assert (taken.lanes, taken.messages) == (frozenset(), ())
        async with queue.unit() as unit:
            assert await unit.hold_lanes("one", [lane]) == frozenset()
            await unit.rollback()
            assert await unit.extend("one", [lane], 60) == frozenset()
            await unit.release("one", [lane])
            assert await unit.mark_start("one", lane, identity_of("o-1")) is None
            await unit.hold_lanes("one", [lane])
            await unit.close_lanes(TurnClosing("one", [LaneEnd(lane.hex())]), consumer=CONSUMER, host="h")
            await unit.commit()
        assert (await queue.look("two", [lane])).lanes == {lane}
        assert 20 < (await queue.due_in() or 0) <= 30.1

    async def test_what_is_given_back_counts_no_claim(self, queue: Queue) -> None:
        await queue.accept(line_of("o-1", lane="a"))
        lane = lane_of("a")
        await queue.claim("one")
        async with queue.unit() as unit:
            await unit.release("one", [lane, lane_of("b")])
        assert await queue.claim("two") == {lane: 1}
        async with queue.unit() as unit:
            await unit.release("two", [lane], delay=60)
        assert 50 < (await queue.due_in() or 0) <= 60.1

    async def test_a_turn_that_ended_counts_no_claim(self, queue: Queue) -> None:
        await queue.accept(*(line_of(f"o-{n}", lane="a") for n in range(3)))
        for n in range(3):
            assert await queue.claim("w") == {lane_of("a"): 1}
            async with queue.unit() as unit:
                (one,) = (await unit.take_lanes("w", [lane_of("a")], most=1)).messages
                assert one.identity.key == f"o-{n}"
                closing = TurnClosing("w", [LaneEnd(lane_of("a").hex())], [done_line(one)])
                await unit.close_lanes(closing, consumer=CONSUMER, host="h")
                await unit.commit()
        assert await queue.claim("w") == {}
        assert await queue.due_in() is None

    async def test_a_turn_that_is_rolled_back_has_done_nothing(self, queue: Queue) -> None:
        await queue.accept(line_of("o-1", lane="a"))
        await queue.claim("w")
        async with queue.unit() as unit:
            (one,) = (await unit.take_lanes("w", [lane_of("a")], most=9)).messages
            closing = TurnClosing("w", [LaneEnd(lane_of("a").hex())], [done_line(one)])
            await unit.close_lanes(closing, consumer=CONSUMER, host="h")
            await unit.rollback()
        assert len((await queue.look("w", [lane_of("a")])).messages) == 1
        assert await queue.state("o-1") is State.ACCEPTED

    async def test_claims_are_for_one_consumer_and_the_longest_due_first(self, queue: Queue) -> None:
        for n in range(5):
            await queue.accept(line_of(f"o-{n}", lane=f"l-{n}"))
            await asyncio.sleep(0.002)
        async with queue.unit() as unit:
            assert await unit.claim_lanes("shipping", "w", most=9, lease=5) == []
            assert await unit.due_in("shipping") is None
        assert set(await queue.claim(most=2)) == {lane_of("l-0"), lane_of("l-1")}
        assert set(await queue.claim(most=2)) == {lane_of("l-2"), lane_of("l-3")}

    async def test_shares_are_disjoint_and_complete(self, queue: Queue) -> None:
        await queue.accept(*(line_of(f"o-{n}") for n in range(200)))
        parts = [set(await queue.claim(f"w-{n}", most=1000, share=(n, 3))) for n in range(3)]
        assert sum(map(len, parts)) == len(set.union(*parts)) == 200
        assert min(map(len, parts)) > 30
        await queue.accept(line_of("late"))
        share = int.from_bytes(identity_of("late").digest[:4], "big") % 3
        assert await queue.due_in((share, 3)) == 0.0
        assert (await queue.due_in(((share + 1) % 3, 3)) or 0) > 1

    # --- how messages end -----------------------------------------------------------------------------------

    async def test_done_failed_and_dead_are_written_down(self, queue: Queue) -> None:
        await queue.accept(*(line_of(key, lane="l") for key in ("ok", "fails", "dies")))
        await queue.claim("w")
        async with queue.unit() as unit:
            ok, fails, dies = (await unit.take_lanes("w", [lane_of("l")], most=9)).messages
            closing = TurnClosing(
                "w",
                [LaneEnd(lane_of("l").hex(), Then.RETRY, 60.0)],
                [done_line(ok, result='{"paid":true}', duration_ms=1.5, keep_ms=60_000)],
                [failed_line(fails, delay=60.0, duration_ms=2.5), failed_line(dies, dead=True, counted=False)],
            )
            await unit.close_lanes(closing, consumer=CONSUMER, host="there")
            await unit.commit()
        record = await queue.find("ok")
        assert (record.state, record.attempts, record.result) == (State.PROCESSED, 1, {"paid": True})
        assert (record.payload, record.handler, record.host, record.duration_ms) == (None, "pay", "there", 1.5)
        assert record.processed_at is not None
        assert record.expires_at is not None
        assert record.processed_position is not None
        record = await queue.find("fails")
        assert (record.state, record.attempts, record.last_error) == (State.FAILED, 1, "ValueError: boom")
        assert record.errors[0].at
        assert record.next_try_at is not None
        assert record.payload == {"n": 1}
        record = await queue.find("dies")
        assert (record.state, record.attempts, record.next_try_at) == (State.DEAD, 0, None)
        assert record.payload == {"n": 1}
        assert 50 < (await queue.due_in() or 0) <= 60.1

    async def test_ten_errors_are_kept(self, queue: Queue) -> None:
        await queue.accept(line_of("o-1", lane="l"))
        for n in range(12):
            await queue.claim("w")
            async with queue.unit() as unit:
                (one,) = (await unit.take_lanes("w", [lane_of("l")], most=9)).messages
                failed = msgspec.structs.replace(failed_line(one, delay=0.0), error=f'{{"type":"E","text":"{n}"}}')
                closing = TurnClosing("w", [LaneEnd(lane_of("l").hex(), Then.RETRY)], [], [failed])
                await unit.close_lanes(closing, consumer=CONSUMER, host="h")
                await unit.commit()
        record = await queue.find("o-1")
        assert record.attempts == 12
        assert [error.text for error in record.errors] == [str(n) for n in range(2, 12)]

    async def test_a_message_that_is_gone_is_noticed(self, queue: Queue) -> None:
        await queue.accept(line_of("o-1", lane="l"))
        await queue.claim("w")
        (one,) = (await queue.look("w", [lane_of("l")])).messages
        closing = TurnClosing("w", [LaneEnd(lane_of("l").hex())], [done_line(one)])
        await queue.close("w", [lane_of("l")], closing)
        async with queue.unit() as unit:
            await unit.hold_lanes("w", [lane_of("l")])
            with pytest.raises(HandlerEndedTransaction):
                await unit.close_lanes(closing, consumer=CONSUMER, host="h")
            await unit.rollback()
            await unit.hold_lanes("w", [lane_of("l")])
            with pytest.raises(HandlerEndedTransaction):
                await unit.close_lanes(
                    TurnClosing("w", [], [], [failed_line(one, delay=1.0)]), consumer=CONSUMER, host="h"
                )

    async def test_start_marks(self, queue: Queue) -> None:
        await queue.accept(line_of("o-1", lane="l"))
        await queue.claim("w")
        async with queue.unit() as unit:
            marked = await unit.mark_start("w", lane_of("l"), identity_of("o-1"))
            assert (marked.state, marked.started, marked.payload) == (State.RUNNING, 1, {"n": 1})
            await unit.unmark_start(identity_of("o-1"))
            await unit.unmark_start(identity_of("o-1"))
        record = await queue.find("o-1")
        assert (record.state, record.started) == (State.ACCEPTED, 0)
        async with queue.unit() as unit:
            await unit.mark_start("w", lane_of("l"), identity_of("o-1"))
            (one,) = (await unit.take_lanes("w", [lane_of("l")], most=9)).messages
            assert one.started == 1
            closing = TurnClosing("w", [LaneEnd(lane_of("l").hex())], [done_line(one, started=1)])
            await unit.close_lanes(closing, consumer=CONSUMER, host="h")
            await unit.commit()
        record = await queue.find("o-1")
        assert (record.state, record.started) == (State.PROCESSED, 0)

    async def test_a_savepoint_undoes_one_message_of_many(self, queue: Queue, lab: Lab) -> None:
        await queue.accept(*(line_of(key, lane="l") for key in ("one", "two", "three")))
        await queue.claim("w")
        async with queue.unit() as unit:
            messages = (await unit.take_lanes("w", [lane_of("l")], most=9)).messages
            for message in messages:
                await unit.savepoint()
                await lab.write(unit.tx, message.identity.key)
                if message.identity.key == "two":
                    await unit.back_to_savepoint()
            closing = TurnClosing("w", [LaneEnd(lane_of("l").hex())], [done_line(one) for one in messages])
            await unit.close_lanes(closing, consumer=CONSUMER, host="h")
            await unit.commit()
        assert [key for (key,) in await lab.query("SELECT * FROM effects")] == ["one", "three"]

    # --- dependencies ---------------------------------------------------------------------------------------

    async def _settle(self, queue: Queue, stream: str, position: int, key: str = "") -> None:
        async with queue.unit() as unit:
            key = key or f"{stream}-{position}"
            assert await unit.claim(await self._draft(key, stream=stream, position=position)) is None
            await unit.commit()

    async def test_a_lane_of_one_stream_sleeps_until_its_position_is_settled(self, queue: Queue) -> None:
        needed = Position("stock", 1)
        await queue.accept(line_of("o-1", stream="s", position=1, depends_on=[needed]))
        await queue.accept(line_of("o-2", stream="s", position=2))
        await queue.claim("w")
        (first, _) = (await queue.look("w", [lane_of("s")])).messages
        assert first.unmet is not None
        assert (first.unmet.position, first.unmet.state) == (Position("stock", 1, "default"), None)
        async with queue.unit() as unit:
            await unit.release("w", [lane_of("s")])
        assert await queue.drain() == []
        assert await queue.due_in() is None
        await self._settle(queue, "stock", 2, "other")
        assert await queue.due_in() is None
        await self._settle(queue, "stock", 1)
        assert await queue.due_in() == 0.0
        assert await queue.drain() == ["o-1", "o-2"]
        assert await queue.due_in() is None

    async def test_what_is_settled_before_it_waits_is_not_waited_for(self, queue: Queue) -> None:
        await queue.accept(line_of("o-1", stream="s", position=1, depends_on=[Position("stock", 1)]))
        await queue.claim("w")
        (one,) = (await queue.look("w", [lane_of("s")])).messages
        await self._settle(queue, "stock", 1)
        closing = TurnClosing("w", [LaneEnd(lane_of("s").hex(), Then.WAIT)], [], [], [blocked_line(one)])
        await queue.close("w", [lane_of("s")], closing)
        assert await queue.due_in() == 0.0
        assert await queue.drain() == ["o-1"]

    async def test_a_lower_position_wakes_a_lane_that_waits(self, queue: Queue) -> None:
        await queue.accept(line_of("o-2", stream="s", position=2, depends_on=[Position("stock", 1)]))
        assert await queue.drain() == []
        await queue.accept(line_of("o-1", stream="s", position=1))
        assert await queue.drain() == ["o-1"]
        assert await queue.due_in() is None

    async def test_in_a_shared_lane_a_blocked_stream_is_overtaken_by_others(self, queue: Queue) -> None:
        await queue.accept(
            line_of("a1", lane="l", stream="a", position=1, depends_on=[Position("stock", 1)]),
            line_of("b1", lane="l", stream="b", position=1),
            line_of("a2", lane="l", stream="a", position=2),
            line_of("x", lane="l"),
        )
        assert await queue.drain() == ["b1", "x"]
        await queue.accept(
            line_of("a3", lane="l", stream="a", position=3),
            line_of("b2", lane="l", stream="b", position=2),
            line_of("a4", lane="l", stream="a", position=4),
        )
        assert await queue.peek() == ["a3!", "b2", "a4!"]
        assert await queue.drain() == ["b2"]
        assert await queue.due_in() is None
        await self._settle(queue, "stock", 1)
        assert await queue.drain() == ["a1", "a2", "a3", "a4"]
        assert await queue.due_in() is None

    async def test_a_lower_position_of_a_track_that_is_aside_runs_first(self, queue: Queue) -> None:
        await queue.accept(
            line_of("a2", lane="l", stream="a", position=2, depends_on=[Position("stock", 1)]),
            line_of("x", lane="l"),
        )
        assert await queue.drain() == ["x"]
        await queue.accept(*(line_of(f"a{n}", lane="l", stream="a", position=n) for n in (3, 1)))
        # a1 runs in the first place, and is not behind itself.
        assert await queue.peek() == ["a1"]
        assert await queue.drain() == ["a1"]
        await self._settle(queue, "stock", 1)
        assert await queue.drain() == ["a2", "a3"]

    async def test_a_deadline_wakes_what_waits(self, queue: Queue) -> None:
        await queue.accept(line_of("a1", lane="l", depends_on=[Position("stock", 1)]))
        await queue.accept(line_of("s1", stream="s", position=1, depends_on=[Position("stock", 1)]))
        lanes = await queue.claim("w")
        taken = await queue.look("w", lanes)
        past = now() - timedelta(seconds=1)
        blocked = [blocked_line(one, past if one.rank == SHARED else now() + SOON) for one in taken.messages]
        ends = [LaneEnd(lane.hex(), Then.WAIT) for lane in lanes]
        await queue.close("w", lanes, TurnClosing("w", ends, [], [], blocked))
        assert await queue.due_in() is None
        async with queue.unit() as unit:
            assert await unit.wake_overdue("shipping") == 0
            assert await unit.wake_overdue(CONSUMER) == 1
            assert await unit.wake_overdue(CONSUMER) == 0
        (one,) = (await queue.look("v", await queue.claim("v"))).messages
        assert one.identity.key == "a1"

    @pytest.mark.parametrize("how", ["claim", "take", "claim_many", "joined", "dead", "turn"])
    async def test_every_way_to_settle_wakes(self, queue: Queue, how: str) -> None:
        await queue.accept(line_of("o-1", lane="l", depends_on=[Position("stock", 1)]))
        assert await queue.drain() == []
        assert await queue.due_in() is None
        record = await self._draft("needed", stream="stock", position=1, payload_hash=b"1")
        await SETTLE[how](queue, record)
        assert await queue.due_in() == 0.0
        (one,) = (await queue.look("w", await queue.claim("w"))).messages
        assert (one.unmet is None) == (how != "dead")
        if one.unmet is not None:
            assert one.unmet.state is State.DEAD

    async def test_what_is_rolled_back_wakes_nobody(self, queue: Queue, lab: Lab) -> None:
        await queue.accept(line_of("o-1", lane="l", depends_on=[Position("stock", 1)]))
        await queue.drain()
        async with queue.unit() as outer:
            await outer.claim(await self._draft("outer"))
            async with queue.store.join(outer.tx) as inner:
                assert await inner.claim(await self._draft("needed", stream="stock", position=1)) is None
                await inner.rollback()
            await outer.commit()
        assert await queue.due_in() is None

    async def test_a_message_waits_for_its_dependencies_one_by_one(self, queue: Queue) -> None:
        needed = [Position("stock", 1), Position("credit", 5, "acme")]
        await queue.accept(line_of("o-1", lane="l", depends_on=needed))
        assert await queue.drain() == []
        await self._settle(queue, "stock", 1)
        assert await queue.due_in() == 0.0
        assert await queue.drain() == []
        await self._settle(queue, "credit", 5)
        assert await queue.due_in() is None
        async with queue.unit() as unit:
            needed_record = await self._draft("c", stream="credit", position=5)
            await unit.claim(msgspec.structs.replace(needed_record, identity=identity_of("c", "acme")))
            await unit.commit()
        assert await queue.drain() == ["o-1"]

    # --- dead letters ---------------------------------------------------------------------------------------

    async def test_a_dead_letter_goes_back_to_its_place(self, queue: Queue) -> None:
        lines = [line_of("dead-1", stream="s", position=1), line_of("o-2", stream="s", position=2)]
        await queue.accept(*lines)
        assert await queue.drain() == []
        assert await queue.due_in() is None
        async with queue.unit() as unit:
            assert not await unit.requeue(identity_of("o-2"), lines[1])
            assert await unit.requeue(identity_of("dead-1"), lines[0])
            assert not await unit.requeue(identity_of("dead-1"), lines[0])
        record = await queue.find("dead-1")
        assert (record.state, record.attempts, record.started) == (State.ACCEPTED, 0, 0)
        assert await queue.peek() == ["dead-1", "o-2"]

    async def test_a_dead_letter_whose_lane_is_gone_makes_it_anew(self, queue: Queue) -> None:
        line = line_of("dead-1", lane="l")
        await queue.accept(line)
        lanes = await queue.claim("w")
        (one,) = (await queue.look("w", lanes)).messages
        await queue.close(
            "w", lanes, TurnClosing("w", [LaneEnd(lane_of("l").hex())], [], [failed_line(one, dead=True)])
        )
        assert await queue.due_in() is None
        async with queue.unit() as unit:
            assert await unit.requeue(identity_of("dead-1"), line)
        assert await queue.peek() == ["dead-1"]

    async def test_a_dead_letter_that_is_dropped_lets_its_lane_go_on(self, queue: Queue) -> None:
        lines = [line_of("dead-1", stream="s", position=1), line_of("o-2", stream="s", position=2)]
        await queue.accept(*lines)
        await queue.accept(line_of("o-3", lane="l", depends_on=[Position("s", 1)]))
        await queue.drain()
        async with queue.unit() as unit:
            assert not await unit.drop(identity_of("o-2"), lines[1])
            assert await unit.drop(identity_of("dead-1"), lines[0])
            assert not await unit.drop(identity_of("dead-1"), lines[0])
        record = await queue.find("dead-1")
        assert (record.state, record.payload) == (State.DISCARDED, None)
        assert await queue.drain() == ["o-2"]

    # --- the numbers of it --------------------------------------------------------------------------------------

    async def test_the_numbers_of_a_queue(self, queue: Queue) -> None:
        async with queue.unit() as unit:
            assert await unit.queue_stats(CONSUMER) == QueueStats()
        await queue.accept(line_of("fail", lane="fails"), line_of("f-2", lane="fails"))
        await queue.accept(line_of("dead", stream="dies", position=1), line_of("d-2", stream="dies", position=2))
        await queue.accept(line_of("dead-3", lane="alone"))
        await queue.accept(line_of("w-1", lane="waits", stream="w", position=2, depends_on=[Position("stock", 1)]))
        await queue.accept(line_of("w-2", stream="own", position=1, depends_on=[Position("stock", 2)]))
        await queue.drain()
        await queue.accept(line_of("r-1", lane="runs"))
        await queue.claim("w")
        await queue.accept(line_of("ready", lane="ready"), line_of("later", lane="later", not_before=now() + SOON))
        async with queue.unit() as unit:
            stats = await unit.queue_stats(CONSUMER)
            assert await unit.queue_stats("shipping") == QueueStats()
            assert len((await unit.queue_stats(CONSUMER, worst=2)).worst) == 2
        assert (stats.pending, stats.lanes, stats.dead, stats.exact) == (8, 8, 2, True)
        assert (stats.ready, stats.running, stats.retrying, stats.later) == (1, 1, 1, 1)
        assert (stats.waiting, stats.blocked) == (2, 2)
        assert stats.oldest_at == (await queue.find("fail")).received_at
        assert stats.next_try_at is not None
        assert SOON / 2 < stats.next_try_at - now() < SOON
        told = {lane.name: (lane.state, lane.pending, lane.blocked_on) for lane in stats.worst}
        assert told == {
            "dies": ("blocked", 1, "dead"),
            "alone": ("blocked", 0, "dead-3"),
            "fails": ("retrying", 2, None),
            "waits": ("waiting", 1, "stock 1"),
            "own": ("waiting", 1, "stock 2"),
        }
        assert [lane.state for lane in stats.worst][:2] == ["blocked", "blocked"]
        assert all(lane.oldest is not None for lane in stats.worst)

    # --- inline work leaves it alone --------------------------------------------------------------------------

    async def test_inline_work_does_not_touch_what_is_in_the_queue(self, queue: Queue) -> None:
        await queue.accept(line_of("o-1", lane="l"))
        draft = await self._draft("o-1")
        lanes = await queue.claim("w")
        for state in (State.ACCEPTED, State.RUNNING, State.FAILED):
            if state is State.RUNNING:
                async with queue.unit() as unit:
                    await unit.mark_start("w", lane_of("l"), identity_of("o-1"))
            if state is State.FAILED:
                (one,) = (await queue.look("w", lanes)).messages
                closing = TurnClosing(
                    "w", [LaneEnd(lane_of("l").hex())], [], [failed_line(one, delay=0.0, counted=False)]
                )
                await queue.close("w", lanes, closing)
            before = await queue.find("o-1")
            assert before.state is state
            async with queue.unit() as unit:
                assert not await unit.mark(before, draft)
                found = await unit.claim(draft)
                assert found is not None
                assert decide(found.record, RetryPolicy(max_attempts=1), found.now) is Decision.ACCEPTED
                assert not await unit.take(before, draft)
                await unit.rollback()
                assert await unit.fail(draft, Failure("E", "no"), State.FAILED, None) is None
                assert await unit.bury(draft, Failure("E", "no"), over=(State.RUNNING, State.FAILED)) is None
            assert await queue.find("o-1") == before
        async with queue.unit() as unit:
            await unit.unmark(draft)
        assert (await queue.find("o-1")).state is State.FAILED

    # --- floors -------------------------------------------------------------------------------------------------

    async def _sweep(self, queue: Queue) -> int:
        async with queue.unit() as unit:
            swept = await unit.sweep(CONSUMER, Sweepable.OLD, 0.0, batch=100)
            return int(swept.deleted)

    async def _is_met(self, queue: Queue, position: int) -> bool:
        """Inline, and in the queue."""
        needed = Position("s", position)
        draft = await self._draft("x", depends_on=(needed,))
        async with queue.unit() as unit:
            await unit.claim(draft)
            inline = await unit.unmet(draft) is None
            await unit.rollback()
        await queue.accept(line_of(f"needs-{position}", lane="needs", depends_on=[needed]))
        lanes = await queue.claim("f")
        (one,) = (await queue.look("f", lanes)).messages
        async with queue.unit() as unit:
            await unit.take_lanes("f", list(lanes), most=1)
            closing = TurnClosing("f", [LaneEnd(lane.hex()) for lane in lanes], [done_line(one)])
            await unit.close_lanes(closing, consumer=CONSUMER, host="h")
            await unit.commit()
        assert (one.unmet is None) is inline
        return inline

    async def test_what_was_satisfied_stays_satisfied_when_its_record_is_gone(self, queue: Queue) -> None:
        for n in (1, 2, 3):
            await self._settle(queue, "s", n)
        await self._settle(queue, "other", 9)
        assert not await self._is_met(queue, 4)
        await asyncio.sleep(0.01)
        await self._sweep(queue)
        assert await queue.gone("s-1", "s-2", "s-3")
        for n, met in ((1, True), (3, True), (4, False)):
            assert await self._is_met(queue, n) is met
        # It goes up, and never down.
        for n in (5, 2):
            await self._settle(queue, "s", n)
            await asyncio.sleep(0.01)
            await self._sweep(queue)
            assert await queue.gone(f"s-{n}")
            assert await self._is_met(queue, n)
        async with queue.unit() as unit:
            assert await unit.unmet(await self._draft("x", depends_on=(Position("s", 5),))) is None

    async def test_a_floor_rises_past_nothing_that_is_not_finished(self, queue: Queue) -> None:
        await self._settle(queue, "s", 1)
        await self._settle(queue, "s", 3)
        line = line_of("dead-2", stream="s", position=2)
        await queue.accept(line)
        await queue.drain()
        assert await queue.state("dead-2") is State.DEAD
        await asyncio.sleep(0.01)
        assert await self._sweep(queue) == 1
        assert await queue.gone("s-1")
        assert await queue.state("s-3") is State.PROCESSED
        assert not await self._is_met(queue, 2)
        async with queue.unit() as unit:
            await unit.drop(identity_of("dead-2"), line)
        await asyncio.sleep(0.01)
        await self._sweep(queue)
        assert await queue.gone("s-3")
        assert await self._is_met(queue, 3)


async def _claim(queue: Queue, record: Any) -> None:
    async with queue.unit() as unit:
        assert await unit.claim(record) is None
        await unit.commit()


async def _take(queue: Queue, record: Any) -> None:
    async with queue.unit() as unit:
        await unit.fail(record, Failure("E", "no"), State.FAILED, 0.0)
        found = await unit.claim(record)
        assert await unit.take(found.record, record)
        await unit.commit()


async def _claim_many(queue: Queue, record: Any) -> None:
    digest = record.identity.digest
    texts = {name: [getattr(record, name)] for name in ("key", "message_id", "tenant", "scope", "type")}
    empty = {name: [None] for name in ("origin", "occurred_at", "keep_ms")}
    claims = Claims(
        consumer=CONSUMER, host="h", digest=[digest], payload_hash=[bytes(32)], source=[""], topic=[""], handler=["h"],
        stream=[record.stream], position=[record.position], **texts, **empty,
    )  # fmt: skip
    async with queue.unit() as unit:
        assert await unit.claim_many(claims) == {digest}
        await unit.commit()


async def _joined(queue: Queue, record: Any) -> None:
    async with queue.unit() as outer:
        await outer.claim(Record(identity=identity_of("outer"), message_id="o", type="t", state=State.PROCESSED))
        async with queue.store.join(outer.tx) as inner:
            assert await inner.claim(record) is None
            await inner.commit()
        await outer.commit()


async def _dead(queue: Queue, record: Any) -> None:
    async with queue.unit() as unit:
        await unit.bury(record, Failure("E", "no"), over=())


async def _turn(queue: Queue, record: Any) -> None:
    await queue.accept(line_of(record.key, stream=record.stream, position=record.position))
    assert await queue.turn() == [record.key]


SETTLE = {
    "claim": _claim, "take": _take, "claim_many": _claim_many, "joined": _joined, "dead": _dead, "turn": _turn,
}  # fmt: skip


class TestSqlite(QueueUnits):
    @pytest.fixture
    def lab(self, sqlite_lab: SqliteLab) -> Lab:
        return sqlite_lab


class TestAiosqlite(QueueUnits):
    @pytest.fixture
    def lab(self, aiosqlite_lab: AiosqliteLab) -> Lab:
        return aiosqlite_lab


class TestAsyncpg(QueueUnits):
    @pytest.fixture
    def lab(self, postgres_lab: PostgresLab) -> Lab:
        return postgres_lab


class TestPsycopg(QueueUnits):
    @pytest.fixture
    def lab(self, psycopg_lab: PsycopgLab) -> Lab:
        return psycopg_lab
