"""The tables as SQLAlchemy sees them: to query them with the ORM, and to let Alembic know that they belong here.

They say what migrations/ make; a test compares the two with Alembic itself.
"""

from __future__ import annotations

import json
from datetime import datetime
from typing import Any
from uuid import UUID

import sqlalchemy as sa
from sqlalchemy.dialects import postgresql
from sqlalchemy.ext.compiler import compiles
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column
from sqlalchemy.sql.functions import FunctionElement
from sqlalchemy.types import TypeDecorator, TypeEngine


class _Identity(TypeDecorator[UUID]):
    """16 bytes: uuid on PostgreSQL, BLOB on SQLite, a UUID in Python."""

    impl = sa.LargeBinary
    cache_ok = True

    def load_dialect_impl(self, dialect: sa.Dialect) -> TypeEngine[Any]:
        return postgresql.UUID() if dialect.name == "postgresql" else sa.BLOB()

    def process_bind_param(self, value: Any, dialect: sa.Dialect) -> Any:
        if isinstance(value, bytes):
            value = UUID(bytes=value)
        return value if value is None or dialect.name == "postgresql" else value.bytes

    def process_result_value(self, value: Any, dialect: sa.Dialect) -> UUID | None:  # noqa: ARG002
        return UUID(bytes=value) if isinstance(value, bytes) else value


class _Json(TypeDecorator[Any]):
    """json on PostgreSQL, TEXT on SQLite."""

    impl = sa.Text
    cache_ok = True

    def load_dialect_impl(self, dialect: sa.Dialect) -> TypeEngine[Any]:
        return postgresql.JSON() if dialect.name == "postgresql" else sa.TEXT()

    def process_result_value(self, value: Any, dialect: sa.Dialect) -> Any:
        return json.loads(value) if isinstance(value, str) and dialect.name != "postgresql" else value


class _Moment(TypeDecorator[datetime]):
    """timestamptz on PostgreSQL, ISO text in UTC on SQLite."""

    impl = sa.DateTime
    cache_ok = True

    def load_dialect_impl(self, dialect: sa.Dialect) -> TypeEngine[Any]:
        return postgresql.TIMESTAMP(timezone=True) if dialect.name == "postgresql" else sa.TEXT()

    def process_bind_param(self, value: Any, dialect: sa.Dialect) -> Any:
        if value is None or dialect.name == "postgresql":
            return value
        from onceward.sql.dialect import sqlite  # noqa: PLC0415 - only where somebody compares times

        return sqlite().moment(value)

    def process_result_value(self, value: Any, dialect: sa.Dialect) -> datetime | None:  # noqa: ARG002
        return datetime.fromisoformat(value) if isinstance(value, str) else value


class _Now(FunctionElement[Any]):
    """The default of a time."""

    inherit_cache = True


class _Random(FunctionElement[Any]):
    """The default of a token."""

    inherit_cache = True


@compiles(_Now)
def _now(_element: _Now, compiler: Any, **_options: Any) -> str:
    return "(strftime('%Y-%m-%dT%H:%M:%fZ', 'now'))" if compiler.dialect.name == "sqlite" else "now()"


@compiles(_Random)
def _random(_element: _Random, compiler: Any, **_options: Any) -> str:
    return "(lower(hex(randomblob(16))))" if compiler.dialect.name == "sqlite" else "gen_random_uuid()::text"


class _Base(DeclarativeBase):
    pass


_Long = sa.BigInteger().with_variant(sa.INTEGER(), "sqlite")
_Double: TypeEngine[float] = sa.Double().with_variant(sa.REAL(), "sqlite")


class InboxRecord(_Base):
    """One row of `onceward_records`, to be read: `select(InboxRecord).where(InboxRecord.state == "dead")`."""

    __tablename__ = "onceward_records"

    identity: Mapped[UUID] = mapped_column(_Identity, primary_key=True)
    consumer: Mapped[str] = mapped_column(sa.Text)
    tenant: Mapped[str] = mapped_column(sa.Text)
    scope: Mapped[str] = mapped_column(sa.Text)
    key: Mapped[str] = mapped_column(sa.Text)
    message_id: Mapped[str] = mapped_column(sa.Text)
    type: Mapped[str] = mapped_column(sa.Text)
    source: Mapped[str] = mapped_column(sa.Text, server_default="")
    topic: Mapped[str] = mapped_column(sa.Text, server_default="")
    origin: Mapped[str | None] = mapped_column(sa.Text)
    state: Mapped[str] = mapped_column(sa.Text)
    attempts: Mapped[int] = mapped_column(sa.Integer, server_default="0")
    started: Mapped[int] = mapped_column(sa.Integer, server_default="0")
    errors: Mapped[Any | None] = mapped_column(_Json)
    result: Mapped[Any | None] = mapped_column(_Json)
    payload: Mapped[Any | None] = mapped_column(_Json)
    body: Mapped[bytes | None] = mapped_column(sa.LargeBinary)
    headers: Mapped[Any | None] = mapped_column(_Json)
    payload_hash: Mapped[bytes | None] = mapped_column(sa.LargeBinary)
    extra: Mapped[Any | None] = mapped_column(_Json)
    handler: Mapped[str | None] = mapped_column(sa.Text)
    host: Mapped[str | None] = mapped_column(sa.Text)
    received_at: Mapped[datetime] = mapped_column(_Moment, server_default=_Now())
    processed_at: Mapped[datetime | None] = mapped_column(_Moment)
    duration_ms: Mapped[float | None] = mapped_column(_Double)
    occurred_at: Mapped[datetime | None] = mapped_column(_Moment)
    expires_at: Mapped[datetime | None] = mapped_column(_Moment)
    next_try_at: Mapped[datetime | None] = mapped_column(_Moment)
    stream: Mapped[str | None] = mapped_column(sa.Text)
    position: Mapped[int | None] = mapped_column(_Long)
    depends_on: Mapped[Any | None] = mapped_column(_Json)
    received_position: Mapped[int | None] = mapped_column(_Long)
    processed_position: Mapped[int | None] = mapped_column(_Long)
    lane: Mapped[str | None] = mapped_column(sa.Text)


class SchemaVersion(_Base):
    """Which migrations of onceward were applied."""

    __tablename__ = "onceward_schema"

    version: Mapped[int] = mapped_column(sa.Integer, primary_key=True, autoincrement=False)
    name: Mapped[str] = mapped_column(sa.Text)
    applied_at: Mapped[datetime] = mapped_column(_Moment, server_default=_Now())
    token: Mapped[str] = mapped_column(sa.Text, server_default=_Random())
    since: Mapped[int | None] = mapped_column(sa.Integer)


def _text(name: str, **options: Any) -> sa.Column[Any]:
    return sa.Column(name, sa.Text, **{"nullable": False} | options)


def _long(name: str, **options: Any) -> sa.Column[Any]:
    return sa.Column(name, _Long, **{"nullable": False, "autoincrement": False} | options)


def _id(name: str, **options: Any) -> sa.Column[Any]:
    return sa.Column(name, _Identity, **{"nullable": False} | options)


def _moment(name: str) -> sa.Column[Any]:
    return sa.Column(name, _Moment)


# The queue. What these say is for onceward alone; `inbox.queue_stats()` is how to look at it.
LANES = sa.Table(
    "onceward_lanes",
    _Base.metadata,
    _id("lane", primary_key=True),
    _text("consumer"),
    _text("tenant"),
    _text("name", nullable=True),
    _long("share"),
    _text("state", server_default="ready"),
    _moment("run_at"),
    _text("owner", nullable=True),
    _moment("until"),
    sa.Column("claims", sa.Integer, nullable=False, server_default="0"),
    _id("blocker", nullable=True),
    _long("seq", nullable=True),
    _text("record", nullable=True),
)
PENDING = sa.Table(
    "onceward_pending",
    _Base.metadata,
    _long("seq", primary_key=True),
    _id("identity"),
    _id("lane"),
    _long("rank"),
    _text("track", nullable=True),
    _long("position", nullable=True),
    sa.Column("aside", sa.Boolean, nullable=False, server_default=sa.false()),
    _moment("due"),
    _text("record", nullable=True),
)
WAITS = sa.Table(
    "onceward_waits",
    _Base.metadata,
    _long("seq", primary_key=True),
    _text("consumer"),
    _text("tenant"),
    _text("stream"),
    _long("position"),
    _text("place"),
    _id("lane"),
    _moment("deadline"),
)
FLOORS = sa.Table(
    "onceward_floors",
    _Base.metadata,
    _text("consumer", primary_key=True),
    _text("tenant", primary_key=True),
    _text("stream", primary_key=True),
    _long("position"),
)
ARRIVALS = sa.Table(
    "onceward_arrivals", _Base.metadata, _text("consumer"), _text("tenant"), _text("stream"), _long("position")
)
COUNTERS = sa.Table("onceward_counters", _Base.metadata, _text("name", primary_key=True), _long("value"))


def _index(table: Any, what: str, *columns: str, where: str | None = None, **options: Any) -> None:
    if where is not None:
        options |= {"postgresql_where": sa.text(where), "sqlite_where": sa.text(where)}
    sa.Index(f"{table.name}_{what}", *(table.c[column] for column in columns), **options)


RECORDS = InboxRecord.__table__
_index(RECORDS, "unfinished", "consumer", "state", "received_at", where="state <> 'processed'")
_index(
    RECORDS, "position", "consumer", "tenant", "stream", "position",
    where="stream IS NOT NULL AND state IN ('processed', 'discarded')",
)  # fmt: skip
_index(
    RECORDS, "processed", "consumer", "processed_at", "identity",
    where="state = 'processed' AND expires_at IS NULL",
)  # fmt: skip
_index(
    RECORDS, "expiring", "consumer", "expires_at", "identity", "processed_at",
    where="state = 'processed' AND expires_at IS NOT NULL",
)  # fmt: skip
_index(
    RECORDS, "open", "consumer", "tenant", "stream", "position",
    where="stream IS NOT NULL AND state IN ('accepted', 'running', 'failed', 'dead')",
)  # fmt: skip
_index(LANES, "asleep", "consumer", where="run_at IS NULL")
_index(
    LANES, "due", "consumer", "run_at",
    where="run_at IS NOT NULL", postgresql_with={"deduplicate_items": "off"},
)  # fmt: skip
_index(PENDING, "next", "lane", "rank", "seq", where="NOT aside")
_index(PENDING, "aside", "lane", where="aside")
_index(PENDING, "track", "lane", "track", "position", "seq", where="track IS NOT NULL")
_index(WAITS, "place", "place", postgresql_using="hash")
_index(WAITS, "deadline", "consumer", "deadline", where="deadline IS NOT NULL")

TABLES = frozenset(_Base.metadata.tables)


def add_tables(metadata: sa.MetaData, *, schema: str | None = None) -> None:
    """Add the tables of onceward to yours, so that autogenerate makes them, or at least never drops them."""
    for table in _Base.metadata.sorted_tables:
        copy = table.to_metadata(metadata, schema=schema if schema is not None else metadata.schema)  # type: ignore[arg-type]
        for column in copy.columns:
            column.type = _plain(column.type)


def _plain(kind: TypeEngine[Any]) -> TypeEngine[Any]:
    """Types of SQLAlchemy's own, which a migration script can name without importing anything of ours."""
    if isinstance(kind, _Identity):
        return sa.LargeBinary().with_variant(postgresql.UUID(), "postgresql")
    if isinstance(kind, _Json):
        return sa.Text().with_variant(sa.JSON(), "postgresql")
    if isinstance(kind, _Moment):
        return sa.Text().with_variant(postgresql.TIMESTAMP(timezone=True), "postgresql")
    return kind


def include_object(
    object: Any,  # noqa: A002 - as Alembic calls it
    name: str | None,
    type_: str,
    reflected: bool,  # noqa: FBT001, ARG001
    compare_to: Any,  # noqa: ARG001
) -> bool:
    """For `context.configure(include_object=...)` in env.py: autogenerate does not look at the tables of onceward."""
    table = name if type_ == "table" else getattr(getattr(object, "table", None), "name", None)
    return table not in TABLES
