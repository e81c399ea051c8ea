"""What hand-written code needs to keep the same record as onceward: the identity, the hash, and its values as text.

Written as one would without a library, and faster than onceward's own where that is possible: a floor has to be low.
"""

from __future__ import annotations

import os
import socket
from hashlib import sha256
from typing import Any, NamedTuple

import msgspec

from bench.messages import CONSUMER
from onceward import Message

HOST = f"{socket.gethostname()}:{os.getpid()}"
HANDLER = "bench.charge"

_json = msgspec.json.Encoder(order="sorted")


class Claim(NamedTuple):
    """The readable columns of the record, and the 16 bytes that make it unique."""

    identity: bytes
    scope: str
    message: Message[Any]
    payload_hash: bytes

    @property
    def lock(self) -> int:
        """The number of its advisory lock on PostgreSQL."""
        return int.from_bytes(self.identity[:8], "big", signed=True)


def claim_of(message: Message[Any]) -> Claim:
    scope = f"source:{message.source}"
    identity = identity_of(CONSUMER, "default", scope, message.id)
    return Claim(identity, scope, message, sha256(_json.encode(message.payload)).digest())


def identity_of(*parts: str) -> bytes:
    """16 bytes of SHA-256 over the parts, each behind its length."""
    encoded = [part.encode() for part in parts]
    return sha256(b"".join(len(part).to_bytes(4, "big") + part for part in encoded)).digest()[:16]


def quoted(text: str) -> str:
    return "'" + text.replace("'", "''") + "'"
