"""Tracks: what waits to be worked on, in the order that has to be kept.

Deliveries of one partition are one **track**, and so are those of one lane that have no partition; one runner at a time
has a track. What has neither is free, and any runner may take it.

A delivery that is put off holds up the later ones of its lane, and nobody else: they wait behind it, also those that
come in afterwards, and the rest of the track goes on.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from typing import TypeAlias

import msgspec

from onceward.brokers.base import Delivery

Lane: TypeAlias = "tuple[str, str]"
Name: TypeAlias = "str | Lane | None"
"""A partition, a lane, or None for what is free."""


class Item(msgspec.Struct, eq=False):
    """A delivery on its way."""

    delivery: Delivery
    lane: Lane | None = None
    tries: int = 0
    """Times that it was put off although nothing is counted for it: another runner had it, the store was busy."""

    @property
    def track(self) -> Name:
        return self.lane if self.delivery.partition is None else self.delivery.partition


class _Hold(msgspec.Struct):
    """Items that wait until a time, one after another."""

    due: float
    items: deque[Item]


class _Track(msgspec.Struct):
    ready: deque[Item] = msgspec.field(default_factory=deque)
    held: dict[Lane | Item, _Hold] = msgspec.field(default_factory=dict)
    taken: bool = False

    def take(self, most: int, now: float) -> list[Item]:
        items: list[Item] = []
        for key, hold in [(key, hold) for key, hold in self.held.items() if hold.due <= now]:
            while hold.items and len(items) < most:
                items.append(hold.items.popleft())
            if len(items) >= most and hold.items:  # the rest comes next, behind those that are taken
                self.ready.extendleft(reversed(hold.items))
            del self.held[key]
            if len(items) >= most:
                return items
        while self.ready and len(items) < most:
            item = self.ready.popleft()
            hold_of_lane = None if item.lane is None else self.held.get(item.lane)
            if hold_of_lane is None:
                items.append(item)
            else:
                hold_of_lane.items.append(item)
        return items

    def put_off(self, item: Item, due: float) -> None:
        key: Lane | Item = item if item.lane is None else item.lane
        hold = self.held.get(key)
        if hold is None:
            self.held[key] = _Hold(due, deque([item]))
        else:
            hold.items.append(item)

    @property
    def due(self) -> float | None:
        return min((hold.due for hold in self.held.values()), default=None)

    @property
    def waiting(self) -> int:
        """Items that are put off, or wait behind one that is."""
        return sum(len(hold.items) for hold in self.held.values()) if self.held else 0

    @property
    def empty(self) -> bool:
        return not self.ready and not self.held


class Taken(msgspec.Struct):
    """What one runner has, and the tracks that are its own until it is `done`."""

    items: list[Item]
    names: list[Name]


class Tracks:
    def __init__(self) -> None:
        self._tracks: dict[Name, _Track] = {}
        self.ready = 0
        self.held = 0

    def add(self, items: Iterable[Item]) -> None:
        for item in items:
            self._of(item).ready.append(item)
            self.ready += 1

    def take(self, most: int, now: float) -> Taken | None:
        """Up to so many, of tracks that nobody has; of more than one track only where one has less. None: nothing."""
        taken = Taken([], [])
        for name in list(self._tracks):
            track = self._tracks[name]
            if track.taken or len(taken.items) >= most:
                continue
            items = self._taken_of(track, most - len(taken.items), now)
            if items:
                taken.items += items
                taken.names.append(name)
                track.taken = name is not None
                self._tracks[name] = self._tracks.pop(name)  # others come first the next time
        return taken if taken.items else None

    def _taken_of(self, track: _Track, most: int, now: float) -> list[Item]:
        ready, waiting = len(track.ready), track.waiting
        items = track.take(most, now)
        self.ready += len(track.ready) - ready
        self.held += track.waiting - waiting
        return items

    def has(self, now: float) -> bool:
        """Whether there is something to take."""
        return any(
            track.ready or (track.due is not None and track.due <= now)
            for track in self._tracks.values()
            if not track.taken
        )

    def done(self, taken: Taken, again: Sequence[tuple[Item, float]] = ()) -> None:
        """Who took them is done with them. Those of `again` are put off, each until a time."""
        for item, due in again:
            self._of(item).put_off(item, due)
            self.held += 1
        for name in taken.names:
            track = self._tracks.get(name)
            if track is not None:
                track.taken = False
                if track.empty:
                    del self._tracks[name]

    def put_back(self, taken: Taken) -> None:
        """As if they had not been taken."""
        for item in reversed(taken.items):
            self._of(item).ready.appendleft(item)
            self.ready += 1
        self.done(taken)

    def due(self) -> float | None:
        """When the first of those that are put off is due, in tracks that nobody has."""
        times = [track.due for track in self._tracks.values() if not track.taken]
        return min((time for time in times if time is not None), default=None)

    def drop(self) -> list[Item]:
        """All that is left. It is forgotten here."""
        left = [item for track in self._tracks.values() for item in track.ready]
        left += [item for track in self._tracks.values() for hold in track.held.values() for item in hold.items]
        self._tracks.clear()
        self.ready = self.held = 0
        return left

    @property
    def empty(self) -> bool:
        """Nothing waits, and nobody has anything."""
        return not self._tracks

    def _of(self, item: Item) -> _Track:
        name = item.track
        track = self._tracks.get(name)
        if track is None:
            track = self._tracks[name] = _Track()
        return track
