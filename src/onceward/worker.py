"""Workers: one step after another, and waiting for more, until told to stop.

Any number of them, in any number of processes, come and go freely.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from time import monotonic

from onceward.crew import Crew, Options
from onceward.errors import CommitUnknown, StoreUnavailable, TryLater
from onceward.pace import Pace
from onceward.shield import finish
from onceward.store import InFlight
from onceward.turn import Again
from onceward.wake import Bell

_log = logging.getLogger("onceward")

TAKEN_PAUSE = 0.05
"""Seconds that a worker rests when a lane is due that it cannot have: somebody has locked it."""
PASSING = ("26000", "40", "53", "55P03", "57014")
"""SQLSTATEs of PostgreSQL: a handler made it forget what was prepared; deadlock or serialization failure; out of
connections, memory or disk; lock_timeout; statement_timeout. Of our own statements: those of handlers are attempts."""


async def run(crew: Crew, options: Options, stop: asyncio.Event) -> None:
    """Until `stop` is set; then finish what was begun, within the grace."""
    async with crew.listening():
        await _run(crew, options, stop)


async def _run(crew: Crew, options: Options, stop: asyncio.Event) -> None:
    leaving = asyncio.Event()
    tasks = [asyncio.ensure_future(_work(crew, options, stop, leaving)) for _ in range(options.concurrency)]
    stopping = asyncio.ensure_future(stop.wait())
    try:
        await asyncio.wait([stopping, *tasks], return_when=asyncio.FIRST_COMPLETED)
        failed = any(task.done() and task.exception() is not None for task in tasks)
        if not failed:
            crew.bell.ring()
            await asyncio.wait(tasks, timeout=options.grace)
    finally:
        stopping.cancel()
        leaving.set()
        for task in tasks:
            task.cancel()
        # Each gives its lanes back before it ends.
        await finish(_gathered(tasks))
    for task in tasks:
        if not task.cancelled() and task.exception() is not None:
            task.result()


async def _work(crew: Crew, options: Options, stop: asyncio.Event, leaving: asyncio.Event) -> None:
    """`leaving` is set before it is cancelled. A cancellation may be lost on its way: a handler swallows it, or a
    driver that hears of a lost connection."""
    ear, pace, trouble = crew.bell.ear(), Pace(options.batch), 0
    task = asyncio.current_task()
    assert task is not None  # noqa: S101 - see _run

    def goes_on() -> bool:
        if stop.is_set() or leaving.is_set():
            return False
        while task.cancelling():  # a TaskGroup in a handler, which has dealt with an error: Python 3.11 leaves it so
            task.uncancel()
        return True

    crew.running += 1
    try:
        while goes_on():
            crew.check_open()
            ear.clear()
            crew.last_step = monotonic()
            if options.brakes and not await _braked(options, pace, ear):
                continue
            try:
                step = await crew.step(options, pace, goes_on)
            except Exception as error:
                if not _passes(error):
                    raise
                trouble += 1
                _log.warning("a worker of %s pauses: %s", crew.consumer, error)
                await _rest(ear, min(5.0, 0.05 * 2**trouble) * (0.5 + random.random()))  # noqa: S311
                continue
            trouble = 0
            if step.claimed:
                continue
            if options.brake is not None:
                options.brake.give_back()
            pace.idle()
            patience = options.poll_interval if step.due is None else min(options.poll_interval, step.due)
            await _rest(ear, patience or min(options.poll_interval, TAKEN_PAUSE))
    finally:
        crew.running -= 1
        crew.bell.forget(ear)


async def _braked(options: Options, pace: Pace, ear: asyncio.Event) -> bool:
    """While everything fails: whether it is this worker's time to try one message."""
    brake = options.brake
    pause = 0.0 if brake is None else brake.pause()
    if pause:
        await _rest(ear, min(pause, options.poll_interval))
        return False
    pace.idle()
    return True


async def _rest(ear: asyncio.Event, seconds: float) -> None:
    with suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            await ear.wait()


def _passes(error: BaseException | None) -> bool:
    """Whether it is the database that has trouble, and not for ever. SQLAlchemy keeps the driver's error as cause."""
    if isinstance(error, (StoreUnavailable, CommitUnknown, TryLater, InFlight, Again)):
        return True
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        if str(getattr(error, "sqlstate", None)).startswith(PASSING):
            return True
        seen.add(id(error))
        error = error.__cause__
    return False


async def _gathered(tasks: Sequence[asyncio.Task[None]]) -> None:
    await asyncio.gather(*tasks, return_exceptions=True)


class RunningWorker:
    """What `inbox.worker()` gives: workers in the background."""

    def __init__(self, stop: asyncio.Event, task: asyncio.Task[None], bell: Bell) -> None:
        self._stop = stop
        self._task = task
        self._bell = bell

    def stop(self) -> None:
        """Take no more; what was begun is finished. Leaving the block waits for that."""
        self._stop.set()
        self._bell.ring()

    @property
    def running(self) -> bool:
        return not self._task.done()

    async def wait(self) -> None:
        """Until they have ended; what ended them is raised."""
        await asyncio.shield(self._task)


@asynccontextmanager
async def in_background(crew: Crew, options: Options) -> AsyncIterator[RunningWorker]:
    stop = asyncio.Event()
    task = asyncio.ensure_future(run(crew, options, stop))
    worker = RunningWorker(stop, task, crew.bell)
    try:
        yield worker
    finally:
        worker.stop()
        try:
            await asyncio.shield(task)
        except asyncio.CancelledError:
            task.cancel()
            await finish(_gathered([task]))
            raise
