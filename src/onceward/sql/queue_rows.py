"""Rows of the queue as values, for all dialects."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

import msgspec

from onceward.message import Position
from onceward.queue import Queued, QueueLine, Unmet
from onceward.record import State
from onceward.sql.verbs import moment_of, record_of


class LaneLine(msgspec.Struct, frozen=True, gc=False, omit_defaults=True):
    """A lane that has to be there."""

    lane: str
    tenant: str
    share: int
    name: str | None = None
    not_before: datetime | None = None


def lanes_of(lines: Sequence[QueueLine]) -> list[LaneLine]:
    """Each lane once, in an order that all have; it is due when the first of its lines is."""
    lanes: dict[str, LaneLine] = {}
    for line in lines:
        known = lanes.get(line.lane)
        if known is None or _earlier(line.not_before, known.not_before):
            lanes[line.lane] = LaneLine(line.lane, line.tenant, line.share, line.lane_name, line.not_before)
    return [lanes[lane] for lane in sorted(lanes)]


def _earlier(one: datetime | None, other: datetime | None) -> bool:
    """None is now."""
    return other is not None and (one is None or one < other)


def queued_of(row: Mapping[str, Any]) -> Queued:
    unmet = None
    if row["unmet_stream"] is not None:
        needed = Position(row["unmet_stream"], row["unmet_position"], row["unmet_tenant"])
        unmet = Unmet(needed, None if row["unmet_state"] is None else State(row["unmet_state"]))
    return Queued(
        seq=row["seq"],
        lane=bytes(row["lane"]),
        record=record_of(row),
        now=moment_of(row["now"]),
        rank=row["rank"],
        due=None if row["due"] is None else moment_of(row["due"]),
        track=row["track"],
        behind=bool(row["behind"]),
        unmet=unmet,
    )
