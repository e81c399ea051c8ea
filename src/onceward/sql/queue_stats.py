"""The numbers of a queue, for all dialects. Nothing is counted beyond MOST, so a long queue costs no more than that."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from typing import Any

from onceward.sql.dialect import Dialect
from onceward.sql.plan import Plan
from onceward.sql.verbs import moment_of
from onceward.stats import LaneStats, QueueStats

MOST = 5000


def queue_stats(dialect: Dialect, consumer: str, worst: int) -> Plan[QueueStats]:
    params = {"consumer": consumer, "most": MOST}
    by_state = yield dialect("queue_stats_lanes", params)
    lanes = {row["state"]: row["lanes"] for row in by_state.rows}
    pending = yield from _pending(dialect, params, sum(lanes.values()))
    found = yield dialect("queue_stats_messages", params)
    messages = found.rows[0]
    worst_of = yield dialect("queue_stats_worst", {"consumer": consumer, "worst": worst})
    return QueueStats(
        pending=pending,
        lanes=sum(lanes.values()),
        **lanes,
        dead=messages["dead"],
        oldest_at=_first(messages["accepted"], messages["failed"], messages["running"]),
        next_try_at=_first(*(row["next_at"] for row in by_state.rows if row["state"] in ("retrying", "later"))),
        exact=max(pending, messages["dead"]) < MOST,
        worst=tuple(_lane(row) for row in worst_of.rows),
    )


def _pending(dialect: Dialect, params: Mapping[str, Any], lanes: int) -> Plan[int]:
    """A lane has at least one message, nearly always: of many lanes they need not be counted."""
    counted = lanes
    if lanes < MOST:
        result = yield dialect("queue_stats_pending", params)
        counted = int(result.rows[0]["pending"])
    if counted < MOST:
        return counted
    result = yield dialect("queue_stats_estimate")
    estimate: int = result.rows[0]["pending"]
    return max(counted, estimate)


def _lane(row: Mapping[str, Any]) -> LaneStats:
    position = None if row["stream"] is None else f"{row['stream']} {row['position']}"
    return LaneStats(
        tenant=row["tenant"],
        name=row["name"],
        state=row["state"],
        pending=row["pending"],
        oldest=_first(row["oldest"]),
        next_try_at=_first(row["run_at"]),
        blocked_on=row["dead_letter"] if row["state"] == "blocked" else position,
    )


def _first(*moments: Any) -> datetime | None:
    known = [moment_of(moment) for moment in moments if moment is not None]
    return min(known, default=None)
