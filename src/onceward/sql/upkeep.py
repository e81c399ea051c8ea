"""Upkeep as plans: sweeping what is old, and looking at what is there."""

from __future__ import annotations

from datetime import datetime
from typing import Any

from onceward.identity import digest
from onceward.sql.dialect import Dialect
from onceward.sql.plan import Plan
from onceward.sql.verbs import moment_of
from onceward.store import Sweepable, SweptBatch


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
