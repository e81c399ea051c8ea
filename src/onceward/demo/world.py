"""A world: one way to charge, with its own broker, workers and database. The demo runs two of them side by side."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path

from onceward.demo.books import Books
from onceward.demo.broker import Broker
from onceward.demo.crew import Crew
from onceward.demo.faults import Faults
from onceward.demo.shop import Order
from onceward.demo.tally import News, Tally

ORDERS_PER_SECOND = 60


class World:
    def __init__(self, name: str, title: str, folder: Path, faults: Faults, news: News) -> None:
        self.name = name
        self.title = title
        self.tally = Tally()
        self.books = Books(folder / f"{name}.db")
        self.broker = Broker(faults, self.tally)
        self.crew = Crew(name, self.books.path, self.broker, self.tally, news)


class Demo:
    """Both worlds, and the orders that they get."""

    def __init__(self, folder: Path, orders: list[Order], faults: Faults) -> None:
        self.orders = orders
        self.faults = faults
        self.news = News()
        self.onceward = World("onceward", "with onceward", folder, faults, self.news)
        self.plain = World("no-inbox", "without an inbox", folder, faults, self.news)

    @property
    def worlds(self) -> tuple[World, World]:
        return self.onceward, self.plain

    @property
    def sent(self) -> int:
        return len(self.onceward.broker.ledger)

    async def run(self, workers: int) -> None:
        """Send all orders, and return when every delivery in both worlds is settled and the workers are gone."""
        async with asyncio.TaskGroup() as group:
            for world in self.worlds:
                group.create_task(world.crew.run(workers))
            await self._send()

    async def _send(self) -> None:
        kills = self.faults.kills(len(self.orders))
        for number, order in enumerate(self.orders, 1):
            for world in self.worlds:
                world.broker.send(order)
                if number in kills:
                    world.crew.strike(kills[number])
            await asyncio.sleep(random.expovariate(ORDERS_PER_SECOND))
        for world in self.worlds:
            world.broker.close()
