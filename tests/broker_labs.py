"""Real brokers as the conformance suite of sources wants them: a topic or a queue of its own for each test."""

from __future__ import annotations

import asyncio
import importlib
from contextlib import AbstractAsyncContextManager, closing, suppress
from itertools import count
from typing import Any
from uuid import uuid4

import aio_pika
import pika
from confluent_kafka import Producer

from onceward.brokers.base import Source
from onceward.brokers.rabbitmq import RabbitMQSource
from onceward.testing.proxy import Proxy
from onceward.testing.sources import BrokerLab, Sent
from onceward.testing.sources.lab import Job
from tests.services import kafka, rabbitmq

_numbers = count(1)


def _name(what: str) -> str:
    return f"{what}-{next(_numbers)}-{uuid4().hex[:6]}"


class KafkaLab(BrokerLab):
    """`driver` is the module of the source: kafka (aiokafka) or confluent."""

    members = True

    def __init__(self, server: kafka.Broker, driver: str, *, partitions: int = 3) -> None:
        self._server = server
        self._driver = driver
        self.topic, self.group = _name("orders"), _name("billing")
        self.restarts = self.network = isinstance(server, kafka.Kafka)
        server.create_topic(self.topic, partitions=partitions)

    @property
    def _options(self) -> dict[str, Any]:
        """A member that was killed is missed soon."""
        return {"group": self.group, "session_timeout_ms": 3000, "heartbeat_interval_ms": 500, "drain": 5.0}

    def source(self, *, port: int | None = None) -> Source:
        module = importlib.import_module(f"onceward.brokers.{self._driver}")
        bootstrap = self._server.bootstrap if port is None else f"127.0.0.1:{port}"
        source: Source = module.KafkaSource(self.topic, bootstrap=bootstrap, **self._options)
        return source

    def job(self) -> Job:
        options = self._options | {"bootstrap": self._server.bootstrap}
        return Job(f"onceward.brokers.{self._driver}:KafkaSource", (self.topic,), options)

    async def send(self, *records: Sent) -> None:
        await asyncio.to_thread(self._send, records)

    def _send(self, records: tuple[Sent, ...]) -> None:
        failed: list[Any] = []
        producer = Producer({"bootstrap.servers": self._server.bootstrap, "acks": "all", "linger.ms": 5})
        for record in records:
            headers = [("type", record.type.encode())]
            headers += [] if record.id is None else [("message_id", record.id.encode())]
            producer.produce(
                self.topic, record.bytes, record.key, headers=headers,
                on_delivery=lambda error, _message: failed.append(error) if error else None,
            )  # fmt: skip
            producer.poll(0)
        assert producer.flush(60) == 0
        assert not failed

    async def unsettled(self) -> int:
        return await asyncio.to_thread(self._lag)

    def _lag(self) -> int:
        ends = self._server.end_offsets(self.topic)
        committed = self._server.committed(self.group, self.topic)
        return sum(end - (committed.get(partition) or 0) for partition, end in ends.items())

    async def restart(self) -> None:
        assert isinstance(self._server, kafka.Kafka)
        await asyncio.to_thread(self._server.kill)
        await asyncio.to_thread(self._server.start)

    def proxy(self) -> AbstractAsyncContextManager[Proxy]:
        assert isinstance(self._server, kafka.Kafka)
        return self._server.proxy()


class RabbitMQLab(BrokerLab):
    """`kind` is the type of its queue: classic or quorum. What is put off comes back to the end of the queue."""

    ordered = False
    competing = True
    network = True

    def __init__(self, server: rabbitmq.Broker, kind: str) -> None:
        self._server = server
        self._arguments = {"x-queue-type": kind}
        self.queue = _name("orders")
        self.restarts = isinstance(server, rabbitmq.RabbitMQ)

    async def set_up(self) -> None:
        async with await aio_pika.connect(self._server.url) as connection, connection.channel() as channel:
            await channel.declare_queue(self.queue, durable=True, arguments=self._arguments)

    def source(self, *, port: int | None = None) -> RabbitMQSource:
        url = self._server.url if port is None else self._server.url.replace(f":{self._server.port}/", f":{port}/")
        return RabbitMQSource(self.queue, url=url, prefetch=50)

    def job(self) -> Job:
        return Job("onceward.brokers.rabbitmq:RabbitMQSource", (self.queue,), {"url": self._server.url, "prefetch": 50})

    async def send(self, *records: Sent) -> None:
        await asyncio.to_thread(self._send_without_id, [record for record in records if record.id is None])
        async with await aio_pika.connect(self._server.url) as connection, connection.channel() as channel:
            sent = [
                channel.default_exchange.publish(self._message(one), self.queue)
                for one in records
                if one.id is not None
            ]
            for at in range(0, len(sent), 100):
                await asyncio.gather(*sent[at : at + 100])

    def _send_without_id(self, records: list[Sent]) -> None:
        """aio-pika gives an id to what has none. Other clients do not."""
        if records:
            with closing(pika.BlockingConnection(pika.URLParameters(self._server.url))) as connection:
                for record in records:
                    given = pika.BasicProperties(type=record.type, delivery_mode=2)
                    connection.channel().basic_publish("", self.queue, record.bytes, given)

    def _message(self, record: Sent) -> aio_pika.Message:
        return aio_pika.Message(
            record.bytes, message_id=record.id, type=record.type, delivery_mode=aio_pika.DeliveryMode.PERSISTENT
        )

    async def unsettled(self) -> int:
        """In the queue, and in those where what is put off waits."""
        return await asyncio.to_thread(self._count)

    def _count(self) -> int:
        total = self._server.count(self.queue)
        for step in (1, 2, 5, 10):
            name = f"{self.queue}.retry.{step}"
            with suppress(RuntimeError):  # it was never needed
                total += self._server.count(name)
        return total

    async def restart(self) -> None:
        assert isinstance(self._server, rabbitmq.RabbitMQ)
        await asyncio.to_thread(self._server.kill)
        await asyncio.to_thread(self._server.start)

    def proxy(self) -> AbstractAsyncContextManager[Proxy]:
        return Proxy("127.0.0.1", self._server.port).running()
