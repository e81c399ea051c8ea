"""What is being worked on in this process, and what is known to be done."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager

from onceward.errors import TryLater
from onceward.store import Done


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

    def enter_free(self, digests: Iterable[bytes]) -> Flight:
        """Those of them that nobody in this process works on, all in one flight. Waits for nothing."""
        return Flight(self._flying, [digest for digest in digests if digest not in self._flying])

    def landing(self, digests: Iterable[bytes]) -> list[asyncio.Future[None]]:
        """What to wait for until one of them is free."""
        return [self._flying[digest] for digest in digests if digest in self._flying]

    async def _wait_for(self, digest: bytes, wait: float) -> None:
        loop = asyncio.get_running_loop()
        deadline = loop.time() + wait
        while (other := self._flying.get(digest)) is not None:
            # Not wait_for(): a cancelled waiter must not cancel the future that others wait on.
            await asyncio.wait([other], timeout=max(0.0, deadline - loop.time()))
            if not other.done():
                raise in_flight(wait)


class Flight:
    """Several identities that are worked on together."""

    def __init__(self, flying: dict[bytes, asyncio.Future[None]], digests: list[bytes]) -> None:
        self._flying = flying
        self._landed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.digests = frozenset(digests)
        flying.update(dict.fromkeys(digests, self._landed))

    def land(self) -> None:
        for digest in self.digests:
            del self._flying[digest]
        self._landed.set_result(None)


def in_flight(wait: float) -> TryLater:
    return TryLater(reason="in_flight", text=f"another runner has this message; waited {wait:g} s for it")


class Cache:
    """The last identities that are known to be committed. It answers "duplicate" or nothing, never "new"."""

    LARGEST_RESULT = 4096

    def __init__(self, size: int) -> None:
        self._size = size
        self._done: OrderedDict[bytes, Done] = OrderedDict()

    def get(self, digest: bytes) -> Done | None:
        done = self._done.get(digest) if self._done else None
        if done is not None:
            self._done.move_to_end(digest)
        return done

    def clear(self) -> None:
        self._done.clear()

    def put_all(self, known: Iterable[tuple[bytes, Done]]) -> None:
        if self._size <= 0:
            return
        for digest, done in known:
            if done.payload_hash is not None and (done.result is None or len(done.result) <= self.LARGEST_RESULT):
                self._done[digest] = done
        while len(self._done) > self._size:
            self._done.popitem(last=False)

    def put(self, digest: bytes, done: Done) -> None:
        if self._size <= 0 or (done.result is not None and len(done.result) > self.LARGEST_RESULT):
            return
        self._done[digest] = done
        self._done.move_to_end(digest)
        if len(self._done) > self._size:
            self._done.popitem(last=False)
