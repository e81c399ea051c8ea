"""The stored inbox in the hands of people: wrong options, stray cancellations, closing, nesting, what is told."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import AsyncIterator
from datetime import timedelta
from typing import Any

import pytest

import onceward.stored
from onceward import (
    HandlerCancelled,
    Inbox,
    InboxClosed,
    InvalidHandler,
    InvalidMessage,
    Kind,
    Message,
    NestedProcess,
    State,
    UsageError,
    events,
)
from onceward.testing import AiosqliteLab, Lab, SqliteLab
from onceward.testing.contract.base import LATER, SOON, Longest
from onceward.testing.contract.queue.base import at, drain, record_of, until
from onceward.testing.lab import Gate, Recorder


class Stored:
    # --- cancellations that nobody asked for ----------------------------------------------------------------

    @pytest.mark.parametrize("how", ["plain", "leased", "bulk"])
    async def test_a_stray_cancellation_is_a_failed_attempt_and_ends_no_worker(self, lab: Lab, how: str) -> None:
        inbox, ran = await lab.inbox(retry=SOON), []

        async def work(message: Message[Any]) -> None:
            ran.append(message.id)
            if message.id == "bad":
                broken = asyncio.get_running_loop().create_future()
                broken.cancel()
                await broken

        async def bulk(messages: list[Message[Any]]) -> None:
            for message in messages:
                await work(message)

        inbox.handler("order.paid", lease=30 if how == "leased" else None)(work)
        await inbox.accept([lab.message("bad"), lab.message("good")])
        async with inbox.worker(bulk=bulk if how == "bulk" else None) as worker:

            async def settled() -> bool:
                states = [(await record_of(inbox, lab.message(id_))).state for id_ in ("bad", "good")]
                return states == [State.DEAD, State.PROCESSED]

            await until(settled)
            assert worker.running
        record = await record_of(inbox, lab.message("bad"))
        assert (record.attempts, record.errors[-1].type) == (3, HandlerCancelled.__name__)

    # --- closing --------------------------------------------------------------------------------------------

    async def test_workers_of_an_inbox_that_is_closed_end(self, lab: Lab) -> None:
        inbox = Inbox(lab.store(), consumer="billing")
        other = Inbox(inbox.store, consumer="other")  # the store stays open
        await inbox.open()
        await other.open()

        async def loop() -> None:
            async for _work in inbox.works(poll_interval=3600):
                pass

        running = [asyncio.ensure_future(inbox.run(poll_interval=3600, concurrency=2)), asyncio.ensure_future(loop())]
        await asyncio.sleep(0.1)
        await inbox.close()
        for task in running:
            with pytest.raises(InboxClosed, match="was closed"):
                await asyncio.wait_for(task, 5)
        await inbox.open()
        handler = Recorder(lab)
        async with inbox.worker(handler):
            await inbox.accept(lab.message("m"))
            await until(lambda: _true(handler.runs == ["m"]))
        await inbox.close()
        await other.close()

    # --- adopting -------------------------------------------------------------------------------------------

    @pytest.mark.parametrize("how", ["plain", "leased", "bulk"])
    async def test_what_was_seen_before_does_not_run(self, lab: Lab, how: str) -> None:
        ran: list[str] = []

        async def seen_before(_tx: Any, message: Message[Any]) -> bool:
            return message.id.startswith("old")

        async def work(message: Message[Any]) -> None:
            ran.append(message.id)

        async def bulk(messages: list[Message[Any]]) -> list[str]:
            ran.extend(message.id for message in messages)
            return [message.id for message in messages]

        inbox = await lab.inbox(seen_before=seen_before)
        inbox.handler("order.paid", lease=30 if how == "leased" else None)(work)
        await inbox.accept([lab.message(id_) for id_ in ("old-1", "new-1", "old-2", "new-2")])
        told: list[tuple[str, str]] = []
        inbox.subscribe(lambda event: told.append((type(event).__name__, getattr(event, "message_id", ""))))
        async with inbox.worker(bulk=bulk if how == "bulk" else None):
            await until(lambda: _true(len(told) == 4))
        assert sorted(ran) == ["new-1", "new-2"]
        assert sorted(told) == [
            ("Duplicate", "old-1"), ("Duplicate", "old-2"), ("Processed", "new-1"), ("Processed", "new-2"),
        ]  # fmt: skip
        assert (await record_of(inbox, lab.message("old-1"))).state is State.PROCESSED

    # --- leases ---------------------------------------------------------------------------------------------

    async def test_a_leased_handler_outside_of_the_queue_is_told_what_to_do(self, lab: Lab) -> None:
        inbox = await lab.inbox()

        @inbox.handler("order.paid", lease=30)
        async def on_paid(message: Message[Any], lease: Any) -> str:
            async with lease.complete() as tx:
                await lab.write(tx, message.id)
            return message.id

        with pytest.raises(UsageError, match="accept the message"):
            await inbox.process(lab.message("inline"))
        await inbox.accept(lab.message("m"))
        assert (await inbox.process(lab.message("m"))).kind is Kind.ACCEPTED
        assert [one.result for one in await drain(inbox, on_paid)] == ["m"], "the registered one, given again"
        assert (await inbox.process(lab.message("m"))).result == "m"
        with pytest.raises(InvalidHandler, match="lease="):
            inbox.handler("order.sent")(on_paid)

    async def test_a_timeout_of_the_handlers_own_is_not_taken_for_ours(self, lab: Lab) -> None:
        inbox = await lab.inbox(retry=LATER)

        @inbox.handler("order.paid", lease=30, timeout=30)
        async def on_paid(message: Message[Any]) -> None:
            raise TimeoutError("the bank does not answer")

        await inbox.accept(lab.message("m"))
        (outcome,) = await drain(inbox)
        assert type(outcome.error) is TimeoutError

    @pytest.mark.parametrize("end", ["fails", "is told to stop"])
    async def test_the_mark_of_a_leased_handler_is_no_crash(self, lab: Lab, end: str) -> None:
        """Its last worker died, so it is marked before it starts."""
        twice = Longest(max_attempts=2, base=600.0, cap=600.0)
        inbox, started, during = await lab.inbox(retry=twice), asyncio.Event(), list[int]()

        @inbox.handler("order.paid", lease=30)
        async def on_paid(message: Message[Any]) -> None:
            during.append((await record_of(inbox, message)).started)
            started.set()
            if end == "fails":
                raise ValueError("no")
            await asyncio.Event().wait()

        await inbox.accept(lab.message("m"))
        await lab.query("UPDATE onceward_lanes SET claims = 1, owner = 'died'")
        task = asyncio.ensure_future(inbox.dispatch())
        await asyncio.wait_for(started.wait(), 10)
        if end == "fails":
            outcome = await task
            assert outcome is not None
            assert outcome.kind is Kind.FAILED, "it is the first attempt of two"
        else:
            task.cancel()
            await asyncio.wait([task])
        assert (during, (await record_of(inbox, lab.message("m"))).started) == ([1], 0)

    async def test_a_worker_in_a_long_leased_handler_is_healthy(
        self, lab: Lab, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        inbox, gate = await lab.inbox(), asyncio.Event()
        monkeypatch.setattr(onceward.stored, "STUCK", 0.05)
        started = asyncio.Event()

        @inbox.handler("order.paid", lease=30)
        async def on_paid(message: Message[Any]) -> None:
            started.set()
            await gate.wait()

        await inbox.accept(lab.message())
        async with inbox.worker():
            await asyncio.wait_for(started.wait(), 10)
            await asyncio.sleep(0.2)
            health = await inbox.health()
            gate.set()
        assert health.idle_for is not None
        assert health.idle_for > 0.05
        assert health.ok

    # --- what is told ---------------------------------------------------------------------------------------

    async def test_what_is_done_is_told_before_a_long_handler_ends(self, lab: Lab) -> None:
        inbox, started, told = await lab.inbox(), asyncio.Event(), Counter[str]()

        @inbox.handler("slow", lease=30)
        async def slow(message: Message[Any]) -> None:
            started.set()
            await asyncio.Event().wait()

        inbox.subscribe(lambda event: told.update([f"{type(event).__name__} {getattr(event, 'type', '')}"]))
        inbox.handler("order.paid")(Recorder(lab))
        await inbox.accept([*(lab.message() for _ in range(40)), lab.message(type="slow")])
        running = asyncio.ensure_future(inbox.run(grace=0))
        await asyncio.wait_for(started.wait(), 10)
        done = await lab.query("SELECT count(*) FROM onceward_records WHERE state = 'processed'")
        assert told["Processed order.paid"] == done[0][0]
        running.cancel()
        await asyncio.wait([running])
        assert told["Processed order.paid"] == done[0][0]

    # --- lanes and keys -------------------------------------------------------------------------------------

    @pytest.mark.parametrize(
        ("gives", "text"),
        [(5, "returned int"), ("a\0", "NUL"), ("\ud800", "surrogate"), ("x" * 9000, "9000 bytes")],
    )
    async def test_a_lane_that_cannot_be_kept_refuses_its_message_alone(self, lab: Lab, gives: Any, text: str) -> None:
        told: list[events.Event] = []
        inbox = await lab.inbox(lane=lambda message: gives if message.id == "bad" else "lane", listeners=[told.append])
        with pytest.raises(InvalidMessage, match=text):
            await inbox.accept(lab.message("bad"))
        assert [type(event) for event in told] == [events.Refused]
        outcomes = await inbox.accept([lab.message("bad"), lab.message("good")])
        assert [outcome.kind for outcome in outcomes] == [Kind.FAILED, Kind.ACCEPTED]

    @pytest.mark.parametrize("strategy", ["lane", "key", "tenant"])
    async def test_a_strategy_that_raises_refuses_its_message_alone(self, lab: Lab, strategy: str) -> None:
        def pick(message: Message[Any]) -> str:
            return str({"good": "x"}[message.id])

        options: dict[str, Any] = {strategy: pick}
        inbox = await lab.inbox(**options)
        outcomes = await inbox.accept([lab.message("bad"), lab.message("good")])
        assert [outcome.kind for outcome in outcomes] == [Kind.FAILED, Kind.ACCEPTED]
        assert isinstance(outcomes[0].error, KeyError)
        with pytest.raises(KeyError):
            await inbox.accept(lab.message("bad"))

    # --- inside of a handler --------------------------------------------------------------------------------

    async def test_an_inbox_inside_of_its_own_handler_says_what_to_do(self, lab: Lab) -> None:
        inbox = await lab.inbox()

        async def inside(message: Message[Any], tx: Any) -> None:
            if message.id != "first":
                return
            with pytest.raises(NestedProcess, match="tx=tx"):
                await inbox.accept(lab.message("next"))
            with pytest.raises(NestedProcess):
                await inbox.dispatch(inside)
            assert (await inbox.accept(lab.message("next"), tx=tx)).kind is Kind.ACCEPTED

        await inbox.accept(lab.message("first"))
        assert [outcome.kind for outcome in await drain(inbox, inside)] == [Kind.PROCESSED] * 2

    async def test_the_same_holds_in_the_block_of_the_iterator(self, lab: Lab) -> None:
        inbox = await lab.inbox()
        await inbox.accept(lab.message("first"))
        async for work in inbox:
            async with work as (_message, tx):
                began = time.monotonic()
                with pytest.raises(NestedProcess, match="tx=tx"):
                    await inbox.accept(lab.message("next"))
                assert time.monotonic() - began < 2
                assert (await inbox.accept(lab.message("next"), tx=tx)).kind is Kind.ACCEPTED
                assert onceward.current().identity == inbox.identity_of(lab.message("first"))
            break
        with pytest.raises(UsageError):
            onceward.current()
        assert (await inbox.accept(lab.message("after"))).kind is Kind.ACCEPTED
        assert len(await drain(inbox, Recorder(lab))) == 2

    async def test_a_generator_around_the_block_may_be_ended_by_another_task(self, lab: Lab) -> None:
        inbox = await lab.inbox()
        await inbox.accept(lab.message("m"))

        async def messages() -> AsyncIterator[Message[Any]]:
            async for work in inbox:
                async with work as (message, _tx):
                    yield message

        generator: Any = messages()
        assert (await asyncio.create_task(anext(generator))).id == "m"
        await asyncio.create_task(generator.aclose())
        assert [outcome.kind for outcome in await drain(inbox, Recorder(lab))] == [Kind.PROCESSED]

    async def test_looking_does_not_wait_for_a_handler(self, lab: Lab) -> None:
        inbox, gate = await lab.inbox(wait=0.2), Gate(lab)
        await inbox.accept([lab.message(), at(lab, "a1")])
        async with inbox.worker(gate, batch=1):
            await asyncio.wait_for(gate.started.wait(), 10)
            health, stats = await inbox.health(), await inbox.queue_stats()
            gate.go.set()
        assert health.ok
        assert stats.pending == 2

    # --- wrong options --------------------------------------------------------------------------------------

    @pytest.mark.parametrize(
        "options",
        [
            {"dependency_timeout": 5}, {"dependency_timeout": timedelta.max}, {"freeze_after": "x"},
            {"freeze_after": 0}, {"first_position": -1}, {"lane": "customer"}, {"retry": 3},
        ],
    )  # fmt: skip
    def test_a_wrong_option_of_the_inbox_is_found_when_it_is_made(self, lab: Lab, options: Any) -> None:
        (name,) = options
        with pytest.raises(UsageError, match=name):
            Inbox(lab.store(), consumer="billing", **options)

    @pytest.mark.parametrize(
        "options",
        [
            {"concurrency": "2"}, {"concurrency": 1.5}, {"concurrency": 0}, {"batch": 2.5}, {"grace": None},
            {"grace": -1}, {"poll_interval": 0}, {"poll_interval": float("nan")},
        ],
    )  # fmt: skip
    async def test_a_wrong_option_of_a_worker_is_found_when_it_starts(self, lab: Lab, options: Any) -> None:
        inbox, (name,) = await lab.inbox(), options
        with pytest.raises(UsageError, match=name):
            await inbox.run(**options)

    @pytest.mark.parametrize(
        "options",
        [
            {"concurrency": 1.5}, {"concurrency": "2"}, {"timeout": "5"}, {"timeout": timedelta(seconds=5)},
            {"lease": timedelta(seconds=5)}, {"lease": float("inf")}, {"retry": 3},
        ],
    )  # fmt: skip
    def test_a_wrong_option_of_a_handler_is_found_when_it_is_registered(self, lab: Lab, options: Any) -> None:
        inbox, (name,) = Inbox(lab.store(), consumer="billing"), options
        with pytest.raises(UsageError, match=name):
            inbox.handler("order.paid", **options)(Recorder(lab))

    async def test_a_time_that_no_calendar_has_is_refused(self, lab: Lab) -> None:
        with pytest.raises(UsageError, match="not_before"):
            await (await lab.inbox()).accept(lab.message(), not_before=timedelta.max)


async def _true(value: bool) -> bool:
    return value


class TestSqlite(Stored):
    @pytest.fixture
    def lab(self, sqlite_lab: SqliteLab) -> Lab:
        return sqlite_lab


class TestAiosqlite(Stored):
    @pytest.fixture
    def lab(self, aiosqlite_lab: AiosqliteLab) -> Lab:
        return aiosqlite_lab
