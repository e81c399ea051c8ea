"""Crash points: a store that calls you at named points of a unit of work, to kill, cancel or wait there."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

VERBS = ("mark", "claim", "claim_many", "commit", "fail")
QUEUE_VERBS = (
    "accept", "begin_turn", "claim_lanes", "take_lanes", "hold_lanes", "mark_start", "close_lanes", "close_and_commit",
    "release", "extend",
)  # fmt: skip
POINTS = tuple(f"{when} {verb}" for verb in VERBS + QUEUE_VERBS for when in ("before", "after"))
"""Between "after claim" or "after begin_turn" and "before commit" lies the handler, which can stop where it likes."""

Reached = Callable[[str], Awaitable[None]]


class PointStore:
    """Any store, with `reached(point)` awaited at each point."""

    def __init__(self, store: Any, reached: Reached) -> None:
        self._store = store
        self._reached = reached

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    @asynccontextmanager
    async def unit(self, **options: Any) -> AsyncIterator[_PointUnit]:
        async with self._store.unit(**options) as unit:
            yield _PointUnit(unit, self._reached)

    @asynccontextmanager
    async def join(self, tx: Any, **options: Any) -> AsyncIterator[_PointUnit]:
        async with self._store.join(tx, **options) as unit:
            yield _PointUnit(unit, self._reached)


class _PointUnit:
    def __init__(self, unit: Any, reached: Reached) -> None:
        self._unit = unit
        self._reached = reached

    def __getattr__(self, name: str) -> Any:
        verb = getattr(self._unit, name)
        if f"before {name}" not in POINTS:
            return verb

        async def pointed(*args: Any, **options: Any) -> Any:
            await self._reached(f"before {name}")
            value = await verb(*args, **options)
            await self._reached(f"after {name}")
            return value

        return pointed
