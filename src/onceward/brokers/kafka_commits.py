"""Commits: tells the broker what is settled, soon after it is, and many at once.

One commit is on its way at a time, and the next one has what was settled meanwhile. One that fails is tried again, as
long as the partition is ours. Where the group has been rebalanced it is forgotten with the partition: the records that
it was about come again, and are duplicates then.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from contextlib import suppress

from onceward.brokers.kafka_partitions import Partition, Partitions

log = logging.getLogger("onceward.kafka")

SOON = 0.1
"""Seconds from settling to the commit."""
LONGEST_PAUSE = 5.0
"""Seconds before a commit that failed is tried again."""


class TooLate(Exception):
    """The group has been rebalanced, and this commit is about partitions that somebody else may have."""


class Commits:
    """`send` tells the broker, and raises TooLate or what else went wrong."""

    def __init__(self, partitions: Partitions, send: Callable[[dict[Partition, int]], Awaitable[None]]) -> None:
        self._partitions = partitions
        self._send = send
        self._task: asyncio.Task[None] | None = None
        self._hurry = asyncio.Event()
        self._said = asyncio.Event()

    def soon(self) -> None:
        """Something was settled."""
        if self._task is None:
            self._task = asyncio.create_task(self._run())

    async def flush(self, seconds: float) -> None:
        """All that is settled by now. It gives up after some time, as the broker may be away."""
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                wanted = self._due()
                while any(one.ours and one.committed < offset for one, offset in wanted.items()):
                    self.soon()
                    self._hurry.set()
                    await self._said.wait()

    async def stop(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def _run(self) -> None:
        pause = SOON
        try:
            while True:
                await self._rest(pause)
                due = self._due()
                if not due:
                    return
                pause = SOON if await self._say(due) else min(max(pause, 0.25) * 2, LONGEST_PAUSE)
        finally:
            self._task = None

    async def _rest(self, seconds: float) -> None:
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._hurry.wait()

    def _due(self) -> dict[Partition, int]:
        return {one: offset for one in self._partitions.all() if (offset := one.committable) is not None}

    async def _say(self, due: dict[Partition, int]) -> bool:
        self._hurry.clear()
        try:
            await self._send(due)
        except TooLate as error:
            log.info("a commit came too late: %s", error)
            return False
        except Exception as error:  # noqa: BLE001 - whatever it is, the records come again if it stays so
            log.warning("offsets could not be committed, it is tried again: %r", error)
            return False
        for partition, offset in due.items():
            partition.committed = max(partition.committed, offset)
        self.wake()
        return True

    def wake(self) -> None:
        """Who waits in `flush` looks again."""
        self._said.set()
        self._said.clear()
