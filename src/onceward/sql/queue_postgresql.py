"""The queue of a stored inbox on PostgreSQL, as plans. The steps are functions of the database, see 0004_queue.sql."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime
from time import monotonic
from typing import Any, TypeAlias

import msgspec

from onceward.errors import HandlerEndedTransaction
from onceward.identity import Identity, digest
from onceward.queue import Kept, KeptLine, LaneClaim, QueueLine, Share, Taken, TurnClosing
from onceward.record import Record
from onceward.sql.dialect import Dialect
from onceward.sql.plan import Plan, Statement
from onceward.sql.queue_rows import lanes_of, queued_of
from onceward.sql.verbs import record_of

_NEW = KeptLine(Kept.NEW)
_PARTS = ("done", "failed", "blocked", "behind")


def accept(dialect: Dialect, lines: Sequence[QueueLine], consumer: str, host: str) -> Plan[list[KeptLine]]:
    """Where all are new, nothing is said."""
    params = {"lines": _json(lines), "lanes": _json(lanes_of(lines)), "consumer": consumer, "host": host}
    result = yield dialect("queue_accept", params)
    if not result.rows:
        return [_NEW] * len(lines)
    return [
        KeptLine(Kept(row["how"]), row["known_hash"]) for row in sorted(result.rows, key=lambda one: int(one["place"]))
    ]


class Mark:
    """Where the last claim found something, and when the last one looked from the beginning. See onceward_claim."""

    __slots__ = ("looked", "since")

    def __init__(self) -> None:
        self.since: datetime | None = None
        self.looked = 0.0


Marks: TypeAlias = dict[tuple[str, Share | None], Mark]

LOOK_BACK = 1.0
"""Seconds between two claims that look from the beginning."""


def claim_lanes(
    dialect: Dialect, consumer: str, owner: str, *, most: int, lease: float, share: Share | None, marks: Marks
) -> Plan[list[LaneClaim]]:
    mark = marks.setdefault((consumer, share), Mark())
    since = mark.since if monotonic() < mark.looked + LOOK_BACK else None
    params = {"consumer": consumer, "owner": owner, "most": most, "lease": float(lease)}
    result = yield _shared(dialect, "queue_claim", {**params, "since": since}, share)
    if not result.rows and since is not None:
        since = None
        result = yield _shared(dialect, "queue_claim", {**params, "since": None}, share)
    if since is None:
        mark.looked = monotonic()
    # Where there was less than asked for there is no backlog, and what comes next is looked for once and not twice.
    mark.since = result.rows[0]["first_due"] if len(result.rows) == most else None
    return [LaneClaim(bytes(row["lane"]), row["claims"]) for row in result.rows]


def take_lanes(dialect: Dialect, owner: str, lanes: Sequence[bytes], most: int) -> Plan[Taken]:
    result = yield dialect("queue_take", _owned(owner, lanes) | {"most": most})
    held = frozenset(bytes(row["lane_id"]) for row in result.rows)
    messages = tuple(queued_of(row) for row in result.rows if row["seq"] is not None)
    return Taken(held, messages, str(result.rows[0]["xid"]) if result.rows else None)


def stood(dialect: Dialect, taken: Taken) -> Plan[bool | None]:
    if taken.xid is None:
        return None
    result = yield dialect("queue_stood", {"xid": int(taken.xid)})
    status: str | None = result.rows[0]["status"]
    return None if status is None else status == "committed"


def hold_lanes(dialect: Dialect, owner: str, lanes: Sequence[bytes]) -> Plan[frozenset[bytes]]:
    result = yield dialect("queue_hold", _owned(owner, lanes))
    return frozenset(bytes(row["lane"]) for row in result.rows)


def opening(dialect: Dialect, owner: str, lanes: Sequence[bytes]) -> Statement:
    """To be said with BEGIN: the lock of the lanes, and the savepoint of the turn."""
    return dialect("queue_open", _owned(owner, lanes))


def closing(dialect: Dialect, closing: TurnClosing, consumer: str, host: str) -> Statement:
    """To be said with COMMIT: 1, or 0 when a message is gone."""
    return dialect("queue_close_at_commit", _closing(closing, consumer, host))


def close_lanes(dialect: Dialect, closing: TurnClosing, consumer: str, host: str) -> Plan[None]:
    result = yield dialect("queue_close", _closing(closing, consumer, host))
    if result.rows[0]["missing"]:
        raise HandlerEndedTransaction("a message is gone: a handler removed it, or changed where tables are found")


def _closing(closing: TurnClosing, consumer: str, host: str) -> dict[str, Any]:
    parts = {name: _json(lines) if (lines := getattr(closing, name)) else None for name in _PARTS}
    return {"consumer": consumer, "host": host, "owner": closing.owner, "lanes": _json(closing.lanes), **parts}


def release(dialect: Dialect, owner: str, lanes: Sequence[bytes], delay: float) -> Plan[None]:
    yield dialect("queue_release", _owned(owner, lanes) | {"delay": float(delay)})


def extend(dialect: Dialect, owner: str, lanes: Sequence[bytes], lease: float) -> Plan[frozenset[bytes]]:
    result = yield dialect("queue_extend", _owned(owner, lanes) | {"lease": float(lease)})
    return frozenset(bytes(row["lane"]) for row in result.rows)


def mark_start(dialect: Dialect, owner: str, lane: bytes, identity: Identity) -> Plan[Record | None]:
    params = {"owner": owner, "lane": lane.hex(), "identity": dialect.identity(identity.digest)}
    result = yield dialect("queue_mark_start", params)
    return record_of(result.rows[0]) if result.rows else None


def unmark_start(dialect: Dialect, identity: Identity) -> Plan[None]:
    yield dialect("queue_unmark_start", {"identity": dialect.identity(identity.digest)})


def channel(dialect: Dialect, consumer: str) -> str:
    return f"onceward_{digest(dialect.schema or '', consumer)[:10].hex()}"


def call(dialect: Dialect, consumer: str) -> Plan[None]:
    yield dialect("queue_call", {"channel": channel(dialect, consumer)})


def due_in(dialect: Dialect, consumer: str, share: Share | None) -> Plan[float | None]:
    result = yield _shared(dialect, "queue_due_in", {"consumer": consumer}, share)
    return max(0.0, result.rows[0]["seconds"]) if result.rows else None


def wake_overdue(dialect: Dialect, consumer: str) -> Plan[int]:
    result = yield dialect("queue_overdue", {"consumer": consumer})
    woken: int = result.rows[0]["woken"]
    return woken


def requeue(dialect: Dialect, identity: Identity, line: QueueLine) -> Plan[bool]:
    params = {"identity": dialect.identity(identity.digest), "lines": _json([line])}
    result = yield dialect("queue_requeue", params)
    return bool(result.rows[0]["done"])


def drop(dialect: Dialect, identity: Identity, line: QueueLine) -> Plan[bool]:
    result = yield dialect("queue_drop", {"identity": dialect.identity(identity.digest), "lane": line.lane})
    return bool(result.rows[0]["done"])


def _shared(dialect: Dialect, name: str, params: Mapping[str, Any], share: Share | None) -> Any:
    if share is None:
        return dialect(name, params)
    number, shares = share
    return dialect(f"{name}_share", {**params, "number": number, "shares": shares})


def _owned(owner: str, lanes: Sequence[bytes]) -> dict[str, Any]:
    return {"owner": owner, "lanes": ",".join(lane.hex() for lane in lanes)}


def _json(value: Any) -> str:
    return msgspec.json.encode(value).decode()
