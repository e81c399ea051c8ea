"""Races: real concurrent transactions, in one process and in several."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from typing import Any

import pytest

from onceward import Message, TryLater, Verdict
from onceward.outcome import Kind, verdict_of
from onceward.testing.contract.base import needs
from onceward.testing.lab import Gate, Lab, Recorder


class RacingContract:
    async def test_a_message_in_flight_elsewhere_is_not_run_and_not_acknowledged(self, lab: Lab) -> None:
        gate, handler, message = Gate(lab), Recorder(lab), lab.message()
        one, two = await lab.inbox(), await lab.inbox(wait=0.2)
        first = asyncio.ensure_future(one.process(message, gate))
        await gate.started.wait()
        second = asyncio.ensure_future(two.process(message, handler))
        finished, _ = await asyncio.wait([second], timeout=5)
        assert finished, "the wait is bounded"
        error = second.exception()
        gate.go.set()
        assert (await first).processed
        assert isinstance(error, TryLater), "neither a duplicate nor new: it must come again"
        assert error.reason == ("in_flight" if one.store.features.concurrent_units else "store_busy")
        assert verdict_of(error) is Verdict.RETRY
        assert handler.runs == []
        assert (await two.process(message, handler)).duplicate
        assert await lab.effects() == [message.id]

    async def test_a_twin_elsewhere_is_waited_for(self, lab: Lab) -> None:
        gate, handler, message = Gate(lab), Recorder(lab), lab.message()
        one, two = await lab.inbox(), await lab.inbox(wait=20)
        first = asyncio.ensure_future(one.process(message, gate))
        await gate.started.wait()
        second = asyncio.ensure_future(two.process(message, handler))
        await asyncio.wait([second], timeout=0.1)
        assert not second.done()
        gate.go.set()
        assert (await first).processed
        outcome = await second
        assert outcome.duplicate
        assert outcome.result == {"charged": message.id}
        assert handler.runs == []

    async def test_twins_in_one_process_run_once(self, lab: Lab) -> None:
        inbox, handler, message = await lab.inbox(), Recorder(lab), lab.message()
        outcomes = await asyncio.gather(*(inbox.process(message, handler) for _ in range(50)))
        assert Counter(outcome.kind for outcome in outcomes) == {Kind.PROCESSED: 1, Kind.DUPLICATE: 49}
        assert {outcome.result["charged"] for outcome in outcomes if outcome.result} == {message.id}
        assert handler.runs == [message.id]

    async def test_waiting_for_a_twin_in_this_process_is_bounded(self, lab: Lab) -> None:
        inbox, gate, message = await lab.inbox(wait=0.2), Gate(lab), lab.message()
        first = asyncio.ensure_future(inbox.process(message, gate))
        await gate.started.wait()
        with pytest.raises(TryLater, match="another runner") as caught:
            await inbox.process(message, Recorder(lab))
        assert caught.value.reason == "in_flight"
        gate.go.set()
        assert (await first).processed

    async def test_a_twin_takes_over_when_the_first_one_fails(self, lab: Lab) -> None:
        inbox, message = await lab.inbox(), lab.message()
        failing = asyncio.ensure_future(inbox.process(message, Recorder(lab, error=ValueError("no"))))
        working = asyncio.ensure_future(inbox.process(message, Recorder(lab)))
        await asyncio.wait([failing, working])
        assert isinstance(failing.exception(), ValueError)
        assert working.result().processed
        assert await lab.effects() == [message.id]

    async def test_waiting_for_a_twin_holds_no_connection(self, lab: Lab) -> None:
        needs(lab, "concurrent_units")
        gate, message = Gate(lab), lab.message()
        one, two = await lab.inbox(), await lab.inbox(store=lab.store(max_size=1), wait=20)
        first = asyncio.ensure_future(one.process(message, gate))
        await gate.started.wait()
        waiting = [asyncio.ensure_future(two.process(message, Recorder(lab))) for _ in range(5)]
        others = asyncio.gather(*(two.process(lab.message(), Recorder(lab)) for _ in range(20)))
        await asyncio.wait([others], timeout=5)
        assert others.done(), "the one connection of the pool is free while five wait"
        assert all(outcome.processed for outcome in await others)
        assert not any(task.done() for task in waiting)
        gate.go.set()
        assert (await first).processed
        assert all(outcome.duplicate for outcome in await asyncio.gather(*waiting))

    async def test_pairs_that_start_together_run_once(self, lab: Lab) -> None:
        """The race of check-then-act: two instances, a hundred messages, each pair let go at the same moment."""
        one, two, handler = await lab.inbox(wait=20, cache=0), await lab.inbox(wait=20, cache=0), Recorder(lab)
        for number in range(100):
            message = lab.message(f"{number:03}")
            pair = await asyncio.gather(one.process(message, handler), two.process(message, handler))
            assert sorted(outcome.kind for outcome in pair) == [Kind.DUPLICATE, Kind.PROCESSED]
        assert Counter(handler.runs) == Counter(f"{number:03}" for number in range(100))
        assert await lab.effects() == [f"{number:03}" for number in range(100)]

    async def test_many_processes_run_each_message_once(self, lab: Lab) -> None:
        ids = [f"{number:03}" for number in range(60)]
        orders = [ids, ids[::-1], ids[30:] + ids[:30]]
        jobs = [lab.child(ids=order, concurrency=8) for order in orders]
        reports = await asyncio.gather(*jobs)
        assert [code for code, _ in reports] == [0, 0, 0]
        kinds = Counter(line["kind"] for _, lines in reports for line in lines)
        assert kinds == {"processed": 60, "duplicate": 120}
        assert await lab.effects() == ids

    async def test_setting_up_is_safe_with_many_instances_starting_at_once(self, lab: Lab) -> None:
        needs(lab, "tables")
        await lab.back_to(0)
        await asyncio.gather(*(lab.store().setup() for _ in range(8)))
        assert (await (await lab.inbox()).process(lab.message(), Recorder(lab))).processed

    async def test_everything_is_given_back(self, lab: Lab) -> None:
        """After errors, cancellations and refusals nothing is held: not a turn, a lock, a connection or a task."""
        before = asyncio.all_tasks()
        inbox = await lab.inbox(wait=0.2)
        gates = [Gate(lab) for _ in range(3)]
        tasks = [asyncio.ensure_future(inbox.process(lab.message(), gate)) for gate in gates]
        await gates[0].started.wait()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for error in (ValueError("no"), TryLater(1), KeyboardInterrupt()):
            with pytest.raises(type(error)):
                await inbox.process(lab.message(), Recorder(lab, error=error))
        await lab.take_all()
        started = time.monotonic()
        await inbox.close()
        assert time.monotonic() - started < 5
        assert asyncio.all_tasks() == before

    async def test_closing_lets_the_message_in_flight_end(self, lab: Lab) -> None:
        inbox, gate = await lab.inbox(), Gate(lab)
        job = asyncio.ensure_future(inbox.process(lab.message("m"), gate))
        await gate.started.wait()
        closing = asyncio.ensure_future(inbox.close())
        await asyncio.sleep(0)
        gate.go.set()
        await asyncio.wait([job, closing], timeout=5)
        assert job.done()
        assert closing.done()
        assert job.result().processed
        assert await lab.effects() == ["m"]

    async def test_a_loop_of_many_messages_in_one_task_stays_flat(self, lab: Lab) -> None:
        """What one message leaves behind in its task, a consumer loop has a million times."""
        inbox = await lab.inbox()
        for number in range(1500):
            assert (await inbox.process(lab.message(f"{number}"), lambda message: None)).processed

    async def test_a_close_that_is_cancelled_can_be_followed_by_an_open(self, lab: Lab) -> None:
        inbox, gate = await lab.inbox(), Gate(lab)
        job = asyncio.ensure_future(inbox.process(lab.message("m"), gate))
        await gate.started.wait()
        closing = asyncio.ensure_future(inbox.close())
        await asyncio.sleep(0)
        closing.cancel()
        gate.go.set()
        await asyncio.gather(job, closing, return_exceptions=True)
        await inbox.open()
        assert (await inbox.process(lab.message(), Recorder(lab))).processed

    async def test_opening_twice_at_once_opens_once(self, lab: Lab) -> None:
        inbox = await lab.inbox()
        await inbox.close()
        await asyncio.gather(*(inbox.open() for _ in range(5)))
        assert (await inbox.process(lab.message(), Recorder(lab))).processed
        await inbox.close()
        assert inbox.store._users == 0  # type: ignore[attr-defined]

    async def test_an_inbox_shares_its_store(self, lab: Lab) -> None:
        store = lab.store()
        one, two = await lab.inbox(store=store, consumer="billing"), await lab.inbox(store=store, consumer="shipping")
        message = lab.message()
        assert (await one.process(message, Recorder(lab))).processed
        await one.close()
        assert (await two.process(message, Recorder(lab))).processed
        await one.open()
        assert (await one.process(message, Recorder(lab))).duplicate

    async def test_a_handler_that_leaves_a_task_behind_cannot_write_with_it(self, lab: Lab) -> None:
        late: list[asyncio.Task[Any]] = []
        go = asyncio.Event()

        async def leaving(message: Message[Any], tx: Any) -> None:
            async def write_late() -> None:
                await go.wait()
                await lab.write(tx, "late")

            late.append(asyncio.ensure_future(write_late()))

        inbox = await lab.inbox()
        await inbox.process(lab.message(), leaving)
        go.set()
        (error,) = await asyncio.gather(*late, return_exceptions=True)
        assert "over" in str(error) or "permanently closed" in str(error)
        assert await lab.effects() == []
