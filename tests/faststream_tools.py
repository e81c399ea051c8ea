"""What tests of the FastStream middleware have in common: one way to talk to both brokers, in memory."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from aiokafka import ConsumerRecord
from faststream import AckPolicy, BaseMiddleware
from faststream.kafka import KafkaBroker, TestKafkaBroker
from faststream.rabbit import RabbitBroker, TestRabbitBroker
from pydantic import BaseModel

from onceward import Inbox
from onceward.integrations.faststream import InboxMiddleware

BROKERS = ("kafka", "rabbit")


class Order(BaseModel):
    id: str
    cents: int


class Receipt(BaseModel):
    order: str
    cents: int


class Seen:
    """A middleware around the inbox: every record that comes, and every message with how it was settled."""

    def __init__(self) -> None:
        self.records: list[Any] = []
        self.messages: list[Any] = []

    def __call__(self, msg: Any, /, *, context: Any) -> BaseMiddleware:
        seen = self

        class Look(BaseMiddleware):
            async def on_receive(self) -> None:
                seen.records.append(self.msg)

            async def consume_scope(self, call_next: Any, msg: Any) -> Any:
                seen.messages.append(msg)
                return await call_next(msg)

        return Look(msg, context=context)

    def published(self, topic: str) -> list[tuple[bytes | None, dict[str, Any]]]:
        """Body and headers of what came to that topic."""
        return [_bytes_and_headers(one) for one in self.records if _topic(one) == topic]

    @property
    def settled(self) -> list[str | None]:
        """Of all messages, in their order."""
        return [None if one.committed is None else one.committed.value for one in self.messages]


def _topic(record: Any) -> str:
    return record.topic if isinstance(record, ConsumerRecord) else record.routing_key


def _bytes_and_headers(record: Any) -> tuple[bytes | None, dict[str, Any]]:
    if isinstance(record, ConsumerRecord):
        return record.value, dict(record.headers) | {"key": record.key, "timestamp": None}
    said = {"content_type": record.content_type, "id": record.message_id, "correlation_id": record.correlation_id}
    return record.body, dict(record.headers) | said | {"priority": record.priority}


class App:
    """A broker of one kind with the middleware, in memory."""

    def __init__(self, kind: str, inbox: Inbox[Any], *, policy: Any = AckPolicy.NACK_ON_ERROR, **options: Any) -> None:
        self.kind = kind
        self.inbox = inbox
        self.seen = Seen()
        self.once = InboxMiddleware(inbox, **options)
        middlewares: Any = [self.seen, self.once]
        make: Any = KafkaBroker if kind == "kafka" else RabbitBroker
        self.broker = make(ack_policy=policy, middlewares=middlewares)

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        make: Any = TestKafkaBroker if self.kind == "kafka" else TestRabbitBroker
        async with make(self.broker, connect_only=False):
            yield

    async def send(self, body: Any, id_: str | None, topic: str = "orders", **more: Any) -> None:
        if self.kind == "kafka":
            headers = more.pop("headers", {}) | ({} if id_ is None else {"message_id": id_})
            await self.broker.publish(body, topic, headers=headers, **more)
        else:
            await self.broker.publish(body, topic, message_id=id_, **more)
