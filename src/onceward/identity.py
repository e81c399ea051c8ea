"""Identity: what makes two messages the same work.

(consumer, tenant, scope, key), hashed to 16 bytes. The parts are length-prefixed before hashing, so no choice
of names makes two identities meet, and SQL can compute the same value (`onceward_id` on PostgreSQL).
"""

from __future__ import annotations

from functools import lru_cache
from hashlib import sha256
from uuid import UUID

import msgspec


class _Digest:
    """Found out once, then an attribute like any other. Not cached_property, which takes a lock before Python 3.12."""

    def __get__(self, identity: Identity, _type: type[Identity]) -> bytes:
        key = identity.key.encode()
        front = _front(identity.consumer, identity.tenant, identity.scope)
        found = identity.__dict__["digest"] = sha256(front + len(key).to_bytes(4, "big") + key).digest()[:16]
        return found


class Identity(msgspec.Struct, frozen=True, dict=True):
    """One identity is one record. `str(identity)` is stable for ever and fit as an idempotency key."""

    consumer: str
    tenant: str
    scope: str
    key: str

    @staticmethod
    def known(digest: bytes, consumer: str, tenant: str, scope: str, key: str) -> Identity:
        """One whose digest is known: it comes from a store."""
        identity = Identity(consumer, tenant, scope, key)
        identity.__dict__["digest"] = digest
        return identity

    digest = _Digest()

    def __str__(self) -> str:
        return str(UUID(bytes=self.digest))


def digest(*parts: str) -> bytes:
    """The first 16 bytes of SHA-256 over the parts, each behind its length as four big-endian bytes."""
    return sha256(_joined(*parts)).digest()[:16]


def _joined(*parts: str) -> bytes:
    encoded = [part.encode() for part in parts]
    return b"".join([len(part).to_bytes(4, "big") + part for part in encoded])


_front = lru_cache(maxsize=1024)(_joined)
"""The same for all messages of a consumer, a tenant and a scope."""
