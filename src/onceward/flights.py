"""What is being worked on in this process, and what is known to be done."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import msgspec

from onceward.errors import TryLater


class Flights:
    """One runner per identity in this process. The others wait here, holding no connection, and not for ever."""

    def __init__(self) -> None:
        self._flying: dict[bytes, asyncio.Future[None]] = {}

    @asynccontextmanager
    async def enter(self, digest: bytes, wait: float) -> AsyncIterator[None]:
        await self._wait_for(digest, wait)
        mine = self._flying[digest] = asyncio.get_running_loop().create_future()
        try:
            yield
        finally:
            del self._flying[digest]
            mine.set_result(None)

    async def _wait_for(self, digest: bytes, wait: float) -> None:
        loop = asyncio.get_running_loop()
        deadline = loop.time() + wait
        while (other := self._flying.get(digest)) is not None:
            # Not wait_for(): a cancelled waiter must not cancel the future that others wait on.
            await asyncio.wait([other], timeout=max(0.0, deadline - loop.time()))
            if not other.done():
                raise in_flight(wait)


def in_flight(wait: float) -> TryLater:
    return TryLater(reason="in_flight", text=f"another runner has this message; waited {wait:g} s for it")


def busy(wait: float) -> TryLater:
    return TryLater(reason="store_busy", text=f"another transaction writes to the database; waited {wait:g} s for it")


class Done(msgspec.Struct, frozen=True):
    """What a duplicate is answered with: the hash to compare, and the result as it was stored."""

    payload_hash: bytes
    result: bytes | None


class Cache:
    """The last identities that are known to be committed. It answers "duplicate" or nothing, never "new"."""

    LARGEST_RESULT = 4096

    def __init__(self, size: int) -> None:
        self._size = size
        self._done: OrderedDict[bytes, Done] = OrderedDict()

    def get(self, digest: bytes) -> Done | None:
        done = self._done.get(digest)
        if done is not None:
            self._done.move_to_end(digest)
        return done

    def clear(self) -> None:
        self._done.clear()

    def put(self, digest: bytes, done: Done) -> None:
        if self._size <= 0 or (done.result is not None and len(done.result) > self.LARGEST_RESULT):
            return
        self._done[digest] = done
        self._done.move_to_end(digest)
        if len(self._done) > self._size:
            self._done.popitem(last=False)
