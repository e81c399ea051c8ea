"""The partitions that are ours right now, and what was fetched from them and not yet received.

A Partition is one **assignment** of a partition: when it is taken from us and comes back, that is another one. So a
delivery knows by its Partition whether it is still ours, and a late one of an earlier assignment can do no harm.

    ours       its deliveries may begin
    leaving    none may begin any more; those that have begun are waited for, and count
    gone       somebody else has it, and nothing that happens to its deliveries counts

With confluent-kafka, records are put here by a thread of its own, also while the event loop is busy. What it touches
is behind a lock; all else belongs to the loop.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from threading import Lock
from typing import TypeAlias

from onceward.brokers.kafka_prefix import SettledPrefix
from onceward.brokers.kafka_records import Fetched

log = logging.getLogger("onceward.kafka")

Place: TypeAlias = "tuple[str, int]"
"""Topic and number of a partition."""

MOST_AHEAD = 10_000
"""Offsets of a partition that are settled and cannot be committed. With more, no more are delivered."""


class Partition:
    """A partition, from its assignment until it is taken from us."""

    __slots__ = (
        "_careful",
        "_quiet",
        "begun",
        "buffer",
        "committed",
        "gone",
        "last",
        "ours",
        "place",
        "prefix",
        "rests",
    )

    def __init__(self, place: Place, *, careful: int) -> None:
        self.place = place
        self.ours = True
        self.gone = False
        self.buffer: deque[Fetched] = deque()
        self.last = -1
        """The offset that was buffered last."""
        self.rests = False
        """There is no room for another portion in its buffer, so nothing is fetched until it is nearly empty."""
        self.prefix = SettledPrefix()
        self.committed = -1
        self.begun = 0
        self._quiet: asyncio.Event | None = None
        self._careful = careful

    @property
    def name(self) -> str:
        return f"{self.place[0]}/{self.place[1]}"

    @property
    def clogged(self) -> bool:
        """Too much is settled behind one that is not."""
        return self.prefix.ahead >= MOST_AHEAD

    def deliver(self) -> tuple[Fetched, bool]:
        """The next record, and whether somebody who died may have had it.

        Kafka does not say so of a record. But whoever had the partition before may have died with records at work that
        are not committed, and these are the first ones of an assignment. So a number of them count as delivered again;
        each costs a mark in the store before it starts, and one that kills its process is found out by that.
        """
        record = self.buffer.popleft()
        if self.committed < 0:
            self.committed = record.offset
        self.prefix.deliver(record.offset)
        redelivered = self._careful > 0
        self._careful -= redelivered
        return record, redelivered

    def settle(self, offset: int) -> None:
        self.prefix.settle(offset)

    @property
    def committable(self) -> int | None:
        """What the broker does not know yet."""
        found = self.prefix.committable
        return found if found is not None and found > self.committed else None

    # --- beginning and ending -------------------------------------------------------------------------------

    def begin(self) -> bool:
        if self.ours:
            self.begun += 1
        return self.ours

    def end(self) -> None:
        """One that has begun is no longer at work."""
        self.begun -= 1
        if not self.begun and self._quiet is not None:
            self._quiet.set()

    async def quiet(self) -> None:
        """Until nothing is at work."""
        if self.begun:
            self._quiet = asyncio.Event()
            await self._quiet.wait()

    def hurry(self) -> None:
        """Do not wait any longer."""
        if self._quiet is not None:
            self._quiet.set()

    def leave(self) -> None:
        self.ours = False
        self.buffer.clear()


class Partitions:
    """All that are ours. `prefetch` is how many records each may have in its buffer; `room` is told when one that was
    full has room again."""

    def __init__(self, *, prefetch: int, careful: int, room: Callable[[], None]) -> None:
        self._prefetch = prefetch
        self.portion = max(1, prefetch // 2)
        """How many records may be put at once."""
        self._careful = careful
        self._room = room
        self._lock = Lock()
        self._ours: dict[Place, Partition] = {}
        self.changes = 0
        """How often partitions came or went."""

    def add(self, places: Iterable[Place]) -> None:
        with self._lock:
            for place in places:
                self._ours[place] = Partition(place, careful=self._careful)
                self.changes += 1

    def remove(self, places: Iterable[Place] | None = None) -> list[Partition]:
        """They are leaving. None: all."""
        with self._lock:
            wanted = list(self._ours if places is None else places)
            found = [self._ours.pop(place) for place in wanted if place in self._ours]
            for partition in found:
                partition.leave()
                self.changes += 1
        return found

    def all(self) -> list[Partition]:
        with self._lock:
            return list(self._ours.values())

    def put(self, place: Place, records: Sequence[Fetched]) -> None:
        """What was fetched. Of a partition that is not ours any more it is dropped: its next owner fetches it."""
        with self._lock:
            partition = self._ours.get(place)
            if partition is None or not records:
                return
            if records[0].offset <= partition.last:
                partition = self._begin_again(partition)
            partition.buffer.extend(records)
            partition.last = records[-1].offset
            partition.rests = len(partition.buffer) > self._prefetch - self.portion

    def _begin_again(self, partition: Partition) -> Partition:
        """Offsets went back: somebody has reset them, or made the topic anew. What was known of it is worth nothing."""
        log.warning("%s goes back to an offset before %d", partition.name, partition.last)
        partition.leave()
        partition.gone = True
        self.changes += 1
        self._ours[partition.place] = Partition(partition.place, careful=self._careful)
        return self._ours[partition.place]

    def take(self, most: int) -> list[tuple[Partition, Fetched, bool]]:
        """The next records, of each partition about as many."""
        taken: list[tuple[Partition, Fetched, bool]] = []
        with self._lock:
            ready = [one for one in self._ours.values() if one.buffer and not one.clogged]
            while ready and len(taken) < most:
                share = max(1, (most - len(taken)) // len(ready))
                for one in ready[: most - len(taken)]:
                    taken += [(one, *one.deliver()) for _ in range(min(share, len(one.buffer)))]
                    self._has_room(one)
                    self._ours[one.place] = self._ours.pop(one.place)  # others come first the next time
                ready = [one for one in ready if one.buffer]
        return taken

    def _has_room(self, partition: Partition) -> None:
        if partition.rests and len(partition.buffer) <= self.portion // 2:
            partition.rests = False
            self._room()

    def resting(self) -> set[Place]:
        """Those from which nothing should be fetched."""
        with self._lock:
            return {place for place, one in self._ours.items() if one.rests}
