"""The queue of a stored inbox, in the words of the domain: what a store must understand to keep messages and give
them out again.

    accept                                                           a message is kept, and its lane is there
    claim_lanes                                                      a worker owns some lanes, for a short while
    take_lanes, handlers, close_lanes, commit                        one turn: their messages, in one transaction
    begin_turn, handlers, close_and_commit                           the same with fewer trips, where that is possible
    release                                                          given back untouched

A **lane** that has something to do is one row with a time: from then on a worker may claim it. The claim is committed
on its own, with the worker's name and a new time, after which others may have it: so a worker that dies holds nobody
up. The turn begins by locking its lanes and checking that they are still its own, which no other worker can undo; so
a worker that froze and wakes up too late finds out before it has done anything.

A lane without messages is no row at all. Who adds a message to a lane and who ends a lane exclude each other.

**Order.** In a lane the lowest `rank` comes first, then the first that arrived. In a lane that is one stream, rank is
the position. In any other it is SHARED, and each stream in it is a **track**: when a turn comes to a message of a
track, the lowest position of that track runs in its place. A message that waits for a dependency lets its lane sleep
if that is one stream; else it is set **aside**, and its track stays behind while the rest of the lane goes on.

**Dependencies.** Whoever settles a record that has a position (inline, in a batch, in a turn, by hand) wakes what waits
for it, in the same transaction: the store sees to that. Waiting for a position and settling it exclude each other.
"""

from __future__ import annotations

from collections.abc import Awaitable, Coroutine, Sequence
from datetime import datetime
from enum import StrEnum
from typing import Any, Protocol, TypeVar

import msgspec

from onceward.identity import Identity
from onceward.message import Message, Position
from onceward.record import Record, State
from onceward.store import Unit

Tx_co = TypeVar("Tx_co", covariant=True)
T = TypeVar("T")

SHARED = -1
"""The rank of all messages in a lane that is not one stream: they run as they came."""
LAST = 2**63 - 1
"""The rank of a message without a position in a lane that is one stream: after those that have one."""


class QueueLine(msgspec.Struct, frozen=True, gc=False, omit_defaults=True):
    """A message to keep, flat: its JSON is what is sent."""

    identity: str
    """16 bytes as hex."""
    lock: int
    """The first 8 of them as a number, for databases that lock numbers."""
    tenant: str
    scope: str
    key: str
    type: str
    lane: str
    """16 bytes as hex: of the consumer, the tenant and the lane's name; the identity where it needs no order."""
    share: int
    """An unsigned number of 32 bits, the same for all of a lane, by which fixed shares split lanes."""
    rank: int
    track: str | None = None
    """Its stream, in a lane that is not just that stream."""
    lane_name: str | None = None
    message_id: str | None = None
    """Where it is not the key."""
    source: str = ""
    topic: str = ""
    origin: str | None = None
    payload: str | None = None
    """JSON in JSON: a text that says \\u0000 must not be understood on its way."""
    body: bytes | None = None
    headers: str | None = None
    payload_hash: bytes | None = None
    occurred_at: datetime | None = None
    stream: str | None = None
    position: int | None = None
    depends_on: str | None = None
    not_before: datetime | None = None


class Kept(StrEnum):
    """What became of a line: it is new, a failed record joined the queue, or what was there before."""

    NEW = "new"
    PARKED = "parked"
    IN_FLIGHT = "in_flight"  # another transaction has this identity right now
    ACCEPTED = "accepted"  # it is in the queue, whatever its state
    PROCESSED = "processed"
    DEAD = "dead"  # or discarded


class KeptLine(msgspec.Struct, frozen=True, gc=False):
    how: Kept
    payload_hash: bytes | None = None
    """Of what was there before."""


class LaneClaim(msgspec.Struct, frozen=True, gc=False):
    """A lane that is ours for a while."""

    lane: bytes
    claims: int
    """Claims that nobody gave back, with this one. Above 1 the worker before us died, or froze."""


class Unmet(msgspec.Struct, frozen=True, gc=False):
    """The first position that a message depends on and that is not processed."""

    position: Position
    """With its tenant."""
    state: State | None
    """Of the record at that position; None: it never came."""


class Queued(msgspec.Struct, frozen=True, gc=False):
    """One message of a lane, in its turn."""

    seq: int
    """Its place in the order of arrival, which is the record's received_position."""
    lane: bytes
    identity: Identity
    message: Message[Any]
    now: datetime
    """The database's time when it was read."""
    rank: int = SHARED
    due: datetime | None = None
    """Not before: the time that was asked for, or of the next try."""
    track: str | None = None
    behind: bool = False
    """A message of its track that is set aside comes first."""
    unmet: Unmet | None = None
    attempts: int = 0
    """As those of its record, and so is what follows."""
    started: int = 0
    origin: str | None = None
    received_at: datetime | None = None
    payload: str | None = None
    """As JSON: a handler may have changed that of the message."""
    places: tuple[str, str] | None = None
    """Where the store has its record and itself, if it finds them faster so."""

    @property
    def is_plain(self) -> bool:
        """Nothing about it has to be looked at before it runs."""
        return self.due is None and self.unmet is None and not self.behind and not self.started

    @property
    def waits(self) -> float:
        """Seconds until it is due."""
        return 0.0 if self.due is None else max(0.0, (self.due - self.now).total_seconds())


class Taken(msgspec.Struct, frozen=True):
    """What a turn has to do."""

    lanes: frozenset[bytes]
    """Those that are still ours. A lane without messages is closed like any other."""
    messages: tuple[Queued, ...]
    """In the order in which they may run, lane by lane."""
    xid: str | None = None
    """The transaction, where the database can tell later what became of it."""
    recordless: frozenset[bytes] = frozenset()
    """Lanes whose next message has no record: somebody has deleted it."""


Share = tuple[int, int]
"""(0, 3): the first third of all lanes."""


class Spare(msgspec.Struct, frozen=True, gc=False):
    """A lane that was claimed for a turn after the one that has begun."""

    lane: bytes
    place: str
    """Where the store has its row."""


class Claiming(msgspec.Struct, frozen=True):
    """Which lanes to claim, and how to begin a turn with them."""

    consumer: str
    owner: str
    lanes: int
    """So many, at most."""
    most: int
    """About so many messages in all."""
    lease: float
    """Seconds for which they are ours, unless the turn has begun."""
    share: Share | None = None
    idle_limit: float | None = None
    """See `take_lanes`."""
    in_turn: int | None = None
    """So many of the lanes are for the turn that begins; the others are spare. None: all are."""
    spare: Sequence[Spare] = ()
    """Where there are any, nothing is claimed: the turn begins with these, which are ours already."""


class Begun(msgspec.Struct, frozen=True):
    """Lanes that were claimed, and perhaps the turn that has begun with them."""

    lanes: Sequence[bytes]
    suspects: Sequence[bytes] = ()
    """More lanes, whose last worker died, or froze: each has a turn of its own."""
    taken: Taken | None = None
    """None: it has not begun."""
    spare: Sequence[Spare] = ()
    """Claimed as well, for turns after this one."""

    @property
    def claimed(self) -> list[bytes]:
        """Those to work on now."""
        return [*self.lanes, *self.suspects]


class DoneLine(msgspec.Struct, frozen=True, gc=False, omit_defaults=True):
    """It took effect."""

    seq: int
    identity: str
    handler: str | None = None
    result: str | None = None
    duration_ms: float | None = None
    keep_ms: int | None = None
    """A retention of its own."""
    started: int = 0
    """1 where a start mark of ours is to be taken back."""
    record: str | None = None
    """Where its record is, and its row in the queue: see Queued.places."""
    row: str | None = None


class FailedLine(msgspec.Struct, frozen=True, gc=False, omit_defaults=True):
    """It did not, and is tried again after `delay` seconds; or never, and is a dead letter."""

    seq: int
    identity: str
    error: str
    """A Failure as JSON."""
    handler: str | None = None
    delay: float | None = None
    dead: bool = False
    counted: bool = True
    """An attempt."""
    duration_ms: float | None = None
    started: int = 0


class BlockedLine(msgspec.Struct, frozen=True, gc=False, omit_defaults=True):
    """It waits for a position."""

    seq: int
    identity: str
    lane: str
    tenant: str
    stream: str
    position: int
    deadline: datetime | None = None
    """When to look again even if it has not come."""


class Then(StrEnum):
    """How a lane goes on after a turn."""

    NEXT = "next"  # by what is in it: it goes on, sleeps until one set aside may run, or ends
    RETRY = "retry"  # after `delay` seconds, with its first message, which failed
    LATER = "later"  # after `delay` seconds, when its first message is due
    WAIT = "wait"  # it is one stream, whose first message waits for a position
    BLOCKED = "blocked"  # by a dead letter, until a person says how it goes on
    KEPT = "kept"  # it stays ours: its message runs with a lease


class LaneEnd(msgspec.Struct, frozen=True, gc=False, omit_defaults=True):
    lane: str
    then: Then = Then.NEXT
    delay: float = 0.0
    blocker: str | None = None
    """The identity that it is blocked by, as hex."""


class TurnClosing(msgspec.Struct, frozen=True):
    """All that a turn came to."""

    owner: str
    lanes: Sequence[LaneEnd]
    done: Sequence[DoneLine] = ()
    failed: Sequence[FailedLine] = ()
    blocked: Sequence[BlockedLine] = ()
    behind: Sequence[int] = ()
    """The seq of those that come after one of their track that is set aside."""
    lone: bool = False
    """Each of its lanes is one message without a lane, and done."""
    settled: Sequence[tuple[str, str, int]] = ()
    """The positions that are done, or will never be: of a tenant, in a stream."""
    xid: str | None = None
    """See Taken."""


class BusyLanes(msgspec.Struct, frozen=True):
    """Which of some lanes have messages in the queue, and whether any lane of the consumer has."""

    lanes: frozenset[bytes]
    any: bool


class QueueUnit(Unit[Tx_co], Protocol[Tx_co]):
    """A unit of a store that has a queue. What is "alone" here is a short transaction of its own."""

    async def accept(self, lines: Sequence[QueueLine], *, consumer: str, host: str) -> list[KeptLine]:
        """Keep them, in one trip; committed when this returns, unless the unit is joined. Identities are distinct.

        What was there before is said for each, in their order.
        """

    async def claim_lanes(
        self, consumer: str, owner: str, *, most: int, lease: float, share: Share | None = None
    ) -> list[LaneClaim]:
        """Alone: own up to `most` lanes that are due, the longest due first, for `lease` seconds."""

    async def take_lanes(
        self, owner: str, lanes: Sequence[bytes], *, most: int, idle_limit: float | None = None
    ) -> Taken:
        """Begin the turn's transaction: lock those lanes that are still ours, then, in a second statement, read up to
        `most` messages of each. Claim and read in one statement would read what the one before us has done.

        After `idle_limit` seconds of silence the database may end the transaction, where it can.
        """

    async def begin_turn(self, claiming: Claiming, *, apart: bool = False) -> Begun:
        """Claim lanes. Where that can be said in the same trip, and unless each is to be worked on `apart`, also begin
        a turn with them."""

    def to_its_end(self, work: Coroutine[Any, Any, T]) -> Awaitable[T]:
        """Await work with this unit that must not be cancelled: a cancellation is heard after it."""

    async def hold_lanes(self, owner: str, lanes: Sequence[bytes]) -> frozenset[bytes]:
        """Begin a transaction that locks those lanes that are still ours."""

    async def unmet_of(self, queued: Queued, depends_on: Sequence[Position]) -> Unmet | None:
        """In the turn's transaction: the first of these positions that is not processed."""

    async def waits_in_circle(self, queued: Queued, needed: Position) -> bool:
        """In the turn's transaction: whether what is needed waits, by however many others, for this message's stream at
        its position or later."""

    async def stood(self, taken: Taken) -> bool | None:
        """Alone, after a handler has ended the turn's transaction: was it committed? None: nobody can say."""

    async def savepoint(self) -> None:
        """In the turn's transaction: a place to go back to. One at a time; a new one replaces it. CommitNotApplied: a
        handler has swallowed an error of the database."""

    async def back_to_savepoint(self) -> None:
        """Undo what was written since. `tx` may be another one now. HandlerEndedTransaction: it is there no more."""

    async def close_lanes(self, closing: TurnClosing, *, consumer: str, host: str) -> None:
        """In the turn's transaction: write down what it came to. HandlerEndedTransaction: a message is gone."""

    async def close_and_commit(
        self, closing: TurnClosing, *, consumer: str, host: str, then: Claiming | None = None
    ) -> Begun | None:
        """Both, in one trip where that is possible. It raises what either of them raises.

        Where `goes_on`, the next turn begins in the same trip: `then` says how, and what has begun comes back. None: it
        could not, which is no error of the turn that has ended.
        """

    @property
    def goes_on(self) -> bool:
        """Whether one turn can begin in the trip that ends another."""

    @property
    def gone(self) -> bool:
        """The connection cannot be used any more, whoever ended it. What is "alone" goes through another one."""

    async def release(self, owner: str, lanes: Sequence[bytes], *, delay: float = 0.0, suspect: bool = False) -> None:
        """Alone: give lanes back that were not worked on, and take the claim back. Those not ours are left alone.

        With `suspect` the claim stands, as that of a worker that died: who claims them next works on each alone.
        """

    async def extend(self, owner: str, lanes: Sequence[bytes], lease: float) -> frozenset[bytes]:
        """Alone: own them for another while. Those that are still ours."""

    async def mark_start(self, owner: str, lane: bytes, identity: Identity) -> Record | None:
        """Alone: commit a start mark of a message that may have killed its worker. None: the lane is not ours."""

    async def unmark_start(self, identity: Identity) -> None:
        """Alone: take it back, the process did not die."""

    async def call(self, consumer: str) -> None:
        """Alone, or at the commit of a joined unit: tell workers in other processes that there is something to do."""

    async def busy_lanes(self, consumer: str, lanes: Sequence[bytes]) -> BusyLanes:
        """Alone: where a message would have to wait its turn."""

    async def due_in(self, consumer: str, share: Share | None = None) -> float | None:
        """Alone: seconds until the next lane is due, 0 when one is. None: nothing is scheduled."""

    async def wake_overdue(self, consumer: str) -> int:
        """Alone: let messages be looked at again whose deadline for a dependency has come. How many."""

    async def requeue(self, identity: Identity, line: QueueLine) -> bool:
        """Alone: a dead letter of the queue goes back to its place, as if it had never been tried."""

    async def drop(self, identity: Identity, line: QueueLine) -> bool:
        """Alone: DEAD -> DISCARDED, and its lane goes on."""
