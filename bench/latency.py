"""PostgreSQL, stored mode: how long from `accept` until the handler is there, when messages come one by one?

Fifty a second, each at its own time, whatever became of the one before. The clock runs from the call of accept to the
end of the handler. Who accepts has connections of its own, as another process would; once more with both in one inbox,
where a worker need not be called through the database.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import AsyncExitStack
from typing import Any

from bench.messages import new_messages
from bench.questions import Facts, World
from bench.queues.base import MISSING, Queue
from bench.stored import Yard, yard
from onceward import Message

RATE = 50
PATIENCE = 10.0


class Times:
    """When each message was accepted, and when it was handled."""

    def __init__(self, number: int) -> None:
        self._began: dict[str, float] = {}
        self._left = number
        self.taken: list[float] = []
        self.all_done = asyncio.Event()

    def begin(self, message: Message[Any]) -> None:
        self._began[message.id] = time.perf_counter()

    async def work(self, message: Message[Any]) -> bool:
        self.taken.append(time.perf_counter() - self._began[message.id])
        self._left -= 1
        if self._left == 0:
            self.all_done.set()
        return False


async def at_a_rate(
    accept: Callable[[Message[Any]], Awaitable[None]], times: Times, messages: list[Message[Any]]
) -> None:
    """Each at its time, also when the one before it is late."""

    async def one(message: Message[Any], at: float) -> None:
        await asyncio.sleep(max(0.0, at - time.perf_counter()))
        times.begin(message)
        await accept(message)

    start = time.perf_counter() + 0.2
    await asyncio.gather(*(one(message, start + number / RATE) for number, message in enumerate(messages)))


async def measured(accept: Queue, worker: Queue, seconds: float) -> list[float]:
    """Milliseconds, sorted."""
    messages = new_messages(max(1, round(RATE * seconds)))
    times, stop = Times(len(messages)), asyncio.Event()
    running = asyncio.ensure_future(worker.run(times.work, stop))
    await asyncio.sleep(0.2)
    try:
        await at_a_rate(accept.accept, times, messages)
        async with asyncio.timeout(PATIENCE):
            await times.all_done.wait()
    finally:
        stop.set()
        await running
    return sorted(taken * 1000 for taken in times.taken)


def row(name: str, taken: list[float]) -> tuple[str, ...]:
    at = [taken[min(len(taken) - 1, int(len(taken) * part))] for part in (0.5, 0.9, 0.99)]
    return name, *(f"{value:.1f}" for value in (*at, taken[-1])), str(len(taken))


async def rows(place: Yard, seconds: float) -> list[tuple[str, ...]]:
    found: list[tuple[str, ...]] = []
    async with AsyncExitStack() as stack:
        for name, kind in place.kinds.items():
            if name == "by hand":
                continue
            if kind is None:
                found.append((name, *[MISSING] * 5))
                continue
            one = await stack.enter_async_context(kind.opened(place.dsn, 2))
            other = await stack.enter_async_context(kind.opened(place.dsn, 2))
            if name == "onceward":
                found.append(row("onceward, one inbox", await measured(one, one, seconds)))
            found.append(row(kind.NAME, await measured(other, one, seconds)))
            await place.empty()
    return found


async def stages(world: World) -> AsyncGenerator[Facts, None]:
    async with yard(world.postgres_dsn) as place:
        await rows(place, 0.2 * min(1.0, world.lasting))  # warm up
        found = await rows(place, world.lasting)
    yield Facts(
        question="latency",
        title=f"PostgreSQL, from accept to handled, {RATE} messages a second, in milliseconds",
        columns=("queue", "p50", "p90", "p99", "longest", "messages"),
        rows=tuple(found),
        note="ascetic-ddd looks once a second, which is its default; the others are called.",
    )
