"""Accepting: a message is kept durably and once, and says at once what became of it."""

from __future__ import annotations

import asyncio
from collections import Counter
from datetime import UTC, datetime, timedelta
from typing import Any

import msgspec
import pytest

from onceward import Inbox, Kind, Message, Reject, RetryPolicy, State, TryLater, Verdict, keys, tenants
from onceward.errors import (
    InboxClosed,
    InvalidMessage,
    KeyMissing,
    PayloadInvalid,
    PayloadMismatch,
    PayloadTooLarge,
    TenantMissing,
    UsageError,
)
from onceward.testing.contract.base import LATER, SOON, needs
from onceward.testing.contract.queue.base import at, drain, record_of, until
from onceward.testing.kinds import AsyncpgCaller, Caller, SqliteCaller, place
from onceward.testing.lab import Gate, Lab, Recorder


def kind_of(lab: Lab) -> type[Caller]:
    return SqliteCaller if hasattr(lab, "path") else AsyncpgCaller


async def kinds(outcomes: Any) -> list[Kind]:
    return [outcome.kind for outcome in await outcomes]


class AcceptContract:
    # --- what is kept ---------------------------------------------------------------------------------------

    async def test_an_accepted_message_is_kept_whole(self, lab: Lab) -> None:
        inbox = await lab.inbox()
        message = Message(
            "m", "order.paid", {"amount": 7}, source="shop", topic="kafka://orders", headers={"trace": "t"},
            occurred_at=datetime(2024, 2, 29, 12, tzinfo=UTC), stream="s", position=3, body=b'{"amount": 7}',
        )  # fmt: skip
        outcome = await inbox.accept(message, origin="orders/0/17")
        assert (outcome.kind, outcome.verdict, outcome.mismatch) == (Kind.ACCEPTED, Verdict.ACK, False)
        record = await record_of(await lab.inbox(), message)
        assert (record.state, record.attempts, record.started) == (State.ACCEPTED, 0, 0)
        assert record.message() == msgspec.structs.replace(message, tenant="default")
        assert record.origin == "orders/0/17"
        assert record.received_at is not None
        assert record.received_position is not None
        assert (record.processed_at, record.processed_position) == (None, None)

    async def test_another_instance_gets_what_was_accepted_and_nobody_gets_it_twice(self, lab: Lab) -> None:
        message, got = lab.message(headers={"trace": "t"}, body=b'{"amount":7}', stream="s", position=1), []

        async def handler(message: Message[Any], tx: Any) -> None:
            got.append(message)

        await (await lab.inbox()).accept(message)
        other = await lab.inbox()
        assert await drain(other, handler) != []
        assert got == [msgspec.structs.replace(message, tenant="default")]
        assert await drain(await lab.inbox(), handler) == []

    async def test_a_payload_reaches_the_handler_as_it_was(self, lab: Lab) -> None:
        deep: Any = 1
        for _ in range(100):
            deep = [deep]
        payload = {"nul": "a\0b", "smile": "😀'\"\\", "big": 2**60, "small": 0.1, "none": None, "deep": deep, "": ""}
        inbox, got = await lab.inbox(), []
        await inbox.accept([lab.message(payload=payload), lab.message(payload=None, body=b"\0\xff raw")])

        async def handler(message: Message[Any]) -> None:
            got.append((message.payload, message.body))

        await drain(inbox, handler)
        assert got == [(payload, None), (None, b"\0\xff raw")] or got == [(None, b"\0\xff raw"), (payload, None)]

    async def test_what_is_accepted_twice_is_worked_on_once(self, lab: Lab) -> None:
        inbox, message, handler = await lab.inbox(), lab.message(), Recorder(lab)
        assert (await inbox.accept(message)).kind is Kind.ACCEPTED
        again = await (await lab.inbox()).accept(message)
        assert (again.kind, again.mismatch, again.verdict) == (Kind.DUPLICATE, False, Verdict.ACK)
        assert [outcome.kind for outcome in await drain(inbox, handler)] == [Kind.PROCESSED]
        assert (await inbox.accept(message)).kind is Kind.DUPLICATE
        assert (await (await lab.inbox()).accept(message)).kind is Kind.DUPLICATE
        assert await drain(inbox, handler) == []
        assert await lab.effects() == [message.id]

    async def test_what_was_processed_inline_is_a_duplicate(self, lab: Lab) -> None:
        inbox, message = await lab.inbox(), lab.message()
        await inbox.process(message, Recorder(lab))
        assert (await inbox.accept(message)).kind is Kind.DUPLICATE
        assert (await (await lab.inbox()).accept(message)).kind is Kind.DUPLICATE
        assert await drain(inbox, Recorder(lab)) == []
        assert await lab.effects() == [message.id]

    @pytest.mark.parametrize("when", ["waiting", "processed"])
    async def test_another_payload_under_an_accepted_identity_is_reported(self, lab: Lab, when: str) -> None:
        inbox = await lab.inbox()
        await inbox.accept(lab.message("m"))
        if when == "processed":
            await drain(inbox, Recorder(lab))
        other = lab.message("m", payload={"amount": 8})
        for instance in (inbox, await lab.inbox()):
            outcome = await instance.accept(other)
            assert (outcome.kind, outcome.mismatch, outcome.verdict) == (Kind.DUPLICATE, True, Verdict.ACK)
        strict = await lab.inbox(on_mismatch="raise")
        with pytest.raises(PayloadMismatch):
            await strict.accept(other)
        assert (await strict.accept(lab.message("m"))).kind is Kind.DUPLICATE
        if when == "waiting":
            assert (await record_of(inbox, other)).payload == {"amount": 7}

    async def test_a_dead_letter_is_not_accepted_again(self, lab: Lab) -> None:
        inbox, message = await lab.inbox(), lab.message()
        await inbox.accept(message)
        assert [outcome.kind for outcome in await drain(inbox, Recorder(lab, error=Reject("bad")))] == [Kind.DEAD]
        assert (await inbox.accept(message)).kind is Kind.DEAD
        await inbox.discard(message)
        assert (await inbox.accept(message)).kind is Kind.DEAD
        assert (await record_of(inbox, message)).state is State.DISCARDED
        assert await drain(inbox, Recorder(lab)) == []

    async def test_a_message_that_was_rejected_inline_is_not_accepted(self, lab: Lab) -> None:
        inbox, message = await lab.inbox(), lab.message()
        assert (await inbox.process(message, Recorder(lab, error=Reject("bad")))).kind is Kind.DEAD
        assert (await inbox.accept(message)).kind is Kind.DEAD
        assert await drain(inbox, Recorder(lab)) == []

    # --- parking, and the inline side -----------------------------------------------------------------------

    async def test_a_failed_record_joins_the_queue_with_its_attempts(self, lab: Lab) -> None:
        inbox, message = await lab.inbox(retry=LATER), lab.message()
        with pytest.raises(ValueError, match="no"):
            await inbox.process(message, Recorder(lab, error=ValueError("no")))
        outcome = await inbox.accept(message)
        assert (outcome.kind, outcome.verdict) == (Kind.ACCEPTED, Verdict.ACK)
        record = await record_of(inbox, message)
        assert (record.state, record.attempts, record.payload) == (State.ACCEPTED, 1, {"amount": 7})
        assert record.received_position is not None
        assert (await inbox.accept(message)).kind is Kind.DUPLICATE
        handler = Recorder(lab)
        assert await drain(inbox, handler) == [], "its next try is later"
        await lab.let_time_pass()
        assert [outcome.kind for outcome in await drain(inbox, handler)] == [Kind.PROCESSED]
        record = await record_of(inbox, message)
        assert (record.state, record.attempts, len(record.errors)) == (State.PROCESSED, 2, 1)
        assert await lab.effects() == [message.id]

    async def test_a_parked_message_has_the_attempts_left_that_it_had(self, lab: Lab) -> None:
        inbox, message = await lab.inbox(retry=RetryPolicy(max_attempts=2, base=0.0)), lab.message()
        handler = Recorder(lab, error=ValueError("no"))
        with pytest.raises(ValueError, match="no"):
            await inbox.process(message, handler)
        await inbox.accept(message)
        assert [outcome.kind for outcome in await drain(inbox, handler)] == [Kind.DEAD]

    async def test_process_of_an_accepted_message_says_that_it_is_kept(self, lab: Lab) -> None:
        inbox, message, inline = await lab.inbox(retry=LATER), lab.message(), Recorder(lab)
        await inbox.accept(message)
        outcome = await inbox.process(message, inline)
        assert (outcome.kind, outcome.verdict) == (Kind.ACCEPTED, Verdict.ACK)
        assert [one.kind for one in await inbox.process_many([message], inline)] == [Kind.ACCEPTED]
        await drain(inbox, Recorder(lab, error=ValueError("no")))
        assert (await record_of(inbox, message)).state is State.FAILED
        await lab.let_time_pass()
        assert (await inbox.process(message, inline)).kind is Kind.ACCEPTED, "failed in the queue: the queue has it"
        assert [one.kind for one in await inbox.process_many([message], inline)] == [Kind.ACCEPTED]
        assert inline.runs == []
        assert [one.kind for one in await drain(inbox, Recorder(lab))] == [Kind.PROCESSED]
        assert (await inbox.process(message, inline)).duplicate

    async def test_what_another_runner_has_inline_is_tried_later(self, lab: Lab) -> None:
        needs(lab, "concurrent_units")
        gate, message = Gate(lab), lab.message()
        running = asyncio.ensure_future((await lab.inbox()).process(message, gate))
        await gate.started.wait()
        other = await lab.inbox(wait=0.2)
        with pytest.raises(TryLater) as caught:
            await other.accept(message)
        assert caught.value.reason == "in_flight"
        assert (await other.accept(lab.message())).kind is Kind.ACCEPTED
        gate.go.set()
        assert (await running).processed
        assert (await other.accept(message)).kind is Kind.DUPLICATE
        assert len(await drain(other, Recorder(lab))) == 1

    async def test_many_who_accept_the_same_at_once_keep_it_once(self, lab: Lab) -> None:
        one, two = await lab.inbox(wait=30), await lab.inbox(wait=30)
        messages = [lab.message() for _ in range(10)]
        outcomes = await asyncio.gather(
            *(inbox.accept(message) for message in messages for inbox in (one, two, one, two))
        )
        assert Counter(outcome.kind for outcome in outcomes) == {Kind.ACCEPTED: 10, Kind.DUPLICATE: 30}
        assert len(await drain(one, Recorder(lab))) == 10
        assert await lab.effects() == sorted(message.id for message in messages)

    # --- lists ----------------------------------------------------------------------------------------------

    async def test_a_list_has_an_outcome_for_each_and_twins_follow_their_first(self, lab: Lab) -> None:
        inbox, a, b, c = await lab.inbox(), lab.message("a"), lab.message("b"), lab.message("c")
        await inbox.accept(b)
        outcomes = await inbox.accept([a, b, a, lab.message("a", payload={"amount": 8}), c])
        assert [outcome.kind for outcome in outcomes] == [
            Kind.ACCEPTED, Kind.DUPLICATE, Kind.DUPLICATE, Kind.DUPLICATE, Kind.ACCEPTED,
        ]  # fmt: skip
        assert [outcome.mismatch for outcome in outcomes] == [False, False, False, True, False]
        assert await kinds(inbox.accept(message for message in (a, b, c))) == [Kind.DUPLICATE] * 3
        assert await inbox.accept([]) == []
        assert len(await drain(inbox, Recorder(lab))) == 3
        assert await lab.effects() == ["a", "b", "c"]

    async def test_a_list_knows_what_is_failed_dead_and_processed(self, lab: Lab) -> None:
        inbox = await lab.inbox()
        failed, dead, done = lab.message("failed"), lab.message("dead"), lab.message("done")
        with pytest.raises(ValueError, match="no"):
            await inbox.process(failed, Recorder(lab, error=ValueError("no")))
        await inbox.process(dead, Recorder(lab, error=Reject("bad")))
        await inbox.process(done, Recorder(lab))
        outcomes = await inbox.accept([failed, lab.message("new"), dead, done])
        assert [outcome.kind for outcome in outcomes] == [Kind.ACCEPTED, Kind.ACCEPTED, Kind.DEAD, Kind.DUPLICATE]
        assert [outcome.mismatch for outcome in outcomes] == [False] * 4
        assert len(await drain(inbox, Recorder(lab))) == 2

    async def test_a_long_list_is_kept_in_its_order(self, lab: Lab) -> None:
        inbox = await lab.inbox()
        ids = [f"{number:05}" for number in range(2500)]
        outcomes = await inbox.accept([lab.message(id_) for id_ in [*ids, *ids[:10]]], lane="one")
        assert Counter(outcome.kind for outcome in outcomes) == {Kind.ACCEPTED: 2500, Kind.DUPLICATE: 10}
        rows = await lab.query("SELECT message_id FROM onceward_records ORDER BY received_position")
        assert [row[0] for row in rows] == ids

    async def test_lists_that_share_messages_cannot_wait_for_each_other(self, lab: Lab) -> None:
        ids = [f"{number:02}" for number in range(60)]
        lists = [ids, ids[::-1], ids[30:] + ids[:30], ids[::-1]]
        inboxes = [await lab.inbox(wait=30) for _ in lists]
        jobs = [
            inbox.accept([lab.message(id_, stream=f"s{int(id_) % 7}") for id_ in order])
            for inbox, order in zip(inboxes, lists, strict=True)
        ]
        outcomes = [outcome.kind for some in await asyncio.gather(*jobs) for outcome in some]
        assert Counter(outcomes) == {Kind.ACCEPTED: 60, Kind.DUPLICATE: 180}

    # --- in a transaction of the caller's -------------------------------------------------------------------

    async def test_what_is_accepted_in_a_transaction_is_kept_when_that_commits(self, lab: Lab) -> None:
        inbox, messages = await lab.inbox(), [at(lab, "a1"), at(lab, "a2"), lab.message("m")]
        async with kind_of(lab).opened(place(lab)) as caller:
            await caller.begin()
            await caller.write("before")
            assert await kinds(inbox.accept(messages, tx=caller.tx)) == [Kind.ACCEPTED] * 3
            assert (await inbox.accept(messages[0], tx=caller.tx)).kind is Kind.DUPLICATE
            assert await inbox.get_record(messages[0]) is None, "nothing is committed for the caller"
            await caller.rollback()
            assert await drain(inbox, Recorder(lab)) == []
            await caller.begin()
            await caller.write("now")
            assert await kinds(inbox.accept(messages, tx=caller.tx)) == [Kind.ACCEPTED] * 3
            await caller.commit()
        assert await kinds(inbox.accept(messages)) == [Kind.DUPLICATE] * 3
        assert len(await drain(inbox, Recorder(lab))) == 3
        assert await lab.effects() == ["a1", "a2", "m", "now"]

    async def test_nobody_gets_a_message_before_the_caller_has_committed(self, lab: Lab) -> None:
        """Also where the lane is there already, and ends while the caller is adding to it."""
        needs(lab, "concurrent_units")
        inbox, handler = await lab.inbox(), Recorder(lab)
        await inbox.accept(at(lab, "a1"))
        async with kind_of(lab).opened(place(lab)) as caller:
            await caller.begin()
            await inbox.accept(at(lab, "a2"), tx=caller.tx)
            await drain(inbox, handler)
            assert handler.runs == ["a1"]
            await caller.commit()

        async def went_on() -> bool:
            await drain(inbox, handler)
            return len(handler.runs) > 1

        await until(went_on, within=8)
        assert handler.runs == ["a1", "a2"], "a lane that somebody adds to must not end"

    async def test_what_a_handler_accepts_goes_with_its_transaction(self, lab: Lab) -> None:
        inbox, handler = await lab.inbox(retry=SOON), Recorder(lab)
        fails = [True, False]

        async def splitting(message: Message[Any], tx: Any) -> None:
            if message.id == "whole":
                parts = await inbox.accept([lab.message("part1"), lab.message("part2")], tx=tx)
                assert [part.kind for part in parts] == [Kind.ACCEPTED] * 2
                if fails.pop(0):
                    raise ValueError("no")
            else:
                await handler(message, tx)

        await inbox.accept(lab.message("whole"))
        first = await inbox.dispatch(splitting)
        assert first is not None
        assert first.kind is Kind.FAILED
        assert await inbox.get_record(lab.message("part1")) is None
        assert [outcome.kind for outcome in await drain(inbox, splitting)] == [Kind.PROCESSED] * 3
        assert sorted(handler.runs) == ["part1", "part2"]
        assert await lab.effects() == ["part1", "part2"]

    # --- lane= and not_before= ------------------------------------------------------------------------------

    async def test_a_lane_can_be_given(self, lab: Lab) -> None:
        inbox, handler = await lab.inbox(retry=LATER), Recorder(lab, error=ValueError("no"))
        for id_ in ("x1", "x2"):
            await inbox.accept(lab.message(id_), lane="x")
        await inbox.accept(lab.message("y1"), lane="y")
        await inbox.accept(at(lab, "s1"), lane="x")
        assert len(await drain(inbox, handler)) == 2
        assert sorted(handler.runs) == ["x1", "y1"], "what is behind x1 waits with it"
        working = Recorder(lab)
        await lab.let_time_pass()
        await drain(inbox, working)
        assert [id_ for id_ in working.runs if id_ != "y1"] == ["x1", "x2", "s1"]

    @pytest.mark.parametrize("lane", ["", 7, b"x"])
    async def test_a_lane_that_is_no_name_is_refused(self, lab: Lab, lane: Any) -> None:
        inbox, message = await lab.inbox(), lab.message()
        with pytest.raises((UsageError, InvalidMessage)):
            await inbox.accept(message, lane=lane)
        assert await inbox.get_record(message) is None

    @pytest.mark.parametrize("how", ["timedelta", "datetime"])
    async def test_a_message_is_not_worked_on_before_its_time(self, lab: Lab, how: str) -> None:
        inbox, handler = await lab.inbox(), Recorder(lab)
        hour: Any = timedelta(hours=1) if how == "timedelta" else datetime.now(UTC) + timedelta(hours=1)
        assert (await inbox.accept(at(lab, "a1"), not_before=hour)).kind is Kind.ACCEPTED
        await inbox.accept(at(lab, "a2"))
        await inbox.accept(at(lab, "b1"))
        await drain(inbox, handler)
        assert handler.runs == ["b1"], "it holds its lane until then"
        record = await record_of(inbox, at(lab, "a1"))
        assert record.next_try_at is not None
        assert timedelta(minutes=50) < record.next_try_at - datetime.now(UTC) < timedelta(minutes=70)
        await lab.let_time_pass()
        await drain(inbox, handler)
        assert handler.runs == ["b1", "a1", "a2"]

    async def test_a_lower_position_does_not_wait_for_the_time_of_a_higher_one(self, lab: Lab) -> None:
        inbox, handler = await lab.inbox(), Recorder(lab)
        await inbox.accept(at(lab, "a2"), not_before=timedelta(hours=1))
        assert await drain(inbox, handler) == []
        await inbox.accept(at(lab, "a1"))
        await drain(inbox, handler)
        assert handler.runs == ["a1"]
        await lab.let_time_pass()
        await drain(inbox, handler)
        assert handler.runs == ["a1", "a2"]

    async def test_a_time_that_has_passed_is_now(self, lab: Lab) -> None:
        inbox, handler = await lab.inbox(), Recorder(lab)
        await inbox.accept(lab.message("a"), not_before=datetime(2020, 1, 1, tzinfo=UTC))
        await inbox.accept(lab.message("b"), not_before=timedelta(0))
        await drain(inbox, handler)
        assert sorted(handler.runs) == ["a", "b"]

    @pytest.mark.parametrize("moment", [datetime(2020, 1, 1), "tomorrow", 5])  # noqa: DTZ001 - that is the point
    async def test_a_time_that_is_none_is_refused(self, lab: Lab, moment: Any) -> None:
        inbox = await lab.inbox()
        with pytest.raises(UsageError, match="not_before"):
            await inbox.accept(lab.message("m"), not_before=moment)
        assert await inbox.get_record(lab.message("m")) is None

    # --- what cannot be kept --------------------------------------------------------------------------------

    async def test_what_cannot_be_kept_is_refused_and_the_next_one_works(self, lab: Lab) -> None:
        by_order = await lab.inbox(key=keys.field("order"))
        small = await lab.inbox(max_payload=100)
        tenants_only = await lab.inbox(tenant=tenants.header("x-tenant"))
        cases: list[tuple[Inbox[Any], Any, type[Exception]]] = [
            (small, "m", UsageError),
            (small, [lab.message(), "m"], UsageError),
            (small, lab.message(payload={"text": "x" * 200}), PayloadTooLarge),
            (small, lab.message(payload={"value": float("nan")}), PayloadInvalid),
            (small, lab.message(payload={"value": object()}), PayloadInvalid),
            (by_order, lab.message(), KeyMissing),
            (tenants_only, lab.message(), TenantMissing),
        ]
        for inbox, wrong, error in cases:
            with pytest.raises(error):
                await inbox.accept(wrong)
        assert await lab.query("SELECT count(*) FROM onceward_records") == [(0,)]
        good, wrong = lab.message("good"), lab.message(payload={"text": "x" * 200})
        outcomes = await small.accept([wrong, good])
        assert [outcome.kind for outcome in outcomes] == [Kind.FAILED, Kind.ACCEPTED], (
            "nothing is raised for one of many"
        )
        assert isinstance(outcomes[0].error, PayloadTooLarge)
        assert outcomes[0].verdict is Verdict.REJECT
        assert await lab.query("SELECT message_id FROM onceward_records") == [("good",)]

    async def test_a_closed_inbox_accepts_nothing(self, lab: Lab) -> None:
        inbox: Inbox[Any] = Inbox(lab.store(), consumer="billing")
        for verb in (inbox.accept(lab.message()), inbox.accept([lab.message()]), inbox.dispatch(Recorder(lab))):
            with pytest.raises(InboxClosed):
                await verb

    # --- identities -----------------------------------------------------------------------------------------

    async def test_the_key_decides_what_is_the_same(self, lab: Lab) -> None:
        inbox, handler = await lab.inbox(), Recorder(lab)

        @inbox.handler("order.shipped", key=keys.field("order"))
        async def on_shipped(message: Message[Any], tx: Any) -> None:
            await handler(message, tx)

        one = lab.message("m1", type="order.shipped", payload={"order": 1})
        two = lab.message("m2", type="order.shipped", payload={"order": 1})
        assert await kinds(inbox.accept([one, two])) == [Kind.ACCEPTED, Kind.DUPLICATE]
        by_amount = keys.field("amount")
        assert (await inbox.accept(lab.message("m3"), key=by_amount)).kind is Kind.ACCEPTED
        assert (await inbox.accept(lab.message("m4"), key=by_amount)).kind is Kind.DUPLICATE
        inbox.handler("order.paid")(on_shipped)
        await drain(inbox)
        assert sorted(handler.runs) == ["m1", "m3"]

    async def test_tenants_and_consumers_keep_their_own(self, lab: Lab) -> None:
        billing, shipping = await lab.inbox(), await lab.inbox(consumer="shipping")
        for tenant in ("north", "south"):
            assert (await billing.accept(at(lab, "a1", tenant=tenant))).kind is Kind.ACCEPTED
        assert (await shipping.accept(at(lab, "a1", tenant="north"))).kind is Kind.ACCEPTED
        got = []

        async def handler(message: Message[Any]) -> None:
            got.append(str(message.tenant))

        assert len(await drain(billing, handler)) == 2
        assert sorted(got) == ["north", "south"]
        assert len(await drain(shipping, handler)) == 1

    # --- rule 20 --------------------------------------------------------------------------------------------

    async def test_cleanup_never_touches_what_is_still_to_be_done(self, lab: Lab) -> None:
        inbox, handler = await lab.inbox(retry=LATER), Recorder(lab)
        await inbox.accept([lab.message("failed"), lab.message("done"), at(lab, "a1", "z9"), lab.message("waits")])

        async def some(message: Message[Any], tx: Any) -> None:
            if message.id == "failed":
                raise ValueError("no")
            await handler(message, tx)

        await drain(inbox, some)
        await inbox.accept(lab.message("new"))
        await lab.query("UPDATE onceward_records SET received_at = '2020-01-01T00:00:00Z'")
        done = [row[0] for row in await lab.query("SELECT message_id FROM onceward_records WHERE state = 'processed'")]
        for id_ in done:
            await lab.make_older(id_, days=60)
        assert await inbox.cleanup(older_than=timedelta(days=30)) == len(done) == 2
        left = {row[0] for row in await lab.query("SELECT message_id FROM onceward_records")}
        assert left == {"failed", "a1", "new"}
        await lab.let_time_pass()
        await drain(inbox, handler)
        await inbox.process(lab.message("z9", stream="z", position=9), handler)
        await drain(inbox, handler)
        assert sorted(handler.runs) == ["a1", "done", "failed", "new", "waits", "z9"]
