"""Orders of a Kafka topic, each charged once. Twice the same: a loop written by hand, and `consume`.

    pip install 'onceward[kafka]'
    python examples/kafka_loop.py consume --topic orders --bootstrap localhost:9092 --database sqlite:///shop.db
    python examples/kafka_loop.py loop

On PostgreSQL, `pip install 'onceward[asyncpg]'`, run `onceward setup postgresql://localhost/shop` once, and give that
address as the database. The environment variables KAFKA and DATABASE do as well.

A record is an order as JSON, {"order": "o-1", "cents": 1250}, with the id of its event in the header `message_id`,
which is the same however often the producer sends it. The key of a record is no such id: it says which events belong
together, and the second event of an order has it too.
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

from aiokafka import AIOKafkaConsumer
from aiokafka.errors import CommitFailedError

from onceward import Inbox, Message
from onceward.brokers import consume
from onceward.brokers.kafka import KafkaSource


async def charge(message: Message[Any], tx: Any) -> None:
    """What is written through `tx` is there together with the record of the message, or not at all."""
    await tx.execute(
        "INSERT INTO charges (order_id, cents) VALUES ($1, $2)", message.payload["order"], message.payload["cents"]
    )


# --- by hand ------------------------------------------------------------------------------------------------


def to_message(record: Any) -> Message[Any]:
    headers = dict(record.headers)
    return Message(
        id=headers["message_id"].decode(),
        type="order.created",
        topic=record.topic,
        payload=json.loads(record.value),
    )


async def by_hand(inbox: Inbox[Any], options: argparse.Namespace) -> None:
    """If `process` returns, commit. If it raises, do not: the program ends, and the record comes again when it is
    started again. To go on with the next record instead would lose this one, for an offset stands for all before it."""
    consumer = AIOKafkaConsumer(
        options.topic,
        bootstrap_servers=options.bootstrap,
        group_id=options.group,
        enable_auto_commit=False,  # by the clock, whatever has become of the record
        auto_offset_reset="earliest",  # a new group also gets what is there already
        isolation_level="read_committed",  # and nothing that its producer has taken back
    )
    async with consumer:
        async for record in consumer:
            origin = f"{record.topic}/{record.partition}/{record.offset}"
            outcome = await inbox.process(to_message(record), charge, origin=origin)
            with suppress(CommitFailedError):  # another one has the partition now, and gets a duplicate
                await consumer.commit()
            print(origin, outcome.kind, flush=True)


# --- in three lines -----------------------------------------------------------------------------------------


async def in_three_lines(inbox: Inbox[Any], options: argparse.Namespace, stop: asyncio.Event) -> None:
    """Batches, partitions side by side, retries, dead letters, rebalances, and an order that fails stops no other."""
    async with KafkaSource(
        options.topic, group=options.group, bootstrap=options.bootstrap, type="order.created"
    ) as source:
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
    parser = argparse.ArgumentParser(description="Charge each order of a Kafka topic once.")
    parser.add_argument("way", choices=["loop", "consume"], help="a loop written by hand, or onceward's consume")
    parser.add_argument("--topic", default="orders")
    parser.add_argument("--group", default="order-service", help="the consumer group (default: order-service)")
    parser.add_argument("--bootstrap", default=os.environ.get("KAFKA", "localhost:9092"))
    parser.add_argument("--database", default=os.environ.get("DATABASE", "sqlite:///shop.db"))
    return parser.parse_args()


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO, format="%(levelname)s %(name)s %(message)s")
    asyncio.run(main(arguments()))
