"""`onceward.current()`: what a handler may know about its own run."""

from __future__ import annotations

from contextvars import ContextVar, Token

import msgspec

from onceward.errors import UsageError
from onceward.identity import Identity


class Current(msgspec.Struct, frozen=True):
    """The run in progress. Pass `idempotency_key` on to whatever happens outside of the transaction."""

    identity: Identity
    handler: str
    attempt: int = 1
    redelivered: bool = False
    origin: str | None = None

    @property
    def idempotency_key(self) -> str:
        """The same for every run of this message, different for every other."""
        return str(self.identity)


_current: ContextVar[Current | None] = ContextVar("onceward_current", default=None)


def current() -> Current:
    """The run that this code is part of; UsageError outside of a handler."""
    found = _current.get()
    if found is None:
        raise UsageError("onceward.current() works only inside a handler")
    return found


def current_or_none() -> Current | None:
    return _current.get()


def enter(run: Current) -> Token[Current | None]:
    return _current.set(run)


def leave(token: Token[Current | None]) -> None:
    _current.reset(token)
