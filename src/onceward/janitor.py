"""Janitor: `cleanup` again and again, in the background.

    async with inbox, Janitor(inbox, at="03:30", tz="Europe/Berlin"):
        ...

Every instance of a service may have one: while one of them sweeps, the others leave it to that. A sweep that fails is
told as an event, `SweepFailed`, and the next one comes in its time.
"""

from __future__ import annotations

import asyncio
import random
from contextlib import suppress
from datetime import datetime, time, timedelta, tzinfo
from typing import Any, Self

from onceward.errors import UsageError
from onceward.inbox import Inbox
from onceward.retention import check_age
from onceward.schedule import schedule_of
from onceward.upkeep import check_batch

LOOK = timedelta(minutes=15)
"""How long at most the janitor sleeps without a look at the database's clock."""

PATIENCE = timedelta(minutes=1)
"""Before another try, when not even the time could be asked."""


class Janitor:
    """Cleans up after an inbox: `every=` so often (by default each hour), or `at=` a time of day in `tz=`.

    `older_than` and `batch` are those of `Inbox.cleanup`. `jitter` is the most that is added to a time by chance, so
    that many instances do not start together: by default a tenth of `every`, or five minutes.
    """

    def __init__(
        self,
        inbox: Inbox[Any],
        *,
        every: timedelta | None = None,
        at: str | time | None = None,
        tz: str | tzinfo = "UTC",
        older_than: timedelta | None = None,
        batch: int = 1000,
        jitter: timedelta | None = None,
    ) -> None:
        self._inbox = inbox
        self._schedule = schedule_of(every, at, tz, jitter)
        self._older_than = None if older_than is None else check_age(older_than)
        self._batch = check_batch(batch)
        self._stop = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        if self._task is not None:
            raise UsageError("this Janitor is at work already")
        self._stop = asyncio.Event()
        self._task = asyncio.create_task(self.run(self._stop), name=f"onceward janitor of {self._inbox.consumer}")
        return self

    async def __aexit__(self, *_error: object) -> None:
        task, self._task = self._task, None
        self._stop.set()
        if task is not None:
            await task

    async def run(self, stop: asyncio.Event | None = None) -> None:
        """In the foreground, until `stop` is set or this is cancelled: at once, a sweep ends with its batch."""
        working = asyncio.ensure_future(self._work())
        stopping = asyncio.ensure_future((stop or asyncio.Event()).wait())
        try:
            await asyncio.wait((working, stopping), return_when=asyncio.FIRST_COMPLETED)
        finally:
            stopping.cancel()
            working.cancel()
            await asyncio.wait((working, stopping))
        if not working.cancelled():
            working.result()  # it never ends by itself, unless there is a mistake in it

    async def _work(self) -> None:
        first = True
        while True:
            await self._until_due(first=first)
            first = False
            with suppress(Exception):  # it was told as an event
                await self._inbox.cleanup(self._older_than, batch=self._batch)

    async def _until_due(self, *, first: bool) -> None:
        chance = random.random()  # noqa: S311 - jitter
        due: datetime | None = None
        while True:
            try:
                now = await self._inbox._upkeep().now()  # noqa: SLF001 - not for users
            except Exception:  # noqa: BLE001 - away, which was told as an event, or closed: it may come back
                await asyncio.sleep(PATIENCE.total_seconds())
                continue
            due = due or self._schedule.due(now, chance, first=first)
            if now >= due:
                return
            await asyncio.sleep(min(due - now, LOOK).total_seconds())
