"""Stats: how many records a consumer has, in numbers."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import datetime

import msgspec

from onceward.record import State


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
    by_state = {state.value: sum(part.records for part in parts if part.state is state) for state in State}
    return Stats(
        consumer=consumer,
        total=sum(part.records for part in parts),
        last_day=sum(part.last_day for part in parts),
        last_hour=sum(part.last_hour for part in parts),
        oldest=min((part.oldest for part in parts if part.oldest is not None), default=None),
        **by_state,
    )
