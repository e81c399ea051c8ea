"""What of aiokafka is used, and what it takes to live with it.

It is silent about its own end: a task of its own that breaks down leaves a consumer that never says anything again. And
it may take as long as its broker to close, or raise the cancellation of one of its tasks. So what waits for it does so
in a task of its own and for a bounded time.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Sequence
from typing import Any

from onceward.brokers.kafka_partitions import Place
from onceward.errors import MissingDriver

try:
    from aiokafka import AIOKafkaConsumer, AIOKafkaProducer, ConsumerRebalanceListener, TopicPartition
    from aiokafka.admin import AIOKafkaAdminClient
    from aiokafka.admin.config_resource import ConfigResource, ConfigResourceType
    from aiokafka.errors import CommitFailedError, IllegalStateError, KafkaError, for_code
except ImportError as error:
    raise MissingDriver(
        "onceward.brokers.kafka needs aiokafka, which is not installed: pip install 'onceward[kafka]'", extra="kafka"
    ) from error

__all__ = [
    "AIOKafkaAdminClient", "AIOKafkaConsumer", "AIOKafkaProducer", "CommitFailedError", "ConfigResourceType",
    "IllegalStateError", "KafkaError", "Listener", "TopicPartition", "described", "is_broken", "is_out", "left",
    "unless", "within",
]  # fmt: skip

LEAVE = 10.0
"""Seconds that leaving the group may take."""


class Listener(ConsumerRebalanceListener):  # type: ignore[misc]
    """Is told of a rebalance. It goes on when that has been awaited."""

    def __init__(
        self, assigned: Callable[[list[Place]], None], revoked: Callable[[list[Place]], Awaitable[None]]
    ) -> None:
        self._assigned = assigned
        self._revoked = revoked

    async def on_partitions_assigned(self, assigned: Iterable[Any]) -> None:
        self._assigned([(one.topic, one.partition) for one in assigned])

    async def on_partitions_revoked(self, revoked: Iterable[Any]) -> None:
        await self._revoked([(one.topic, one.partition) for one in revoked])


def is_out(consumer: Any) -> bool:
    """The group went on without us, and others have our partitions already. Its listener is not told."""
    return bool(consumer._coordinator.generation < 0)  # noqa: SLF001


async def described(admin: Any, kind: Any, names: Sequence[str]) -> dict[str, dict[str, str | None]]:
    found: dict[str, dict[str, str | None]] = {}
    for answer in await admin.describe_configs([ConfigResource(kind, name) for name in names]):
        for code, text, _kind, name, entries in answer.resources:
            if code:
                raise for_code(code)(text)
            found[name] = {entry[0]: entry[1] for entry in entries}
    return found


async def unless(event: asyncio.Event, work: Coroutine[Any, Any, Any]) -> Any:
    """The result, or None if the event comes first."""
    tasks = working, waiting = asyncio.ensure_future(work), asyncio.ensure_future(event.wait())
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        waiting.cancel()
        working.cancel()  # it gives no records away before its last step, so none are lost
        await asyncio.gather(*tasks, return_exceptions=True)
    return None if working.cancelled() else working.result()


def is_broken(consumer: Any) -> bool:
    coordinator, fetcher = consumer._coordinator, consumer._fetcher  # noqa: SLF001 - it does not tell
    return bool(coordinator._coordination_task.done() or fetcher.error_future.done())  # noqa: SLF001


async def left(consumer: Any) -> None:
    """Leave the group and close. Where the broker does not answer, what is left of it is taken down piece by piece."""
    if await within(LEAVE, consumer.stop()):
        return
    coordinator, fetcher, client = consumer._coordinator, consumer._fetcher, consumer._client  # noqa: SLF001
    if coordinator is not None:
        await within(1.0, coordinator._stop_heartbeat_task())  # noqa: SLF001
        await within(1.0, coordinator._stop_commit_offsets_refresh_task())  # noqa: SLF001
    if fetcher is not None:
        await within(1.0, fetcher.close())
    await within(1.0, client.close())


async def within(seconds: float, work: Coroutine[Any, Any, None]) -> bool:
    """Whether it came to its end. In a task of its own, as aiokafka may raise the cancellation of one of its own."""
    task = asyncio.ensure_future(work)
    try:
        await asyncio.wait([task], timeout=seconds)
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
    return not task.cancelled() and task.exception() is None
