"""The queue of a stored inbox on PostgreSQL, as plans. The steps are functions of the database, see 0004_queue.sql."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime
from time import monotonic
from typing import Any, TypeAlias

import msgspec

from onceward.errors import UsageError
from onceward.identity import Identity, digest
from onceward.queue import (
    Begun,
    BusyLanes,
    Claiming,
    DoneLine,
    Kept,
    KeptLine,
    LaneClaim,
    Queued,
    QueueLine,
    Share,
    Spare,
    Taken,
    Then,
    TurnClosing,
)
from onceward.record import Record
from onceward.sql.arrays import array
from onceward.sql.dialect import Dialect
from onceward.sql.plan import Plan, Statement
from onceward.sql.queue_rows import busy_of, lanes_of, queued_of
from onceward.sql.verbs import record_of

_NEW = KeptLine(Kept.NEW)
_PARTS = ("failed", "blocked", "behind")


def accept(dialect: Dialect, lines: Sequence[QueueLine], consumer: str, host: str) -> Plan[list[KeptLine]]:
    """Where all are new, nothing is said."""
    lanes = lanes_of([line for line in lines if line.lane_name is not None])
    params = {"lines": _json(lines), "lanes": _json(lanes), "consumer": consumer, "host": host}
    result = yield dialect("queue_accept", params)
    if not result.rows:
        return [_NEW] * len(lines)
    return [
        KeptLine(Kept(row["how"]), row["known_hash"]) for row in sorted(result.rows, key=lambda one: int(one["place"]))
    ]


class Mark:
    """Where the last claim found something, and when the last one looked from the beginning. See onceward_claim."""

    __slots__ = ("hints", "looked", "since")

    def __init__(self) -> None:
        self.since: datetime | None = None
        self.hints: str | None = None
        self.looked = 0.0

    def begin(self) -> datetime | None:
        """Where the next claim begins to look."""
        if self.since is None or monotonic() >= self.looked + LOOK_BACK:
            self.looked = monotonic()
            return None
        return self.since

    def take_hints(self) -> str | None:
        """They are for one claim; it gives back what it did not need."""
        hints, self.hints = self.hints, None
        return hints

    def found(self, first_due: datetime | None, hints: str | None = None, *, all_that_was_asked: bool) -> None:
        """Where there was less there is no backlog, and what comes next may be anywhere."""
        self.since, self.hints = (first_due, hints) if all_that_was_asked else (None, None)


Marks: TypeAlias = dict[tuple[str, Share | None], Mark]

LOOK_BACK = 1.0
"""Seconds between two claims that look from the beginning."""


def claim_lanes(
    dialect: Dialect, consumer: str, owner: str, *, most: int, lease: float, share: Share | None, marks: Marks
) -> Plan[list[LaneClaim]]:
    mark = marks.setdefault((consumer, share), Mark())
    params = _claiming(consumer, owner, most, lease, share)
    rows = (yield dialect("queue_claim", {**params, "since": mark.begin()})).rows
    mark.found(rows[0]["first_due"] if rows else None, all_that_was_asked=len(rows) == most)
    return [LaneClaim(bytes(row["lane"]), row["claims"]) for row in rows]


def claiming(dialect: Dialect, wanted: Claiming, marks: Marks) -> Statement:
    """A claim to be said before the BEGIN of its turn."""
    mark = marks.setdefault((wanted.consumer, wanted.share), Mark())
    params = _claiming(wanted.consumer, wanted.owner, wanted.lanes, wanted.lease, wanted.share)
    params |= {"lease": str(wanted.lease), "since": mark.begin(), "hints": mark.take_hints()}
    return dialect("queue_claim_for_turn", params)


def _claiming(consumer: str, owner: str, most: int, lease: float, share: Share | None) -> dict[str, Any]:
    return {"consumer": consumer, "owner": owner, "most": most, "lease": float(lease), **_share(share)}


def take_claimed(dialect: Dialect, wanted: Claiming, marks: Marks) -> Plan[Begun]:
    """What was claimed so, and opened with BEGIN."""
    number = None if wanted.in_turn is None or wanted.in_turn >= wanted.lanes else wanted.in_turn
    rows = (yield dialect("queue_take", {"most": wanted.most, "together": True, "number": number})).rows
    taken = yield from _taken(dialect, [row for row in rows if row["claims"] == 1])
    suspects = [row["lane_id"] for row in rows if row["claims"] > 1]
    spare = [Spare(row["lane_id"], row["row_place"]) for row in rows if row["claims"] == 0]
    first_due, hints = (rows[0]["first_due"], rows[0]["hints"]) if rows else (None, None)
    claimed = len(taken.lanes) + len(suspects) + len(spare)
    marks[wanted.consumer, wanted.share].found(first_due, hints, all_that_was_asked=claimed == wanted.lanes)
    return Begun(list(taken.lanes), suspects, taken, spare)


def take_spare(dialect: Dialect, wanted: Claiming) -> Plan[Begun]:
    """What was claimed before, and opened with BEGIN."""
    most = max(1, wanted.most // len(wanted.spare))
    rows = (yield dialect("queue_take", {"most": most, "together": False, "number": None})).rows
    taken = yield from _taken(dialect, rows)
    return Begun(list(taken.lanes), (), taken)


def release_claimed(dialect: Dialect, wanted: Claiming) -> Plan[None]:
    yield dialect("queue_release_claimed", {"consumer": wanted.consumer, "owner": wanted.owner})


def take_lanes(dialect: Dialect, owner: str, lanes: Sequence[bytes], most: int, *, opened: bool) -> Plan[Taken]:
    if not opened:
        yield dialect("queue_open", _owned(owner, lanes))
    result = yield dialect("queue_take", {"most": most, "together": False, "number": None})
    return (yield from _taken(dialect, result.rows))


def _taken(dialect: Dialect, rows: Sequence[Mapping[str, Any]]) -> Plan[Taken]:
    if not rows:
        return Taken(frozenset(), ())
    held, now, xid = frozenset([row["lane_id"] for row in rows]), rows[0]["now"], str(rows[0]["xid"])
    found = [row for row in rows if row["seq"] is not None]
    if None not in [row["type"] for row in found]:  # as nearly always
        return Taken(held, tuple([queued_of(row, now) for row in found]), xid)
    if (yield dialect("queue_records_hidden")).rows[0]["hidden"]:
        raise UsageError(
            "a message in the queue has no record that this role can see. Workers must see the records of all tenants; "
            "see docs/stored.md about row-level security."
        )
    messages: list[Queued] = []
    begun: set[bytes] = set()
    recordless: set[bytes] = set()
    for row in found:  # what comes after one that cannot be read waits with it
        lane = row["lane_id"]
        if row["type"] is None:
            recordless.add(lane)
        elif lane not in recordless:
            begun.add(lane)
            messages.append(queued_of(row, now))
    return Taken(held, tuple(messages), xid, frozenset(recordless - begun))


def stood(dialect: Dialect, xid: str) -> Plan[bool | None]:
    result = yield dialect("queue_stood", {"xid": int(xid)})
    status: str | None = result.rows[0]["status"]
    return None if status is None else status == "committed"


def hold_lanes(dialect: Dialect, owner: str, lanes: Sequence[bytes]) -> Plan[frozenset[bytes]]:
    result = yield dialect("queue_hold", _owned(owner, lanes))
    return frozenset(bytes(row["lane"]) for row in result.rows)


def opening(dialect: Dialect, owner: str, lanes: Sequence[bytes]) -> list[Statement]:
    """To be said with BEGIN: the lock of the lanes, and the savepoint of the turn."""
    return [dialect("queue_open", _owned(owner, lanes)), dialect("queue_savepoint")]


def opening_claimed(dialect: Dialect, wanted: Claiming) -> list[Statement]:
    """The same with what was just claimed, or with spare lanes: one statement, so that it is prepared for both."""
    at = array([one.place for one in wanted.spare])
    params = {"owner": wanted.owner, "at": at, "number": wanted.in_turn or wanted.lanes}
    return [dialect("queue_open_claimed", params), dialect("queue_savepoint")]


def closing(dialect: Dialect, closing: TurnClosing, consumer: str, host: str) -> Statement:
    """To be said with COMMIT. `token` is still to be filled in."""
    if closing.lone and len(closing.done) == 1 and not closing.settled:
        return dialect("queue_close_one_at_commit", _closing_one(closing.done[0], closing.owner, host))
    return dialect("queue_close_at_commit", _closing(closing, consumer, host))


def _closing_one(line: DoneLine, owner: str, host: str) -> dict[str, Any]:
    return {
        "owner": owner,
        "host": host,
        "identity": line.identity,
        "record": line.record,
        "handler": line.handler,
        "result": line.result,
        "duration_ms": line.duration_ms,
        "keep_ms": line.keep_ms,
        "started": line.started or 0,
    }


def close_lanes(dialect: Dialect, closing: TurnClosing, consumer: str, host: str) -> Plan[None]:
    yield dialect("queue_close", _closing(closing, consumer, host))


def _closing(closing: TurnClosing, consumer: str, host: str) -> dict[str, Any]:
    special = [end for end in closing.lanes if end.then is not Then.NEXT]
    parts = {name: _json(lines) if (lines := getattr(closing, name)) else None for name in _PARTS}
    return {
        "consumer": consumer,
        "host": host,
        "owner": closing.owner,
        "lone": closing.lone,
        "ends": _json(special) if special else None,
        **parts,
        **_settled(closing),
        **(_columns(closing.done) if closing.done else _NOTHING_DONE),
    }


def _settled(closing: TurnClosing) -> dict[str, str | None]:
    tenants, streams, positions = zip(*closing.settled, strict=True) if closing.settled else ((), (), ())
    return {"tenants": array(tenants), "streams": array(streams), "positions": array(positions)}


def _columns(lines: Sequence[DoneLine]) -> dict[str, str | None]:
    """What is done, a column each."""
    return {
        "seqs": f"{{{','.join([str(line.seq) for line in lines])}}}",
        "identities": f"{{{','.join([line.identity for line in lines])}}}",
        "handlers": array([line.handler for line in lines]),
        "results": array([line.result for line in lines]),
        "durations": array([line.duration_ms for line in lines]),
        "keeps": array([line.keep_ms for line in lines]),
        "starts": array([line.started or None for line in lines]),
        "records": array([line.record for line in lines]),
        "rows": array([line.row for line in lines]),
    }


_NOTHING_DONE: dict[str, str | None] = dict.fromkeys(_columns(()))


def release(dialect: Dialect, owner: str, lanes: Sequence[bytes], delay: float, *, suspect: bool) -> Plan[None]:
    yield dialect("queue_release", _owned(owner, lanes) | {"delay": float(delay), "forgiven": int(not suspect)})


def extend(dialect: Dialect, owner: str, lanes: Sequence[bytes], lease: float) -> Plan[frozenset[bytes]]:
    result = yield dialect("queue_extend", _owned(owner, lanes) | {"lease": float(lease)})
    return frozenset(bytes(row["lane"]) for row in result.rows)


def mark_start(dialect: Dialect, owner: str, lane: bytes, identity: Identity) -> Plan[Record | None]:
    params = {"owner": owner, "lane": lane.hex(), "identity": dialect.digest(identity.digest)}
    result = yield dialect("queue_mark_start", params)
    return record_of(result.rows[0]) if result.rows else None


def unmark_start(dialect: Dialect, identity: Identity) -> Plan[None]:
    yield dialect("queue_unmark_start", {"identity": dialect.digest(identity.digest)})


def channel(dialect: Dialect, consumer: str) -> str:
    return f"onceward_{digest(dialect.schema or '', consumer)[:10].hex()}"


def call(dialect: Dialect, consumer: str) -> Plan[None]:
    yield dialect("queue_call", {"channel": channel(dialect, consumer)})


def busy_lanes(dialect: Dialect, consumer: str, lanes: Sequence[bytes]) -> Plan[BusyLanes]:
    result = yield dialect("queue_busy", {"consumer": consumer, "lanes": ",".join(lane.hex() for lane in lanes)})
    return busy_of(result.rows)


def due_in(dialect: Dialect, consumer: str, share: Share | None) -> Plan[float | None]:
    result = yield dialect("queue_due_in", {"consumer": consumer, **_share(share)})
    seconds: float | None = result.rows[0]["seconds"]
    return None if seconds is None else max(0.0, seconds)


def wake_overdue(dialect: Dialect, consumer: str) -> Plan[int]:
    result = yield dialect("queue_overdue", {"consumer": consumer})
    woken: int = result.rows[0]["woken"]
    return woken


def requeue(dialect: Dialect, identity: Identity, line: QueueLine) -> Plan[bool]:
    params = {"identity": dialect.digest(identity.digest), "lines": _json([line])}
    result = yield dialect("queue_requeue", params)
    return bool(result.rows[0]["done"])


def drop(dialect: Dialect, identity: Identity, line: QueueLine) -> Plan[bool]:
    result = yield dialect("queue_drop", {"identity": dialect.digest(identity.digest), "lane": line.lane})
    return bool(result.rows[0]["done"])


def _share(share: Share | None) -> dict[str, int]:
    number, shares = share or (0, 1)
    return {"number": number, "shares": shares}


def _owned(owner: str, lanes: Sequence[bytes]) -> dict[str, Any]:
    return {"owner": owner, "lanes": ",".join(lane.hex() for lane in lanes)}


def _json(value: Any) -> str:
    return msgspec.json.encode(value).decode()
