"""Labs for the stores that come with onceward."""

from __future__ import annotations

import asyncio
import socket
import sqlite3
from abc import abstractmethod
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, closing
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from onceward.sql.catalog import made, statements
from onceward.sql.store import schema
from onceward.sqlite import SqliteStore
from onceward.store import Store
from onceward.testing.lab import Lab

_TIMES = (
    ("onceward_lanes", "run_at"),
    ("onceward_lanes", "until"),
    ("onceward_pending", "due"),
    ("onceward_records", "next_try_at"),
)


class SqlLab(Lab):
    """What the labs of SQL databases have in common. Effects are rows of the table `effects`."""

    dialect = "postgresql"

    @abstractmethod
    async def query(self, sql: str) -> list[tuple[Any, ...]]:
        """Run SQL on a connection that has nothing to do with the store."""

    async def kept(self) -> list[dict[str, Any]]:
        (columns,) = (one.columns for one in made(self.dialect) if one.name == "onceward_records")
        rows = await self.query(f"SELECT {', '.join(columns)} FROM onceward_records")  # noqa: S608
        return [dict(zip(columns, row, strict=True)) for row in rows]

    async def change(self, message_id: str | None = None, **columns: Any) -> None:
        values = ", ".join(f"{name} = {_literal(value)}" for name, value in columns.items())
        which = "" if message_id is None else f" WHERE message_id = {_literal(message_id)}"
        await self.query(f"UPDATE onceward_records SET {values}{which}")  # noqa: S608

    async def forget(self) -> None:
        await self.query("DELETE FROM onceward_records")

    async def effects(self) -> list[str]:
        return [row[0] for row in await self.query("SELECT what FROM effects ORDER BY what")]

    async def clear_effects(self) -> None:
        await self.query("DELETE FROM effects")

    async def take_all(self) -> None:
        await self.query("CREATE TABLE taken (x text)")
        await self.query("DROP TABLE effects")

    async def set_up(self) -> None:
        await super().set_up()
        await self.query("CREATE TABLE effects (what text)")

    async def back_to(self, version: int) -> None:
        await self.query("CREATE TABLE kept_records AS SELECT * FROM onceward_records")
        cascade = " CASCADE" if self.dialect == "postgresql" else ""
        for kind in ("table", "sequence", "function"):
            for one in made(self.dialect):
                if one.kind == kind:
                    await self.query(f"DROP {kind.replace('function', 'routine')} IF EXISTS {one.name}{cascade}")
        await self.query("DROP TABLE onceward_schema")
        if version:
            for statement in statements(schema(self.dialect, version), triggers=self.dialect == "sqlite"):
                await self.query(statement)
            then = {one.name: one.columns for one in made(self.dialect, version)}
            columns = ", ".join(then["onceward_records"])
            await self.query(f"INSERT INTO onceward_records ({columns}) SELECT {columns} FROM kept_records")  # noqa: S608
        await self.query("DROP TABLE kept_records")


def _literal(value: Any) -> str:
    """As SQL. Both databases read times of this form, and SQLite keeps them so."""
    if value is None:
        return "NULL"
    if isinstance(value, datetime):
        value = value.astimezone(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
    if isinstance(value, str):
        return "'" + value.replace("'", "''") + "'"
    return str(value)


class SqliteLab(SqlLab):
    dialect = "sqlite"
    numbered = "n INTEGER PRIMARY KEY AUTOINCREMENT"

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.path = path
        self.url = f"sqlite:///{path}"

    def store(self, **options: Any) -> Store[Any]:
        return SqliteStore(self.path, **options)

    def unreachable(self) -> Store[Any]:
        return SqliteStore(self.path.parent / "nowhere" / "shop.db")

    async def make_older(self, message_id: str, *, days: int) -> None:
        moment = f"strftime('%Y-%m-%dT%H:%M:%fZ', 'now', '-{days} days')"
        await self.query(f"UPDATE onceward_records SET processed_at = {moment} WHERE message_id = '{message_id}'")  # noqa: S608

    async def let_time_pass(self) -> None:
        now = "strftime('%Y-%m-%dT%H:%M:%fZ', 'now', '-1 second')"
        for table, column in _TIMES:
            await self.query(f"UPDATE {table} SET {column} = {now} WHERE {column} > {now}")  # noqa: S608

    async def query(self, sql: str) -> list[tuple[Any, ...]]:
        with closing(sqlite3.connect(self.path, timeout=10, isolation_level=None)) as connection:
            return connection.execute(sql).fetchall()


class PostgresLab(SqlLab):
    """On an empty database of its own."""

    multiple_statements = True
    network = True
    notifies = True

    def __init__(self, dsn: str) -> None:
        super().__init__()
        self.url = dsn
        parts = urlsplit(dsn)
        self.address = (parts.hostname or "127.0.0.1", parts.port or 5432)

    def store(self, **options: Any) -> Store[Any]:
        from onceward.asyncpg import AsyncpgStore  # noqa: PLC0415 - an extra

        return AsyncpgStore(self.url, **options)

    def second_connection(self, store: Any) -> Any:
        return store.pool.acquire()

    def unreachable(self) -> Store[Any]:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            return self.store_behind(probe.getsockname()[1])

    def store_behind(self, port: int) -> Store[Any]:
        from onceward.asyncpg import AsyncpgStore  # noqa: PLC0415

        behind = self.url.replace(f":{self.address[1]}/", f":{port}/").replace(self.address[0], "127.0.0.1")
        return AsyncpgStore(behind, max_size=2)

    async def make_older(self, message_id: str, *, days: int) -> None:
        moment = f"now() - interval '{days} days'"
        await self.query(f"UPDATE onceward_records SET processed_at = {moment} WHERE message_id = '{message_id}'")  # noqa: S608

    async def let_time_pass(self) -> None:
        for table, column in _TIMES:
            past = "now() - interval '1 second'"
            await self.query(f"UPDATE {table} SET {column} = {past} WHERE {column} > {past}")  # noqa: S608

    async def slow_commits(self) -> None:
        await self.query(
            "CREATE FUNCTION slow() RETURNS trigger LANGUAGE plpgsql AS 'BEGIN PERFORM pg_sleep(1); RETURN NULL; END'"
        )
        await self.query(
            "CREATE CONSTRAINT TRIGGER slow AFTER INSERT ON effects DEFERRABLE INITIALLY DEFERRED "
            "FOR EACH ROW EXECUTE FUNCTION slow()"
        )

    async def slow_deletes(self) -> None:
        await self.query(
            "CREATE FUNCTION slow_delete() RETURNS trigger LANGUAGE plpgsql "
            "AS 'BEGIN PERFORM pg_sleep(1.5); RETURN NULL; END'"
        )
        await self.query(
            "CREATE TRIGGER slow_delete AFTER DELETE ON onceward_records FOR EACH ROW EXECUTE FUNCTION slow_delete()"
        )

    async def deleting(self) -> None:
        asleep = "SELECT 1 FROM pg_stat_activity WHERE datname = current_database() AND wait_event = 'PgSleep'"
        while not await self.query(asleep):  # noqa: ASYNC110 - the server sends no events
            await asyncio.sleep(0.02)

    async def query(self, sql: str) -> list[tuple[Any, ...]]:
        import asyncpg  # noqa: PLC0415

        connection = await asyncpg.connect(self.url.replace("+psycopg", ""))
        try:
            return [tuple(row) for row in await connection.fetch(sql)]
        finally:
            await connection.close()


class PsycopgLab(PostgresLab):
    """The same database through psycopg."""

    def __init__(self, dsn: str) -> None:
        super().__init__(dsn)
        self.dsn = dsn
        self.url = dsn.replace("postgresql://", "postgresql+psycopg://", 1)

    def store(self, **options: Any) -> Store[Any]:
        from onceward.psycopg import PsycopgStore  # noqa: PLC0415 - an extra

        return PsycopgStore(self.dsn, **options)

    def store_behind(self, port: int) -> Store[Any]:
        from onceward.psycopg import PsycopgStore  # noqa: PLC0415

        behind = self.dsn.replace(f":{self.address[1]}/", f":{port}/").replace(self.address[0], "127.0.0.1")
        return PsycopgStore(behind, max_size=2)

    def second_connection(self, store: Any) -> Any:
        return store.pool.connection()


class SqlAlchemyPostgresLab(PostgresLab):
    """The same database through SQLAlchemy, on asyncpg or psycopg."""

    multiple_statements = False
    tasks_share_tx = False
    notifies = False

    def __init__(self, dsn: str, driver: str) -> None:
        super().__init__(dsn)
        self.dsn = dsn
        self.driver = driver
        self.url = f"sqlalchemy+{self._engine_url(dsn)}"

    def _engine_url(self, dsn: str) -> str:
        return dsn.replace("postgresql://", f"postgresql+{self.driver}://", 1)

    def store(self, *, max_size: int = 10, **options: Any) -> Store[Any]:
        return self._store(self.dsn, max_size, **options)

    def _store(self, dsn: str, max_size: int, **options: Any) -> Store[Any]:
        from onceward.sqlalchemy import SqlAlchemyStore  # noqa: PLC0415 - an extra

        sizes = {"pool_size": max_size, "max_overflow": 0, "pool_timeout": 5 if max_size < 10 else 30}
        return SqlAlchemyStore(self._engine_url(dsn), **sizes | options)

    def store_behind(self, port: int) -> Store[Any]:
        behind = self.dsn.replace(f":{self.address[1]}/", f":{port}/").replace(self.address[0], "127.0.0.1")
        return self._store(behind, 2)

    def savepoint(self, tx: Any) -> Any:
        return tx.begin_nested()

    def second_connection(self, store: Any) -> Any:
        return _sqlalchemy_connection(store)

    async def query(self, sql: str) -> list[tuple[Any, ...]]:
        return await PostgresLab(self.dsn).query(sql)


class AiosqliteLab(SqliteLab):
    """A file through SQLAlchemy and aiosqlite."""

    tasks_share_tx = False

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.url = f"sqlite+aiosqlite:///{path}"

    def store(self, *, max_size: int = 10, **options: Any) -> Store[Any]:
        from onceward.sqlalchemy import SqlAlchemyStore  # noqa: PLC0415 - an extra

        return SqlAlchemyStore(self.url, **{"pool_size": max_size, "max_overflow": 0, "pool_timeout": 5} | options)

    def unreachable(self) -> Store[Any]:
        from onceward.sqlalchemy import SqlAlchemyStore  # noqa: PLC0415

        return SqlAlchemyStore(f"sqlite+aiosqlite:///{self.path.parent}/nowhere/shop.db")

    def savepoint(self, tx: Any) -> Any:
        return tx.begin_nested()

    def second_connection(self, store: Any) -> Any:
        return _sqlalchemy_connection(store)


@asynccontextmanager
async def _sqlalchemy_connection(store: Any) -> AsyncIterator[Any]:
    async with store.engine.connect() as connection:
        yield _Plain(connection)


class _Plain:
    """`execute(sql)` on an SQLAlchemy connection."""

    def __init__(self, connection: Any) -> None:
        self._connection = connection

    async def execute(self, sql: str) -> None:
        await self._connection.exec_driver_sql(sql)
        await self._connection.commit()
