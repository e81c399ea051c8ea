"""What a source on Kafka is, whichever client it has: `kafka.py` and `confluent.py` only talk to the broker.

    pump         polls all the time, also while handlers run for minutes and nobody receives: the broker counts a member
                 that does not poll as dead. What it fetches goes into buffers; a partition whose buffer is full rests
    receive      takes from the buffers, of each partition about as much
    settle       an offset is committed soon after, up to the first that is not settled
    revoke       a partition is to be taken from us: nothing more of it begins, what has begun is waited for, then what
                 is settled is committed, and then it is let go
    lost         it was taken from us: the same without waiting or committing

`redelivers` is False: Kafka brings a record again only to another assignment, so `consume` keeps what has to be tried
again. Its offset holds the commit back meanwhile, and so the record is not lost with this process.
"""

from __future__ import annotations

import asyncio
import logging
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from datetime import timedelta
from types import TracebackType
from typing import Any, ClassVar, Literal, Self

from onceward import codec
from onceward.brokers import kafka_check
from onceward.brokers.envelope import ID_HEADERS, SOURCE_HEADERS, TYPE_HEADERS, Decode, Pick
from onceward.brokers.kafka_commits import Commits
from onceward.brokers.kafka_dead import DeadTopic, Letter
from onceward.brokers.kafka_delivery import KafkaDelivery
from onceward.brokers.kafka_partitions import Partition, Partitions
from onceward.brokers.kafka_records import Fetched, Order, envelope, raw_of
from onceward.errors import UsageError
from onceward.shield import finish
from onceward.store import Finding

log = logging.getLogger("onceward.kafka")

LAST_WORDS = 5.0
"""Seconds that leaving waits for the broker to hear what is settled."""
SHARE_OF_REBALANCE = 0.8
"""Of the time that the group waits for a member may go into waiting for handlers."""


class KafkaSourceBase(ABC):
    """The options, and all that needs no client."""

    redelivers: ClassVar[Literal[False]] = False
    settles_at_once: ClassVar[Literal[True]] = True
    """`settle` waits for nobody: it is noted, and committed later."""
    refused: ClassVar[dict[str, str]] = {
        "enable_auto_commit": "onceward commits what is settled, and nothing else may",
        "enable_auto_offset_store": "onceward commits what is settled, and nothing else may",
        "auto_commit_interval_ms": "onceward commits soon after something is settled",
        "group_id": "it is group=",
        "bootstrap_servers": "it is bootstrap=",
        "auto_offset_reset": "it is offset_reset=",
        "key_deserializer": "keys stay bytes; id= may be a function",
        "value_deserializer": "it is decode=",
    }
    """Options of the clients that are not for the user to give, and why."""

    def __init__(
        self,
        *topics: str,
        group: str,
        bootstrap: str | Sequence[str],
        id: Pick = ID_HEADERS,  # noqa: A002 - the words of the domain
        type: Pick = TYPE_HEADERS,  # noqa: A002
        source: Pick = SOURCE_HEADERS,
        decode: Decode | None = codec.decode,
        order: Order = "key",
        dead_topic: str | None = None,
        prefetch: int = 500,
        careful: int = 500,
        drain: float = 20.0,
        offset_reset: Literal["earliest", "latest", "none"] = "earliest",
        **client: Any,
    ) -> None:
        _check_names(topics, group, dead_topic)
        _check_numbers(prefetch=prefetch, careful=careful, drain=drain)
        if offset_reset not in ("earliest", "latest", "none"):
            raise UsageError(f'offset_reset={offset_reset!r}: it is "earliest", "latest" or "none"')
        self._topics = topics
        self._group = group
        self._bootstrap = bootstrap if isinstance(bootstrap, str) else ",".join(bootstrap)
        self._id = id
        self._envelope = envelope(id=id, type=type, source=source, decode=decode, order=order)
        self._dead_topic = dead_topic
        self._prefetch = prefetch
        self._careful = careful
        self._asked_drain = drain
        self._offset_reset = offset_reset
        self._client = {name: value for name, value in client.items() if not self._is_refused(name)}
        self._horizon: timedelta | None = None
        self._open = False
        self._begin()

    def _begin(self) -> None:
        """As nothing has been received yet."""
        self._news = asyncio.Event()
        self._failed: Exception | None = None
        self._leaving: set[Partition] = set()
        self._partitions = Partitions(prefetch=self._prefetch, careful=self._careful, room=self._made_room)
        self._commits = Commits(self._partitions, self._commit)
        self._dead = DeadTopic(self._dead_topic, self._group, self._produce) if self._dead_topic else None

    def _is_refused(self, name: str) -> bool:
        reason = self.refused.get(name.replace(".", "_"))
        if reason is not None:
            raise UsageError(f"KafkaSource takes no {name}=: {reason}")
        return False

    @property
    def name(self) -> str:
        return f"kafka:{','.join(self._topics)}"

    @property
    def assignment(self) -> int:
        return self._partitions.changes

    @property
    def redelivery_horizon(self) -> timedelta | None:
        """The longest retention of the topics, as `check` has read it. timedelta.max: there is no limit."""
        return self._horizon

    @property
    def drain(self) -> float:
        """Seconds that a rebalance is held up for what is at work, at most."""
        return min(self._asked_drain, self._patience_of_group * SHARE_OF_REBALANCE)

    # --- life -----------------------------------------------------------------------------------------------

    async def __aenter__(self) -> Self:
        if self._open:
            raise UsageError("this KafkaSource is open already")
        self._begin()
        await self._start()
        self._open = True
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._open = False
        self._news.set()
        await finish(self._leave())

    async def _leave(self) -> None:
        await self.flush(LAST_WORDS)
        for partition in self._leaving:
            partition.hurry()
        try:
            await self._stop()
        finally:
            await self._commits.stop()
            if self._dead is not None:
                await self._dead.stop()
            self._let_go(self._partitions.remove())

    # --- receiving ------------------------------------------------------------------------------------------

    async def receive(self, most: int) -> Sequence[KafkaDelivery]:
        while True:
            if self._failed is not None:
                raise self._failed
            if not self._open:
                raise UsageError("this KafkaSource is not open; use `async with`")
            self._news.clear()
            taken = self._partitions.take(most)
            if taken:  # nothing is awaited from here on, so nothing is lost by a cancellation
                return [self._delivery(*one) for one in taken]
            await self._news.wait()

    def _delivery(self, where: Partition, record: Fetched, redelivered: bool) -> KafkaDelivery:  # noqa: FBT001
        message, problem = self._envelope.open(raw_of(record))
        return KafkaDelivery(self, where, record, message, problem, redelivered=redelivered)

    # --- settling -------------------------------------------------------------------------------------------

    def settled(self, delivery: KafkaDelivery) -> None:
        clogged = delivery.where.clogged
        delivery.where.settle(delivery.record.offset)
        self._commits.soon()
        if clogged:
            self._news.set()

    def buried(self, delivery: KafkaDelivery, error: BaseException | None) -> bool:
        if self._dead is None:
            return False
        self._dead.send(delivery, error)
        return True

    async def flush(self, seconds: float = 10.0) -> None:
        """It comes back when the broker has heard it, or does not answer for so long."""
        if self._dead is not None:
            await self._dead.flush(seconds)
        await self._commits.flush(seconds)

    # --- rebalancing ----------------------------------------------------------------------------------------

    async def _drain(self, leaving: Iterable[Partition]) -> dict[Partition, int]:
        """What has begun is waited for; then they are gone, and this is to be committed."""
        leaving = set(leaving)
        self._leaving |= leaving
        try:
            async with asyncio.timeout(self.drain if self._open else 0.0):
                for partition in leaving:
                    await partition.quiet()
        except TimeoutError:
            late = sum(partition.begun for partition in leaving)
            log.warning("%d messages of partitions that are taken from us are still at work; they come again", late)
        self._leaving -= leaving
        self._let_go(leaving)
        return {one: offset for one in leaving if (offset := one.committable) is not None}

    def _let_go(self, partitions: Iterable[Partition]) -> None:
        for partition in partitions:
            partition.gone = True
        self._commits.wake()

    # --- checks ---------------------------------------------------------------------------------------------

    async def check(self) -> list[Finding]:
        found = kafka_check.of_options(drain=self._asked_drain, most=self.drain, **self._times())
        try:
            configs = await self._configs()
        except Exception as error:  # noqa: BLE001 - it may be forbidden to ask
            return [*found, kafka_check.unknown(error)]
        self._horizon = kafka_check.horizon(configs)
        return [*found, *kafka_check.of_topics(configs, self._id)]

    def _check_topics(self, there: Iterable[str], *, made_when_asked_for: bool) -> None:
        wanted = {*self._topics, *([self._dead_topic] if self._dead_topic else [])}
        missing = sorted(wanted.difference(there))
        if missing and not made_when_asked_for:
            raise UsageError(
                f"there is no topic {', '.join(missing)} at {self._bootstrap}, or {self._group} may not see it. "
                "Create it first: this broker does not make topics by itself"
            )

    # --- what a client does ---------------------------------------------------------------------------------

    @property
    @abstractmethod
    def _patience_of_group(self) -> float:
        """Seconds that the group waits for a member in a rebalance."""

    @abstractmethod
    def trouble(self) -> str | None: ...

    @abstractmethod
    async def _start(self) -> None:
        """Connect, look for the topics, and join the group."""

    @abstractmethod
    async def _stop(self) -> None:
        """Leave the group and close what is open, in bounded time."""

    @abstractmethod
    def _made_room(self) -> None:
        """A partition that rested has room again."""

    @abstractmethod
    async def _commit(self, offsets: dict[Partition, int]) -> None:
        """Raises TooLate, or what else went wrong."""

    @abstractmethod
    async def _produce(self, letters: list[Letter]) -> Sequence[Exception | None]: ...

    @abstractmethod
    async def _configs(self) -> kafka_check.Configs: ...

    @abstractmethod
    def _times(self) -> dict[str, Any]: ...


def _check_names(topics: Sequence[str], group: str, dead_topic: str | None) -> None:
    if not topics or not all(isinstance(topic, str) and topic for topic in topics):
        raise UsageError('KafkaSource wants the names of topics, as in KafkaSource("orders", group="billing", ...)')
    if not isinstance(group, str) or not group:
        raise UsageError("group= is the name of the consumer group")
    if dead_topic is not None and (not isinstance(dead_topic, str) or not dead_topic):
        raise UsageError("dead_topic= is the name of a topic, or None")
    if dead_topic in topics:
        raise UsageError(f"dead_topic={dead_topic!r} is one of the topics that are consumed: the dead would come again")


def _check_numbers(*, prefetch: int, careful: int, drain: float) -> None:
    if prefetch < 1:
        raise UsageError(f"prefetch={prefetch}: at least one record has to be fetched")
    if careful < 0 or drain < 0:
        raise UsageError("careful= and drain= cannot be negative")
