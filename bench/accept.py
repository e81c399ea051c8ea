"""PostgreSQL, stored mode: how fast is a message kept, alone and in lists?

The floor is one INSERT with the same columns into one table with the same primary key, which commits itself; for lists
one INSERT with one JSON parameter, and COPY. pgqueuer takes lists, with a key against duplicates; ascetic-ddd takes one
message at a time, and so its list is a loop.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack
from typing import Any

from bench.batches import BATCH
from bench.messages import new_messages
from bench.questions import World
from bench.queues.base import MISSING, Queue
from bench.queues.by_hand import HandQueue
from bench.rounds import Stage, Variant
from bench.stored import Yard, accepting, accepting_many, of_streams, yard

FLOOR = "by hand"
PEER = "ascetic-ddd"


async def opened(yard: Yard, stack: AsyncExitStack, connections: int) -> dict[str, Queue | None]:
    return {
        (kind.NAME if kind else name): await stack.enter_async_context(kind.opened(yard.dsn, connections))
        if kind
        else None
        for name, kind in yard.kinds.items()
    }


def floors_of(name: str) -> tuple[str, ...]:
    return () if name == FLOOR else (FLOOR,) if name == PEER else (FLOOR, PEER)


async def stages(world: World) -> AsyncGenerator[Stage, None]:
    async with yard(world.postgres_dsn) as place:
        for connections in (1, 16):
            async with AsyncExitStack() as stack:
                queues = await opened(place, stack, connections)
                yield _stage(place, "PostgreSQL, accept, one message at a time", connections, 1, tuple(
                    Variant(name, accepting(queue), floors_of(name)) if queue else Variant(name, None, missing=MISSING)
                    for name, queue in queues.items()
                ))  # fmt: skip
        async with AsyncExitStack() as stack:
            queues = await opened(place, stack, 1)
            many = {name: accepting_many(queue.accept_many) if queue else None for name, queue in queues.items()}
            yield _stage(place, f"PostgreSQL, accept, lists of {BATCH}", 1, BATCH, (
                *(
                    Variant(name, step, floors_of(name)) if step else Variant(name, None, missing=MISSING)
                    for name, step in many.items()
                ),
                Variant("onceward, streams", many["onceward"], floors_of(""), make=of_streams),
            ))  # fmt: skip
            hand = queues[FLOOR]
            assert isinstance(hand, HandQueue)
            yield _stage(place, f"PostgreSQL, accept, lists of {world.bulk:,}", 1, world.bulk, (
                Variant(FLOOR, many[FLOOR]),
                Variant("by hand, COPY", accepting_many(hand.copy), (FLOOR,)),
                Variant("onceward", many["onceward"], (FLOOR, "by hand, COPY")),
                Variant("onceward, streams", many["onceward"], (FLOOR,), make=of_streams),
            ))  # fmt: skip


def _stage(place: Yard, title: str, workers: int, batch: int, variants: tuple[Variant, ...], **more: Any) -> Stage:
    return Stage(
        question="accept",
        title=title,
        workers=workers,
        batch=batch,
        make=new_messages,
        effects=place.kept,
        server_cpu=place.server_cpu,
        variants=variants,
        **more,
    )
