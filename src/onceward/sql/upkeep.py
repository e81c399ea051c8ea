"""Upkeep as plans: sweeping what is old, and looking at what is there."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

from onceward.identity import digest
from onceward.record import Record, State
from onceward.sql.dialect import Dialect
from onceward.sql.plan import Plan
from onceward.sql.verbs import moment_of, record_of
from onceward.stats import Part, Stats, stats_of
from onceward.store import Sweepable, SweptBatch

NEVER = datetime.max.replace(tzinfo=UTC)


def sweep_lock(consumer: str) -> int:
    """The advisory lock of a consumer's one sweeper."""
    return int.from_bytes(digest("onceward sweep", consumer)[:8], "big", signed=True)


def sweep(
    dialect: Dialect, consumer: str, what: Sweepable, older: float, *, batch: int, after: tuple[Any, Any] | None
) -> Plan[SweptBatch | None]:
    """Delete one batch. None: another sweeper is at it."""
    locked = yield dialect("sweep_lock", {"lock": sweep_lock(consumer)})
    if not locked.rows:
        return None
    moment, identity = after or (None, None)
    params = {"consumer": consumer, "batch": batch, "after": moment, "after_identity": identity}
    if what is Sweepable.OLD:
        params["older"] = round(older, 3)
    swept = yield dialect(f"sweep_{what}", params)
    rows = [(row["moment"], row["identity"], row["deleted"]) for row in swept.rows]
    return SweptBatch(len(rows), sum(row[2] for row in rows), max(rows)[:2] if rows else None)


def sweepable(dialect: Dialect, consumer: str, older: float) -> Plan[int]:
    result = yield dialect("sweep_count", {"consumer": consumer, "older": round(older, 3)})
    found: int = result.rows[0]["records"]
    return found


def now(dialect: Dialect) -> Plan[datetime]:
    result = yield dialect("now")
    return moment_of(result.rows[0]["now"])


def consumers(dialect: Dialect) -> Plan[list[str]]:
    result = yield dialect("consumers")
    return [row["consumer"] for row in result.rows]


def stats(dialect: Dialect, consumer: str) -> Plan[Stats]:
    result = yield dialect("stats", {"consumer": consumer})
    return stats_of(consumer, (_part(row) for row in result.rows))


def _part(row: Mapping[str, Any]) -> Part:
    oldest = None if row["oldest"] is None else moment_of(row["oldest"])
    return Part(State(row["state"]), row["records"], row["last_day"], row["last_hour"], oldest)


def records(
    dialect: Dialect, consumer: str, states: tuple[State, ...], *, older: float | None, limit: int
) -> Plan[list[Record]]:
    """The oldest first. Processed and other records are in different indexes, and have different times."""
    params = {"consumer": consumer, "older": None if older is None else round(older, 3), "limit": limit}
    found: list[Record] = []
    if State.PROCESSED in states:
        for kept in ("records_processed", "records_expiring"):
            result = yield dialect(kept, params)
            found += map(record_of, result.rows)
    others = [state for state in states if state is not State.PROCESSED]
    if others:
        result = yield dialect("records_unfinished", params | {"states": ",".join(others)})
        found += map(record_of, result.rows)
    return sorted(found, key=lambda record: record.processed_at or record.received_at or NEVER)[:limit]
