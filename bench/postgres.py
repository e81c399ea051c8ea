"""A throwaway PostgreSQL, an empty database for each question, and what is the same for all variants on it."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from itertools import count
from pathlib import Path
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
    with postgres.throwaway(durable=True) as started:
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
    """As most people have it: asyncpg resets a connection that comes back, with a trip of its own."""
    return asyncpg.create_pool(dsn, min_size=connections, max_size=connections)


def riding_pool(dsn: str, connections: int, prepare: Sequence[str] = ()) -> asyncpg.Pool:
    """As AsyncpgStore makes its own: the reset rides with COMMIT. Whoever uses it sends `commit_and_reset`.

    Statements to prepare are prepared on each connection once.
    """

    async def init(connection: asyncpg.Connection) -> None:
        for statement in prepare:
            await connection.execute(f"PREPARE {statement}")

    async def reset(_connection: asyncpg.Connection) -> None:
        """Done already."""

    return asyncpg.create_pool(dsn, min_size=connections, max_size=connections, init=init, reset=reset)


def commit_and_reset(connection: asyncpg.Connection) -> str:
    """COMMIT and the pool's own reset statements, as one text for one trip."""
    return f"COMMIT; {connection.get_reset_query()}"


class Lent:
    """A connection of a riding pool. One that did not come to its reset must not go back, so an error ends it."""

    __slots__ = ("_connection", "_pool")

    def __init__(self, pool: asyncpg.Pool) -> None:
        self._pool = pool

    async def __aenter__(self) -> asyncpg.Connection:
        self._connection = await self._pool.acquire()
        return self._connection

    async def __aexit__(self, error: object, *_: object) -> None:
        if error is not None:
            self._connection.terminate()
        await self._pool.release(self._connection)


class Watch:
    """A connection beside the variants', to see what they did."""

    def __init__(self, connection: asyncpg.Connection) -> None:
        self._connection = connection

    async def effects(self) -> int:
        """Counts the effects and removes them; no message may have two."""
        row = await self._connection.fetchrow("SELECT count(*), count(DISTINCT message_id) FROM charges")
        await self._connection.execute("TRUNCATE charges")
        rows: int
        rows, messages = row
        if rows != messages:
            raise WorkNotDone(f"{rows} effects of {messages} messages: some were doubled")
        return rows

    async def server_cpu(self) -> float | None:
        """Seconds that the backends of this database have been running, where the server is on this machine."""
        rows = await self._connection.fetch(
            "SELECT pid FROM pg_stat_activity WHERE datname = current_database() AND pid <> pg_backend_pid()"
        )
        try:
            return sum(_nanoseconds(row["pid"]) for row in rows) / 1e9
        except (OSError, ValueError):
            return None


def _nanoseconds(pid: int) -> int:
    process = Path("/proc") / str(pid)
    if "postgres" not in (process / "comm").read_text():
        raise ValueError("another process has this number here: the server is elsewhere")
    return int((process / "schedstat").read_text().split()[0])


@asynccontextmanager
async def watching(dsn: str) -> AsyncIterator[Watch]:
    connection = await asyncpg.connect(dsn)
    try:
        yield Watch(connection)
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
