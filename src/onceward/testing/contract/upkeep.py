"""Looking at what is there: stats, lists of records, and the events of a sweep."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from onceward import events
from onceward.errors import InboxClosed, Reject, SchemaMissing, UsageError
from onceward.record import State
from onceward.stats import Stats
from onceward.testing.contract.base import Listener, has, needs, unprocessed_states
from onceward.testing.lab import Gate, Lab, Recorder

NOW = timedelta(0)
HOUR = timedelta(hours=1)


class UpkeepContract:
    async def test_stats_count_by_state_and_age(self, lab: Lab) -> None:
        inbox, other = await lab.inbox(), await lab.inbox(consumer="other")
        assert await inbox.stats() == Stats(consumer="billing")
        for name in ("new", "old"):
            await inbox.process(lab.message(name), Recorder(lab))
        for name in ("kept", "kept and old"):
            await inbox.process(lab.message(name), Recorder(lab), retention=timedelta(days=365))
        states = unprocessed_states(lab)
        for state in states:
            await inbox.process(lab.message(state), Recorder(lab, error=Reject("no")))
            await lab.change(state, state=state)
        await other.process(lab.message("old"), Recorder(lab))
        for name in ("old", "kept and old"):
            await lab.make_older(name, days=40)
        oldest = await inbox.get_record(lab.message("old"))
        assert oldest is not None
        stats = await inbox.stats()
        assert stats.oldest is not None
        assert abs(stats.oldest - (oldest.processed_at or stats.oldest)) < timedelta(minutes=1)
        assert stats == Stats(
            consumer="billing", total=4 + len(states), last_day=2 + len(states), last_hour=2 + len(states),
            oldest=stats.oldest, processed=4, queue=stats.queue, **dict.fromkeys(states, 1),
        )  # fmt: skip
        assert (stats.queue.pending, stats.queue.lanes, stats.queue.dead) == (0, 0, 0), "nothing of it was accepted"

    async def test_records_are_listed_by_state_the_oldest_first(self, lab: Lab) -> None:
        inbox = await lab.inbox()
        for name in ("a", "b", "c"):
            await inbox.process(lab.message(name), Recorder(lab))
        await inbox.process(lab.message("kept"), Recorder(lab), retention=timedelta(days=365))
        for name in ("x", "y"):
            await inbox.process(lab.message(name, payload={"name": name}), Recorder(lab, error=Reject("no")))
        await lab.make_older("c", days=2)
        await lab.make_older("kept", days=1)

        async def names(*states: State, **options: Any) -> list[str]:
            return [record.message_id for record in await inbox.records(*states, **options)]

        assert await names() == ["c", "kept", "a", "b", "x", "y"]
        assert await names(limit=3) == ["c", "kept", "a"]
        assert await names(State.DEAD) == ["x", "y"]
        assert await names(State.DEAD, older_than=HOUR) == []
        assert await names(State.PROCESSED, older_than=HOUR) == ["c", "kept"]
        assert await names(State.FAILED, State.RUNNING) == []
        [first, *_] = await inbox.records(State.DEAD)
        assert first.payload == {"name": "x"}
        assert first.last_error == "Reject: no"
        await inbox.replay(first.identity, Recorder(lab))
        assert await names(State.DEAD) == ["y"]

    async def test_what_is_stuck_is_listed(self, lab: Lab) -> None:
        inbox, message = await lab.inbox(), lab.message()
        with pytest.raises(ValueError, match="no"):
            await inbox.process(message, Recorder(lab, error=ValueError("no")))
        stuck: Any = {"older_than": timedelta(minutes=5)}
        assert await inbox.records(State.RUNNING, State.FAILED, **stuck) == []
        await lab.change(received_at=datetime(2020, 1, 1, tzinfo=UTC))
        [record] = await inbox.records(State.RUNNING, State.FAILED, **stuck)
        assert (record.message_id, record.attempts) == (message.id, 1)

    async def test_a_message_that_is_running_is_not_in_the_way_of_looking(self, lab: Lab) -> None:
        inbox, gate = await lab.inbox(), Gate(lab)
        running = asyncio.ensure_future(inbox.process(lab.message(), gate))
        await gate.started.wait()
        seen = [State.RUNNING] if has(lab, "claim_marks") else []
        async with asyncio.timeout(10):
            stats = await inbox.stats()
            assert (stats.total, stats.running) == (len(seen), len(seen))
            assert [record.state for record in await inbox.records()] == seen
            assert await inbox.sweepable() == 0
        gate.go.set()
        await running
        assert (await inbox.stats()).processed == 1

    async def test_how_many_cleanup_would_delete(self, lab: Lab) -> None:
        inbox = await lab.inbox()
        await inbox.process(lab.message("short"), Recorder(lab), retention=timedelta(milliseconds=1))
        await inbox.process(lab.message("long"), Recorder(lab), retention=timedelta(days=1))
        for name in ("old", "new"):
            await inbox.process(lab.message(name), Recorder(lab))
        await lab.make_older("old", days=31)
        await asyncio.sleep(0.05)
        expired = 1 if has(lab, "sweeps_expired") else 0
        assert await inbox.sweepable() == expired + 1
        assert await inbox.sweepable(NOW) == expired + 2
        assert await inbox.cleanup() == expired + 1

    async def test_looking_refuses_what_makes_no_sense(self, lab: Lab) -> None:
        inbox: Any = await lab.inbox()
        with pytest.raises(UsageError, match="is not a state"):
            await inbox.records("lost")
        with pytest.raises(UsageError, match="limit=0"):
            await inbox.records(limit=0)
        with pytest.raises(UsageError, match="older_than="):
            await inbox.records(older_than=5)
        await inbox.close()
        for look in (inbox.stats, inbox.records, inbox.sweepable, inbox.cleanup):
            with pytest.raises(InboxClosed):
                await look()

    async def test_a_sweep_is_told(self, lab: Lab) -> None:
        heard = Listener()
        inbox = await lab.inbox(listeners=[heard])
        for _ in range(3):
            await inbox.process(lab.message(), Recorder(lab))
        heard.clear()
        await inbox.cleanup(NOW, batch=2)
        await inbox.cleanup(NOW)
        assert [(event.consumer, event.deleted) for event in heard] == [("billing", 3), ("billing", 0)]
        assert all(isinstance(event, events.Swept) and event.duration_ms > 0 for event in heard)

    async def test_a_sweep_that_fails_is_told_and_raised(self, lab: Lab) -> None:
        needs(lab, "tables")
        heard = Listener()
        inbox = await lab.inbox(listeners=[heard])
        await lab.query("ALTER TABLE onceward_records RENAME TO elsewhere")
        with pytest.raises(SchemaMissing):
            await inbox.cleanup(NOW)
        [event] = heard
        assert isinstance(event, events.SweepFailed)
        assert isinstance(event.error, SchemaMissing)
        assert (event.consumer, event.deleted) == ("billing", 0)

    async def test_a_cancelled_delivery_is_told(self, lab: Lab) -> None:
        heard, gate = Listener(), Gate(lab)
        inbox = await lab.inbox(listeners=[heard])
        task = asyncio.ensure_future(inbox.process(lab.message(), gate))
        await gate.started.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert heard.names() == ["Cancelled"]
        assert heard[0].duration_ms > 0

    async def test_who_asks_hears_starts_and_ends(self, lab: Lab) -> None:
        class Watcher(Listener):
            hears_starts = True

        watcher, heard, gate = Watcher(), Listener(), Gate(lab)
        inbox = await lab.inbox(listeners=[heard], wait=0.1)
        stop = inbox.subscribe(watcher)
        with pytest.raises(ValueError, match="no"):
            await inbox.process(lab.message(), Recorder(lab, error=ValueError("no")))
        assert watcher.names() == ["Started", "Failed", "Finished"]
        assert heard.names() == ["Failed"]
        assert watcher[1].duration_ms > 0
        running = asyncio.ensure_future(inbox.process(lab.message(), gate))
        await gate.started.wait()
        stop()
        gate.go.set()
        await running
        assert watcher.names()[3:] == ["Started", "Finished"], "who hears the first hears the last"

    async def test_with_nobody_listening_no_event_is_made(self, lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
        def refuse(*_: Any, **__: Any) -> None:
            raise AssertionError("an event was made")

        inbox = await lab.inbox(listeners=[])
        for name in ("Started", "Finished", "of_outcome", "of_error", "Cancelled"):
            monkeypatch.setattr(events, name, refuse)
        message = lab.message()
        for _ in range(2):
            await inbox.process(message, Recorder(lab))
        with pytest.raises(ValueError, match="no"):
            await inbox.process(lab.message(), Recorder(lab, error=ValueError("no")))
