"""docs/postgresql.md says which rights a service needs: these are enough, and none is too many."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator
from datetime import timedelta
from pathlib import Path
from uuid import uuid4

import asyncpg
import pytest

from onceward import Inbox
from onceward.asyncpg import AsyncpgStore
from onceward.testing import PostgresLab
from onceward.testing.lab import Recorder

PAGE = Path(__file__).parents[1] / "docs" / "postgresql.md"
RIGHTS = [
    "SELECT ON onceward_schema",
    "SELECT ON onceward_records",
    "INSERT ON onceward_records",
    "UPDATE ON onceward_records",
    "DELETE ON onceward_records",
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


async def work(lab: PostgresLab, role: str) -> None:
    """What a service does in its life."""

    async def become(connection: asyncpg.Connection) -> None:
        await connection.execute(f"SET ROLE {role}")

    store, message = AsyncpgStore(lab.url, init=become), lab.message("m")
    async with Inbox(store, consumer="billing", cache=0) as inbox:
        with pytest.raises(ValueError, match="no"):
            await inbox.process(message, Recorder(lab, error=ValueError("no")))
        assert (await inbox.process(message, Recorder(lab), redelivered=True)).processed
        assert (await inbox.process(message, Recorder(lab))).duplicate
        assert await inbox.get_record(message) is not None
        assert await inbox.cleanup(timedelta(0)) == 1


async def test_the_rights_on_the_page_are_enough(postgres_lab: PostgresLab, role: str) -> None:
    await work(postgres_lab, role)


@pytest.mark.parametrize("right", RIGHTS)
async def test_none_of_them_can_be_left_out(postgres_lab: PostgresLab, role: str, right: str) -> None:
    await postgres_lab.query(f"REVOKE {right} FROM {role}")
    with pytest.raises(asyncpg.InsufficientPrivilegeError):
        await work(postgres_lab, role)
