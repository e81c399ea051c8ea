"""Joined transactions: every kind of tx on the stores that take it, under one contract."""

from __future__ import annotations

import asyncio
import os
import sqlite3
from collections.abc import AsyncIterator, Iterator
from itertools import count
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit, urlunsplit

import asyncpg
import psycopg
import pytest
import sqlalchemy
from sqlalchemy.orm import Session

from onceward import Inbox
from onceward.errors import InboxClosed, TransactionUnusable, UsageError
from onceward.testing import (
    AiosqliteLab,
    JoinedContract,
    Lab,
    PostgresLab,
    PsycopgLab,
    SqlAlchemyPostgresLab,
    SqliteLab,
)
from onceward.testing.kinds import (
    POSTGRES_CALLERS,
    SQLITE_CALLERS,
    AiosqliteSessionCaller,
    AsyncpgCaller,
    AsyncpgPoolCaller,
    Caller,
    PsycopgCaller,
    PsycopgHandlerCaller,
    PsycopgPoolCaller,
    PsycopgSessionCaller,
    SessionCaller,
    SqlAlchemyHandlerCaller,
    SqliteCaller,
)
from onceward.testing.lab import Recorder

_numbers = count(1)


def _database(server: str) -> Iterator[str]:
    """A database for a whole module: these are many tests, and making one for each would cost most of their time."""

    async def admin(sql: str) -> None:
        connection = await asyncpg.connect(server)
        await connection.execute(sql)
        await connection.close()

    name = f"onceward_joined_{os.getpid()}_{next(_numbers)}"
    asyncio.run(admin(f"CREATE DATABASE {name}"))
    yield urlunsplit(urlsplit(server)._replace(path=f"/{name}"))
    asyncio.run(admin(f"DROP DATABASE {name} WITH (FORCE)"))


@pytest.fixture(scope="module")
def home(postgres_server: str) -> Iterator[str]:
    for dsn in _database(postgres_server):
        asyncio.run(PostgresLab(dsn).set_up())
        yield dsn


@pytest.fixture(scope="module")
def abroad(postgres_server: str) -> Iterator[str]:
    for dsn in _database(postgres_server):
        asyncio.run(PostgresLab(dsn).set_up())
        yield dsn


async def emptied(lab: PostgresLab, dsn: str, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Lab]:
    """With one connection for all queries: making one takes longer than most of these tests."""
    connection = await asyncpg.connect(dsn)

    async def query(sql: str) -> list[tuple[Any, ...]]:
        return [tuple(row) for row in await connection.fetch(sql)]

    monkeypatch.setattr(lab, "query", query)
    await connection.execute("DELETE FROM onceward_records; DELETE FROM effects")
    async with lab.stack:
        yield lab
    await connection.close()


class OnPostgres(JoinedContract):
    @pytest.fixture
    def elsewhere(self, abroad: str) -> str:
        return abroad

    @pytest.fixture
    def empty(self, postgres_server: str) -> str:
        return postgres_server


class OnSqlite(JoinedContract):
    @pytest.fixture
    def elsewhere(self, tmp_path: Path) -> str:
        other = SqliteLab(tmp_path / "elsewhere.db")
        asyncio.run(other.set_up())
        return str(other.path)

    @pytest.fixture
    def empty(self, tmp_path: Path) -> str:
        return str(tmp_path / "empty.db")


class TestAsyncpg(OnPostgres):
    @pytest.fixture
    async def lab(self, home: str, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Lab]:
        async for lab in emptied(PostgresLab(home), home, monkeypatch):
            yield lab

    @pytest.fixture(params=POSTGRES_CALLERS, ids=lambda kind: kind.__name__)
    def kind(self, request: pytest.FixtureRequest) -> type[Caller]:
        found: type[Caller] = request.param
        return found


class TestVariants:
    """Handles that differ from those above only in how they are had, and when they are over."""

    lab, elsewhere = TestAsyncpg.lab, OnPostgres.elsewhere

    @pytest.fixture(
        params=[AsyncpgPoolCaller, PsycopgPoolCaller, PsycopgHandlerCaller, SqlAlchemyHandlerCaller],
        ids=lambda kind: kind.__name__,
    )
    def kind(self, request: pytest.FixtureRequest) -> type[Caller]:
        found: type[Caller] = request.param
        return found

    test_commit = JoinedContract.test_a_claim_is_committed_by_the_caller_and_by_nobody_else
    test_error = JoinedContract.test_an_error_takes_the_claim_and_its_writes_and_nothing_else
    test_process = JoinedContract.test_process_runs_the_handler_in_the_callers_transaction
    test_closed = JoinedContract.test_a_closed_handle_is_refused
    test_failed = JoinedContract.test_a_transaction_that_has_failed_is_refused
    test_elsewhere = JoinedContract.test_another_database_is_refused_and_left_usable
    test_swallowed = JoinedContract.test_a_swallowed_sql_error_is_never_taken_for_done
    test_mark = JoinedContract.test_of_many_that_looked_first_one_may_mark
    _verbs, _do = JoinedContract._verbs, JoinedContract._do


class TestPsycopg(OnPostgres):
    @pytest.fixture
    async def lab(self, home: str, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Lab]:
        async for lab in emptied(PsycopgLab(home), home, monkeypatch):
            yield lab

    @pytest.fixture
    def kind(self) -> type[Caller]:
        return PsycopgCaller


class TestSqlAlchemyAsyncpg(OnPostgres):
    @pytest.fixture
    async def lab(self, home: str, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Lab]:
        async for lab in emptied(SqlAlchemyPostgresLab(home, "asyncpg"), home, monkeypatch):
            yield lab

    @pytest.fixture
    def kind(self) -> type[Caller]:
        return SessionCaller


class TestSqlAlchemyPsycopg(OnPostgres):
    @pytest.fixture
    async def lab(self, home: str, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Lab]:
        async for lab in emptied(SqlAlchemyPostgresLab(home, "psycopg"), home, monkeypatch):
            yield lab

    @pytest.fixture
    def kind(self) -> type[Caller]:
        return PsycopgSessionCaller


class TestSqlite(OnSqlite):
    @pytest.fixture
    def lab(self, sqlite_lab: SqliteLab) -> Lab:
        return sqlite_lab

    @pytest.fixture(params=SQLITE_CALLERS, ids=lambda kind: kind.__name__)
    def kind(self, request: pytest.FixtureRequest) -> type[Caller]:
        found: type[Caller] = request.param
        return found


class TestSqlAlchemyAiosqlite(OnSqlite):
    @pytest.fixture
    def lab(self, aiosqlite_lab: AiosqliteLab) -> Lab:
        return aiosqlite_lab

    @pytest.fixture
    def kind(self) -> type[Caller]:
        return AiosqliteSessionCaller


# --- what is no tx ------------------------------------------------------------------------------------------


async def test_a_wrong_kind_of_tx_is_told_what_fits(postgres_lab: PostgresLab) -> None:
    inbox, message = await postgres_lab.inbox(), postgres_lab.message()
    engine = sqlalchemy.create_engine(postgres_lab.url.replace("postgresql", "postgresql+psycopg"))
    pool = inbox.store.pool  # type: ignore[attr-defined]
    with Session(engine) as session, psycopg.connect(postgres_lab.url) as connection:
        for wrong in (session, connection, engine, "BEGIN", pool, inbox):
            with pytest.raises(UsageError, match=rf"AsyncSession.*not .*{type(wrong).__name__}$"):
                async with inbox.claim(message, tx=wrong):
                    pass
    engine.dispose()


async def test_a_transaction_of_another_kind_of_database_is_refused(
    postgres_lab: PostgresLab, sqlite_lab: SqliteLab
) -> None:
    inbox = await postgres_lab.inbox()
    async with SqliteCaller.opened(str(sqlite_lab.path)) as caller:
        with pytest.raises(TransactionUnusable, match="another database"):
            await inbox.is_processed(postgres_lab.message(), tx=caller.tx)
    async with AsyncpgCaller.opened(postgres_lab.url) as caller:
        await caller.begin()
        with pytest.raises(TransactionUnusable, match="another database"):
            await (await sqlite_lab.inbox()).is_processed(sqlite_lab.message(), tx=caller.tx)


async def test_a_closed_inbox_says_so(sqlite_lab: SqliteLab) -> None:
    inbox, message = Inbox(sqlite_lab.store(), consumer="billing"), sqlite_lab.message()
    with sqlite3.connect(sqlite_lab.path) as tx:
        for verb in (
            inbox.process(message, Recorder(sqlite_lab), tx=tx),
            inbox.mark_processed(message, tx=tx),
            inbox.is_processed(message, tx=tx),
            inbox.record_failure(message, ValueError("no")),
        ):
            with pytest.raises(InboxClosed):
                await verb
    tx.close()
