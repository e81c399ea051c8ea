"""FastStream on a real RabbitMQ: the example app with its kills, requests, and what nack and refuse come to there."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Annotated, Any
from uuid import uuid4

import aio_pika
import pytest
from faststream import AckPolicy, Context, Depends
from faststream.rabbit import Channel, QueueType, RabbitBroker, RabbitQueue

from onceward import Inbox, RetryPolicy, TryLater, current
from onceward.errors import StoreUnavailable
from onceward.integrations.faststream import InboxMiddleware, inbox_tx
from onceward.record import State
from onceward.sqlite import SqliteStore
from onceward.testing import PointStore
from onceward.testing.waiting import until
from tests.faststream_child import POINTS
from tests.faststream_service import Service
from tests.faststream_tools import Order, Receipt
from tests.services.rabbitmq import Broker

pytestmark = pytest.mark.xdist_group("rabbitmq")

Tx = Annotated[Any, Depends(inbox_tx)]
PATIENCE = 60.0
ORDERS = [(f"m-{n}", b'{"id":"o-%d","cents":%d}' % (n, n + 1)) for n in range(10)]
TWICE = [message for message in ORDERS for _ in range(2)]


@pytest.fixture
async def service(ready_dsn: str, rabbitmq_server: Broker, tmp_path: Path) -> Service:
    found = Service(ready_dsn, rabbitmq_server.url, tmp_path / "log")
    async with channel(rabbitmq_server) as open_channel:
        await open_channel.declare_queue(found.orders, durable=True, arguments={"x-queue-type": "quorum"})
        await open_channel.declare_queue(found.receipts, durable=True)
    return found


@asynccontextmanager
async def channel(server: Broker) -> AsyncIterator[Any]:
    async with await aio_pika.connect(server.url) as connection:
        yield await connection.channel()


async def send(server: Broker, queue: str, *messages: tuple[str | None, bytes]) -> None:
    async with channel(server) as open_channel:
        for id_, body in messages:
            message = aio_pika.Message(body, message_id=id_, content_type="application/json")
            await open_channel.default_exchange.publish(message, queue)


async def taken_from(server: Broker, queue: str) -> list[Any]:
    """All that is in the queue now."""
    found = []
    async with channel(server) as open_channel:
        place = await open_channel.get_queue(queue)
        while (message := await place.get(fail=False)) is not None:
            await message.ack()
            found.append(message)
    return found


async def until_empty(server: Broker, queue: str) -> None:
    await until(lambda: server.count(queue) == 0, within=PATIENCE)


# --- the example --------------------------------------------------------------------------------------------


async def test_the_example_bills_each_order_once(service: Service, rabbitmq_server: Broker) -> None:
    bad = ("bad", b'{"id":"o-bad","cents":-5}')
    await send(rabbitmq_server, service.orders, *TWICE, bad, ("late", ORDERS[0][1]))
    async with service.running():
        await until(lambda: _settled(service, 12), within=PATIENCE)
        await until_empty(rabbitmq_server, service.orders)
    assert sorted(await service.charged()) == sorted([*(f"o-{n}" for n in range(10)), "o-0"])
    assert await service.states() == {**{id_: "processed" for id_, _ in [*ORDERS, ("late", b"")]}, "bad": "dead"}
    receipts = await taken_from(rabbitmq_server, service.receipts)
    assert len(receipts) == 21
    said: dict[Any, set[Any]] = {}
    for one in receipts:
        said.setdefault(one.message_id, set()).add((one.body, one.content_type))
    assert len(said) == 11
    assert all(len(bodies) == 1 for bodies in said.values())


async def _settled(service: Service, number: int) -> bool:
    return len(await service.states()) == number


@pytest.mark.parametrize("point", POINTS)
async def test_a_kill_between_effect_and_ack_doubles_nothing(
    point: str, service: Service, rabbitmq_server: Broker
) -> None:
    await send(rabbitmq_server, service.orders, ORDERS[0])
    await service.killed(point)
    assert await service.charged() == ([] if point == "handler" else ["o-0"])
    await until(lambda: rabbitmq_server.count(service.orders) == 1)
    await send(rabbitmq_server, service.orders, ORDERS[1])
    async with service.running():
        await until(lambda: _settled(service, 2), within=PATIENCE)
        await until_empty(rabbitmq_server, service.orders)
    assert sorted(await service.charged()) == ["o-0", "o-1"]
    receipts = [one.body for one in await taken_from(rabbitmq_server, service.receipts)]
    assert len(receipts) == (3 if point == "published" else 2)  # none is missing
    assert len(set(receipts)) == 2


# --- in this process ----------------------------------------------------------------------------------------


class Shop:
    """An app in this process, with a queue and a database of its own."""

    def __init__(self, server: Broker, folder: Path) -> None:
        self.server = server
        self.queue = f"orders-{uuid4().hex[:8]}"
        self.retry = RetryPolicy(max_attempts=5, base=0.0)
        self.inbox = Inbox(SqliteStore(folder / "shop.db"), consumer="billing", retry=self.retry)
        self.ran: list[Any] = []

    def broker(self, policy: AckPolicy = AckPolicy.NACK_ON_ERROR, **options: Any) -> RabbitBroker:
        middlewares: Any = [InboxMiddleware(options.pop("inbox", self.inbox), **options)]
        return RabbitBroker(
            self.server.url, ack_policy=policy, middlewares=middlewares, graceful_timeout=PATIENCE, logger=None,
            default_channel=Channel(prefetch_count=10),
        )  # fmt: skip

    def subscriber(self, broker: RabbitBroker, **options: Any) -> Any:
        return broker.subscriber(RabbitQueue(self.queue, queue_type=QueueType.QUORUM, durable=True), **options)

    async def declare(self) -> None:
        async with channel(self.server) as open_channel:
            await open_channel.declare_queue(self.queue, durable=True, arguments={"x-queue-type": "quorum"})

    async def send(self, *messages: tuple[str | None, bytes]) -> None:
        await send(self.server, self.queue, *messages)

    async def until_empty(self) -> None:
        await until_empty(self.server, self.queue)


@pytest.fixture
async def shop(rabbitmq_server: Broker, tmp_path: Path) -> AsyncIterator[Shop]:
    found = Shop(rabbitmq_server, tmp_path)
    await found.declare()
    async with found.inbox:
        yield found


@asynccontextmanager
async def started(broker: RabbitBroker) -> AsyncIterator[None]:
    async with broker:
        await broker.start()
        yield


async def test_a_handler_that_fails_is_run_again_and_told_that_it_comes_again(shop: Shop) -> None:
    broker = shop.broker()

    @shop.subscriber(broker)
    async def on_order(order: Order, tx: Tx) -> None:
        shop.ran.append((order.id, current().attempt, current().redelivered))
        if len(shop.ran) <= 2:
            raise ValueError("not yet")

    await shop.send(ORDERS[0])
    async with started(broker):
        await until(lambda: len(shop.ran) == 3, within=PATIENCE)
        await shop.until_empty()
    assert shop.ran == [("o-0", 1, False), ("o-0", 2, True), ("o-0", 3, True)]


async def test_a_wrong_body_is_a_dead_letter(shop: Shop) -> None:
    broker = shop.broker()

    @shop.subscriber(broker)
    async def on_order(order: Order) -> None:
        shop.ran.append(order.id)

    await shop.send(("m-1", b"{not json"), ("m-2", b'{"id":"o-2"}'), ORDERS[3])
    async with started(broker):
        await until(lambda: len(shop.ran) == 1, within=PATIENCE)
        await shop.until_empty()
    dead = {one.body for one in await shop.inbox.records(State.DEAD)}
    assert dead == {b"{not json", b'{"id":"o-2"}'}
    assert shop.ran == ["o-3"]


async def test_a_request_that_is_repeated_gets_the_first_answer(shop: Shop) -> None:
    broker = shop.broker()

    @shop.subscriber(broker)
    async def on_order(order: Order, message: Annotated[Any, Context()]) -> Receipt:
        shop.ran.append(message.correlation_id)
        return Receipt(order=order.id, cents=len(shop.ran))

    async with started(broker):
        answers = [
            await broker.request(
                Order(id="o-1", cents=5), shop.queue, message_id="m-1", correlation_id=name, timeout=PATIENCE
            )
            for name in ("first", "second")
        ]
        await shop.until_empty()
    assert [one.correlation_id for one in answers] == ["first", "second"]
    assert [one.body for one in answers] == [b'{"order":"o-1","cents":1}'] * 2
    assert [await one.decode() for one in answers] == [{"order": "o-1", "cents": 1}] * 2
    assert shop.ran == ["first"]


async def test_a_message_that_is_held_stands_in_nobodys_way(shop: Shop) -> None:
    broker = shop.broker()

    @shop.subscriber(broker)
    async def on_order(order: Order) -> None:
        shop.ran.append(order.id)
        if shop.ran.count("o-0") == 1 and order.id == "o-0":
            raise TryLater(1.5)

    await shop.send(*ORDERS[:3])
    async with started(broker):
        await until(lambda: len(shop.ran) == 4, within=PATIENCE)
        await shop.until_empty()
    assert sorted(shop.ran[:3]) == ["o-0", "o-1", "o-2"]
    assert shop.ran[3] == "o-0"


async def test_while_the_store_is_away_messages_stay_in_the_queue(shop: Shop, tmp_path: Path) -> None:
    """Also with the policy that would drop them."""
    away, asked = [True], 0

    async def reached(point: str) -> None:
        nonlocal asked
        if point == "before claim" and away:
            asked += 1
            raise StoreUnavailable

    store = PointStore(SqliteStore(tmp_path / "other.db"), reached)
    async with Inbox(store, consumer="billing") as inbox:
        broker = shop.broker(AckPolicy.REJECT_ON_ERROR, inbox=inbox, hold=0.3)

        @shop.subscriber(broker)
        async def on_order(order: Order) -> None:
            shop.ran.append(order.id)

        await shop.send(*ORDERS[:3])
        async with started(broker):
            await until(lambda: asked > 12, within=PATIENCE)
            assert shop.server.count(shop.queue) == 3
            away.clear()
            await until(lambda: len(shop.ran) == 3, within=PATIENCE)
            await shop.until_empty()
    assert sorted(shop.ran) == ["o-0", "o-1", "o-2"]


async def test_a_subscriber_that_acknowledges_by_hand_is_refused_and_loses_nothing(shop: Shop) -> None:
    broker = shop.broker()

    @shop.subscriber(broker, ack_policy=AckPolicy.MANUAL)
    async def on_order(order: Order) -> None:
        shop.ran.append("wrong")

    subscriber = broker.subscribers[0]
    await shop.send(*ORDERS[:3])
    async with started(broker):
        await until(lambda: not subscriber.running, within=PATIENCE)
    assert shop.ran == []
    assert shop.server.count(shop.queue) == 3


async def test_a_subscriber_that_acknowledges_first_is_stopped_with_its_first_message(shop: Shop) -> None:
    """What RabbitMQ has sent it by then is gone: so `check` is for the start of the app."""
    broker = shop.broker()

    @shop.subscriber(broker, ack_policy=AckPolicy.ACK_FIRST)
    async def on_order(order: Order) -> None:
        shop.ran.append("wrong")

    subscriber = broker.subscribers[0]
    async with started(broker):
        await shop.send(ORDERS[0])
        await until(lambda: subscriber._consumer_tag is None, within=PATIENCE)
        await shop.send(*ORDERS[1:3])
        assert shop.server.count(shop.queue) == 2
    assert shop.ran == []


async def test_what_is_asked_for_one_by_one_passes_by(shop: Shop) -> None:
    """`get_one` has no handler, so there is nothing to run once."""
    broker = shop.broker()
    subscriber = shop.subscriber(broker)
    await shop.send(ORDERS[0])
    async with started(broker):
        found = await subscriber.get_one(timeout=PATIENCE)
        assert found is not None
        assert await found.decode() == {"id": "o-0", "cents": 1}
    assert await shop.inbox.records() == []


async def test_a_consumer_that_is_stopped_while_it_holds_gives_back(shop: Shop) -> None:
    broker, held = shop.broker(hold=600.0), asyncio.Event()

    @shop.subscriber(broker)
    async def on_order(order: Order) -> None:
        shop.ran.append(order.id)
        held.set()
        raise TryLater(3600)

    await shop.send(ORDERS[0])
    async with asyncio.timeout(PATIENCE), started(broker):
        await held.wait()
    await until(lambda: shop.server.count(shop.queue) == 1)
    assert shop.ran == ["o-0"]
