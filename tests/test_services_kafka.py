"""The throwaway Kafka itself: what other tests rely on when they kill it, freeze it and cut the way to it."""

from __future__ import annotations

import asyncio
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from secrets import token_hex

import pytest
from aiokafka import AIOKafkaConsumer, AIOKafkaProducer
from confluent_kafka import KafkaException

from tests.conftest import missing
from tests.services import kafka
from tests.services.kafka import Broker, Kafka
from tests.services.tied import can_be_tied, is_alive, wait_until

pytestmark = pytest.mark.xdist_group("kafka")


@pytest.fixture
def server(kafka_server: Broker) -> Iterator[Kafka]:
    """The session's, if it is ours. It runs again afterwards."""
    if not isinstance(kafka_server, Kafka):
        missing(f"no Kafka here that may be killed; set {kafka.HOME_VARIABLE}")
    yield kafka_server
    if not kafka_server.live:
        kafka_server.kill()
        kafka_server.start()


@pytest.fixture
def topic(server: Kafka) -> str:
    name = f"topic-{token_hex(4)}"
    server.create_topic(name)
    return name


async def produce(bootstrap: str, topic: str, *values: bytes) -> None:
    async with AIOKafkaProducer(bootstrap_servers=bootstrap, acks="all") as producer:
        for value in values:
            await producer.send_and_wait(topic, value)


async def consume(bootstrap: str, topic: str, group: str) -> bytes:
    """One message, and commit it."""
    consumer = AIOKafkaConsumer(
        topic, bootstrap_servers=bootstrap, group_id=group, auto_offset_reset="earliest", enable_auto_commit=False
    )
    async with consumer:
        record = await asyncio.wait_for(consumer.getone(), 60)
        await consumer.commit()
        return bytes(record.value)


async def test_offsets_are_seen_from_outside(server: Kafka, topic: str) -> None:
    group = f"group-{topic}"
    assert (server.end_offsets(topic), server.committed(group, topic)) == ({0: 0}, {0: None})
    await produce(server.bootstrap, topic, b"a", b"b")
    assert await consume(server.bootstrap, topic, group) == b"a"
    assert (server.end_offsets(topic), server.committed(group, topic)) == ({0: 2}, {0: 1})


def test_a_topic_has_the_partitions_and_options_that_were_asked_for(server: Kafka) -> None:
    name = f"topic-{token_hex(4)}"
    with pytest.raises(KafkaException):
        server.end_offsets(name)  # nobody makes it by asking for it
    server.create_topic(name, partitions=3, retention_ms=60000)
    assert server.end_offsets(name) == {0: 0, 1: 0, 2: 0}


@pytest.mark.parametrize("how", ["kill", "stop"])
async def test_messages_and_offsets_survive(server: Kafka, topic: str, how: str) -> None:
    port, group = server.port, f"group-{topic}"
    await produce(server.bootstrap, topic, b"a", b"b")
    assert await consume(server.bootstrap, topic, group) == b"a"
    getattr(server, how)()
    server.start()
    assert server.port == port
    assert (server.end_offsets(topic), server.committed(group, topic)) == ({0: 2}, {0: 1})
    assert await consume(server.bootstrap, topic, group) == b"b"


async def test_a_frozen_server_keeps_its_connections_and_answers_nobody(server: Kafka, topic: str) -> None:
    async with AIOKafkaProducer(bootstrap_servers=server.bootstrap) as producer:
        await producer.send_and_wait(topic, b"before")
        server.freeze()
        sending = asyncio.ensure_future(producer.send_and_wait(topic, b"after"))
        done, _ = await asyncio.wait([sending], timeout=0.3)
        assert not done
        server.thaw()
        await asyncio.wait_for(sending, 60)
    assert server.end_offsets(topic) == {0: 2}


async def test_clients_stay_behind_the_proxy(server: Kafka, topic: str) -> None:
    async with server.proxy() as proxy:
        through = f"127.0.0.1:{proxy.port}"
        async with AIOKafkaProducer(bootstrap_servers=through) as producer:
            proxy.cut_at = b"comes at the second attempt"
            await asyncio.wait_for(producer.send_and_wait(topic, b"comes at the second attempt"), 60)
        assert proxy.was_cut.is_set()
        assert await consume(through, topic, f"group-{topic}") == b"comes at the second attempt"
    assert server.end_offsets(topic) == {0: 1}


@pytest.mark.usefixtures("server")
def test_a_second_server_is_another_one_and_leaves_nothing() -> None:
    with kafka.throwaway() as second:
        second.create_topic("orders", partitions=2)
        assert second.end_offsets("orders") == {0: 0, 1: 0}
        pid, folder = second.pid, second.folder
    assert not is_alive(pid)
    assert not folder.exists()


@pytest.mark.usefixtures("server")
def test_a_server_does_not_outlive_a_test_run_that_is_killed() -> None:
    if not can_be_tied():
        pytest.skip("no setpriv here that knows --pdeathsig")
    script = (
        "import time\n"
        "from tests.services import kafka\n"
        "with kafka.throwaway(in_memory=True) as server:\n"
        "    print(server.pid, server.folder, flush=True)\n"
        "    time.sleep(60)\n"
    )
    root = Path(__file__).parents[1]
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True, cwd=root) as run:
        assert run.stdout is not None
        pid, _, folder = run.stdout.readline().strip().partition(" ")
        run.kill()
    wait_until(lambda: f"{pid} is alive" if is_alive(int(pid)) else "")
    shutil.rmtree(folder)


async def test_the_mock_says_that_it_is_one() -> None:
    with kafka.mock() as broker:
        assert broker.is_mock
        broker.create_topic("orders")
        await produce(broker.bootstrap, "orders", b"a")
        assert sum(broker.end_offsets("orders").values()) == 1
        assert set(broker.committed("billing", "orders").values()) == {None}
