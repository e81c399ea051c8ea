"""Looking around: what lists and counts records, and sweeps them. It goes through all keys, step by step, so that the
server is never held up; its price is the number of keys, and not the number that is found.
"""

from __future__ import annotations

import heapq
from collections.abc import AsyncIterator
from contextlib import suppress
from datetime import datetime
from typing import TYPE_CHECKING, Any

from onceward.record import Record, State
from onceward.redis import scripts, value
from onceward.redis.scripts import Script
from onceward.redis.servers import Servers
from onceward.shield import finish
from onceward.stats import Part, QueueStats, Stats, stats_of
from onceward.store import Sweepable, SweptBatch

if TYPE_CHECKING:
    from onceward.redis.store import RedisStore

STEP = 1_000
"""Keys that one step looks at."""
ANY = -1
START = b"0"


class Looking:
    """The part of a unit that is not about one message."""

    _store: RedisStore
    _servers: Servers

    # --- steps ----------------------------------------------------------------------------------------------

    async def _walk(self, script: Script, *args: Any) -> AsyncIterator[list[Any]]:
        """What each step through the keys of each server finds."""
        for node in await self._servers.primaries():
            cursor = START
            while True:
                cursor, *found = await finish(self._servers.run_on(node, script, cursor, *args))
                yield found
                if cursor == START:
                    break

    def _scanning(self, consumer: str, states: tuple[State, ...], latest: int, step: int = STEP) -> list[Any]:
        """What scan.lua is told, behind its cursor."""
        letters = b"".join(value.LETTERS[state] for state in states)
        return [self._store.pattern(consumer), step, letters, latest]

    # --- lists and counts -----------------------------------------------------------------------------------

    async def records(
        self, consumer: str, states: tuple[State, ...], *, older: float | None, limit: int
    ) -> list[Record]:
        latest = ANY if older is None else await self._micros_ago(older)
        oldest: list[tuple[int, bytes]] = []
        async for found in self._walk(scripts.SCAN, *self._scanning(consumer, states, latest)):
            if found:
                oldest = heapq.nsmallest(limit, {*oldest, *zip(found[::2], found[1::2], strict=True)})
        records = await self._read(consumer, [key for _, key in oldest])
        return [record for record in records if record.state in states]

    async def _read(self, consumer: str, keys: list[bytes]) -> list[Record]:
        found: list[bytes | None] = [None] * len(keys)
        if keys:
            parts = await finish(self._servers.run_split(scripts.LOOK, keys, lambda _places: ()))
            for places, (_now, *replies) in parts:
                for place, reply in zip(places, replies, strict=True):
                    found[place] = reply
        return [value.record_of(consumer, one) for one in found if one is not None]

    async def stats(self, consumer: str) -> Stats:
        parts: list[Part] = []
        async for counts in self._walk(scripts.COUNT, self._store.pattern(consumer), STEP):
            parts += [
                Part(value.STATES[letter], number, day, hour, value.moment(oldest))
                for letter, number, day, hour, oldest in counts
            ]
        return stats_of(consumer, parts)

    async def queue_stats(self, consumer: str, *, worst: int = 20) -> QueueStats:  # noqa: ARG002 - there is no queue
        return QueueStats()

    async def consumers(self) -> list[str]:
        names: set[str] = set()
        async for [keys] in self._walk(scripts.NAMES, f"{self._store.prefix}:*", STEP):
            for key in keys:
                with suppress(ValueError):  # a key of somebody else's
                    names.add(value.consumer_of(key, self._store.prefix))
        return sorted(names)

    # --- sweeping -------------------------------------------------------------------------------------------

    async def sweep(
        self, consumer: str, what: Sweepable, older: float, *, batch: int, after: tuple[Any, Any] | None = None
    ) -> SweptBatch | None:
        """One step on one server. What has a time of its own, or has had the inbox's, the server deletes by itself."""
        nodes = await self._servers.primaries()
        number, cursor = after or (0, START)
        if what is Sweepable.EXPIRED or number >= len(nodes):
            return SweptBatch(0, more=False)
        latest = await self._micros_ago(older)
        asked = self._scanning(consumer, (State.PROCESSED,), latest, batch)
        cursor, *found = await finish(self._servers.run_on(nodes[number], scripts.SCAN, cursor, *asked))
        deleted = await self._sweep_keys(found[1::2], latest, delete=True)
        if cursor == START:
            number += 1
        return SweptBatch(deleted, more=number < len(nodes), last=(number, cursor))

    async def sweepable(self, consumer: str, older: float) -> int:
        latest, number = await self._micros_ago(older), 0
        async for found in self._walk(scripts.SCAN, *self._scanning(consumer, (State.PROCESSED,), latest)):
            number += await self._sweep_keys(found[1::2], latest, delete=False)
        return number

    async def _sweep_keys(self, keys: list[bytes], latest: int, *, delete: bool) -> int:
        if not keys:
            return 0
        parts = await finish(self._servers.run_split(scripts.SWEEP, keys, lambda _places: (latest, int(delete))))
        return sum(number for _, number in parts)

    # --- the clock ------------------------------------------------------------------------------------------

    async def now(self) -> datetime:
        return value.moment(await self._micros())

    async def _micros(self) -> int:
        [node, *_] = await self._servers.primaries()
        seconds, micros = await finish(self._servers.ask(node, "TIME"))
        return int(seconds) * 1_000_000 + int(micros)

    async def _micros_ago(self, seconds: float) -> int:
        return max(0, await self._micros() - round(seconds * 1_000_000))
