"""pgqueuer: `enqueue` with a key against duplicates, and its QueueManager. Its handler has no transaction: what it
writes is committed on its own, and a job is removed afterwards, several together."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import asyncpg
import msgspec
from pgqueuer.core.qm import QueueManager
from pgqueuer.domain.models import Job
from pgqueuer.queries import Queries

from bench import postgres
from bench.queues.base import CHARGE, Work, row_of
from onceward import Message

NAME = "pgqueuer"
# What is done is gone from the queue, and a line in the log.
KEPT = "SELECT count(*) FROM pgqueuer"
SETTLED = "SELECT count(*) FROM pgqueuer_log WHERE status = 'successful'"
EMPTY = "TRUNCATE pgqueuer, pgqueuer_log"
SLOWS = False

ENTRYPOINT = "charge"


class PgqueuerQueue:
    def __init__(self, pool: asyncpg.Pool) -> None:
        self._pool = pool
        self._queries = Queries.from_asyncpg_pool(pool)

    async def accept(self, message: Message[Any]) -> None:
        await self._queries.enqueue(ENTRYPOINT, _payload(message), dedupe_key=message.id, on_conflict="skip")

    async def accept_many(self, messages: list[Message[Any]]) -> None:
        number = len(messages)
        await self._queries.enqueue(
            [ENTRYPOINT] * number,
            list(map(_payload, messages)),
            [0] * number,
            dedupe_key=[message.id for message in messages],
            on_conflict="skip",
        )

    fill = accept_many

    async def dispatch(self, work: Work) -> bool:
        raise NotImplementedError("it runs until it is stopped")

    async def run(self, work: Work, stop: asyncio.Event, *, workers: int = 1, batch: int | None = None) -> None:
        """It runs all that it has fetched at the same time; `workers` says nothing about that."""
        del workers
        manager = QueueManager(self._queries)

        @manager.entrypoint(ENTRYPOINT)
        async def handle(job: Job) -> None:
            assert job.payload is not None
            content = msgspec.json.decode(job.payload)
            if await work(Message(id=content["id"], type="order.paid", payload=content["payload"])):
                await self._pool.execute(CHARGE, *row_of(content["payload"], content["id"]))

        size = {} if batch is None else {"batch_size": batch}
        running = asyncio.ensure_future(manager.run(**size))
        stopping = asyncio.ensure_future(stop.wait())
        await asyncio.wait([running, stopping], return_when=asyncio.FIRST_COMPLETED)
        stopping.cancel()
        manager.shutdown.set()
        await running


def _payload(message: Message[Any]) -> bytes:
    return msgspec.json.encode({"id": message.id, "payload": message.payload})


async def set_up(dsn: str) -> None:
    async with postgres.pool(dsn, 1) as pool:
        await Queries.from_asyncpg_pool(pool).install()


@asynccontextmanager
async def opened(dsn: str, connections: int) -> AsyncIterator[PgqueuerQueue]:
    logging.getLogger("pgqueuer").setLevel(logging.CRITICAL)  # errors that are made on purpose
    pool: asyncpg.Pool
    # One connection listens.
    async with postgres.pool(dsn, connections + 2) as pool:
        yield PgqueuerQueue(pool)
