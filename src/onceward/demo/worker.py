"""A worker process: `python -m onceward.demo.worker onceward|no-inbox FILE`.

It takes deliveries from stdin, several at a time, and acknowledges on stdout. `with_onceward` and `without_an_inbox`
are the whole difference between the two worlds. Both write the charge in one transaction and acknowledge after its
commit; both acknowledge nothing when the handler raises. When stdin ends the worker finishes what it has and goes.
"""

from __future__ import annotations

import asyncio
import logging
import sqlite3
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager, closing
from pathlib import Path
from typing import Any, TypeAlias
from urllib.parse import quote

from onceward import Inbox, Message, TryLater
from onceward.demo import books, wire
from onceward.demo.shop import BankUnavailable, Order, charge
from onceward.demo.wire import Delivery, Line, Said

Process: TypeAlias = Callable[[Message[Order]], Awaitable[Said]]


@asynccontextmanager
async def with_onceward(file: Path) -> AsyncIterator[Process]:
    async with Inbox.connect(f"sqlite:///{quote(str(file))}", consumer="billing") as inbox:

        async def process(message: Message[Order]) -> Said:
            outcome = await inbox.process(message, charge)
            return Said.SKIPPED if outcome.duplicate else Said.CHARGED

        yield process


@asynccontextmanager
async def without_an_inbox(file: Path) -> AsyncIterator[Process]:
    turn = asyncio.Lock()
    with closing(books.connect(file)) as connection:

        async def process(message: Message[Order]) -> Said:
            async with turn, transaction(connection) as tx:
                await charge(message, tx)
            return Said.CHARGED

        yield process


class PlainTx:
    def __init__(self, connection: sqlite3.Connection) -> None:
        self._connection = connection

    async def execute(self, sql: str, *params: Any) -> int:
        return self._connection.execute(sql, params).rowcount


@asynccontextmanager
async def transaction(connection: sqlite3.Connection) -> AsyncIterator[PlainTx]:
    connection.execute("BEGIN IMMEDIATE")
    try:
        yield PlainTx(connection)
    except BaseException:
        connection.execute("ROLLBACK")
        raise
    connection.execute("COMMIT")


WORLDS: dict[str, Callable[[Path], AbstractAsyncContextManager[Process]]] = {
    "onceward": with_onceward,
    "no-inbox": without_an_inbox,
}


async def settle(delivery: Delivery, process: Process) -> None:
    """If it returns, acknowledge; if it raises, do not: the broker brings it again."""
    try:
        said = await process(delivery.message)
    except (BankUnavailable, TryLater):
        say(Line(Said.FAILED, delivery.number))
    else:
        say(Line(said, delivery.number))
        say(Line(Said.ACK, delivery.number))


def say(line: Line) -> None:
    sys.stdout.buffer.write(wire.encode(line))
    sys.stdout.buffer.flush()


async def arriving() -> AsyncIterator[Delivery]:
    reader = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    async for line in reader:
        yield wire.decode_delivery(line)


async def work(world: str, file: Path) -> None:
    async with WORLDS[world](file) as process, asyncio.TaskGroup() as tasks:
        say(Line(Said.READY))
        async for delivery in arriving():
            tasks.create_task(settle(delivery, process))


if __name__ == "__main__":
    logging.basicConfig(level=logging.ERROR)  # a bank that fails is no news here
    asyncio.run(work(sys.argv[1], Path(sys.argv[2])))
