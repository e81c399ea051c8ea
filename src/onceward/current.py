"""`onceward.current()`: what a handler may know about its own run."""

from __future__ import annotations

from contextvars import ContextVar

import msgspec

from onceward.errors import UsageError
from onceward.identity import Identity


class Current(msgspec.Struct, frozen=True, gc=False):
    """The run in progress. Pass `idempotency_key` on to whatever happens outside of the transaction."""

    identity: Identity
    handler: str
    attempt: int = 1
    redelivered: bool = False
    origin: str | None = None
    fence: int | None = None
    """On a store of leases (Redis): a number that is larger for each claim of this message. Pass it on to
    what can refuse a smaller one than it has seen, and a worker that lost its lease can do no harm there."""

    @property
    def idempotency_key(self) -> str:
        """The same for every run of this message, different for every other."""
        return str(self.identity)


class BulkRun(msgspec.Struct, frozen=True):
    """A bulk handler in progress. It has many messages, so there is no one identity to tell."""

    handler: str


_current: ContextVar[Current | BulkRun | None] = ContextVar("onceward_current", default=None)


def current() -> Current:
    """The run that this code is part of; UsageError outside of a handler."""
    found = _current.get()
    if found is None:
        raise UsageError("onceward.current() works only inside a handler")
    if isinstance(found, BulkRun):
        raise UsageError("a bulk handler has many messages: str(inbox.identity_of(message)) is the key of each")
    return found


def current_or_none() -> Current | BulkRun | None:
    return _current.get()


# Not functions of ours around them: they are called for each message.
enter, leave = _current.set, _current.reset
