"""Record: what a store remembers of one identity, and the one table that says how it may change.

`TRANSITIONS` is the state machine. Everything that changes a record's state is a row of it; `decide` says
what a new delivery of the same identity means. The diagram in docs/guarantees.md is made from this table.
"""

from __future__ import annotations

from datetime import datetime, timedelta
from enum import Enum, StrEnum
from typing import Any

import msgspec

from onceward.identity import Identity
from onceward.message import Message, Position
from onceward.retry import RetryPolicy


class State(StrEnum):
    """Where a message stands."""

    ACCEPTED = "accepted"  # kept, to be worked on
    RUNNING = "running"  # a start was marked; nobody said yet how it ended
    PROCESSED = "processed"  # took effect
    FAILED = "failed"  # will be tried again
    DEAD = "dead"  # will not be tried again until a person says so
    DISCARDED = "discarded"  # a person said never


class Change(StrEnum):
    """What can happen to a record."""

    ACCEPT = "accept"
    START = "start"
    SUCCEED = "succeed"
    FAIL = "fail"
    BURY = "bury"
    INTERRUPT = "interrupt"
    REPLAY = "replay"
    DISCARD = "discard"


# (state, change) -> next state. None is "no record yet". What is not here cannot happen.
TRANSITIONS: dict[tuple[State | None, Change], State] = {
    (None, Change.ACCEPT): State.ACCEPTED,
    (None, Change.START): State.RUNNING,
    (None, Change.SUCCEED): State.PROCESSED,
    (None, Change.FAIL): State.FAILED,
    (None, Change.BURY): State.DEAD,
    (State.ACCEPTED, Change.START): State.RUNNING,
    (State.RUNNING, Change.START): State.RUNNING,  # the runner before died
    (State.RUNNING, Change.SUCCEED): State.PROCESSED,
    (State.RUNNING, Change.FAIL): State.FAILED,
    (State.RUNNING, Change.BURY): State.DEAD,
    (State.RUNNING, Change.INTERRUPT): State.FAILED,  # shut down or cancelled: not a crash
    (State.FAILED, Change.ACCEPT): State.ACCEPTED,  # parking
    (State.FAILED, Change.START): State.RUNNING,
    (State.FAILED, Change.SUCCEED): State.PROCESSED,
    (State.FAILED, Change.FAIL): State.FAILED,
    (State.FAILED, Change.BURY): State.DEAD,
    (State.PROCESSED, Change.BURY): State.DEAD,  # the handler committed by itself: a person has to look
    (State.DEAD, Change.REPLAY): State.ACCEPTED,
    (State.DEAD, Change.DISCARD): State.DISCARDED,
}


def from_states(change: Change) -> tuple[State, ...]:
    """The states in which this change may happen to an existing record."""
    return tuple(state for state, happened in TRANSITIONS if happened is change and state is not None)


class Failure(msgspec.Struct, frozen=True, omit_defaults=True):
    """One failed try, as the record keeps it. The last few are kept."""

    type: str
    text: str
    at: str = ""
    traceback: str = ""


_UNSETTLED = (State.ACCEPTED, State.RUNNING, State.FAILED)


class Record(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """One row per identity. Times are the database's; payload and body are kept until processed."""

    identity: Identity
    message_id: str
    type: str
    state: State
    source: str = ""
    topic: str = ""
    origin: str | None = None
    attempts: int = 0
    """Tries that ended, in success or in an error."""
    started: int = 0
    """Marked starts that never ended: the process died."""
    errors: tuple[Failure, ...] = ()
    result: Any = None
    payload: Any = None
    body: bytes | None = None
    headers: dict[str, Any] = msgspec.field(default_factory=dict)
    payload_hash: bytes | None = None
    extra: Any = None
    handler: str | None = None
    host: str | None = None
    received_at: datetime | None = None
    processed_at: datetime | None = None
    duration_ms: float | None = None
    occurred_at: datetime | None = None
    expires_at: datetime | None = None
    """Kept until then, whatever the retention of the inbox says."""
    retention: timedelta | None = None
    """What a delivery asks for: the store sets expires_at to its own time plus this. None in what is read back."""
    next_try_at: datetime | None = None
    stream: str | None = None
    position: int | None = None
    depends_on: tuple[Position, ...] = ()
    received_position: int | None = None
    processed_position: int | None = None
    lane: str | None = None
    """Of a message that was accepted."""

    @property
    def consumer(self) -> str:
        return self.identity.consumer

    @property
    def tenant(self) -> str:
        return self.identity.tenant

    @property
    def scope(self) -> str:
        return self.identity.scope

    @property
    def key(self) -> str:
        return self.identity.key

    @property
    def queued(self) -> bool:
        """It is in the queue of a stored inbox, whatever it waits for there."""
        return self.received_position is not None and self.state in _UNSETTLED

    @property
    def last_error(self) -> str:
        return f"{self.errors[-1].type}: {self.errors[-1].text}" if self.errors else ""

    def message(self) -> Message[Any]:
        """The message again, as far as it was kept: whole until processed, without its payload after."""
        return Message(
            id=self.message_id,
            type=self.type,
            payload=self.payload,
            source=self.source,
            topic=self.topic,
            tenant=self.tenant,
            headers=self.headers,
            occurred_at=self.occurred_at,
            stream=self.stream,
            position=self.position,
            depends_on=self.depends_on,
            body=self.body,
        )


class Decision(Enum):
    """What a delivery means, given the record of its identity."""

    RUN = "run"
    BUSY = "busy"
    DUPLICATE = "duplicate"
    ACCEPTED = "accepted"
    LATER = "later"
    EXHAUSTED = "exhausted"
    DEAD = "dead"


PATIENCE = timedelta(seconds=30)
"""After a start mark, a message is not buried for its crashes before this: its runner may just be slow to claim it."""


def _may_be_alive(record: Record, now: datetime) -> bool:
    return record.state is State.RUNNING and record.next_try_at is not None and now - record.next_try_at < PATIENCE


def decide(record: Record, policy: RetryPolicy | None, now: datetime) -> Decision:
    """Pure: the record, the retry policy if there is one, and the database's time."""
    match record.state:
        case State.PROCESSED:
            return Decision.DUPLICATE
        case State.ACCEPTED:
            return Decision.ACCEPTED
        case State.RUNNING | State.FAILED if record.queued:
            return Decision.ACCEPTED  # workers of the queue go on with it
        case State.DEAD | State.DISCARDED:
            return Decision.DEAD
        case State.RUNNING if record.next_try_at is not None and record.next_try_at > now:
            return Decision.BUSY  # marked a moment ago: its runner is on the way from the mark to the claim
        case State.RUNNING | State.FAILED:
            if policy is None:
                return Decision.RUN
            if policy.exhausted(record.attempts + record.started):
                return Decision.BUSY if _may_be_alive(record, now) else Decision.EXHAUSTED
            if record.next_try_at is not None and record.next_try_at > now:
                return Decision.LATER
            return Decision.RUN
