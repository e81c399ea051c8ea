"""A lab: one database under test, as the conformance suite needs it."""

from __future__ import annotations

import asyncio
import json
import sys
from abc import ABC, abstractmethod
from contextlib import AsyncExitStack
from itertools import count
from typing import Any

from onceward.inbox import Inbox
from onceward.message import Message
from onceward.store import Store
from onceward.testing.hand import Hand
from onceward.testing.points import PointStore, Reached
from onceward.testing.run_sql import run_sql, write_effect


class Lab(ABC):
    """Effects are written through a handler's tx and read on another connection; so are records, past the store."""

    url: str
    """For child processes: `Inbox.connect(url)` must reach the same database."""
    multiple_statements = False
    """A handler can send several statements at once, as in "COMMIT; BEGIN"."""
    tasks_share_tx = True
    """Several tasks of a handler may use tx at the same time; SQLAlchemy's sessions are for one task only."""
    network = False
    """The database is behind a connection that can be cut: `store_behind(port)` and `address` work."""
    address: tuple[str, int] = ("127.0.0.1", 0)
    commit_word = b"COMMIT"
    """Part of what is sent to commit, and of nothing else after a handler, so that a connection can be cut there."""
    notifies = False
    """What is accepted in one process wakes a worker in another one at once."""
    numbered = "n bigserial PRIMARY KEY"
    """A column that counts the rows of a table as they are written."""

    def __init__(self) -> None:
        self._numbers = count(1)
        self.stack = AsyncExitStack()

    @abstractmethod
    def store(self, **options: Any) -> Store[Any]:
        """A new store on the same database, with connections of its own."""

    @abstractmethod
    def unreachable(self) -> Store[Any]:
        """A store whose database is not there."""

    def store_behind(self, port: int) -> Store[Any]:
        """A new store whose connections go through a proxy on this port."""
        raise NotImplementedError

    async def query(self, sql: str) -> list[tuple[Any, ...]]:
        """Run SQL on a connection that has nothing to do with the store, for cases that make sense with SQL only."""
        raise NotImplementedError

    @abstractmethod
    async def kept(self) -> list[dict[str, Any]]:
        """All records as they are in the store, in no order: a dict of columns each, as the database gives them."""

    @abstractmethod
    async def change(self, message_id: str | None = None, **columns: Any) -> None:
        """Write columns of the records with this message id, or of all, past the store. A value is a text, a number,
        a datetime or None; JSON is given as its text."""

    @abstractmethod
    async def forget(self) -> None:
        """Delete all records, past the store."""

    @abstractmethod
    async def effects(self) -> list[str]:
        """What handlers wrote and what stands, sorted."""

    @abstractmethod
    async def clear_effects(self) -> None:
        """As if no handler had written anything yet."""

    async def write(self, tx: Any, effect: str) -> None:
        """The effect of a handler."""
        await write_effect(tx, effect)

    async def run(self, tx: Any, sql: str, *params: Any) -> list[tuple[Any, ...]]:
        """What a handler says through its tx. Parameters are $1, $2 in their order."""
        return await run_sql(tx, sql, *params)

    def savepoint(self, tx: Any) -> Any:
        """A block of the handler's that can be undone alone."""
        return tx.transaction()

    def second_connection(self, store: Any) -> Any:
        """A connection of the store's own pool, taken as a user would."""
        raise NotImplementedError

    @abstractmethod
    async def make_older(self, message_id: str, *, days: int) -> None:
        """Move the times of a record into the past."""

    async def let_time_pass(self) -> None:
        """As if all that waits for a time, a next try or the end of a lease, had waited long enough."""
        raise NotImplementedError

    async def back_to(self, version: int) -> None:
        """The tables as an older version made them, with the records that are there; 0: no tables at all."""
        raise NotImplementedError

    async def slow_commits(self) -> None:  # noqa: B027 - not every database can
        """Make a COMMIT take a moment, where the database can, so that something can happen meanwhile."""

    async def slow_deletes(self) -> None:
        """Make each DELETE of a record take a second or two after its work is done, its locks still held."""
        raise NotImplementedError

    async def deleting(self) -> None:
        """Wait until such a DELETE is on its way."""
        raise NotImplementedError

    async def take_all(self) -> None:  # noqa: B027 - not every database has locks
        """Do what needs the whole database for itself, so that it fails or waits while anybody holds a lock."""

    async def set_up(self) -> None:
        """What has to be there before the first case: onceward's own, and a place for effects."""
        await self.store().setup()

    async def inbox(self, *, reached: Reached | None = None, store: Any = None, **options: Any) -> Inbox[Any]:
        """An open inbox with a store of its own, closed at the end of the test."""
        store = store or self.store()
        if reached is not None:
            store = PointStore(store, reached)
        return await self.stack.enter_async_context(Inbox(store, **{"consumer": "billing"} | options))

    def message(self, id: str | None = None, **fields: Any) -> Message[Any]:  # noqa: A002 - as in Message
        return Message(id or f"m-{next(self._numbers)}", **{"type": "order.paid", "payload": {"amount": 7}} | fields)

    async def child(self, **job: Any) -> tuple[int, list[Any]]:
        """Run a job of onceward.testing.child in a process of its own. Its exit code, and what it reported."""
        process = await self.start_child(**job)
        assert process.stdout is not None
        out = await process.stdout.read()
        return await process.wait(), [json.loads(line) for line in out.splitlines()]

    async def hand(self, **job: Any) -> Hand:
        """A worker process of the queue that is ready; gone at the end of the test."""
        hand = await Hand.start(url=self.url, **job)
        self.stack.push_async_callback(hand.clean_up)
        return hand

    async def start_child(self, **job: Any) -> asyncio.subprocess.Process:
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "onceward.testing.child",
            stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE,
        )  # fmt: skip
        assert process.stdin is not None
        process.stdin.write(json.dumps({"url": self.url} | job).encode())
        process.stdin.close()
        return process


class Recorder:
    """A handler that writes one effect, and remembers that it ran."""

    def __init__(self, lab: Lab, *, error: BaseException | None = None) -> None:
        self.lab = lab
        self.error = error
        self.runs: list[str] = []

    async def __call__(self, message: Message[Any], tx: Any) -> dict[str, str]:
        self.runs.append(message.id)
        await self.lab.write(tx, message.id)
        if self.error is not None:
            raise self.error
        return {"charged": message.id}


class Gate(Recorder):
    """A handler that says when it has started, and waits to be let go."""

    def __init__(self, lab: Lab) -> None:
        super().__init__(lab)
        self.started = asyncio.Event()
        self.go = asyncio.Event()

    async def __call__(self, message: Message[Any], tx: Any) -> dict[str, str]:
        result = await super().__call__(message, tx)
        self.started.set()
        await self.go.wait()
        return result
