"""A dialect: the named statements of one database, and how its values are spelled.

The statements are in postgresql.sql and sqlite.sql, the tables in migrations/. Nothing else in onceward is SQL.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from functools import cache
from importlib.resources import files
from typing import Any

import msgspec

from onceward.errors import UsageError
from onceward.sql.catalog import made
from onceward.sql.plan import Statement

_NAME = re.compile(r"^-- name: (\w+)$", re.MULTILINE)


class Dialect(msgspec.Struct, frozen=True):
    """Called with a name and parameters it gives the statement to run."""

    name: str
    statements: Mapping[str, str]
    digest: Callable[[bytes], Any]
    """An identity, a lane or a hash as a parameter."""
    moment: Callable[[datetime], Any]
    """A point in time as a parameter."""
    schema: str | None = None
    most_deletes: int = 5000
    """In one statement. SQLite does nothing else meanwhile, and neither does the event loop."""
    sets: bool = False
    """Statements for many records take all of them at once; otherwise they are said once for each."""

    def __call__(self, statement: str, params: Mapping[str, Any] | None = None) -> Statement:
        return Statement(self.statements[statement], params or {})

    def each(self, statement: str, rows: Sequence[Mapping[str, Any]]) -> Statement:
        """For all rows at once; see Statement.rows."""
        return Statement(self.statements[statement], rows=rows)


def postgresql(schema: str | None = None) -> Dialect:
    """The tables are found by the search path, or in `schema`."""
    statements = _statements("postgresql")
    if schema is not None:
        prefix = quoted(schema) + "."
        # `onceward_records.column` inside an upsert names the target, which keeps its bare name.
        statements = {name: _names().sub(lambda m: prefix + m[0], sql) for name, sql in statements.items()}
    return Dialect("postgresql", statements, bytes.hex, lambda moment: moment, schema, sets=True)


def sqlite() -> Dialect:
    # A bytearray is bound as it is; for bytes sqlite3 looks for an adapter first.
    return Dialect("sqlite", _statements("sqlite"), bytearray, _iso, most_deletes=200)


DIALECTS: Mapping[str, Callable[[], Dialect]] = {"postgresql": postgresql, "sqlite": sqlite}


def quoted(identifier: str) -> str:
    if not identifier or "\0" in identifier:
        raise UsageError(f"{identifier!r} is not a schema name")
    return '"' + identifier.replace('"', '""') + '"'


@cache
def _names() -> re.Pattern[str]:
    """Whatever has a place in a schema: the table of versions, and all that the migrations make."""
    names = ["onceward_schema", *(one.name for one in made("postgresql") if one.kind not in {"index", "trigger"})]
    return re.compile(rf"\b({'|'.join(sorted(names))})\b(?!\.)")


@cache
def _statements(dialect: str) -> dict[str, str]:
    text = (files("onceward.sql") / f"{dialect}.sql").read_text("utf-8")
    _, *parts = _NAME.split(text)
    bodies = (re.sub(r"^--.*\n?", "", body, flags=re.MULTILINE).strip() for body in parts[1::2])
    return dict(zip(parts[0::2], bodies, strict=True))


def _iso(moment: datetime) -> str:
    return moment.astimezone(UTC).isoformat(timespec="microseconds").replace("+00:00", "Z")
