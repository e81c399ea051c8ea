"""Everything onceward raises.

A class docstring is the default message. Errors carry what they know as fields, keep the driver's error as
`__cause__`, and say what to do. `onceward.outcome.verdict_of` tells a broker loop what each one means.
"""

from __future__ import annotations

from collections.abc import Iterable
from datetime import datetime, timedelta
from typing import Any


class OncewardError(Exception):
    """Something went wrong in onceward."""

    def __init__(self, text: str | None = None, /, **fields: Any) -> None:
        super().__init__(text or " ".join((type(self).__doc__ or type(self).__name__).split()))
        self.__dict__.update(fields)


# --- how the inbox is used ----------------------------------------------------------------------------------


class UsageError(OncewardError):
    """onceward is called in a way that cannot work."""


class InboxClosed(UsageError):
    """The inbox is not open. Use `async with inbox:` or `await inbox.open()` first."""


class InvalidHandler(UsageError):
    """A handler must be callable as handler(message) or handler(message, tx)."""


class HandlerNotFound(UsageError):
    """No handler is registered for this message type.

    Register one with `@inbox.handler(type)`, or set `unhandled="ignore"` or `unhandled="dead"` on the inbox.
    """

    type: str


class NestedProcess(UsageError):
    """The inbox was called inside a handler on the same SQLite database, and would wait for itself.

    SQLite has one writer, and this handler holds it. Pass its transaction on, as in `accept(message, tx=tx)`, or make
    the call after this handler returned.
    """


class UnknownScheme(UsageError):
    """No store is known for this URL scheme."""

    scheme: str


class MissingDriver(UsageError):
    """A package that this needs is not installed."""

    extra: str


class RecordNotFound(UsageError):
    """There is no record of this message. Check the consumer, tenant and key."""


class NotDead(UsageError):
    """Only a dead letter can be replayed or discarded, and this record is not one."""

    state: str


class TransactionUnusable(UsageError):
    """The transaction given as tx= cannot be used: it has failed, is closed, or is on another database."""


# --- what arrives -------------------------------------------------------------------------------------------


class InvalidMessage(OncewardError):
    """The message cannot be kept. Fix the producer, or reject the delivery."""


class PayloadInvalid(InvalidMessage):
    """The payload cannot be written as JSON."""


class PayloadTooLarge(InvalidMessage):
    """The payload is larger than the inbox allows. Send a reference to it, or raise `max_payload=`."""

    size: int
    limit: int


class KeyMissing(InvalidMessage):
    """The key field is missing, null or empty, so there is nothing to deduplicate by."""

    field: str


class KeyInvalid(InvalidMessage):
    """The key is not a usable value. Keys are made of strings, integers, finite floats and booleans."""


class TenantMissing(InvalidMessage):
    """The inbox has a tenant strategy, and it found no tenant in this message."""


class PayloadMismatch(OncewardError):
    """This identity was already used with another payload. Use a new id or key for new work."""


class AlreadyProcessed(OncewardError):
    """`mark_processed` found that the message is processed already. Roll back what you did for it."""


# --- what handlers say --------------------------------------------------------------------------------------


class TryLater(OncewardError):
    """Not now: do not acknowledge, the message comes again.

    The inbox raises it with `reason` in_flight (another runner has the message), backoff (its next try is
    later), store_busy or blocked (a dependency is missing). A handler may raise `TryLater(30)` itself, with
    seconds or a timedelta, to be run again after that time.
    """

    def __init__(
        self,
        delay: float | timedelta | None = None,
        text: str | None = None,
        *,
        reason: str = "asked",
        retry_at: datetime | None = None,
    ) -> None:
        super().__init__(text or f"try later ({reason})")
        seconds = delay.total_seconds() if isinstance(delay, timedelta) else delay
        self.delay: float | None = None if seconds is None or seconds != seconds else seconds  # noqa: PLR0124 - NaN
        self.reason = reason
        self.retry_at = retry_at


class Reject(OncewardError):
    """The handler rejected the message: it becomes a dead letter at once, and is not tried again."""


class PayloadUndecodable(Reject):
    """The payload does not fit the handler's model. It is kept as a dead letter, with its body."""


class BulkError(OncewardError):
    """A bulk handler says which of its messages are the trouble.

    `BulkError(culprits=[...])` names them, as messages or as indexes of the list it was given. Nothing it wrote
    stands; the others run again without them at once, and each culprit runs alone.
    """

    def __init__(self, text: str | None = None, /, *, culprits: Iterable[Any] = ()) -> None:
        super().__init__(text)
        self.culprits = tuple(culprits)


class HandlerTimeout(OncewardError):
    """The handler took longer than its timeout=, and was cancelled. It is tried again."""


class HandlerCancelled(OncewardError):
    """The handler raised CancelledError although nobody cancelled it: what it waited for was. It is tried again."""


class CommandFailed(OncewardError):
    """The server refused a command that the handler gave to its tx. Nothing was applied; it is tried again."""


class LeaseLost(OncewardError):
    """The lease is over and another worker may have the message. Nothing was written; stop working on it."""


class DependencyMissing(OncewardError):
    """What the message depends on did not come in time. Replay it once that is there."""


class DependencyDead(OncewardError):
    """What the message depends on is a dead letter. Replay that first, then this."""


class DependencyCycle(OncewardError):
    """The message waits for another one that waits for it."""


class ResultInvalid(OncewardError):
    """The handler's result cannot be stored as JSON, so a duplicate could not be answered. Nothing was written."""


class MessageDead(OncewardError):
    """The message is a dead letter and was not run. Replay or discard it."""

    attempts: int


class AttemptsExhausted(MessageDead):
    """No attempts are left, so the message was not run and is a dead letter now. Replay or discard it."""


# --- the store ----------------------------------------------------------------------------------------------


class StoreError(OncewardError):
    """The store could not do its part."""


class StoreUnavailable(StoreError):
    """The database is not there. Do not acknowledge; the message comes again."""


class StoreReadOnly(StoreUnavailable):
    """The database is read-only. Point the inbox at the primary, or at a file that can be written."""


class CommitUnknown(StoreError):
    """The connection was lost during COMMIT: it may or may not have happened.

    Do not acknowledge. When the message comes again, the record decides.
    """


class CommitNotApplied(StoreError):
    """COMMIT rolled back, because the handler swallowed an error of the database. Nothing was written.

    Do not acknowledge. Let the error out of the handler, or catch it outside of `async with tx.transaction()`.
    """


class HandlerEndedTransaction(StoreError):
    """The handler ended the transaction itself. Part of its effect may stand, so a person has to look.

    The message is kept as a dead letter. Leave COMMIT and ROLLBACK to onceward; `async with tx.transaction()`
    makes a savepoint.
    """


class SecondConnection(UsageError):
    """The handler took a second connection from the inbox's pool. What it writes there is not exactly once."""

    handler: str


class SchemaMissing(StoreError):
    """The tables of onceward are not there. Run `onceward setup URL`, or apply what `onceward schema` prints."""


class SchemaOutdated(StoreError):
    """The tables are older than this onceward. Run `onceward setup URL`."""

    found: int
    wanted: int


class SchemaTooNew(StoreError):
    """The tables were made by a newer onceward. Upgrade the package."""

    found: int
    wanted: int


# --- the broker ---------------------------------------------------------------------------------------------


class BrokerUnavailable(OncewardError):
    """The broker cannot be reached. Check its address and that it runs."""
