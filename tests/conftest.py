"""Fixtures: a throwaway PostgreSQL for the session, an empty database for each test that asks."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Iterator
from itertools import count
from pathlib import Path
from urllib.parse import urlsplit, urlunsplit

import asyncpg
import pytest

from onceward.testing import AiosqliteLab, PostgresLab, PsycopgLab, SqlAlchemyPostgresLab, SqliteLab
from tests.services import postgres

_numbers = count(1)


@pytest.fixture(scope="session")
def postgres_server() -> Iterator[str]:
    """The DSN of a server that lives as long as the session."""
    given = os.environ.get(postgres.VARIABLE)
    if given:
        yield given
        return
    if postgres.binaries() is None:
        reason = f"no PostgreSQL here; set {postgres.VARIABLE}"
        if os.environ.get("ONCEWARD_REQUIRE_SERVICES"):
            pytest.fail(reason)
        pytest.skip(reason)
    with postgres.throwaway() as server:
        yield server.dsn


@pytest.fixture
async def postgres_dsn(postgres_server: str) -> AsyncIterator[str]:
    """An empty database of its own."""
    name = f"onceward_test_{os.getpid()}_{next(_numbers)}"
    admin = await asyncpg.connect(postgres_server)
    await admin.execute(f"CREATE DATABASE {name}")
    try:
        yield urlunsplit(urlsplit(postgres_server)._replace(path=f"/{name}"))
    finally:
        await admin.execute(f"DROP DATABASE {name} WITH (FORCE)")
        await admin.close()


@pytest.fixture
async def postgres_lab(postgres_dsn: str) -> AsyncIterator[PostgresLab]:
    lab = PostgresLab(postgres_dsn)
    await lab.set_up()
    async with lab.stack:
        yield lab


@pytest.fixture
async def psycopg_lab(postgres_dsn: str) -> AsyncIterator[PsycopgLab]:
    lab = PsycopgLab(postgres_dsn)
    await lab.set_up()
    async with lab.stack:
        yield lab


@pytest.fixture
async def sqlite_lab(tmp_path: Path) -> AsyncIterator[SqliteLab]:
    lab = SqliteLab(tmp_path / "test.db")
    await lab.set_up()
    async with lab.stack:
        yield lab


@pytest.fixture
async def sqlalchemy_asyncpg_lab(postgres_dsn: str) -> AsyncIterator[SqlAlchemyPostgresLab]:
    lab = SqlAlchemyPostgresLab(postgres_dsn, "asyncpg")
    await lab.set_up()
    async with lab.stack:
        yield lab


@pytest.fixture
async def sqlalchemy_psycopg_lab(postgres_dsn: str) -> AsyncIterator[SqlAlchemyPostgresLab]:
    lab = SqlAlchemyPostgresLab(postgres_dsn, "psycopg")
    await lab.set_up()
    async with lab.stack:
        yield lab


@pytest.fixture
async def aiosqlite_lab(tmp_path: Path) -> AsyncIterator[AiosqliteLab]:
    lab = AiosqliteLab(tmp_path / "test.db")
    await lab.set_up()
    async with lab.stack:
        yield lab
