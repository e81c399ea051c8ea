"""LISTEN: hear at once that a message was accepted, on a connection of its own.

It is a courtesy: a worker that cannot listen, or whose connection is lost, looks by itself after its poll interval.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from typing import TypeAlias

_log = logging.getLogger("onceward")

AGAIN_AFTER = 1.0
"""Seconds until a lost connection is made again."""

Ring: TypeAlias = Callable[[], None]
Listen: TypeAlias = Callable[[str, Ring], Awaitable[None]]
"""Connect, listen to a channel, ring once and then for each call; returns when the connection is lost."""


@asynccontextmanager
async def listening(listen: Listen, channel: str, ring: Ring) -> AsyncIterator[None]:
    task = asyncio.ensure_future(_keep_listening(listen, channel, ring))
    try:
        yield
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task


async def _keep_listening(listen: Listen, channel: str, ring: Ring) -> None:
    while True:
        try:
            await listen(channel, ring)
        except Exception as error:  # noqa: BLE001 - whatever it is, polling goes on
            _log.debug("not listening: %s", error)
        await asyncio.sleep(AGAIN_AFTER)
