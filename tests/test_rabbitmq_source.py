"""RabbitMQSource on a real RabbitMQ: nothing is lost, nothing spins, and a message is the same each time it comes."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from time import monotonic
from typing import Any
from uuid import uuid4

import aio_pika
import msgspec
import pytest
from aio_pika.exceptions import ChannelNotFoundEntity
from pamqp.commands import Basic

from onceward import Inbox, Message, RetryPolicy
from onceward.brokers import consume, rabbitmq_driver, rabbitmq_forward
from onceward.brokers.envelope import Raw
from onceward.brokers.rabbitmq import RabbitMQSource
from onceward.brokers.rabbitmq_check import Settings, findings, told
from onceward.brokers.rabbitmq_delivery import RabbitMQDelivery
from onceward.brokers.rabbitmq_forward import LADDER, delay_arguments, step_for
from onceward.errors import PayloadUndecodable, Reject, UsageError
from onceward.outcome import Kind, Outcome, Verdict
from onceward.record import State
from onceward.testing import SqliteLab
from onceward.testing.proxy import Proxy
from onceward.testing.waiting import until
from tests.services import rabbitmq

pytestmark = pytest.mark.xdist_group("rabbitmq")

KINDS = pytest.mark.parametrize("kind", ["classic", "quorum"])
LONG = 60.0
"""Seconds after which something that should come does not come any more."""


class Desk:
    """A connection beside that of the source: makes queues, sends, and looks."""

    def __init__(self, broker: rabbitmq.Broker, wire: Any) -> None:
        self.broker = broker
        self.wire = wire
        self.queue = f"q{uuid4().hex[:10]}"
        self._made: set[str] = set()

    async def make(self, kind: str = "quorum", **arguments: Any) -> str:
        more = {f"x-{name.replace('_', '-')}": value for name, value in arguments.items()}
        return await self.declare({"x-queue-type": kind} | more)

    async def declare(self, arguments: dict[str, Any], *, durable: bool = True, auto_delete: bool = False) -> str:
        await self.wire.queue_declare(self.queue, durable=durable, auto_delete=auto_delete, arguments=arguments)
        return self.queue

    async def send(self, *ids: str, body: bytes = b'{"n": 1}', queue: str | None = None, **properties: Any) -> None:
        for id_ in ids:
            given = Basic.Properties(message_id=id_ or None, delivery_mode=2, **properties)
            await self.wire.basic_publish(body, routing_key=queue or self.queue, properties=given, mandatory=True)

    async def ready(self, queue: str | None = None) -> int:
        """Messages that nobody holds."""
        found = await self.wire.queue_declare(queue or self.queue, passive=True)
        return found.message_count or 0

    def count(self, queue: str | None = None) -> int:
        """Messages, also those that somebody holds."""
        return self.broker.count(queue or self.queue)

    async def clear_up(self) -> None:
        names = [f"{self.queue}.retry.{step}" for step in LADDER]
        for name in (self.queue, f"{self.queue}.quarantine", f"{self.queue}.cc", *names):
            await self.wire.queue_delete(name)


@pytest.fixture
async def desk(rabbitmq_server: rabbitmq.Broker) -> AsyncIterator[Desk]:
    async with await aio_pika.connect(rabbitmq_server.url) as connection:
        channel = await connection.channel(on_return_raises=True)
        desk = Desk(rabbitmq_server, await channel.get_underlay_channel())
        yield desk
    async with await aio_pika.connect(rabbitmq_server.url) as connection:  # the test may have killed the broker
        desk.wire = await (await connection.channel()).get_underlay_channel()
        await desk.clear_up()


def source_of(desk: Desk, **options: Any) -> RabbitMQSource:
    return RabbitMQSource(desk.queue, url=desk.broker.url, **options)


@asynccontextmanager
async def behind_proxy(desk: Desk, **options: Any) -> AsyncIterator[tuple[RabbitMQSource, Proxy]]:
    port = int(desk.broker.url.rpartition(":")[2].strip("/"))
    async with Proxy("127.0.0.1", port).running() as proxy:
        url = desk.broker.url.replace(f":{port}/", f":{proxy.port}/")
        async with RabbitMQSource(desk.queue, url=url, **options) as source:
            yield source, proxy


async def take(source: RabbitMQSource, number: int = 1) -> list[RabbitMQDelivery]:
    """So many, begun."""
    taken: list[RabbitMQDelivery] = []
    async with asyncio.timeout(LONG):
        while len(taken) < number:
            taken += [one for one in await source.receive(number - len(taken)) if one.begin()]
    return taken


async def take_one(source: RabbitMQSource) -> RabbitMQDelivery:
    return (await take(source))[0]


async def retried(source: RabbitMQSource, delivery: RabbitMQDelivery, delay: float = 1.0) -> RabbitMQDelivery:
    await delivery.settle(Verdict.RETRY, delay=delay)
    return await take_one(source)


async def settled(desk: Desk, left: int = 0) -> None:
    await until(lambda: desk.count() == left)


# --- a delivery ---------------------------------------------------------------------------------------------


@KINDS
async def test_a_message_stays_with_the_broker_until_it_is_settled(desk: Desk, kind: str) -> None:
    await desk.make(kind)
    await desk.send("a", "b", "c")
    async with source_of(desk) as source:
        deliveries = await take(source, 3)
        assert [one.message.id for one in deliveries] == ["a", "b", "c"]
        assert desk.count() == 3
        await deliveries[1].settle(Verdict.ACK)
        await settled(desk, left=2)
    await ready_is(desk, 2)


async def test_a_message_is_read_from_its_properties_and_headers(desk: Desk) -> None:
    await desk.make()
    at = datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)
    await desk.send("m-1", message_type="order.paid", timestamp=at, headers={"source": "shop", "n": 7})
    await desk.send("m-2", headers={"message_id": "h-2", "type": "order.sent"})
    async with source_of(desk, stream=lambda raw: (raw.key or b"").decode()) as source:
        one, two = await take(source, 2)
    assert one.problem is two.problem is None
    assert one.message == Message(
        "m-1", "order.paid", {"n": 1}, source="shop", topic=desk.queue, headers={"source": "shop", "n": 7},
        occurred_at=at, stream=desk.queue, body=b'{"n": 1}',
    )  # fmt: skip
    assert (two.message.id, two.message.type) == ("h-2", "order.sent")
    assert not one.redelivered
    assert one.partition is None
    assert one.origin == f"amqp://{desk.queue}#1"


async def test_the_exchange_and_the_routing_key_are_told(desk: Desk) -> None:
    await desk.make()
    await desk.wire.queue_bind(desk.queue, "amq.topic", "order.*")
    given = Basic.Properties(message_id="a")
    await desk.wire.basic_publish(b"1", exchange="amq.topic", routing_key="order.paid", properties=given)
    async with source_of(desk, type=lambda raw: (raw.key or b"").decode()) as source:
        first = await take_one(source)
        again = await retried(source, first)
        await again.settle(Verdict.ACK)
    for delivery in (first, again):
        assert delivery.message.type == "order.paid"
        assert delivery.origin.endswith(" by amq.topic/order.paid")


async def test_a_record_without_an_id_is_a_problem_with_a_name_of_its_own(desk: Desk) -> None:
    await desk.make()
    await desk.wire.basic_publish(b'{"n": 1}', routing_key=desk.queue, properties=Basic.Properties(message_id="gone"))
    async with source_of(desk, id=lambda raw: None) as source:
        delivery = await take_one(source)
    assert isinstance(delivery.problem, Reject)
    assert "the function given as id= found none" in str(delivery.problem)
    assert delivery.message.body == b'{"n": 1}'


async def test_a_body_that_is_no_json_is_a_problem(desk: Desk) -> None:
    await desk.make()
    await desk.send("a", body=b"{")
    async with source_of(desk) as source:
        delivery = await take_one(source)
    assert isinstance(delivery.problem, PayloadUndecodable)
    assert (delivery.message.id, delivery.message.body) == ("a", b"{")


async def test_what_comes_is_bounded_by_the_prefetch(desk: Desk) -> None:
    await desk.make()
    await desk.send(*(str(n) for n in range(20)))
    async with source_of(desk, prefetch=5) as source:
        deliveries = await take(source, 5)
        await ready_is(desk, 15)
        waiting = asyncio.create_task(take(source, 2))
        await deliveries[0].settle(Verdict.ACK)
        await deliveries[3].settle(Verdict.ACK)
        assert [one.message.id for one in await waiting] == ["5", "6"]
        await ready_is(desk, 13)


async def ready_is(desk: Desk, number: int) -> None:
    async with asyncio.timeout(LONG):
        while await desk.ready() != number:
            await asyncio.sleep(0.02)


async def test_receiving_can_be_cancelled(desk: Desk) -> None:
    await desk.make()
    got: list[str] = []
    async with source_of(desk) as source:
        for n in range(50):
            waiting = asyncio.create_task(source.receive(10))
            await desk.send(str(n))
            await asyncio.sleep(0)
            waiting.cancel()
            await asyncio.wait({waiting})
            got += [] if waiting.cancelled() else [one.message.id for one in waiting.result()]
        got += [one.message.id for one in await take(source, 50 - len(got))]
    assert got == [str(n) for n in range(50)]


# --- again --------------------------------------------------------------------------------------------------


@KINDS
async def test_what_is_given_back_comes_again_at_once(desk: Desk, kind: str) -> None:
    await desk.make(kind)
    await desk.send("a", "b")
    async with source_of(desk) as source:
        first, second = await take(source, 2)
        assert not first.redelivered
        await first.settle(Verdict.RETRY)
        again = await take_one(source)
        assert again.message == first.message
        assert again.redelivered
        await again.settle(Verdict.ACK)
        await second.settle(Verdict.ACK)
        await settled(desk)


def everything(raws: list[Raw]) -> Callable[[Raw], str | None]:
    def look(raw: Raw) -> str | None:
        raws.append(msgspec.structs.replace(raw, headers=sorted(raw.headers)))
        return raw.id

    return look


@KINDS
async def test_a_delayed_message_comes_back_as_it_was_and_not_before_its_time(desk: Desk, kind: str) -> None:
    await desk.make(kind)
    await desk.wire.queue_declare(f"{desk.queue}.cc", durable=True)
    headers = {
        "CC": [f"{desk.queue}.cc"], "deep": {"list": [1, "two", {"three": 3}], "at": datetime(2026, 1, 2, tzinfo=UTC)},
        "yes": True, "large": 2**40, "bytes": bytearray(b"\xff\x00"), "half": 0.5, "none": None,
    }  # fmt: skip
    await desk.send(
        "m-1", headers=headers, message_type="order.paid", correlation_id="c-1", reply_to="answers", app_id="shop",
        timestamp=datetime(2026, 1, 2, tzinfo=UTC), priority=3, content_type="application/json", user_id="guest",
        content_encoding="utf-8", expiration="600000",
    )  # fmt: skip
    raws: list[Raw] = []
    async with source_of(desk, id=everything(raws)) as source:
        first = await take_one(source)
        start = monotonic()
        again = await retried(source, first, delay=1.2)
        assert monotonic() - start >= 2
        third = await retried(source, again)
        await third.settle(Verdict.ACK)
        await settled(desk)
    assert again.redelivered
    assert first.message == again.message == third.message
    assert len(raws) == 3
    assert raws[0] == raws[1] == raws[2]
    before, after = first._letter.properties, third._letter.properties
    for name in ("correlation_id", "reply_to", "app_id", "priority", "content_type", "content_encoding", "user_id"):
        assert getattr(after, name) == getattr(before, name) != "", name
    assert (after.delivery_mode, after.expiration) == (2, None)
    assert await desk.ready(f"{desk.queue}.cc") == 1  # the sender's own copy, and none of a detour


@KINDS
async def test_a_message_without_an_id_has_none_after_a_detour_either(desk: Desk, kind: str) -> None:
    await desk.make(kind)
    async with source_of(desk) as source:
        await source._forwarder.delay(b'{"n": 1}', Basic.Properties(headers={"onceward-no-id": True}), 1)
        first = await take_one(source)
        again = await retried(source, first)
        await again.settle(Verdict.ACK)
    for delivery in (first, again):
        assert isinstance(delivery.problem, Reject)
        assert delivery.message.id.startswith(f"{desk.queue}#sha256:")
    assert again.message == first.message


async def test_what_would_not_come_back_the_same_waits_in_memory(desk: Desk) -> None:
    await desk.make()
    given = Basic.Properties(message_id="a", delivery_mode=2, headers={"tenth": 0.1})
    await desk.wire.basic_publish(b"1", routing_key=desk.queue, properties=given)
    async with source_of(desk) as source:
        first = await take_one(source)
        # The wire has it in single precision; as if a sender had used double.
        first._letter.headers["tenth"] = 0.1
        start = monotonic()
        again = await retried(source, first, delay=0.5)
        assert monotonic() - start >= 1
        assert again._letter.detours == 0
        await again.settle(Verdict.ACK)


@KINDS
async def test_a_message_that_always_fails_does_not_spin(desk: Desk, kind: str) -> None:
    await desk.make(kind)
    await desk.send("a")
    async with source_of(desk) as source:
        delivery = await take_one(source)
        start = monotonic()
        for _ in range(3):
            delivery = await retried(source, delivery, delay=0.05)
        assert monotonic() - start >= 3
        await delivery.settle(Verdict.ACK)
        await settled(desk)
    assert [await desk.ready(f"{desk.queue}.retry.1")] == [0]


async def test_twins_of_one_id_are_delayed_side_by_side(desk: Desk) -> None:
    await desk.make()
    await desk.send(*["a"] * 10)
    async with source_of(desk) as source:
        for delivery in await take(source, 10):
            assert delivery.message.id == "a"
            await delivery.settle(Verdict.RETRY)
        twins = await take(source, 10)
        await asyncio.gather(*(one.settle(Verdict.RETRY, delay=1) for one in twins))
        for delivery in await take(source, 10):
            await delivery.settle(Verdict.ACK)
        await settled(desk)


async def test_a_delay_queue_that_somebody_deletes_is_made_again(desk: Desk) -> None:
    await desk.make()
    await desk.send("a")
    async with source_of(desk) as source:
        delivery = await retried(source, await take_one(source))
        await desk.wire.queue_delete(f"{desk.queue}.retry.1")
        delivery = await retried(source, delivery)
        assert delivery._letter.detours == 2
        await delivery.settle(Verdict.ACK)


async def test_a_delay_queue_of_an_older_broker_is_still_used(desk: Desk) -> None:
    await desk.make()
    await desk.send("a")
    older = delay_arguments(desk.queue, 1, quorum=False)
    await desk.wire.queue_declare(f"{desk.queue}.retry.1", durable=True, arguments=older)
    async with source_of(desk) as source:
        again = await retried(source, await take_one(source))
        assert again._letter.detours == 1
        await again.settle(Verdict.ACK)


async def test_a_delay_queue_of_somebody_else_is_left_alone(desk: Desk) -> None:
    """Without a TTL the message would stay there for ever."""
    await desk.make()
    await desk.send("a")
    await desk.wire.queue_declare(f"{desk.queue}.retry.1", durable=True)
    async with source_of(desk) as source:
        again = await retried(source, await take_one(source))
        assert again._letter.detours == 0
        await again.settle(Verdict.ACK)
    assert await desk.ready(f"{desk.queue}.retry.1") == 0


async def test_what_is_given_back_often_does_not_reach_the_delivery_limit(desk: Desk) -> None:
    await desk.make("quorum", delivery_limit=5)
    await desk.send("a")
    async with source_of(desk) as source:
        for _ in range(12):
            delivery = await take_one(source)
            await delivery.settle(Verdict.RETRY)
        await (await take_one(source)).settle(Verdict.ACK)


async def test_a_broker_that_counts_deliveries_is_believed(desk: Desk) -> None:
    await desk.make("quorum")
    await desk.send("a")
    async with source_of(desk) as source:
        for given_back in range(3):
            delivery = await take_one(source)
            assert delivery._letter.given_back == given_back
            assert delivery.redelivered == bool(given_back)
            assert delivery.message.headers == {}
            await delivery.settle(Verdict.RETRY)


async def test_a_queue_of_delays_lives_as_long_as_it_is_used(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its messages would go with it. A broker does not count it as use that something is published."""
    await desk.make()
    expires = 5
    monkeypatch.setattr(rabbitmq_forward, "UNUSED", expires - 60)
    monkeypatch.setattr(rabbitmq_forward, "DAY", 0)
    async with source_of(desk) as source:
        for _ in range(5):
            sent, stalled = await use_for(source, seconds=2 * expires)
            if stalled < expires / 2:  # else it was this machine that stood still
                break
            await desk.wire.queue_delete(f"{desk.queue}.retry.60")
        assert desk.count(f"{desk.queue}.retry.60") == sent


async def use_for(source: RabbitMQSource, *, seconds: float) -> tuple[int, float]:
    """How much was put there, and the longest pause between two uses."""
    start = last = monotonic()
    sent, longest = 0, 0.0
    while last - start < seconds:
        assert await source._forwarder.delay(b"1", Basic.Properties(message_id=str(uuid4())), 60)
        sent += 1
        await asyncio.sleep(0.5)
        longest, last = max(longest, monotonic() - last), monotonic()
    return sent, longest


def test_a_delay_is_rounded_up() -> None:
    assert [step_for(seconds) for seconds in (0, 0.05, 1, 1.01, 59, 60, 3601)] == [1, 1, 1, 2, 60, 60, 3600]


# --- quarantine ---------------------------------------------------------------------------------------------


async def test_what_cannot_be_kept_goes_to_quarantine_with_the_reason(desk: Desk) -> None:
    await desk.make()
    await desk.send("a", "b", headers={"tenth": 0.1, "x": "y"}, correlation_id="c-1")
    async with source_of(desk) as source:
        first, second = await take(source, 2)
        await first.settle(Verdict.REJECT, outcome=Outcome(Kind.FAILED, error=ValueError("too\nlarge")))
        await second.settle(Verdict.REJECT)
        await settled(desk)
    name = f"{desk.queue}.quarantine"
    assert desk.count(name) == 2
    kept = await desk.wire.basic_get(name)
    headers = kept.header.properties.headers
    assert (kept.body, kept.header.properties.message_id) == (b'{"n": 1}', "a")
    assert kept.header.properties.correlation_id == "c-1"
    assert headers["x"] == "y"
    told = ("queue", "error", "reason", "exchange", "routing-key")
    assert [headers[f"onceward-{word}"] for word in told] == [desk.queue, "ValueError", "too\nlarge", "", desk.queue]


async def test_a_message_that_comes_back_from_quarantine_is_as_it_was(desk: Desk) -> None:
    await desk.make()
    await desk.send("a", headers={"x": "y"})
    async with source_of(desk) as source:
        first = await take_one(source)
        await first.settle(Verdict.REJECT, outcome=Outcome(Kind.FAILED, error=ValueError()))
        await until(lambda: desk.count() == 0)
        kept = await desk.wire.basic_get(f"{desk.queue}.quarantine", no_ack=True)
        await desk.wire.basic_publish(kept.body, routing_key=desk.queue, properties=kept.header.properties)
        again = await take_one(source)
        assert again.message == first.message


async def test_a_quarantine_that_is_there_is_taken_as_it_is(desk: Desk) -> None:
    await desk.make()
    await desk.wire.queue_declare(f"{desk.queue}.quarantine", durable=True, arguments={"x-max-length": 1000})
    await desk.send("a")
    async with source_of(desk) as source:
        await (await take_one(source)).settle(Verdict.REJECT)
        await settled(desk)
    assert desk.count(f"{desk.queue}.quarantine") == 1


# --- without the rights -------------------------------------------------------------------------------------


@pytest.fixture
def reader(rabbitmq_server: rabbitmq.Broker) -> Iterator[str]:
    """The URL of a user who may only read."""
    if not isinstance(rabbitmq_server, rabbitmq.RabbitMQ):
        pytest.skip("a broker that was given has no user for this")
    rabbitmq_server.ctl("add_user", "reader", "secret")
    rabbitmq_server.ctl("set_permissions", "-p", "/", "reader", "^$", "^$", ".*")
    yield rabbitmq_server.url.replace("guest:guest", "reader:secret")
    rabbitmq_server.ctl("delete_user", "reader")


async def test_what_cannot_be_put_anywhere_waits_in_memory(desk: Desk, reader: str, caplog: Any) -> None:
    await desk.make()
    await desk.send("a", "b")
    async with RabbitMQSource(desk.queue, url=reader) as source:
        first, second = await take(source, 2)
        start = monotonic()
        await second.settle(Verdict.REJECT)
        again = await retried(source, first, delay=0.7)
        assert monotonic() - start >= 1
        assert again.message.id == "a"
        assert again.redelivered
        assert desk.count() == 2
        assert "messages wait in memory" in caplog.text
        assert [one.name for one in await source.check()] == ["settings-unknown"]
        await again.settle(Verdict.ACK)
    await ready_is(desk, 1)


async def test_without_delay_queues_a_message_waits_in_memory(desk: Desk) -> None:
    await desk.make()
    await desk.send("a")
    async with source_of(desk, retry="memory") as source:
        start = monotonic()
        again = await retried(source, await take_one(source), delay=0.5)
        assert monotonic() - start >= 1
        await again.settle(Verdict.ACK)
        await settled(desk)
    with pytest.raises(ChannelNotFoundEntity):
        await desk.wire.queue_declare(f"{desk.queue}.retry.1", passive=True)


# --- when the broker is away --------------------------------------------------------------------------------


@KINDS
async def test_after_a_cut_everything_unsettled_comes_again(desk: Desk, kind: str) -> None:
    await desk.make(kind)
    await desk.send("a", "b", "c", "d")
    async with behind_proxy(desk, prefetch=3) as (source, proxy):
        lost = await take(source, 2)
        assert source.trouble() is None
        proxy.cut()
        await until(source.trouble)
        assert not any(one.begin() for one in lost)
        for verdict, delivery in zip((Verdict.ACK, Verdict.REJECT), lost, strict=True):
            await delivery.settle(verdict)
        await lost[0].settle(Verdict.RETRY, delay=1)
        again = await take(source, 3)
        assert sorted(one.message.id for one in again) == ["a", "b", "c"]
        assert all(one.redelivered for one in again if one.message.id != "c")
        await until(lambda: source.trouble() is None)
        for delivery in again:
            await delivery.settle(Verdict.ACK)
        await (await take_one(source)).settle(Verdict.ACK)
        await settled(desk)


async def test_a_connection_that_dies_while_much_is_settled_holds_nobody_up(desk: Desk) -> None:
    await desk.make("classic")
    ids = [str(n) for n in range(200)]
    await desk.send(*ids)
    async with behind_proxy(desk, prefetch=200) as (source, proxy):
        deliveries = await take(source, 200)
        saying = asyncio.gather(*(one.settle(Verdict.ACK) for one in deliveries))
        await asyncio.sleep(0)
        proxy.cut()
        await asyncio.wait_for(saying, LONG)
        while desk.count():
            for delivery in await source.receive(100):
                await delivery.settle(Verdict.ACK)
            await until(lambda: source._buffer or not desk.count())


async def test_much_can_be_settled_at_once(desk: Desk) -> None:
    await desk.make("classic")
    await desk.send(*(str(n) for n in range(200)))
    async with source_of(desk, prefetch=200) as source:
        await asyncio.gather(*(one.settle(Verdict.ACK) for one in await take(source, 200)))
        await settled(desk)


async def test_a_broker_that_does_not_answer_holds_nobody_up(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    if not isinstance(desk.broker, rabbitmq.RabbitMQ):
        pytest.skip("a broker that was given cannot be frozen")
    monkeypatch.setattr(rabbitmq_forward, "PATIENCE", 0.5)
    monkeypatch.setattr(rabbitmq_driver, "SOON", 0.5)
    await desk.make()
    await desk.send("a")
    async with source_of(desk) as source:
        delivery = await take_one(source)
        desk.broker.freeze()
        try:
            async with asyncio.timeout(LONG):
                await delivery.settle(Verdict.RETRY, delay=1)
        finally:
            desk.broker.thaw()
        again = await take_one(source)
        assert again.message.id == "a"
        await again.settle(Verdict.ACK)


async def test_it_goes_on_after_the_broker_was_killed(desk: Desk) -> None:
    if not isinstance(desk.broker, rabbitmq.RabbitMQ):
        pytest.skip("a broker that was given cannot be killed")
    await desk.make("quorum")
    await desk.send("a", "b")
    async with source_of(desk) as source:
        held, delayed = await take(source, 2)
        await delayed.settle(Verdict.RETRY, delay=5)
        await settled(desk, left=1)
        desk.broker.kill()
        await until(source.trouble)
        assert not held.begin()
        await held.settle(Verdict.ACK)
        desk.broker.start()
        for id_ in ("a", "b"):
            delivery = await take_one(source)
            assert delivery.message.id == id_
            assert delivery.redelivered
            await delivery.settle(Verdict.ACK)
        await until(lambda: source.trouble() is None)
        await settled(desk)


async def test_a_queue_that_was_deleted_is_waited_for(desk: Desk) -> None:
    await desk.make()
    async with source_of(desk) as source:
        await desk.wire.queue_delete(desk.queue)
        await until(source.trouble)
        await until(lambda: "there is no queue" in (source.trouble() or ""))
        await desk.make()
        await desk.send("a")
        await (await take_one(source)).settle(Verdict.ACK)
        await until(lambda: source.trouble() is None)


async def test_heartbeats_go_on_while_a_message_is_worked_on(desk: Desk) -> None:
    await desk.make()
    await desk.send("a")
    async with RabbitMQSource(desk.queue, url=f"{desk.broker.url}?heartbeat=1") as source:
        delivery = await take_one(source)
        await asyncio.sleep(4)  # after two seconds without one the broker would close the connection
        assert delivery.begin()
        await delivery.settle(Verdict.ACK)
        await settled(desk)


async def test_nothing_is_left_behind(desk: Desk) -> None:
    await desk.make()
    await desk.send("a", "b", "c", "d")
    before = asyncio.all_tasks()
    async with source_of(desk, prefetch=3, retry="memory") as source:
        one, two = await take(source, 2)
        await one.settle(Verdict.RETRY, delay=500)
        await two.settle(Verdict.REJECT)
        waiting = asyncio.create_task(source.receive(1))
    await asyncio.wait({waiting})
    await until(lambda: asyncio.all_tasks() == before)
    await ready_is(desk, 3)
    async with source_of(desk) as source:
        assert {delivery.message.id for delivery in await take(source, 3)} == {"a", "c", "d"}


# --- connections and queues ---------------------------------------------------------------------------------


async def test_a_queue_that_is_not_there_is_named(desk: Desk) -> None:
    with pytest.raises(UsageError, match=f"no queue '{desk.queue}'.*declare=True"):
        async with source_of(desk):
            pass


async def test_a_queue_can_be_declared(desk: Desk) -> None:
    for declare in (True, {"x-max-length": 100}):
        async with source_of(desk, declare=declare) as source:
            await desk.wire.queue_declare(
                desk.queue, durable=True, arguments={"x-queue-type": "quorum"} | ({} if declare is True else declare)
            )
            assert [one.name for one in await source.check()] == ([] if declare is True else ["max-length"])
        if declare is True:
            with pytest.raises(UsageError, match="with other arguments"):
                async with source_of(desk, declare={"x-max-length": 1}):
                    pass
            await desk.wire.queue_delete(desk.queue)


async def test_a_connection_that_is_given_stays_open(desk: Desk) -> None:
    await desk.make()
    await desk.send("a")
    async with await aio_pika.connect_robust(desk.broker.url) as connection:
        for _ in range(2):
            async with RabbitMQSource(desk.queue, connection=connection) as source:
                await retried(source, await take_one(source))
        assert not connection.is_closed
        await (await connection.channel()).declare_queue(desk.queue, passive=True)
    await ready_is(desk, 1)


async def test_a_robust_connection_that_is_given_is_waited_for(desk: Desk) -> None:
    await desk.make()
    port = int(desk.broker.url.rpartition(":")[2].strip("/"))
    async with Proxy("127.0.0.1", port).running() as proxy:
        url = desk.broker.url.replace(f":{port}/", f":{proxy.port}/")
        async with (
            await aio_pika.connect_robust(url, reconnect_interval=0.1) as connection,
            RabbitMQSource(desk.queue, connection=connection) as source,
        ):
            proxy.cut()
            await until(source.trouble)
            await desk.send("a")
            await (await take_one(source)).settle(Verdict.ACK)
            await settled(desk)


async def test_a_plain_connection_that_is_given_and_lost_is_an_error(desk: Desk) -> None:
    await desk.make()
    port = int(desk.broker.url.rpartition(":")[2].strip("/"))
    async with Proxy("127.0.0.1", port).running() as proxy:
        url = desk.broker.url.replace(f":{port}/", f":{proxy.port}/")
        async with (
            await aio_pika.connect(url) as connection,
            RabbitMQSource(desk.queue, connection=connection) as source,
        ):
            proxy.cut()
            with pytest.raises(UsageError, match="connect_robust"):
                await asyncio.wait_for(source.receive(1), LONG)
            assert source.trouble()


@pytest.mark.parametrize(
    "options",
    [{}, {"url": "amqp://x", "connection": object()}, {"url": "amqp://x", "prefetch": 0}, {"url": "amqp://x", "id": 3},
     {"url": "amqp://x", "retry": "never"}, {"url": "amqp://x", "management": "localhost"},
     {"connection": object(), "ssl_context": None}],
)  # fmt: skip
def test_what_cannot_be_meant_is_refused(options: dict[str, Any]) -> None:
    with pytest.raises(UsageError):
        RabbitMQSource("orders", **options)


def test_without_the_driver_the_extra_is_named() -> None:
    code = (
        "import sys; sys.modules['aio_pika'] = None\n"
        "from onceward.errors import MissingDriver\n"
        "try:\n    import onceward.brokers.rabbitmq\n"
        "except MissingDriver as error:\n    print(error.extra, error)\n"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ran.stdout.startswith("rabbitmq ")
    assert "onceward[rabbitmq]" in ran.stdout


# --- check --------------------------------------------------------------------------------------------------

DEAD = {"x-dead-letter-exchange": "amq.fanout"}
QUORUM = {"x-queue-type": "quorum"}


@pytest.mark.parametrize(
    ("arguments", "flags", "found"),
    [
        (QUORUM, {}, []),
        ({}, {}, []),
        ({}, {"durable": False}, ["not-durable"]),
        ({"x-max-priority": 5}, {"durable": False, "auto_delete": True}, ["not-durable", "auto-delete"]),
        (QUORUM | {"x-delivery-limit": 5}, {}, ["delivery-limit-drops"]),
        (QUORUM | {"x-delivery-limit": 5} | DEAD, {}, ["delivery-limit-low"]),
        (QUORUM | {"x-delivery-limit": 50} | DEAD, {}, []),
        ({"x-message-ttl": 90_000, "x-max-length": 70_000, "x-single-active-consumer": True}, {},
         ["message-ttl", "max-length"]),
        ({"x-message-ttl": 90_000, "x-max-length": 7, "x-overflow": "reject-publish"} | DEAD, {}, []),
    ],
)  # fmt: skip
async def test_settings_that_lose_messages_are_found(
    desk: Desk, arguments: dict[str, Any], flags: dict[str, bool], found: list[str]
) -> None:
    await desk.declare(arguments, **flags)
    await desk.send("a")
    async with source_of(desk) as source:
        findings = await source.check()
        assert [one.name for one in findings] == found
        assert all(desk.queue in one.text and one.advice for one in findings)
        await (await take_one(source)).settle(Verdict.ACK)  # the line was not disturbed


def test_the_default_limit_of_rabbitmq_4_is_known() -> None:
    settings = Settings(durable=True, auto_delete=False, arguments=QUORUM, policies=False)
    assert [one.name for one in findings("orders", settings, (4, 1, 0))] == ["delivery-limit-drops"]
    assert findings("orders", settings, (3, 13, 7)) == []
    unlimited = Settings(durable=True, auto_delete=False, arguments=QUORUM | {"x-delivery-limit": -1}, policies=False)
    assert findings("orders", unlimited, (4, 1, 0)) == []


def test_policies_are_read_where_the_management_api_is_known() -> None:
    said = (
        b'{"durable":true,"auto_delete":false,"type":"quorum","arguments":{"x-queue-type":"quorum","x-delivery-limit":50},'
        b'"effective_policy_definition":{"delivery-limit":5,"dead-letter-exchange":"dead"}}'
    )
    settings = told(said)
    assert settings.arguments == QUORUM | {"x-delivery-limit": 5, "x-dead-letter-exchange": "dead"}
    assert [one.name for one in findings("orders", settings, (3, 10, 8))] == ["delivery-limit-low"]


async def test_a_management_api_that_is_away_is_told(desk: Desk) -> None:
    await desk.make()
    async with source_of(desk, management="http://127.0.0.1:1/") as source:
        assert [one.name for one in await source.check()] == ["settings-unknown"]


# --- through an inbox ---------------------------------------------------------------------------------------


@KINDS
async def test_consume_lets_every_message_take_effect_once(desk: Desk, kind: str, sqlite_lab: SqliteLab) -> None:
    await desk.make(kind)
    ids = [f"m-{n}" for n in range(30)]
    await desk.send(*ids, *ids[:10])
    await desk.send("bad", body=b"{")
    runs: dict[str, int] = {}

    async def handle(message: Message[Any], tx: Any) -> None:
        runs[message.id] = runs.get(message.id, 0) + 1
        await sqlite_lab.write(tx, message.id)
        if message.id == "m-7" and runs[message.id] <= 2:
            raise ValueError("not yet")

    stop = asyncio.Event()
    policy = RetryPolicy(max_attempts=5, base=0.01)
    async with (
        Inbox(sqlite_lab.store(), consumer="billing", retry=policy, listeners=()) as inbox,
        source_of(desk, prefetch=8) as source,
    ):
        consuming = asyncio.create_task(consume(source, inbox, handle, on_failure="hold", batch=4, stop=stop))

        async def done() -> bool:
            return desk.count() == 0 and await sqlite_lab.effects() == sorted(ids)

        await eventually(done)
        stop.set()
        await consuming
        dead = await inbox.records(State.DEAD)
    assert [record.message_id for record in dead] == ["bad"]
    assert runs["m-7"] >= 3


async def eventually(holds: Callable[[], Awaitable[bool]]) -> None:
    async with asyncio.timeout(LONG):
        while not await holds():
            await asyncio.sleep(0.05)
