"""Retention: old processed records go, in small batches, and nothing else does."""

from __future__ import annotations

import asyncio
from datetime import timedelta

import pytest

from onceward.errors import UsageError
from onceward.testing.contract.base import needs
from onceward.testing.lab import Gate, Lab, Recorder

NOW = timedelta(0)


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
        for state in ("failed", "dead", "discarded", "running", "accepted"):
            await lab.query(f"UPDATE onceward_records SET state = '{state}'")  # noqa: S608
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
        inboxes = [await lab.inbox() for _ in range(4)]
        jobs = [inboxes[0].process(lab.message(), Recorder(lab)) for _ in range(200)]
        await asyncio.gather(*jobs)
        assert sum(await asyncio.gather(*(inbox.cleanup(NOW, batch=7) for inbox in inboxes))) <= 200
        for inbox in inboxes:
            await inbox.cleanup(NOW)
        assert await lab.query("SELECT 1 FROM onceward_records") == []

    async def test_cleanup_refuses_what_makes_no_sense(self, lab: Lab) -> None:
        inbox = await lab.inbox()
        with pytest.raises(UsageError, match="not negative"):
            await inbox.cleanup(timedelta(days=-1))
