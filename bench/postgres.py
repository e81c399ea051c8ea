"""A throwaway PostgreSQL, an empty database for each question, and what is the same for all variants on it."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from itertools import count
from urllib.parse import urlsplit, urlunsplit

import asyncpg

from bench.messages import CHARGES
from bench.rounds import WorkNotDone
from tests.services import postgres

_numbers = count(1)


@contextmanager
def server() -> Iterator[str | None]:
    """The DSN of the server that the tests would use. None: there is none."""
    given = os.environ.get(postgres.VARIABLE)
    if given or postgres.binaries() is None:
        yield given
        return
    with postgres.throwaway() as started:
        yield started.dsn


@asynccontextmanager
async def database(server_dsn: str) -> AsyncIterator[str]:
    """An empty database with the table of effects in it; gone afterwards."""
    name = f"onceward_bench_{os.getpid()}_{next(_numbers)}"
    admin = await asyncpg.connect(server_dsn)
    try:
        await admin.execute(f"CREATE DATABASE {name}")
        dsn = urlunsplit(urlsplit(server_dsn)._replace(path=f"/{name}"))
        try:
            await run(dsn, CHARGES)
            yield dsn
        finally:
            await admin.execute(f"DROP DATABASE {name} WITH (FORCE)")
    finally:
        await admin.close()


async def run(dsn: str, sql: str) -> None:
    connection = await asyncpg.connect(dsn)
    try:
        await connection.execute(sql)
    finally:
        await connection.close()


def pool(dsn: str, connections: int) -> asyncpg.Pool:
    """As AsyncpgStore makes its own: all of asyncpg's defaults, with the RESET when a connection is given back."""
    return asyncpg.create_pool(dsn, min_size=connections, max_size=connections)


@asynccontextmanager
async def effects_in(dsn: str) -> AsyncIterator[Callable[[], Awaitable[int]]]:
    """Counts the effects and removes them; no message may have two."""
    connection = await asyncpg.connect(dsn)

    async def effects() -> int:
        row = await connection.fetchrow("SELECT count(*) AS rows, count(DISTINCT message_id) AS messages FROM charges")
        await connection.execute("TRUNCATE charges")
        if row["rows"] != row["messages"]:
            raise WorkNotDone(f"{row['rows']} effects of {row['messages']} messages: some were doubled")
        found: int = row["rows"]
        return found

    try:
        yield effects
    finally:
        await connection.close()


async def about(server_dsn: str) -> dict[str, str]:
    """What the figures depend on."""
    connection = await asyncpg.connect(server_dsn)
    try:
        names = ("server_version", "fsync", "synchronous_commit", "shared_buffers")
        return {name: await connection.fetchval(f"SHOW {name}") for name in names}
    finally:
        await connection.close()
