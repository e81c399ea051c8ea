"""SQLite, stored mode: accepting and working on messages, against a hand-written queue in one table.

All of them write durably (WAL, synchronous=FULL), each in a file of its own.
"""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack, closing
from functools import cache
from pathlib import Path
from typing import Any

import msgspec

from bench.batches import BATCH
from bench.embedded import CHARGE, Files, Tx, charge, charge_all, connect
from bench.handwritten import HOST, claim_of
from bench.messages import CONSUMER, new_messages
from bench.questions import World
from bench.queues.base import Tally, Work, row_of
from bench.rounds import Stage, Variant
from bench.stored import accepting, accepting_many, dispatching, of_streams, running
from onceward import Inbox, Message
from onceward.sqlite import SqliteStore

TABLE = """
CREATE TABLE queue (
    seq INTEGER PRIMARY KEY, identity BLOB NOT NULL UNIQUE, consumer TEXT NOT NULL, tenant TEXT NOT NULL,
    scope TEXT NOT NULL, key TEXT NOT NULL, message_id TEXT NOT NULL, type TEXT NOT NULL, source TEXT NOT NULL,
    topic TEXT NOT NULL, state TEXT NOT NULL DEFAULT 'accepted', payload TEXT, payload_hash BLOB NOT NULL, host TEXT,
    received_at TEXT NOT NULL DEFAULT CURRENT_TIMESTAMP, processed_at TEXT);
CREATE INDEX queue_ready ON queue (seq) WHERE state = 'accepted';
"""
INSERT = f"""
INSERT INTO queue (
    identity, consumer, tenant, scope, key, message_id, type, source, topic, payload, payload_hash, host)
VALUES (?, '{CONSUMER}', 'default', ?, ?, ?, ?, ?, ?, ?, ?, ?)
ON CONFLICT (identity) DO NOTHING
"""
TAKE = "SELECT seq, message_id, payload FROM queue WHERE state = 'accepted' ORDER BY seq LIMIT ?"
DONE = "UPDATE queue SET state = 'processed', processed_at = CURRENT_TIMESTAMP, payload = NULL WHERE seq = ?"


class HandQueue:
    """One connection, on the thread of the event loop; a lock, because there is one writer."""

    def __init__(self, connection: sqlite3.Connection) -> None:
        self._connection = connection
        self._turn, self._tx = asyncio.Lock(), Tx(connection)

    async def accept(self, message: Message[Any]) -> None:
        await self.accept_many([message])

    async def accept_many(self, messages: list[Message[Any]]) -> None:
        async with self._turn:
            self._connection.execute("BEGIN IMMEDIATE")
            self._connection.executemany(INSERT, map(_row, messages))
            self._connection.execute("COMMIT")

    fill = accept_many

    async def dispatch(self, work: Work) -> bool:
        return await self._some(work, 1) > 0

    async def run(self, work: Work, stop: asyncio.Event, *, workers: int = 1, batch: int | None = None) -> None:
        assert workers == 1
        while not stop.is_set():
            if not await self._some(work, batch or 1):
                await asyncio.sleep(0.01)

    async def _some(self, work: Work, number: int) -> int:
        async with self._turn:
            self._connection.execute("BEGIN IMMEDIATE")
            rows = self._connection.execute(TAKE, (number,)).fetchall()
            for _seq, id_, text in rows:
                payload = msgspec.json.decode(text)
                if await work(Message(id=id_, type="order.paid", payload=payload)):
                    await self._tx.execute(CHARGE, *row_of(payload, id_))
            self._connection.executemany(DONE, [(row[0],) for row in rows])
            self._connection.execute("COMMIT")
        return len(rows)


def _row(message: Message[Any]) -> tuple[Any, ...]:
    claim = claim_of(message)
    return (
        claim.identity, claim.scope, message.id, message.id, message.type, message.source, message.topic,
        msgspec.json.encode(message.payload).decode(), claim.payload_hash, HOST,
    )  # fmt: skip


class OncewardQueue:
    def __init__(self, inbox: Inbox[Any]) -> None:
        self._inbox = inbox

    async def accept(self, message: Message[Any]) -> None:
        await self._inbox.accept(message)

    async def accept_many(self, messages: list[Message[Any]]) -> None:
        await self._inbox.accept(messages)

    fill = accept_many

    async def dispatch(self, work: Work) -> bool:
        return await self._inbox.dispatch(_handler(work)) is not None

    async def run(self, work: Work, stop: asyncio.Event, *, workers: int = 1, batch: int | None = None) -> None:
        size = {} if batch is None else {"batch": batch}
        await self._inbox.run(_handler(work), stop=stop, concurrency=workers, **size)

    async def run_bulk(self, tally: Tally, stop: asyncio.Event) -> None:
        async def handle(messages: list[Message[Any]], tx: Any) -> None:
            await charge_all(messages, tx)
            tally.count(len(messages))

        await self._inbox.run(bulk=handle, stop=stop)


@cache
def _handler(work: Work) -> Any:
    """Once, as a service has it: onceward looks at a function when it sees it first."""

    async def handle(message: Message[Any], tx: Any) -> None:
        if await work(message):
            await charge(message, tx)

    return handle


class Kept:
    """How many messages are in the files more than before."""

    def __init__(self, **tables: Path) -> None:
        self._tables = tables
        self._known = 0

    async def count(self) -> int:
        number = sum(self._in_one(table, path) for table, path in self._tables.items())
        more, self._known = number - self._known, number
        return more

    @staticmethod
    def _in_one(table: str, path: Path) -> int:
        with closing(connect(path)) as connection:
            number: int = connection.execute(f"SELECT count(*) FROM {table}").fetchone()[0]
        return number


async def stages(world: World) -> AsyncGenerator[Stage, None]:
    async with AsyncExitStack() as stack:
        files = Files(world.folder)

        async def ours() -> tuple[OncewardQueue, Path]:
            path = await files.new()
            inbox = await stack.enter_async_context(Inbox(SqliteStore(path), consumer=CONSUMER, listeners=()))
            return OncewardQueue(inbox), path

        async def by_hand() -> tuple[HandQueue, Path]:
            path = await files.new()
            connection = stack.enter_context(closing(connect(path)))
            connection.executescript(TABLE)
            return HandQueue(connection), path

        # What is accepted is not worked on, so accepting has files of its own.
        (hand, one), (inbox, other) = await by_hand(), await ours()
        kept = Kept(queue=one, onceward_records=other)
        floor = ("by hand",)
        for workers in (1, 16):
            yield Stage(
                question="stored-sqlite", title="SQLite, accept, one message at a time", workers=workers,
                make=new_messages, effects=kept.count,
                variants=(Variant("by hand", accepting(hand)), Variant("onceward", accepting(inbox), floor)),
            )  # fmt: skip
        yield Stage(
            question="stored-sqlite", title=f"SQLite, accept, lists of {BATCH}", batch=BATCH,
            make=new_messages, effects=kept.count,
            variants=(
                Variant("by hand", accepting_many(hand.accept_many)),
                Variant("onceward", accepting_many(inbox.accept_many), floor),
                Variant("onceward, streams", accepting_many(inbox.accept_many), floor, make=of_streams),
            ),
        )  # fmt: skip

        (hand, _), (inbox, _) = await by_hand(), await ours()
        yield Stage(
            question="stored-sqlite", title="SQLite, dispatch, one message in one transaction, one write",
            make=new_messages, effects=files.effects,
            variants=(
                dispatching("by hand", hand, write=True),
                dispatching("onceward", inbox, floor, write=True),
            ),
        )  # fmt: skip
        yield Stage(
            question="stored-sqlite", title="SQLite, run, one write", make=new_messages, effects=files.effects,
            variants=(
                running("by hand", hand, write=True, about=1_000),
                running("by hand, 100", hand, floor, write=True, batch=BATCH, about=20_000),
                running("onceward, batch=1", inbox, floor, write=True, batch=1, about=500),
                running("onceward", inbox, ("by hand", "by hand, 100"), write=True, about=5_000),
                running("onceward, streams", inbox, ("by hand", "by hand, 100"), write=True, make=of_streams,
                        about=5_000),
                running("onceward, bulk", inbox, ("by hand", "by hand, 100"), write=True, about=8_000,
                        runs=inbox.run_bulk),
            ),
        )  # fmt: skip
