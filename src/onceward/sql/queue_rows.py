"""What the queues of all dialects share: rows as values, and looking along dependencies."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

import msgspec

from onceward.identity import Identity
from onceward.message import Position, restored
from onceward.queue import BusyLanes, Queued, QueueLine, Unmet
from onceward.record import State
from onceward.sql.dialect import Dialect
from onceward.sql.plan import Plan
from onceward.sql.verbs import moment_of, unmet

_decode = msgspec.json.decode


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


def busy_of(rows: Sequence[Mapping[str, Any]]) -> BusyLanes:
    found = [row["lane"] for row in rows]
    return BusyLanes(frozenset(bytes(lane) for lane in found if lane is not None), None in found)


CIRCLE = 100
"""So many positions are looked at before a circle is given up."""


def unmet_of(dialect: Dialect, queued: Queued, depends_on: Sequence[Position]) -> Plan[Unmet | None]:
    of = queued.identity
    missing = yield from unmet(dialect, of, depends_on)
    if missing is None:
        return None
    state, _ = yield from _look(dialect, of.consumer, missing, of.tenant)
    return Unmet(missing, state)


def waits_in_circle(dialect: Dialect, queued: Queued, needed: Position) -> Plan[bool]:
    """Step by step from what is needed to what that needs, and so on; what is done needs nothing."""
    of, stream, own = queued.identity, queued.message.stream, queued.message.position
    seen: set[tuple[str, str, int]] = set()
    todo = [(needed, of.tenant)]
    while todo and len(seen) < CIRCLE:
        position, tenant = todo.pop()
        at = (position.tenant or tenant, position.stream, position.position)
        if own is not None and at[:2] == (of.tenant, stream) and at[2] >= own:
            return True
        if at in seen:
            continue
        seen.add(at)
        state, needs = yield from _look(dialect, of.consumer, position, tenant)
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


def queued_of(row: Mapping[str, Any], now: datetime) -> Queued:
    """As PostgreSQL gives it, see onceward_take. All at once: to ask for them by name takes four times as long."""
    (
        lane, _, _, _, _, _, seq, rank, track, due, behind, unmet, record_place, row_place, identity, consumer, tenant,
        scope, key, message_id, type_, source, topic, origin, attempts, started, payload, body, headers, received_at,
        occurred_at, stream, position, depends_on,
    ) = row.values()  # fmt: skip
    message = restored(
        message_id, type_, None if payload is None else _decode(payload), source, topic, tenant,
        None if headers is None else _decode(headers), None if occurred_at is None else moment_of(occurred_at), stream,
        position, () if depends_on is None else _decode(depends_on, type=tuple[Position, ...]), body,
    )  # fmt: skip
    return Queued(
        seq, lane, Identity.known(identity, consumer, tenant, scope, key), message, now, rank, due, track, behind,
        None if unmet is None else _unmet_of(unmet), attempts, started, origin, received_at, payload,
        (record_place, row_place),
    )  # fmt: skip


def _unmet_of(text: str) -> Unmet:
    found = _decode(text)
    state = found["state"]
    needed = Position(found["stream"], found["position"], found["tenant"])
    return Unmet(needed, None if state is None else State(state))
