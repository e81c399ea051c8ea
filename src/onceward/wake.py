"""Waking workers: somebody has accepted a message, in this process or in another one."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress

from onceward.errors import OncewardError

PATIENCE = 5.0
"""Seconds that closing an inbox waits for a call that is on its way."""


class Bell:
    """Rung when there may be something to do. Each worker has an ear of its own, so that none misses it."""

    def __init__(self) -> None:
        self._ears: set[asyncio.Event] = set()

    def ear(self) -> asyncio.Event:
        ear = asyncio.Event()
        self._ears.add(ear)
        return ear

    def forget(self, ear: asyncio.Event) -> None:
        self._ears.discard(ear)

    def ring(self) -> None:
        for ear in self._ears:
            ear.set()


class Herald:
    """Tells other processes, after the commit: as often as needed, and never twice at the same time.

    To be told is a courtesy. Who is not told looks by itself after its poll interval.
    """

    def __init__(self, tell: Callable[[], Awaitable[None]]) -> None:
        self._tell = tell
        self._again = False
        self._task: asyncio.Task[None] | None = None

    def call(self) -> None:
        self._again = True
        if self._task is None or self._task.done():
            self._task = asyncio.ensure_future(self._run())

    async def _run(self) -> None:
        while self._again:
            self._again = False
            with suppress(OncewardError):
                await self._tell()

    async def close(self) -> None:
        """A call that hangs must not outlive the inbox."""
        if self._task is not None:
            await asyncio.wait([self._task], timeout=PATIENCE)
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
