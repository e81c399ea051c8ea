"""A worker of the queue in a process of its own, for tests: `python -m onceward.testing.worker_child`.

The first line of its input is a job as JSON. It runs `inbox.run` until SIGTERM, and says what happens as JSON lines. A
message in `hold` says that it is running and waits for another line of input; one in `die` kills the process; one whose
payload says `seconds` takes so long. With
`kill_at` or `freeze_at` the process kills or stops itself at that crash point, once.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import sys
from contextlib import suppress
from typing import Any

import msgspec

from onceward import lanes
from onceward.connect import store_from_url
from onceward.errors import OncewardError
from onceward.inbox import Inbox
from onceward.message import Message
from onceward.retry import RetryPolicy
from onceward.testing.points import PointStore
from onceward.testing.run_sql import run_sql


class WorkerJob(msgspec.Struct):
    url: str
    consumer: str = "billing"
    concurrency: int = 1
    batch: int = 100
    poll_interval: float = 0.1
    grace: float = 25.0
    share: tuple[int, int] | None = None
    max_attempts: int = 10
    base: float = 0.0
    cap: float = 0.0
    lane: str = "by_stream"
    lease: float | None = None
    """The handler is leased, for so many seconds."""
    freeze_after: float | None = 300.0
    hold: list[str] = []
    die: list[str] = []
    kill_at: str = ""
    freeze_at: str = ""
    accept: list[str] = []
    """Accept these first."""
    ledger: bool = False
    """Write into the table `ledger`, with stream and position, and not into `effects`."""
    fail: float = 0.0
    """How many of all runs fail, at random."""
    after: float = 0.0
    """How many of all runs take a moment, at random."""
    quiet: bool = False
    """Do not say what ran: nobody listens, and a pipe is soon full."""


def say(**line: Any) -> None:
    sys.stdout.write(json.dumps(line) + "\n")
    sys.stdout.flush()


async def work(job: WorkerJob, heard: asyncio.StreamReader) -> None:
    done: set[str] = set()

    async def reached(point: str) -> None:
        for wanted, what in ((job.kill_at, signal.SIGKILL), (job.freeze_at, signal.SIGSTOP)):
            if point == wanted and point not in done:
                done.add(point)
                say(kind="at", point=point)
                os.kill(os.getpid(), what)

    async def write(message: Message[Any], tx: Any) -> None:
        if job.ledger:
            sql = "INSERT INTO ledger (id, stream, position, pid) VALUES ($1, $2, $3, $4)"
            await run_sql(tx, sql, message.id, message.stream or "", message.position or 0, os.getpid())
        else:
            await run_sql(tx, "INSERT INTO effects VALUES ($1)", message.id)

    async def pauses(message: Message[Any]) -> None:
        await reached("handler")
        if message.id in job.die:
            say(kind="dying", id=message.id)
            os.kill(os.getpid(), signal.SIGKILL)
        if message.id in job.hold:
            say(kind="running", id=message.id)
            if not await heard.readline():
                os._exit(3)  # nobody is there any more
        if isinstance(message.payload, dict) and "seconds" in message.payload:
            await asyncio.sleep(message.payload["seconds"])
        if random.random() < job.after:  # noqa: S311
            await asyncio.sleep(random.random() * 0.02)  # noqa: S311

    async def charge(message: Message[Any], tx: Any) -> dict[str, str]:
        await write(message, tx)
        await pauses(message)
        if random.random() < job.fail:  # noqa: S311
            raise ValueError("by chance")
        await reached("effect")
        if not job.quiet:
            say(kind="ran", id=message.id)
        return {"charged": message.id}

    async def charge_leased(message: Message[Any], lease: Any) -> dict[str, str]:
        await pauses(message)
        try:
            async with lease.complete() as tx:
                await write(message, tx)
        except OncewardError as error:
            say(kind="lost", id=message.id, error=type(error).__name__)
            raise
        say(kind="ran", id=message.id)
        return {"charged": message.id}

    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    retry = RetryPolicy(max_attempts=job.max_attempts, base=job.base, cap=job.cap)
    store = PointStore(store_from_url(job.url), reached)
    inbox: Inbox[Any] = Inbox(
        store,
        consumer=job.consumer,
        retry=retry,
        wait=30,
        lane=getattr(lanes, job.lane),
        freeze_after=job.freeze_after,
        listeners=(),
    )
    async with inbox:
        if job.lease is None:
            inbox.handler("order.paid")(charge)
        else:
            inbox.handler("order.paid", lease=job.lease)(charge_leased)
        if job.accept:
            await inbox.accept([Message(id_, "order.paid", {"amount": 7}) for id_ in job.accept])
            say(kind="accepted")
        say(kind="ready", pid=os.getpid())
        await inbox.run(
            concurrency=job.concurrency, batch=job.batch, poll_interval=job.poll_interval, grace=job.grace,
            share=job.share, stop=stop,
        )  # fmt: skip
    say(kind="stopped")


async def main() -> None:
    heard = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(heard), sys.stdin)
    await work(msgspec.json.decode(await heard.readline(), type=WorkerJob), heard)


if __name__ == "__main__":
    with suppress(BrokenPipeError):
        asyncio.run(main())
