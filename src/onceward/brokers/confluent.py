"""KafkaSource on confluent-kafka, whose client is librdkafka.

    from onceward.brokers.confluent import KafkaSource

The same options as `onceward.brokers.kafka`. Its rebalance is cooperative: a partition that stays with us is not
touched, and goes on while others come and go. A thread of its own talks to the client, see `kafka_thread`.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, ClassVar

from onceward.brokers import kafka_check
from onceward.brokers.kafka_commits import TooLate
from onceward.brokers.kafka_dead import Letter
from onceward.brokers.kafka_partitions import Partition, Partitions
from onceward.brokers.kafka_records import key, offset
from onceward.brokers.kafka_source import KafkaSourceBase
from onceward.errors import BrokerUnavailable, MissingDriver, UsageError

try:
    from confluent_kafka import Consumer, KafkaError, KafkaException, Producer, TopicPartition
    from confluent_kafka.admin import AdminClient, ConfigResource, ResourceType  # type: ignore[attr-defined]
except ImportError as error:
    raise MissingDriver(
        "onceward.brokers.confluent needs confluent-kafka, which is not installed: pip install 'onceward[confluent]'",
        extra="confluent",
    ) from error

from onceward.brokers.kafka_thread import Pump, places_of

__all__ = ["KafkaSource", "key", "offset"]

log = logging.getLogger("onceward.kafka")

CONNECT = 30.0
"""Seconds until a broker that does not answer counts as away."""
COMMIT = 10.0
"""Seconds that a commit may take."""
PRODUCE = 10.0
"""Seconds that a dead letter may take."""
LEAVE = 15.0
"""Seconds that leaving the group may take."""
LARGEST = 100 * 2**20
"""Bytes of a dead letter. What may be in a topic is for its broker to say."""

_AS_THEY_ARE = {"logger", "log_level", "oauth_cb", "error_cb", "stats_cb", "throttle_cb"}
"""Options that are no properties of librdkafka, whose names have dots."""
_SHARED = (
    "client.", "security.", "sasl.", "ssl.", "enable.s", "https.", "socket.", "broker.", "reconnect.", "log",
    "oauth_cb",
)  # fmt: skip
"""How options begin that a producer and an admin client take as well."""
_TOO_LATE = {KafkaError.ILLEGAL_GENERATION, KafkaError.UNKNOWN_MEMBER_ID, KafkaError.REBALANCE_IN_PROGRESS}


class KafkaSource(KafkaSourceBase):
    """Topics of Kafka, as a member of a group. What is not named here goes to librdkafka: `session_timeout_ms=6000`, or
    `**{"session.timeout.ms": 6000}`."""

    refused: ClassVar[dict[str, str]] = {**KafkaSourceBase.refused, "on_commit": "onceward commits what is settled"}

    _pump: Pump | None = None
    _producer: Any = None
    _answer: asyncio.Future[KafkaError | None] | None = None
    _asked: Sequence[TopicPartition] = ()

    # --- life -----------------------------------------------------------------------------------------------

    async def _start(self) -> None:
        try:
            self._pump = Pump(self, self._topics, self._options())
            if self._dead_topic is not None:
                self._producer = Producer(self._for_producer())
        except KafkaException as error:
            raise UsageError(f"librdkafka refuses an option: {error}") from error
        try:
            await self._pump.start()
        except BaseException:
            await self._stop()
            raise

    async def _stop(self) -> None:
        pump, self._pump, self._producer = self._pump, None, None
        if pump is not None:
            await pump.stop(LEAVE)

    def _made_room(self) -> None:
        if self._pump is not None:
            self._pump.made_room()

    def trouble(self) -> str | None:
        return "not connected" if self._pump is None else self._pump.error

    # --- options --------------------------------------------------------------------------------------------

    def _options(self) -> dict[str, Any]:
        asked = {_dotted(name): value for name, value in self._client.items()}
        defaults: dict[str, Any] = {
            "isolation.level": "read_committed",
            "allow.auto.create.topics": True,
            "logger": log,
            "log_level": 2,  # we hear of errors ourselves, and without a broker it would write without end
        }
        if asked.get("group.protocol", "classic") == "classic":
            defaults["partition.assignment.strategy"] = "cooperative-sticky"
        return {
            **defaults,
            **asked,
            "bootstrap.servers": self._bootstrap,
            "group.id": self._group,
            "enable.auto.commit": False,
            "enable.auto.offset.store": False,
            "auto.offset.reset": "error" if self._offset_reset == "none" else self._offset_reset,
        }

    def _shared(self) -> dict[str, Any]:
        options = {name: value for name, value in self._options().items() if name.startswith(_SHARED)}
        return {**options, "bootstrap.servers": self._bootstrap}

    def _for_producer(self) -> dict[str, Any]:
        return {
            **self._shared(),
            "enable.idempotence": True,  # which is acks=all
            "message.timeout.ms": round(PRODUCE * 1000),
            "message.max.bytes": LARGEST,
            "partitioner": "murmur2_random",  # as other clients do
        }

    @property
    def _patience_of_group(self) -> float:
        return float(self._options().get("max.poll.interval.ms", 300_000)) / 1000

    def _times(self) -> dict[str, Any]:
        options = self._options()
        return {
            "offset_reset": self._offset_reset,
            "isolation": options["isolation.level"],
            "heartbeat": float(options.get("heartbeat.interval.ms", 3000)) / 1000,
            "session": float(options.get("session.timeout.ms", 45_000)) / 1000,
        }

    # --- for the thread -------------------------------------------------------------------------------------

    @property
    def partitions(self) -> Partitions:
        return self._partitions

    @property
    def patience(self) -> float:
        return self.drain + 2.0

    def prepare(self, consumer: Consumer) -> None:
        try:
            found = consumer.list_topics(timeout=CONNECT)
        except KafkaException as error:
            raise BrokerUnavailable(f"Kafka at {self._bootstrap} cannot be reached: {error}") from error
        there = [name for name, topic in found.topics.items() if topic.error is None]
        makes = not {*self._topics}.issubset(there) and self._makes_topics(next(iter(found.brokers)))
        self._check_topics(there, made_when_asked_for=makes)

    async def drained(self, leaving: Iterable[Partition]) -> dict[Partition, int]:
        return await self._drain(leaving)

    def arrived(self) -> None:
        self._news.set()

    def failed(self, error: Exception) -> None:
        self._failed = error
        self._news.set()

    # --- committing -----------------------------------------------------------------------------------------

    async def _commit(self, offsets: dict[Partition, int]) -> None:
        """Its answer comes through a poll. One is on its way at a time."""
        if self._pump is None:
            raise TooLate("the consumer is closed")
        self._asked = places_of(offsets)
        self._answer = asyncio.get_running_loop().create_future()
        async with asyncio.timeout(COMMIT):
            self._pump.commit(list(self._asked))
            error = await self._answer
        if error is not None:
            raise TooLate(str(error)) if error.code() in _TOO_LATE else KafkaException(error)

    def answered(self, error: KafkaError | None, offsets: list[TopicPartition]) -> None:
        late = {(one.topic, one.partition, one.offset) for one in offsets} != {
            (one.topic, one.partition, one.offset) for one in self._asked
        }
        if late or self._answer is None or self._answer.done():
            return
        self._answer.set_result(error or next((one.error for one in offsets if one.error is not None), None))

    # --- producing, asking ----------------------------------------------------------------------------------

    async def _produce(self, letters: list[Letter]) -> Sequence[Exception | None]:
        return await asyncio.to_thread(_produced, self._producer, str(self._dead_topic), letters)

    def _makes_topics(self, broker: int) -> bool:
        """Whether the broker does, when somebody asks for them."""
        admin = AdminClient(self._shared())
        (asked,) = admin.describe_configs([ConfigResource(ResourceType.BROKER, str(broker))]).values()
        with suppress(KafkaException):  # it may be forbidden to ask
            found = asked.result(CONNECT).get("auto.create.topics.enable")
            return found is not None and found.value == "true"
        return False

    async def _configs(self) -> kafka_check.Configs:
        admin = AdminClient(self._shared())
        asked = admin.describe_configs([ConfigResource(ResourceType.TOPIC, topic) for topic in self._topics])
        async with asyncio.timeout(CONNECT):
            answers = {one.name: await asyncio.wrap_future(answer) for one, answer in asked.items()}
        return {name: {entry.name: entry.value for entry in found.values()} for name, found in answers.items()}


def _produced(producer: Any, topic: str, letters: list[Letter]) -> Sequence[Exception | None]:
    answers: list[Exception | None] = [TimeoutError("the broker did not answer") for _ in letters]

    def hear(number: int, error: KafkaError | None, _message: object) -> None:
        answers[number] = None if error is None else KafkaException(error)

    for number, one in enumerate(letters):
        producer.produce(topic, one.value, one.key, headers=one.headers, on_delivery=partial(hear, number))
    producer.flush(PRODUCE + 5.0)  # by then each has been answered or has timed out
    return answers


def _dotted(name: str) -> str:
    return name if "." in name or name in _AS_THEY_ARE else name.replace("_", ".")
