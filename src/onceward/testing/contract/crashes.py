"""Crashes: worker processes that really die, at every point of a unit of work."""

from __future__ import annotations

import signal
import time

import pytest

from onceward import RetryPolicy, State
from onceward.outcome import Kind
from onceward.testing.lab import Lab, Recorder

KILLED = -signal.SIGKILL
RETRY = RetryPolicy(max_attempts=3, base=0.0)


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
        inbox, handler = await lab.inbox(retry=RETRY), Recorder(lab)
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

    async def test_a_redelivered_message_that_was_processed_is_just_a_duplicate(self, lab: Lab) -> None:
        await lab.child(ids=["m"])
        inbox = await lab.inbox(retry=RETRY)
        assert (await inbox.process(lab.message("m"), Recorder(lab), redelivered=True)).duplicate

    async def test_a_start_mark_is_taken_back_when_the_run_is_interrupted(self, lab: Lab) -> None:
        inbox = await lab.inbox(retry=RetryPolicy(max_attempts=1, base=0.0))
        for _ in range(3):
            with pytest.raises(KeyboardInterrupt):
                await inbox.process(lab.message("m"), Recorder(lab, error=KeyboardInterrupt()), redelivered=True)
        record = await inbox.get_record(lab.message("m"))
        assert record is not None
        assert (record.state, record.started, record.attempts) == (State.FAILED, 0, 0)
        assert (await inbox.process(lab.message("m"), Recorder(lab), redelivered=True)).processed
