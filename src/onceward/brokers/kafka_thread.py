"""Pump: the thread that talks to librdkafka, from joining a group to leaving it.

It polls all the time, and nobody else may use its consumer: a call waits until the one of another thread is over, and
with a thread that always polls the event loop would stand still. So the loop leaves what it wants, a commit, and the
thread finds it between two polls.

Callbacks of a rebalance run inside of a poll, so in this thread. They wait for the event loop, where messages are
settled; the loop never waits for the thread, so these two cannot wait for each other. A handler that blocks the loop
does not stop the polling.

A partition that is paused loses what librdkafka has fetched of it ahead, and all of it is fetched once more. So a full
buffer is waited for a little before its partition is paused.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Iterable, Sequence
from contextlib import suppress
from queue import Empty, SimpleQueue
from threading import Event, Thread
from time import monotonic
from typing import Any, Protocol

from confluent_kafka import TIMESTAMP_NOT_AVAILABLE, Consumer, KafkaError, KafkaException, Message, TopicPartition

from onceward.brokers.kafka_partitions import Partition, Partitions, Place
from onceward.brokers.kafka_records import Fetched
from onceward.errors import BrokerUnavailable

log = logging.getLogger("onceward.kafka")

POLL, POLL_WHILE_FULL = 0.05, 0.02
"""Seconds that a poll waits for records, and so a commit for the poll."""
GRACE = 0.1
"""Seconds that a full buffer is waited for before its partition is paused."""
PROBE = 2.0
"""Seconds after an error until the broker is asked whether it is back."""
PAUSE = 0.5
"""Seconds before polling again after an error."""

_STAY = {
    KafkaError.INCONSISTENT_GROUP_PROTOCOL, KafkaError.INVALID_SESSION_TIMEOUT,
    KafkaError.GROUP_AUTHORIZATION_FAILED, KafkaError.TOPIC_AUTHORIZATION_FAILED,
}  # fmt: skip
"""Errors of a broker that is there: they are over when partitions or records come."""


class Source(Protocol):
    """What the thread needs of its source. The first three are called in the thread, the others in the loop."""

    def prepare(self, consumer: Consumer) -> None:
        """Before it joins: look whether the topics are there. Raises if not."""

    @property
    def patience(self) -> float:
        """Seconds that the loop may take for `drained`."""

    @property
    def partitions(self) -> Partitions: ...

    def drained(self, leaving: list[Partition]) -> Coroutine[Any, Any, dict[Partition, int]]:
        """Wait for what is at work, and say what is to be committed."""

    def arrived(self) -> None: ...

    def answered(self, error: KafkaError | None, offsets: list[TopicPartition]) -> None: ...

    def failed(self, error: Exception) -> None: ...


class Pump:
    def __init__(self, source: Source, topics: Sequence[str], options: dict[str, Any]) -> None:
        self._source = source
        self._topics = list(topics)
        self._loop = asyncio.get_running_loop()
        self._ready: asyncio.Future[None] = self._loop.create_future()
        self._over: asyncio.Future[None] = self._loop.create_future()
        self._stopping = Event()
        self._room = Event()
        self._paused: set[Place] = set()
        self._commits: SimpleQueue[list[TopicPartition]] = SimpleQueue()
        self._error_at = 0.0
        self._stays = False
        self.error: str | None = None
        theirs = options.get("error_cb")
        self._consumer = Consumer({**options, "error_cb": self._on_error(theirs), "on_commit": self._on_commit})
        self._thread = Thread(target=self._run, name=f"onceward-kafka-{options['group.id']}", daemon=True)

    # --- for the loop ---------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Comes back when it has joined, or raises why it could not."""
        self._thread.start()
        await asyncio.shield(self._ready)

    def made_room(self) -> None:
        self._room.set()

    def commit(self, offsets: list[TopicPartition]) -> None:
        """Soon. The source is told what became of it."""
        self._commits.put(offsets)

    async def stop(self, seconds: float) -> None:
        """Leave the group, so that others take over at once."""
        self._stopping.set()
        self._room.set()
        try:
            async with asyncio.timeout(seconds):
                await asyncio.shield(self._over)
        except TimeoutError:
            log.warning("the broker does not answer, and the thread of the consumer is left behind")

    # --- the thread -----------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            self._join()
            while not self._stopping.is_set():
                try:
                    self._poll()
                except Exception as error:  # noqa: BLE001 - it goes on, whatever it is
                    self._note(error)
                    self._stopping.wait(PAUSE)
        finally:
            self._close()
            self._tell(_resolve, self._over)

    def _join(self) -> None:
        try:
            self._source.prepare(self._consumer)
            self._consumer.subscribe(
                self._topics, on_assign=self._on_assign, on_revoke=self._on_revoke, on_lost=self._on_lost
            )
            self._tell(_resolve, self._ready)
        except Exception as error:  # noqa: BLE001 - who waits for it is told
            self._stopping.set()
            self._tell(_resolve, self._ready, error)

    def _close(self) -> None:
        try:
            self._consumer.close()
        except Exception as error:  # noqa: BLE001
            log.warning("the consumer could not be closed: %r", error)

    def _tell(self, callback: Callable[..., object], *args: Any) -> None:
        with suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(callback, *args)

    # --- polling --------------------------------------------------------------------------------------------

    def _poll(self) -> None:
        """One record is waited for; what is there besides it comes at once. To ask for many would wait for many."""
        self._balance()
        self._commit()
        message = self._consumer.poll(POLL_WHILE_FULL if self._paused else POLL)
        if message is None:
            self._look_for_broker()
            return
        self._put([message])
        more = self._source.partitions.portion - 1
        if more:
            self._put(self._consumer.consume(more, 0))

    def _put(self, messages: Iterable[Message]) -> None:
        found: dict[Place, list[Fetched]] = {}
        for message in messages:
            error = message.error()
            if error is None:
                record = _fetched(message)
                found.setdefault((record.topic, record.partition), []).append(record)
            else:
                self._note(KafkaException(error))
        for place, records in found.items():
            self._source.partitions.put(place, records)
        if found:
            self.error = None
            self._tell(self._source.arrived)

    def _commit(self) -> None:
        with suppress(Empty):
            while True:
                offsets = self._commits.get_nowait()
                try:
                    self._consumer.commit(offsets=offsets, asynchronous=True)
                except KafkaException as error:
                    self._on_commit(error.args[0], offsets)

    def _balance(self) -> None:
        """Pause partitions whose buffer is full, and go on with those that have room."""
        resting = self._source.partitions.resting()
        if resting - self._paused:
            self._room.clear()
            if resting == self._source.partitions.resting():
                self._room.wait(GRACE)
            resting = self._source.partitions.resting()
        pause, resume = resting - self._paused, self._paused - resting
        if pause:
            self._consumer.pause([TopicPartition(*place) for place in pause])
        if resume:
            self._consumer.resume([TopicPartition(*place) for place in resume])
        self._paused = resting

    # --- rebalancing ----------------------------------------------------------------------------------------

    def _on_assign(self, _consumer: Consumer, partitions: list[TopicPartition]) -> None:
        places = [(one.topic, one.partition) for one in partitions]
        self._source.partitions.add(places)
        self._paused.update(places)  # it may have been paused when it was ours before: so it is resumed
        self.error = None

    def _on_revoke(self, consumer: Consumer, partitions: list[TopicPartition]) -> None:
        leaving = self._remove(partitions)
        offsets = self._drained(leaving)
        if not offsets or self._stopping.is_set():  # who closes has tried to commit before
            return
        try:
            consumer.commit(offsets=places_of(offsets), asynchronous=False)
        except Exception as error:  # noqa: BLE001 - the records come again, and are duplicates
            log.warning("offsets could not be committed before a rebalance: %r", error)

    def _drained(self, leaving: list[Partition]) -> dict[Partition, int]:
        work = self._source.drained(leaving)
        try:
            return asyncio.run_coroutine_threadsafe(work, self._loop).result(self._source.patience)
        except Exception as error:  # noqa: BLE001 - the loop is blocked, or closed
            work.close()
            log.warning("nobody could be waited for before a rebalance: %r", error)
            self._give_up(leaving)
            return {}

    def _on_lost(self, _consumer: Consumer, partitions: list[TopicPartition]) -> None:
        self._give_up(self._remove(partitions))

    def _remove(self, partitions: list[TopicPartition]) -> list[Partition]:
        places = [(one.topic, one.partition) for one in partitions]
        self._paused.difference_update(places)
        return self._source.partitions.remove(places)

    def _give_up(self, leaving: list[Partition]) -> None:
        for partition in leaving:
            partition.gone = True

    # --- what librdkafka says -------------------------------------------------------------------------------

    def _on_commit(self, error: KafkaError | None, offsets: list[TopicPartition]) -> None:
        self._tell(self._source.answered, error, offsets)

    def _on_error(self, theirs: Callable[[KafkaError], object] | None) -> Callable[[KafkaError], None]:
        def heard(error: KafkaError) -> None:
            self._note(KafkaException(error))
            if error.fatal():
                self._tell(self._source.failed, BrokerUnavailable(f"the client cannot go on: {error}"))
            if theirs is not None:
                theirs(error)

        return heard

    def _note(self, error: Exception) -> None:
        """It is said once, until all is well again: without a broker there are many of them."""
        if self.error is None:
            log.warning("trouble with Kafka, it is tried again: %s", error)
        self.error, self._error_at, self._stays = str(error), monotonic(), _code(error) in _STAY

    def _look_for_broker(self) -> None:
        """librdkafka tells when a connection is lost, and not when it is back."""
        if self.error is not None and not self._stays and monotonic() - self._error_at > PROBE:
            try:
                self._consumer.list_topics(self._topics[0], timeout=PROBE / 2)
                self.error = None
            except KafkaException as error:
                self.error, self._error_at = str(error), monotonic()


def _code(error: Exception) -> int | None:
    said = error.args[0] if isinstance(error, KafkaException) else None
    return said.code() if isinstance(said, KafkaError) else None


def places_of(offsets: dict[Partition, int]) -> list[TopicPartition]:
    return [TopicPartition(*one.place, offset) for one, offset in offsets.items()]


def _fetched(message: Any) -> Fetched:
    kind, timestamp = message.timestamp()
    return Fetched(
        message.topic(), message.partition(), message.offset(), message.key(), message.value(), message.headers() or (),
        None if kind == TIMESTAMP_NOT_AVAILABLE else timestamp,
    )  # fmt: skip


def _resolve(future: asyncio.Future[None], error: Exception | None = None) -> None:
    if future.done():
        return
    if error is None:
        future.set_result(None)
    else:
        future.set_exception(error)
