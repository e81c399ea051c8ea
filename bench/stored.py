"""What the questions about stored mode share: several queues in one database, and what is in them."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from itertools import count
from typing import Any
from uuid import uuid4

import asyncpg
import msgspec

from bench import postgres
from bench.messages import new_messages
from bench.postgres import Watch
from bench.queues import by_hand, onceward_
from bench.queues.base import Kind, Queue, Tally, Work, peers
from bench.rounds import Step, Variant
from onceward import Message, lanes

STREAMS = 100
FULL = 200_000
"""So many messages in a queue are enough."""
_numbers = count(1)


class Yard:
    """All queues in one database, and a connection beside them to see what is in them."""

    def __init__(self, dsn: str, kinds: dict[str, Kind | None], connection: asyncpg.Connection) -> None:
        self.dsn = dsn
        self.kinds = kinds
        self._connection = connection
        self._watch = Watch(connection)
        self.server_cpu = self._watch.server_cpu
        self._known: Counter[str] = Counter()

    async def kept(self) -> int:
        """How many messages were accepted since it was asked last."""
        return sum([await self._more(kind, kind.KEPT) for kind in filter(None, self.kinds.values())])

    async def settled(self) -> int:
        """How many messages were worked on since it was asked last."""
        return sum([await self._more(kind, kind.SETTLED) for kind in filter(None, self.kinds.values())])

    async def effects(self) -> int:
        """How many effects there are since it was asked last."""
        await self.settled()
        return await self._watch.effects()

    async def _more(self, kind: Kind, query: str) -> int:
        """A queue that is emptied has its statements planned again, so that is done now and then only. One that gets
        slower with what is done is emptied each time, in its favour."""
        number: int = await self._connection.fetchval(query)
        more = number - self._known[query]
        self._known[query] = number
        if kind.SLOWS or number > FULL:
            await self._connection.execute(kind.EMPTY)
            self._forget(kind)
        return more

    def _forget(self, kind: Kind) -> None:
        for query in (kind.KEPT, kind.SETTLED):
            self._known[query] = 0

    async def empty(self) -> None:
        for kind in filter(None, self.kinds.values()):
            await self._connection.execute(kind.EMPTY)
            self._forget(kind)


@asynccontextmanager
async def yard(server_dsn: str) -> AsyncIterator[Yard]:
    kinds: dict[str, Kind | None] = {"by hand": by_hand, "onceward": onceward_, **peers()}
    async with postgres.database(server_dsn) as dsn:
        for kind in filter(None, kinds.values()):
            await kind.set_up(dsn)
        connection = await asyncpg.connect(dsn)
        try:
            yield Yard(dsn, kinds, connection)
        finally:
            await connection.close()


def of_streams(number: int) -> list[Message[Any]]:
    """Messages of a hundred orders, each with its place in the stream of its order."""
    return [_in_stream(next(_numbers)) for _ in range(number)]


def _in_stream(number: int) -> Message[Any]:
    stream = number % STREAMS
    return Message(
        id=str(uuid4()),
        type="order.paid",
        payload={"order": f"o-{stream}", "cents": number % 10_000},
        source="shop",
        topic="orders",
        stream=f"order-{stream}",
        position=number // STREAMS + 1,
    )


def of_lanes(number: int) -> list[Message[Any]]:
    """Messages of a hundred orders without a place in a stream: they run as they come. See `by_order`."""
    return [
        msgspec.structs.replace(message, payload={**message.payload, "order": f"o-{index % STREAMS}"})
        for index, message in enumerate(new_messages(number))
    ]


by_order = lanes.field("order")


def dispatching(name: str, queue: Queue, floors: tuple[str, ...] = (), *, write: bool) -> Variant:
    """One message, one transaction, one call."""

    async def work(_message: Message[Any]) -> bool:
        return write

    async def step(messages: list[Message[Any]]) -> int:
        return sum([await queue.dispatch(work) for _ in messages])

    return Variant(name, step, floors, prepare=queue.fill)


Runs = Callable[[Tally, asyncio.Event], Awaitable[None]]


def running(
    name: str,
    queue: Queue,
    floors: tuple[str, ...] = (),
    *,
    write: bool,
    about: int,
    workers: int = 1,
    batch: int | None = None,
    runs: Runs | None = None,
    make: Callable[[int], list[Message[Any]]] | None = None,
) -> Variant:
    """Its own loop, from its start until it has stopped after the last message."""

    async def loop(tally: Tally, stop: asyncio.Event) -> None:
        await queue.run(tally.work, stop, workers=workers, batch=batch)

    async def step(messages: list[Message[Any]]) -> int:
        tally = Tally(len(messages), write=write)
        await until(tally.all_done, (runs or loop), tally)
        return len(messages)

    return Variant(name, step, floors, prepare=queue.fill, whole=True, about=about, make=make)


async def until(event: asyncio.Event, runs: Runs, tally: Tally) -> None:
    stop = asyncio.Event()
    task = asyncio.ensure_future(runs(tally, stop))
    waiting = asyncio.ensure_future(event.wait())
    try:
        await asyncio.wait([task, waiting], return_when=asyncio.FIRST_COMPLETED)
        stop.set()
        await task
    finally:
        waiting.cancel()


def accepting(queue: Queue) -> Step:
    async def step(messages: list[Message[Any]]) -> int:
        (message,) = messages
        await queue.accept(message)
        return 1

    return step


def accepting_many(accept: Callable[[list[Message[Any]]], Awaitable[None]]) -> Step:
    async def step(messages: list[Message[Any]]) -> int:
        await accept(messages)
        return len(messages)

    return step


__all__ = [
    "Work",
    "Yard",
    "accepting",
    "accepting_many",
    "by_order",
    "dispatching",
    "of_lanes",
    "of_streams",
    "running",
    "until",
    "yard",
]
