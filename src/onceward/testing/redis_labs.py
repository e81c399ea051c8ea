"""Labs for the Redis store: on one server, and on a cluster. They have the server for themselves."""

from __future__ import annotations

import socket
from datetime import timedelta
from typing import Any
from urllib.parse import urlsplit

from redis.asyncio import Redis, RedisCluster

from onceward.record import Record, State
from onceward.redis import RedisStore, scripts, value
from onceward.store import Store
from onceward.testing.lab import Lab

LEASE = 1.0
"""Seconds. Nobody waits longer than this for the dead."""

_TIMES = ("processed_at", "next_try_at")
_JSON = ("extra", "result", "payload", "headers")


class RedisLab(Lab):
    network = True
    commit_word = scripts.COMPLETE.sha.encode()
    scheme = "redis"

    def __init__(self, url: str) -> None:
        super().__init__()
        parts = urlsplit(url)
        self.address = (parts.hostname or "127.0.0.1", parts.port or 6379)
        self.plain_url = url
        self.url = f"{url}?lease={LEASE}"

    def store(self, *, max_size: int | None = None, **options: Any) -> Store[Any]:
        if max_size is not None:
            options["max_connections"] = max(2, max_size)
        return RedisStore(self.plain_url, **{"lease": LEASE} | options)

    def unreachable(self) -> Store[Any]:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            return self.store_behind(probe.getsockname()[1])

    def store_behind(self, port: int) -> Store[Any]:
        return RedisStore(f"{self.scheme}://127.0.0.1:{port}", lease=LEASE)

    def client(self) -> Any:
        """A client that has nothing to do with the store."""
        return Redis.from_url(self.plain_url)

    async def _keys(self, client: Any, pattern: str) -> list[bytes]:
        return [key async for key in client.scan_iter(match=pattern, count=1000)]

    async def _values(self, client: Any) -> list[tuple[bytes, bytes]]:
        found = [(key, await client.get(key)) for key in await self._keys(client, "onceward:*")]
        return [(key, one) for key, one in found if one is not None]

    async def kept(self) -> list[dict[str, Any]]:
        async with self.client() as client:
            records = [
                value.record_of(value.consumer_of(key, "onceward"), one) for key, one in await self._values(client)
            ]
        names = [name for name in Record.__struct_fields__ if name not in ("identity", "retention")]
        names += ["tenant", "scope", "key", "consumer"]
        return [{name: getattr(record, name) for name in names} for record in records]

    async def change(self, message_id: str | None = None, **columns: Any) -> None:
        async with self.client() as client:
            for key, one in await self._values(client):
                record = value.record_of(value.consumer_of(key, "onceward"), one)
                if message_id in (None, record.message_id):
                    await client.set(key, _changed(one, record, dict(columns)), keepttl=True)

    async def forget(self) -> None:
        async with self.client() as client:
            for key in await self._keys(client, "onceward:*"):
                await client.delete(key)

    async def effects(self) -> list[str]:
        async with self.client() as client:
            lists = [await client.lrange(key, 0, -1) for key in await self._keys(client, "effects:*")]
        return sorted(one.decode() for effects in lists for one in effects)

    async def clear_effects(self) -> None:
        async with self.client() as client:
            for key in await self._keys(client, "effects:*"):
                await client.delete(key)

    async def make_older(self, message_id: str, *, days: int) -> None:
        async with self.client() as client:
            seconds, micros = await client.time() if not isinstance(client, RedisCluster) else await _time(client)
        then = value.moment(seconds * 1_000_000 + micros) - timedelta(days=days)
        await self.change(message_id, processed_at=then)

    async def let_time_pass(self) -> None:
        for kept in await self.kept():
            if kept["state"] in (State.RUNNING, State.FAILED) and kept["next_try_at"] is not None:
                await self.change(kept["message_id"], next_try_at=value.moment(1))


class RedisClusterLab(RedisLab):
    """Messages are in all slots, each with its effects."""

    scheme = "redis+cluster"
    network = False  # a node tells its own address, not that of a proxy

    def client(self) -> Any:
        return RedisCluster.from_url(self.plain_url.replace("redis+cluster", "redis"))


async def _time(client: Any) -> tuple[int, int]:
    seconds, micros = await client.execute_command("TIME", target_nodes=client.get_primaries()[0])
    return int(seconds), int(micros)


def _changed(one: bytes, record: Record, columns: dict[str, Any]) -> bytes:
    """The same string with other columns."""
    front, rest = value.front_of(one), value.columns_in(one)
    rest += [None] * (len(value.COLUMNS) - len(rest))
    state, at = State(columns.pop("state", front.state)), front.at
    attempts, started = columns.pop("attempts", front.attempts), columns.pop("started", front.started)
    for name in _TIMES:
        if name in columns:
            when = columns.pop(name)
            at = 0 if when is None else value.micros(when)
    received = columns.pop("received_at", record.received_at)
    if state is State.PROCESSED:
        rest[value.RECEIVED_AT] = value.micros(received)
    for name, new in columns.items():
        rest[value.COLUMNS.index(name)] = new.encode() if name in _JSON and isinstance(new, str) else new
    own_time = rest[value.KEEP_MS] is not None
    changed = value.Front(state, front.fence, at, attempts, started, value.micros(received), own_time=own_time)
    return value.packed_front(changed) + value.packed(rest)


class RedisTagLab(RedisClusterLab):
    """All messages of a consumer are in one slot, and so may share a tx."""

    def store(self, **options: Any) -> Store[Any]:
        return super().store(**{"tag": lambda identity: identity.consumer} | options)
