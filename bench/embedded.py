"""SQLite: `process` against a hand-written writer that commits in groups, and against a transaction for each message.

All of them write durably (WAL, synchronous=FULL), run the same async handler, and acknowledge a message only after its
COMMIT. Each has a file of its own, because a file has one writer.
"""

from __future__ import annotations

import asyncio
import sqlite3
from collections import deque
from collections.abc import AsyncGenerator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack, closing
from pathlib import Path
from typing import Any

from bench.batches import BATCH, in_batches
from bench.handwritten import HANDLER, HOST, claim_of
from bench.messages import CHARGES, CONSUMER, charge_of, new_messages
from bench.questions import World
from bench.rounds import Stage, Step, Variant, WorkNotDone
from bench.single import processed
from onceward import Inbox, Message
from onceward.sqlite import SqliteStore

CHARGE = "INSERT INTO charges (message_id, order_id, cents) VALUES (?, ?, ?)"
GROUP = 100


async def charge(message: Message[Any], tx: Any) -> None:
    await tx.execute(CHARGE, *charge_of(message))


async def charge_all(messages: list[Message[Any]], tx: Any) -> None:
    await tx.executemany(CHARGE, list(map(charge_of, messages)))


class Tx:
    """What the hand-written variants give to a handler: statements run at once, on the thread of the event loop."""

    def __init__(self, connection: sqlite3.Connection) -> None:
        self._connection = connection

    async def execute(self, sql: str, *params: Any) -> int:
        return self._connection.execute(sql, params).rowcount

    async def executemany(self, sql: str, rows: list[tuple[Any, ...]]) -> int:
        return self._connection.executemany(sql, rows).rowcount


def connect(path: Path) -> sqlite3.Connection:
    connection = sqlite3.connect(path, isolation_level=None, check_same_thread=False, timeout=10)
    connection.execute("PRAGMA journal_mode = WAL")
    connection.execute("PRAGMA synchronous = FULL")
    return connection


# --- the record, as onceward writes it ----------------------------------------------------------------------------

CLAIM = """
INSERT INTO onceward_records (
    identity, consumer, tenant, scope, key, message_id, type, source, topic, state, attempts, payload_hash, handler,
    host, processed_at)
VALUES (?, ?, 'default', ?, ?, ?, ?, ?, ?, 'processed', 1, ?, ?, ?, strftime('%Y-%m-%dT%H:%M:%fZ', 'now'))
ON CONFLICT (identity) DO NOTHING
"""


def claim_row(message: Message[Any]) -> tuple[Any, ...]:
    claim = claim_of(message)
    return (
        claim.identity, CONSUMER, claim.scope, message.id, message.id, message.type, message.source, message.topic,
        claim.payload_hash, HANDLER, HOST,
    )  # fmt: skip


# --- a transaction for each message -------------------------------------------------------------------------------


def one_by_one(connection: sqlite3.Connection) -> Step:
    """BEGIN, the claim, the handler, COMMIT with its fsync, all on the loop; the others wait."""
    turn, tx = asyncio.Lock(), Tx(connection)

    async def step(messages: list[Message[Any]]) -> int:
        (message,) = messages
        async with turn:
            connection.execute("BEGIN IMMEDIATE")
            first = connection.execute(CLAIM, claim_row(message)).rowcount
            if first:
                await charge(message, tx)
            connection.execute("COMMIT")
        return first

    return step


# --- groups -------------------------------------------------------------------------------------------------------


class GroupWriter:
    """One task takes what waits, runs it in one transaction, and lets a thread COMMIT: up to a hundred together.

    With an inbox each message has a savepoint and a claim in front of its handler; without, only the handler runs.
    """

    def __init__(self, connection: sqlite3.Connection, *, inbox: bool) -> None:
        self._connection = connection
        self._tx = Tx(connection)
        self._work = self._claim_and_handle if inbox else self._handle
        self._thread = ThreadPoolExecutor(1)
        self._waiting: deque[tuple[Message[Any], asyncio.Future[int]]] = deque()
        self._writer: asyncio.Task[None] | None = None

    async def step(self, messages: list[Message[Any]]) -> int:
        (message,) = messages
        loop = asyncio.get_running_loop()
        settled: asyncio.Future[int] = loop.create_future()
        self._waiting.append((message, settled))
        if self._writer is None:
            self._writer = loop.create_task(self._write())
        return await settled

    async def _write(self) -> None:
        loop = asyncio.get_running_loop()
        while self._waiting:
            self._connection.execute("BEGIN IMMEDIATE")
            group = []
            while self._waiting and len(group) < GROUP:
                message, settled = self._waiting.popleft()
                group.append((settled, await self._work(message)))
            await loop.run_in_executor(self._thread, self._connection.execute, "COMMIT")
            for settled, number in group:
                settled.set_result(number)
            await asyncio.sleep(0)  # who was just acknowledged may have the next one
        self._writer = None

    async def _handle(self, message: Message[Any]) -> int:
        await charge(message, self._tx)
        return 1

    async def _claim_and_handle(self, message: Message[Any]) -> int:
        self._connection.execute("SAVEPOINT message")
        first = self._connection.execute(CLAIM, claim_row(message)).rowcount
        try:
            if first:
                await charge(message, self._tx)
        except BaseException:
            self._connection.execute("ROLLBACK TO message")
            raise
        finally:
            self._connection.execute("RELEASE message")
        return first

    def close(self) -> None:
        self._thread.shutdown()


# --- batches ------------------------------------------------------------------------------------------------------


class BatchWriter:
    """A batch is a transaction, and its COMMIT runs in a thread."""

    def __init__(self, connection: sqlite3.Connection) -> None:
        self._connection = connection
        self._tx = Tx(connection)
        self._thread = ThreadPoolExecutor(1)

    async def no_inbox(self, messages: list[Message[Any]]) -> int:
        """The handler for each message."""
        self._connection.execute("BEGIN IMMEDIATE")
        for message in messages:
            await charge(message, self._tx)
        await self._commit()
        return len(messages)

    async def hand_written(self, messages: list[Message[Any]]) -> int:
        """All claims, then the handler for each message."""
        self._connection.execute("BEGIN IMMEDIATE")
        first = self._connection.executemany(CLAIM, map(claim_row, messages)).rowcount
        for message in messages:
            await charge(message, self._tx)
        await self._commit()
        return first

    async def hand_written_bulk(self, messages: list[Message[Any]]) -> int:
        """All claims, then one handler for all."""
        self._connection.execute("BEGIN IMMEDIATE")
        first = self._connection.executemany(CLAIM, map(claim_row, messages)).rowcount
        await charge_all(messages, self._tx)
        await self._commit()
        return first

    async def _commit(self) -> None:
        await asyncio.get_running_loop().run_in_executor(self._thread, self._connection.execute, "COMMIT")

    def close(self) -> None:
        self._thread.shutdown()


class Files:
    """A new file with onceward's tables for each variant, and the effects in all of them."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._paths: list[Path] = []

    async def new(self) -> Path:
        path = self._folder / f"{len(self._paths)}.db"
        async with Inbox(SqliteStore(path), consumer=CONSUMER):
            pass
        with closing(connect(path)) as connection:
            connection.execute(CHARGES)
        self._paths.append(path)
        return path

    async def effects(self) -> int:
        return sum(self._in_one(path) for path in self._paths)

    @staticmethod
    def _in_one(path: Path) -> int:
        with closing(connect(path)) as connection:
            rows, messages = connection.execute("SELECT count(*), count(DISTINCT message_id) FROM charges").fetchone()
            connection.execute("DELETE FROM charges")
        if rows != messages:
            raise WorkNotDone(f"{rows} effects of {messages} messages: some were doubled")
        found: int = rows
        return found


async def stages(world: World) -> AsyncGenerator[Stage, None]:
    async with AsyncExitStack() as stack:
        files = Files(world.folder)

        async def opened() -> sqlite3.Connection:
            return stack.enter_context(closing(connect(await files.new())))

        async def grouped(*, inbox: bool) -> Step:
            return stack.enter_context(closing(GroupWriter(await opened(), inbox=inbox))).step

        inbox = await stack.enter_async_context(Inbox(SqliteStore(await files.new()), consumer=CONSUMER))
        floors = ("no inbox, grouped", "by hand, grouped", "by hand, alone")
        single = (
            Variant(floors[0], await grouped(inbox=False)),
            Variant(floors[1], await grouped(inbox=True), floors[:1]),
            Variant("onceward", processed(inbox, charge), floors),
            Variant(floors[2], one_by_one(await opened())),
        )
        for workers in (1, 64):
            yield Stage(
                question="sqlite",
                title="SQLite, one message at a time",
                workers=workers,
                make=new_messages,
                effects=files.effects,
                variants=single,
            )
        yield await _batches(stack, files, opened)


async def _batches(stack: AsyncExitStack, files: Files, opened: Callable[[], Any]) -> Stage:
    plain, many, bulk = [stack.enter_context(closing(BatchWriter(await opened()))) for _ in range(3)]
    inboxes = [
        await stack.enter_async_context(Inbox(SqliteStore(await files.new()), consumer=CONSUMER)) for _ in range(2)
    ]
    floors = ("no inbox", "by hand", "by hand, bulk")
    return Stage(
        question="sqlite",
        title=f"SQLite, batches of {BATCH}",
        batch=BATCH,
        make=new_messages,
        effects=files.effects,
        variants=(
            Variant(floors[0], plain.no_inbox),
            Variant(floors[1], many.hand_written, floors[:1]),
            in_batches("process_many", inboxes[0], "process_many", charge, floors[:2]),
            Variant(floors[2], bulk.hand_written_bulk, floors[:1]),
            in_batches("process_bulk", inboxes[1], "process_bulk", charge_all, (floors[0], floors[2])),
        ),
    )
