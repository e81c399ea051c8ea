"""Work that must end before a cancellation is heard: COMMIT, ROLLBACK, giving a connection back."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Generator
from typing import Any, Generic, TypeVar

T = TypeVar("T")


class LoopLock:
    """A lock that can be made at import time and used by one event loop after another."""

    def __init__(self) -> None:
        self._loop: asyncio.AbstractEventLoop | None = None
        self._lock = asyncio.Lock()

    def of_this_loop(self) -> asyncio.Lock:
        loop = asyncio.get_running_loop()
        if self._loop is not loop:
            self._loop, self._lock = loop, asyncio.Lock()
        return self._lock


async def finish(work: Coroutine[Any, Any, T]) -> T:
    """Run it to its end. A cancellation that arrives meanwhile is raised afterwards, in place of the result."""
    return await wait_out(asyncio.ensure_future(work))


async def wait_out(future: asyncio.Future[T]) -> T:
    """Wait for a future that must not be cancelled by us, and hear a cancellation only after it."""
    cancelled: asyncio.CancelledError | None = None
    while not future.done():
        try:
            await asyncio.shield(future)
        except asyncio.CancelledError as error:
            if future.cancelled():
                raise
            cancelled = error
        except BaseException:  # noqa: BLE001, S110 - it is the future's own, and raised by result() below
            pass
    if cancelled is not None:
        if not future.cancelled():
            future.exception()  # seen: asyncio must not warn about it
        raise cancelled
    return future.result()


class finish_here(Generic[T]):  # noqa: N801 - it is awaited like `finish`
    """As `finish`, without a task of its own, which costs more than the COMMIT it protects.

    Only for work that sets no timeouts of asyncio's on the current task: those are cancellations too, and would not
    be heard either.
    """

    __slots__ = ("_work",)

    def __init__(self, work: Coroutine[Any, Any, T]) -> None:
        self._work = work

    def __await__(self) -> Generator[Any, None, T]:
        work, cancelled = self._work, None
        loop = asyncio.get_running_loop()
        try:
            while True:
                waits_for = work.send(None)
                if waits_for is None:  # a bare yield: it only lets others run
                    try:
                        yield
                    except asyncio.CancelledError as error:
                        cancelled = error
                    continue
                waits_for._asyncio_future_blocking = False  # noqa: SLF001 - as a task does
                while not waits_for.done():
                    # The task waits for a stand-in: a cancellation reaches that, and not what the work waits for.
                    stand_in: asyncio.Future[None] = loop.create_future()
                    waits_for.add_done_callback(lambda _, one=stand_in: one.done() or one.set_result(None))
                    try:
                        yield from stand_in
                    except asyncio.CancelledError as error:
                        cancelled = error
        except StopIteration as stop:
            if cancelled is not None:
                raise cancelled from None
            value: T = stop.value
            return value
        except BaseException as error:
            if cancelled is not None:
                raise cancelled from error
            raise
