"""Identity: what makes two messages the same work.

(consumer, tenant, scope, key), hashed to 16 bytes. The parts are length-prefixed before hashing, so no choice
of names makes two identities meet, and SQL can compute the same value (`onceward_id` on PostgreSQL).
"""

from __future__ import annotations

from functools import lru_cache
from hashlib import sha256
from uuid import UUID

import msgspec


class Identity(msgspec.Struct, frozen=True, eq=False, gc=False):
    """One identity is one record. `str(identity)` is stable for ever and fit as an idempotency key."""

    consumer: str
    tenant: str
    scope: str
    key: str
    _digest: bytes = b""
    """Once it is known. Not in a dict of its own: there is one identity for each message."""

    @property
    def digest(self) -> bytes:
        """What it is stored under: 16 bytes."""
        if not self._digest:
            msgspec.structs.force_setattr(self, "_digest", digest(self.consumer, self.tenant, self.scope, self.key))
        return self._digest

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Identity) and self.digest == other.digest

    def __hash__(self) -> int:
        return hash(self.digest)

    def __repr__(self) -> str:
        return f"Identity({self.consumer!r}, {self.tenant!r}, {self.scope!r}, {self.key!r})"

    def __str__(self) -> str:
        return str(UUID(bytes=self.digest))


def digest(*parts: str) -> bytes:
    """The first 16 bytes of SHA-256 over the parts, each behind its length as four big-endian bytes."""
    last = parts[-1].encode()
    return sha256(_front(parts[:-1]) + len(last).to_bytes(4, "big") + last).digest()[:16]


@lru_cache(maxsize=1024)
def _front(parts: tuple[str, ...]) -> bytes:
    """The same for all messages of a consumer, a tenant and a scope."""
    encoded = [part.encode() for part in parts]
    return b"".join([len(part).to_bytes(4, "big") + part for part in encoded])
