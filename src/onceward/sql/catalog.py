"""What the migrations make, read from their own text.

Nobody keeps a list: the names that a schema is put in front of, the columns that tables of another tool must have, and
what such tools leave out (functions, triggers, sequences) all come from here.
"""

from __future__ import annotations

import re
import sqlite3
from collections.abc import Iterator
from functools import cache
from importlib.resources import files

import msgspec


class Migration(msgspec.Struct, frozen=True):
    version: int
    name: str
    sql: str

    @property
    def since(self) -> int:
        """Code of this version works with the tables too. A migration that says nothing needs code of its own."""
        said = _SINCE.search(self.sql)
        return int(said[1]) if said else self.version


class Made(msgspec.Struct, frozen=True):
    """One thing that is there when all migrations are applied."""

    kind: str
    """table, index, sequence, function, trigger"""
    name: str
    sql: str
    columns: tuple[str, ...] = ()

    @property
    def body(self) -> str:
        """What the database gives back of it: of a function what it does, of anything else its words."""
        inside = _BODY.search(self.sql)
        return inside[1] if inside else " ".join(self.sql.split())


_SINCE = re.compile(r"^-- since: (\d+)$", re.MULTILINE)
_BODY = re.compile(r"\$\$(.*)\$\$", re.DOTALL)
# A comment, a text, a body: what is in them ends no statement. Or the end of one.
_PARTS = re.compile(r"--[^\n]*|'[^']*'|\$\$.*?\$\$|;", re.DOTALL)
_KIND = r"(TABLE|INDEX|SEQUENCE|FUNCTION|PROCEDURE|TRIGGER)"
_CREATE = re.compile(rf"CREATE (?:OR REPLACE )?(?:UNIQUE )?(?:CONSTRAINT )?{_KIND} (?:IF NOT EXISTS )?(\w+)")
_DROP = re.compile(rf"DROP {_KIND} (?:IF EXISTS )?(\w+)")
_ADD = re.compile(r"ALTER TABLE (\w+) ADD COLUMN (\w+)")
_NO_COLUMN = {"PRIMARY", "UNIQUE", "CHECK", "CONSTRAINT", "FOREIGN"}


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
def made(dialect: str, version: int | None = None) -> tuple[Made, ...]:
    """The sum of the migrations, in the order in which it is made; or of those up to a version."""
    there: dict[tuple[str, str], Made] = {}
    for statement in all_statements(dialect, version):
        if found := _CREATE.match(statement):
            kind, name = _kind(found), found[2]
            there[kind, name] = Made(kind, name, statement, columns_of(statement) if kind == "table" else ())
        elif found := _DROP.match(statement):
            there.pop((_kind(found), found[2]), None)
        elif (found := _ADD.match(statement)) and (table := there.get(("table", found[1]))):
            there["table", found[1]] = msgspec.structs.replace(table, columns=(*table.columns, found[2]))
    return tuple(there.values())


def _kind(found: re.Match[str]) -> str:
    """A procedure is a function that is said by CALL."""
    return found[1].lower().replace("procedure", "function")


def added_columns(dialect: str, table: str) -> dict[str, str]:
    """The columns that migrations add to a table, and how."""
    found = ((_ADD.match(statement), statement) for statement in all_statements(dialect))
    return {match[2]: statement for match, statement in found if match and match[1] == table}


def all_statements(dialect: str, version: int | None = None) -> Iterator[str]:
    for migration in migrations(dialect)[:version]:
        yield from statements(migration.sql, triggers=dialect == "sqlite")


def statements(sql: str, *, triggers: bool = False) -> Iterator[str]:
    """One by one, without the comments before them. `triggers`: as in SQLite, whose triggers have statements inside."""
    start = 0
    for part in _PARTS.finditer(sql):
        if part[0] != ";":
            continue
        text = re.sub(r"\A(\s|--[^\n]*\n)*", "", sql[start : part.start()])
        if triggers and text.startswith("CREATE TRIGGER") and not sqlite3.complete_statement(f"{text};"):
            continue
        start = part.end()
        yield text


def columns_of(create_table: str) -> tuple[str, ...]:
    inside = re.sub(r"--[^\n]*", "", create_table)
    inside = inside[inside.index("(") + 1 : inside.rindex(")")]
    while (plain := re.sub(r"\([^()]*\)", "", inside)) != inside:
        inside = plain
    words = [column.split()[0].strip('"') for column in inside.split(",")]
    return tuple(word for word in words if word.upper() not in _NO_COLUMN)
