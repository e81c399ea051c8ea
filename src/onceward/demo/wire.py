"""What the broker and a worker process say to each other: JSON, one line each, over the worker's stdin and stdout."""

from __future__ import annotations

from enum import StrEnum

import msgspec

from onceward import Message
from onceward.demo.shop import Order


class Delivery(msgspec.Struct, frozen=True):
    """From the broker: one arrival of a message, to be settled by its number."""

    number: int
    times: int
    """How often the message has been delivered, with this one."""
    message: Message[Order]


class Said(StrEnum):
    READY = "ready"
    CHARGED = "charged"
    SKIPPED = "skipped"
    FAILED = "failed"
    ACK = "ack"


class Line(msgspec.Struct, frozen=True):
    """From the worker. Only an ACK means something to the broker, the rest is told for the view."""

    said: Said
    delivery: int = 0


def encode(value: Delivery | Line) -> bytes:
    return msgspec.json.encode(value) + b"\n"


def decode_delivery(line: bytes) -> Delivery:
    return msgspec.json.decode(line, type=Delivery)


def decode_line(line: bytes) -> Line:
    return msgspec.json.decode(line, type=Line)
