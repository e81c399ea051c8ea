"""examples/kafka_loop.py against a real Kafka: both of its ways charge each order once."""

from __future__ import annotations

from typing import Any

import pytest

from onceward.testing import PostgresLab
from onceward.testing.sources import Sent
from onceward.testing.waiting import until
from tests.broker_labs import KafkaLab
from tests.example_programs import LONG, Program, program
from tests.services import kafka

pytestmark = pytest.mark.xdist_group("kafka")

BOTH_WAYS = pytest.mark.parametrize("way", ["loop", "consume"])
ORDERS = [f"o-{number:02}" for number in range(20)]


def order(id_: str, body: bytes | None = None) -> Sent:
    return Sent(f"evt-{id_}", key=id_, body=body or f'{{"order": "{id_}", "cents": 100}}'.encode())


class Shop:
    def __init__(self, server: kafka.Broker, lab: PostgresLab) -> None:
        self.broker = KafkaLab(server, "kafka")
        self._server = server
        self._lab = lab

    def program(self, way: str) -> Any:
        return program(
            "kafka_loop.py", way, "--topic", self.broker.topic, "--group", self.broker.group,
            "--bootstrap", self._server.bootstrap, "--database", self._lab.url,
        )  # fmt: skip

    async def charged(self) -> list[str]:
        if not await self._lab.query("SELECT 1 FROM pg_tables WHERE tablename = 'charges'"):
            return []
        return [order for (order,) in await self._lab.query("SELECT order_id FROM charges ORDER BY order_id")]

    async def all_is_settled(self, running: Program) -> None:
        async def settled() -> bool:
            assert running.running, running.log
            return not await self.broker.unsettled()

        await until(settled, within=LONG)


@pytest.fixture
def shop(kafka_server: kafka.Broker, postgres_lab: PostgresLab) -> Shop:
    return Shop(kafka_server, postgres_lab)


@BOTH_WAYS
async def test_an_order_that_is_sent_twice_is_charged_once(shop: Shop, way: str) -> None:
    await shop.broker.send(*(order(id_) for id_ in ORDERS * 2))
    async with shop.program(way) as running:
        await shop.all_is_settled(running)
        assert await running.stop() == 0, running.log
    assert await shop.charged() == ORDERS


@BOTH_WAYS
async def test_what_comes_again_after_a_restart_is_a_duplicate(shop: Shop, way: str) -> None:
    """Another group has no offsets yet, so all of it comes again, and to the other way of consuming."""
    await shop.broker.send(*(order(id_) for id_ in ORDERS))
    async with shop.program(way) as running:
        await shop.all_is_settled(running)
        assert await running.stop() == 0, running.log
    shop.broker.group += "-again"
    assert await shop.broker.unsettled() == len(ORDERS)
    async with shop.program("loop" if way == "consume" else "consume") as again:
        await shop.all_is_settled(again)
        assert await again.stop() == 0, again.log
    assert await shop.charged() == ORDERS


async def test_the_loop_by_hand_ends_at_what_fails_and_commits_nothing_of_it(shop: Shop) -> None:
    """To go on would lose it: the next commit would be behind it."""
    await shop.broker.send(order("bad", b'{"order": "bad"}'), *(order("bad") for _ in range(3)))
    for _ in range(2):
        async with shop.program("loop") as running:
            assert await running.ended() == 1
            assert "KeyError: 'cents'" in running.log
        assert await shop.broker.unsettled() == 4
    assert await shop.charged() == []


async def test_with_consume_what_fails_is_kept_and_the_others_go_on(shop: Shop, postgres_lab: PostgresLab) -> None:
    await shop.broker.send(order("bad", b'{"order": "bad"}'), *(order(id_) for id_ in ORDERS))
    async with shop.program("consume") as running:
        await shop.all_is_settled(running)
        assert await running.stop() == 0, running.log
    assert await shop.charged() == ORDERS
    kept = await postgres_lab.query("SELECT state, attempts FROM onceward_records WHERE message_id = 'evt-bad'")
    assert [state for state, _attempts in kept] != ["processed"]
    assert kept[0][1] >= 1
