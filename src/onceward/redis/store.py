"""RedisStore: where records live, on one server or a cluster."""

from __future__ import annotations

import os
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from datetime import timedelta
from itertools import count
from secrets import token_hex
from typing import Any

import msgspec
from redis.asyncio import Redis, RedisCluster

from onceward.errors import UsageError
from onceward.identity import Identity
from onceward.redis import check, value
from onceward.redis.heart import Heart, Lease
from onceward.redis.scripts import HEARTBEAT
from onceward.redis.servers import Servers, connect_cluster, connect_one
from onceward.redis.tx import RedisTx
from onceward.redis.unit import RedisUnit
from onceward.shield import LoopLock, finish
from onceward.store import Begin, Claims, Features, Finding, Unit

FEATURES = Features(
    transactional=False,
    tables=False,
    queue=False,
    positions=False,
    claim_marks=True,
    sweeps_expired=False,
)
USUAL_RETENTION = timedelta(days=30).total_seconds()


class RedisStore:
    """Records in Redis or Valkey: one runner at a time, by a lease, and duplicates are skipped for as long as a record
    is kept. After a crash a message may run again; exactly once are the commands that a handler gives to its `tx`.

    `url` is `redis://host:6379/0`, or `redis+cluster://host:6379` with any node of a cluster; or `client` is a
    `redis.asyncio.Redis` or `RedisCluster` of yours, which you close. `lease` seconds after a worker has died its
    messages are free; a heartbeat extends it while a handler runs. `tag` gives the part of an identity that decides the
    hash slot of its record, so that keys of your own can share it. With `replicas=1` every claim and every completion
    waits until one replica has it, for at most `replicas_timeout` seconds.
    """

    def __init__(
        self,
        url: str | None = None,
        *,
        client: Redis | RedisCluster | None = None,
        prefix: str = "onceward",
        lease: float = 15.0,
        tag: Callable[[Identity], str] | None = None,
        replicas: int = 0,
        replicas_timeout: float = 1.0,
        **options: Any,
    ) -> None:
        if (url is None) == (client is None):
            raise UsageError("RedisStore takes a URL, or client= with a client of yours")
        if client is not None and options:
            raise UsageError(f"{', '.join(options)}: with client= these are for the client itself")
        _check(prefix, lease, replicas)
        self.prefix = prefix
        self.lease_us = round(lease * 1_000_000)
        self._url = url
        self._given = client
        self._options = options
        self._tag = tag
        self._features = msgspec.structs.replace(FEATURES, bulk_tx=tag is not None or not self._is_cluster())
        self._safety = {"replicas": replicas, "replicas_timeout": replicas_timeout}
        self._fronts: dict[str, bytes] = {}
        self._pid = 0
        self._name = ""
        self._numbers = count(1)
        self._users = 0
        self._opening = LoopLock()
        self._servers: Servers | None = None
        self._lease = lease
        self._heart: Heart | None = None

    @property
    def features(self) -> Features:
        return self._features

    @property
    def client(self) -> Redis | RedisCluster:
        """For reading, and for effects that need not be exactly once."""
        client: Redis | RedisCluster = self.servers.client
        return client

    @property
    def servers(self) -> Servers:
        if self._servers is None:
            raise UsageError("the store is not open")
        return self._servers

    @property
    def heart(self) -> Heart:
        if self._heart is None:
            raise UsageError("the store is not open")
        return self._heart

    # --- life -----------------------------------------------------------------------------------------------

    async def open(self) -> None:
        async with self._opening.of_this_loop():
            if self._users == 0:
                await self._open()
            self._users += 1

    async def _open(self) -> None:
        own = self._given is None
        self._servers = Servers(self._connect(), own=own, **self._safety)  # type: ignore[arg-type]
        self._heart = Heart(self._lease, self._beat, self._servers.name_of)
        try:
            [node, *_] = await self._servers.primaries()
            await self._servers.ask(node, "PING")
        except BaseException:
            await finish(self._close())
            raise

    def _is_cluster(self) -> bool:
        if self._url is None:
            return isinstance(self._given, RedisCluster)
        return self._url.split("://", 1)[0].endswith("+cluster")

    def _connect(self) -> Redis | RedisCluster:
        if self._given is not None:
            return self._given
        assert self._url is not None  # noqa: S101 - see __init__
        scheme, rest = self._url.split("://", 1)
        if scheme.endswith("+cluster"):
            return connect_cluster(f"{scheme.removesuffix('+cluster')}://{rest}", **self._options)
        return connect_one(self._url, **self._options)

    async def close(self) -> None:
        async with self._opening.of_this_loop():
            self._users = max(0, self._users - 1)
            if self._users == 0:
                await finish(self._close())

    async def _close(self) -> None:
        if self._heart is not None:
            await self._heart.stop()
        servers, self._servers, self._heart = self._servers, None, None
        if servers is not None and self._given is None:
            await servers.close()

    async def setup(self) -> None:
        """There is nothing to set up."""

    async def check(self) -> list[Finding]:
        """What would make it forget."""
        return await check.findings(self.servers)

    # --- units ----------------------------------------------------------------------------------------------

    def unit(
        self,
        *,
        begin: Begin[Any] | None = None,
        wait: float = 5.0,  # noqa: ARG002 - nobody waits for a turn here
        read_only: bool = False,  # noqa: ARG002
        keep: float | None = None,
    ) -> AbstractAsyncContextManager[RedisUnit]:
        return RedisUnit(self, begin, USUAL_RETENTION if keep is None else keep)

    @asynccontextmanager
    async def listening(self, consumer: str, ring: Callable[[], None]) -> AsyncIterator[None]:  # noqa: ARG002
        yield

    def join(
        self,
        tx: Any,  # noqa: ARG002
        *,
        begin: Begin[Any] | None = None,  # noqa: ARG002
        read_only: bool = False,  # noqa: ARG002
    ) -> AbstractAsyncContextManager[Unit[Any]]:
        raise UsageError(
            "a Redis store has no transactions, so tx= cannot be joined; leave tx= away, or use a store on SQLite or "
            "PostgreSQL"
        )

    async def _beat(self, leases: list[Lease]) -> None:
        def args(places: list[int]) -> list[Any]:
            return [self.lease_us, *(leases[place].fence for place in places)]

        for places, replies in await self.servers.run_split(HEARTBEAT, [lease.key for lease in leases], args):
            for place, held in zip(places, replies, strict=True):
                if not held:
                    leases[place].unit.lose(leases[place].digest)

    # --- names ----------------------------------------------------------------------------------------------

    def key(self, identity: Identity) -> bytes:
        tag = None if self._tag is None else self._tag_of(identity)
        return value.key_of(self._front(identity.consumer), identity.digest, tag)

    def keys(self, claims: Claims) -> list[bytes]:
        front = self._front(claims.consumer)
        if self._tag is None:
            return [value.key_of(front, digest, None) for digest in claims.digest]
        identities = [
            Identity.known(digest, claims.consumer, tenant, scope, key)
            for digest, tenant, scope, key in zip(claims.digest, claims.tenant, claims.scope, claims.key, strict=True)
        ]
        return [self.key(identity) for identity in identities]

    def _front(self, consumer: str) -> bytes:
        front = self._fronts.get(consumer)
        if front is None:
            front = self._fronts[consumer] = value.front_of_keys(self.prefix, consumer)
        return front

    def _tag_of(self, identity: Identity) -> str:
        assert self._tag is not None  # noqa: S101 - asked for only then
        tag = self._tag(identity)
        if not isinstance(tag, str) or not tag or "{" in tag or "}" in tag or not is_text(tag):
            raise UsageError(f"tag= gave {tag!r}: it is a text without braces, which decides the hash slot")
        return tag

    def pattern(self, consumer: str) -> bytes:
        return self._front(consumer) + b"*"

    def tx_for(self, identity: Identity) -> RedisTx:
        return self.tx_beside(self.key(identity))

    def tx_beside(self, key: bytes) -> RedisTx:
        return RedisTx(key[key.index(b"{") + 1 : key.index(b"}")].decode())

    def next_claim(self) -> str:
        """A name that no other claim has, also not in a process that was forked off this one."""
        if self._pid != os.getpid():
            self._pid = os.getpid()
            self._name = f"{socket.gethostname()[:60]}:{self._pid}/{token_hex(4)}"
        return f"{self._name}{next(self._numbers):x}"


def is_text(text: str) -> bool:
    """Without lone surrogates, which have no bytes."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _check(prefix: str, lease: float, replicas: int) -> None:
    if not prefix or set(prefix) & set(":{}*?[]\\ \n\r\0") or not is_text(prefix):
        raise UsageError(f"prefix={prefix!r}: it is a text without colons, braces, blanks or signs of a pattern")
    if not 0.05 <= lease <= 86_400:
        raise UsageError(f"lease={lease!r}: it is between 0.05 seconds and a day")
    if replicas < 0:
        raise UsageError(f"replicas={replicas}: it is not negative")
