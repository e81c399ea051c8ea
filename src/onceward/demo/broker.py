"""The broker: it delivers every message at least once, which is all that brokers promise.

A delivery stays unsettled until its ack arrives. It comes again when that takes too long, and at once when the
connection that had it dies. On purpose this broker also repeats messages, puts them out of order and loses acks.
The ledger is the list of what was sent; the audit believes it and nothing else.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterable
from itertools import count

from onceward import Message
from onceward.demo.faults import Faults
from onceward.demo.shop import Order
from onceward.demo.tally import Tally
from onceward.demo.wire import Delivery

PATIENCE = 1.0
"""Seconds that a delivery may stay unsettled."""


class Broker:
    def __init__(self, faults: Faults, tally: Tally) -> None:
        self.ledger: list[Order] = []
        self.done = asyncio.Event()
        """Set when nothing more is sent and everything is settled."""
        self._faults = faults
        self._tally = tally
        self._ready: asyncio.Queue[Message[Order]] = asyncio.Queue()
        self._unsettled: dict[int, Delivery] = {}
        self._times: Counter[str] = Counter()
        self._numbers = count(1)
        self._open = 0
        self._closed = False

    def send(self, order: Order) -> None:
        self.ledger.append(order)
        self._enqueue(order.message, self._faults.delay(order.id))
        again = self._faults.repeat(order.id)
        if again is not None:
            self._tally.repeated += 1
            self._enqueue(order.message, again)

    def close(self) -> None:
        """Nothing more is sent."""
        self._closed = True
        self._look_done()

    async def take(self) -> Delivery:
        """The next delivery, for a worker that has room for it."""
        message = await self._ready.get()
        self._times[message.id] += 1
        delivery = Delivery(next(self._numbers), self._times[message.id], message)
        self._unsettled[delivery.number] = delivery
        self._tally.deliveries += 1
        asyncio.get_running_loop().call_later(PATIENCE, self.bring_again, [delivery.number])
        return delivery

    def ack(self, number: int) -> None:
        """Settle a delivery, unless it has come again meanwhile, or the ack gets lost on its way."""
        delivery = self._unsettled.get(number)
        if delivery is None:
            return
        if self._faults.loses_ack(delivery.message.id, delivery.times):
            self._tally.acks_lost += 1
            return
        del self._unsettled[number]
        self._open -= 1
        self._look_done()

    def bring_again(self, numbers: Iterable[int]) -> int:
        """Deliver again what of these is not settled."""
        back = [self._unsettled.pop(number) for number in numbers if number in self._unsettled]
        for delivery in back:
            self._ready.put_nowait(delivery.message)
        return len(back)

    def _enqueue(self, message: Message[Order], after: float) -> None:
        self._open += 1
        asyncio.get_running_loop().call_later(after, self._ready.put_nowait, message)

    def _look_done(self) -> None:
        if self._closed and not self._open:
            self.done.set()
