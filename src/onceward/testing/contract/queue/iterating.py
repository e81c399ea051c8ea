"""The iterator: `async for work in inbox`, `async with work as (message, tx)`. Leaving the block says what happens."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from onceward import Kind, RetryPolicy, State
from onceward.testing.contract.base import LATER
from onceward.testing.contract.queue.base import at, drain, record_of
from onceward.testing.lab import Lab, Recorder

ONCE = RetryPolicy(max_attempts=1, base=0.0)


class IterateContract:
    async def test_a_message_is_processed_when_its_block_ends(self, lab: Lab) -> None:
        inbox, got = await lab.inbox(), []
        await inbox.accept([at(lab, "a2"), at(lab, "a1")])
        async for work in inbox:
            async with work as (message, tx):
                got.append(message.id)
                await lab.write(tx, message.id)
            record = await record_of(inbox, message)
            assert (record.state, record.attempts) == (State.PROCESSED, 1)
            if len(got) == 2:
                break
        assert got == ["a1", "a2"]
        assert await lab.effects() == ["a1", "a2"]
        assert await drain(inbox, Recorder(lab)) == []

    async def test_a_break_in_the_block_rolls_back_before_the_next_line(self, lab: Lab) -> None:
        inbox, got = await lab.inbox(retry=ONCE), []
        await inbox.accept([at(lab, "a1"), at(lab, "a2")])
        async for work in inbox:
            async with work as (message, tx):
                got.append(message.id)
                await lab.write(tx, message.id)
                if message.id == "a2":
                    break
        # The next line: nothing is held, and nothing is left for later.
        assert got == ["a1", "a2"]
        assert await lab.effects() == ["a1"], "the one before it counts"
        record = await record_of(inbox, at(lab, "a2"))
        assert (record.state, record.attempts, record.started) == (State.ACCEPTED, 0, 0)
        assert [outcome.kind for outcome in await drain(await lab.inbox(), Recorder(lab))] == [Kind.PROCESSED]
        assert await lab.effects() == ["a1", "a2"]

    async def test_a_break_before_the_block_gives_the_message_back(self, lab: Lab) -> None:
        inbox = await lab.inbox(retry=ONCE)
        await inbox.accept(lab.message("m"))
        async for _work in inbox:
            break
        works: Any = inbox.works()
        await anext(aiter(works))
        await works.aclose()
        record = await record_of(inbox, lab.message("m"))
        assert (record.state, record.attempts, record.started) == (State.ACCEPTED, 0, 0)
        assert [outcome.kind for outcome in await drain(await lab.inbox(), Recorder(lab))] == [Kind.PROCESSED]

    async def test_an_error_in_the_block_is_a_failed_attempt_and_is_raised_on(self, lab: Lab) -> None:
        inbox, error = await lab.inbox(retry=LATER), ValueError("card refused")
        await inbox.accept([at(lab, "a1"), at(lab, "a2")])
        with pytest.raises(ValueError, match="card refused") as caught:
            async for work in inbox:
                async with work as (message, tx):
                    await lab.write(tx, message.id)
                    raise error
        assert caught.value is error
        assert await lab.effects() == []
        record = await record_of(inbox, at(lab, "a1"))
        assert (record.state, record.attempts, record.errors[0].text) == (State.FAILED, 1, "card refused")
        handler = Recorder(lab)
        assert await drain(await lab.inbox(), handler) == [], "its lane is parked"
        await lab.let_time_pass()
        await drain(inbox, handler)
        assert handler.runs == ["a1", "a2"]

    async def test_an_error_that_is_caught_lets_the_loop_go_on(self, lab: Lab) -> None:
        inbox, got = await lab.inbox(retry=LATER), []
        await inbox.accept([at(lab, "a1"), at(lab, "b1"), at(lab, "c1")])
        async for work in inbox:
            try:
                async with work as (message, tx):
                    got.append(message.id)
                    await lab.write(tx, message.id)
                    if len(got) == 2:
                        raise ValueError("no")
            except ValueError:
                continue
            if len(got) == 3:
                break
        assert sorted(got) == ["a1", "b1", "c1"]
        assert await lab.effects() == sorted(got[:1] + got[2:])

    async def test_a_cancellation_in_the_block_counts_nothing(self, lab: Lab) -> None:
        inbox, inside = await lab.inbox(retry=ONCE), asyncio.Event()
        await inbox.accept(lab.message("m"))

        async def loop() -> None:
            async for work in inbox:
                async with work as (message, tx):
                    await lab.write(tx, message.id)
                    inside.set()
                    await asyncio.Event().wait()

        task = asyncio.ensure_future(loop())
        await inside.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert await lab.effects() == []
        record = await record_of(inbox, lab.message("m"))
        assert (record.state, record.attempts, record.started) == (State.ACCEPTED, 0, 0)
        assert [outcome.kind for outcome in await drain(await lab.inbox(), Recorder(lab))] == [Kind.PROCESSED]

    async def test_the_iterator_waits_for_work_and_ends_when_it_is_told(self, lab: Lab) -> None:
        inbox, stop, got = await lab.inbox(), asyncio.Event(), []

        async def loop() -> None:
            async for work in inbox.works(stop=stop):
                async with work as (message, tx):
                    await lab.write(tx, message.id)
                got.append(message.id)
                inside.set()

        inside = asyncio.Event()
        task = asyncio.ensure_future(loop())
        for number in (1, 2):
            inside.clear()
            await inbox.accept(lab.message(str(number)))
            await asyncio.wait_for(inside.wait(), 20)
        assert not task.done()
        stop.set()
        await asyncio.wait_for(task, 20)
        assert got == ["1", "2"]
        assert await lab.effects() == ["1", "2"]

    async def test_an_iterator_may_have_a_share(self, lab: Lab) -> None:
        inbox, got = await lab.inbox(), dict[int, list[str]]()
        await inbox.accept([lab.message(str(number), stream=str(number)) for number in range(12)])
        for number in (0, 1):
            stop, mine = asyncio.Event(), Recorder(lab)
            wanted = [row[0] for row in await lab.query(f"SELECT name FROM onceward_lanes WHERE share % 2 = {number}")]  # noqa: S608
            async for work in inbox.works(stop=stop, share=(number, 2)):
                async with work as (message, tx):
                    await mine(message, tx)
                if len(mine.runs) == len(wanted):
                    stop.set()
            got[number] = mine.runs
        assert sorted(got[0] + got[1], key=int) == [str(number) for number in range(12)]

    async def test_two_iterators_share_the_work(self, lab: Lab) -> None:
        one, two, stop, got = await lab.inbox(), await lab.inbox(), asyncio.Event(), list[str]()
        await one.accept([lab.message(f"{number:02}", stream=str(number % 3)) for number in range(12)])

        async def loop(inbox: Any) -> None:
            async for work in inbox.works(stop=stop):
                async with work as (message, tx):
                    await lab.write(tx, message.id)
                got.append(message.id)
                if len(got) == 12:
                    stop.set()

        await asyncio.wait_for(asyncio.gather(loop(one), loop(two)), 30)
        assert sorted(got) == await lab.effects() == [f"{number:02}" for number in range(12)]
