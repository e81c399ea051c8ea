"""Talking to one server, or to a cluster: scripts, each on keys of one hash slot, in one trip where there are many.

redis-py sends a command again when it did not hear the answer, follows MOVED and ASK, and asks anew who has which slot
after a failover. Every script may therefore run twice, and says the same the second time.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

from redis import exceptions
from redis.asyncio import BlockingConnectionPool, Redis, RedisCluster
from redis.asyncio.retry import Retry
from redis.backoff import ExponentialBackoff

from onceward.errors import StoreError, StoreReadOnly, StoreUnavailable, UsageError
from onceward.redis.line import Line, apart
from onceward.redis.scripts import Script
from onceward.redis.shelf import TRIES
from onceward.redis.value import sorted_by_slot

AGAIN = 3
"""How often what has to be said again is said again."""

AT_ONCE = 100
"""Keys of one script on a server without slots: a script holds up everybody else while it runs."""

SOCKET_TIMEOUT = 5.0
MOST_CONNECTIONS = 50


class Call(NamedTuple):
    """One script on keys of one slot."""

    keys: Sequence[bytes]
    args: Sequence[Any]


class Servers:
    """What the store and its units need of a client, be it of one server or of a cluster."""

    def __init__(
        self,
        client: Redis | RedisCluster,
        *,
        own: bool = False,
        replicas: int = 0,
        replicas_timeout: float = 1.0,
    ) -> None:
        _check_client(client)
        self.client: Any = client
        self.is_cluster = isinstance(client, RedisCluster)
        self._room = asyncio.Semaphore(_connections_of(client)) if isinstance(client, RedisCluster) else None
        """A client of a cluster refuses whom it has no connection for; here they wait."""
        pool = getattr(client, "connection_pool", None)
        self._line = Line(pool) if own and isinstance(pool, BlockingConnectionPool) else None
        self._replicas = replicas
        self._replicas_ms = round(replicas_timeout * 1000)

    @property
    def waits(self) -> bool:
        """For replicas."""
        return self._replicas > 0

    # --- scripts --------------------------------------------------------------------------------------------

    async def run(self, script: Script, keys: Sequence[bytes], *args: Any, safe: bool = False) -> Any:
        """One script. `safe`: what it wrote has to be with as many replicas as were asked for."""
        if safe and self._replicas:
            return (await self.run_all(script, [Call(keys, args)], safe=True))[0]
        if self._line is None:
            return await apart(self._run_by_client(script, keys, args))
        try:
            try:
                return await self._line.say("EVALSHA", script.sha, len(keys), *keys, *args)
            except exceptions.NoScriptError:  # a new server, or one that was told to forget
                return await self._line.say("EVAL", script.text, len(keys), *keys, *args)
        except _THEIRS as error:
            raise translated(error) from error

    async def _run_by_client(self, script: Script, keys: Sequence[bytes], args: Sequence[Any]) -> Any:
        async with self._talking():
            try:
                return await self.client.execute_command("EVALSHA", script.sha, len(keys), *keys, *args)
            except exceptions.NoScriptError:
                return await self.client.execute_command("EVAL", script.text, len(keys), *keys, *args)

    async def run_all(self, script: Script, calls: Sequence[Call], *, safe: bool = False) -> list[Any]:
        """One script on many slots, in one trip to each server. A reply for each."""
        if len(calls) == 1 and not (safe and self._replicas):
            return [await self.run(script, calls[0].keys, *calls[0].args)]
        replies, error = await apart(self._answers(script, calls, safe=safe))
        if error is not None:
            raise error
        return replies

    async def run_claims(self, script: Script, calls: Sequence[Call]) -> tuple[list[Any], StoreError | None]:
        """The same, and what went wrong with some of them, whose reply is None then; or with all, if too few replicas
        have them. Who claimed something has to know it, to be able to give it back."""
        if len(calls) == 1 and not self._replicas:
            return [await self.run(script, calls[0].keys, *calls[0].args)], None
        return await apart(self._answers(script, calls, safe=True))

    async def _answers(
        self, script: Script, calls: Sequence[Call], *, safe: bool
    ) -> tuple[list[Any], StoreError | None]:
        waits = safe and self._replicas > 0
        async with self._talking():
            replies, reached = await self._pipelined(script, calls, waits=waits)
            for _ in range(AGAIN):
                again = self._to_repeat(calls, replies, reached)
                if not again:
                    break
                await self._make_way(script, [replies[place] for place in again])
                more, reached_now = await self._pipelined(script, [calls[place] for place in again], waits=waits)
                for number, place in enumerate(again):
                    replies[place] = more[number]
                    if reached is not None and reached_now is not None:
                        reached[place] = reached_now[number]
        wrong = next((reply for reply in replies if isinstance(reply, Exception)), None)
        if wrong is not None:
            error = translated(wrong)
            error.__cause__ = wrong
            return [None if isinstance(reply, Exception) else reply for reply in replies], error
        return replies, self._too_few(reached)

    def _to_repeat(self, calls: Sequence[Call], replies: list[Any], reached: list[Any] | None) -> list[int]:
        """Those that the server did not know the script for; and, where replicas are waited for, those that belong to
        another server meanwhile: redis-py would send them on, and the wait behind them would be for nothing."""
        return [
            place
            for place, (keys, _) in enumerate(calls)
            if isinstance(replies[place], (exceptions.NoScriptError, exceptions.MovedError, exceptions.TryAgainError))
            or (reached is not None and self.is_cluster and reached[place][0] != self.name_of(keys[0]))
        ]

    async def _make_way(self, script: Script, replies: list[Any]) -> None:
        if any(isinstance(reply, exceptions.NoScriptError) for reply in replies):
            await self._load(script)
        for reply in replies:
            if isinstance(reply, exceptions.MovedError):
                await self.client.nodes_manager.move_slot(reply)
        if any(isinstance(reply, exceptions.TryAgainError) for reply in replies):
            await asyncio.sleep(0.05)

    def name_of(self, key: bytes) -> str:
        """The server that has the slot of a key, as far as is known."""
        if not self.is_cluster:
            return ""
        with suppress(Exception):  # nobody has it now
            return str(self.client.get_node_from_key(key).name)
        return ""

    async def _load(self, script: Script) -> None:
        if not self.is_cluster:
            await self.client.execute_command("SCRIPT LOAD", script.text)
            return
        for node in self.client.get_primaries():
            with suppress(*_THEIRS):  # one that is not there is in nobody else's way
                await self.client.execute_command("SCRIPT LOAD", script.text, target_nodes=node)

    async def _pipelined(
        self, script: Script, calls: Sequence[Call], *, waits: bool
    ) -> tuple[list[Any], list[Any] | None]:
        """The replies; and, where that is waited for, whom each was sent to and how many replicas it has reached."""
        pipe = self.client.pipeline() if self.is_cluster else self.client.pipeline(transaction=False)
        asked = []
        for keys, args in calls:
            pipe.execute_command("EVALSHA", script.sha, len(keys), *keys, *args)
            if waits:
                node = self.client.get_node_from_key(keys[0]) if self.is_cluster else None
                asked.append("" if node is None else str(node.name))
                aside = {} if node is None else {"target_nodes": node}
                pipe.execute_command("WAIT", self._replicas, self._replicas_ms, **aside)
        follows = {"allow_redirections": not waits} if self.is_cluster else {}
        replies: list[Any] = await pipe.execute(raise_on_error=False, **follows)
        return (replies[::2], list(zip(asked, replies[1::2], strict=True))) if waits else (replies, None)

    def _too_few(self, reached: list[Any] | None) -> StoreError | None:
        if reached is None:
            return None
        fewest = min(0 if isinstance(number, Exception) else number for _, number in reached)
        if fewest >= self._replicas:
            return None
        return NotReplicated(f"{fewest} replicas have it after {self._replicas_ms} ms; {self._replicas} were asked for")

    def split(self, keys: Sequence[bytes]) -> list[list[int]]:
        """Their places in parts that a script may touch at once: of one slot, or just not too many."""
        if self.is_cluster:
            return list(sorted_by_slot(keys, self.client.keyslot).values())
        return [list(range(at, min(at + AT_ONCE, len(keys)))) for at in range(0, len(keys), AT_ONCE)]

    async def run_split(
        self, script: Script, keys: Sequence[bytes], args: Callable[[list[int]], Sequence[Any]], *, safe: bool = False
    ) -> list[tuple[list[int], Any]]:
        """On many keys; `args` says what belongs to those at some places. The places and the reply of each part."""
        parts = self.split(keys)
        calls = [Call([keys[place] for place in part], args(part)) for part in parts]
        return list(zip(parts, await self.run_all(script, calls, safe=safe), strict=True))

    # --- slots and keys -------------------------------------------------------------------------------------

    def slot(self, key: bytes) -> int:
        return int(self.client.keyslot(key)) if self.is_cluster else 0

    def keys_of(self, commands: Sequence[Sequence[bytes]]) -> Awaitable[list[bytes]]:
        """The keys that they would touch. Asked of a cluster only."""
        return apart(self._keys_of(commands))

    async def _keys_of(self, commands: Sequence[Sequence[bytes]]) -> list[bytes]:
        keys: list[bytes] = []
        async with self._talking():
            for command in commands:
                found = await self._keys_of_one(command)
                keys += [key if isinstance(key, bytes) else str(key).encode() for key in found]
        return keys

    async def _keys_of_one(self, command: Sequence[bytes]) -> Sequence[Any]:
        if command[0].upper() == b"PUBLISH":
            return ()  # a channel is in no slot
        try:
            return await self.client.commands_parser.get_keys(command[0].decode(), *command[1:]) or ()
        except (exceptions.ConnectionError, exceptions.TimeoutError):
            raise
        except exceptions.RedisError:
            return ()  # no such command, which the server will say

    async def primaries(self) -> list[Any]:
        """What can be scanned: each has a part of the keys. None stands for the one server."""
        if not self.is_cluster:
            return [None]
        async with _translated():
            await self.client.initialize()
        return sorted(self.client.get_primaries(), key=lambda node: str(node.name))

    async def run_on(self, node: Any, script: Script, *args: Any) -> Any:
        """A script without keys of its own, on this server."""
        aside = {} if node is None else {"target_nodes": node}
        async with self._talking():
            try:
                return await self.client.execute_command("EVALSHA", script.sha, 0, *args, **aside)
            except exceptions.NoScriptError:
                return await self.client.execute_command("EVAL", script.text, 0, *args, **aside)

    async def ask(self, node: Any, *command: str) -> Any:
        aside = {} if node is None else {"target_nodes": node}
        async with self._talking():
            return await self.client.execute_command(*command, **aside)

    def _talking(self) -> _translated:
        return _translated(self._room)

    async def close(self) -> None:
        """Of a client of ours."""
        if self._line is not None:
            await self._line.close()
        await self.client.aclose()
        if self.is_cluster:
            for nodes in ("nodes_cache", "startup_nodes"):  # aclose() does nothing while it looks for the cluster anew
                await self.client.nodes_manager.aclose(nodes)


class NotReplicated(StoreUnavailable):
    """Too few replicas have what was written, so it could be forgotten in a failover. Do not acknowledge."""


# --- clients ------------------------------------------------------------------------------------------------


def connect_one(url: str, **options: Any) -> Redis:
    """With a pool that lets wait who finds no connection free; redis-py's usual one refuses."""
    sizes = {"max_connections": MOST_CONNECTIONS, "timeout": SOCKET_TIMEOUT}
    pool = BlockingConnectionPool.from_url(url, **sizes | _patient(options, 1))  # Line tries again itself
    client: Redis = Redis.from_pool(pool)
    return client


def connect_cluster(url: str, **options: Any) -> RedisCluster:
    client: RedisCluster = RedisCluster.from_url(url, **_patient(options, TRIES))
    return client


def _patient(options: dict[str, Any], tries: int) -> dict[str, Any]:
    """redis-py would try for half a minute. A delivery that waits that long is delivered again meanwhile."""
    usual = {
        "retry": Retry(ExponentialBackoff(base=0.05, cap=0.5), tries),
        "socket_timeout": SOCKET_TIMEOUT,
        "socket_connect_timeout": SOCKET_TIMEOUT,
    }
    return usual | options


def _check_client(client: Any) -> None:
    if not isinstance(client, (Redis, RedisCluster)):
        raise UsageError(
            f"client= is a redis.asyncio.Redis or redis.asyncio.RedisCluster, not {type(client).__module__}."
            f"{type(client).__qualname__}"
        )
    kwargs = client.get_connection_kwargs()
    if kwargs.get("decode_responses"):
        raise UsageError("a client with decode_responses=True cannot read records, which are bytes: leave it away")


def _connections_of(client: RedisCluster) -> int:
    """For each of its servers."""
    return int(client.get_connection_kwargs().get("max_connections") or MOST_CONNECTIONS)


# --- errors -------------------------------------------------------------------------------------------------


_THEIRS = (exceptions.RedisError, exceptions.RedisClusterException, OSError, AttributeError)
"""Also what its client stumbles over when a connection is closed under it."""


class _translated:  # noqa: N801 - used as a block
    """What redis-py raises, as errors of a store; and room for one more, where there is a limit."""

    __slots__ = ("_room",)

    def __init__(self, room: asyncio.Semaphore | None = None) -> None:
        self._room = room

    async def __aenter__(self) -> None:
        if self._room is not None:
            await self._room.acquire()

    async def __aexit__(self, _kind: object, error: BaseException | None, _trace: object) -> None:
        if self._room is not None:
            self._room.release()
        if isinstance(error, _THEIRS) and not isinstance(error, StoreError):
            raise translated(error) from error


def translated(error: BaseException) -> StoreError:
    match error:
        case exceptions.ReadOnlyError():
            return StoreReadOnly(f"this server is a replica and read-only: {error}. Point the inbox at the primary.")
        case exceptions.OutOfMemoryError():
            return StoreUnavailable(f"the server is out of memory: {error}. Raise maxmemory, or keep records shorter.")
        case exceptions.AuthenticationError() | exceptions.NoPermissionError():
            return StoreError(f"the server refuses: {error}. Check the user and its rights.")
        case exceptions.ConnectionError() if "No connection available" in str(error):
            return StoreUnavailable("no connection is free. Do less at once, or raise max_connections=.")
        case exceptions.ConnectionError() | exceptions.TimeoutError() | OSError() | AttributeError():
            return StoreUnavailable(f"the server is not there: {error}")
        case exceptions.AskError() | exceptions.TryAgainError():
            return StoreUnavailable(f"the slot of this key is just moving to another server: {error}")
        case exceptions.ClusterError() | exceptions.RedisClusterException() | exceptions.BusyLoadingError():
            return StoreUnavailable(f"the cluster does not answer for this key: {error}")
        case _ if _is_passing(error):
            return StoreUnavailable(f"the server cannot write now: {error}")
        case _:
            return StoreError(f"the server said: {error}")


_PASSING = ("MISCONF", "NOREPLICAS", "CLUSTERDOWN", "MASTERDOWN", "TRYAGAIN", "BUSY", "LOADING", "UNBLOCKED")


def _is_passing(error: BaseException) -> bool:
    """What a server says in times of trouble, and not of a mistake."""
    return str(error).startswith(_PASSING) or isinstance(error, exceptions.TryAgainError)
