"""examples/rabbitmq_loop.py against a real RabbitMQ: both of its ways charge each order once."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from onceward.testing.sources import Sent
from onceward.testing.waiting import until
from tests.broker_labs import RabbitMQLab
from tests.example_programs import LONG, Program, program
from tests.services import rabbitmq

pytestmark = pytest.mark.xdist_group("rabbitmq")

BOTH_WAYS = pytest.mark.parametrize("way", ["loop", "consume"])
ORDERS = [f"o-{number:02}" for number in range(20)]


def order(id_: str, body: bytes | None = None) -> Sent:
    return Sent(f"evt-{id_}", body=body or f'{{"order": "{id_}", "cents": 100}}'.encode())


class Shop:
    def __init__(self, server: rabbitmq.Broker, folder: Path) -> None:
        self.broker = RabbitMQLab(server, "quorum")
        self.database = folder / "shop.db"
        self._url = server.url

    def program(self, way: str) -> Any:
        return program(
            "rabbitmq_loop.py", way, "--queue", self.broker.queue, "--url", self._url,
            "--database", f"sqlite:///{self.database}",
        )  # fmt: skip

    def ask(self, sql: str) -> list[Any]:
        if not self.database.exists():
            return []
        with closing(sqlite3.connect(self.database, timeout=30)) as connection:
            return connection.execute(sql).fetchall()

    def charged(self) -> list[str]:
        if not self.ask("SELECT 1 FROM sqlite_master WHERE name = 'charges'"):
            return []
        return [order for (order,) in self.ask("SELECT order_id FROM charges ORDER BY order_id")]

    async def all_is_settled(self, running: Program) -> None:
        async def settled() -> bool:
            assert running.running, running.log
            return self.charged() == ORDERS and not await self.broker.unsettled()

        await until(settled, within=LONG)


@pytest.fixture
async def shop(rabbitmq_server: rabbitmq.Broker, tmp_path: Path) -> Shop:
    shop = Shop(rabbitmq_server, tmp_path)
    await shop.broker.set_up()
    return shop


@BOTH_WAYS
async def test_an_order_that_is_sent_twice_is_charged_once(shop: Shop, way: str) -> None:
    await shop.broker.send(*(order(id_) for id_ in ORDERS * 2))
    async with shop.program(way) as running:
        await shop.all_is_settled(running)
        assert await running.stop() == 0, running.log
    assert shop.charged() == ORDERS


@BOTH_WAYS
async def test_what_comes_again_after_a_restart_is_a_duplicate(shop: Shop, way: str) -> None:
    """To the other way of consuming."""
    await shop.broker.send(*(order(id_) for id_ in ORDERS))
    async with shop.program(way) as running:
        await shop.all_is_settled(running)
        assert await running.stop() == 0, running.log
    await shop.broker.send(*(order(id_) for id_ in ORDERS))
    async with shop.program("loop" if way == "consume" else "consume") as again:
        await shop.all_is_settled(again)
        assert await again.stop() == 0, again.log
    assert shop.charged() == ORDERS


async def test_the_loop_by_hand_ends_at_what_fails_and_the_queue_keeps_it(shop: Shop) -> None:
    """`async with delivery.process()` would reject it, and it would be gone."""
    await shop.broker.send(order("bad", b'{"order": "bad"}'))
    for _ in range(2):
        async with shop.program("loop") as running:
            assert await running.ended() == 1
            assert "KeyError: 'cents'" in running.log
        await until(lambda: _has(shop, 1), within=LONG)
    assert shop.charged() == []


async def test_with_consume_what_fails_is_kept_and_the_others_go_on(shop: Shop) -> None:
    await shop.broker.send(order("bad", b'{"order": "bad"}'), *(order(id_) for id_ in ORDERS))
    async with shop.program("consume") as running:
        await shop.all_is_settled(running)
        assert await running.stop() == 0, running.log
    ((state, attempts),) = shop.ask("SELECT state, attempts FROM onceward_records WHERE message_id = 'evt-bad'")
    assert state != "processed"
    assert attempts >= 1


async def _has(shop: Shop, number: int) -> bool:
    return await shop.broker.unsettled() == number
