"""Orders of a RabbitMQ queue, each charged once. Twice the same: a loop written by hand, and `consume`.

    pip install 'onceward[rabbitmq]'
    python examples/rabbitmq_loop.py consume --queue orders --url amqp://guest:guest@localhost/ --database sqlite:///shop.db
    python examples/rabbitmq_loop.py loop

On PostgreSQL, `pip install 'onceward[asyncpg]'`, run `onceward setup postgresql://localhost/shop` once, and give that
address as the database. The environment variables RABBITMQ and DATABASE do as well.

A message is an order as JSON, {"order": "o-1", "cents": 1250}, with the id of its event in the property `message_id`,
which is the same however often the producer sends it.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import os
import signal
from contextlib import suppress
from typing import Any

import aio_pika

from onceward import Inbox, Message
from onceward.brokers import consume
from onceward.brokers.rabbitmq import RabbitMQSource

QUORUM: dict[str, Any] = {"x-queue-type": "quorum"}


async def charge(message: Message[Any], tx: Any) -> None:
    """What is written through `tx` is there together with the record of the message, or not at all."""
    await tx.execute(
        "INSERT INTO charges (order_id, cents) VALUES ($1, $2)", message.payload["order"], message.payload["cents"]
    )


# --- by hand ------------------------------------------------------------------------------------------------


def to_message(delivery: Any) -> Message[Any]:
    return Message(
        id=delivery.message_id,
        type="order.created",
        topic=delivery.routing_key,
        payload=json.loads(delivery.body),
    )


async def by_hand(inbox: Inbox[Any], options: argparse.Namespace) -> None:
    """If `process` returns, acknowledge. If it raises, do not: the program ends, and the broker delivers again what was
    not acknowledged. `async with delivery.process()` would reject it instead, and the broker would drop it."""
    async with await aio_pika.connect(options.url) as connection:
        channel = await connection.channel()
        await channel.set_qos(prefetch_count=20)  # without it, the whole queue comes at once
        queue = await channel.declare_queue(options.queue, durable=True, arguments=QUORUM)
        async with queue.iterator() as deliveries:
            async for delivery in deliveries:
                outcome = await inbox.process(to_message(delivery), charge, redelivered=bool(delivery.redelivered))
                await delivery.ack()
                print(delivery.message_id, outcome.kind, flush=True)


# --- in three lines -----------------------------------------------------------------------------------------


async def in_three_lines(inbox: Inbox[Any], options: argparse.Namespace, stop: asyncio.Event) -> None:
    """Batches, several at once, retries, dead letters, reconnecting, and an order that fails stops no other."""
    async with RabbitMQSource(options.queue, url=options.url, declare=True, type="order.created") as source:
        await consume(source, inbox, charge, stop=stop, grace=25)


# --- the program --------------------------------------------------------------------------------------------


async def make_table(_message: Message[Any], tx: Any) -> None:
    await tx.execute("CREATE TABLE IF NOT EXISTS charges (order_id TEXT NOT NULL, cents INTEGER NOT NULL)")


async def main(options: argparse.Namespace) -> None:
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    async with Inbox.connect(options.database, consumer="order-service") as inbox:
        await inbox.process(Message("make-charges", "migration", None), make_table)  # once, as everything
        if options.way == "consume":
            await in_three_lines(inbox, options, stop)
        else:
            await unless_stopped(by_hand(inbox, options), stop)


async def unless_stopped(work: Any, stop: asyncio.Event) -> None:
    """What is in the middle when `stop` comes is undone, and comes again."""
    working, stopping = asyncio.ensure_future(work), asyncio.ensure_future(stop.wait())
    await asyncio.wait([working, stopping], return_when=asyncio.FIRST_COMPLETED)
    working.cancel()
    stopping.cancel()
    with suppress(asyncio.CancelledError):
        await working


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Charge each order of a RabbitMQ queue once.")
    parser.add_argument("way", choices=["loop", "consume"], help="a loop written by hand, or onceward's consume")
    parser.add_argument("--queue", default="orders")
    parser.add_argument("--url", default=os.environ.get("RABBITMQ", "amqp://guest:guest@localhost/"))
    parser.add_argument("--database", default=os.environ.get("DATABASE", "sqlite:///shop.db"))
    return parser.parse_args()


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO, format="%(levelname)s %(name)s %(message)s")
    asyncio.run(main(arguments()))
