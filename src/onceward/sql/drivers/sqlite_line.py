"""The line in front of the one writer of a SQLite database: one at a time, in the order they came, not for ever."""

from __future__ import annotations

import asyncio
from collections import deque
from itertools import islice

from onceward.errors import StoreUnavailable, TryLater

AHEAD = 64
"""How many are woken at once, at the most."""


class _Waiting:
    """Somebody who waits, and until when."""

    __slots__ = ("deadline", "wait", "woken")

    def __init__(self, deadline: float, wait: float) -> None:
        self.deadline = deadline
        self.wait = wait
        self.woken: asyncio.Future[None]


class Line:
    """Who is `busy` is alone. Who waits stays in the line until it is its turn, or until it gives up.

    Most handlers wait for nothing but SQLite, which lets nobody else run, so each of them is done before the next is
    resumed. Therefore several are woken at once, which spares a round of the event loop for each. Who finds out that
    the one before it is not done yet waits on in its place, and for a while fewer are woken.
    """

    def __init__(self, path: str) -> None:
        self.busy = False
        self.committing = False
        """It is the COMMIT that everybody waits for, and not a slow handler."""
        self._path = path
        self._closed = False
        self.waiting: deque[_Waiting] = deque()
        """While nobody is busy, the first of them is awake, and going to be."""
        self._timer: asyncio.TimerHandle | None = None
        self._ahead = AHEAD

    def try_enter(self) -> bool:
        """Become busy, if that needs no waiting."""
        if self.busy or self.waiting or self._closed:
            return False
        self.busy = True
        return True

    async def enter(self, wait: float) -> None:
        """Become busy. TryLater(store_busy) when that takes too long."""
        if self._closed:
            raise was_closed(self._path)
        if not self.try_enter():
            await self._queue(wait)
            self.busy = True

    async def _queue(self, wait: float) -> None:
        loop = asyncio.get_running_loop()
        mine = _Waiting(loop.time() + wait, wait)
        self.waiting.append(mine)
        try:
            while True:
                mine.woken = loop.create_future()
                self._set_timer(loop, mine.deadline)
                await mine.woken
                if self._closed:
                    raise was_closed(self._path)
                if not self.busy and self.waiting[0] is mine:
                    break
                if not self.committing:
                    self._ahead = 1
        except BaseException:
            self.waiting.remove(mine)
            raise
        self.waiting.popleft()

    def wake(self) -> None:
        """Nobody is busy: let the next ones see, unless the first of them was woken early. When all who were are
        through, and none of them too early, twice as many are woken."""
        if self.waiting[0].woken.done():
            return
        self._ahead = min(2 * self._ahead, AHEAD)
        for waiting in islice(self.waiting, self._ahead):
            if not waiting.woken.done():
                waiting.woken.set_result(None)

    def close(self) -> None:
        """Turn everybody away."""
        self._closed = True
        if self._timer is not None:
            self._timer.cancel()
        for waiting in self.waiting:
            if not waiting.woken.done():
                waiting.woken.set_result(None)

    def _set_timer(self, loop: asyncio.AbstractEventLoop, when: float) -> None:
        """One for all who wait: it is set for the first who gives up, and seldom has to do anything."""
        if self._timer is not None:
            if self._timer.when() <= when:
                return
            self._timer.cancel()
        self._timer = loop.call_at(when, self._give_up, loop)

    def _give_up(self, loop: asyncio.AbstractEventLoop) -> None:
        self._timer = None
        now = loop.time()
        left = [waiting for waiting in self.waiting if not waiting.woken.done()]
        for waiting in left:
            if waiting.deadline <= now:
                text = f"waited {waiting.wait:g} s for a turn to write to {self._path}: another handler is slow"
                waiting.woken.set_exception(TryLater(reason="store_busy", text=text))
        later = [waiting.deadline for waiting in left if waiting.deadline > now]
        if later:
            self._set_timer(loop, min(later))


def was_closed(path: str) -> StoreUnavailable:
    return StoreUnavailable(f"{path} was closed while it was in use")
