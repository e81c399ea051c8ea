"""What the queues of all dialects share: rows as values, and looking along dependencies."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

import msgspec

from onceward.errors import UsageError
from onceward.message import Position
from onceward.queue import Queued, QueueLine, Unmet
from onceward.record import Record, State
from onceward.sql.dialect import Dialect
from onceward.sql.plan import Plan
from onceward.sql.verbs import moment_of, record_of, unmet


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


CIRCLE = 100
"""So many positions are looked at before a circle is given up."""


def unmet_of(dialect: Dialect, record: Record) -> Plan[Unmet | None]:
    missing = yield from unmet(dialect, record)
    if missing is None:
        return None
    state, _ = yield from _look(dialect, record.consumer, missing, record.tenant)
    return Unmet(missing, state)


def waits_in_circle(dialect: Dialect, record: Record, needed: Position) -> Plan[bool]:
    """Step by step from what is needed to what that needs, and so on; what is done needs nothing."""
    seen: set[tuple[str, str, int]] = set()
    todo = [(needed, record.tenant)]
    while todo and len(seen) < CIRCLE:
        position, tenant = todo.pop()
        at = (position.tenant or tenant, position.stream, position.position)
        if record.position is not None and at[:2] == (record.tenant, record.stream) and at[2] >= record.position:
            return True
        if at in seen:
            continue
        seen.add(at)
        state, needs = yield from _look(dialect, record.consumer, position, tenant)
        if state is not State.PROCESSED:
            todo += [(one, at[0]) for one in needs]
    return False


def _look(
    dialect: Dialect, consumer: str, position: Position, tenant: str
) -> Plan[tuple[State | None, tuple[Position, ...]]]:
    at = {"tenant": position.tenant or tenant, "stream": position.stream, "position": position.position}
    result = yield dialect("position_look", {"consumer": consumer, **at})
    if not result.rows:
        return None, ()
    row = result.rows[0]
    needs = msgspec.json.decode(row["depends_on"], type=tuple[Position, ...]) if row["depends_on"] else ()
    return State(row["state"]), needs


def queued_of(row: Mapping[str, Any]) -> Queued:
    if row["state"] is None:
        raise UsageError(
            "a message in the queue has no record that this role can see. Workers must see the records of all tenants; "
            "see docs/stored.md about row-level security. Or somebody deleted the record."
        )
    unmet = None
    if row["unmet_stream"] is not None:
        needed = Position(row["unmet_stream"], row["unmet_position"], row["unmet_tenant"])
        unmet = Unmet(needed, None if row["unmet_state"] is None else State(row["unmet_state"]))
    return Queued(
        seq=row["seq"],
        lane=bytes(row["lane_id"]),
        record=record_of(row),
        now=moment_of(row["now"]),
        rank=row["rank"],
        due=None if row["due"] is None else moment_of(row["due"]),
        track=row["track"],
        behind=bool(row["behind"]),
        unmet=unmet,
    )
