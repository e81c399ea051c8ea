"""docs/postgresql.md says which rights a service needs: these are enough, and none is too many."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator
from datetime import timedelta
from pathlib import Path
from typing import Any
from uuid import uuid4

import asyncpg
import pytest

from onceward import Inbox, Message, UsageError
from onceward.asyncpg import AsyncpgStore
from onceward.testing import PostgresLab
from onceward.testing.lab import Recorder
from tests.queue_work import work_the_queue

PAGE = Path(__file__).parents[1] / "docs" / "postgresql.md"
RIGHTS = [
    "SELECT ON onceward_schema",
    "SELECT ON onceward_records",
    "INSERT ON onceward_records",
    "UPDATE ON onceward_records",
    "DELETE ON onceward_records",
    *(
        f"{right} ON onceward_{table}"
        for table in ("lanes", "pending", "waits", "arrivals")
        for right in ("SELECT", "INSERT", "UPDATE", "DELETE")
    ),
    "SELECT ON onceward_floors",
    "USAGE ON SEQUENCE onceward_received",
    "USAGE ON SEQUENCE onceward_processed",
]


@pytest.fixture
async def role(postgres_lab: PostgresLab) -> AsyncIterator[str]:
    """A role that has what the page gives it, and a table of its own to work on."""
    name = f"billing_{uuid4().hex}"
    (grants,) = re.findall(r"^```sql\n(.*?)^```$", PAGE.read_text("utf-8"), re.MULTILINE | re.DOTALL)
    await postgres_lab.query(f"CREATE ROLE {name}")
    for grant in (grants + "GRANT INSERT ON effects TO billing;").replace("TO billing", f"TO {name}").split(";")[:-1]:
        await postgres_lab.query(grant)
    yield name
    await postgres_lab.query(f"DROP OWNED BY {name}")
    await postgres_lab.query(f"DROP ROLE {name}")


def as_role(lab: PostgresLab, role: str) -> AsyncpgStore:
    async def become(connection: asyncpg.Connection) -> None:
        await connection.execute(f"SET ROLE {role}")

    return AsyncpgStore(lab.url, init=become)


async def work(lab: PostgresLab, role: str) -> None:
    """What a service does in its life."""
    store, message = as_role(lab, role), lab.message("m")
    async with Inbox(store, consumer="billing", cache=0) as inbox:
        with pytest.raises(ValueError, match="no"):
            await inbox.process(message, Recorder(lab, error=ValueError("no")))
        assert (await inbox.process(message, Recorder(lab), redelivered=True)).processed
        assert (await inbox.process(message, Recorder(lab))).duplicate
        assert await inbox.get_record(message) is not None
        await work_the_queue(store, inbox)
        assert (await inbox.queue_stats()).pending == 0
        assert await inbox.cleanup(timedelta(0)) >= 1
    for table in ("lanes", "pending", "waits", "arrivals"):
        assert await lab.query(f"SELECT * FROM onceward_{table}") == []


async def test_the_rights_on_the_page_are_enough(postgres_lab: PostgresLab, role: str) -> None:
    await work(postgres_lab, role)


@pytest.mark.parametrize("right", RIGHTS)
async def test_none_of_them_can_be_left_out(postgres_lab: PostgresLab, role: str, right: str) -> None:
    await postgres_lab.query(f"REVOKE {right} FROM {role}")
    with pytest.raises(asyncpg.InsufficientPrivilegeError):
        await work(postgres_lab, role)


async def test_an_upgrade_gives_the_rights_of_records_to_the_queue(postgres_lab: PostgresLab, role: str) -> None:
    """Else the trigger of version 4 would stop a service at its next COMMIT, although it knows nothing of a queue."""
    lab, reader = postgres_lab, f"reader_{uuid4().hex}"
    await lab.back_to(3)
    await lab.query(f"CREATE ROLE {reader}")
    await lab.query(f"GRANT SELECT ON onceward_records TO {reader}")
    await lab.query(f"GRANT SELECT ON onceward_schema TO {role}")
    await lab.query(f"GRANT SELECT, INSERT, UPDATE, DELETE ON onceward_records TO {role}")
    await lab.query("ALTER DEFAULT PRIVILEGES REVOKE EXECUTE ON FUNCTIONS FROM PUBLIC")
    try:
        await lab.store().setup()
        await work(lab, role)
        may = f"SELECT has_table_privilege('{reader}', 'onceward_lanes', '%s')"
        assert [await lab.query(may % right) for right in ("SELECT", "UPDATE")] == [[(True,)], [(False,)]]
    finally:
        await lab.query(f"DROP OWNED BY {reader}")
        await lab.query(f"DROP ROLE {reader}")


async def test_whoever_upgrades_the_owner_of_the_records_may_use_the_queue(postgres_lab: PostgresLab) -> None:
    lab, owner = postgres_lab, f"owner_{uuid4().hex}"
    await lab.back_to(3)
    await lab.query(f"CREATE ROLE {owner}")
    try:
        for table in ("onceward_records", "onceward_schema"):
            await lab.query(f"ALTER TABLE {table} OWNER TO {owner}")
        await lab.query(f"GRANT INSERT ON effects TO {owner}")
        await lab.store().setup()
        await work(lab, owner)
    finally:
        for table in ("onceward_records", "onceward_schema"):
            await lab.query(f"ALTER TABLE {table} OWNER TO CURRENT_USER")
        await lab.query(f"DROP OWNED BY {owner}")
        await lab.query(f"DROP ROLE {owner}")


# --- row-level security: as docs/retention.md and docs/stored.md have it --------------------------------------------


async def choose_tenant(tx: asyncpg.Connection, message: Message[Any]) -> None:
    await tx.execute("SELECT set_config('app.tenant', $1, true)", message.tenant)


async def rows_seen(message: Message[Any], tx: asyncpg.Connection) -> None:
    tenant = await tx.fetchval("SELECT current_setting('app.tenant')")
    await tx.execute("INSERT INTO effects VALUES ($1)", f"{message.tenant} as {tenant}")


@pytest.fixture
async def walled(postgres_lab: PostgresLab, role: str) -> str:
    """The role sees the records of the tenant that its transaction is for."""
    await postgres_lab.query("ALTER TABLE onceward_records ENABLE ROW LEVEL SECURITY")
    own = "tenant = current_setting('app.tenant', true)"
    await postgres_lab.query(f"CREATE POLICY tenants ON onceward_records TO {role} USING ({own})")
    return role


async def accept_for_two(inbox: Inbox[asyncpg.Connection], lab: PostgresLab) -> None:
    both = [lab.message("m", tenant=tenant, stream="s", position=1) for tenant in ("north", "south")]
    for _ in range(2):
        kinds = {outcome.kind.value for outcome in await inbox.accept(both)}
    assert kinds == {"duplicate"}
    inline = lab.message("i", tenant="north", stream="s", position=2)
    assert (await inbox.process(inline, rows_seen)).processed


async def test_tenants_behind_policies_accept(postgres_lab: PostgresLab, walled: str) -> None:
    store = as_role(postgres_lab, walled)
    async with Inbox(store, consumer="billing", on_begin=choose_tenant, cache=0) as inbox:
        await accept_for_two(inbox, postgres_lab)
        with pytest.raises(UsageError, match="row-level security"):
            await inbox.dispatch(rows_seen)
    look = "SELECT state, claims FROM onceward_lanes"
    assert await postgres_lab.query(look) == [("ready", 0)] * 2, "nobody crashed, and others may have them"


async def test_a_worker_that_sees_all_tenants_works_for_each(postgres_lab: PostgresLab, walled: str) -> None:
    store = as_role(postgres_lab, walled)
    async with Inbox(store, consumer="billing", on_begin=choose_tenant, cache=0) as inbox:
        await accept_for_two(inbox, postgres_lab)
        await postgres_lab.query(f"CREATE POLICY workers ON onceward_records TO {walled} USING (true)")
        while await inbox.dispatch(rows_seen):
            pass
    assert await postgres_lab.effects() == ["north as north", "north as north", "south as south"]
