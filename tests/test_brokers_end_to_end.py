"""Ten thousand messages through a real broker, three processes that get killed, and a broker that is killed once."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from time import monotonic
from typing import Any

import pytest

from onceward.testing import PostgresLab
from onceward.testing.sources import BrokerLab, Sent
from onceward.testing.sources.children import Consumer
from onceward.testing.sources.lab import ConsumerJob
from tests.broker_labs import KafkaLab, RabbitMQLab
from tests.services import kafka, rabbitmq

NUMBER = 10_000
TWICE = NUMBER * 3 // 10
MEMBERS = 3
KILLS = 5
PATIENCE = 240.0
"""Seconds for all of it, on a machine that has other things to do."""


async def effects(lab: PostgresLab) -> int:
    return int((await lab.query("SELECT count(*) FROM effects"))[0][0])


class Fleet:
    """So many processes, and when one was killed, another one."""

    def __init__(self, job: ConsumerJob) -> None:
        self._job = job
        self.members: list[Consumer] = []
        self.kills = 0

    async def start(self) -> None:
        self.members = [await Consumer.start(self._job) for _ in range(MEMBERS)]

    async def kill_one(self) -> None:
        victim = random.choice(self.members)
        await victim.kill()
        self.kills += 1
        self.members.remove(victim)
        self.members.append(await Consumer.start(self._job))

    async def revive(self) -> None:
        """As a supervisor does: who was started while the broker was away has ended, and told so."""
        for member in [member for member in self.members if not member.running]:
            self.members.remove(member)
            self.members.append(await Consumer.start(self._job))

    async def stop(self) -> list[int]:
        return [await member.stop() for member in self.members]


async def all_of_it(broker: BrokerLab, lab: PostgresLab, **job: Any) -> None:
    ids = [f"m{number:05}" for number in range(NUMBER)]
    sent = [Sent(id_, key=f"k{hash(id_) % 211}") for id_ in ids + random.sample(ids, TWICE)]
    random.shuffle(sent)
    fleet = Fleet(ConsumerJob(url=lab.url, source=broker.job(), lag=0.001, **job))
    deadline, restarted = monotonic() + PATIENCE, False
    await broker.send(*sent[: len(sent) // 2])
    await fleet.start()
    try:
        await broker.send(*sent[len(sent) // 2 :])
        while (done := await effects(lab)) < NUMBER or await broker.unsettled():
            assert monotonic() < deadline, f"{done} effects after {PATIENCE} s, {await broker.unsettled()} unsettled"
            if fleet.kills < KILLS and done > NUMBER * (fleet.kills + 1) // (KILLS + 2):
                await fleet.kill_one()
            if not restarted and done > NUMBER // 2:
                restarted = True
                await broker.restart()
            await fleet.revive()
            await asyncio.sleep(0.1)
    finally:
        codes = await fleet.stop()
    assert codes == [0] * MEMBERS
    assert restarted
    assert fleet.kills == KILLS
    assert await broker.unsettled() == 0
    found = Counter(effect for (effect,) in await lab.query("SELECT * FROM effects"))
    assert sorted(found) == ids, "none is lost"
    assert set(found.values()) == {1}, "none took effect twice"
    assert await lab.query("SELECT count(*) FROM onceward_records WHERE state <> 'processed'") == [(0,)]


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.xdist_group("kafka")
@pytest.mark.parametrize("driver", ["kafka", "confluent"])
async def test_ten_thousand_through_kafka(kafka_server: kafka.Broker, postgres_lab: PostgresLab, driver: str) -> None:
    if not isinstance(kafka_server, kafka.Kafka):
        pytest.skip("this Kafka cannot be killed")
    await all_of_it(KafkaLab(kafka_server, driver, partitions=6), postgres_lab)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.xdist_group("rabbitmq")
@pytest.mark.parametrize("kind", ["classic", "quorum"])
async def test_ten_thousand_through_rabbitmq(
    rabbitmq_server: rabbitmq.Broker, postgres_lab: PostgresLab, kind: str
) -> None:
    if not isinstance(rabbitmq_server, rabbitmq.RabbitMQ):
        pytest.skip("this RabbitMQ cannot be killed")
    broker = RabbitMQLab(rabbitmq_server, kind)
    await broker.set_up()
    await all_of_it(broker, postgres_lab)
