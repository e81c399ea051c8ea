"""KafkaSource on aiokafka, which is all asyncio.

    async with KafkaSource("orders", group="billing", bootstrap="localhost:9092") as source:
        await consume(source, inbox)

Its rebalance is eager: whenever a member comes or goes, all partitions are taken from all members and given out anew.
So all of them drain each time. `onceward.brokers.confluent` has the same source with a client that keeps what stays.

The pump is a task. It names the partitions that it wants records of, which are those whose buffer has room; what
aiokafka has fetched of the others stays with aiokafka. (Its `pause` would throw that away, and fetch it once more.)
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import asynccontextmanager, suppress
from typing import Any

from onceward.brokers import kafka_check
from onceward.brokers.kafka_aiokafka import (
    LEAVE,
    AIOKafkaAdminClient,
    AIOKafkaConsumer,
    AIOKafkaProducer,
    CommitFailedError,
    ConfigResourceType,
    IllegalStateError,
    KafkaError,
    Listener,
    TopicPartition,
    described,
    is_broken,
    is_out,
    left,
    unless,
    within,
)
from onceward.brokers.kafka_commits import TooLate
from onceward.brokers.kafka_dead import Letter
from onceward.brokers.kafka_partitions import Partition, Place
from onceward.brokers.kafka_records import Fetched, key, offset
from onceward.brokers.kafka_source import SHARE_OF_REBALANCE, KafkaSourceBase
from onceward.errors import BrokerUnavailable, UsageError

__all__ = ["KafkaSource", "key", "offset"]

log = logging.getLogger("onceward.kafka")

CONNECT = 30.0
"""Seconds until a broker that does not answer counts as away."""
POLL = 1.0
"""Seconds that a poll waits for records."""
COMMIT = 10.0
"""Seconds that a rebalance may be held up by a commit."""
FIRST_PAUSE, LONGEST_PAUSE = 0.5, 5.0
"""Seconds before polling again after an error."""
LARGEST = 100 * 2**20
"""Bytes of a dead letter. What may be in a topic is for its broker to say."""

_NOBODY = TopicPartition("", -1)
"""Asked for when no buffer has room: nothing comes, and the group sees that we poll."""
_SHARED = (
    "client_id", "security_protocol", "ssl_context", "sasl_mechanism", "sasl_plain_username", "sasl_plain_password",
    "sasl_kerberos_service_name", "sasl_kerberos_domain_name", "sasl_oauth_token_provider", "retry_backoff_ms",
    "metadata_max_age_ms", "connections_max_idle_ms", "request_timeout_ms",
)  # fmt: skip
"""Options that its producer and its admin client take as well."""


class KafkaSource(KafkaSourceBase):
    """Topics of Kafka, as a member of a group. What is not named here goes to AIOKafkaConsumer."""

    _consumer: Any = None
    _producer: Any = None
    _pumping: asyncio.Task[None] | None = None
    _error: str | None = None

    def _begin(self) -> None:
        super()._begin()
        self._room = asyncio.Event()
        self._error = None

    def _made_room(self) -> None:
        self._room.set()

    # --- life -----------------------------------------------------------------------------------------------

    async def _start(self) -> None:
        try:
            async with asyncio.timeout(CONNECT):
                await self._connect()
        except BaseException as error:
            await self._stop()
            if isinstance(error, (KafkaError, OSError, TimeoutError)):
                raise BrokerUnavailable(f"Kafka at {self._bootstrap} cannot be reached: {error!r}") from error
            raise
        self._pumping = asyncio.create_task(self._pump())
        self._pumping.add_done_callback(self._ended)

    def _ended(self, pumping: asyncio.Task[None]) -> None:
        if self._pumping is pumping:  # nobody has stopped it
            self._failed = BrokerUnavailable("polling Kafka has ended, which must not be")
            self._news.set()

    async def _connect(self) -> None:
        await self._join()
        if self._dead_topic is not None:
            self._producer = AIOKafkaProducer(
                **self._shared(), acks="all", enable_idempotence=True, max_request_size=LARGEST
            )
            await self._producer.start()

    async def _join(self) -> None:
        self._consumer = self._made()
        await self._consumer.start()
        there = await self._consumer.topics()
        self._check_topics(there, made_when_asked_for=await self._makes_topics(there))
        self._consumer.subscribe(list(self._topics), listener=Listener(self._assigned, self._revoked))

    def _made(self) -> Any:
        try:
            return AIOKafkaConsumer(**self._options())
        except TypeError as error:
            raise UsageError(f"AIOKafkaConsumer refuses an option: {error}") from error

    async def _stop(self) -> None:
        pumping, self._pumping = self._pumping, None
        if pumping is not None:
            pumping.cancel()
            await asyncio.gather(pumping, return_exceptions=True)
        consumer, producer = self._consumer, self._producer
        self._consumer = self._producer = None
        if producer is not None:
            await within(LEAVE, producer.stop())
        if consumer is not None:
            await left(consumer)

    # --- options --------------------------------------------------------------------------------------------

    def _options(self) -> dict[str, Any]:
        # Others wait for us in a rebalance, in a request of theirs. Both have to last for longer than we drain.
        rebalance = round(max(30.0, self._asked_drain / SHARE_OF_REBALANCE) * 1000)
        rebalance = self._client.get("rebalance_timeout_ms", rebalance)
        defaults = {
            "rebalance_timeout_ms": rebalance,
            "request_timeout_ms": max(40_000, rebalance + 10_000),
            "isolation_level": "read_committed",
        }
        return {
            **defaults,
            **self._client,
            "bootstrap_servers": self._bootstrap,
            "group_id": self._group,
            "enable_auto_commit": False,
            "auto_offset_reset": self._offset_reset,
        }

    def _shared(self) -> dict[str, Any]:
        options = {name: self._client[name] for name in _SHARED if name in self._client}
        return {**options, "bootstrap_servers": self._bootstrap}

    @property
    def _patience_of_group(self) -> float:
        return float(self._options()["rebalance_timeout_ms"]) / 1000

    def _times(self) -> dict[str, Any]:
        options = self._options()
        return {
            "offset_reset": self._offset_reset,
            "isolation": options["isolation_level"],
            "heartbeat": options.get("heartbeat_interval_ms", 3000) / 1000,
            "session": options.get("session_timeout_ms", 10_000) / 1000,
        }

    # --- polling --------------------------------------------------------------------------------------------

    async def _pump(self) -> None:
        pause = FIRST_PAUSE
        while True:
            try:
                if await self._poll():
                    pause = FIRST_PAUSE
                self._error = None
            except Exception as error:  # noqa: BLE001 - it goes on, whatever it is
                self._error = repr(error)
                log.warning("polling %s failed, it is tried again: %r", self.name, error)
                await asyncio.sleep(pause)
                pause = min(pause * 2, LONGEST_PAUSE)

    async def _poll(self) -> bool:
        """Whether something came."""
        if self._consumer is None:
            await self._renew()
        elif is_broken(self._consumer):
            await self._give_up()
            raise BrokerUnavailable("the consumer has broken down, there will be a new one")
        found = await self._fetch()
        for place, records in found.items():
            self._partitions.put(tuple(place), [_fetched(record) for record in records])
        if found:
            self._news.set()
        return bool(found)

    async def _fetch(self) -> dict[Any, list[Any]]:
        self._room.clear()
        resting = self._partitions.resting()
        if not resting:
            return await self._get()
        hungry = [TopicPartition(*one.place) for one in self._partitions.all() if one.place not in resting]
        return await unless(self._room, self._get(*(hungry or [_NOBODY]))) or {}

    async def _get(self, *places: Any) -> dict[Any, list[Any]]:
        found: dict[Any, list[Any]] = await self._consumer.getmany(
            *places, timeout_ms=round(POLL * 1000), max_records=self._partitions.portion
        )
        return found

    async def _give_up(self) -> None:
        """Its own tasks have ended, by an error that aiokafka did not expect. It would stay silent."""
        consumer, self._consumer = self._consumer, None
        self._let_go(self._partitions.remove())
        if consumer is not None:
            await left(consumer)

    async def _renew(self) -> None:
        try:
            async with asyncio.timeout(CONNECT):
                await self._join()
        except BaseException:
            await self._give_up()
            raise

    def trouble(self) -> str | None:
        if self._error is not None:
            return self._error
        # It is forgotten when a request fails, such as a heartbeat, until it is found again.
        coordinator = getattr(self._consumer, "_coordinator", None)
        if coordinator is None or coordinator.coordinator_id is None:
            return f"the coordinator of group {self._group} at {self._bootstrap} is not reached"
        return None

    # --- rebalancing ----------------------------------------------------------------------------------------

    async def _revoked(self, places: Iterable[Place]) -> None:
        leaving = self._partitions.remove(places)
        if is_out(self._consumer):
            self._let_go(leaving)
            return
        offsets = await self._drain(leaving)
        await self._commits.stop()  # one that is tried again must not be heard when the partition is another's
        try:
            async with asyncio.timeout(COMMIT):
                await self._commit(offsets)
        except Exception as error:  # noqa: BLE001 - the records come again, and are duplicates
            log.warning("offsets could not be committed before a rebalance: %r", error)

    def _assigned(self, places: Iterable[Place]) -> None:
        self._partitions.add(places)

    async def _commit(self, offsets: dict[Partition, int]) -> None:
        """aiokafka tries again itself while the coordinator is away."""
        if self._consumer is None:
            raise TooLate("the consumer is closed")
        try:
            await self._consumer.commit({TopicPartition(*one.place): offset for one, offset in offsets.items()})
        except (CommitFailedError, IllegalStateError) as error:
            raise TooLate(str(error)) from error

    # --- producing, asking ----------------------------------------------------------------------------------

    async def _produce(self, letters: list[Letter]) -> Sequence[Exception | None]:
        sent = [await self._producer.send(self._dead_topic, one.value, one.key, headers=one.headers) for one in letters]
        answers = await asyncio.gather(*sent, return_exceptions=True)
        return [answer if isinstance(answer, Exception) else None for answer in answers]

    @asynccontextmanager
    async def _admin(self) -> AsyncIterator[Any]:
        admin = AIOKafkaAdminClient(**self._shared())
        try:
            await admin.start()
            yield admin
        finally:
            await admin.close()

    async def _makes_topics(self, there: Iterable[str]) -> bool:
        """Whether the broker does, when somebody asks for them. It is only asked if one is missing."""
        if {*self._topics}.issubset(there):
            return False
        with suppress(KafkaError):  # it may be forbidden to ask
            async with self._admin() as admin:
                node = str((await admin.describe_cluster())["brokers"][0]["node_id"])
                found = await described(admin, ConfigResourceType.BROKER, [node])
                return found[node].get("auto.create.topics.enable") == "true"
        return False

    async def _configs(self) -> kafka_check.Configs:
        async with asyncio.timeout(CONNECT), self._admin() as admin:
            return await described(admin, ConfigResourceType.TOPIC, self._topics)


def _fetched(record: Any) -> Fetched:
    return Fetched(
        record.topic, record.partition, record.offset, record.key, record.value, record.headers, record.timestamp
    )  # fmt: skip
