"""One suite, every store."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from onceward.testing import AiosqliteLab, Lab, PostgresLab, PsycopgLab, SqlAlchemyPostgresLab, SqliteLab, StoreContract
from onceward.testing.contract.batches import BatchContract
from onceward.testing.redis_labs import RedisClusterLab, RedisLab, RedisTagLab


class TestSqlite(StoreContract):
    @pytest.fixture
    def lab(self, sqlite_lab: SqliteLab) -> Lab:
        return sqlite_lab


class TestAsyncpg(StoreContract):
    @pytest.fixture
    def lab(self, postgres_lab: PostgresLab) -> Lab:
        return postgres_lab


class TestPsycopg(StoreContract):
    @pytest.fixture
    def lab(self, psycopg_lab: PsycopgLab) -> Lab:
        return psycopg_lab


class TestSqlAlchemyAsyncpg(StoreContract):
    @pytest.fixture
    def lab(self, sqlalchemy_asyncpg_lab: SqlAlchemyPostgresLab) -> Lab:
        return sqlalchemy_asyncpg_lab


class TestSqlAlchemyPsycopg(StoreContract):
    @pytest.fixture
    def lab(self, sqlalchemy_psycopg_lab: SqlAlchemyPostgresLab) -> Lab:
        return sqlalchemy_psycopg_lab


class TestSqlAlchemyAiosqlite(StoreContract):
    @pytest.fixture
    def lab(self, aiosqlite_lab: AiosqliteLab) -> Lab:
        return aiosqlite_lab


class TestRedis(StoreContract):
    @pytest.fixture
    def lab(self, redis_lab: RedisLab) -> Lab:
        return redis_lab


class TestRedisCluster(StoreContract):
    @pytest.fixture
    def lab(self, redis_cluster_lab: RedisClusterLab) -> Lab:
        return redis_cluster_lab


class TestRedisClusterTagged(BatchContract):
    @pytest.fixture
    async def lab(self, redis_cluster_lab: RedisClusterLab) -> AsyncIterator[Lab]:
        lab = RedisTagLab(redis_cluster_lab.plain_url)
        async with lab.stack:
            yield lab
