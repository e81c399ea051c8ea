"""The tables in a schema of their own, or found by the search path, whatever that says later, or in a handler."""

from __future__ import annotations

from typing import Any
from uuid import uuid4

import asyncpg
import pytest

from onceward import Inbox, Message
from onceward.asyncpg import AsyncpgStore
from onceward.testing import PostgresLab
from tests.queue_work import line, work_the_queue

WHERE = """
    SELECT DISTINCT n.nspname FROM pg_namespace n, pg_class t
    WHERE t.relnamespace = n.oid AND t.relname LIKE 'onceward%' AND t.relkind IN ('r', 'S')
    UNION
    SELECT DISTINCT n.nspname FROM pg_namespace n, pg_proc f
    WHERE f.pronamespace = n.oid AND f.proname LIKE 'onceward%' ORDER BY 1
"""


async def wander(message: Message[Any], tx: asyncpg.Connection) -> None:
    await tx.execute("SET LOCAL search_path TO elsewhere")


async def live(store: AsyncpgStore) -> None:
    async with Inbox(store, consumer="billing") as inbox:
        for position in (7, 8):
            moved = Message(f"m-{position}", "t", None, stream="s", position=position)
            assert (await inbox.process(moved, wander)).processed
        await work_the_queue(store, inbox)


async def test_the_queue_in_a_schema_of_its_own(postgres_dsn: str) -> None:
    store = AsyncpgStore(postgres_dsn, schema='my "inbox"')
    await store.setup()
    await live(store)
    assert await PostgresLab(postgres_dsn).query(WHERE) == [('my "inbox"',)]


async def test_the_queue_where_the_search_path_finds_it(postgres_lab: PostgresLab) -> None:
    await live(AsyncpgStore(postgres_lab.url))


async def test_the_queue_where_no_search_path_finds_it(postgres_lab: PostgresLab) -> None:
    await live(AsyncpgStore(postgres_lab.url, schema="public", server_settings={"search_path": "elsewhere"}))


async def test_two_inboxes_in_two_schemas_do_not_meet(postgres_dsn: str) -> None:
    one, other = (AsyncpgStore(postgres_dsn, schema=name) for name in ("one", "other"))
    for store in (one, other):
        await store.setup()
    lab, kept = PostgresLab(postgres_dsn), line("kept")
    async with Inbox(other, consumer="billing"), other.unit() as unit:
        await unit.accept([kept], consumer="billing", host="h")
        await live(one)
        assert await lab.query("SELECT message_id FROM other.onceward_records") == [("kept",)]
        assert len(await lab.query("SELECT * FROM other.onceward_lanes")) == 1
        assert len(await unit.claim_lanes("billing", "w", most=9, lease=30)) == 1


async def test_a_schema_with_the_name_of_the_role_is_not_mistaken_for_ours(postgres_dsn: str) -> None:
    """`"$user", public` means another schema for each role: for whoever ran setup, and for whoever runs the service."""
    lab, role = PostgresLab(postgres_dsn), f"app_{uuid4().hex}"
    await lab.store().setup()  # in public, by the search path
    await lab.query(f"CREATE ROLE {role} LOGIN")
    try:
        await AsyncpgStore(postgres_dsn, schema=role).setup()
        for schema in ("public", role):
            for what in ("TABLES", "SEQUENCES"):
                await lab.query(f"GRANT ALL ON ALL {what} IN SCHEMA {schema} TO {role}")
            await lab.query(f"GRANT USAGE ON SCHEMA {schema} TO {role}")
        await live(AsyncpgStore(postgres_dsn.replace("onceward@", f"{role}@"), schema="public"))
        assert await lab.query(f"SELECT message_id FROM {role}.onceward_records") == []
        assert len(await lab.query("SELECT message_id FROM public.onceward_records")) > 1
    finally:
        await lab.query(f"DROP OWNED BY {role}")
        await lab.query(f"DROP ROLE {role}")


async def test_an_upgrade_stays_in_the_schema_of_the_records(postgres_lab: PostgresLab) -> None:
    await postgres_lab.back_to(3)
    await postgres_lab.query("CREATE SCHEMA app")
    store = AsyncpgStore(postgres_lab.url, server_settings={"search_path": "app, public"})
    await store.setup()
    assert await postgres_lab.query(WHERE) == [("public",)]
    await live(store)


async def test_a_schema_that_was_renamed_works_after_a_stamp(postgres_dsn: str) -> None:
    lab = PostgresLab(postgres_dsn)
    await AsyncpgStore(postgres_dsn, schema="old").setup()
    await lab.query("ALTER SCHEMA old RENAME TO new")
    store = AsyncpgStore(postgres_dsn, schema="new")
    await store.stamp()
    await live(store)
    assert await lab.query(WHERE) == [("new",)]


@pytest.mark.parametrize("spoiled", ["DROP TRIGGER onceward_settled ON onceward_records", "other words"])
async def test_a_stamp_puts_back_what_is_missing_or_another(postgres_lab: PostgresLab, spoiled: str) -> None:
    look = "SELECT pg_get_functiondef(oid) FROM pg_proc WHERE proname LIKE 'onceward%' ORDER BY 1"
    whole = await postgres_lab.query(look)
    if spoiled == "other words":
        spoiled = "CREATE OR REPLACE FUNCTION onceward_touch(touched uuid[]) RETURNS integer LANGUAGE sql AS 'SELECT 1'"
    await postgres_lab.query(spoiled)
    await AsyncpgStore(postgres_lab.url).stamp()
    assert await postgres_lab.query(look) == whole
    await live(AsyncpgStore(postgres_lab.url))
