"""Events: what happened, as frozen values. Logs, metrics and traces subscribe to them and to nothing else.

| event | when |
|---|---|
| Processed | a handler ran and its transaction is committed |
| Accepted | a message was kept, to be worked on later |
| Duplicate | a delivery was skipped: processed, accepted or dead before; `mismatch` when its payload differs |
| Failed | a handler raised, the attempt is counted; `retry_at` where a policy says when |
| Dead | a message became a dead letter |
| Deferred | TryLater was raised: in flight, backoff, busy or blocked |
| Unsettled | the store could not say: not there, commit unknown or not applied |
| Refused | the message cannot be kept: no usable key or tenant, oversized, not JSON |
| Ignored | no handler for the type, and the inbox ignores those |
| Cancelled | a delivery was cancelled, most often by a shutdown; it left nothing behind |
| Started, Finished | around each delivery, whatever becomes of it; only for listeners with `hears_starts = True` |
| Batch | a call of `process_many` or `process_bulk` has ended; its messages have their own events |
| AtRisk | at start: something about the database endangers what is promised; `onceward doctor` says what to do |
| Swept, SweepFailed | a cleanup is done, or could not go on |

Every event is an `Event` and has a consumer; those about one message are an `InboxEvent`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from datetime import datetime
from typing import Any, TypeAlias

import msgspec

from onceward import codec
from onceward.errors import HandlerEndedTransaction, MessageDead, PayloadMismatch, TryLater
from onceward.identity import Identity
from onceward.message import Message
from onceward.outcome import Kind, Outcome


class Event(msgspec.Struct, frozen=True, kw_only=True):
    """What every event says."""

    consumer: str


class InboxEvent(Event, frozen=True, kw_only=True):
    """What every event about one message says."""

    type: str
    message_id: str
    identity: Identity | None = None


class Processed(InboxEvent, frozen=True, kw_only=True):
    attempt: int
    duration_ms: float
    mismatch: bool = False


class Accepted(InboxEvent, frozen=True, kw_only=True):
    pass


class Duplicate(InboxEvent, frozen=True, kw_only=True):
    mismatch: bool = False


class Failed(InboxEvent, frozen=True, kw_only=True):
    attempt: int
    error: BaseException
    retry_at: datetime | None = None
    duration_ms: float = 0.0


class Dead(InboxEvent, frozen=True, kw_only=True):
    attempt: int
    error: BaseException
    duration_ms: float = 0.0


class Deferred(InboxEvent, frozen=True, kw_only=True):
    reason: str
    retry_at: datetime | None = None


class Unsettled(InboxEvent, frozen=True, kw_only=True):
    error: BaseException


class Refused(InboxEvent, frozen=True, kw_only=True):
    error: BaseException


class Ignored(InboxEvent, frozen=True, kw_only=True):
    pass


class Cancelled(InboxEvent, frozen=True, kw_only=True):
    duration_ms: float


class Started(InboxEvent, frozen=True, kw_only=True):
    pass


class Finished(InboxEvent, frozen=True, kw_only=True):
    duration_ms: float
    """With everything: waiting for a twin, for a connection, the handler and its commit."""


class Batch(Event, frozen=True, kw_only=True):
    handler: str
    """many or bulk."""
    size: int
    duration_ms: float


class AtRisk(Event, frozen=True, kw_only=True):
    finding: str
    """A word for it."""
    text: str


class Swept(Event, frozen=True, kw_only=True):
    deleted: int
    duration_ms: float


class SweepFailed(Event, frozen=True, kw_only=True):
    error: BaseException
    deleted: int
    """Before it failed. They stay deleted."""
    duration_ms: float


def of_outcome(consumer: str, message: Message[Any], identity: Identity, outcome: Outcome[Any]) -> InboxEvent:
    """What an outcome says to those who watch."""
    base: dict[str, Any] = {"consumer": consumer, "type": message.type, "message_id": message.id, "identity": identity}
    match outcome.kind:
        case Kind.PROCESSED:
            duration = outcome.duration_ms or 0.0
            return Processed(**base, attempt=outcome.attempts, duration_ms=duration, mismatch=outcome.mismatch)
        case Kind.BUSY | Kind.FAILED if not outcome.attempts and isinstance(outcome.error, Exception):
            return of_error(consumer, message, identity, outcome.error)  # in a batch, where nothing is raised
        case Kind.FAILED:
            error = outcome.error or Exception("unknown")
            duration = outcome.duration_ms or 0.0
            return Failed(
                **base, attempt=outcome.attempts, error=error, retry_at=outcome.retry_at, duration_ms=duration
            )
        case Kind.DEAD if outcome.error is not None and type(outcome.error) is not MessageDead:
            duration = outcome.duration_ms or 0.0
            return Dead(**base, attempt=outcome.attempts, error=outcome.error, duration_ms=duration)
        case _:
            return Duplicate(**base, mismatch=outcome.mismatch)


def of_error(consumer: str, message: Message[Any], identity: Identity, error: Exception) -> InboxEvent:
    """What an error that is not the handler's says to those who watch."""
    base: dict[str, Any] = {"consumer": consumer, "type": message.type, "message_id": message.id, "identity": identity}
    if isinstance(error, TryLater):
        return Deferred(**base, reason=error.reason, retry_at=error.retry_at)
    if isinstance(error, PayloadMismatch):
        return Duplicate(**base, mismatch=True)
    if isinstance(error, HandlerEndedTransaction):
        return Dead(**base, attempt=0, error=error)
    return Unsettled(**base, error=error)


Listener: TypeAlias = Callable[[Event], None]

_log = logging.getLogger("onceward")
_LEVELS: dict[type[Event], int] = {
    Failed: logging.WARNING,
    Refused: logging.WARNING,
    Unsettled: logging.WARNING,
    Dead: logging.ERROR,
    AtRisk: logging.WARNING,
    SweepFailed: logging.WARNING,
}


def log(event: Event) -> None:
    """One line an event, control characters escaped, never the payload. The default listener."""
    mismatch = isinstance(event, (Duplicate, Processed)) and event.mismatch
    level = logging.WARNING if mismatch else _LEVELS.get(type(event), logging.DEBUG)
    if not _log.isEnabledFor(level):
        return
    details = [
        f"{name}={codec.printable(_show(getattr(event, name)), 300)}"
        for name in event.__struct_fields__
        if name != "identity" and getattr(event, name) not in (None, False)
    ]
    _log.log(level, "%s %s", type(event).__name__.lower(), " ".join(details))


def _show(value: object) -> str:
    if isinstance(value, BaseException):
        return f"{type(value).__name__}: {value}"
    return f"{value:.6f}" if isinstance(value, float) else str(value)


class Bus:
    """Delivers events to listeners. A listener that raises is logged and harms nobody."""

    def __init__(self, listeners: tuple[Listener, ...]) -> None:
        self._set(listeners)

    def _set(self, listeners: tuple[Listener, ...]) -> None:
        self.listeners = listeners
        self.watchers = tuple(one for one in listeners if getattr(one, "hears_starts", False))
        """Those who hear Started and Finished too."""
        self._only_log = all(one is log for one in listeners)

    def subscribe(self, listener: Listener) -> Callable[[], None]:
        """Add a listener; call what this returns to remove it."""
        self._set((*self.listeners, listener))

        def unsubscribe() -> None:
            self._set(tuple(one for one in self.listeners if one is not listener))

        return unsubscribe

    @property
    def active(self) -> bool:
        """Whether anybody listens. If not, no event need be made."""
        return bool(self.listeners)

    @property
    def is_quiet(self) -> bool:
        """Nobody would do anything with an event that says that all went well."""
        return self._only_log and not (self.listeners and _log.isEnabledFor(logging.DEBUG))

    def emit(self, event: Event) -> None:
        tell(self.listeners, event)


def tell(listeners: tuple[Listener, ...], event: Event) -> None:
    for listener in listeners:
        try:
            listener(event)
        except Exception:  # noqa: BLE001 - whatever it is, the message is settled
            _log.exception("an event listener failed")
