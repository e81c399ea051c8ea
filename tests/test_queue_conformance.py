"""One suite for the stored inbox, on every store that has a queue."""

from __future__ import annotations

import pytest

from onceward import Kind
from onceward.testing import (
    AiosqliteLab,
    Lab,
    PostgresLab,
    PsycopgLab,
    QueueContract,
    SqlAlchemyPostgresLab,
    SqliteLab,
)
from onceward.testing.contract.queue import AcceptContract, DispatchContract
from onceward.testing.contract.queue.base import at, drain
from onceward.testing.kinds import POSTGRES_CALLERS, SQLITE_CALLERS, Caller, place
from onceward.testing.lab import Recorder


class TestSqlite(QueueContract):
    @pytest.fixture
    def lab(self, sqlite_lab: SqliteLab) -> Lab:
        return sqlite_lab


class TestAsyncpg(QueueContract):
    @pytest.fixture
    def lab(self, postgres_lab: PostgresLab) -> Lab:
        return postgres_lab


class TestPsycopg(QueueContract):
    @pytest.fixture
    def lab(self, psycopg_lab: PsycopgLab) -> Lab:
        return psycopg_lab


class TestSqlAlchemyAsyncpg(AcceptContract, DispatchContract):
    """The same database functions through another driver: what is the driver's."""

    @pytest.fixture
    def lab(self, sqlalchemy_asyncpg_lab: SqlAlchemyPostgresLab) -> Lab:
        return sqlalchemy_asyncpg_lab


class TestSqlAlchemyAiosqlite(AcceptContract, DispatchContract):
    @pytest.fixture
    def lab(self, aiosqlite_lab: AiosqliteLab) -> Lab:
        return aiosqlite_lab


# --- accept in every kind of transaction that a caller can have -----------------------------------------------------


async def accept_in_a_transaction(lab: Lab, kind: type[Caller]) -> None:
    inbox, messages, handler = await lab.inbox(), [at(lab, "a2"), at(lab, "a1"), lab.message("m")], Recorder(lab)
    for ending in ("rollback", "commit"):
        async with kind.opened(place(lab)) as caller:
            await caller.begin()
            outcomes = await inbox.accept(messages, tx=caller.tx)
            assert [outcome.kind for outcome in outcomes] == [Kind.ACCEPTED] * 3
            assert (await inbox.accept(messages[0], tx=caller.tx)).kind is Kind.DUPLICATE
            await getattr(caller, ending)()
        await drain(inbox, handler)
        assert bool(handler.runs) is (ending == "commit")
    assert [id_ for id_ in handler.runs if id_ != "m"] == ["a1", "a2"]
    assert len(handler.runs) == 3


@pytest.mark.parametrize("kind", POSTGRES_CALLERS, ids=lambda kind: kind.__name__)
async def test_accept_in_any_transaction_of_postgresql(postgres_lab: PostgresLab, kind: type[Caller]) -> None:
    await accept_in_a_transaction(postgres_lab, kind)


@pytest.mark.parametrize("kind", SQLITE_CALLERS, ids=lambda kind: kind.__name__)
async def test_accept_in_any_transaction_of_sqlite(sqlite_lab: SqliteLab, kind: type[Caller]) -> None:
    await accept_in_a_transaction(sqlite_lab, kind)
