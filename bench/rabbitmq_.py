"""RabbitMQ, end to end through PostgreSQL: what does exactly once cost beside a loop that has none, and one by hand?

Quorum queues, and for all variants the same prefetch window: two batches for each that works. The loops by hand are
aio-pika's: what comes is put into a queue of asyncio's, from which one or four tasks take a message, give it a
transaction, and acknowledge it.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from itertools import count
from typing import Any

import aio_pika
import msgspec
from aio_pika.abc import AbstractChannel, AbstractIncomingMessage

from bench.brokers import BATCH, BULK, BY_HAND, FLOORS, NO_INBOX, RIDING, Gate, Ground, Row, Take, ground
from bench.messages import new_messages
from bench.questions import Facts, World
from bench.rounds import Stage, Step, Variant, WorkNotDone, cut
from onceward import Message
from onceward.brokers.rabbitmq import RabbitMQSource
from tests.services import rabbitmq

QUESTION = "rabbitmq"
AT_ONCE = 500
"""Messages that wait for their confirm together, where a queue is filled."""
DEFAULT = 100
"""The prefetch of RabbitMQSource."""

_numbers = count(1)


@contextmanager
def server() -> Iterator[rabbitmq.Broker | None]:
    """None: there is none here."""
    given = os.environ.get(rabbitmq.VARIABLE)
    if given or rabbitmq.scripts() is None:
        yield rabbitmq.Broker(given) if given else None
        return
    with rabbitmq.throwaway(in_memory=True) as started:
        yield started


class Queue:
    """Of one variant."""

    def __init__(self, channel: AbstractChannel) -> None:
        self.name = f"onceward-bench-{os.getpid()}-{next(_numbers)}"
        self._channel = channel

    async def declare(self) -> None:
        await self._channel.declare_queue(self.name, durable=True, arguments={"x-queue-type": "quorum"})

    async def fill(self, messages: list[Message[Any]]) -> None:
        exchange = self._channel.default_exchange
        for part in cut(messages, AT_ONCE):
            await asyncio.gather(*(exchange.publish(_written(message), self.name) for message in part))

    async def end(self) -> None:
        await self._channel.queue_delete(self.name)


def _written(message: Message[Any]) -> aio_pika.Message:
    return aio_pika.Message(
        msgspec.json.encode(message.payload),
        headers={"source": message.source},
        message_id=message.id,
        type=message.type,
        delivery_mode=aio_pika.DeliveryMode.PERSISTENT,
    )


# --- by hand ------------------------------------------------------------------------------------------------------


def row_of(message: AbstractIncomingMessage) -> Row:
    payload = msgspec.json.decode(message.body)
    return message.message_id or "", payload["order"], payload["cents"]


Incoming = asyncio.Queue[AbstractIncomingMessage]


def looping(incoming: Incoming, workers: int) -> Callable[[Take], Step]:
    """Tasks that share what comes: take one, its transaction, acknowledge."""

    async def work_off(places: Iterator[object], take: Take) -> None:
        for _ in places:
            message = await incoming.get()
            await take(row_of(message))
            await message.ack()

    def loop(take: Take) -> Step:
        async def step(messages: list[Message[Any]]) -> int:
            places = iter(messages)
            async with asyncio.TaskGroup() as tasks:
                for _ in range(workers):
                    tasks.create_task(work_off(places, take))
            return len(messages)

        return step

    return loop


@asynccontextmanager
async def consumer_of(queue: Queue, url: str, prefetch: int) -> AsyncIterator[Incoming]:
    incoming: Incoming = asyncio.Queue()
    async with await aio_pika.connect(url) as connection:
        channel = await connection.channel()
        await channel.set_qos(prefetch_count=prefetch)
        await (await channel.get_queue(queue.name)).consume(incoming.put)
        yield incoming


# --- all of them --------------------------------------------------------------------------------------------------


class Variants:
    """Of one stage, each on a queue and a connection of its own."""

    def __init__(self, url: str, channel: AbstractChannel, place: Ground, stack: AsyncExitStack) -> None:
        self._url = url
        self._channel = channel
        self._place = place
        self._stack = stack
        self._prefetch = 2 * BATCH * place.concurrency
        self.queues: list[Queue] = []

    async def _queue(self) -> Queue:
        queue = Queue(self._channel)
        await queue.declare()
        self.queues.append(queue)
        return queue

    async def by_hand(self, name: str, *floors: str, about: int) -> Variant:
        queue = await self._queue()
        incoming = await self._stack.enter_async_context(consumer_of(queue, self._url, self._prefetch))
        return self._place.by_hand(name, looping(incoming, self._place.concurrency), queue.fill, *floors, about=about)

    async def ours(self, name: str, *floors: str, prefetch: int | None = None, **options: Any) -> Variant:
        queue = await self._queue()
        source = RabbitMQSource(queue.name, url=self._url, prefetch=prefetch or self._prefetch)
        gate = await self._stack.enter_async_context(Gate(source))
        return self._place.consuming(name, gate, queue.fill, *floors, **options)


async def stages(world: World) -> AsyncGenerator[Stage | Facts, None]:
    with server() as broker:
        if broker is None:
            missing = f"no RabbitMQ here; set {rabbitmq.VARIABLE}, or run `python -m tests.services.rabbitmq ensure`"
            yield Facts(QUESTION, "RabbitMQ", ("not available",), ((missing,),))
            return
        for concurrency in (1, 4):
            async with ground(world.postgres_dsn, concurrency) as place, await aio_pika.connect(broker.url) as line:
                async with AsyncExitStack() as stack:
                    made = Variants(broker.url, await line.channel(), place, stack)
                    yield await _stage(place, made)
                await _check(broker, made.queues)


async def _check(broker: rabbitmq.Broker, queues: list[Queue]) -> None:
    """Settled means that the broker has forgotten them. Nobody holds any of them now."""
    for queue in queues:
        if left := broker.count(queue.name):
            raise WorkNotDone(f"{left} messages are left in {queue.name}")
        await queue.end()


async def _stage(place: Ground, made: Variants) -> Stage:
    return Stage(
        question=QUESTION,
        title="RabbitMQ to PostgreSQL",
        workers=place.concurrency,
        make=new_messages,
        effects=place.effects,
        server_cpu=place.server_cpu,
        variants=(
            await made.by_hand(NO_INBOX, about=600),
            await made.by_hand(RIDING, NO_INBOX, about=600),
            await made.by_hand(BY_HAND, NO_INBOX, about=400),
            await made.ours("onceward, inline", *FLOORS, RIDING, about=400, batch=1),
            await made.ours("onceward, many", *FLOORS, about=2500),
            await made.ours(f"onceward, prefetch={DEFAULT}", *FLOORS, "onceward, many", about=2500, prefetch=DEFAULT),
            await made.ours("onceward, bulk", *FLOORS, about=4000, **BULK),
            await made.ours("onceward, accept", *FLOORS, about=3000, accept=True),
        ),
    )
