"""SqlStore: the store protocol over any driver and dialect."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any, Generic, TypeVar

from onceward.shield import LoopLock, finish
from onceward.sql import queue_postgresql, upkeep, verbs
from onceward.sql.catalog import migrations
from onceward.sql.dialect import DIALECTS, Dialect, quoted
from onceward.sql.driver import Driver, Session
from onceward.sql.joined import joined
from onceward.sql.plan import Plan, inlined, run
from onceward.sql.unit import SqlUnit
from onceward.store import (
    Begin,
    Features,
    Finding,
)

Tx = TypeVar("Tx")
T = TypeVar("T")

PATIENCE = (1.0, 2.0, 4.0, 8.0, 16.0, None)
"""Seconds that a migration waits for a lock; at last, for as long as it takes."""
LOCK_NOT_AVAILABLE = "55P03"


class SqlStore(Generic[Tx]):
    """Opened once for each inbox that shares it; the last to close it closes the driver."""

    def __init__(self, driver: Driver[Tx]) -> None:
        self._driver = driver
        self._users = 0
        self._token = ""
        self._opening = LoopLock()

    @property
    def features(self) -> Features:
        return self._driver.features

    async def open(self) -> None:
        async with self._opening.of_this_loop():
            if self._users == 0:
                await self._open()
            self._users += 1

    async def _open(self) -> None:
        try:
            await self._driver.open()
            if self.features.automatic_setup:
                await self._migrate()
            async with self._driver.session(wait=30.0) as session:
                await _transaction(session, verbs.check_version(self._driver.dialect))
                self._token = await _transaction(session, verbs.token(self._driver.dialect))
        except BaseException:
            await finish(self._driver.close())
            raise

    async def close(self) -> None:
        async with self._opening.of_this_loop():
            self._users = max(0, self._users - 1)
            if self._users == 0:
                await finish(self._driver.close())

    async def setup(self) -> None:
        """Make or upgrade the tables. Safe with many instances starting at once; the store need not be open."""
        await self._opened(self._migrate)

    async def stamp(self) -> None:
        """Mark tables that another migration tool has made as ours, up to date; see `onceward stamp`."""
        await self._opened(self._stamp)

    async def _opened(self, work: Callable[[], Awaitable[None]]) -> None:
        async with self._opening.of_this_loop():
            if self._users:
                await work()
                return
            try:
                await self._driver.open()
                await work()
            finally:
                await finish(self._driver.close())

    async def _migrate(self) -> None:
        """A migration waits for handlers at work, and whoever writes meanwhile waits for the migration: so it waits
        briefly at first, and lets them go on before it tries again."""
        for patience in PATIENCE:
            try:
                await self._migrate_within(patience)
                return
            except Exception as error:
                if patience is None or getattr(error, "sqlstate", None) != LOCK_NOT_AVAILABLE:
                    raise
            await asyncio.sleep(patience)

    async def _migrate_within(self, patience: float | None) -> None:
        dialect = self._driver.dialect
        async with self._driver.session(wait=30.0) as session:
            try:
                await session.begin()
                if self._driver.schema is not None:
                    await session.script(f"CREATE SCHEMA IF NOT EXISTS {quoted(self._driver.schema)}")
                for migration in await run(verbs.pending_migrations(dialect), session.execute):
                    await session.script(_patient(dialect, patience) + _placed(dialect.schema) + migration.sql)
                    await run(verbs.migrated(dialect, migration), session.execute)
                await session.commit()
            finally:
                await session.rollback()

    async def _stamp(self) -> None:
        dialect = self._driver.dialect
        async with self._driver.session(wait=30.0) as session:
            try:
                await session.begin()
                if dialect.schema is not None:
                    await session.script(_placed(dialect.schema))
                for statement in await run(upkeep.stamp(dialect), session.execute):
                    await session.script(statement)
                await session.commit()
            finally:
                await session.rollback()

    async def check(self) -> list[Finding]:
        """Opening it has checked what there is to check."""
        return []

    def unit(
        self,
        *,
        begin: Begin[Tx] | None = None,
        wait: float = 5.0,
        read_only: bool = False,
        keep: float | None = None,  # noqa: ARG002 - cleanup decides, when it comes
    ) -> AbstractAsyncContextManager[SqlUnit[Tx]]:
        return SqlUnit(self._driver, begin, wait, read_only=read_only)

    @asynccontextmanager
    async def listening(self, consumer: str, ring: Callable[[], None]) -> AsyncIterator[None]:
        if not self.features.listens:
            yield
            return
        driver: Any = self._driver  # of PostgreSQL
        async with driver.listening(queue_postgresql.channel(driver.dialect, consumer), ring):
            yield

    @asynccontextmanager
    async def join(
        self, tx: Any, *, begin: Begin[Any] | None = None, read_only: bool = False
    ) -> AsyncIterator[SqlUnit[Any]]:
        dialect = self._driver.dialect
        session = await joined(tx, dialect.name, read_only=read_only)
        session.expect(self._token, dialect("schema_token"))
        unit: SqlUnit[Any] = SqlUnit(self._driver, begin, 0.0, joined=session)
        try:
            yield unit
        finally:
            await unit.rollback()


def schema(dialect: str, version: int | None = None) -> str:
    """The whole schema as SQL text, as `onceward setup` would apply it; or as it was with an older version."""
    known = DIALECTS[dialect]()
    parts = [f"{known('schema_table').sql};\n"]
    for migration in migrations(dialect)[:version]:
        applied = verbs.migrated(known, migration)
        parts.append(f"-- {migration.name}\n{migration.sql}\n{inlined(next(applied))};\n")
    return "\n".join(parts)


def _patient(dialect: Dialect, seconds: float | None) -> str:
    if dialect.name != "postgresql" or seconds is None:
        return ""
    return f"SET LOCAL lock_timeout = '{seconds:g}s';\n"


def _placed(schema: str | None) -> str:
    return "" if schema is None else f"SET LOCAL search_path TO {quoted(schema)};\n"


async def _transaction(session: Session[Any], plan: Plan[T]) -> T:
    """A plan as a transaction of its own."""
    try:
        value = await run(plan, session.execute, first=session.begin)
        await session.commit()
        return value
    finally:
        await session.rollback()
