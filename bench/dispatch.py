"""PostgreSQL, stored mode: how fast are messages worked on, and is each of them worked on once?

First like for like: one message in one transaction, by one call. Then the loops, each as it comes: onceward takes more
at once under backlog, and can give a handler the whole list; the others do what they do. The floor is a hand-written
queue with SKIP LOCKED, which has no order, no dependencies, no retries and does not notice a crash.

Then counts, because a fast queue that loses messages is not one: with several workers, with handlers that fail once,
and with one message that always fails.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack, suppress
from functools import partial
from typing import Any

from bench.accept import FLOOR, PEER, opened
from bench.batches import BATCH
from bench.messages import new_messages
from bench.questions import Facts, World
from bench.queues import onceward_
from bench.queues.base import MISSING, Kind, Queue, Tally
from bench.queues.onceward_ import OncewardQueue
from bench.rounds import Stage, Variant
from bench.stored import Yard, by_order, dispatching, of_lanes, of_streams, running, yard
from onceward import Message

PATIENCE = 5.0
"""Seconds without anything handled, after which we stop waiting for the rest."""


# --- speed --------------------------------------------------------------------------------------------------------


async def single(place: Yard, workers: int, *, write: bool) -> AsyncGenerator[Stage, None]:
    async with AsyncExitStack() as stack:
        queues = await opened(place, stack, workers)
        variants = [
            dispatching(name, queue, () if name == FLOOR else (FLOOR,) if name == PEER else (FLOOR, PEER), write=write)
            if queue
            else Variant(name, None, missing=MISSING)
            for name, queue in queues.items()
            if name != "pgqueuer"  # it has no such call
        ]
        yield _stage(place, "dispatch, one message in one transaction", workers, variants, write=write)


async def loops(place: Yard, *, write: bool) -> AsyncGenerator[Stage, None]:
    async with AsyncExitStack() as stack:
        queues = await opened(place, stack, 4)
        ours, hand, them, other = (queues.get(name) for name in ("onceward", FLOOR, PEER, "pgqueuer"))
        lanes = await stack.enter_async_context(onceward_.opened(place.dsn, 4, lane=by_order))
        assert isinstance(ours, OncewardQueue)
        assert hand is not None
        floors = ("by hand", "ascetic-ddd")
        fast, faster = (24_000, 40_000) if not write else (8_000, 32_000)
        variants = [
            running("by hand", hand, write=write, about=500),
            running("by hand, 100", hand, floors[:1], write=write, batch=BATCH, about=fast),
            *_of_peer(them, PEER, floors[:1], write=write, about=300),
            *_of_peer(other, "pgqueuer", floors, write=write, about=1000),
            *_of_peer(other, "pgqueuer, 100", floors, write=write, batch=BATCH, about=2000),
            running("onceward, dispatch()", ours, floors, write=write, about=500, runs=ours.run_by_dispatch),
            running("onceward, batch=1", ours, floors, write=write, batch=1, about=500),
            running("onceward", ours, (*floors, "by hand, 100"), write=write, about=fast),
            running("onceward, streams", ours, floors, write=write, make=of_streams, about=fast),
            running("onceward, bulk", ours, (*floors, "by hand, 100"), write=write, about=faster,
                    runs=partial(ours.run_bulk, write=write)),
            running("onceward, bulk, 4", ours, (*floors, "by hand, 100"), write=write, about=faster,
                    runs=partial(ours.run_bulk, write=write, workers=4)),
            running("onceward, bulk, 4, lanes", lanes, (*floors, "by hand, 100"), write=write, about=faster,
                    make=of_lanes, runs=partial(lanes.run_bulk, write=write, workers=4)),
        ]  # fmt: skip
        yield _stage(place, "run", 1, variants, write=write)


def _of_peer(queue: Queue | None, name: str, floors: tuple[str, ...], **how: Any) -> list[Variant]:
    return [running(name, queue, floors, **how) if queue else Variant(name, None, missing=MISSING)]


def _stage(place: Yard, title: str, workers: int, variants: list[Variant], *, write: bool) -> Stage:
    return Stage(
        question="dispatch",
        title=f"PostgreSQL, {title}, {'one write' if write else 'nothing to do'}",
        workers=workers,
        make=new_messages,
        effects=place.effects if write else place.settled,
        server_cpu=place.server_cpu,
        variants=tuple(variants),
    )


# --- right or wrong -----------------------------------------------------------------------------------------------


class Seen:
    """What handlers saw, and what they do: fail never, once for each message, or always for one of them."""

    def __init__(self, expected: int, *, flaky: bool = False, poison: str | None = None) -> None:
        self.runs: Counter[str] = Counter()
        self._tries: Counter[str] = Counter()
        self._expected = expected
        self._flaky = flaky
        self._poison = poison
        self.all_done = asyncio.Event()
        self.news = asyncio.Event()

    async def work(self, message: Message[Any]) -> bool:
        self._tries[message.id] += 1
        if message.id == self._poison or (self._flaky and self._tries[message.id] == 1):
            raise ConnectionError("the bank does not answer")
        self.runs[message.id] += 1
        self.news.set()
        if len(self.runs) >= self._expected:
            self.all_done.set()
        return True


async def supervised(queue: Queue, seen: Seen, workers: int) -> None:
    """As a container would: what stops with an error is started again. Until all is done, or nothing more comes."""
    stop = asyncio.Event()

    async def keep_running() -> None:
        while not stop.is_set():
            with suppress(ConnectionError):
                await queue.run(seen.work, stop, workers=workers)
            await asyncio.sleep(0.01)

    task = asyncio.ensure_future(keep_running())
    try:
        while not seen.all_done.is_set():
            seen.news.clear()
            async with asyncio.timeout(PATIENCE):
                await seen.news.wait()
    except TimeoutError:
        pass
    finally:
        stop.set()
        await asyncio.wait([task], timeout=PATIENCE)
        task.cancel()
        await asyncio.wait([task])


async def judged(kind: Kind, place: Yard, number: int) -> tuple[str, ...]:
    """Of so many: lost and doubled with four workers, lost after a failure, stuck behind one that always fails."""
    async with kind.opened(place.dsn, 4) as queue:
        messages = new_messages(number)
        await queue.fill(messages)
        many = Seen(number)
        await supervised(queue, many, 4)
        await place.empty()

        await queue.fill(messages)
        flaky = Seen(number, flaky=True)
        await supervised(queue, flaky, 1)
        await place.empty()

        await queue.fill(messages)
        poisoned = Seen(number - 1, poison=messages[0].id)
        await supervised(queue, poisoned, 1)
        await place.empty()
    doubled = sum(times > 1 for times in many.runs.values())
    lost, after_failure = number - len(many.runs), number - len(flaky.runs)
    return kind.NAME, str(lost), str(doubled), str(after_failure), str(number - 1 - len(poisoned.runs))


async def stages(world: World) -> AsyncGenerator[Stage | Facts, None]:
    async with yard(world.postgres_dsn) as place:
        for workers, write in ((1, False), (1, True), (4, True)):
            async for stage in single(place, workers, write=write):
                yield stage
        for write in (False, True):
            async for stage in loops(place, write=write):
                yield stage
        await place.empty()
        rows = [
            await judged(kind, place, world.pairs) if kind else (name, *[MISSING] * 4)
            for name, kind in place.kinds.items()
            if name != FLOOR
        ]
    yield Facts(
        question="dispatch",
        title=f"Right or wrong, of {world.pairs} messages each",
        columns=("queue", "lost, 4 workers", "doubled, 4 workers", "lost after a failure", "stuck behind a poison"),
        rows=tuple(rows),
        note="Lost, 4 workers: never given to a handler by run with four workers in one process. Lost after a failure: "
        "each handler failed once, and the loop was started again where it stopped. Stuck behind a poison: not handled "
        "while one message, the first, fails each time.",
    )


__all__ = ["Tally", "judged", "stages"]
