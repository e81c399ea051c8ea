"""Workers: run and worker, how they wake, share the load, stop, and treat bulk handlers, limits and timeouts."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import Counter
from typing import Any

import pytest

from onceward import Kind, Message, RetryPolicy, State
from onceward.errors import BulkError, UsageError
from onceward.testing.contract.base import LATER, SOON, needs
from onceward.testing.contract.queue.accepting import kind_of
from onceward.testing.contract.queue.base import Failing, at, drain, record_of, until
from onceward.testing.kinds import place
from onceward.testing.lab import Gate, Lab, Recorder
from onceward.testing.proxy import Proxy

NEVER = 3600.0
"""As a poll_interval: whatever wakes the worker, it is not this."""


class Counting(Recorder):
    """Says when it has run so many times."""

    def __init__(self, lab: Lab, wanted: int) -> None:
        super().__init__(lab)
        self.wanted = wanted
        self.done = asyncio.Event()

    async def __call__(self, message: Message[Any], tx: Any) -> dict[str, str]:
        result = await super().__call__(message, tx)
        if len(self.runs) >= self.wanted:
            self.done.set()
        return result

    async def all(self) -> None:
        await asyncio.wait_for(self.done.wait(), 20)


class WorkContract:
    async def test_run_works_until_it_is_told_to_stop(self, lab: Lab) -> None:
        inbox, handler = await lab.inbox(), Counting(lab, 30)
        ids = [f"{number:02}" for number in range(30)]
        await inbox.accept([lab.message(id_, stream=f"s{int(id_) % 4}") for id_ in ids])
        running = asyncio.ensure_future(inbox.run(handler, stop=handler.done))
        await asyncio.wait_for(running, 20)
        assert await lab.effects() == ids
        assert Counter(handler.runs) == Counter(ids)

    async def test_a_worker_runs_in_the_background_and_stops_with_its_block(self, lab: Lab) -> None:
        inbox, handler = await lab.inbox(), Counting(lab, 3)
        before = asyncio.all_tasks()
        async with inbox.worker(handler):
            await inbox.accept([lab.message() for _ in range(3)])
            await handler.all()
        assert asyncio.all_tasks() - before == set(), "nothing is left running"
        await inbox.accept(lab.message())
        assert len(handler.runs) == 3
        assert len(await lab.effects()) == 3

    async def test_a_worker_can_be_told_to_stop(self, lab: Lab) -> None:
        inbox, handler = await lab.inbox(), Counting(lab, 1)
        async with inbox.worker(handler) as worker:
            await inbox.accept(lab.message())
            await handler.all()
            worker.stop()
        assert len(await lab.effects()) == 1

    async def test_workers_with_registered_handlers(self, lab: Lab) -> None:
        inbox, handler = await lab.inbox(), Counting(lab, 1)
        inbox.handler("order.paid")(handler)
        async with inbox.worker():
            await inbox.accept(lab.message("m"))
            await handler.all()
        assert await lab.effects() == ["m"]

    @pytest.mark.parametrize("options", [{"concurrency": 0}, {"batch": 0}, {"grace": -1}, {"poll_interval": 0}])
    async def test_options_that_cannot_work_are_refused(self, lab: Lab, options: dict[str, Any]) -> None:
        inbox = await lab.inbox()
        with pytest.raises(UsageError, match=next(iter(options))):
            await asyncio.wait_for(inbox.run(Recorder(lab), **options), 5)

    async def test_two_workers_do_each_message_once(self, lab: Lab) -> None:
        one, two, handler = await lab.inbox(), await lab.inbox(), Counting(lab, 120)
        ids = [f"{number:03}" for number in range(120)]
        async with one.worker(handler, concurrency=4), two.worker(handler, concurrency=4):
            for at_ in range(0, 120, 20):
                await one.accept([lab.message(id_, stream=f"s{int(id_) % 7}") for id_ in ids[at_ : at_ + 20]])
            await handler.all()
        assert Counter(handler.runs) == Counter(ids)
        assert await lab.effects() == ids

    async def test_neighbours_of_a_failing_message_burn_no_attempts(self, lab: Lab) -> None:
        inbox, handler = await lab.inbox(retry=LATER), Failing(lab, "07", "s-3")
        ids = [f"{number:02}" for number in range(20)]
        await inbox.accept([lab.message(id_) for id_ in ids])
        await inbox.accept([lab.message(f"s-{number}", stream="s", position=number) for number in range(1, 6)])
        async with inbox.worker(handler, batch=100):

            async def settled() -> bool:
                return len(await lab.effects()) == 21 and len(set(handler.runs)) == 23

            await until(settled)
        rows = await lab.query("SELECT message_id, state, attempts, started FROM onceward_records")
        found = {row[0]: tuple(row[1:]) for row in rows}
        assert found.pop("07") == ("failed", 1, 0)
        assert found.pop("s-3") == ("failed", 1, 0)
        assert [found.pop(f"s-{number}") for number in (4, 5)] == [("accepted", 0, 0)] * 2
        assert set(found.values()) == {("processed", 1, 0)}
        assert await lab.effects() == sorted([id_ for id_ in ids if id_ != "07"] + ["s-1", "s-2"])

    async def test_a_task_group_in_a_handler_does_not_end_the_worker(self, lab: Lab) -> None:
        """Before Python 3.12 it leaves the task behind as if somebody had cancelled it."""
        handled: list[str] = []

        async def fail() -> None:
            raise ValueError("no")

        async def handle(message: Message[Any]) -> None:
            try:
                async with asyncio.TaskGroup() as group:
                    group.create_task(fail())
            except* ValueError:
                handled.append(message.id)

        inbox = await lab.inbox()
        await inbox.accept([lab.message(str(number)) for number in range(3)])
        async with inbox.worker(handle, batch=1) as worker:

            async def all_handled() -> bool:
                assert worker.running, "the worker has ended"
                return len(handled) == 3

            await until(all_handled)
            await inbox.accept(lab.message("later"))

            async def later_too() -> bool:
                assert worker.running, "the worker has ended"
                return "later" in handled

            await until(later_too)

    # --- waking ---------------------------------------------------------------------------------------------

    async def test_a_message_accepted_by_the_same_inbox_wakes_its_worker(self, lab: Lab) -> None:
        inbox, handler = await lab.inbox(), Counting(lab, 2)
        async with inbox.worker(handler, poll_interval=NEVER):
            for number in (1, 2):
                await _is_idle(inbox)
                await inbox.accept(lab.message(str(number)))

                async def ran(number: int = number) -> bool:
                    return len(handler.runs) == number

                await until(ran)

    async def test_a_message_accepted_elsewhere_wakes_a_worker(self, lab: Lab) -> None:
        needs(lab, "notifies")
        inbox, other, handler = await lab.inbox(), await lab.inbox(), Counting(lab, 2)
        async with inbox.worker(handler, poll_interval=NEVER):
            await inbox.accept(lab.message())

            async def ran() -> bool:
                return len(handler.runs) == 1

            await until(ran)  # it listens, and has nothing to do
            await _is_idle(inbox)
            async with kind_of(lab).opened(place(lab)) as caller:
                await caller.begin()
                await other.accept(lab.message(), tx=caller.tx)
                await caller.commit()
            await handler.all()
            handler.done.clear()
            handler.wanted = 3
            await _is_idle(inbox)
            await other.accept(lab.message())
            await handler.all()

    async def test_a_message_accepted_elsewhere_is_found_by_polling(self, lab: Lab) -> None:
        inbox, other, handler = await lab.inbox(), await lab.inbox(), Counting(lab, 1)
        async with inbox.worker(handler, poll_interval=0.05):
            await _is_idle(inbox)
            await other.accept(lab.message())
            await handler.all()

    async def test_a_worker_wakes_for_the_next_try(self, lab: Lab) -> None:
        inbox = await lab.inbox(retry=RetryPolicy(max_attempts=5, base=0.3, cap=0.3))
        handler = Failing(lab, "m")
        async with inbox.worker(handler, poll_interval=NEVER):
            await inbox.accept(lab.message("m"))

            async def failed_twice() -> bool:
                return len(handler.runs) >= 2

            await until(failed_twice)
            handler.ids.clear()

            async def done() -> bool:
                return (await record_of(inbox, lab.message("m"))).state is State.PROCESSED

            await until(done)

    async def test_a_worker_wakes_for_inline_work_that_it_waits_for(self, lab: Lab) -> None:
        inbox, handler = await lab.inbox(), Counting(lab, 1)
        async with inbox.worker(handler, poll_interval=0.5):
            await inbox.accept(at(lab, "a1", "z1"))
            await _is_idle(inbox)
            await inbox.process(at(lab, "z1"), Recorder(lab))
            await handler.all()

    async def test_a_worker_without_work_does_not_spin(self, lab: Lab) -> None:
        """Rule 13: waiting for a retry, a dependency or a person costs next to nothing."""
        claims = []

        async def reached(point: str) -> None:
            if point in ("before begin_turn", "before close_and_commit"):  # the next claim may ride with it
                claims.append(time.monotonic())

        inbox, handler = await lab.inbox(reached=reached, retry=LATER), Failing(lab, "failed", "a1")
        await inbox.accept([lab.message("failed"), at(lab, "b1", "z1"), at(lab, "a1"), at(lab, "a2")])
        async with inbox.worker(handler, poll_interval=NEVER):

            async def failed() -> bool:
                return len(handler.runs) == 2

            await until(failed)
            await _is_idle(inbox)
            seen = len(claims)
            await asyncio.sleep(0.5)  # long enough for a loop that spins to be seen
            assert len(claims) - seen <= 3

    async def test_a_worker_does_not_spin_while_another_one_is_in_a_long_turn(self, lab: Lab) -> None:
        """The claim of its lane is over by then, and its lock is not."""
        needs(lab, "concurrent_units")
        claims = []

        async def reached(point: str) -> None:
            if point in ("before begin_turn", "before close_and_commit"):  # the next claim may ride with it
                claims.append(time.monotonic())

        inbox, gate = await lab.inbox(), Gate(lab)
        await inbox.accept(lab.message())
        running = asyncio.ensure_future(inbox.dispatch(gate))
        await gate.started.wait()
        async with (await lab.inbox(reached=reached)).worker(Recorder(lab)):
            await asyncio.sleep(3.5)
            seen = len(claims)
            await asyncio.sleep(0.5)
            assert len(claims) - seen <= 3
        gate.go.set()
        assert await running is not None

    # --- side by side ---------------------------------------------------------------------------------------

    async def test_concurrency_is_how_many_handlers_run_at_once(self, lab: Lab) -> None:
        needs(lab, "concurrent_units")
        inbox, running, most = await lab.inbox(), [0], [0]
        enough, done = asyncio.Event(), asyncio.Event()
        ran: list[str] = []

        async def handler(message: Message[Any], tx: Any) -> None:
            running[0] += 1
            most[0] = max(most[0], running[0])
            if running[0] == 3:
                enough.set()
            await asyncio.wait_for(enough.wait(), 20)
            running[0] -= 1
            ran.append(message.id)
            if len(ran) == 12:
                done.set()

        await inbox.accept([lab.message() for _ in range(12)])
        await asyncio.wait_for(inbox.run(handler, concurrency=3, stop=done), 30)
        assert most == [3]
        assert len(set(ran)) == len(ran) == 12

    async def test_a_handler_may_have_a_limit_of_its_own(self, lab: Lab) -> None:
        needs(lab, "concurrent_units")
        inbox, running, most = await lab.inbox(), Counter[str](), Counter[str]()
        done, two_quick, ran = asyncio.Event(), asyncio.Event(), list[str]()

        @inbox.handler("slow", concurrency=1)
        @inbox.handler("quick", concurrency=3)
        async def work(message: Message[Any]) -> None:
            running[message.type] += 1
            most[message.type] = max(most[message.type], running[message.type])
            if running["quick"] >= 2:
                two_quick.set()
            await asyncio.wait_for(two_quick.wait(), 20)
            running[message.type] -= 1
            ran.append(message.id)
            if len(ran) == 10:
                done.set()

        await inbox.accept([lab.message(type=type_) for _ in range(5) for type_ in ("slow", "quick")])
        await asyncio.wait_for(inbox.run(concurrency=4, stop=done), 30)
        assert most["slow"] == 1
        assert most["quick"] >= 2
        assert len(set(ran)) == 10

    async def test_a_handler_that_takes_too_long_fails(self, lab: Lab) -> None:
        inbox, late = await lab.inbox(retry=LATER), []

        @inbox.handler("order.paid", timeout=0.2)
        async def endless(message: Message[Any], tx: Any) -> None:
            await lab.write(tx, message.id)
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                late.append(message.id)
                raise

        await inbox.accept(lab.message("m"))
        outcomes = await asyncio.wait_for(drain(inbox), 20)
        assert [outcome.kind for outcome in outcomes] == [Kind.FAILED]
        assert type(outcomes[0].error).__name__ == "HandlerTimeout"
        assert late == ["m"]
        record = await record_of(inbox, lab.message("m"))
        assert (record.state, record.attempts, record.errors[-1].type) == (State.FAILED, 1, "HandlerTimeout")
        assert await lab.effects() == []
        await inbox.accept(lab.message("quick", type="other"))
        assert [outcome.kind for outcome in await drain(inbox, Recorder(lab))] == [Kind.PROCESSED]

    # --- bulk handlers --------------------------------------------------------------------------------------

    async def test_a_bulk_handler_gets_the_list_in_order(self, lab: Lab) -> None:
        inbox, got, stop = await lab.inbox(), list[list[str]](), asyncio.Event()

        async def charge_all(messages: list[Message[Any]], tx: Any) -> list[Any]:
            got.append([message.id for message in messages])
            for message in messages:
                await lab.write(tx, message.id)
            if sum(map(len, got)) == 30:
                stop.set()
            return [{"charged": message.id} for message in messages]

        ids = [f"{stream}{position}" for position in range(10, 0, -1) for stream in "abc"]
        await inbox.accept([at(lab, id_) for id_ in ids])
        await asyncio.wait_for(inbox.run(bulk=charge_all, stop=stop), 20)
        assert max(map(len, got)) > 1, "it gets more than one at a time"
        flat = [id_ for some in got for id_ in some]
        assert sorted(flat) == sorted(ids)
        for stream in "abc":
            mine = [int(id_[1:]) for id_ in flat if id_[0] == stream]
            assert mine == sorted(mine)
        assert await lab.effects() == sorted(ids)
        assert (await record_of(inbox, at(lab, "a1"))).result == {"charged": "a1"}

    @pytest.mark.parametrize("how", ["raises", "names the culprit"])
    async def test_a_bulk_is_halved_until_the_bad_one_is_alone(self, lab: Lab, how: str) -> None:
        inbox, calls = await lab.inbox(retry=LATER), list[list[str]]()

        async def charge_all(messages: list[Message[Any]], tx: Any) -> None:
            calls.append([message.id for message in messages])
            for message in messages:
                await lab.write(tx, message.id)
            bad = [message for message in messages if message.id == "13"]
            if bad:
                raise BulkError("bad", culprits=bad) if how != "raises" else ValueError("bad")

        ids = [f"{number:02}" for number in range(32)]
        await inbox.accept([lab.message(id_) for id_ in ids])
        async with inbox.worker(bulk=charge_all, batch=100):

            async def settled() -> bool:
                return len(await lab.effects()) == 31 and ["13"] in calls

            await until(settled)
        assert await lab.effects() == [id_ for id_ in ids if id_ != "13"]
        rows = await lab.query(
            "SELECT DISTINCT state, attempts, started FROM onceward_records WHERE message_id <> '13'"
        )
        assert rows == [("processed", 1, 0)]
        record = await record_of(inbox, lab.message("13"))
        assert (record.state, record.attempts) == (State.FAILED, 1)
        assert calls.count(["13"]) == 1

    @pytest.mark.parametrize("twice", [False, True])
    async def test_a_bulk_keeps_the_order_of_those_that_it_names(self, lab: Lab, twice: bool) -> None:
        inbox, ids, ran, stop = await lab.inbox(), [f"a{number}" for number in range(10, 40)], [], asyncio.Event()

        async def one_by_one(messages: list[Message[Any]], tx: Any) -> None:
            if len(messages) > 1:
                bad = messages[::2]
                raise BulkError("not together", culprits=[*bad, *bad[:1]] if twice else bad)
            await lab.write(tx, messages[0].id)
            ran.append(messages[0].id)
            if len(ran) == len(ids):
                stop.set()

        await inbox.accept([at(lab, id_) for id_ in ids])
        await asyncio.wait_for(inbox.run(bulk=one_by_one, stop=stop), 20)
        assert ran == ids
        assert await lab.effects() == ids

    # --- stopping -------------------------------------------------------------------------------------------

    async def test_a_worker_that_stops_finishes_what_it_has_begun_and_begins_nothing(self, lab: Lab) -> None:
        inbox, gate, stop = await lab.inbox(), Gate(lab), asyncio.Event()
        await inbox.accept([at(lab, "a1"), at(lab, "a2"), at(lab, "a3")])
        running = asyncio.ensure_future(inbox.run(gate, stop=stop, grace=20))
        await gate.started.wait()
        stop.set()
        gate.go.set()
        await asyncio.wait_for(running, 20)
        ran = list(gate.runs)
        assert await lab.effects() == ran, "what has begun is finished"
        others = Recorder(lab)
        await drain(await lab.inbox(), others)
        assert ran + others.runs == ["a1", "a2", "a3"], "the rest is there at once for others"
        rows = await lab.query("SELECT DISTINCT state, attempts, started FROM onceward_records")
        assert rows == [("processed", 1, 0)]

    @pytest.mark.parametrize("how", ["grace is over", "cancelled"])
    async def test_a_worker_that_must_stop_counts_no_crash(self, lab: Lab, how: str) -> None:
        inbox, gate, stop = await lab.inbox(retry=RetryPolicy(max_attempts=1)), Gate(lab), asyncio.Event()
        await inbox.accept([at(lab, "a1"), at(lab, "a2"), lab.message("m")])
        running = asyncio.ensure_future(inbox.run(gate, stop=stop, grace=0.1))
        await gate.started.wait()
        if how == "cancelled":
            running.cancel()
            with pytest.raises(asyncio.CancelledError):
                await running
        else:
            stop.set()
            await asyncio.wait_for(running, 20)
        assert await lab.effects() == []
        rows = await lab.query("SELECT DISTINCT state, attempts, started FROM onceward_records")
        assert rows == [("accepted", 0, 0)]
        handler = Recorder(lab)
        await drain(await lab.inbox(), handler)
        assert sorted(handler.runs) == ["a1", "a2", "m"], "nobody has to wait for a lease"
        assert await lab.query("SELECT DISTINCT attempts, started FROM onceward_records") == [(1, 0)]

    async def test_a_handler_that_hears_of_the_cancellation_can_clean_up(self, lab: Lab) -> None:
        inbox, started, cleaned = await lab.inbox(), asyncio.Event(), []

        async def handler(message: Message[Any], tx: Any) -> None:
            started.set()
            try:
                await asyncio.Event().wait()
            finally:
                cleaned.append(message.id)

        await inbox.accept(lab.message("m"))
        async with inbox.worker(handler, grace=0.05):
            await started.wait()
        assert cleaned == ["m"]

    async def test_a_handler_that_swallows_the_cancellation_does_not_keep_the_worker(self, lab: Lab) -> None:
        inbox, inside = await lab.inbox(), asyncio.Event()

        async def deaf(message: Message[Any], tx: Any) -> None:
            inside.set()
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.Event().wait()
            await lab.write(tx, message.id)

        await inbox.accept(lab.message("m"))
        running = asyncio.ensure_future(inbox.run(deaf))
        await inside.wait()
        running.cancel()
        await asyncio.wait([running], timeout=10)
        assert running.done()
        assert await lab.effects() == ["m"]

    async def test_an_error_in_the_block_stops_the_worker_too(self, lab: Lab) -> None:
        inbox, before = await lab.inbox(), asyncio.all_tasks()
        with pytest.raises(ValueError, match="no"):
            async with inbox.worker(Recorder(lab)):
                raise ValueError("no")
        assert asyncio.all_tasks() - before == set()

    # --- a database that is away ----------------------------------------------------------------------------

    async def test_a_worker_survives_a_database_that_is_away(self, lab: Lab) -> None:
        needs(lab, "network")
        proxy, direct = Proxy(*lab.address), await lab.inbox()
        async with proxy.running():
            inbox, handler = await lab.inbox(store=lab.store_behind(proxy.port)), Counting(lab, 3)
            async with inbox.worker(handler, poll_interval=0.1):
                for number in (1, 2, 3):
                    await direct.accept(lab.message(str(number)))

                    async def ran(number: int = number) -> bool:
                        return await lab.effects() == [str(one) for one in range(1, number + 1)]

                    await until(ran)
                    proxy.cut()
            await inbox.close()
        rows = await lab.query("SELECT DISTINCT state, attempts FROM onceward_records")
        assert rows == [("processed", 1)]

    # --- what people see ------------------------------------------------------------------------------------

    @pytest.mark.parametrize("batch", [1, 50])
    async def test_a_message_that_costs_its_connection_ends_as_a_dead_letter_and_its_neighbours_go_on(
        self, lab: Lab, batch: int
    ) -> None:
        """Rules 12 and 14: a statement that kills the server's process is poison as one that kills ours."""
        needs(lab, "network")
        inbox, runs = await lab.inbox(retry=SOON), list[str]()

        async def handle(message: Message[Any], tx: Any) -> None:
            runs.append(message.id)
            await lab.write(tx, message.id)
            if message.id == "m3":
                await lab.run(tx, "SELECT pg_terminate_backend(pg_backend_pid())")

        messages = [lab.message(f"m{number}") for number in range(8)]
        await inbox.accept(messages)

        async def all_are_settled() -> bool:
            return await lab.query("SELECT 1 FROM onceward_lanes LIMIT 1") == []

        async with inbox.worker(handle, batch=batch, poll_interval=0.1) as worker:
            await until(all_are_settled)
            assert worker.running
        record = await record_of(inbox, messages[3])
        assert (record.state, record.attempts, record.started) == (State.DEAD, 0, SOON.max_attempts)
        assert "lost its connection" in record.errors[-1].text
        assert runs.count("m3") == SOON.max_attempts + 1, "the first time it may have been any of its neighbours"
        assert await lab.effects() == [f"m{number}" for number in range(8) if number != 3]
        others = "SELECT DISTINCT state, attempts, started FROM onceward_records WHERE message_id <> 'm3'"
        assert await lab.query(others) == [("processed", 1, 0)]

    async def test_a_connection_that_is_lost_counts_against_nobody(self, lab: Lab) -> None:
        needs(lab, "network")
        inbox, lost = await lab.inbox(retry=RetryPolicy(max_attempts=1)), list[str]()

        async def handle(message: Message[Any], tx: Any) -> None:
            await lab.write(tx, message.id)
            if not lost:
                lost.append(message.id)
                await lab.run(tx, "SELECT pg_terminate_backend(pg_backend_pid())")

        await inbox.accept([lab.message(f"m{number}") for number in range(5)])

        async def all_are_done() -> bool:
            return await lab.query("SELECT 1 FROM onceward_lanes LIMIT 1") == []

        async with inbox.worker(handle, poll_interval=0.1):
            await until(all_are_done)
        rows = await lab.query("SELECT DISTINCT state, attempts, started FROM onceward_records")
        assert rows == [("processed", 1, 0)]
        assert len(await lab.effects()) == 5

    @pytest.mark.parametrize("batch", [1, 50])
    @pytest.mark.parametrize("lane", [None, "lane"])
    async def test_a_record_that_somebody_deleted_holds_up_its_own_lane_only(
        self, lab: Lab, lane: str | None, batch: int
    ) -> None:
        """Workers must not end for it, nor spin, nor others wait."""
        inbox, handler = await lab.inbox(), Recorder(lab)
        await inbox.accept([lab.message(id_) for id_ in ("before", "gone", "after")], lane=lane)
        await inbox.accept([lab.message(f"other {number}") for number in range(3)])
        await lab.query("DELETE FROM onceward_records WHERE message_id = 'gone'")
        expected = {"before", "other 0", "other 1", "other 2"} | (set() if lane else {"after"})

        async def only_it_is_left() -> bool:
            async with inbox._settler.plain_unit() as unit:
                due = await unit.due_in(inbox.consumer)
            return set(handler.runs) >= expected and due is not None and due > 20

        async def work() -> None:
            async with inbox.worker(handler, batch=batch) as worker:
                await until(only_it_is_left)
                assert worker.running

        with pytest.warns(RuntimeWarning, match="has no record"):
            await work()
        assert sorted(handler.runs) == sorted(expected)

    async def test_health_says_that_all_is_well(self, lab: Lab) -> None:
        inbox = await lab.inbox()
        assert (await inbox.health()).ok

    async def test_stats_tell_what_is_to_be_done(self, lab: Lab) -> None:
        inbox, handler = await lab.inbox(retry=LATER), Failing(lab, "a1")
        await inbox.accept([at(lab, "a1"), at(lab, "a2"), at(lab, "b1", "z1"), at(lab, "d1"), lab.message("done")])
        with contextlib.suppress(AssertionError):
            await drain(inbox, Failing(lab, "a1", "d1"))
        await inbox.accept(lab.message("new"))
        stats = await inbox.queue_stats()
        assert (stats.pending, stats.lanes) == (5, 4)
        assert (stats.ready, stats.retrying, stats.waiting, stats.blocked) == (1, 2, 1, 0)
        assert stats.oldest_at is not None
        assert stats.next_try_at is not None
        assert handler.runs == []
        one = await lab.inbox(consumer="other", retry=SOON)
        assert (await one.queue_stats()).pending == 0


async def _is_idle(inbox: Any) -> None:
    """Time for a worker to come to rest. Were it too short, a test would be easier, and none would fail."""
    for _ in range(5):
        await asyncio.sleep(0.02)
        await inbox.health()
