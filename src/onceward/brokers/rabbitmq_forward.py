"""Forwarding: into a delay queue, from which a message comes back after a while, and into quarantine.

```
orders --(RETRY, 7 s)--> orders.retry.10 --(10 s later, by its TTL)--> orders
orders --(REJECT)------> orders.quarantine
```

**A message is never in no queue.** It is published with confirms, and only when the broker has confirmed it, whoever
asked acknowledges the original. In between there are two of it for a moment, and the second one is a duplicate.

A delay queue is made when it is needed, one for each step of a ladder, because messages leave a queue in their order: a
queue with delays of all kinds would keep short ones behind long ones. Where the broker can, it is a quorum queue whose
dead-lettering waits for the queue it goes back to (`at-least-once`). It goes away by itself (`x-expires`) when it was
not used for a week. For the broker it is no use to publish to it, nor, in the case of quorum queues, to declare it
again; only to take a message out is. So before the first message, and daily after that, one is taken out and given
back. Its time goes on meanwhile.

What is forwarded goes by a connection of its own, where we make the connections: a broker that is short of memory stops
reading from those who publish, and acknowledgements must not wait behind that.

If it cannot be done, the caller is told so, and keeps the message.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from contextlib import suppress
from time import monotonic
from typing import Any
from weakref import WeakValueDictionary

from onceward.brokers.rabbitmq_driver import (
    AbstractConnection,
    Basic,
    Channel,
    Wire,
    bounded,
    hushed,
    version_of,
    wrong,
)
from onceward.brokers.rabbitmq_line import Dialer

_log = logging.getLogger("onceward")

LADDER = (1, 2, 5, 10, 30, 60, 120, 300, 600, 1800, 3600)
"""Seconds. A delay is rounded up; one that is longer comes after the last, and is put off again."""
DAY = 86_400
UNUSED = 7 * DAY
"""Seconds after which a delay queue that nobody uses goes away."""
REST = 10.0
"""Seconds without another try when it could not be done."""
PATIENCE = 10.0
"""Seconds that a broker has to confirm."""
QUORUM_CAN_DELAY = (3, 10)
QUORUM = (3, 8)

Declare = Callable[[Wire], Awaitable[None]]


def step_for(delay: float) -> int:
    return next((step for step in LADDER if step >= delay), LADDER[-1])


def delay_arguments(queue: str, step: int, *, quorum: bool) -> dict[str, Any]:
    arguments: dict[str, Any] = {
        "x-message-ttl": step * 1000,
        "x-expires": (step + UNUSED) * 1000,
        "x-dead-letter-exchange": "",
        "x-dead-letter-routing-key": queue,
    }
    if quorum:
        safely = {"x-dead-letter-strategy": "at-least-once", "x-overflow": "reject-publish"}
        arguments |= {"x-queue-type": "quorum"} | safely
    return arguments


class Forwarder:
    def __init__(self, dialer: Dialer, queue: str, quarantine: str, *, delays: bool) -> None:
        self._dialer = dialer
        self._delays = delays
        self._queue = queue
        self._quarantine = quarantine
        self._connection: AbstractConnection | None = None
        self._channel: Channel | None = None
        self._opening = asyncio.Lock()
        self._known: dict[str, float] = {}
        """Queues that are there, and until when nothing has to be done for that."""
        self._twins: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        self._rests_until = 0.0
        self._ended = False

    async def delay(self, body: bytes, properties: Basic.Properties, seconds: float) -> bool:
        """Whether the broker has it, and brings it again after so long."""
        if not self._delays:
            return False
        step = step_for(seconds)
        name = f"{self._queue}.retry.{step}"
        return await self._forward(body, properties, name, lambda wire: self._make_delay(wire, name, step))

    async def quarantine(self, body: bytes, properties: Basic.Properties) -> bool:
        """Whether the broker has it there."""
        return await self._forward(body, properties, self._quarantine, self._make_quarantine)

    async def end(self) -> None:
        self._ended = True
        await self._close()

    async def _close(self) -> None:
        connection, self._connection = self._connection, None
        channel, self._channel = self._channel, None
        if channel is not None and not channel.is_closed:
            await hushed(channel.close())
        if connection is not None:
            await hushed(self._dialer.close(connection))

    # --- publishing -----------------------------------------------------------------------------------------

    async def _forward(self, body: bytes, properties: Basic.Properties, name: str, make: Declare) -> bool:
        if self._ended or monotonic() < self._rests_until:
            return False
        try:
            await bounded(self._send(body, properties, name, make), PATIENCE)
        except Exception as error:  # noqa: BLE001 - whatever it is, the caller keeps the message
            self._rests_until = monotonic() + REST
            why = f"{type(error).__name__}: {error}"
            _log.warning("nothing can be put into the queue %s, and messages wait in memory: %s", name, why)
            if isinstance(error, TimeoutError):
                await self._close()
            return False
        return True

    async def _send(self, body: bytes, properties: Basic.Properties, name: str, make: Declare) -> None:
        # The driver finds out by the message id which one came back. So there is one of an id at a time.
        alone = self._twins.setdefault(str(properties.message_id), asyncio.Lock())
        async with alone:
            wire = await self._open()
            await self._ensure(name, make)
            try:
                await self._publish(wire, body, properties, name)
            except wrong.PublishError:  # somebody has deleted the queue
                self._known.pop(name, None)
                await self._ensure(name, make)
                await self._publish(wire, body, properties, name)

    async def _publish(self, wire: Wire, body: bytes, properties: Basic.Properties, name: str) -> None:
        """Until it is confirmed. It raises if the broker refuses it, or has no such queue."""
        await wire.basic_publish(body, routing_key=name, properties=properties, mandatory=True)

    async def _open(self) -> Wire:
        async with self._opening:
            if self._channel is None or self._channel.is_closed:
                await self._close()
                self._connection = self._dialer.connection()
                await self._dialer.connect(self._connection)
                self._channel = Channel(self._connection, publisher_confirms=True, on_return_raises=True)
                await self._channel.initialize()
            return await self._channel.get_underlay_channel()

    # --- queues ---------------------------------------------------------------------------------------------

    async def _ensure(self, name: str, make: Declare) -> None:
        if monotonic() < self._known.get(name, 0.0):
            return
        await self._aside(make)
        self._known[name] = monotonic() + DAY

    async def _aside(self, work: Declare) -> None:
        """On a channel of its own, which the broker closes if it refuses."""
        if self._connection is None:
            raise ConnectionError("the connection was lost")
        channel = Channel(self._connection, publisher_confirms=False)
        await channel.initialize()
        try:
            await work(await channel.get_underlay_channel())
        finally:
            if not channel.is_closed:
                await channel.close()

    async def _make_delay(self, wire: Wire, name: str, step: int) -> None:
        quorum = self._version >= QUORUM_CAN_DELAY
        try:
            await wire.queue_declare(name, durable=True, arguments=delay_arguments(self._queue, step, quorum=quorum))
        except wrong.ChannelPreconditionFailed:
            if not quorum:
                raise
            # It may have been made before the broker could do better.
            await self._aside(lambda other: self._make_classic_delay(other, name, step))
        else:
            await _use(wire, name)

    async def _make_classic_delay(self, wire: Wire, name: str, step: int) -> None:
        await wire.queue_declare(name, durable=True, arguments=delay_arguments(self._queue, step, quorum=False))
        await _use(wire, name)

    async def _make_quarantine(self, wire: Wire) -> None:
        """One that is there is taken as it is."""
        with suppress(wrong.ChannelNotFoundEntity):
            await self._aside(lambda other: _is_there(other, self._quarantine))
            return
        arguments: dict[str, Any] = {"x-queue-type": "quorum"} if self._version >= QUORUM else {}
        await wire.queue_declare(self._quarantine, durable=True, arguments=arguments)

    @property
    def _version(self) -> tuple[int, ...]:
        return version_of(self._connection) if self._connection is not None else ()


async def _is_there(wire: Wire, name: str) -> None:
    await wire.queue_declare(name, passive=True)


async def _use(wire: Wire, name: str) -> None:
    """For the broker only this is use. What was taken out goes back to its place, and its time goes on."""
    taken = await wire.basic_get(name)
    if taken.delivery_tag is not None:
        await wire.basic_nack(taken.delivery_tag, requeue=True)
