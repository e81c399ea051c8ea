"""Identity: what makes two messages the same work.

(consumer, tenant, scope, key), hashed to 16 bytes. The parts are length-prefixed before hashing, so no choice
of names makes two identities meet, and SQL can compute the same value (`onceward_id` on PostgreSQL).
"""

from __future__ import annotations

import hashlib
from functools import cached_property
from uuid import UUID

import msgspec


class Identity(msgspec.Struct, frozen=True, dict=True):
    """One identity is one record. `str(identity)` is stable for ever and fit as an idempotency key."""

    consumer: str
    tenant: str
    scope: str
    key: str

    @cached_property
    def digest(self) -> bytes:
        return digest(self.consumer, self.tenant, self.scope, self.key)

    def __str__(self) -> str:
        return str(UUID(bytes=self.digest))


def digest(*parts: str) -> bytes:
    """The first 16 bytes of SHA-256 over the parts, each behind its length as four big-endian bytes."""
    encoded = [part.encode() for part in parts]
    return hashlib.sha256(b"".join([len(part).to_bytes(4, "big") + part for part in encoded])).digest()[:16]
