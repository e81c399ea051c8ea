"""A dialect: the named statements of one database, and how its values are spelled.

The statements are in postgresql.sql and sqlite.sql, the tables in migrations/. Nothing else in onceward is SQL.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from functools import cache
from importlib.resources import files
from typing import Any

import msgspec

from onceward.errors import UsageError
from onceward.sql.plan import Statement

_TABLES = re.compile(
    r"\bonceward_(records|schema|lanes|pending|waits|floors|arrivals|accept|take|close|overdue|requeue|drop"
    r"|count_lanes|count_pending|count_messages|worst_lanes)\b(?!\.)"
)
_NAME = re.compile(r"^-- name: (\w+)$", re.MULTILINE)


class Migration(msgspec.Struct, frozen=True):
    version: int
    name: str
    sql: str


class Dialect(msgspec.Struct, frozen=True):
    """Called with a name and parameters it gives the statement to run."""

    name: str
    statements: Mapping[str, str]
    identity: Callable[[bytes], Any]
    """16 bytes as the database's key type."""
    moment: Callable[[datetime], Any]
    """A point in time as a parameter."""
    schema: str | None = None
    most_deletes: int = 5000
    """In one statement. SQLite does nothing else meanwhile, and neither does the event loop."""
    sets: bool = False
    """Statements for many records take all of them at once; otherwise they are said once for each."""

    def __call__(self, statement: str, params: Mapping[str, Any] | None = None) -> Statement:
        return Statement(self.statements[statement], params or {})


def postgresql(schema: str | None = None) -> Dialect:
    """The tables are found by the search path, or in `schema`."""
    statements = _statements("postgresql")
    if schema is not None:
        prefix = quoted(schema) + "."
        # `onceward_records.column` inside an upsert names the target, which keeps its bare name.
        statements = {name: _TABLES.sub(lambda m: prefix + m[0], sql) for name, sql in statements.items()}
    return Dialect("postgresql", statements, lambda digest: digest.hex(), lambda moment: moment, schema, sets=True)


def sqlite() -> Dialect:
    return Dialect("sqlite", _statements("sqlite"), bytes, _iso, most_deletes=200)


DIALECTS: Mapping[str, Callable[[], Dialect]] = {"postgresql": postgresql, "sqlite": sqlite}


def quoted(identifier: str) -> str:
    if not identifier or "\0" in identifier:
        raise UsageError(f"{identifier!r} is not a schema name")
    return '"' + identifier.replace('"', '""') + '"'


@cache
def migrations(dialect: str) -> tuple[Migration, ...]:
    """In order. The schema is their sum."""
    folder = files("onceward.sql") / "migrations" / dialect
    found = sorted((file for file in folder.iterdir() if file.name.endswith(".sql")), key=lambda file: file.name)
    return tuple(
        Migration(int(file.name.split("_", 1)[0]), file.name.removesuffix(".sql"), file.read_text("utf-8"))
        for file in found
    )


@cache
def _statements(dialect: str) -> dict[str, str]:
    text = (files("onceward.sql") / f"{dialect}.sql").read_text("utf-8")
    _, *parts = _NAME.split(text)
    bodies = (re.sub(r"^--.*\n?", "", body, flags=re.MULTILINE).strip() for body in parts[1::2])
    return dict(zip(parts[0::2], bodies, strict=True))


def _iso(moment: datetime) -> str:
    return moment.astimezone(UTC).isoformat(timespec="microseconds").replace("+00:00", "Z")
