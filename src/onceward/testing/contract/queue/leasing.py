"""Leased handlers: no transaction is held while they run, a heartbeat keeps the lease, and a zombie cannot complete."""

from __future__ import annotations

import asyncio
import contextlib
import time
from typing import Any

import pytest

from onceward import Kind, Message, Reject, RetryPolicy, State
from onceward.errors import OncewardError
from onceward.testing.contract.base import LATER, SOON
from onceward.testing.contract.queue.base import at, drain, record_of, until
from onceward.testing.lab import Lab, Recorder


class LeaseContract:
    async def test_the_effect_of_a_leased_handler_is_written_where_it_completes(self, lab: Lab) -> None:
        inbox, during = await lab.inbox(), []

        @inbox.handler("order.paid", lease=30)
        async def on_paid(message: Message[Any], lease: Any) -> None:
            # Nothing is held: somebody else may write, and change the very rows of this message.
            await lab.query("INSERT INTO effects VALUES ('meanwhile')")
            await lab.query("UPDATE onceward_records SET extra = '1'")
            during.append(await lab.query("SELECT state FROM onceward_records"))
            async with lease.complete() as tx:
                await lab.write(tx, message.id)
                lease.result = {"charged": message.id}

        await inbox.accept(lab.message("m"))
        outcomes = await drain(inbox)
        assert [(outcome.kind, outcome.result) for outcome in outcomes] == [(Kind.PROCESSED, {"charged": "m"})]
        assert during != [[("processed",)]]
        assert await lab.effects() == ["m", "meanwhile"]
        record = await record_of(inbox, lab.message("m"))
        assert (record.state, record.attempts, record.started) == (State.PROCESSED, 1, 0)
        assert record.result == {"charged": "m"}
        assert await drain(inbox) == []

    async def test_no_transaction_is_open_while_a_leased_handler_runs(self, lab: Lab) -> None:
        if not lab.network:
            pytest.skip(f"{type(lab).__name__} has no sessions to look at")
        inbox, idle = await lab.inbox(), []

        @inbox.handler("order.paid", lease=30)
        async def on_paid(message: Message[Any], lease: Any) -> None:
            sql = (
                "SELECT state FROM pg_stat_activity "
                "WHERE datname = current_database() AND pid <> pg_backend_pid() AND xact_start IS NOT NULL "
                "AND backend_type = 'client backend'"
            )
            idle.append(await lab.query(sql))

        await inbox.accept(lab.message("m"))
        assert [outcome.kind for outcome in await drain(inbox)] == [Kind.PROCESSED]
        assert idle == [[]]

    @pytest.mark.parametrize("error", [None, ValueError("no")], ids=["returns", "fails"])
    async def test_no_heartbeat_outlives_its_handler(self, lab: Lab, error: Exception | None) -> None:
        inbox, before = await lab.inbox(retry=SOON), asyncio.all_tasks()

        @inbox.handler("order.paid", lease=0.03)
        async def on_paid(message: Message[Any], lease: Any) -> None:
            await asyncio.sleep(0.1)
            if error is not None:
                raise error

        await inbox.accept(lab.message("m"))
        outcome = await inbox.dispatch()
        left = {task for task in asyncio.all_tasks() - before if "heartbeat" in str(task.get_coro())}
        assert outcome is not None
        assert not left, "it may be talking to the database"

    async def test_a_leased_handler_that_returns_is_completed_without_an_effect(self, lab: Lab) -> None:
        inbox, runs = await lab.inbox(), []

        @inbox.handler("order.paid", lease=30)
        async def on_paid(message: Message[Any], lease: Any) -> None:
            runs.append(message.id)

        await inbox.accept(at(lab, "a1"))
        await inbox.accept(at(lab, "a2"))
        assert [outcome.kind for outcome in await drain(inbox)] == [Kind.PROCESSED] * 2
        assert runs == ["a1", "a2"]

    @pytest.mark.parametrize("where", ["before", "inside", "after"])
    async def test_an_error_in_a_leased_handler_is_a_failed_attempt(self, lab: Lab, where: str) -> None:
        """Unless it has completed: what is done is done."""
        inbox = await lab.inbox(retry=LATER)

        @inbox.handler("order.paid", lease=30)
        async def on_paid(message: Message[Any], lease: Any) -> None:
            if where == "before":
                raise ValueError("no")
            async with lease.complete() as tx:
                await lab.write(tx, message.id)
                if where == "inside":
                    raise ValueError("no")
            raise ValueError("too late")

        await inbox.accept([at(lab, "a1"), at(lab, "a2")])
        with contextlib.suppress(ValueError):
            await inbox.dispatch()
        record = await record_of(inbox, at(lab, "a1"))
        if where == "after":
            assert (record.state, record.attempts) == (State.PROCESSED, 1)
            assert await lab.effects() == ["a1"]
        else:
            assert (record.state, record.attempts, record.errors[-1].text) == (State.FAILED, 1, "no")
            assert await lab.effects() == []
            assert await drain(inbox) == [], "its lane is parked"

    async def test_a_leased_handler_may_reject(self, lab: Lab) -> None:
        inbox = await lab.inbox()

        @inbox.handler("order.paid", lease=30)
        async def on_paid(message: Message[Any], lease: Any) -> None:
            raise Reject("not ours")

        await inbox.accept(lab.message("m"))
        assert [outcome.kind for outcome in await drain(inbox)] == [Kind.DEAD]

    async def test_a_heartbeat_keeps_the_lease_for_as_long_as_it_takes(self, lab: Lab) -> None:
        inbox, other, handler = await lab.inbox(), await lab.inbox(), Recorder(lab)
        lease_of, tries = 0.6, []

        @inbox.handler("order.paid", lease=lease_of)
        async def on_paid(message: Message[Any], lease: Any) -> None:
            began = time.monotonic()
            while (
                time.monotonic() - began < 3 * lease_of
            ):  # it takes three leases, and somebody else looks all the time
                tries.append(await other.dispatch(handler))
                await asyncio.sleep(0.05)
            async with lease.complete() as tx:
                await lab.write(tx, message.id)

        await inbox.accept(lab.message("m"))
        assert [outcome.kind for outcome in await drain(inbox)] == [Kind.PROCESSED]
        assert set(tries) == {None}
        assert handler.runs == []
        assert await lab.effects() == ["m"]

    @pytest.mark.parametrize("then", ["completes", "returns", "raises"])
    async def test_a_zombie_cannot_complete(self, lab: Lab, then: str) -> None:
        """Rule 16: it lost its lease, somebody else has done the work, and it wakes up and goes on."""
        inbox, other, handler = await lab.inbox(retry=SOON), await lab.inbox(retry=SOON), Recorder(lab)
        lost: list[Any] = []

        @inbox.handler("order.paid", lease=30)
        async def on_paid(message: Message[Any], lease: Any) -> None:
            async def taken_over() -> bool:
                await lab.let_time_pass()  # the lease is over, by the clock of the database
                return bool(await drain(other, handler))

            await until(taken_over)
            if then == "raises":
                raise ValueError("late")
            if then == "completes":
                try:
                    async with lease.complete() as tx:
                        await lab.write(tx, "zombie")
                except OncewardError as error:
                    lost.append(type(error).__name__)
                    raise

        await inbox.accept(at(lab, "a1"))
        with contextlib.suppress(OncewardError):
            await inbox.dispatch()
        assert handler.runs == ["a1"]
        assert await lab.effects() == ["a1"]
        assert lost == (["LeaseLost"] if then == "completes" else [])
        record = await record_of(inbox, at(lab, "a1"))
        assert (record.state, record.attempts) == (State.PROCESSED, 1)
        assert record.result == {"charged": "a1"}
        await inbox.accept(at(lab, "a2"))
        await drain(other, handler)
        assert handler.runs == ["a1", "a2"], "and its lane is as it was"

    async def test_a_zombie_cannot_free_a_lane_that_another_one_has_now(self, lab: Lab) -> None:
        inbox, other, third = await lab.inbox(), await lab.inbox(), Recorder(lab)
        begun, replaced, entered, go = (asyncio.Event() for _ in range(4))

        @inbox.handler("order.paid", lease=30)
        async def zombie(message: Message[Any], lease: Any) -> None:
            begun.set()
            await asyncio.wait_for(replaced.wait(), 30)
            raise ValueError("late")

        @other.handler("order.paid", lease=30)
        async def heir(message: Message[Any], lease: Any) -> None:
            entered.set()
            await asyncio.wait_for(go.wait(), 30)
            async with lease.complete() as tx:
                await lab.write(tx, message.id)

        await inbox.accept(at(lab, "a1"))
        first = asyncio.ensure_future(inbox.dispatch())
        await asyncio.wait_for(begun.wait(), 20)
        await lab.let_time_pass()  # the lease is over, by the clock of the database
        second = asyncio.ensure_future(other.dispatch())
        await asyncio.wait_for(entered.wait(), 20)
        replaced.set()
        with contextlib.suppress(OncewardError):
            await first
        assert await (await lab.inbox()).dispatch(third) is None, "the heir has it"
        go.set()
        outcome = await second
        assert outcome is not None
        assert outcome.kind is Kind.PROCESSED
        assert third.runs == []
        assert await lab.effects() == ["a1"]
        assert (await record_of(inbox, at(lab, "a1"))).state is State.PROCESSED

    async def test_a_cancelled_leased_handler_gives_its_message_back_at_once(self, lab: Lab) -> None:
        inbox, inside = await lab.inbox(retry=RetryPolicy(max_attempts=1)), asyncio.Event()

        @inbox.handler("order.paid", lease=30)
        async def on_paid(message: Message[Any], lease: Any) -> None:
            inside.set()
            await asyncio.Event().wait()

        await inbox.accept(lab.message("m"))
        running = asyncio.ensure_future(inbox.dispatch())
        await inside.wait()
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        record = await record_of(inbox, lab.message("m"))
        assert (record.state, record.attempts, record.started) == (State.ACCEPTED, 0, 0)
        assert [outcome.kind for outcome in await drain(await lab.inbox(), Recorder(lab))] == [Kind.PROCESSED]

    async def test_a_cancelled_leased_handler_is_no_crash_after_one_that_was(self, lab: Lab) -> None:
        inbox, inside = await lab.inbox(retry=RetryPolicy(max_attempts=1)), asyncio.Event()

        @inbox.handler("order.paid", lease=30)
        async def on_paid(message: Message[Any], lease: Any) -> None:
            inside.set()
            await asyncio.Event().wait()

        await inbox.accept(lab.message("m"))
        await lab.query("UPDATE onceward_lanes SET claims = 1")  # a worker died: from now on starts are marked
        for _ in range(2):
            inside.clear()
            running = asyncio.ensure_future(inbox.dispatch())
            await inside.wait()
            running.cancel()
            with pytest.raises(asyncio.CancelledError):
                await running
            record = await record_of(inbox, lab.message("m"))
            assert (record.state, record.attempts, record.started) == (State.ACCEPTED, 0, 0)

    async def test_a_failed_lease_after_a_crash_has_the_attempts_that_are_left(self, lab: Lab) -> None:
        """The mark of its own start is not a crash."""
        inbox = await lab.inbox(retry=RetryPolicy(max_attempts=2, base=0.0))

        @inbox.handler("order.paid", lease=30)
        async def on_paid(message: Message[Any], lease: Any) -> None:
            raise ValueError("no")

        await inbox.accept(lab.message("m"))
        await lab.query("UPDATE onceward_lanes SET claims = 1")
        assert [outcome.kind for outcome in await drain(inbox)] == [Kind.FAILED, Kind.DEAD]

    async def test_a_leased_handler_may_have_a_limit_of_its_own(self, lab: Lab) -> None:
        inbox, running, most, done, ran = await lab.inbox(), 0, 0, asyncio.Event(), list[str]()

        @inbox.handler("order.paid", lease=30, concurrency=1)
        async def on_paid(message: Message[Any], lease: Any) -> None:
            nonlocal running, most
            running += 1
            most = max(most, running)
            await asyncio.sleep(0.05)
            running -= 1
            ran.append(message.id)
            if len(ran) == 4:
                done.set()

        await inbox.accept([at(lab, f"{stream}1") for stream in "abcd"])
        await asyncio.wait_for(inbox.run(concurrency=3, stop=done), 30)
        assert (most, sorted(ran)) == (1, ["a1", "b1", "c1", "d1"])

    async def test_leases_that_a_worker_has_no_hands_for_are_given_back_at_once(self, lab: Lab) -> None:
        """With on_begin each lane has a turn of its own, and more than one of them may come to a lease."""

        async def begin(tx: Any, message: Message[Any]) -> None: ...

        inbox, done, ran = await lab.inbox(on_begin=begin), asyncio.Event(), list[str]()

        @inbox.handler("order.paid", lease=30)
        async def on_paid(message: Message[Any], lease: Any) -> None:
            ran.append(message.id)
            if len(ran) == 12:
                done.set()

        await inbox.accept([lab.message(f"{number:02}") for number in range(12)])
        began = time.monotonic()
        await asyncio.wait_for(inbox.run(stop=done), 30)
        assert time.monotonic() - began < 2.5, "nobody had to wait until a claim was over"
        assert len(set(ran)) == 12

    async def test_leased_handlers_of_two_lanes_run_side_by_side(self, lab: Lab) -> None:
        """On every store: they hold nothing."""
        inbox, both, done = await lab.inbox(), asyncio.Barrier(2), asyncio.Event()

        @inbox.handler("order.paid", lease=30)
        async def on_paid(message: Message[Any], lease: Any) -> None:
            await asyncio.wait_for(both.wait(), 20)
            async with lease.complete() as tx:
                await lab.write(tx, message.id)
            if len(await lab.effects()) == 2:
                done.set()

        await inbox.accept([at(lab, "a1"), at(lab, "b1")])

        async def stop() -> None:
            async def written() -> bool:
                return len(await lab.effects()) == 2

            await until(written)
            done.set()

        await asyncio.wait_for(asyncio.gather(inbox.run(concurrency=2, stop=done), stop()), 30)
        assert await lab.effects() == ["a1", "b1"]
