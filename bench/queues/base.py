"""What the questions about stored mode ask of a queue. Each is opened with connections of its own."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from importlib import import_module
from typing import Any, Protocol, TypeAlias, cast

from bench.messages import charge_of
from onceward import Message

CHARGE = "INSERT INTO charges (message_id, order_id, cents) VALUES ($1, $2, $3)"
"""The effect, as asyncpg wants it."""

Work: TypeAlias = Callable[[Message[Any]], Awaitable[bool]]
"""What a handler does besides: True, the effect is to be written too. It may raise."""


class Tally:
    """Handlers tell it what they have done; it knows when all is done."""

    def __init__(self, number: int, *, write: bool) -> None:
        self.all_done = asyncio.Event()
        self.done = 0
        self._number = number
        self._write = write

    async def work(self, _message: Message[Any]) -> bool:
        self.count()
        return self._write

    def count(self, number: int = 1) -> None:
        self.done += number
        if self.done >= self._number:
            self.all_done.set()


class Queue(Protocol):
    """One opened queue."""

    async def accept(self, message: Message[Any]) -> None:
        """Keep one, durably."""

    async def accept_many(self, messages: list[Message[Any]]) -> None:
        """As one list, where it takes lists."""

    async def fill(self, messages: list[Message[Any]]) -> None:
        """Before the clock starts: the quickest way in."""

    async def dispatch(self, work: Work) -> bool:
        """One message in one transaction. False: there was none."""

    async def run(self, work: Work, stop: asyncio.Event, *, workers: int = 1, batch: int | None = None) -> None:
        """Work until `stop` is set. `batch`: so many at once, where it can be said."""


class Kind(Protocol):
    """A module in this folder."""

    NAME: str
    KEPT: str
    """SQL: how many messages are in it."""
    SETTLED: str
    """SQL: how many of them are done."""
    EMPTY: str
    """SQL: forget everything."""
    SLOWS: bool
    """It gets slower with what it has done."""

    async def set_up(self, dsn: str) -> None: ...

    def opened(self, dsn: str, connections: int) -> AbstractAsyncContextManager[Queue]: ...


PEERS = ("ascetic_", "pgqueuer_")
MISSING = "not installed"


def peer(name: str) -> Kind | None:
    """None: the package is not installed."""
    try:
        return cast("Kind", import_module(f"bench.queues.{name}"))
    except ModuleNotFoundError as error:
        if error.name is None or error.name.startswith("bench"):
            raise
        return None


def peers() -> dict[str, Kind | None]:
    return {name.rstrip("_"): peer(name) for name in PEERS}


def row_of(payload: dict[str, Any], id_: str) -> tuple[str, str, int]:
    return id_, payload["order"], payload["cents"]


__all__ = ["CHARGE", "Kind", "Queue", "Tally", "Work", "charge_of", "peer", "peers", "row_of"]
