"""What all variants work on: messages of a shop, and one row that each of them writes."""

from __future__ import annotations

from itertools import count
from typing import Any
from uuid import uuid4

from onceward import Message

CONSUMER = "billing"

_numbers = count(1)


def new_messages(number: int) -> list[Message[Any]]:
    """Messages that nobody has seen. Their ids are random UUIDs: some of the peers take nothing else."""
    return [order_paid(str(uuid4()), next(_numbers)) for _ in range(number)]


def order_paid(id_: str, number: int) -> Message[Any]:
    payload = {"order": f"o-{number}", "cents": number % 10_000}
    return Message(id=id_, type="order.paid", payload=payload, source="shop", topic="orders")


# The effect has no index: the cheaper it is, the more of the whole is the inbox.
CHARGES = "CREATE TABLE charges (message_id text NOT NULL, order_id text NOT NULL, cents integer NOT NULL)"

RESULT = {"charged": True}
"""What a handler gives back where results are measured."""


def charge_of(message: Message[Any]) -> tuple[str, str, int]:
    """The row that a message becomes."""
    return message.id, message.payload["order"], message.payload["cents"]
