"""Retention: old processed records go, in small batches, and nothing else does."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from datetime import timedelta
from typing import Any

import pytest

from onceward.errors import Reject, UsageError
from onceward.handlers import Router
from onceward.identity import Identity
from onceward.testing.contract.base import has, needs, unprocessed_states
from onceward.testing.lab import Gate, Lab, Recorder

NOW = timedelta(0)
MOMENT = timedelta(milliseconds=1)


class RetentionContract:
    async def test_cleanup_removes_what_was_processed_and_is_old(self, lab: Lab) -> None:
        inbox, other = await lab.inbox(cache=0), await lab.inbox(consumer="other")
        for number in range(25):
            await inbox.process(lab.message(f"{number:02}"), Recorder(lab))
        await other.process(lab.message("theirs"), Recorder(lab))
        assert await inbox.cleanup() == 0, "nothing is thirty days old"
        assert await inbox.cleanup(NOW, batch=10) == 25
        assert await inbox.get_record(lab.message("00")) is None
        assert await other.get_record(lab.message("theirs")) is not None, "another consumer keeps its own"
        assert (await inbox.process(lab.message("00"), Recorder(lab))).processed, "without its record it is new"

    async def test_cleanup_by_age_uses_the_databases_clock(self, lab: Lab) -> None:
        inbox = await lab.inbox()
        for name in ("old", "young"):
            await inbox.process(lab.message(name), Recorder(lab))
        await lab.make_older("old", days=31)
        assert await inbox.cleanup() == 1
        assert await inbox.get_record(lab.message("old")) is None
        assert await inbox.get_record(lab.message("young")) is not None

    async def test_cleanup_never_touches_what_is_not_processed(self, lab: Lab) -> None:
        inbox, message = await lab.inbox(), lab.message()
        with pytest.raises(ValueError, match="no"):
            await inbox.process(message, Recorder(lab, error=ValueError("no")))
        await lab.make_older(message.id, days=400)
        for state in unprocessed_states(lab):
            await lab.change(state=state)
            assert await inbox.cleanup(NOW) == 0

    async def test_cleanup_does_not_wait_for_handlers_nor_they_for_it(self, lab: Lab) -> None:
        needs(lab, "concurrent_units")
        inbox, gate = await lab.inbox(), Gate(lab)
        await inbox.process(lab.message("done"), Recorder(lab))
        running = asyncio.ensure_future(inbox.process(lab.message("running"), gate))
        await gate.started.wait()
        assert await asyncio.wait_for(inbox.cleanup(NOW), 5) == 1
        gate.go.set()
        assert (await running).processed

    async def test_many_sweepers_delete_each_record_once(self, lab: Lab) -> None:
        inboxes = [await lab.inbox(wait=60) for _ in range(4)]
        jobs = [inboxes[0].process(lab.message(), Recorder(lab)) for _ in range(60)]
        await asyncio.gather(*jobs)
        assert sum(await asyncio.gather(*(inbox.cleanup(NOW, batch=7) for inbox in inboxes))) <= 60
        for inbox in inboxes:
            await inbox.cleanup(NOW)
        assert await lab.kept() == []

    async def test_one_sweeper_at_a_time(self, lab: Lab) -> None:
        needs(lab, "transactional")
        needs(lab, "concurrent_units")
        one, two = await lab.inbox(), await lab.inbox()
        for _ in range(3):
            await one.process(lab.message(), Recorder(lab))
        await lab.slow_deletes()
        sweeping = asyncio.ensure_future(one.cleanup(NOW, batch=1))
        await lab.deleting()
        assert await two.cleanup(NOW, batch=1) == 0
        assert not sweeping.done(), "the second one did not wait for the first"
        assert await sweeping == 3

    async def test_a_delivery_of_what_is_just_being_deleted_does_not_wait(self, lab: Lab) -> None:
        needs(lab, "transactional")
        needs(lab, "concurrent_units")
        inbox = await lab.inbox(cache=0)
        await inbox.process(lab.message("old"), Recorder(lab))
        await lab.slow_deletes()
        sweeping = asyncio.ensure_future(inbox.cleanup(NOW))
        await lab.deleting()
        assert (await inbox.process(lab.message("old"), Recorder(lab))).duplicate
        assert not sweeping.done()
        assert await sweeping == 1
        assert (await inbox.process(lab.message("old"), Recorder(lab))).processed

    async def test_a_record_that_a_delivery_has_in_its_hands_is_left_for_the_next_sweep(self, lab: Lab) -> None:
        needs(lab, "transactional")
        needs(lab, "concurrent_units")
        inbox, gate = await lab.inbox(cache=0), Gate(lab)
        for name in ("one", "two"):
            await inbox.process(lab.message(name), Recorder(lab))
        # A delivery that asks something of the record and is not done yet.
        async with inbox.store.unit() as unit:
            record = await inbox.get_record(lab.message("one"))
            assert record is not None
            assert await unit.claim(record) is not None
            assert await inbox.cleanup(NOW, batch=1) == 1, "a batch that deletes nothing is not the last one"
        assert await inbox.get_record(lab.message("one")) is not None
        assert await inbox.cleanup(NOW) == 1
        assert gate.runs == []

    async def test_cleanup_refuses_what_makes_no_sense(self, lab: Lab) -> None:
        inbox: Any = await lab.inbox()
        with pytest.raises(UsageError, match="not negative"):
            await inbox.cleanup(timedelta(days=-1))
        with pytest.raises(UsageError, match="timedelta"):
            await inbox.cleanup(30)
        for batch in (0, 1_000_000):
            with pytest.raises(UsageError, match="a batch is from"):
                await inbox.cleanup(batch=batch)

    async def test_progress_is_told_how_many_are_gone_so_far(self, lab: Lab) -> None:
        inbox, told = await lab.inbox(), list[int]()
        for _ in range(25):
            await inbox.process(lab.message(), Recorder(lab))
        assert await inbox.cleanup(NOW, batch=10, progress=told.append) == 25
        assert told[-1] == 25
        assert told == sorted(told)
        if has(lab, "tables"):  # a scan gives some more or fewer at a time
            assert told == [10, 20, 25], "a batch is as large as it may be"

    async def test_a_record_with_a_time_of_its_own_goes_before_the_others(self, lab: Lab) -> None:
        inbox = await lab.inbox(cache=0)
        await inbox.process(lab.message("short"), Recorder(lab), retention=MOMENT)
        await inbox.process(lab.message("usual"), Recorder(lab))
        await asyncio.sleep(0.05)
        assert await inbox.cleanup() == (1 if has(lab, "sweeps_expired") else 0)
        assert await inbox.get_record(lab.message("short")) is None
        assert await inbox.get_record(lab.message("usual")) is not None
        assert (await inbox.process(lab.message("short"), Recorder(lab))).processed

    async def test_a_record_with_a_time_of_its_own_outlives_the_others(self, lab: Lab) -> None:
        inbox = await lab.inbox(cache=0)
        await inbox.process(lab.message("long"), Recorder(lab), retention=timedelta(days=365))
        await inbox.process(lab.message("usual"), Recorder(lab))
        for name in ("long", "usual"):
            await lab.make_older(name, days=31)
        assert await inbox.cleanup() == 1
        assert await inbox.cleanup(NOW) == 0
        assert await inbox.get_record(lab.message("usual")) is None
        assert (await inbox.process(lab.message("long"), Recorder(lab))).duplicate

    async def test_a_time_of_its_own_counts_from_when_it_was_processed_by_the_databases_clock(self, lab: Lab) -> None:
        inbox, message = await lab.inbox(), lab.message()
        with pytest.raises(ValueError, match="no"):
            await inbox.process(message, Recorder(lab, error=ValueError("no")), retention=timedelta(days=9))
        failed = await inbox.get_record(message)
        assert failed is not None
        assert failed.expires_at is None, "what is not processed does not expire"
        await inbox.process(message, Recorder(lab), retention=timedelta(days=7, milliseconds=250))
        record = await inbox.get_record(message)
        assert record is not None
        assert record.processed_at is not None
        assert record.expires_at is not None
        assert record.expires_at - record.processed_at == timedelta(days=7, milliseconds=250)

    async def test_the_last_run_says_how_long_a_record_is_kept(self, lab: Lab) -> None:
        inbox, message = await lab.inbox(), lab.message()
        await inbox.process(message, lambda _: (_ for _ in ()).throw(Reject("no")), retention=timedelta(days=1))
        await inbox.replay(message, Recorder(lab))
        record = await inbox.get_record(message)
        assert record is not None
        assert record.expires_at is None

    async def test_retention_by_handler_and_function(self, lab: Lab) -> None:
        router = Router()
        router.handler("order.paid", retention=timedelta(days=1))(Recorder(lab))
        inbox = await lab.inbox(handlers=[router])
        inbox.handler("order.shipped", retention=timedelta(days=2))(Recorder(lab))

        @inbox.idempotent(key="order", name="refund", retention=timedelta(days=3))
        async def refund(order: str) -> None: ...

        await inbox.process(lab.message("by router"))
        await inbox.process(lab.message("by inbox", type="order.shipped"))
        await inbox.process(lab.message("given"), Recorder(lab))
        await inbox.process(lab.message("by call"), retention=timedelta(days=4))
        await inbox.process_many([lab.message("in a batch"), lab.message("another")], Recorder(lab))
        await inbox.process_bulk([lab.message("in bulk"), lab.message("yet another")], lambda _messages: None)
        await refund("o-1")
        kept = {}
        for consumer_key in ("by router", "by inbox", "given", "by call", "in a batch", "in bulk"):
            record = await inbox.get_record(lab.message(consumer_key))
            assert record is not None
            assert record.processed_at is not None
            assert record.expires_at is not None
            kept[consumer_key] = (record.expires_at - record.processed_at).days
        assert kept == {"by router": 1, "by inbox": 2, "given": 1, "by call": 4, "in a batch": 1, "in bulk": 1}
        record = await inbox.get_record(Identity("billing", "default", "name:refund", '"o-1"'))
        assert record is not None
        assert record.processed_at is not None
        assert record.expires_at == record.processed_at + timedelta(days=3)

    async def test_what_is_not_processed_does_not_expire(self, lab: Lab) -> None:
        inbox, messages = await lab.inbox(cache=0), [lab.message("failed"), lab.message("dead")]
        for message, error in zip(messages, (ValueError("no"), Reject("no")), strict=True):
            with suppress(ValueError):
                await inbox.process(message, Recorder(lab, error=error), retention=MOMENT)
        await asyncio.sleep(0.05)
        assert await inbox.cleanup(NOW) == 0
        assert sorted(record.message_id for record in await inbox.records()) == ["dead", "failed"]
        assert (await inbox.process(messages[0], Recorder(lab), retention=MOMENT)).processed
        await asyncio.sleep(0.05)
        await inbox.cleanup()
        assert [record.message_id for record in await inbox.records()] == ["dead"]

    async def test_what_expired_and_is_not_processed_is_never_touched(self, lab: Lab) -> None:
        needs(lab, "sweeps_expired")
        inbox, message = await lab.inbox(), lab.message()
        await inbox.process(message, Recorder(lab), retention=MOMENT)
        await asyncio.sleep(0.05)
        for state in unprocessed_states(lab):
            await lab.change(state=state)
            assert await inbox.cleanup(NOW) == 0
        await lab.change(state="processed")
        assert await inbox.cleanup() == 1

    @pytest.mark.parametrize("retention", [timedelta(0), timedelta(days=-1), timedelta(days=400_000), 30])
    async def test_a_retention_that_makes_no_sense_is_refused(self, lab: Lab, retention: Any) -> None:
        inbox = await lab.inbox()
        with pytest.raises(UsageError, match="retention="):
            await inbox.process(lab.message(), Recorder(lab), retention=retention)
        with pytest.raises(UsageError, match="retention="):
            inbox.handler("x", retention=retention)(Recorder(lab))
        with pytest.raises(UsageError, match="retention="):
            await lab.inbox(retention=retention)
        assert await lab.effects() == []

    async def test_a_database_of_version_two_is_upgraded(self, lab: Lab) -> None:
        needs(lab, "tables")
        inbox = await lab.inbox()
        await inbox.process(lab.message("before"), Recorder(lab))
        await inbox.close()
        await lab.back_to(2)
        await lab.store().setup()
        [[token]] = await lab.query("SELECT token FROM onceward_schema WHERE version = 1")
        assert len(token) >= 32
        await lab.store().setup()
        assert await lab.query("SELECT token FROM onceward_schema WHERE version = 1") == [(token,)], "it stays"
        inbox = await lab.inbox(cache=0)
        assert (await inbox.process(lab.message("before"), Recorder(lab))).duplicate
        await inbox.process(lab.message("after"), Recorder(lab), retention=timedelta(days=1))
        assert await inbox.cleanup(NOW) == 1
