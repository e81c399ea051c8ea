"""A flow: one consumer with connections of its own, as another process would be."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any, Protocol, TypeAlias

import asyncpg

from bench import postgres
from bench.messages import charge_of
from onceward import Message

Write: TypeAlias = Callable[[Message[Any]], Awaitable[Any]]
"""Writes the effect of a message, through whatever connection the flow has for that."""

Handler: TypeAlias = Callable[[Message[Any], Write], Awaitable[Any]]
Process: TypeAlias = Callable[[Message[Any], Handler], Awaitable[None]]
"""Returns: the broker is told that it is done. Raises: it will be delivered again."""


class Flow(Protocol):
    """A module in this folder."""

    NAME: str

    async def set_up(self, dsn: str) -> None:
        """Make the tables."""

    def consumer(self, dsn: str, connections: int) -> AbstractAsyncContextManager[Process]: ...


CHARGE = "INSERT INTO charges (message_id, order_id, cents) VALUES ($1, $2, $3)"


@asynccontextmanager
async def writing_elsewhere(dsn: str, connections: int) -> AsyncIterator[Write]:
    """For flows that give their handler no transaction: it writes through a pool of its own, and commits at once."""
    pool: asyncpg.Pool
    async with postgres.pool(dsn, connections) as pool:

        async def write(message: Message[Any]) -> None:
            await pool.execute(CHARGE, *charge_of(message))

        yield write
