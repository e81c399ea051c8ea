"""Sources without a broker: messages in memory, for tests, and files of JSON lines.

They come to an end, and `consume` ends with them. Neither forgets anything: what was not settled is there the next
time, and what took effect is a duplicate then.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Iterable, Sequence
from datetime import timedelta
from types import TracebackType
from typing import Any, NamedTuple, Self

from onceward.message import Message
from onceward.outcome import Outcome, Verdict
from onceward.store import Finding


class Settled(NamedTuple):
    """What `consume` said about one delivery."""

    id: str
    verdict: Verdict
    delay: float
    outcome: Outcome[Any] | None


class MemoryDelivery:
    def __init__(
        self,
        source: MemorySource,
        message: Message[Any],
        origin: str,
        *,
        partition: str | None = None,
        redelivered: bool = False,
        problem: Exception | None = None,
    ) -> None:
        self._source = source
        self.message = message
        self.origin = origin
        self.partition = partition
        self.redelivered = redelivered
        self.problem = problem

    def begin(self) -> bool:
        return self._source.begun(self)

    def put_back(self) -> None: ...

    async def settle(self, verdict: Verdict, *, delay: float = 0.0, outcome: Outcome[Any] | None = None) -> None:
        self._source.settle(self, Settled(self.message.id, verdict, delay, outcome))


class MemorySource:
    """Messages that are here already, and what is `put` later. `settled` tells what became of them."""

    redelivers = False
    assignment: int | None = 0
    redelivery_horizon: timedelta | None = None

    def __init__(
        self, messages: Iterable[Message[Any]] = (), *, partition: str | None = None, open: bool = False,  # noqa: A002
    ) -> None:  # fmt: skip
        self.name = "memory"
        self.settled: list[Settled] = []
        self._partition = partition
        self._waiting: deque[MemoryDelivery] = deque()
        self._open = open
        self._news = asyncio.Event()
        self._number = 0
        self.put(*messages)

    def put(
        self,
        *messages: Message[Any],
        partition: str | None = None,
        redelivered: bool = False,
        problem: Exception | None = None,
    ) -> None:
        for message in messages:
            self._number += 1
            self._waiting.append(
                MemoryDelivery(
                    self, message, f"memory#{self._number}",
                    partition=partition or self._partition, redelivered=redelivered, problem=problem,
                )
            )  # fmt: skip
        self._news.set()

    def end(self) -> None:
        """There will be no more."""
        self._open = False
        self._news.set()

    @property
    def left(self) -> list[str]:
        """The ids of those that nobody has received, or that were given back."""
        return [delivery.message.id for delivery in self._waiting]

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...

    async def receive(self, most: int) -> Sequence[MemoryDelivery]:
        while not self._waiting and self._open:
            self._news.clear()
            await self._news.wait()
        return [self._waiting.popleft() for _ in range(min(most, len(self._waiting)))]

    def begun(self, _delivery: MemoryDelivery) -> bool:
        return True

    def settle(self, delivery: MemoryDelivery, settled: Settled) -> None:
        if settled.verdict is Verdict.RETRY and not settled.delay:  # given back
            self._waiting.append(delivery)
        else:
            self.settled.append(settled)

    async def flush(self) -> None: ...

    async def check(self) -> list[Finding]:
        return []

    def trouble(self) -> str | None:
        return None
