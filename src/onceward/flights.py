"""What is being worked on in this process, and what is known to be done."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, KeysView
from time import monotonic

from onceward.errors import TryLater
from onceward.store import Done


class Flights:
    """One runner per identity in this process. The others wait here, holding no connection, and not for ever."""

    def __init__(self) -> None:
        self._flying: dict[bytes, asyncio.Future[None] | None] = {}

    def begin(self, digest: bytes) -> bool:
        """Be the one who works on it, unless somebody else is; `end` must follow."""
        if digest in self._flying:
            return False
        self._flying[digest] = None
        return True

    def enter_free(self, digests: Iterable[bytes]) -> Flight:
        """Those of them that nobody in this process works on, all in one flight. Waits for nothing."""
        return Flight(self._flying, [digest for digest in digests if digest not in self._flying])

    def landing(self, digests: Iterable[bytes]) -> list[asyncio.Future[None]]:
        """What to wait for until one of them is free."""
        return [self._waited_for(digest) for digest in digests if digest in self._flying]

    def _waited_for(self, digest: bytes) -> asyncio.Future[None]:
        other = self._flying[digest]
        if other is None:  # the first who waits
            other = self._flying[digest] = asyncio.get_running_loop().create_future()
        return other

    def end(self, digest: bytes) -> None:
        waited_for = self._flying.pop(digest)
        if waited_for is not None:
            waited_for.set_result(None)

    async def wait_for(self, digest: bytes, deadline: float) -> bool:
        """Until nobody works on it. False: that took too long."""
        while digest in self._flying:
            other = self._waited_for(digest)
            # Not wait_for(): a cancelled waiter must not cancel the future that others wait on.
            await asyncio.wait([other], timeout=max(0.0, deadline - monotonic()))
            if not other.done():
                return False
        return True


class Flight:
    """Several identities that are worked on together."""

    def __init__(self, flying: dict[bytes, asyncio.Future[None] | None], digests: list[bytes]) -> None:
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


def busy(wait: float) -> TryLater:
    return TryLater(reason="store_busy", text=f"another transaction writes to the database; waited {wait:g} s for it")


class Cache:
    """The last identities that are known to be committed. It answers "duplicate" or nothing, never "new".

    Two dicts: when the newer one is half of the size it becomes the older one, and what was that is forgotten. An
    OrderedDict of thousands would cost more, for each message, than the claim's own text.
    """

    LARGEST_RESULT = 4096

    def __init__(self, size: int) -> None:
        self._half = (size + 1) // 2
        self._new: dict[bytes, Done] = {}
        self._old: dict[bytes, Done] = {}

    def get(self, digest: bytes) -> Done | None:
        done = self._new.get(digest)
        if done is None:
            done = self._old.get(digest)
            if done is not None:
                self.put(digest, done)
        return done

    def known(self, digests: KeysView[bytes]) -> list[tuple[bytes, Done]]:
        """As `get`, for many: most often none of them is known, and that is said at once."""
        held = (digests & self._new.keys()) | (digests & self._old.keys())
        found = [(digest, self.get(digest)) for digest in held]
        return [(digest, done) for digest, done in found if done is not None]

    def clear(self) -> None:
        self._new, self._old = {}, {}

    def put(self, digest: bytes, done: Done) -> None:
        self.put_all([(digest, done)])

    def put_all(self, known: Iterable[tuple[bytes, Done]]) -> None:
        if self._half <= 0:
            return
        new, largest = self._new, self.LARGEST_RESULT
        for digest, done in known:
            if done.payload_hash is not None and (done.result is None or len(done.result) <= largest):
                new[digest] = done
                if len(new) >= self._half:
                    self._old, self._new = new, {}
                    new = self._new
