"""A consumer as somebody writes it who has read nothing but the first page: process, then commit. No error handling.

    python naive_consumer.py '{"loop": "onceward", "url": ..., "port": ...}'

Whatever `process` or `commit` raises ends the process with a traceback, as it ends a pod. tests/test_naive_loop.py is
the broker behind the port and starts the process again. The loops `no inbox` and `commit first` are wrong, and are here
so that the test can show that it would notice. `torn down` is no loop: it is a main function that ends too early.
"""

from __future__ import annotations

import asyncio
import json
import os
import sqlite3
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, closing
from types import SimpleNamespace
from typing import Any, Self

import asyncpg
import msgspec

from onceward import Inbox, Message, RetryPolicy, current
from onceward.connect import store_from_url
from onceward.events import Deferred, InboxEvent

RETRY = RetryPolicy(max_attempts=10, base=0.4, cap=0.8)


class Job(msgspec.Struct):
    loop: str
    url: str
    port: int
    wait: float = 5.0
    ids: list[str] = []


class CardRefused(Exception):
    """The bank says no, the first few times."""


class CommitFenced(Exception):
    """The broker has given this partition to another consumer. Kafka says CommitFailedError."""


# --- the handler ----------------------------------------------------------------------------------------------------


async def book(message: Message[Any], tx: Any, *, slow: bool = True) -> None:
    """The effect: one row. Then the bank takes its time, with the row written and not committed."""
    await tx.execute("INSERT INTO effects VALUES ($1)", message.id)
    if slow:
        await asyncio.sleep(message.payload["takes"])


async def charge(message: Message[Any], tx: Any) -> None:
    await book(message, tx)
    if current().attempt <= message.payload["refused"]:
        raise CardRefused(message.id)


def to_message(record: dict[str, Any]) -> Message[Any]:
    return Message(record["id"], "order.paid", record["payload"], source="shop", topic="orders")


# --- the loops ------------------------------------------------------------------------------------------------------


async def with_onceward(job: Job, consumer: Consumer) -> None:
    async with open_inbox(job) as inbox, consumer:
        async for record in consumer:
            await inbox.process(to_message(record), charge)
            await consumer.commit()


async def without_an_inbox(job: Job, consumer: Consumer) -> None:
    """Wrong: what was committed here and not there is done again.

    It is wrong enough without refused cards, and a handler is slow only at the first delivery: to be too slow every
    time, with nothing that remembers the work, would be to begin it for ever.
    """
    async with database(job.url) as begin, consumer:
        async for record in consumer:
            async with begin() as tx:
                await book(to_message(record), tx, slow=record["times"] == 1)
            await consumer.commit()


async def with_the_commit_first(job: Job, consumer: Consumer) -> None:
    """Wrong: what is acknowledged before it is processed never comes again."""
    async with open_inbox(job) as inbox, consumer:
        async for record in consumer:
            await consumer.commit()
            await inbox.process(to_message(record), charge)


async def torn_down(job: Job, _consumer: Consumer) -> None:
    """Ends when the last of its tasks is about to commit and the others wait for that: asyncio.run() cancels them all.

    Not only these tasks: everything that runs on the loop, also what the library has put behind a shield.
    """
    from onceward.testing import PointStore  # brings pytest with it, and the loops have to start fast

    ready, arrived = asyncio.Event(), 0

    async def reached(point: str) -> None:
        nonlocal arrived
        arrived += point == "before commit"
        if arrived == len(job.ids):
            ready.set()
        elif store.features.concurrent_units and point == "before commit":
            await ready.wait()

    store = store_from_url(job.url)
    inbox = Inbox(PointStore(store, reached), consumer="billing")
    await inbox.open()
    records = [{"id": id_, "payload": {"takes": 0, "refused": 0}} for id_ in job.ids]
    tasks = [asyncio.ensure_future(inbox.process(to_message(record), charge)) for record in records]
    await ready.wait()
    print(sum(not task.done() for task in tasks), flush=True)


LOOPS = {
    "onceward": with_onceward,
    "no inbox": without_an_inbox,
    "commit first": with_the_commit_first,
    "torn down": torn_down,
}


def open_inbox(job: Job) -> Inbox[Any]:
    return Inbox.connect(job.url, consumer="billing", retry=RETRY, wait=job.wait, listeners=[tell])


def tell(event: InboxEvent) -> None:
    """What happened, for the test to count."""
    name = type(event).__name__
    print(f"{name} {event.reason}" if isinstance(event, Deferred) else name, flush=True)


# --- plain transactions, for the loop without an inbox --------------------------------------------------------------


@asynccontextmanager
async def database(url: str) -> AsyncIterator[Any]:
    """Gives a function that begins a transaction."""
    if url.startswith("sqlite:"):
        with closing(sqlite3.connect(url.removeprefix("sqlite:///"), timeout=30, isolation_level=None)) as connection:
            yield lambda: sqlite_transaction(connection)
        return
    postgres = await asyncpg.connect(url)
    try:
        yield lambda: postgres_transaction(postgres)
    finally:
        await postgres.close()


@asynccontextmanager
async def sqlite_transaction(connection: sqlite3.Connection) -> AsyncIterator[Any]:
    async def execute(sql: str, *params: Any) -> None:
        connection.execute(sql.replace("$1", "?"), params)

    connection.execute("BEGIN IMMEDIATE")
    yield SimpleNamespace(execute=execute)
    connection.execute("COMMIT")


@asynccontextmanager
async def postgres_transaction(connection: asyncpg.Connection) -> AsyncIterator[Any]:
    async with connection.transaction():
        yield connection


# --- the client of the broker ---------------------------------------------------------------------------------------


class Consumer:
    """As far as a loop can see, what a Kafka client is: records one by one, and `commit` for those it has given out."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._given: dict[str, Any] = {}

    async def __aenter__(self) -> Self:
        self._reader, self._writer = await asyncio.open_connection("127.0.0.1", self._port)
        self._say({"join": os.getpid()})
        return self

    async def __aexit__(self, *_error: object) -> None:
        self._writer.close()

    def __aiter__(self) -> Consumer:
        return self

    async def __anext__(self) -> dict[str, Any]:
        answer = await self._ask({"poll": True})
        if "end" in answer:
            raise StopAsyncIteration
        self._given = answer
        return answer

    async def commit(self) -> None:
        partition, offset = self._given["partition"], self._given["offset"]
        await self._ask({"commit": [partition, offset + 1]})

    async def _ask(self, request: dict[str, Any]) -> dict[str, Any]:
        self._say(request)
        line = await self._reader.readline()
        if not line:
            raise ConnectionResetError("the broker is gone")
        answer: dict[str, Any] = json.loads(line)
        if "fenced" in answer:
            raise CommitFenced(str(request))
        return answer

    def _say(self, request: dict[str, Any]) -> None:
        self._writer.write(json.dumps(request).encode() + b"\n")


if __name__ == "__main__":
    job = msgspec.json.decode(sys.argv[1], type=Job)
    asyncio.run(LOOPS[job.loop](job, Consumer(job.port)))
