"""FastStream on a real Kafka: the example app with its kills, and what nack, refuse and hold come to there."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Annotated, Any
from uuid import uuid4

import pytest
from aiokafka import AIOKafkaConsumer, AIOKafkaProducer, TopicPartition
from faststream import AckPolicy, Depends
from faststream.kafka import KafkaBroker, KafkaResponse

from onceward import Inbox, RetryPolicy, TryLater
from onceward.integrations.faststream import InboxMiddleware, inbox_tx
from onceward.record import State
from onceward.sqlite import SqliteStore
from onceward.testing.waiting import until
from tests.faststream_child import POINTS
from tests.faststream_service import Service
from tests.faststream_tools import Order
from tests.services.kafka import Broker

pytestmark = pytest.mark.xdist_group("kafka")

Tx = Annotated[Any, Depends(inbox_tx)]
PATIENCE = 60.0


@pytest.fixture
def service(ready_dsn: str, kafka_server: Broker, tmp_path: Path) -> Service:
    found = Service(ready_dsn, f"kafka://{kafka_server.bootstrap}", tmp_path / "log")
    kafka_server.create_topic(found.orders)
    kafka_server.create_topic(found.receipts)
    return found


async def send(server: Broker, topic: str, messages: Iterable[tuple[str | None, bytes]], **headers: bytes) -> None:
    producer = AIOKafkaProducer(bootstrap_servers=server.bootstrap)
    await producer.start()
    try:
        for id_, body in messages:
            named = [] if id_ is None else [("message_id", id_.encode())]
            await producer.send_and_wait(topic, body, headers=[*named, *headers.items()])
    finally:
        await producer.stop()


async def records_of(server: Broker, topic: str) -> list[Any]:
    """All that is in the topic now."""
    ends = server.end_offsets(topic)
    consumer = AIOKafkaConsumer(bootstrap_servers=server.bootstrap, auto_offset_reset="earliest")
    await consumer.start()
    found: list[Any] = []
    try:
        consumer.assign([TopicPartition(topic, partition) for partition in ends])
        async with asyncio.timeout(PATIENCE):
            while len(found) < sum(ends.values()):
                found.append(await consumer.getone())
    finally:
        await consumer.stop()
    return found


def is_read(server: Broker, group: str, topic: str) -> bool:
    """All that is in the topic is committed."""
    return all(server.committed(group, topic)[at] == end for at, end in server.end_offsets(topic).items() if end)


async def until_read(server: Broker, service: Service) -> None:
    await until(lambda: is_read(server, service.name, service.orders), within=PATIENCE)


# --- the example --------------------------------------------------------------------------------------------

ORDERS = [(f"m-{n}", b'{"id":"o-%d","cents":%d}' % (n, n + 1)) for n in range(10)]
TWICE = [message for message in ORDERS for _ in range(2)]


async def test_the_example_bills_each_order_once(service: Service, kafka_server: Broker) -> None:
    await send(kafka_server, service.orders, [*TWICE, ("bad", b'{"id":"o-bad","cents":-5}'), ("late", ORDERS[0][1])])
    async with service.running():
        await until_read(kafka_server, service)
    assert await service.charged() == [*(f"o-{n}" for n in range(10)), "o-0"]
    assert await service.states() == {**{id_: "processed" for id_, _ in [*ORDERS, ("late", b"")]}, "bad": "dead"}
    receipts = await records_of(kafka_server, service.receipts)
    assert len(receipts) == 21
    for first, second in zip(receipts[0:20:2], receipts[1:20:2], strict=True):
        told = [dict(one.headers) for one in (first, second)]
        assert first.value == second.value
        assert told[0]["message_id"] == told[1]["message_id"]
        assert told[0]["content-type"] == told[1]["content-type"] == b"application/json"


@pytest.mark.parametrize("point", POINTS)
async def test_a_kill_between_effect_and_ack_doubles_nothing(
    point: str, service: Service, kafka_server: Broker
) -> None:
    await send(kafka_server, service.orders, ORDERS[:2])
    await service.killed(point)
    assert await service.charged() == ([] if point == "handler" else ["o-0"])
    assert not is_read(kafka_server, service.name, service.orders)
    async with service.running():
        await until_read(kafka_server, service)
    assert await service.charged() == ["o-0", "o-1"]
    receipts = [one.value for one in await records_of(kafka_server, service.receipts)]
    assert len(receipts) == (3 if point == "published" else 2)  # none is missing
    assert len(set(receipts)) == 2


# --- nack, hold and refuse ----------------------------------------------------------------------------------


class Shop:
    """An app in this process, with a topic, a group and a database of its own."""

    def __init__(self, server: Broker, folder: Path) -> None:
        self.server = server
        self.topic = f"orders-{uuid4().hex[:8]}"
        self.inbox = Inbox(
            SqliteStore(folder / "shop.db"), consumer="billing", retry=RetryPolicy(max_attempts=5, base=0.0)
        )
        self.ran: list[str] = []
        server.create_topic(self.topic)

    def broker(self, policy: AckPolicy = AckPolicy.NACK_ON_ERROR, **options: Any) -> KafkaBroker:
        middlewares: Any = [InboxMiddleware(self.inbox, **options)]
        return KafkaBroker(
            self.server.bootstrap, ack_policy=policy, middlewares=middlewares, graceful_timeout=PATIENCE, logger=None
        )

    def subscriber(self, broker: KafkaBroker, **options: Any) -> Any:
        return broker.subscriber(self.topic, group_id=self.topic, auto_offset_reset="earliest", **options)

    async def send(self, *messages: tuple[str | None, bytes], **headers: bytes) -> None:
        await send(self.server, self.topic, messages, **headers)

    @property
    def is_read(self) -> bool:
        return is_read(self.server, self.topic, self.topic)

    async def until_read(self) -> None:
        await until(lambda: self.is_read, within=PATIENCE)


@pytest.fixture
async def shop(kafka_server: Broker, tmp_path: Path) -> AsyncIterator[Shop]:
    found = Shop(kafka_server, tmp_path)
    async with found.inbox:
        yield found


@asynccontextmanager
async def started(broker: KafkaBroker) -> AsyncIterator[None]:
    async with broker:
        await broker.start()
        yield


async def test_a_handler_that_fails_is_run_again_before_what_comes_after_it(shop: Shop) -> None:
    broker = shop.broker()

    @shop.subscriber(broker)
    async def on_order(order: Order) -> None:
        shop.ran.append(order.id)
        if len(shop.ran) <= 2:
            raise ValueError("not yet")

    await shop.send(*ORDERS[:3])
    async with started(broker):
        await shop.until_read()
    assert shop.ran == ["o-0", "o-0", "o-0", "o-1", "o-2"]


async def test_what_is_due_later_holds_up_its_partition(shop: Shop) -> None:
    broker = shop.broker()

    @shop.subscriber(broker)
    async def on_order(order: Order) -> None:
        shop.ran.append(order.id)
        if len(shop.ran) == 1:
            raise TryLater(0.7)

    await shop.send(*ORDERS[:2])
    async with started(broker):
        await shop.until_read()
    assert shop.ran == ["o-0", "o-0", "o-1"]


async def test_who_is_stopped_while_it_holds_a_message_leaves_it_to_the_next(shop: Shop) -> None:
    broker, held = shop.broker(hold=600.0), asyncio.Event()

    @shop.subscriber(broker)
    async def on_order(order: Order) -> None:
        shop.ran.append(order.id)
        held.set()
        raise TryLater(2)

    await shop.send(*ORDERS[:1])
    async with started(broker):
        await held.wait()
    assert not shop.is_read
    again = shop.broker()

    @shop.subscriber(again)
    async def on_order_again(order: Order) -> None:
        shop.ran.append("again")

    async with started(again):
        await shop.until_read()
    assert shop.ran == ["o-0", "again"]


async def test_a_record_with_a_binary_header_is_a_dead_letter_and_the_next_goes_on(shop: Shop) -> None:
    broker = shop.broker()

    @shop.subscriber(broker)
    async def on_order(order: Order) -> None:
        shop.ran.append(order.id)

    await shop.send(ORDERS[0], trace=b"\xff\xfe")
    await shop.send(ORDERS[1], (None, b"no id"))
    async with started(broker):
        await shop.until_read()
    assert shop.ran == ["o-1"]
    dead = await shop.inbox.records(State.DEAD)
    assert sorted(one.body or b"" for one in dead) == sorted([b"no id", ORDERS[0][1]])


WRONG: dict[str, dict[str, Any]] = {
    "acknowledges first": {"ack_policy": AckPolicy.ACK_FIRST},
    "by hand": {"ack_policy": AckPolicy.MANUAL},
    "batches": {"batch": True, "ack_policy": AckPolicy.ACK},
}


@pytest.mark.parametrize("wrong", WRONG.values(), ids=WRONG.keys())
async def test_a_subscriber_that_is_refused_loses_nothing(wrong: dict[str, Any], shop: Shop) -> None:
    broker = shop.broker()

    @shop.subscriber(broker, **wrong)
    async def on_order(order: Any) -> None:
        shop.ran.append("wrong")

    subscriber = broker.subscribers[0]
    await shop.send(*ORDERS[:3])
    async with started(broker):
        await until(lambda: not subscriber.running and subscriber.consumer is None, within=PATIENCE)  # out of its group
    assert shop.ran == []
    right = shop.broker()

    @shop.subscriber(right)
    async def on_order_right(order: Order) -> None:
        shop.ran.append(order.id)

    async with started(right):
        await shop.until_read()
    assert shop.ran == ["o-0", "o-1", "o-2"]


async def test_a_batch_publisher_repeats_what_it_published(shop: Shop) -> None:
    broker, lines = shop.broker(), f"{shop.topic}.lines"
    shop.server.create_topic(lines)

    @shop.subscriber(broker)
    @broker.publisher(lines, batch=True)
    async def on_order(order: Order) -> Any:
        shop.ran.append(order.id)
        return [order, "text", b"\xff", KafkaResponse({"b": 1, "a": 2}, key=b"k")]

    await shop.send(ORDERS[0], ORDERS[0])
    async with started(broker):
        await shop.until_read()
    found = [
        (one.value, one.key, dict(one.headers).get("content-type")) for one in await records_of(shop.server, lines)
    ]
    assert found[:4] == found[4:]
    assert [value for value, _, _ in found[:4]] == [b'{"id":"o-0","cents":1}', b"text", b"\xff", b'{"b":1,"a":2}']
    assert shop.ran == ["o-0"]


async def test_workers_of_one_subscriber_keep_the_order_of_each_partition(shop: Shop) -> None:
    broker, topic = shop.broker(), f"{shop.topic}.wide"
    shop.server.create_topic(topic, partitions=3)

    @broker.subscriber(topic, group_id=topic, auto_offset_reset="earliest", max_workers=3)
    async def on_order(order: Order, tx: Tx) -> None:
        shop.ran.append(order.id)

    await send(shop.server, topic, [*TWICE])
    async with started(broker):
        await until(lambda: is_read(shop.server, topic, topic), within=PATIENCE)
    assert sorted(shop.ran) == sorted(f"o-{n}" for n in range(10))
