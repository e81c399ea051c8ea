"""DeadTopic: dead letters go to a topic, too, and only then their offset counts as settled.

They are produced in their order, some at a time. What fails is tried again, as long as the partition is ours; if this
process ends before that, its next owner gets the record and produces it. So none is lost, and one may be there twice.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from itertools import islice
from typing import Any, NamedTuple

from onceward.brokers.kafka_delivery import KafkaDelivery

log = logging.getLogger("onceward.kafka")

PREFIX = "onceward_"
AT_ONCE = 100
LONGEST_ERROR = 2000
"""Characters of an error that are kept."""
FIRST_PAUSE, LONGEST_PAUSE = 0.5, 30.0
"""Seconds before what could not be produced is tried again."""


class Letter(NamedTuple):
    """What is produced."""

    key: bytes | None
    value: bytes | None
    headers: list[tuple[str, Any]]


class DeadTopic:
    """`produce` sends letters with acks=all, and says of each what went wrong, or None."""

    def __init__(
        self, topic: str, group: str, produce: Callable[[list[Letter]], Awaitable[Sequence[Exception | None]]]
    ) -> None:
        self._topic = topic
        self._group = group
        self._produce = produce
        self._waiting: deque[tuple[KafkaDelivery, Letter]] = deque()
        self._task: asyncio.Task[None] | None = None

    def send(self, delivery: KafkaDelivery, error: BaseException | None) -> None:
        """Soon. The delivery is closed when the topic has it."""
        self._waiting.append((delivery, self._letter(delivery, error)))
        if self._task is None:
            self._task = asyncio.create_task(self._run())

    async def flush(self, seconds: float) -> None:
        """All that there is by now. It gives up after some time, as the broker may be away."""
        if self._task is not None:
            with suppress(TimeoutError):
                async with asyncio.timeout(seconds):
                    await asyncio.shield(self._task)

    async def stop(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        for delivery, _letter in self._waiting:
            delivery.put_back()
        self._waiting.clear()

    def _letter(self, delivery: KafkaDelivery, error: BaseException | None) -> Letter:
        """The record as it was, and why it is here. What an earlier death has said is left away."""
        record = delivery.record
        why = "" if error is None else f"{type(error).__name__}: {error}"
        told = {"error": why[:LONGEST_ERROR], "origin": delivery.origin, "group": self._group}
        headers = [(name, value) for name, value in record.headers if not name.startswith(PREFIX)]
        headers += [(f"{PREFIX}{name}", text.encode("utf-8", "replace")) for name, text in told.items()]
        return Letter(record.key, record.value, headers)

    async def _run(self) -> None:
        pause = FIRST_PAUSE
        try:
            while self._waiting:
                error = await self._produce_some()
                if error is None:
                    pause = FIRST_PAUSE
                    continue
                log.error("dead letters cannot be produced to %s, it is tried again: %r", self._topic, error)
                await asyncio.sleep(pause)
                pause = min(pause * 2, LONGEST_PAUSE)
        finally:
            self._task = None

    async def _produce_some(self) -> Exception | None:
        """What could not be produced stays, in its order. The first error is told."""
        some = list(islice(self._waiting, AT_ONCE))
        wrongs = await self._tried([letter for _delivery, letter in some])
        failed: list[tuple[KafkaDelivery, Letter]] = []
        for pair, wrong in zip(some, wrongs, strict=True):
            self._waiting.popleft()
            if wrong is None:
                pair[0].close()
            elif pair[0].where.gone:  # its next owner produces it
                pair[0].put_back()
            else:
                failed.append(pair)
        self._waiting.extendleft(reversed(failed))
        return next((wrong for wrong in wrongs if wrong is not None), None)

    async def _tried(self, letters: list[Letter]) -> Sequence[Exception | None]:
        try:
            return await self._produce(letters)
        except Exception as error:  # noqa: BLE001 - whatever it is, they are tried again
            return [error] * len(letters)
