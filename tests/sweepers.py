"""The processes of tests/test_cleanup_at_scale.py: `python -m tests.sweepers sweep|traffic URL`. They print JSON."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections import Counter
from datetime import timedelta
from itertools import count
from typing import Any

from onceward import Inbox, Janitor, Message
from onceward.asyncpg import AsyncpgStore
from onceward.events import Event, SweepFailed, Swept

CONNECTIONS = 8
KNOWN = 20_000
"""Old messages that traffic delivers again while their records are deleted."""


async def sweep(url: str) -> dict[str, Any]:
    """A janitor that comes every few seconds, until standard input is closed."""
    deleted: list[int] = []

    def count(event: Event) -> None:
        if isinstance(event, SweepFailed):
            raise SystemExit(f"a sweep failed: {event.error}")
        if isinstance(event, Swept):
            deleted.append(event.deleted)

    async with Inbox(AsyncpgStore(url, max_size=1), consumer="billing", listeners=[count]) as inbox:
        every = timedelta(seconds=3)
        async with Janitor(inbox, every=every, jitter=every):
            await asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)
    return {"deleted": sum(deleted), "sweeps": len(deleted)}


async def traffic(url: str) -> dict[str, Any]:
    """New messages and old ones on eight connections, until standard input is closed."""
    loop, told, numbers = asyncio.get_running_loop(), Counter[str](), count()
    closed = loop.run_in_executor(None, sys.stdin.read)
    store = AsyncpgStore(url, min_size=CONNECTIONS, max_size=CONNECTIONS)

    async def work(inbox: Inbox[Any]) -> None:
        while not closed.done():
            number = next(numbers)
            name = f"old-{number * 7 % KNOWN}" if number % 2 else f"new-{os.getpid()}-{number}"
            try:
                outcome = await inbox.process(Message(name, "order.paid", None), write)
                told[outcome.kind] += 1
            except Exception as error:
                told[type(error).__name__] += 1
            await asyncio.sleep(0.01)

    async with Inbox(store, consumer="billing", cache=0) as inbox:
        await asyncio.gather(*(work(inbox) for _ in range(CONNECTIONS)))
    return dict(told)


async def write(message: Message[Any], tx: Any) -> None:
    await tx.execute("INSERT INTO effects VALUES ($1)", message.id)


if __name__ == "__main__":
    print(json.dumps(asyncio.run({"sweep": sweep, "traffic": traffic}[sys.argv[1]](sys.argv[2]))))
