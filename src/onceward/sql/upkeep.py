"""Upkeep as plans: sweeping what is old, looking at what is there, stamping what somebody else made."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

from onceward.errors import SchemaMissing
from onceward.identity import digest
from onceward.record import Record, State
from onceward.sql.catalog import added_columns, all_statements, made, migrations
from onceward.sql.dialect import Dialect
from onceward.sql.plan import Plan, Statement
from onceward.sql.verbs import migrated, moment_of, record_of
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
    batch = min(batch, dialect.most_deletes)
    params = {"consumer": consumer, "batch": batch, "after": moment, "after_identity": identity}
    if what is Sweepable.OLD:
        params["older"] = round(older, 3)
    swept = yield dialect(f"sweep_{what}", params)
    if not dialect.sets:
        yield from _delete(dialect, consumer, [row for row in swept.rows if row["deleted"]])
    rows = [(row["moment"], row["identity"], row["deleted"]) for row in swept.rows]
    # Fewer are deleted than found when a delivery has some of them in its hands, or something below is not finished.
    return SweptBatch(sum(row[2] for row in rows), len(rows) == batch, max(rows)[:2] if rows else None)


def _delete(dialect: Dialect, consumer: str, rows: Sequence[Mapping[str, Any]]) -> Plan[None]:
    floors: dict[tuple[str, str], int] = {}
    for row in rows:
        if row["stream"] is not None and row["position"] is not None:
            stream = row["tenant"], row["stream"]
            floors[stream] = max(row["position"], floors.get(stream, row["position"]))
    for (tenant, name), position in floors.items():
        yield dialect("sweep_floor", {"consumer": consumer, "tenant": tenant, "stream": name, "position": position})
    if rows:
        yield dialect("sweep_delete", {"identities": b"".join(row["identity"] for row in rows)})


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


# --- stamping -------------------------------------------------------------------------------------------------


def stamp(dialect: Dialect) -> Plan[list[str]]:
    """Say that tables which somebody else made are of the newest version. The SQL that is still to be run."""
    yield dialect("schema_lock")
    exists = yield dialect("schema_exists")
    if not exists.rows:
        yield dialect("schema_table")
    found = yield dialect("schema_made")
    columns: dict[str, set[str]] = {}
    others: dict[tuple[str, str], str | None] = {}
    for row in found.rows:
        if row["kind"] == "column":
            columns.setdefault(row["name"], set()).add(row["body"])
        else:
            others[row["kind"], row["name"]] = row["body"]
    _check_tables(dialect.name, columns)
    for column, how in added_columns(dialect.name, "onceward_schema").items():
        if column not in columns.get("onceward_schema", ()):
            yield Statement(how)
    applied = yield dialect("schema_versions")
    versions = {row["version"] for row in applied.rows}
    for migration in migrations(dialect.name):
        if migration.version not in versions:
            yield from migrated(dialect, migration)
    yield dialect("token_filled")
    return _left_out(dialect.name, others)


def _check_tables(dialect: str, found: Mapping[str, set[str]]) -> None:
    for table in (one for one in made(dialect) if one.kind == "table"):
        if table.name not in found:
            raise SchemaMissing(f"there is no table {table.name}. Make it with your migrations first, then stamp it.")
        missing = set(table.columns) - found[table.name]
        if missing:
            raise SchemaMissing(
                f"{table.name} is not whole, it lacks {', '.join(sorted(missing))}. Compare it with `onceward schema`."
            )


def _left_out(dialect: str, found: Mapping[tuple[str, str], str | None]) -> list[str]:
    """What tools do not make, and what is there in other words, as the migrations say it; then what they do at last."""
    left_out = []
    for one in made(dialect):
        if one.kind not in {"sequence", "function", "trigger"}:
            continue
        there = (one.kind, one.name) in found
        body = found.get((one.kind, one.name))
        if there and (body is None or body == one.body or " ".join(body.split()) == one.body):
            continue
        if there and one.kind == "trigger":
            left_out.append(f"DROP TRIGGER {one.name}")
        left_out.append(re.sub(r"^CREATE (FUNCTION|PROCEDURE)", r"CREATE OR REPLACE \1", one.sql))
    return left_out + [statement for statement in all_statements(dialect) if statement.startswith("DO ")]
