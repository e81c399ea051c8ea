"""Heart: has the leases of all units that are at work for their whole time again, before a half of it is over.

One timer for the store, and not a task for each message: most are done before it beats for the first time. Each server
of a cluster has a beat of its own, so that one that does not answer is not in the way of the others.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress
from time import monotonic
from typing import Any, NamedTuple

import msgspec

from onceward.errors import StoreError

BEATS = 3
"""In the time of a lease. So one that is not heard is no harm."""
LAST_WORDS = 10.0
"""Seconds that closing a store waits for handlers at work."""


class Lease(NamedTuple):
    """Something that a unit holds."""

    unit: Any
    digest: bytes
    key: bytes
    fence: int


class _Pulse(msgspec.Struct, eq=False):
    """Of one server."""

    heard: float
    """When the last beat was sent that was answered, or its first lease was taken."""
    beating: asyncio.Task[None] | None = None
    missed: bool = False


class Heart:
    """`beat` is told some leases on one server, whose name `place` gives for a key."""

    def __init__(
        self, lease: float, beat: Callable[[list[Lease]], Awaitable[None]], place: Callable[[bytes], str]
    ) -> None:
        self._lease = lease
        self._beat = beat
        self._place = place
        self._units: set[Any] = set()
        self._pulses: dict[str, _Pulse] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._still: asyncio.Event | None = None

    def add(self, unit: Any) -> None:
        self._units.add(unit)
        if self._timer is None:
            self._wind_up()

    def remove(self, unit: Any) -> None:
        self._units.discard(unit)
        if not self._units and self._still is not None:
            self._still.set()

    def _wind_up(self) -> None:
        self._timer = asyncio.get_running_loop().call_later(self._lease / BEATS, self._tick)

    def _tick(self) -> None:
        self._timer = None
        if not self._units:
            self._pulses = {name: pulse for name, pulse in self._pulses.items() if _is_beating(pulse)}
            return
        self._wind_up()
        for name, leases in self._by_server().items():
            pulse = self._pulses.setdefault(name, _Pulse(monotonic()))
            if pulse.missed and monotonic() - pulse.heard > self._lease:
                for lease in leases:  # we are cut off, and others are not: for them these leases are over
                    lease.unit.lose(lease.digest)
            if _is_beating(pulse):
                pulse.missed = True
            else:
                pulse.beating = asyncio.ensure_future(self._beat_once(pulse, leases))

    def _by_server(self) -> dict[str, list[Lease]]:
        found: dict[str, list[Lease]] = {}
        for unit in self._units:
            for lease in unit.leases():
                found.setdefault(self._place(lease.key), []).append(lease)
        return found

    async def _beat_once(self, pulse: _Pulse, leases: list[Lease]) -> None:
        began = monotonic()
        pulse.missed = True
        with suppress(StoreError):  # the server has trouble: the next beat may be heard, or the leases end
            await self._beat(leases)
            pulse.heard, pulse.missed = began, False

    async def stop(self) -> None:
        """When nobody is at work any more, or that takes too long: then their leases end by themselves."""
        with suppress(TimeoutError):
            async with asyncio.timeout(LAST_WORDS):
                while self._units:
                    self._still = asyncio.Event()
                    await self._still.wait()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        beating = [pulse.beating for pulse in self._pulses.values() if pulse.beating is not None]
        await asyncio.gather(*beating, return_exceptions=True)  # not cancelled: see unit.py
        self._pulses.clear()


def _is_beating(pulse: _Pulse) -> bool:
    return pulse.beating is not None and not pulse.beating.done()
