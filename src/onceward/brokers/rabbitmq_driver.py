"""What of aio-pika is used, and of aiormq and pamqp beneath it; and what it takes to wait for them.

The driver cancels whoever waits for a connection that is lost. So what waits for the broker does so in a task of its
own, and for a bounded time.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from contextlib import suppress
from typing import Any, TypeVar

from onceward.errors import MissingDriver

try:
    from aio_pika import Channel, Connection
    from aio_pika.abc import AbstractConnection, AbstractRobustConnection
    from aio_pika.connection import make_url
    from aio_pika.exceptions import CONNECTION_EXCEPTIONS
    from aiormq import exceptions as wrong
    from aiormq.abc import AbstractChannel as Wire
    from aiormq.abc import DeliveredMessage
    from pamqp import decode, encode
    from pamqp.commands import Basic
except ImportError as error:
    raise MissingDriver(
        "RabbitMQSource needs aio-pika, which is not installed: pip install 'onceward[rabbitmq]'", extra="rabbitmq"
    ) from error

__all__ = [
    "LOST", "PATIENCE", "SOON", "AbstractConnection", "AbstractRobustConnection", "Basic", "Channel", "Connection",
    "DeliveredMessage", "Wire", "bounded", "decode", "encode", "hushed", "make_url", "version_of", "wrong",
]  # fmt: skip

T = TypeVar("T")

LOST = (*CONNECTION_EXCEPTIONS, TimeoutError)
"""What the driver raises when the broker is not there."""
PATIENCE = 15.0
"""Seconds that a broker has to open something."""
SOON = 5.0
"""Seconds that it has to close something."""


async def bounded(work: Coroutine[Any, Any, T], seconds: float = PATIENCE) -> T:
    """In a task of its own: that the driver cancels it must not look like our own end."""
    task = asyncio.ensure_future(work)
    task.add_done_callback(_seen)
    try:
        await asyncio.wait({task}, timeout=seconds)
    finally:
        if not task.done():
            task.cancel()
            await asyncio.wait({task}, timeout=SOON)
    if not task.done() or task.cancelled():
        raise TimeoutError(f"no answer for {seconds:g} s, or the connection was lost")
    return task.result()


def _seen(task: asyncio.Future[Any]) -> None:
    """If nobody waits any more: asyncio must not warn about its error."""
    if not task.cancelled():
        task.exception()


async def hushed(work: Coroutine[Any, Any, Any]) -> None:
    """Closing: if that fails, it is closed as well."""
    with suppress(Exception):
        await bounded(work, SOON)


def version_of(connection: AbstractConnection) -> tuple[int, ...]:
    """Of RabbitMQ, as far as it is said; () for other brokers that speak its protocol."""
    transport = connection.transport
    if transport is None:
        return ()
    said = transport.connection.server_properties
    if said.get("product") != "RabbitMQ":
        return ()
    numbers = str(said.get("version", "")).partition("-")[0].split(".")
    return tuple(int(number) for number in numbers if number.isdigit())
