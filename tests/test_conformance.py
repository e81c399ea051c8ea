"""One suite, every store."""

from __future__ import annotations

import pytest

from onceward.testing import Lab, PostgresLab, SqliteLab, StoreContract


class TestSqlite(StoreContract):
    @pytest.fixture
    def lab(self, sqlite_lab: SqliteLab) -> Lab:
        return sqlite_lab


class TestAsyncpg(StoreContract):
    @pytest.fixture
    def lab(self, postgres_lab: PostgresLab) -> Lab:
        return postgres_lab
