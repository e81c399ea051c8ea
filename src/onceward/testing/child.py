"""A worker process for tests: `python -m onceward.testing.child` reads a job as JSON.

It processes the messages in order and writes one JSON line for each. With `kill_at` it kills itself with SIGKILL at
that crash point, or inside the handler ("handler": before the effect, "effect": after it).
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from typing import Any

import msgspec

from onceward.connect import store_from_url
from onceward.errors import TryLater
from onceward.inbox import Inbox
from onceward.message import Message
from onceward.retry import RetryPolicy
from onceward.testing.points import PointStore
from onceward.testing.run_sql import run_sql, write_effect


class Job(msgspec.Struct):
    url: str
    ids: list[str]
    consumer: str = "billing"
    kill_at: str = ""
    redelivered: bool = False
    max_attempts: int | None = None
    concurrency: int = 1
    long_sql: str = ""
    """A statement that the handler runs, in which the process can be killed from outside."""
    wait: float = 30.0
    batch: int = 0
    """Process so many at a time, `concurrency` batches side by side."""
    bulk: bool = False


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


async def work(job: Job) -> None:
    async def reached(point: str) -> None:
        if point == job.kill_at:
            die()

    async def charge(message: Message[Any], tx: Any) -> dict[str, str]:
        await reached("handler")
        await reached(f"handler of {message.id}")
        await write_effect(tx, message.id)
        await reached("effect")
        if job.long_sql:
            sys.stdout.write(json.dumps({"id": message.id, "kind": "running"}) + "\n")
            sys.stdout.flush()
            await run_sql(tx, job.long_sql)
        return {"charged": message.id}

    retry = None if job.max_attempts is None else RetryPolicy(max_attempts=job.max_attempts, base=0.0)
    store = PointStore(store_from_url(job.url), reached)
    async with Inbox(store, consumer=job.consumer, retry=retry, wait=job.wait) as inbox:
        limit = asyncio.Semaphore(job.concurrency)

        async def one(id_: str) -> None:
            message = Message(id_, "order.paid", {"amount": 7})
            async with limit:
                try:
                    outcome = await inbox.process(message, charge, redelivered=job.redelivered)
                    report = {"id": id_, "kind": outcome.kind}
                except TryLater as later:
                    report = {"id": id_, "kind": "later", "reason": later.reason}
            sys.stdout.write(json.dumps(report) + "\n")
            sys.stdout.flush()

        async def many(ids: list[str]) -> None:
            async def charge_all(messages: list[Message[Any]], tx: Any) -> list[dict[str, str]]:
                return [await charge(message, tx) for message in messages]

            messages = [Message(id_, "order.paid", {"amount": 7}) for id_ in ids]
            async with limit:
                if job.bulk:
                    outcomes = await inbox.process_bulk(messages, charge_all, redelivered=job.redelivered)
                else:
                    outcomes = await inbox.process_many(messages, charge, redelivered=job.redelivered)
            for id_, outcome in zip(ids, outcomes, strict=True):
                sys.stdout.write(json.dumps({"id": id_, "kind": outcome.kind}) + "\n")
            sys.stdout.flush()

        if job.batch:
            await asyncio.gather(*(many(job.ids[at : at + job.batch]) for at in range(0, len(job.ids), job.batch)))
        else:
            await asyncio.gather(*(one(id_) for id_ in job.ids))


if __name__ == "__main__":
    asyncio.run(work(msgspec.json.decode(sys.stdin.buffer.read(), type=Job)))
