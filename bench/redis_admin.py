"""Redis, looking around: how long lists, statistics and cleanup take with a million records, and how long others wait
meanwhile. They go through all keys, step by step.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Awaitable, Callable
from datetime import timedelta
from typing import Any

from redis.asyncio import Redis

from bench import valkeys
from bench.messages import CONSUMER
from bench.questions import Facts, World
from onceward import Inbox, Message, Reject, State
from onceward.identity import Identity
from onceward.record import Record
from onceward.redis import RedisStore, value

STEP = 2_000
DAY = 86_400_000_000
OLD = timedelta(days=50)
"""Half of the records are older."""


class Waits:
    """Somebody else, who asks the server something all the time."""

    def __init__(self, client: Redis) -> None:
        self._client = client
        self.longest = 0.0

    async def run(self) -> None:
        while True:
            began = time.perf_counter()
            await self._client.execute_command("PING")
            self.longest = max(self.longest, time.perf_counter() - began)
            await asyncio.sleep(0.001)


async def fill(inbox: Inbox[Any], number: int) -> None:
    """Processed records, of the last hundred days, past the inbox."""
    store: Any = inbox.store
    now = value.micros(await _now(inbox))
    for start in range(0, number, STEP):
        pipe = store.client.pipeline(transaction=False)
        for place in range(start, min(start + STEP, number)):
            identity = Identity(CONSUMER, "default", "source:shop", f"m-{place}")
            record = Record(
                identity=identity, message_id=identity.key, type="order.paid", state=State.PROCESSED, source="shop",
                payload_hash=bytes(32), handler="app.charge",
            )  # fmt: skip
            front = value.Front(State.PROCESSED, now, now - place % 100 * DAY, 1, 0, now)
            packed = value.packed_front(front) + value.packed(value.columns_of(record))
            pipe.set(store.key(identity), packed, px=30 * 86_400_000)
        await pipe.execute()


async def _now(inbox: Inbox[Any]) -> Any:
    async with inbox.store.unit() as unit:
        return await unit.now()


async def _reject(_message: Message[Any]) -> None:
    raise Reject("no")


async def stages(world: World) -> AsyncGenerator[Facts, None]:
    if not valkeys.is_there():
        yield Facts("redis-admin", "Valkey", ("not available",), ((valkeys.MISSING,),))
        return
    number = 1_000_000 if world.full else 2_000
    with valkeys.server() as server:
        async with (
            Inbox(RedisStore(server.url), consumer=CONSUMER, listeners=()) as inbox,
            valkeys.client(server) as beside,
        ):
            await fill(inbox, number)
            for place in range(20):
                await inbox.process(Message(f"dead-{place}", "order.paid", 1), _reject)
            waits = Waits(beside)
            asking = asyncio.ensure_future(waits.run())
            verbs: dict[str, Callable[[], Awaitable[Any]]] = {
                "stats()": inbox.stats,
                "records(State.DEAD), 20 of them": lambda: inbox.records(State.DEAD),
                "records(), the oldest 100": inbox.records,
                "sweepable(), half of them": lambda: inbox.sweepable(OLD),
                "cleanup(), half of them": lambda: inbox.cleanup(OLD),
            }
            rows = [await _timed(name, verb, waits) for name, verb in verbs.items()]
            asking.cancel()
            await asyncio.gather(asking, return_exceptions=True)
    yield Facts(
        "redis-admin",
        f"Valkey, looking around among {number:,} records",
        ("verb", "seconds", "longest PING of somebody else, ms"),
        tuple(rows),
        note="Each goes through all keys in steps of a thousand.",
    )


async def _timed(name: str, verb: Callable[[], Awaitable[Any]], waits: Waits) -> tuple[str, str, str]:
    waits.longest, began = 0.0, time.perf_counter()
    await verb()
    return name, f"{time.perf_counter() - began:.2f}", f"{waits.longest * 1000:.1f}"
