"""One suite, every store."""

from __future__ import annotations

import pytest

from onceward.testing import Lab, PostgresLab, PsycopgLab, SqliteLab, StoreContract


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
