"""The sources on Kafka, both clients, on a real broker: what is received, settled, committed and taken away."""

from __future__ import annotations

import asyncio
import importlib
import json
import logging
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Sequence
from contextlib import AsyncExitStack, suppress
from datetime import UTC, datetime, timedelta
from secrets import token_hex
from typing import Any

import pytest
from confluent_kafka import Consumer, Producer, TopicPartition

from onceward.brokers import kafka_partitions, kafka_source
from onceward.brokers.kafka_delivery import KafkaDelivery
from onceward.brokers.kafka_records import key, offset
from onceward.brokers.kafka_source import KafkaSourceBase
from onceward.errors import BrokerUnavailable, PayloadUndecodable, Reject, UsageError
from onceward.outcome import Kind, Outcome, Verdict
from onceward.testing.waiting import until
from tests.conftest import missing
from tests.services import kafka
from tests.services.kafka import Broker, Kafka

pytestmark = pytest.mark.xdist_group("kafka")

DRIVERS = ["kafka", "confluent"]
QUICK = {"heartbeat_interval_ms": 200, "session_timeout_ms": 6000}
"""So that a member hears of a rebalance soon."""
NONE = 0.7
"""Seconds in which what must not come would have come."""


class Lab:
    """A topic and a group of its own."""

    def __init__(self, server: Broker, driver: str) -> None:
        self.server = server
        self.driver = driver
        self.make = importlib.import_module(f"onceward.brokers.{driver}").KafkaSource
        self.topic = f"topic-{token_hex(4)}"
        self.group = f"group-{token_hex(4)}"
        self._producer = Producer({"bootstrap.servers": server.bootstrap, "log_level": 0})

    def create(self, partitions: int = 1, **config: str | int) -> None:
        self.server.create_topic(self.topic, partitions, **config)

    def source(self, **options: Any) -> KafkaSourceBase:
        made = {"group": self.group, "bootstrap": self.server.bootstrap, **QUICK, **options}
        source: KafkaSourceBase = self.make(self.topic, **made)
        return source

    def produce(self, *ids: str | int, partition: int = 0, topic: str | None = None) -> None:
        for id_ in ids:
            value = json.dumps({"n": id_}).encode()
            headers = [("id", str(id_).encode())]
            self._producer.produce(topic or self.topic, value, partition=partition, headers=headers)
        assert self._producer.flush(30) == 0

    def produce_raw(self, value: bytes | None, **record: Any) -> None:
        self._producer.produce(self.topic, value, **record)
        assert self._producer.flush(30) == 0

    def committed(self, partition: int = 0) -> int | None:
        """Asked by a consumer, as an admin client of librdkafka 2.16 dies of an answer that is an error."""
        asking = Consumer({"bootstrap.servers": self.server.bootstrap, "group.id": self.group, "log_level": 0})
        try:
            (found,) = asking.committed([TopicPartition(self.topic, partition)], timeout=30)
        finally:
            asking.close()
        return found.offset if found.offset >= 0 else None

    async def until_committed(self, offset_: int, partition: int = 0) -> None:
        await until(lambda: self.committed(partition) == offset_)

    def all_of(self, topic: str, number: int) -> list[Any]:
        """The first records of a topic, read without a group."""
        consumer = Consumer(
            {"bootstrap.servers": self.server.bootstrap, "group.id": token_hex(4), "enable.auto.commit": False}
        )
        consumer.assign([TopicPartition(topic, 0, 0)])
        found: list[Any] = []
        deadline = time.monotonic() + 30
        while len(found) < number and time.monotonic() < deadline:
            message = consumer.poll(0.2)
            if message is not None and message.error() is None:
                found.append(message)
        consumer.close()
        return found


@pytest.fixture
def real(kafka_server: Broker) -> Broker:
    if kafka_server.is_mock:
        missing("only a mock of Kafka here, which knows too little of this")
    return kafka_server


@pytest.fixture
def ours(real: Broker) -> Kafka:
    """One that may be stopped."""
    if not isinstance(real, Kafka):
        missing(f"no Kafka here that may be stopped; set {kafka.HOME_VARIABLE}")
    return real


@pytest.fixture(params=DRIVERS)
def lab(real: Broker, request: pytest.FixtureRequest) -> Lab:
    return Lab(real, request.param)


async def receive(source: KafkaSourceBase, number: int, most: int = 100) -> list[KafkaDelivery]:
    """So many, however many calls it takes."""
    found: list[KafkaDelivery] = []
    async with asyncio.timeout(40):
        while len(found) < number:
            found += await source.receive(min(most, number - len(found)))
    return found


async def nothing_comes(source: KafkaSourceBase) -> bool:
    try:
        async with asyncio.timeout(NONE):
            await source.receive(1)
    except TimeoutError:
        return True
    return False


def ids(deliveries: Iterable[KafkaDelivery]) -> list[str]:
    return [delivery.message.id for delivery in deliveries]


async def settle(deliveries: Sequence[KafkaDelivery], verdict: Verdict = Verdict.ACK) -> None:
    for delivery in deliveries:
        assert delivery.begin()
        await delivery.settle(verdict)


# --- receiving ----------------------------------------------------------------------------------------------


async def test_records_of_a_partition_come_in_their_order_and_all_partitions_get_a_turn(lab: Lab) -> None:
    lab.create(partitions=3)
    for partition in range(3):
        lab.produce(*(f"{partition}-{number}" for number in range(100)), partition=partition)
    async with lab.source() as source:
        found = await receive(source, 300, most=30)
        for partition in range(3):
            mine = [one for one in found if one.partition == f"{lab.topic}/{partition}"]
            assert ids(mine) == [f"{partition}-{number}" for number in range(100)]


async def test_what_comes_later_is_received_without_delay(lab: Lab) -> None:
    lab.create()
    async with lab.source() as source:
        for number in range(20):
            lab.produce(number)
            assert ids(await receive(source, 1)) == [str(number)]


async def test_a_cancelled_receive_loses_nothing(lab: Lab) -> None:
    lab.create()
    found: list[KafkaDelivery] = []
    async with lab.source() as source:
        for number in range(30):
            waiting = asyncio.ensure_future(source.receive(5))
            lab.produce(number)
            for _ in range(number % 7):
                await asyncio.sleep(0.001)
            waiting.cancel()
            with suppress(asyncio.CancelledError):
                found += await waiting
        found += await receive(source, 30 - len(found))
    assert ids(found) == [str(number) for number in range(30)]


async def test_a_full_buffer_makes_its_partition_wait_and_no_other(lab: Lab) -> None:
    lab.create(partitions=2)
    async with lab.source(prefetch=10) as source:
        lab.produce(*range(300))
        await until(lambda: source._partitions.resting())
        held = await receive(source, 5)
        lab.produce("other", partition=1)
        await until(lambda: any(one.buffer and one.place[1] == 1 for one in source._partitions.all()))
        assert max(len(one.buffer) for one in source._partitions.all()) <= 10
        found = held + await receive(source, 296, most=7)
    assert [one for one in ids(found) if one != "other"] == [str(number) for number in range(300)]


async def test_a_message_that_stays_unsettled_stops_its_partition_at_last_and_no_other(
    lab: Lab, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kafka_partitions, "MOST_AHEAD", 20)
    lab.create(partitions=2)
    lab.produce(*range(100))
    async with lab.source(prefetch=10) as source:
        first, *later = await receive(source, 21)
        await settle(later)
        assert await nothing_comes(source)
        lab.produce("other", partition=1)
        assert ids(await receive(source, 1)) == ["other"]
        await settle([first])
        assert ids(await receive(source, 79)) == [str(number) for number in range(21, 100)]


# --- what a record becomes ----------------------------------------------------------------------------------


async def test_a_record_becomes_a_message_with_everything_that_came(lab: Lab) -> None:
    lab.create()
    sent = datetime(2024, 5, 1, 12, 30, tzinfo=UTC)
    lab.produce_raw(
        b'{"a": 1}',
        key=b"o-1",
        timestamp=int(sent.timestamp() * 1000),
        headers=[
            ("id", b"e-1"),
            ("type", b"order.paid"),
            ("ce_source", b"shop"),
            ("x", b"1"),
            ("x", b"2"),
            ("b", b"\xff"),
        ],
    )
    async with lab.source() as source:
        (one,) = await receive(source, 1)
    message = one.message
    assert (message.id, message.type, message.source) == ("e-1", "order.paid", "shop")
    assert (message.payload, message.body) == ({"a": 1}, b'{"a": 1}')
    assert (message.topic, message.stream) == (lab.topic, f"kafka://{lab.topic}/o-1")
    assert message.occurred_at == sent
    assert message.headers["x"] == ["1", "2"]
    assert message.headers["b"] == {"base64": "/w=="}
    assert one.origin == f"kafka://{lab.topic}/0/0"
    assert (one.partition, one.problem) == (f"{lab.topic}/0", None)


async def test_a_cloudevent_in_one_piece_is_unpacked(lab: Lab) -> None:
    lab.create()
    event = {"specversion": "1.0", "id": "e-1", "source": "shop", "type": "order.paid", "data": {"a": 1}}
    body = json.dumps(event).encode()
    lab.produce_raw(body, key=b"k", headers=[("content-type", b"application/cloudevents+json; charset=UTF-8")])
    async with lab.source() as source:
        (one,) = await receive(source, 1)
    message = one.message
    assert (message.id, message.source, message.type, message.payload) == ("e-1", "shop", "order.paid", {"a": 1})
    assert (message.topic, message.stream, message.body) == (lab.topic, f"kafka://{lab.topic}/k", body)
    assert one.problem is None


async def test_a_tombstone_is_a_message_without_payload_and_body(lab: Lab) -> None:
    lab.create()
    lab.produce_raw(None, key=b"k", headers=[("id", b"gone")])
    async with lab.source() as source:
        (one,) = await receive(source, 1)
    assert (one.message.id, one.message.payload, one.message.body, one.problem) == ("gone", None, None, None)


async def test_a_body_that_is_no_json_is_a_problem_and_is_kept(lab: Lab) -> None:
    lab.create()
    lab.produce_raw(b"{", headers=[("id", b"bad")])
    lab.produce_raw(b"plain", headers=[("id", b"plain")])
    async with lab.source() as source:
        bad, _plain = await receive(source, 2)
    assert isinstance(bad.problem, PayloadUndecodable)
    assert (bad.message.id, bad.message.body) == ("bad", b"{")
    lab.group = f"{lab.group}-2"
    async with lab.source(decode=None) as source:
        _bad, plain = await receive(source, 2)
    assert (plain.problem, plain.message.payload, plain.message.body) == (None, None, b"plain")


async def test_a_record_without_an_id_is_a_problem_that_names_the_ways_out_and_their_risks(lab: Lab) -> None:
    lab.create()
    lab.produce_raw(b"{}", key=b"k-1")
    async with lab.source() as source:
        (one,) = await receive(source, 1)
    assert isinstance(one.problem, Reject)
    for said in ("message_id, id, ce_id", "id=offset", "two messages", "id=key", "one message"):
        assert said in str(one.problem)


@pytest.mark.parametrize(
    ("option", "found"),
    [
        (offset, "{topic}/0/0"),
        (key, "k-1"),
        ("x-id", "h"),
        (["nope", "x-id"], "h"),
        (lambda raw: raw.body.decode(), "1"),
    ],
    ids=["offset", "key", "header", "headers", "function"],
)
async def test_an_id_can_be_taken_from_elsewhere(lab: Lab, option: Any, found: str) -> None:
    lab.create()
    lab.produce_raw(b"1", key=b"k-1", headers=[("x-id", b"h")])
    async with lab.source(id=option) as source:
        (one,) = await receive(source, 1)
    assert one.message.id == found.format(topic=lab.topic)
    assert one.problem is None


async def test_the_stream_is_the_key_the_partition_or_none(lab: Lab) -> None:
    lab.create()
    for record_key in (b"k", b"\xff\x00", None):
        lab.produce_raw(b"{}", key=record_key, headers=[("id", b"x")])
    streams = {}
    for order in ("key", "partition", None):
        lab.group = f"{lab.group}-{order}"
        async with lab.source(order=order) as source:
            streams[order] = [one.message.stream for one in await receive(source, 3)]
    assert streams["partition"] == [f"kafka://{lab.topic}/0"] * 3
    assert streams[None] == [None] * 3
    assert streams["key"][0] == f"kafka://{lab.topic}/k"
    assert streams["key"][1].startswith(f"kafka://{lab.topic}/sha256:")
    assert streams["key"][2] is None


async def test_messages_of_an_aborted_transaction_do_not_come_and_their_gap_is_no_obstacle(lab: Lab) -> None:
    lab.create()
    options = {"bootstrap.servers": lab.server.bootstrap, "transactional.id": token_hex(4), "log_level": 0}
    producer = Producer(options)
    producer.init_transactions(30)
    for name, ends in (("a", True), ("aborted", False), ("b", True)):
        producer.begin_transaction()
        producer.produce(lab.topic, b"{}", headers=[("id", name.encode())])
        if ends:
            producer.commit_transaction(30)
        else:
            producer.flush(30)
            producer.abort_transaction(30)
    async with lab.source() as source:
        found = await receive(source, 2)
        assert ids(found) == ["a", "b"]
        assert [one.record.offset for one in found] == [0, 4]
        await settle(found)
        await lab.until_committed(5)


# --- settling -----------------------------------------------------------------------------------------------


async def test_an_offset_is_committed_up_to_the_first_that_is_not_settled(lab: Lab) -> None:
    lab.create()
    lab.produce(*range(5))
    async with lab.source() as source:
        zero, one, two, three, four = await receive(source, 5)
        await settle([zero, two, three])
        await lab.until_committed(1)
        await settle([four])
        await source.flush()
        assert lab.committed() == 1
        await settle([one])
        await lab.until_committed(5)


async def test_what_is_put_back_or_retried_stays_uncommitted_and_can_begin_again(lab: Lab) -> None:
    lab.create()
    lab.produce(0, 1)
    async with lab.source() as source:
        zero, one = await receive(source, 2)
        assert zero.begin()
        zero.put_back()
        await settle([one])
        await settle([zero], Verdict.RETRY)
        await source.flush()
        assert lab.committed() is None
        await settle([zero])
        await source.flush()
        assert lab.committed() == 2


async def test_what_is_settled_is_committed_when_the_source_closes_and_the_rest_comes_again(lab: Lab) -> None:
    lab.create()
    lab.produce(*range(4))
    async with lab.source() as source:
        first, second, third, _fourth = await receive(source, 4)
        await settle([first, second])
        await third.settle(Verdict.RETRY)  # given back, not begun
    assert lab.committed() == 2
    async with lab.source() as source:
        assert ids(await receive(source, 2)) == ["2", "3"]


async def test_a_settled_message_does_not_come_again_and_one_that_was_begun_does(lab: Lab) -> None:
    lab.create()
    lab.produce(*range(3))
    async with lab.source() as source:
        first, second, third = await receive(source, 3)
        await settle([first, third])
        assert second.begin()
    await second.settle(Verdict.ACK)  # too late
    async with lab.source() as source:
        assert ids(await receive(source, 2)) == ["1", "2"]


async def test_the_first_records_of_each_assignment_count_as_delivered_again(lab: Lab) -> None:
    lab.create()
    lab.produce(*range(5))
    for _ in range(2):
        async with lab.source(careful=3) as source:
            found = await receive(source, 5)
            assert [one.redelivered for one in found] == [True, True, True, False, False]


async def test_many_settles_are_few_commits(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    lab.create()
    lab.produce(*range(500))
    async with lab.source() as source:
        sent: list[Any] = []
        commit = source._commits._send

        async def count(offsets: Any) -> None:
            sent.append(offsets)
            await commit(offsets)

        monkeypatch.setattr(source._commits, "_send", count)
        await settle(await receive(source, 500))
        await source.flush()
        assert lab.committed() == 500
        assert len(sent) < 20


# --- rebalancing --------------------------------------------------------------------------------------------


async def test_a_partition_is_given_away_when_what_has_begun_is_settled(lab: Lab) -> None:
    lab.create(partitions=2)
    for partition in range(2):
        lab.produce(f"{partition}-0", f"{partition}-1", partition=partition)
    async with lab.source() as a:
        found = await receive(a, 4)
        begun = [one for one in found if one.message.id.endswith("-0")]
        waiting = [one for one in found if one.message.id.endswith("-1")]
        assert all(one.begin() for one in begun)
        before = a.assignment
        async with lab.source() as b:
            await until(lambda: a.assignment != before)  # something is to be taken from a
            taken = [one for one in waiting if not one.where.ours]
            assert taken
            assert not any(one.begin() for one in taken)
            assert await nothing_comes(b), "a is still at work"
            for one in begun:
                await one.settle(Verdict.ACK)
            (got,) = await receive(b, 1)
            assert got.message.id.endswith("-1"), "what a had begun was committed before"
            assert lab.committed(got.record.partition) == 1
            await settle([got])


async def test_nobody_waits_longer_than_drain_and_a_late_settle_counts_for_nothing(lab: Lab) -> None:
    lab.create(partitions=2)
    for partition in range(2):
        lab.produce(str(partition), partition=partition)
    async with lab.source(drain=0.3) as a:
        begun = await receive(a, 2)
        assert all(one.begin() for one in begun)
        async with lab.source(drain=0.3) as b:
            (got,) = await receive(b, 1)
            (late,) = [one for one in begun if one.message.id == got.message.id]
            assert late.where.gone
            assert not late.where.begin()
            await late.settle(Verdict.ACK)
            await a.flush()
            await b.flush()
            assert lab.committed(got.record.partition) is None
            await settle([got])
            await lab.until_committed(1, got.record.partition)


async def test_who_leaves_is_succeeded_at_once(lab: Lab) -> None:
    lab.create()
    lab.produce(0)
    patient = {"session_timeout_ms": 45_000}
    async with lab.source(**patient) as a:
        await receive(a, 1)
        left = time.monotonic()
    async with lab.source(**patient) as b:
        await receive(b, 1)
        assert time.monotonic() - left < 30


async def test_who_was_cut_off_for_too_long_commits_nothing_and_begins_nothing(ours: Kafka, lab: Lab) -> None:
    lab.create()
    lab.produce(0, 1)
    short = {"session_timeout_ms": 1500, "heartbeat_interval_ms": 300}
    async with AsyncExitStack() as network, AsyncExitStack() as stack:
        proxy = await network.enter_async_context(ours.proxy())
        a = await stack.enter_async_context(lab.source(bootstrap=f"127.0.0.1:{proxy.port}", **short))
        zero, one = await receive(a, 2)
        assert zero.begin()
        await network.aclose()
        async with lab.source(**short) as b:
            again = await receive(b, 2)
            assert ids(again) == ["0", "1"]
            await settle(again)
            await b.flush()
            assert lab.committed() == 2
            lab.produce(2)
            (last,) = await receive(b, 1)
            await network.enter_async_context(ours.proxy())
            await until(lambda: zero.where.gone)
            assert not one.begin()
            await zero.settle(Verdict.ACK)
            await a.flush()
            assert lab.committed() == 2
            await settle([last])
            await lab.until_committed(3)


SHORT = {"max_poll_interval_ms": 1600, "session_timeout_ms": 1500, "heartbeat_interval_ms": 300}
LONG = 3.5
"""Seconds. Longer than twice that."""


async def test_a_handler_that_takes_longer_than_the_poll_interval_keeps_its_partition(lab: Lab) -> None:
    lab.create()
    lab.produce(*range(50))
    async with lab.source(prefetch=4, **SHORT) as source:
        (one,) = await receive(source, 1)
        assert one.begin()
        before = source.assignment
        await asyncio.sleep(LONG)
        assert source.assignment == before
        await one.settle(Verdict.ACK)
        await source.flush()
        assert lab.committed() == 1
        assert ids(await receive(source, 49)) == [str(number) for number in range(1, 50)]
        assert source.assignment == before


async def test_with_confluent_so_does_one_that_blocks_the_event_loop(real: Broker) -> None:
    lab = Lab(real, "confluent")
    lab.create()
    lab.produce(*range(50))
    async with lab.source(prefetch=4, **SHORT) as source:
        (one,) = await receive(source, 1)
        assert one.begin()
        before = source.assignment
        time.sleep(LONG)
        await asyncio.sleep(0.1)
        assert source.assignment == before
        await one.settle(Verdict.ACK)
        await source.flush()
        assert lab.committed() == 1


async def test_a_partition_that_rested_goes_on_with_its_next_owner_and_when_it_comes_back(lab: Lab) -> None:
    lab.create(partitions=2)
    for partition in range(2):
        lab.produce(*(f"{partition}-{number}" for number in range(100)), partition=partition)
    async with lab.source(prefetch=10) as a:
        await until(lambda: len(a._partitions.resting()) == 2)
        async with lab.source(prefetch=10) as b:
            await until(lambda: len(b._partitions.resting()) == 1)
        await until(lambda: len(a._partitions.all()) == 2)
        found = set(ids(await receive(a, 200)))
    assert len(found) == 200


# --- the dead topic -----------------------------------------------------------------------------------------

REFUSED = Outcome(Kind.DEAD, error=Reject("no such order"))


async def test_dead_and_rejected_records_are_in_the_dead_topic_before_their_offset_counts(lab: Lab) -> None:
    dead = f"{lab.topic}-dead"
    lab.create()
    lab.server.create_topic(dead)
    lab.produce_raw(b"\xff", key=b"k", headers=[("id", b"0"), ("x", b"\xfe"), ("x", None), ("onceward_error", b"old")])
    lab.produce(1, 2)
    async with lab.source(dead_topic=dead) as source:
        found = await receive(source, 3)
        assert all(one.begin() for one in found)
        await found[0].settle(Verdict.REJECT)
        await found[1].settle(Verdict.ACK, outcome=REFUSED)
        await found[2].settle(Verdict.ACK, outcome=Outcome(Kind.PROCESSED))
        await source.flush()
        assert lab.committed() == 3
    first, second = lab.all_of(dead, 2)
    assert (first.key(), first.value()) == (b"k", b"\xff")
    kept = [pair for pair in first.headers() if not pair[0].startswith("onceward_")]
    assert kept == [("id", b"0"), ("x", b"\xfe"), ("x", None)]
    told = dict(first.headers())
    assert told["onceward_origin"] == f"kafka://{lab.topic}/0/0".encode()
    assert b"PayloadUndecodable" in told["onceward_error"]
    assert len([name for name, _value in first.headers() if name == "onceward_error"]) == 1
    assert dict(second.headers())["onceward_error"] == b"Reject: no such order"
    assert dict(second.headers())["onceward_group"] == lab.group.encode()


async def test_a_dead_letter_that_cannot_be_produced_is_tried_again_and_its_offset_waits(
    lab: Lab, caplog: pytest.LogCaptureFixture
) -> None:
    dead = f"{lab.topic}-dead"
    lab.create()
    lab.server.create_topic(dead, max_message_bytes=200)
    lab.produce_raw(b"x" * 300, headers=[("id", b"0")])
    lab.produce(1)
    async with lab.source(dead_topic=dead) as source:
        zero, one = await receive(source, 2)
        await settle([zero], Verdict.REJECT)
        await settle([one])
        await until(lambda: "cannot be produced" in caplog.text)
        await source.flush(1.0)
        assert lab.committed() is None
        _allow(lab.server, dead, 100_000)
        await lab.until_committed(2)
    assert [one.value() for one in lab.all_of(dead, 1)] == [b"x" * 300]


def _allow(server: Broker, topic: str, size: int) -> None:
    from confluent_kafka.admin import AlterConfigOpType, ConfigEntry, ConfigResource, ResourceType

    entry = ConfigEntry("max.message.bytes", str(size), incremental_operation=AlterConfigOpType.SET)
    resource = ConfigResource(ResourceType.TOPIC, topic, incremental_configs=[entry])
    admin = server.admin()
    for answer in admin.incremental_alter_configs([resource]).values():
        answer.result(30)


async def test_without_a_dead_topic_a_rejected_record_is_said_and_counts(
    lab: Lab, caplog: pytest.LogCaptureFixture
) -> None:
    lab.create()
    lab.produce(0)
    async with lab.source() as source:
        await settle(await receive(source, 1), Verdict.REJECT)
        await source.flush()
        assert lab.committed() == 1
    (said,) = [
        record for record in caplog.records if record.levelno == logging.ERROR and record.name == "onceward.kafka"
    ]
    assert f"kafka://{lab.topic}/0/0" in said.getMessage()


# --- trouble ------------------------------------------------------------------------------------------------


async def test_a_broker_that_stops_and_starts_again_is_told_and_got_over(ours: Kafka, lab: Lab) -> None:
    lab.create()
    lab.produce(*range(3))
    async with lab.source() as source:
        zero, one, two = await receive(source, 3)
        assert source.trouble() is None
        await settle([zero])
        await source.flush()
        await asyncio.to_thread(ours.stop)
        try:
            await until(lambda: source.trouble() is not None)
            assert one.begin()
            await one.settle(Verdict.ACK)  # while nobody hears it
        finally:
            await asyncio.to_thread(ours.start)
        lab.produce(3)
        await until(lambda: source.trouble() is None)
        rest = {} if not two.begin() else {"2": two}
        async with asyncio.timeout(60):
            while "3" not in rest:
                rest |= {one.message.id: one for one in await source.receive(10) if one.begin()}
        for delivery in rest.values():
            await delivery.settle(Verdict.ACK)
        await lab.until_committed(4)


async def test_leaving_while_the_broker_is_away_takes_bounded_time(
    ours: Kafka, lab: Lab, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kafka_source, "LAST_WORDS", 0.5)
    lab.create()
    lab.produce(0)
    async with ours.proxy() as proxy:
        source = await lab.source(bootstrap=f"127.0.0.1:{proxy.port}").__aenter__()
        (one,) = await receive(source, 1)
    assert one.begin()
    await one.settle(Verdict.ACK)
    async with asyncio.timeout(40):
        await source.__aexit__(None, None, None)
    assert lab.committed() is None


@pytest.mark.parametrize(("first", "second"), [DRIVERS, DRIVERS[::-1]], ids=["aiokafka first", "confluent first"])
async def test_who_cannot_join_says_so_and_disturbs_nobody(real: Broker, first: str, second: str) -> None:
    """The clients divide partitions in ways of their own, and the broker lets only one of these into a group."""
    lab, other = Lab(real, first), Lab(real, second)
    lab.create()
    lab.produce(0)
    other.topic, other.group = lab.topic, lab.group
    async with lab.source() as a:
        (zero,) = await receive(a, 1)
        async with other.source() as b:
            await until(lambda: "nconsistent" in (b.trouble() or ""))
            await settle([zero])
            await lab.until_committed(1)
            assert a.trouble() is None


async def test_a_consumer_that_broke_down_is_made_anew(real: Broker) -> None:
    lab = Lab(real, "kafka")
    lab.create()
    lab.produce(0)
    async with lab.source() as source:
        (zero,) = await receive(source, 1)
        coordinator = source._consumer._coordinator  # type: ignore[attr-defined]

        async def break_down(*_args: object) -> None:
            raise RuntimeError("a bug in the client")

        coordinator.ensure_active_group = break_down
        coordinator.request_rejoin()
        (again,) = await receive(source, 1)
        assert again.message.id == zero.message.id
        assert not zero.begin()


async def test_nothing_runs_on_when_a_source_is_closed(lab: Lab) -> None:
    lab.create()
    lab.produce(0)
    dead = f"{lab.topic}-dead"
    lab.server.create_topic(dead)
    tasks = asyncio.all_tasks()
    async with lab.source(dead_topic=dead) as source:
        await settle(await receive(source, 1), Verdict.REJECT)
        assert any("onceward-kafka" in thread.name for thread in threading.enumerate()) is (lab.driver == "confluent")
    assert asyncio.all_tasks() == tasks
    await until(lambda: not [one for one in threading.enumerate() if "onceward-kafka" in one.name])
    with pytest.raises(UsageError, match="not open"):
        await source.receive(1)


async def test_a_source_can_be_opened_again(lab: Lab) -> None:
    lab.create()
    lab.produce(0, 1)
    source = lab.source()
    for number in range(2):
        async with source:
            found = await receive(source, 1)
            assert ids(found) == [str(number)]
            await settle(found)


# --- options and checks -------------------------------------------------------------------------------------


@pytest.mark.parametrize("driver", DRIVERS)
@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"enable_auto_commit": True}, "onceward commits"),
        ({"enable.auto.commit": True}, "onceward commits"),
        ({"group_id": "g"}, "group="),
        ({"auto_offset_reset": "latest"}, "offset_reset="),
        ({"order": "offset"}, "order="),
        ({"prefetch": 0}, "prefetch"),
        ({"drain": -1}, "drain"),
        ({"id": 3}, "id="),
        ({"decode": "json"}, "decode="),
        ({"offset_reset": "first"}, "offset_reset="),
        ({"dead_topic": "orders"}, "come again"),
        ({"group": ""}, "group="),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_options_that_cannot_be_meant_are_refused(driver: str, options: dict[str, Any], said: str) -> None:
    make = importlib.import_module(f"onceward.brokers.{driver}").KafkaSource
    with pytest.raises(UsageError, match=said):
        make("orders", **{"group": "g", "bootstrap": "localhost:9092", **options})
    with pytest.raises(UsageError, match="names of topics"):
        make(group="g", bootstrap="localhost:9092")


async def test_an_option_that_the_client_does_not_know_is_refused(lab: Lab) -> None:
    lab.create()
    with pytest.raises(UsageError, match="nonsense"):
        async with lab.source(nonsense=1):
            pass


async def test_a_topic_that_is_not_there_is_named(lab: Lab) -> None:
    with pytest.raises(UsageError, match=lab.topic):
        async with lab.source():
            pass
    lab.create()
    with pytest.raises(UsageError, match="the-dead-who-are-not"):
        async with lab.source(dead_topic="the-dead-who-are-not"):
            pass


@pytest.mark.parametrize("driver", DRIVERS)
async def test_a_broker_that_is_not_there_is_named(driver: str, monkeypatch: pytest.MonkeyPatch) -> None:
    module = importlib.import_module(f"onceward.brokers.{driver}")
    monkeypatch.setattr(module, "CONNECT", 2.0)
    with pytest.raises(BrokerUnavailable, match=r"127\.0\.0\.1:9"):
        async with module.KafkaSource("orders", group="g", bootstrap="127.0.0.1:9"):
            pass


async def test_settings_that_endanger_the_promise_are_found(lab: Lab) -> None:
    lab.create(retention_ms=3_600_000)
    async with lab.source() as source:
        assert source.redelivery_horizon is None
        assert await source.check() == []
        assert source.redelivery_horizon == timedelta(hours=1)
    risky = {
        "offset_reset": "latest",
        "isolation_level": "read_uncommitted",
        "drain": 1000.0,
        "heartbeat_interval_ms": 3000,
    }
    interval = {"kafka": "rebalance_timeout_ms", "confluent": "max_poll_interval_ms"}[lab.driver]
    async with lab.source(**risky, **{interval: 30_000}) as source:
        assert {one.name for one in await source.check()} == {"latest", "uncommitted", "heartbeat", "drain"}
        assert source.drain == 24.0


@pytest.mark.parametrize(("id_", "finding"), [(offset, ["compacted-offset"]), (key, ["compacted-key"]), ("id", [])])
async def test_ids_that_do_not_fit_a_compacted_topic_are_found(lab: Lab, id_: Any, finding: list[str]) -> None:
    lab.create(cleanup_policy="compact")
    async with lab.source(id=id_) as source:
        assert [one.name for one in await source.check()] == finding
        assert source.redelivery_horizon == timedelta.max


async def test_settings_that_cannot_be_read_are_told(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    lab.create()

    async def forbidden() -> None:
        raise RuntimeError("not allowed")

    async with lab.source() as source:
        monkeypatch.setattr(source, "_configs", forbidden)
        (told,) = await source.check()
        assert (told.name, told.serious) == ("unknown", False)
        assert "not allowed" in told.text


@pytest.mark.parametrize(
    ("driver", "package", "extra"), [("kafka", "aiokafka", "kafka"), ("confluent", "confluent_kafka", "confluent")]
)
def test_a_client_that_is_not_installed_is_named_with_its_extra(driver: str, package: str, extra: str) -> None:
    program = (
        f"import sys; sys.modules[{package!r}] = None\n"
        f"from onceward.errors import MissingDriver\n"
        f"try:\n    import onceward.brokers.{driver}\n"
        f"except MissingDriver as error:\n    print(error.extra, error)\n"
    )
    said = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True).stdout
    assert said.startswith(f"{extra} ")
    assert f"onceward[{extra}]" in said
