"""Lanes and order: what runs after what, what runs side by side, and how fixed shares split it."""

from __future__ import annotations

import asyncio
from datetime import timedelta
from itertools import permutations
from typing import Any

import pytest

from onceward import Kind, Message, Reject, State, lanes
from onceward.errors import UsageError
from onceward.testing.contract.base import LATER, needs
from onceward.testing.contract.queue.base import Failing, at, drain, record_of, until
from onceward.testing.lab import Lab, Recorder

BY_CUSTOMER = lanes.field("customer.id")


def of_customer(number: Any) -> dict[str, Any]:
    return {"payload": {"customer": {"id": number}}}


def first_letter(message: Message[Any]) -> str | None:
    return message.id[0]


# A strategy, two messages, and whether the second waits for the first.
STRATEGIES: dict[str, tuple[Any, dict[str, Any], dict[str, Any], bool]] = {
    "by_stream, the same": (lanes.by_stream, {"stream": "s"}, {"stream": "s"}, True),
    "by_stream is the default": (None, {"stream": "s"}, {"stream": "s"}, True),
    "by_stream, two": (lanes.by_stream, {"stream": "s"}, {"stream": "t"}, False),
    "by_stream, the same of two tenants": (
        lanes.by_stream, {"stream": "s", "tenant": "north"}, {"stream": "s", "tenant": "south"}, False,
    ),
    "by_stream, without": (lanes.by_stream, {}, {}, False),
    "by_topic, the same URI": (
        lanes.by_topic, {"topic": "kafka://orders/order-123"}, {"topic": "kafka://orders/order-123"}, True,
    ),
    "by_topic, another partition key": (
        lanes.by_topic, {"topic": "kafka://orders/order-123"}, {"topic": "kafka://orders/order-124"}, False,
    ),
    "by_topic, the topic and a part of it": (
        lanes.by_topic, {"topic": "kafka://orders"}, {"topic": "kafka://orders/order-123"}, False,
    ),
    "by_topic, the scheme counts": (lanes.by_topic, {"topic": "kafka://orders"}, {"topic": "amqp://orders"}, False),
    "by_topic, two streams": (
        lanes.by_topic, {"topic": "orders", "stream": "s"}, {"topic": "orders", "stream": "t"}, True,
    ),
    "by_topic, without": (lanes.by_topic, {}, {}, False),
    "by_key": (lanes.by_key, {}, {}, False),
    "field, the same": (BY_CUSTOMER, of_customer(7), of_customer(7), True),
    "field, two": (BY_CUSTOMER, of_customer(7), of_customer(8), False),
    "field, without": (BY_CUSTOMER, {}, {}, False),
    "a function": (first_letter, {"id": "ax"}, {"id": "ay"}, True),
    "a function, two": (first_letter, {"id": "ax"}, {"id": "by"}, False),
    "no lane": (lambda _message: None, {"stream": "s"}, {"stream": "s"}, False),
}  # fmt: skip


class OrderContract:
    @pytest.mark.parametrize("name", STRATEGIES)
    async def test_a_strategy_says_which_messages_wait_for_each_other(self, lab: Lab, name: str) -> None:
        strategy, one, two, together = STRATEGIES[name]
        inbox = await lab.inbox(lane=strategy, retry=LATER)
        first, second = lab.message(**{"id": "first"} | one), lab.message(**{"id": "second"} | two)
        handler = Failing(lab, first.id)
        await inbox.accept(first)
        await inbox.accept(second)
        await drain(inbox, handler)
        if together:
            assert handler.runs == [first.id]
        else:
            assert sorted(handler.runs) == sorted([first.id, second.id])

    async def test_messages_of_two_lanes_run_side_by_side_and_those_of_one_do_not(self, lab: Lab) -> None:
        needs(lab, "concurrent_units")
        inbox, running, most = await lab.inbox(), set[str](), list[set[str]]()
        both, stop = asyncio.Event(), asyncio.Event()

        async def handler(message: Message[Any], tx: Any) -> None:
            assert not any(other[0] == message.id[0] for other in running), "two of one stream at the same time"
            running.add(message.id)
            most.append(set(running))
            if len(running) == 2:
                both.set()
            await asyncio.wait_for(both.wait(), 20)
            running.discard(message.id)
            if not running and len(most) == 4:
                stop.set()

        await inbox.accept([at(lab, "a1"), at(lab, "b1"), at(lab, "a2"), at(lab, "b2")])
        await asyncio.wait_for(inbox.run(handler, concurrency=4, stop=stop), 30)
        assert {"a1", "b1"} in most

    # --- rule 15: the order in a stream ---------------------------------------------------------------------

    @pytest.mark.parametrize("order", list(permutations(("a1", "a2", "a3"))), ids="-".join)
    async def test_in_a_stream_the_lowest_position_runs_first(self, lab: Lab, order: tuple[str, ...]) -> None:
        inbox, handler = await lab.inbox(), Recorder(lab)
        for id_ in order:
            await inbox.accept(at(lab, id_))
        await drain(inbox, handler)
        assert handler.runs == ["a1", "a2", "a3"]

    async def test_the_lowest_position_present_runs_first(self, lab: Lab) -> None:
        """Nothing waits for a position that has not come: only strict=True makes a stream gapless."""
        inbox, handler = await lab.inbox(), Recorder(lab)
        await inbox.accept([at(lab, "a5"), at(lab, "a9")])
        assert await inbox.dispatch(handler) is not None
        await inbox.accept(at(lab, "a2"))
        await drain(inbox, handler)
        assert handler.runs == ["a5", "a2", "a9"]

    async def test_a_lower_position_overtakes_one_that_waits_for_its_next_try(self, lab: Lab) -> None:
        inbox, handler = await lab.inbox(retry=LATER), Failing(lab, "a2")
        await inbox.accept(at(lab, "a2"))
        await drain(inbox, handler)
        await inbox.accept([at(lab, "a1"), at(lab, "a3")])
        await lab.let_time_pass()
        handler.ids.clear()
        await drain(inbox, handler)
        assert handler.runs == ["a2", "a1", "a2", "a3"]

    async def test_messages_without_a_position_come_as_they_came_and_last(self, lab: Lab) -> None:
        inbox, handler = await lab.inbox(), Recorder(lab)
        messages = [lab.message("x", stream="a"), at(lab, "a7"), lab.message("y", stream="a"), at(lab, "a3")]
        await inbox.accept(messages)
        await drain(inbox, handler)
        assert handler.runs == ["a3", "a7", "x", "y"]

    async def test_large_positions_are_in_order(self, lab: Lab) -> None:
        inbox, handler = await lab.inbox(), Recorder(lab)
        positions = [2**63 - 1, 2**62, 0, 2**31, 2**53 + 1, 2**53]
        await inbox.accept([lab.message(str(one), stream="s", position=one) for one in positions])
        await drain(inbox, handler)
        assert handler.runs == [str(one) for one in sorted(positions)]

    async def test_two_messages_at_one_position_run_as_they_came(self, lab: Lab) -> None:
        inbox, handler = await lab.inbox(), Recorder(lab)
        await inbox.accept([lab.message(id_, stream="s", position=1) for id_ in ("y", "x")])
        await drain(inbox, handler)
        assert handler.runs == ["y", "x"]

    async def test_a_worker_that_takes_many_at_once_keeps_the_order(self, lab: Lab) -> None:
        inbox, handler, stop = await lab.inbox(), Recorder(lab), asyncio.Event()
        ids = [f"{stream}{position}" for position in range(9, 0, -1) for stream in "abc"]
        await inbox.accept([at(lab, id_) for id_ in ids])

        async def counting(message: Message[Any], tx: Any) -> None:
            await handler(message, tx)
            if len(handler.runs) == len(ids):
                stop.set()

        await asyncio.wait_for(inbox.run(counting, concurrency=2, batch=5, stop=stop), 30)
        for stream in "abc":
            ran = [id_ for id_ in handler.runs if id_[0] == stream]
            assert ran == sorted(ran)
        assert await lab.effects() == sorted(ids)

    @pytest.mark.parametrize("shared", [False, True])
    @pytest.mark.parametrize("why", ["not due", "a dependency", "no handler", "a lease", "a dead cause", "died"])
    async def test_what_cannot_run_yet_holds_up_nothing_before_it(self, lab: Lab, why: str, shared: bool) -> None:
        """Also where a worker takes both at once, and what comes after it stays after it."""
        inbox, ids = await lab.inbox(on_dead_dependency="dead"), [f"a{number}" for number in range(10, 40)]
        special, ran, lane = "a35", list[str](), "x" if shared else None
        delay = timedelta(hours=1) if why == "not due" else None
        needed = ["z1"] if why in ("a dependency", "a dead cause") else []
        if why == "a dead cause":
            await inbox.accept(at(lab, "z1"))
            await drain(inbox, Failing(lab, "z1", error=Reject("bad")))

        @inbox.handler("order.paid")
        async def on_paid(message: Message[Any], tx: Any) -> None:
            ran.append(message.id)
            await lab.write(tx, message.id)

        @inbox.handler("long", lease=30)
        async def takes_long(message: Message[Any], lease: Any) -> None:
            ran.append(message.id)

        kind = {"no handler": {"type": "unknown"}, "a lease": {"type": "long"}}.get(why, {})
        await inbox.accept(at(lab, special, *needed, **kind), not_before=delay, lane=lane)
        await inbox.accept([at(lab, id_) for id_ in ids if id_ != special], lane=lane)
        if why == "died":
            await lab.query(f"UPDATE onceward_records SET started = 10 WHERE message_id = '{special}'")  # noqa: S608
        before = ids[: ids.index(special)]
        wanted = ids if why == "a lease" else before

        async def enough() -> bool:
            return len(ran) >= len(wanted)

        async with inbox.worker():
            await until(enough, within=10)
        assert ran == wanted

    # --- a lane that is not one stream ----------------------------------------------------------------------

    async def test_a_shared_lane_runs_as_it_came_and_each_stream_in_it_by_position(self, lab: Lab) -> None:
        inbox, handler = await lab.inbox(lane=lanes.by_topic), Recorder(lab)
        order = ["b2", "a1", "b1", "c1", "a2"]
        await inbox.accept([at(lab, id_, topic="orders") for id_ in order])
        await drain(inbox, handler)
        assert handler.runs[0] == "b1", "in the place of b2, which came first"
        assert [id_ for id_ in handler.runs if id_[0] != "b"] == ["a1", "c1", "a2"]
        assert [id_ for id_ in handler.runs if id_[0] == "b"] == ["b1", "b2"]

    async def test_a_failure_in_a_shared_lane_holds_all_that_is_behind_it(self, lab: Lab) -> None:
        inbox, handler = await lab.inbox(lane=lanes.by_topic, retry=LATER), Failing(lab, "a1")
        await inbox.accept([at(lab, id_, topic="orders") for id_ in ("a1", "b1", "a2")])
        await drain(inbox, handler)
        assert handler.runs == ["a1"]
        handler.ids.clear()
        await lab.let_time_pass()
        await drain(inbox, handler)
        assert handler.runs == ["a1", "a1", "b1", "a2"]

    async def test_a_blocked_message_is_set_aside_and_other_streams_overtake(self, lab: Lab) -> None:
        """Rule 15: later positions of its own stream do not."""
        inbox, handler = await lab.inbox(lane=lanes.by_topic), Recorder(lab)
        topic = {"topic": "orders"}
        await inbox.accept(
            [at(lab, "a1", "z1", **topic), at(lab, "b1", **topic), at(lab, "a2", **topic), at(lab, "c1", **topic)]
        )
        await drain(inbox, handler)
        assert handler.runs == ["b1", "c1"]
        await inbox.accept([at(lab, "a3", **topic), at(lab, "b2", **topic)])
        await drain(inbox, handler)
        assert handler.runs == ["b1", "c1", "b2"], "what comes later stays behind too"
        record = await record_of(inbox, at(lab, "a1"))
        assert (record.state, record.attempts) == (State.ACCEPTED, 0)
        await inbox.process(at(lab, "z1"), Recorder(lab))
        await drain(inbox, handler)
        assert handler.runs == ["b1", "c1", "b2", "a1", "a2", "a3"]

    async def test_a_lower_position_that_comes_later_runs_before_one_that_is_set_aside(self, lab: Lab) -> None:
        inbox, handler = await lab.inbox(lane=lanes.by_topic), Recorder(lab)
        await inbox.accept([at(lab, "a2", "z1", topic="t"), at(lab, "b1", topic="t")])
        await drain(inbox, handler)
        await inbox.accept(at(lab, "a1", topic="t"))
        await drain(inbox, handler)
        assert handler.runs == ["b1", "a1"]
        await inbox.process(at(lab, "z1"), Recorder(lab))
        await drain(inbox, handler)
        assert handler.runs == ["b1", "a1", "a2"]

    async def test_messages_without_a_stream_in_a_shared_lane_overtake_what_is_set_aside(self, lab: Lab) -> None:
        inbox, handler = await lab.inbox(), Recorder(lab)
        await inbox.accept([at(lab, "a1", "z1"), lab.message("x"), lab.message("y")], lane="one")
        await drain(inbox, handler)
        assert handler.runs == ["x", "y"]
        await inbox.process(at(lab, "z1"), Recorder(lab))
        await drain(inbox, handler)
        assert handler.runs == ["x", "y", "a1"]

    async def test_a_dead_letter_in_a_shared_lane_can_be_skipped_with_what_depends_on_its_place(self, lab: Lab) -> None:
        inbox, handler = await lab.inbox(on_dead="skip"), Failing(lab, "a1", error=Reject("bad"))
        await inbox.accept([at(lab, "a1"), at(lab, "b1"), at(lab, "a2")], lane="one")
        assert [outcome.kind for outcome in await drain(inbox, handler)] == [Kind.DEAD, Kind.PROCESSED, Kind.PROCESSED]
        assert handler.runs == ["a1", "b1", "a2"]

    # --- strict streams -------------------------------------------------------------------------------------

    async def test_a_strict_stream_has_no_gaps(self, lab: Lab) -> None:
        inbox, handler = await lab.inbox(strict=True), Recorder(lab)
        await inbox.accept([at(lab, "a2"), at(lab, "b1"), at(lab, "a4")])
        await drain(inbox, handler)
        assert handler.runs == ["b1"], "a stream begins with its first position"
        await inbox.accept(at(lab, "a1"))
        await drain(inbox, handler)
        assert handler.runs == ["b1", "a1", "a2"]
        await inbox.accept(at(lab, "a3"))
        await drain(inbox, handler)
        assert handler.runs == ["b1", "a1", "a2", "a3", "a4"]

    async def test_a_strict_stream_may_begin_elsewhere(self, lab: Lab) -> None:
        inbox, handler = await lab.inbox(strict=True, first_position=0), Recorder(lab)
        await inbox.accept([at(lab, "a1")])
        assert await drain(inbox, handler) == []
        await inbox.accept(at(lab, "a0"))
        await drain(inbox, handler)
        assert handler.runs == ["a0", "a1"]

    async def test_inline_work_fills_the_gap_of_a_strict_stream(self, lab: Lab) -> None:
        inbox, handler = await lab.inbox(strict=True), Recorder(lab)
        await inbox.accept(at(lab, "a2"))
        assert await drain(inbox, handler) == []
        await inbox.process(at(lab, "a1"), handler)
        await drain(inbox, handler)
        assert handler.runs == ["a1", "a2"]

    async def test_a_strict_stream_goes_on_after_its_records_are_gone(self, lab: Lab) -> None:
        inbox, handler = await lab.inbox(strict=True), Recorder(lab)
        await inbox.accept([at(lab, "a1"), at(lab, "a2")])
        await drain(inbox, handler)
        for id_ in ("a1", "a2"):
            await lab.make_older(id_, days=60)
        assert await inbox.cleanup(older_than=timedelta(days=30)) == 2
        await inbox.accept(at(lab, "a3"))
        await drain(inbox, handler)
        assert handler.runs == ["a1", "a2", "a3"]

    async def test_a_strict_stream_in_a_shared_lane_waits_alone(self, lab: Lab) -> None:
        inbox, handler = await lab.inbox(strict=True, lane=lanes.by_topic), Recorder(lab)
        await inbox.accept([at(lab, id_, topic="t") for id_ in ("a2", "b1", "a3")])
        await drain(inbox, handler)
        assert handler.runs == ["b1"]
        await inbox.accept(at(lab, "a1", topic="t"))
        await drain(inbox, handler)
        assert handler.runs == ["b1", "a1", "a2", "a3"]

    # --- rule 16: fixed shares ------------------------------------------------------------------------------

    async def test_shares_are_disjoint_and_complete(self, lab: Lab) -> None:
        inbox = await lab.inbox()
        streams = [f"s-{number}" for number in range(60)]
        await inbox.accept([lab.message(stream, stream=stream, position=1) for stream in streams])
        shares = {row[0] for row in await lab.query("SELECT share FROM onceward_lanes")}
        assert all(0 <= share < 2**32 for share in shares)
        assert any(share >= 2**31 for share in shares), "the top bit is set for half of them"
        parts = []
        for number in range(3):
            handler = Recorder(lab)
            await drain(await lab.inbox(), handler, share=(number, 3))
            parts.append(handler.runs)
        assert sorted(id_ for part in parts for id_ in part) == sorted(streams)
        assert all(len(part) >= 5 for part in parts)
        assert await drain(inbox, Recorder(lab)) == []

    async def test_a_stream_stays_in_its_share(self, lab: Lab) -> None:
        """A stable hash: the same in every process and for every message to come."""
        inbox, homes = await lab.inbox(), dict[str, int]()
        for position in (1, 2):
            for name in ("orders/1", "orders/2", "orders/3"):
                message = lab.message(stream=name, position=position)
                await inbox.accept(message)
                found = []
                for number in range(3):
                    handler = Recorder(lab)
                    await drain(await lab.inbox(), handler, share=(number, 3))
                    found += [number] * len(handler.runs)
                assert len(found) == 1
                assert homes.setdefault(name, found[0]) == found[0]

    async def test_shares_only_filter(self, lab: Lab) -> None:
        """Who has no share takes what is there; who has one, of any size, too."""
        inbox, handler = await lab.inbox(), Recorder(lab)
        await inbox.accept([lab.message(stream=f"s-{number}") for number in range(20)])
        await drain(inbox, handler, share=(1, 2))
        ran = len(handler.runs)
        assert 0 < ran < 20
        await drain(inbox, handler, share=(0, 1))
        assert len(handler.runs) == len(set(handler.runs)) == 20

    @pytest.mark.parametrize("share", [(3, 3), (-1, 3), (0, 0), (0, -1), (1,), "0/3", (0.5, 3)])
    async def test_a_share_that_is_none_is_refused(self, lab: Lab, share: Any) -> None:
        inbox = await lab.inbox()
        with pytest.raises(UsageError, match="share"):
            await inbox.dispatch(Recorder(lab), share=share)
        with pytest.raises(UsageError, match="share"):
            await inbox.run(Recorder(lab), share=share)
