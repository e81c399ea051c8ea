"""Stats: how many records a consumer has, in numbers."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import datetime
from typing import Any

import msgspec

from onceward.record import State


class LaneStats(msgspec.Struct, frozen=True):
    """One lane that has something to do, or would have."""

    tenant: str
    name: str | None
    """None: one message that needs no order."""
    state: str
    """ready, running, retrying, later, waiting, blocked"""
    pending: int
    """Up to 1000 that may run, and up to 1000 that are set aside."""
    oldest: datetime | None = None
    next_try_at: datetime | None = None
    blocked_on: str | None = None
    """The position that it waits for, as "stream position", or the id of the dead letter that holds it up."""


class QueueStats(msgspec.Struct, frozen=True):
    """A consumer's queue. Counts of messages, and of lanes by state.

    Cheap, because nothing is counted beyond 5000: up to there all of it is exact. With `exact=False` the number of
    pending messages is the database's estimate, for all consumers, and the other counts are at least what they say.
    """

    pending: int = 0
    lanes: int = 0
    ready: int = 0
    running: int = 0
    retrying: int = 0
    later: int = 0
    waiting: int = 0
    blocked: int = 0
    dead: int = 0
    oldest_at: datetime | None = None
    """When the first message that is pending was received."""
    next_try_at: datetime | None = None
    exact: bool = True
    worst: tuple[LaneStats, ...] = ()
    """Some lanes that do not go on at once: those that wait for a person first, then the oldest."""


class Stats(msgspec.Struct, frozen=True, kw_only=True):
    """The records of one consumer. The time of a record is when it was processed, or else when it was received."""

    consumer: str
    total: int = 0
    last_day: int = 0
    """Of the last 24 hours."""
    last_hour: int = 0
    oldest: datetime | None = None
    accepted: int = 0
    running: int = 0
    processed: int = 0
    failed: int = 0
    dead: int = 0
    discarded: int = 0
    queue: QueueStats = QueueStats()
    """What was accepted and is not settled yet."""


class Part(msgspec.Struct, frozen=True):
    """Some of a consumer's records, all in one state."""

    state: State
    records: int
    last_day: int
    last_hour: int
    oldest: datetime | None


def stats_of(consumer: str, parts: Iterable[Part]) -> Stats:
    """The sum of the parts."""
    parts = list(parts)
    by_state: dict[str, Any] = {
        state.value: sum(part.records for part in parts if part.state is state) for state in State
    }
    return Stats(
        consumer=consumer,
        total=sum(part.records for part in parts),
        last_day=sum(part.last_day for part in parts),
        last_hour=sum(part.last_hour for part in parts),
        oldest=min((part.oldest for part in parts if part.oldest is not None), default=None),
        **by_state,
    )
