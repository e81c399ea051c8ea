"""The shop: its orders, and the handler that charges one.

The handler is the same function in both worlds. It writes the charge and asks the bank, which now and then does not
answer; what is undone then, and what a second delivery does, is up to whoever runs it.
"""

from __future__ import annotations

import asyncio
import random
from typing import Any, Protocol

import msgspec

from onceward import Message

BANK_FAILS = 0.05
BANK_TAKES = 0.006
"""Seconds, at the most."""

FIRST = "Ada Bela Carla Dario Edda Femi Greta Hugo Ines Jonas Kira Leon Mara Nils Oona Pavel Rosa Samir Tilda Yusuf"
LAST = "Abel Brandt Costa Dubois Eriksen Falk Gruber Horvat Ivers Jansen Kovac Lindt Moreau Novak Okafor Petit Rossi"


class Order(msgspec.Struct, frozen=True):
    id: str
    customer: str
    cents: int

    @property
    def message(self) -> Message[Order]:
        return Message(id=self.id, type="order.placed", source="shop", payload=self)


class Tx(Protocol):
    """What the handler needs of a transaction."""

    async def execute(self, sql: str, *params: Any) -> int: ...


class BankUnavailable(Exception):
    """The bank does not answer."""


async def charge(message: Message[Order], tx: Tx) -> None:
    order = message.payload
    await tx.execute(
        "INSERT INTO charges (order_id, customer, cents) VALUES (?, ?, ?)", order.id, order.customer, order.cents
    )
    await ask_the_bank()


async def ask_the_bank() -> None:
    await asyncio.sleep(random.random() * BANK_TAKES)
    if random.random() < BANK_FAILS:
        raise BankUnavailable


def make_orders(count: int, seed: int) -> list[Order]:
    chance = random.Random(f"{seed}/orders")
    first, last = FIRST.split(), LAST.split()
    return [
        Order(f"o-{n:04}", f"{chance.choice(first)} {chance.choice(last)}", chance.randint(490, 9990))
        for n in range(1, count + 1)
    ]


def euros(cents: int) -> str:
    return f"{cents / 100:,.2f} EUR"
