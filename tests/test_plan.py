"""The plan layer: parameters, literals, and the SQL of both dialects."""

from __future__ import annotations

import ast
import sqlite3
from datetime import UTC, datetime
from pathlib import Path
from uuid import UUID

import asyncpg
import pytest
import sqlalchemy as sa
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import onceward
from onceward.identity import digest
from onceward.sql.catalog import added_columns, columns_of, made, migrations, statements
from onceward.sql.dialect import DIALECTS, postgresql, quoted
from onceward.sql.plan import Result, Statement, gives_rows, inlined, literal, numbered, run
from onceward.sql.store import schema
from onceward.sqlalchemy import add_tables
from onceward.testing import PostgresLab, SqliteLab
from onceward.testing.labs import SqlLab

SOURCE = Path(onceward.__file__).parent
# Text as PostgreSQL can hold it: anything but NUL and surrogates.
TEXT = st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]))


def test_names_become_numbers_and_casts_stay() -> None:
    assert numbered("SELECT :a::text, ':b', :b -- :c\n, :a") == ("SELECT $1::text, ':b', $2 -- :c\n, $1", ("a", "b"))


def test_rows_are_expected_where_a_statement_gives_them() -> None:
    assert gives_rows("SELECT 1")
    assert gives_rows("-- why\nWITH x AS (SELECT 1) SELECT * FROM x")
    assert gives_rows("INSERT INTO t VALUES (1) RETURNING *")
    assert not gives_rows("UPDATE t SET selected = 1")


async def test_a_plan_is_run_statement_by_statement() -> None:
    seen = []

    def plan():  # type: ignore[no-untyped-def]
        first = yield Statement("one")
        second = yield Statement("two")
        return first.changed + second.changed

    async def execute(statement: Statement) -> Result:
        seen.append(statement.sql)
        return Result((), 20)

    async def begin(statement: Statement) -> Result:
        seen.append("begin " + statement.sql)
        return Result((), 1)

    assert await run(plan(), execute, first=begin) == 21
    assert seen == ["begin one", "two"]


def test_literals_are_a_closed_set() -> None:
    moment = datetime(2026, 1, 1, tzinfo=UTC)
    assert inlined(Statement("x = :a::text AND y = ':a'", {"a": "it's"})) == "x = 'it''s'::text AND y = ':a'"
    assert [literal(value) for value in (None, True, 1, -0.5, b"\x00'", moment)] == [
        "NULL", "TRUE", "(1)", "'-0.5'", "E'\\\\x0027'", "'2026-01-01T00:00:00+00:00'",
    ]  # fmt: skip
    for value in (object(), [1], {"a": 1}, float("nan"), type("Text", (str,), {})("x")):
        with pytest.raises(TypeError):
            literal(value)
    with pytest.raises(ValueError, match="NUL"):
        literal("a\0b")


async def test_a_literal_says_the_same_as_a_parameter(postgres_dsn: str) -> None:
    """Fuzzed against the real parser: what arrives is what was meant, and nothing but one value."""
    connection = await asyncpg.connect(postgres_dsn)
    old_style = await asyncpg.connect(postgres_dsn, server_settings={"standard_conforming_strings": "off"})
    values: list[object] = []

    @settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.too_slow])
    @given(
        st.one_of(
            TEXT,
            TEXT.map(lambda t: t + "\\'\"; --/*$$" + t),
            st.binary(),
            st.integers(-(2**63), 2**63 - 1),
            st.floats(allow_nan=False, allow_infinity=False),
        )
    )
    def collect(value: object) -> None:
        values.append(value)

    collect()
    try:
        for value in values:
            kind = {str: "text", bytes: "bytea", int: "bigint", float: "float8"}[type(value)]
            for one in (connection, old_style):
                (row,) = await one.fetch(f"SELECT {literal(value)}::{kind} AS got, $1::{kind} AS meant", value)
                assert row["got"] == row["meant"] == value
    finally:
        await connection.close()
        await old_style.close()


async def test_the_identity_is_the_same_in_sql(postgres_lab: PostgresLab) -> None:
    parts: list[list[str]] = []

    @settings(max_examples=100, deadline=None)
    @given(st.lists(TEXT, min_size=4, max_size=4))
    def collect(four: list[str]) -> None:
        parts.append(four)

    collect()
    connection = await asyncpg.connect(postgres_lab.url)
    try:
        for four in parts:
            assert await connection.fetchval("SELECT onceward_id($1, $2, $3, $4)", *four) == UUID(bytes=digest(*four))
    finally:
        await connection.close()


# --- the schema ------------------------------------------------------------------------------------------------


async def test_the_printed_schema_is_the_sum_of_the_migrations_on_postgresql(
    postgres_lab: PostgresLab, postgres_server: str
) -> None:
    columns = "SELECT table_name, column_name, data_type, is_nullable, column_default FROM information_schema.columns"
    indexes = "SELECT indexdef FROM pg_indexes WHERE tablename LIKE 'onceward%' ORDER BY 1"
    look = f"{columns} WHERE table_name LIKE 'onceward%' ORDER BY 1, 2"
    set_up = [await postgres_lab.query(look), await postgres_lab.query(indexes)]
    await postgres_lab.back_to(0)
    connection = await asyncpg.connect(postgres_lab.url)
    try:
        await connection.execute(schema("postgresql"))
    finally:
        await connection.close()
    assert [await postgres_lab.query(look), await postgres_lab.query(indexes)] == set_up
    assert (await (await postgres_lab.inbox()).process(postgres_lab.message(), lambda message: None)).processed


async def test_the_printed_schema_is_the_sum_of_the_migrations_on_sqlite(sqlite_lab: SqliteLab) -> None:
    look = "SELECT name, sql FROM sqlite_master WHERE name LIKE 'onceward%' ORDER BY 1"
    set_up = await sqlite_lab.query(look)
    by_hand = sqlite3.connect(":memory:")
    by_hand.executescript(schema("sqlite"))
    assert by_hand.execute(look).fetchall() == set_up
    by_hand.close()


@pytest.mark.parametrize("dialect", DIALECTS)
def test_migrations_are_numbered_without_gaps(dialect: str) -> None:
    assert [migration.version for migration in migrations(dialect)] == list(range(1, len(migrations(dialect)) + 1))


def test_both_dialects_know_the_same_statements() -> None:
    """Apart from those of the queue, whose steps are functions in PostgreSQL and statements in SQLite."""
    postgres, sqlite = (
        {name for name in DIALECTS[dialect]().statements if not name.startswith("queue_")}
        for dialect in ("postgresql", "sqlite")
    )
    of_sets = {"claim_many", "claimed_of_many", "complete_many", "find_many"}  # SQLite says these once for each message
    assert postgres - sqlite == of_sets
    assert sqlite - postgres == {"sweep_floor", "sweep_delete"}  # which are one statement on PostgreSQL


@pytest.fixture(params=["postgres_lab", "sqlite_lab"])
def lab(request: pytest.FixtureRequest) -> SqlLab:
    found: SqlLab = request.getfixturevalue(request.param)
    return found


async def test_what_the_migrations_make_is_read_from_their_text(lab: SqlLab) -> None:
    kinds = "CASE relkind WHEN 'r' THEN 'table' WHEN 'i' THEN 'index' ELSE 'sequence' END"
    look = {
        "sqlite": "SELECT type, name FROM sqlite_master WHERE name LIKE 'onceward%'",
        "postgresql": f"""
            SELECT {kinds}, relname FROM pg_class WHERE relname LIKE 'onceward%' AND relname NOT LIKE '%\\_pkey'
            UNION ALL SELECT 'function', proname FROM pg_proc WHERE proname LIKE 'onceward%'
            UNION ALL SELECT 'trigger', tgname FROM pg_trigger WHERE tgname LIKE 'onceward%'""",
    }
    there = {tuple(row) for row in await lab.query(look[lab.dialect])} - {("table", "onceward_schema")}
    assert {(one.kind, one.name) for one in made(lab.dialect)} == there
    for table in made(lab.dialect):
        if table.kind == "table":
            assert len(await lab.query(f"SELECT {', '.join(table.columns)} FROM {table.name}")) == 0


@pytest.mark.parametrize("dialect", DIALECTS)
def test_the_models_say_what_the_migrations_make(dialect: str) -> None:
    """A quick look at names; tests/test_alembic.py compares them as Alembic does."""
    metadata = sa.MetaData()
    add_tables(metadata)
    tables = {table.name: set(table.columns.keys()) for table in metadata.tables.values()}
    said = {one.name: set(one.columns) for one in made(dialect) if one.kind == "table"}
    assert {name: columns for name, columns in tables.items() if name != "onceward_schema"} == said
    assert added_columns(dialect, "onceward_schema").keys() < tables["onceward_schema"]
    indexes = {str(index.name) for table in metadata.tables.values() for index in table.indexes}
    assert indexes == {one.name for one in made(dialect) if one.kind == "index"}


def test_statements_are_told_apart() -> None:
    text = """
        -- a comment; with a semicolon
        CREATE TABLE a (b text DEFAULT ';'); -- and one behind
        CREATE FUNCTION f() AS $$ SELECT 1; -- ;
        $$;
        CREATE TRIGGER t AFTER INSERT ON a BEGIN DELETE FROM a; SELECT 1; END;
    """
    assert [one.split()[1] for one in statements(text, triggers=True)] == ["TABLE", "FUNCTION", "TRIGGER"]
    table = 'CREATE TABLE t (a int, "b" numeric(3, 2), -- c\n d text CHECK (d IN (1, 2)), PRIMARY KEY (a))'
    assert columns_of(table) == ("a", "b", "d")


def test_a_schema_name_is_quoted() -> None:
    assert quoted('in"box') == '"in""box"'
    fail = postgresql("my inbox").statements["fail"]
    assert 'INSERT INTO "my inbox".onceward_records (' in fail
    assert "attempts = onceward_records.attempts" in fail


# --- what the source may not contain ---------------------------------------------------------------------------


def _calls_and_imports() -> list[tuple[str, str]]:
    found = []
    for path in SOURCE.rglob("*.py"):
        if {"demo", "testing"} & set(path.parts):
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
                found.append((path.name, f"{node.value.id}.{node.attr}"))
            elif isinstance(node, ast.Import):
                found += [(path.name, alias.name) for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                found += [(path.name, f"{node.module}.{alias.name}") for alias in node.names]
    return found


def test_schedules_never_read_the_clock_of_this_process() -> None:
    """Rule 17: leases and schedules use the database's clock. Only monotonic time is read here, for waiting."""
    clocks = {"datetime.now", "datetime.utcnow", "datetime.today", "time.time", "time.time_ns", "date.today"}
    assert [(file, call) for file, call in _calls_and_imports() if call in clocks] == []


def test_nothing_is_unpickled_or_read_as_yaml() -> None:
    banned = ("pickle", "yaml", "marshal", "shelve", "dill", "cloudpickle")
    assert [(file, name) for file, name in _calls_and_imports() if name.split(".")[0] in banned] == []
