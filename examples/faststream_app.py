"""A service on FastStream that bills each order once, on Kafka or RabbitMQ, with SQLAlchemy and PostgreSQL.

    pip install 'onceward[faststream,sqlalchemy,asyncpg]' 'faststream[kafka,rabbit]'
    onceward setup postgresql://localhost/shop
    DATABASE=postgresql+asyncpg://localhost/shop BROKER=kafka://localhost:9092 python examples/faststream_app.py

BROKER=amqp://localhost is RabbitMQ. Orders come from the topic or queue `billing.orders`, and receipts go to
`billing.receipts`. Send an order twice, with the same id: it is billed once, and its receipt comes twice, byte for byte
the same.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from faststream import AckPolicy, Depends, FastStream
from faststream.kafka import KafkaBroker
from faststream.rabbit import Channel, QueueType, RabbitBroker, RabbitQueue
from pydantic import BaseModel, PositiveInt
from sqlalchemy import func, select
from sqlalchemy.ext.asyncio import AsyncSession, async_sessionmaker, create_async_engine
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

from onceward import Inbox, RetryPolicy
from onceward.integrations.faststream import InboxMiddleware, inbox_tx
from onceward.sqlalchemy import SqlAlchemyStore, joining

DATABASE = os.environ.get("DATABASE", "postgresql+asyncpg://localhost/shop")
BROKER = os.environ.get("BROKER", "kafka://localhost:9092")
NAME = os.environ.get("NAME", "billing")


# --- what comes and goes ------------------------------------------------------------------------------------


class Order(BaseModel):
    id: str
    cents: PositiveInt


class Receipt(BaseModel):
    order: str
    cents: int
    number: int


# --- what is written ----------------------------------------------------------------------------------------


class Base(DeclarativeBase):
    pass


class Charge(Base):
    __tablename__ = "charges"
    number: Mapped[int] = mapped_column(primary_key=True)
    order_id: Mapped[str]
    cents: Mapped[int]


class Charges:
    """A repository as many are: it opens a session for each call and commits it. It knows nothing of an inbox."""

    def __init__(self, sessions: async_sessionmaker[AsyncSession]) -> None:
        self._sessions = sessions

    async def add(self, order: Order) -> int:
        async with self._sessions() as session:
            charge = Charge(order_id=order.id, cents=order.cents)
            session.add(charge)
            await session.commit()
            return charge.number


engine = create_async_engine(DATABASE)
Session = async_sessionmaker(engine, expire_on_commit=False)
charges = Charges(joining(Session))  # in a handler, its sessions join the handler's transaction

# --- the app ------------------------------------------------------------------------------------------------

inbox = Inbox(SqlAlchemyStore(Session), consumer=NAME, retry=RetryPolicy(max_attempts=8))
once = InboxMiddleware(inbox)


def broker_of(url: str) -> tuple[Any, Any, dict[str, Any]]:
    """The broker, and how to subscribe to orders."""
    options: dict[str, Any] = {"ack_policy": AckPolicy.NACK_ON_ERROR, "middlewares": [once]}
    if url.startswith("kafka://"):
        kafka = KafkaBroker(url.removeprefix("kafka://"), **options)
        return kafka, f"{NAME}.orders", {"group_id": NAME, "auto_offset_reset": "earliest"}
    queue = RabbitQueue(f"{NAME}.orders", queue_type=QueueType.QUORUM, durable=True)
    return RabbitBroker(url, default_channel=Channel(prefetch_count=20), **options), queue, {}


broker, orders, options = broker_of(BROKER)


@broker.subscriber(orders, **options)
@broker.publisher(f"{NAME}.receipts")
async def on_order(order: Order, tx: AsyncSession = Depends(inbox_tx)) -> Receipt:
    number = await charges.add(order)
    billed = await tx.scalar(select(func.sum(Charge.cents)).where(Charge.order_id == order.id))
    return Receipt(order=order.id, cents=billed, number=number)


@asynccontextmanager
async def lifespan() -> AsyncIterator[None]:
    once.check(broker)  # a subscriber that acknowledges too early is an error here, and not with the first message
    async with engine.begin() as connection:
        await connection.run_sync(Base.metadata.create_all)
    async with inbox:
        yield
    await engine.dispose()


app = FastStream(broker, lifespan=lifespan)

if __name__ == "__main__":
    asyncio.run(app.run())
