"""Crashes: worker processes that really die, at every point of a unit of work."""

from __future__ import annotations

import asyncio
import signal
import time
from collections import Counter
from typing import Any

import pytest

from onceward import Inbox, Message, RetryPolicy, State, TryLater
from onceward.errors import HandlerEndedTransaction, StoreUnavailable
from onceward.outcome import Kind
from onceward.testing.contract.base import counts_nothing, cut_off, has, needs
from onceward.testing.lab import Lab, Recorder
from onceward.testing.proxy import Proxy

KILLED = -signal.SIGKILL
RETRY = RetryPolicy(max_attempts=3, base=0.0)


async def marks_taken_back(inbox: Inbox[Any]) -> None:
    """Until the server has noticed that a connection is lost, its mark cannot be taken back; then it is done later."""
    later = list(inbox._settler._marks_left)
    if later:
        await asyncio.wait(later)


class CrashContract:
    @pytest.mark.parametrize("point", ["before claim", "after claim", "handler", "effect", "before commit"])
    async def test_a_crash_before_commit_leaves_nothing_and_redelivery_runs_it(self, lab: Lab, point: str) -> None:
        code, reports = await lab.child(ids=["m"], kill_at=point)
        assert (code, reports) == (KILLED, [])
        died = time.monotonic()
        outcome = await (await lab.inbox()).process(lab.message("m"), Recorder(lab))
        assert outcome.processed
        assert time.monotonic() - died < 5, "nothing waits for the dead"
        assert await lab.effects() == ["m"]

    async def test_a_crash_between_commit_and_ack_makes_the_redelivery_a_duplicate(self, lab: Lab) -> None:
        code, reports = await lab.child(ids=["m"], kill_at="after commit")
        assert (code, reports) == (KILLED, [])
        handler = Recorder(lab)
        outcome = await (await lab.inbox()).process(lab.message("m"), handler)
        assert outcome.duplicate
        assert outcome.result == {"charged": "m"}
        assert handler.runs == []
        assert await lab.effects() == ["m"]

    async def test_a_message_that_kills_its_process_ends_as_a_dead_letter(self, lab: Lab) -> None:
        for _ in range(3):
            code, _reports = await lab.child(ids=["m"], kill_at="handler", redelivered=True, max_attempts=3)
            assert code == KILLED
        inbox, handler = await lab.inbox(retry=RETRY, wait=0.2), Recorder(lab)
        with pytest.raises(TryLater, match="another runner"):  # the last one may just be slow to claim it
            await inbox.process(lab.message("m"), handler, redelivered=True)
        await lab.change(next_try_at=None)  # half a minute later
        outcome = await inbox.process(lab.message("m"), handler, redelivered=True)
        assert outcome.kind is Kind.DEAD
        assert "died 3 times" in str(outcome.error)
        assert handler.runs == []
        record = await inbox.get_record(lab.message("m"))
        assert record is not None
        assert (record.state, record.started, record.attempts, record.payload) == (State.DEAD, 3, 0, {"amount": 7})

    async def test_crashes_and_errors_are_counted_together(self, lab: Lab) -> None:
        code, _reports = await lab.child(ids=["m"], kill_at="effect", redelivered=True, max_attempts=3)
        assert code == KILLED
        inbox, handler = await lab.inbox(retry=RETRY), Recorder(lab, error=ValueError("no"))
        with pytest.raises(ValueError, match="no"):
            await inbox.process(lab.message("m"), handler, redelivered=True)
        outcome = await inbox.process(lab.message("m"), handler, redelivered=True)
        assert outcome.kind is Kind.DEAD
        record = await inbox.get_record(lab.message("m"))
        assert record is not None
        assert (record.started, record.attempts) == (1, 2)
        assert await lab.effects() == []

    async def test_a_message_survives_a_crash_of_its_neighbour(self, lab: Lab) -> None:
        await lab.child(ids=["m"], kill_at="handler", redelivered=True, max_attempts=3)
        inbox = await lab.inbox(retry=RETRY)
        outcome = await inbox.process(lab.message("m"), Recorder(lab), redelivered=True)
        assert outcome.processed
        record = await inbox.get_record(lab.message("m"))
        assert record is not None
        assert (record.state, record.started, record.attempts) == (State.PROCESSED, 1, 1)
        assert await lab.effects() == ["m"]

    async def test_a_crash_of_the_first_delivery_is_counted_where_a_claim_is_a_mark(self, lab: Lab) -> None:
        code, _reports = await lab.child(ids=["m"], kill_at="handler", max_attempts=3)
        assert code == KILLED
        inbox = await lab.inbox(retry=RETRY)
        assert (await inbox.process(lab.message("m"), Recorder(lab))).processed
        record = await inbox.get_record(lab.message("m"))
        assert record is not None
        assert (record.started, record.attempts) == (1 if has(lab, "claim_marks") else 0, 1)
        assert await lab.effects() == ["m"]

    async def test_a_redelivered_message_that_was_processed_is_just_a_duplicate(self, lab: Lab) -> None:
        await lab.child(ids=["m"])
        inbox = await lab.inbox(retry=RETRY)
        assert (await inbox.process(lab.message("m"), Recorder(lab), redelivered=True)).duplicate

    @pytest.mark.parametrize("point", ["before mark", "after mark", "before claim", "after claim", "before commit"])
    async def test_a_cancellation_after_the_mark_is_not_a_crash(self, lab: Lab, point: str) -> None:
        if point.endswith("mark") and has(lab, "claim_marks"):
            pytest.skip(f"{type(lab).__name__} makes no mark before its claim")

        async def reached(at: str) -> None:
            if at == point:
                task.cancel()

        message = lab.message()
        inbox = await lab.inbox(reached=reached, retry=RetryPolicy(max_attempts=1, base=0.0))
        task = asyncio.ensure_future(inbox.process(message, Recorder(lab), redelivered=True))
        with pytest.raises(asyncio.CancelledError):
            await task
        record = await inbox.get_record(message)
        assert record is None or record.started == 0
        again = await (await lab.inbox(retry=RETRY)).process(message, Recorder(lab), redelivered=True)
        assert again.kind in (Kind.PROCESSED, Kind.DUPLICATE)
        assert await lab.effects() == [message.id]

    async def test_twins_do_not_take_each_other_for_crashes(self, lab: Lab) -> None:
        ids = [f"{number:02}" for number in range(20)]
        jobs = [lab.child(ids=ids, redelivered=True, max_attempts=2, concurrency=4) for _ in range(3)]
        reports = await asyncio.gather(*jobs)
        kinds = Counter(line["kind"] for _, lines in reports for line in lines)
        assert kinds == {"processed": 20, "duplicate": 40}
        assert await lab.effects() == ids
        assert {record["started"] for record in await lab.kept()} == {0}

    async def test_a_lost_connection_is_not_a_crash(self, lab: Lab) -> None:
        needs(lab, "network")
        proxy = Proxy(*lab.address)
        async with proxy.running():
            inbox, message = await lab.inbox(store=lab.store_behind(proxy.port), retry=RETRY), lab.message()

            async def unlucky(message: Message[Any], tx: Any) -> None:
                proxy.cut()
                await lab.write(tx, message.id)

            known = None
            for _ in range(4):
                ended = await cut_off(lab, inbox.process(message, unlucky, redelivered=True), StoreUnavailable)
                known = known or ended
            await marks_taken_back(inbox)
            record = await inbox.get_record(message)
            assert record is not None or has(lab, "claim_marks")
            assert record is None or (record.started, record.attempts) == (0, 1 if known else 0)
            outcome = await inbox.process(message, Recorder(lab), redelivered=True)
            assert outcome.kind is (Kind.DUPLICATE if known else Kind.PROCESSED)
            assert await lab.effects() == [message.id]
            await inbox.close()

    async def test_a_handler_that_ends_a_marked_transaction_leaves_no_strange_count(self, lab: Lab) -> None:
        needs(lab, "transactional")

        async def meddling(message: Message[Any], tx: Any) -> None:
            await lab.run(tx, "COMMIT")

        inbox, message = await lab.inbox(retry=RETRY), lab.message()
        with pytest.raises(HandlerEndedTransaction):
            await inbox.process(message, meddling, redelivered=True)
        record = await inbox.get_record(message)
        assert record is not None
        assert (record.state, record.started) == (State.DEAD, 0)

    async def test_a_start_mark_is_taken_back_when_the_run_is_interrupted(self, lab: Lab) -> None:
        inbox = await lab.inbox(retry=RetryPolicy(max_attempts=1, base=0.0))
        for _ in range(3):
            with pytest.raises(KeyboardInterrupt):
                await inbox.process(lab.message("m"), Recorder(lab, error=KeyboardInterrupt()), redelivered=True)
            record = await inbox.get_record(lab.message("m"))
            if has(lab, "claim_marks"):
                assert counts_nothing(lab, record)
                continue
            assert record is not None
            assert (record.state, record.started, record.attempts) == (State.FAILED, 0, 0)
        assert (await inbox.process(lab.message("m"), Recorder(lab), redelivered=True)).processed
