"""Databases for tests, on a server that is there: empty ones, and copies of a template."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from itertools import count
from urllib.parse import urlsplit, urlunsplit

import asyncpg

from onceward.testing import PostgresLab

_numbers = count(1)


@asynccontextmanager
async def database(server: str, template: str = "template1") -> AsyncIterator[str]:
    """The DSN of a new database, dropped afterwards."""
    async with _admin(server) as admin:
        name = await _create(admin, template)
        try:
            yield _dsn(server, name)
        finally:
            await _drop(admin, name)


async def make_template(server: str) -> str:
    """The name of a database that a lab has set up: to copy it is quicker than to set up another one."""
    async with _admin(server) as admin:
        name = await _create(admin, "template1")
        await PostgresLab(_dsn(server, name)).set_up()
        # What is in use cannot be copied, and autovacuum uses it too.
        await admin.execute(f"ALTER DATABASE {name} WITH ALLOW_CONNECTIONS false")
        return name


async def drop_template(server: str, name: str) -> None:
    async with _admin(server) as admin:
        await _drop(admin, name)


@asynccontextmanager
async def _admin(server: str) -> AsyncIterator[asyncpg.Connection]:
    connection = await asyncpg.connect(server)
    try:
        yield connection
    finally:
        await connection.close()


async def _create(admin: asyncpg.Connection, template: str) -> str:
    name = f"onceward_test_{os.getpid()}_{next(_numbers)}"
    # Before 15 copying files was the only way; since then it has to be asked for, and is the quicker one.
    how = "STRATEGY file_copy" if admin.get_server_version().major >= 15 else ""
    await admin.execute(f"CREATE DATABASE {name} TEMPLATE {template} {how}")
    return name


async def _drop(admin: asyncpg.Connection, name: str) -> None:
    # WITH (FORCE) is enough. But while somebody is still on the way out, it looks again only after a tenth of a second.
    while await admin.fetch("SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = $1", name):
        await asyncio.sleep(0.002)
    await admin.execute(f"DROP DATABASE {name} WITH (FORCE)")


def _dsn(server: str, name: str) -> str:
    return urlunsplit(urlsplit(server)._replace(path=f"/{name}"))
