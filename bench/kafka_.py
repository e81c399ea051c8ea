"""Kafka, end to end through PostgreSQL: what does exactly once cost beside a loop that has none, and one by hand?

The loops by hand are aiokafka's: `getmany`, a transaction for each record, then the offset is committed, once for each
poll of up to 500 records. With several partitions each has a task of its own, as with several consumers. onceward has
`concurrency` runners, one partition each, and commits what is settled ten times a second.

The first records of an assignment are marked before they run (`careful=`), each in a transaction of its own; that is
measured by itself, and all others are measured without it.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from itertools import count
from typing import Any

import msgspec
from aiokafka import AIOKafkaConsumer, TopicPartition
from confluent_kafka import Producer

from bench.brokers import BULK, BY_HAND, FLOORS, NO_INBOX, RIDING, Gate, Ground, Row, Take, ground
from bench.questions import Facts, World
from bench.rounds import Stage, Step, Variant, WorkNotDone
from bench.stored import of_lanes
from onceward import Message
from onceward.brokers import confluent
from onceward.brokers import kafka as aio
from tests.services import kafka

QUESTION = "kafka"
POLL = 500
"""Records of one poll, as most clients have it."""
ALWAYS = 10**9

_numbers = count(1)


@contextmanager
def server() -> Iterator[kafka.Broker | None]:
    """None: there is none here. A mock would not say much."""
    given = os.environ.get(kafka.VARIABLE)
    if given or not kafka.can_start():
        yield kafka.Broker(given) if given else None
        return
    with kafka.throwaway(in_memory=True) as started:
        yield started


class Topic:
    """Of one variant. The group that consumes it has the same name."""

    def __init__(self, broker: kafka.Broker, partitions: int) -> None:
        self.name = f"onceward-bench-{os.getpid()}-{next(_numbers)}"
        self.partitions = partitions
        self._broker = broker
        self._producer = Producer({"bootstrap.servers": broker.bootstrap, "log_level": 0})
        broker.create_topic(self.name, partitions)

    async def fill(self, messages: list[Message[Any]]) -> None:
        await asyncio.to_thread(self._fill, messages)

    def _fill(self, messages: list[Message[Any]]) -> None:
        """Each partition gets as many."""
        for number, message in enumerate(messages):
            self._producer.poll(0)
            self._producer.produce(
                self.name,
                msgspec.json.encode(message.payload),
                message.payload["order"],
                partition=number % self.partitions,
                headers={"message_id": message.id, "type": message.type, "source": message.source},
            )
        if left := self._producer.flush(30):
            raise TimeoutError(f"{left} records could not be produced")

    def check(self) -> None:
        """Settled means that the broker knows."""
        ends, committed = self._broker.end_offsets(self.name), self._broker.committed(self.name, self.name)
        if any(end != (committed[partition] or 0) for partition, end in ends.items()):
            raise WorkNotDone(f"{self.name} has {ends}, and {committed} is committed")


# --- by hand ------------------------------------------------------------------------------------------------------


def row_of(record: Any) -> Row:
    payload = msgspec.json.decode(record.value)
    return dict(record.headers)["message_id"].decode(), payload["order"], payload["cents"]


def looping(consumer: AIOKafkaConsumer, topic: Topic) -> Callable[[Take], Step]:
    """A task for each partition: poll, one after another, commit."""

    async def work_off(place: TopicPartition, number: int, take: Take) -> None:
        while number:
            found = await consumer.getmany(place, timeout_ms=1000, max_records=min(POLL, number))
            for record in found.get(place, ()):
                await take(row_of(record))
                number -= 1
            if found:
                await consumer.commit({place: found[place][-1].offset + 1})

    def loop(take: Take) -> Step:
        async def step(messages: list[Message[Any]]) -> int:
            total, parts = len(messages), topic.partitions
            async with asyncio.TaskGroup() as tasks:
                for part in range(parts):
                    number = len(range(part, total, parts))
                    tasks.create_task(work_off(TopicPartition(topic.name, part), number, take))
            return total

        return step

    return loop


@asynccontextmanager
async def consumer_of(topic: Topic, bootstrap: str) -> AsyncIterator[AIOKafkaConsumer]:
    consumer = AIOKafkaConsumer(
        topic.name,
        bootstrap_servers=bootstrap,
        group_id=topic.name,
        enable_auto_commit=False,
        auto_offset_reset="earliest",
    )
    await consumer.start()
    try:
        yield consumer
    finally:
        await consumer.stop()


# --- all of them --------------------------------------------------------------------------------------------------


class Variants:
    """Of one stage, each on a topic of its own."""

    def __init__(self, broker: kafka.Broker, place: Ground, stack: AsyncExitStack) -> None:
        self._broker = broker
        self._place = place
        self._stack = stack
        self.topics: list[Topic] = []

    def _topic(self) -> Topic:
        self.topics.append(Topic(self._broker, partitions=self._place.concurrency))
        return self.topics[-1]

    async def by_hand(self, name: str, *floors: str, about: int) -> Variant:
        topic = self._topic()
        consumer = await self._stack.enter_async_context(consumer_of(topic, self._broker.bootstrap))
        return self._place.by_hand(name, looping(consumer, topic), topic.fill, *floors, about=about)

    async def ours(
        self, name: str, *floors: str, client: Any = aio.KafkaSource, careful: int = 0, **options: Any
    ) -> Variant:
        topic = self._topic()
        source = client(topic.name, group=topic.name, bootstrap=self._broker.bootstrap, careful=careful)
        gate = await self._stack.enter_async_context(Gate(source))
        return self._place.consuming(name, gate, topic.fill, *floors, **options)


async def stages(world: World) -> AsyncGenerator[Stage | Facts, None]:
    with server() as broker:
        if broker is None:
            missing = f"no Kafka here; set {kafka.VARIABLE}, or run `python -m tests.services.kafka ensure`"
            yield Facts(QUESTION, "Kafka", ("not available",), ((missing,),))
            return
        for concurrency in (1, 4):
            async with ground(world.postgres_dsn, concurrency) as place, AsyncExitStack() as stack:
                made = Variants(broker, place, stack)
                yield await _stage(place, made)
                for topic in made.topics:
                    topic.check()


async def _stage(place: Ground, made: Variants) -> Stage:
    partitions = "partition" if place.concurrency == 1 else "partitions"
    many = "onceward, many"
    return Stage(
        question=QUESTION,
        title=f"Kafka to PostgreSQL, {place.concurrency} {partitions}",
        workers=place.concurrency,
        make=of_lanes,
        effects=place.effects,
        server_cpu=place.server_cpu,
        variants=(
            await made.by_hand(NO_INBOX, about=600),
            await made.by_hand(RIDING, NO_INBOX, about=600),
            await made.by_hand(BY_HAND, NO_INBOX, about=400),
            await made.ours("onceward, inline", *FLOORS, RIDING, about=400, batch=1),
            await made.ours("confluent, inline", *FLOORS, client=confluent.KafkaSource, about=400, batch=1),
            await made.ours(many, *FLOORS, about=4000),
            await made.ours("confluent, many", *FLOORS, client=confluent.KafkaSource, about=4000),
            await made.ours("onceward, bulk", *FLOORS, about=8000, **BULK),
            await made.ours("onceward, accept", *FLOORS, about=6000, accept=True),
            await made.ours("onceward, many, careful", *FLOORS, many, about=200, careful=ALWAYS),
        ),
    )
