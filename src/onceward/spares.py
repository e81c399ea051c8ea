"""Lanes that were claimed for turns after the one that has begun.

They must not wait for a handler that takes its time: others could work on them, and when their claim is over, nobody
could tell them from those of a dead worker. So a timer gives them back, while the handler runs, to whoever has time.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import msgspec

from onceward.queue import Begun, Claiming, Spare

SPARE_FOR = 1.0
"""Seconds. It is less than their claim lasts."""


class Spares:
    """Of one worker, by one owner. `end` must follow."""

    def __init__(self, give_back: Callable[[str, list[bytes]], Coroutine[Any, Any, None]]) -> None:
        self._give_back = give_back
        self._owner = ""
        self._left: list[Spare] = []
        self._next: tuple[Spare, ...] = ()
        """Those that the next turn is to begin with."""
        self._timer: asyncio.TimerHandle | None = None
        self._giving: asyncio.Task[None] | None = None

    def __bool__(self) -> bool:
        return bool(self._left)

    def next(self, claiming: Claiming, lanes: int) -> Claiming | None:
        """How a turn with some of them begins. None: there are none."""
        if not self._left:
            return None
        self._next, self._left = tuple(self._left[:lanes]), self._left[lanes:]
        return msgspec.structs.replace(claiming, spare=self._next)

    def went_on(self, claiming: Claiming, begun: Begun) -> None:
        """The next turn has begun, with some of them or with a new claim."""
        self._next = ()
        if begun.spare:
            self._owner, self._left = claiming.owner, list(begun.spare)
            self._stop_timer()
            self._timer = asyncio.get_running_loop().call_later(SPARE_FOR, self._too_long)

    def _too_long(self) -> None:
        if self._left:
            self._giving = asyncio.ensure_future(self._give_back(self._owner, self._take()))

    def _take(self) -> list[bytes]:
        lanes = [one.lane for one in self._left]
        self._left = []
        return lanes

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    async def end(self) -> list[bytes]:
        """Those that are still to be given back; also what a turn was to begin with, and could not."""
        self._stop_timer()
        if self._giving is not None:
            await self._giving
        return [one.lane for one in self._next] + self._take()
