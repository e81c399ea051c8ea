"""What the questions about brokers share: from a broker through PostgreSQL, with and without an inbox.

Each variant has a topic or queue and a consumer of its own, which stays open for the whole stage. Before the clock
starts the messages of the slice are put there; the clock stops when the last one is committed in the database and
settled at the broker. So what is measured is the stream, and neither joining a group nor looking at its settings.

The floors are the loops that one would write: take a message, one transaction for it, tell the broker.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any, Self, TypeAlias

import asyncpg

from bench import postgres
from bench.batches import charge_all
from bench.messages import CONSUMER
from bench.postgres import Lent, Watch, commit_and_reset
from bench.rounds import Step, Variant
from bench.single import CHARGE, NAIVE, charge
from onceward import Inbox, Message
from onceward.asyncpg import AsyncpgStore
from onceward.brokers.base import Delivery
from onceward.brokers.consume import consume

BATCH = 100
"""As `consume` has it by default."""
ACCEPTING = "billing-later"
"""The consumer of what is only kept. Nobody works on it."""

Row: TypeAlias = "tuple[str, str, int]"
Take = Callable[[Row], Awaitable[None]]
"""One message takes effect: the database's part of a hand-written loop."""


# --- loops by hand ------------------------------------------------------------------------------------------------


def no_inbox(pool: asyncpg.Pool) -> Take:
    """BEGIN, INSERT, COMMIT. A message that comes twice takes effect twice."""

    async def take(row: Row) -> None:
        async with pool.acquire() as connection:
            await connection.execute("BEGIN")
            await connection.execute(CHARGE, *row)
            await connection.execute("COMMIT")

    return take


def no_inbox_riding(pool: asyncpg.Pool) -> Take:
    """The same; the pool's reset rides with COMMIT, as in a pool of onceward's own."""

    async def take(row: Row) -> None:
        async with Lent(pool) as connection:
            await connection.execute("BEGIN")
            await connection.execute(CHARGE, *row)
            await connection.execute(commit_and_reset(connection))

    return take


def naive(pool: asyncpg.Pool) -> Take:
    """Exactly once as most people write it: look, the effect, remember, in one transaction with a unique key."""

    async def take(row: Row) -> None:
        async with pool.acquire() as connection, connection.transaction():
            if await connection.fetchval("SELECT 1 FROM processed_messages WHERE message_id = $1", row[0]):
                return
            await connection.execute(CHARGE, *row)
            await connection.execute("INSERT INTO processed_messages (message_id) VALUES ($1)", row[0])

    return take


# --- onceward -----------------------------------------------------------------------------------------------------


class Gate:
    """A source that comes to its end after so many deliveries, and goes on from there when it is asked the next time.

    Its settings are looked at once, before the clock starts.
    """

    def __init__(self, source: Any) -> None:
        self._source = source
        self.name: str = source.name
        self.redelivers: bool = source.redelivers
        self.settles_at_once: bool = getattr(source, "settles_at_once", False)
        self.left = 0

    async def __aenter__(self) -> Self:
        await self._source.__aenter__()
        await self._source.check()
        return self

    async def __aexit__(self, *error: object) -> None:
        await self._source.__aexit__(*error)

    @property
    def assignment(self) -> int | None:
        number: int | None = self._source.assignment
        return number

    redelivery_horizon = None

    async def receive(self, most: int) -> Sequence[Delivery]:
        if not self.left:
            return ()
        deliveries: Sequence[Delivery] = await self._source.receive(min(most, self.left))
        self.left -= len(deliveries)
        return deliveries

    async def flush(self) -> None:
        await self._source.flush()

    async def check(self) -> list[Any]:
        return []

    def trouble(self) -> str | None:
        return None


Fill = Callable[[list[Message[Any]]], Awaitable[None]]


class Ground:
    """A database with what all variants of a stage need, and a connection beside them to see what they did.

    All pools have the same size: a connection for each that works, and one for the worker that `consume` would run. It
    is there, and finds nothing to do.
    """

    def __init__(self, connection: asyncpg.Connection, concurrency: int) -> None:
        self._connection = connection
        self._watch = Watch(connection)
        self._kept = 0
        self.server_cpu = self._watch.server_cpu
        self.concurrency = concurrency
        self.floors: dict[str, Take] = {}
        self.inbox: Inbox[Any]
        self.keeping: Inbox[Any]

    async def effects(self) -> int:
        """Since it was asked last: what was written, and what was kept to be worked on later."""
        kept: int = await self._connection.fetchval(
            "SELECT count(*) FROM onceward_records WHERE consumer = $1", ACCEPTING
        )
        more, self._kept = kept - self._kept, kept
        return more + await self._watch.effects()

    def consuming(
        self, name: str, gate: Gate, fill: Fill, *floors: str, about: int, accept: bool = False, **options: Any
    ) -> Variant:
        """`consume`, until all messages of the slice are settled and the broker has been told."""
        inbox = self.keeping if accept else self.inbox
        how: dict[str, Any] = {"mode": "accept"} if accept else options if "bulk" in options else {"handler": charge}
        how |= {"concurrency": self.concurrency, "workers": 0, **options}

        async def step(messages: list[Message[Any]]) -> int:
            gate.left = len(messages)
            await consume(gate, inbox, **how)
            return len(messages)

        return self._variant(name, step, floors, fill, about)

    def by_hand(self, name: str, loop: Callable[[Take], Step], fill: Fill, *floors: str, about: int) -> Variant:
        return self._variant(name, loop(self.floors[name]), floors, fill, about)

    def _variant(self, name: str, step: Step, floors: tuple[str, ...], fill: Fill, about: int) -> Variant:
        """`about` is for one at a time; several are not so many times as fast, as all share the processors."""
        about *= 1 if self.concurrency == 1 else 2
        return Variant(name, step, floors, prepare=fill, whole=True, about=about)


BULK: dict[str, Any] = {"bulk": charge_all}
NO_INBOX, RIDING, BY_HAND = "no inbox", "no inbox, riding", "naive"
FLOORS = (NO_INBOX, BY_HAND)


@asynccontextmanager
async def ground(server_dsn: str, concurrency: int) -> AsyncIterator[Ground]:
    size = concurrency + 1
    async with postgres.database(server_dsn) as dsn, AsyncExitStack() as stack:
        await postgres.run(dsn, NAIVE)
        await Inbox(AsyncpgStore(dsn=dsn), consumer=CONSUMER).setup()
        beside = await asyncpg.connect(dsn)
        stack.push_async_callback(beside.close)
        found = Ground(beside, concurrency)
        pool = await stack.enter_async_context(postgres.pool(dsn, size))
        riding = await stack.enter_async_context(postgres.riding_pool(dsn, size))
        found.floors = {NO_INBOX: no_inbox(pool), RIDING: no_inbox_riding(riding), BY_HAND: naive(pool)}
        found.inbox, found.keeping = [
            await stack.enter_async_context(Inbox(_store(dsn, size), consumer=name)) for name in (CONSUMER, ACCEPTING)
        ]
        await stack.enter_async_context(found.inbox.worker(charge))
        yield found


def _store(dsn: str, size: int) -> AsyncpgStore:
    return AsyncpgStore(dsn=dsn, min_size=size, max_size=size)
