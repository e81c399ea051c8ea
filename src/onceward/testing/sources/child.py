"""A consumer process for tests: `python -m onceward.testing.sources.child` reads a job as JSON from standard input.

It consumes until it is killed, or SIGTERM, and writes one JSON line for each thing that happens. It kills itself with
SIGKILL at a crash point, in the handler, or at a random moment.
"""

from __future__ import annotations

import asyncio
import importlib
import json
import os
import random
import signal
import sys
from typing import Any

import msgspec

from onceward import events
from onceward.brokers.base import Source
from onceward.brokers.consume import consume
from onceward.connect import store_from_url
from onceward.inbox import Inbox
from onceward.message import Message
from onceward.retry import RetryPolicy
from onceward.testing.points import PointStore
from onceward.testing.run_sql import write_effect
from onceward.testing.sources.lab import ConsumerJob, Job


def say(**line: Any) -> None:
    sys.stdout.write(json.dumps(line) + "\n")
    sys.stdout.flush()


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def make(job: Job) -> Source:
    module, _, name = job.source.partition(":")
    source: Source = getattr(importlib.import_module(module), name)(*job.args, **job.options)
    return source


def told(event: events.Event) -> None:
    if isinstance(event, (events.Processed, events.Duplicate, events.Dead, events.Failed)):
        say(kind=type(event).__name__.lower(), id=event.message_id)


async def work(job: ConsumerJob) -> None:
    async def reached(point: str) -> None:
        if point == job.kill_at and not job.kill_on:
            die()

    async def charge(message: Message[Any], tx: Any) -> None:
        if job.kill_at == "handler" and job.kill_on in ("", message.id):
            say(kind="dies", id=message.id)
            die()
        await write_effect(tx, message.id)
        if job.lag:
            await asyncio.sleep(job.lag)
        if job.kill_at == "effect" and job.kill_on in ("", message.id):
            die()

    stop, loop = asyncio.Event(), asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGTERM, stop.set)
    if job.kill_within:
        loop.call_later(random.uniform(0.2, job.kill_within), die)  # noqa: S311
    retry = RetryPolicy(max_attempts=job.max_attempts, base=0.05, factor=1.0)
    store = PointStore(store_from_url(job.url), reached)
    listeners = (told, events.log)
    async with (
        Inbox(store, consumer=job.consumer, retry=retry, listeners=listeners) as inbox,
        make(job.source) as source,
    ):
        say(kind="ready")
        await consume(
            source, inbox, charge, mode=job.mode, on_failure=job.on_failure, batch=job.batch,
            concurrency=job.concurrency, stop=stop,
        )  # fmt: skip
    say(kind="stopped")


if __name__ == "__main__":
    asyncio.run(work(msgspec.json.decode(sys.stdin.buffer.readline(), type=ConsumerJob)))
