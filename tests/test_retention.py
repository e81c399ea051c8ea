"""What docs/retention.md says about foreign keys and row-level security, and that upkeep reads indexes."""

from __future__ import annotations

import os
import re
from collections.abc import AsyncIterator
from datetime import timedelta
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit, urlunsplit

import asyncpg
import pytest

from onceward import Inbox, Message, State, current, tenants
from onceward.asyncpg import AsyncpgStore
from onceward.events import SweepFailed
from onceward.sql.dialect import postgresql
from onceward.sql.plan import inlined
from onceward.testing import Lab, PostgresLab, SqliteLab
from onceward.testing.contract.base import Listener
from onceward.testing.lab import Recorder

PAGE = Path(__file__).parent.parent / "docs" / "retention.md"
NOW = timedelta(0)


def sql(heading: str, database: str) -> list[str]:
    """The statements of the page's SQL under a heading."""
    section = re.search(rf"^## {heading}$(.*?)(?=^## |\Z)", PAGE.read_text("utf-8"), re.MULTILINE | re.DOTALL)
    assert section is not None
    blocks = re.findall(rf"^```sql\n-- {database}[^\n]*\n(.*?)^```$", section[1], re.MULTILINE | re.DOTALL)
    return [statement.strip() for block in blocks for statement in block.split(";") if statement.strip()]


# --- foreign keys -------------------------------------------------------------------------------------------


@pytest.fixture(params=["sqlite", "postgres"])
def lab(request: pytest.FixtureRequest) -> Lab:
    found: Lab = request.getfixturevalue(f"{request.param}_lab")
    return found


async def make_invoices(lab: Lab, *, change: tuple[str, str] = ("", "")) -> Any:
    for statement in sql("Business tables that point at a record", "SQLite" if is_sqlite(lab) else "PostgreSQL"):
        await lab.query(statement.replace(*change))

    async def invoice(message: Message[Any], tx: Any) -> None:
        identity = current().identity
        record = identity.digest if is_sqlite(lab) else str(identity)
        await tx.execute("INSERT INTO invoices (cents, record) VALUES ($1, $2)", message.payload, record)

    return invoice


def is_sqlite(lab: Lab) -> bool:
    return isinstance(lab, SqliteLab)


async def test_a_row_that_points_at_a_record_outlives_it(lab: Lab) -> None:
    inbox, invoice = await lab.inbox(), await make_invoices(lab)
    for cents in (1, 2):
        assert (await inbox.process(lab.message(payload=cents), invoice)).processed
    joined = "SELECT cents, state FROM invoices LEFT JOIN onceward_records ON record = identity ORDER BY cents"
    assert await lab.query(joined) == [(1, "processed"), (2, "processed")]
    assert await inbox.cleanup(NOW, batch=1) == 2
    assert await lab.query("SELECT cents, record FROM invoices ORDER BY cents") == [(1, None), (2, None)]


async def test_a_foreign_key_that_says_nothing_makes_cleanup_fail_and_tell(lab: Lab) -> None:
    heard = Listener()
    inbox, invoice = await lab.inbox(listeners=[heard]), await make_invoices(lab, change=(" ON DELETE SET NULL", ""))
    await inbox.process(lab.message("free", payload=1), Recorder(lab))
    await inbox.process(lab.message("held", payload=1), invoice)
    with pytest.raises(Exception, match=r"(?i)foreign key|violates"):
        await inbox.cleanup(NOW, batch=1)
    assert isinstance(heard[-1], SweepFailed)
    assert heard[-1].deleted == 1, "what was committed before"
    assert [record.message_id for record in await inbox.records()] == ["held"]
    assert (await inbox.process(lab.message(payload=2), invoice)).processed, "and nothing is left behind"


# --- row-level security -------------------------------------------------------------------------------------


@pytest.fixture
async def roles(postgres_lab: PostgresLab) -> AsyncIterator[dict[str, str]]:
    """URLs of the roles of the page. Roles belong to the whole server, so these have names of their own."""
    names = {role: f"{role}_{os.getpid()}" for role in ("app", "janitor")}
    for name in names.values():
        await postgres_lab.query(f"CREATE ROLE {name} LOGIN")
    for statement in sql("Row-level security", "PostgreSQL"):
        await postgres_lab.query(re.sub(r" TO (app|janitor)\b", lambda found: f" TO {names[found[1]]}", statement))
    await postgres_lab.query(f"GRANT INSERT ON effects TO {names['app']}")
    await postgres_lab.query(f"GRANT SELECT ON effects TO {names['app']}")
    parts = urlsplit(postgres_lab.url)
    yield {
        role: urlunsplit(parts._replace(netloc=f"{name}@{parts.hostname}:{parts.port}")) for role, name in names.items()
    }
    await postgres_lab.stack.aclose()
    for name in names.values():
        await postgres_lab.query(f"DROP OWNED BY {name}")
        await postgres_lab.query(f"DROP ROLE {name}")


async def choose_tenant(tx: Any, message: Message[Any]) -> None:
    await tx.execute("SELECT set_config('app.tenant', $1, true)", message.tenant)


async def test_with_row_level_security_a_tenant_sees_its_own(postgres_lab: PostgresLab, roles: dict[str, str]) -> None:
    options: Any = {"consumer": "billing", "tenant": tenants.header("x-tenant"), "on_begin": choose_tenant, "cache": 0}
    handler = Recorder(postgres_lab)
    async with Inbox(AsyncpgStore(roles["app"]), **options) as inbox:
        for tenant in ("north", "south"):
            message = postgres_lab.message("m", headers={"x-tenant": tenant})
            assert (await inbox.process(message, handler)).processed
            assert (await inbox.process(message, handler)).duplicate
            record = await inbox.get_record(message)
            assert record is not None
            assert record.tenant == tenant
        dead = postgres_lab.message("d", headers={"x-tenant": "north"})
        with pytest.raises(ValueError, match="no"):
            await inbox.process(dead, Recorder(postgres_lab, error=ValueError("no")))
        connection = await asyncpg.connect(roles["app"])
        async with connection.transaction():
            await connection.execute("SELECT set_config('app.tenant', 'south', true)")
            assert await connection.fetchval("SELECT count(*) FROM onceward_records") == 1
        await connection.close()
        # No message, no tenant: nothing is seen, and nothing is deleted.
        assert (await inbox.stats()).total == 0
        assert await inbox.records() == []
        assert await inbox.cleanup(NOW) == 0
    async with Inbox(AsyncpgStore(roles["janitor"]), consumer="billing") as inbox:
        assert (await inbox.stats()).total == 3
        assert [record.message_id for record in await inbox.records(State.FAILED)] == ["d"]
        assert await inbox.cleanup(NOW) == 2
    assert await postgres_lab.query("SELECT message_id FROM onceward_records") == [("d",)]


# --- indexes ------------------------------------------------------------------------------------------------

PARAMS: dict[str, Any] = {
    "consumer": "billing", "limit": 10, "states": "dead,failed", "batch": 10, "after": None, "after_identity": None,
}  # fmt: skip


@pytest.mark.parametrize(
    ("statement", "indexes"),
    [
        ("stats", ["processed", "expiring", "unfinished"]),
        ("sweep_old", ["processed"]),
        ("sweep_expired", ["expiring"]),
        ("sweep_count", ["processed", "expiring"]),
        ("records_unfinished", ["unfinished"]),
        ("records_processed", ["processed"]),
    ],
)
async def test_upkeep_reads_indexes(postgres_lab: PostgresLab, statement: str, indexes: list[str]) -> None:
    """Among many records. The planner wants to know how many, and which of its pages are all visible."""
    columns = "identity, consumer, tenant, scope, key, message_id, type, state, processed_at, received_at, expires_at"
    at, tomorrow = "now() - n * interval '1 minute'", "now() + interval '1 day'"
    for consumer, state, expires in (
        ("billing", "processed", "NULL"), ("billing", "processed", tomorrow), ("billing", "dead", "NULL"),
        ("other", "processed", "NULL"), ("other", "dead", "NULL"),
    ):  # fmt: skip
        processed = at if state == "processed" else "NULL"
        await postgres_lab.query(
            f"INSERT INTO onceward_records ({columns}) "
            f"SELECT gen_random_uuid(), '{consumer}', 't', 's', 'k', 'm', 'x', '{state}', {processed}, {at}, {expires} "
            "FROM generate_series(1, 3000) AS n"
        )
    await postgres_lab.query("VACUUM ANALYZE onceward_records")
    said = postgresql()(statement, PARAMS | {"older": 86400})
    plan = "\n".join(row[0] for row in await postgres_lab.query(f"EXPLAIN {inlined(said)}"))
    for index in indexes:
        assert f"onceward_records_{index}" in plan, plan
    assert "Seq Scan" not in plan, plan
