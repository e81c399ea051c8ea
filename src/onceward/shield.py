"""Work that must end before a cancellation is heard: COMMIT, ROLLBACK, giving a connection back."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Generator
from contextvars import Context
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


def finish(work: Coroutine[Any, Any, T]) -> Awaitable[T]:
    """Run it to its end. A cancellation that arrives meanwhile is raised afterwards, in place of the result."""
    return finish_here(_result(asyncio.ensure_future(work)))


async def _result(future: asyncio.Future[T]) -> T:
    return await future


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
        try:
            while True:
                waits_for = work.send(None)
                try:
                    if waits_for is None:  # a bare yield: it only lets others run
                        yield
                    elif not waits_for.done():
                        yield _Unheard(waits_for)
                except asyncio.CancelledError as error:
                    if waits_for is None or not waits_for.cancelled():
                        cancelled = error
                except Exception:  # noqa: BLE001, S110 - it is the future's own, and the work asks the future
                    pass
        except StopIteration as stop:
            if cancelled is not None:
                raise cancelled from None
            value: T = stop.value
            return value
        except BaseException as error:
            if cancelled is not None:
                raise cancelled from error
            raise


class _Unheard:
    """What a task waits for in place of a future: asked to cancel it, it says no, and the task is told afterwards."""

    __slots__ = ("_asyncio_future_blocking", "_future")

    def __init__(self, future: asyncio.Future[Any]) -> None:
        self._future = future
        self._asyncio_future_blocking = True
        future._asyncio_future_blocking = False  # noqa: SLF001 - as a task does

    def add_done_callback(self, callback: Callable[[Any], object], *, context: Context | None = None) -> None:
        self._future.add_done_callback(callback, context=context)

    def get_loop(self) -> asyncio.AbstractEventLoop:
        return self._future.get_loop()

    def done(self) -> bool:
        return self._future.done()

    def cancelled(self) -> bool:
        return self._future.cancelled()

    def cancel(self, msg: object = None) -> bool:  # noqa: ARG002
        return False


class within(Generic[T]):  # noqa: N801 - it is awaited like asyncio.wait_for
    """At most so many seconds, as `asyncio.timeout`; what need not wait at all costs no timer."""

    __slots__ = ("_seconds", "_work")

    def __init__(self, seconds: float, work: Awaitable[T]) -> None:
        self._seconds = seconds
        self._work = work

    def __await__(self) -> Generator[Any, Any, T]:
        steps = self._work.__await__()
        try:
            waits_for = next(steps)
        except StopIteration as stop:
            value: T = stop.value
            return value
        return (yield from self._rest(_Begun(steps, waits_for)).__await__())

    async def _rest(self, begun: _Begun[T]) -> T:
        async with asyncio.timeout(self._seconds):
            return await begun


class _Begun(Generic[T]):
    """The rest of something that is waiting already."""

    __slots__ = ("_steps", "_waits_for")

    def __init__(self, steps: Any, waits_for: Any) -> None:
        self._steps = steps
        self._waits_for = waits_for

    def __await__(self) -> Generator[Any, Any, T]:
        steps, waits_for = self._steps, self._waits_for
        try:
            while True:
                try:
                    yield waits_for
                except BaseException as error:  # noqa: BLE001 - a cancellation, or what the future says
                    waits_for = steps.throw(error)
                else:
                    waits_for = next(steps)
        except StopIteration as stop:
            value: T = stop.value
            return value
