"""Work that must end before a cancellation is heard: COMMIT, ROLLBACK, giving a connection back."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

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
