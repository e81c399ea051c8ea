"""The protocols a store fulfils, in the words of the domain. The core speaks these verbs and nothing else.

A **unit** takes one message through one transaction on one connection. The order of calls is

    claim, [take], handler, [complete], commit      or, when the handler raised,      rollback, fail

`claim` inserts the record first, in the handler's transaction, and its row count decides: never look, then act.
What is found on a conflict is judged by `onceward.record.decide`; taking over a failed record is a
compare-and-set on (state, attempts, started).
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager
from datetime import datetime
from enum import StrEnum
from typing import Any, Protocol, TypeVar

import msgspec

from onceward.errors import OncewardError
from onceward.identity import Identity
from onceward.message import Position
from onceward.record import Failure, Record, State
from onceward.stats import QueueStats, Stats

Tx = TypeVar("Tx")
Tx_co = TypeVar("Tx_co", covariant=True)


class Features(msgspec.Struct, frozen=True):
    """What a store can do. The conformance suite asks here instead of having a copy per store."""

    transactional: bool = True
    """Effects written through tx are exactly once."""
    concurrent_units: bool = True
    """Several units of work can be open at the same time, so a message can be seen in flight."""
    guards_pool: bool = False
    """A handler that takes a second connection from the store's pool is noticed."""
    errors_abort: bool = False
    """After an error of the database nothing but a rollback works, so a swallowed error cannot be committed."""
    automatic_setup: bool = False
    """Opening the store makes or upgrades its tables."""
    refuses_end: bool = False
    """A handler cannot end the transaction: the database refuses it."""
    listens: bool = False
    """Workers in other processes can be called at once."""
    tables: bool = True
    """It has tables, which have to be set up and upgraded."""
    queue: bool = True
    """It can keep messages and give them out later: `accept`, `run`."""
    positions: bool = True
    """It can tell whether a position of a stream is processed, so messages may depend on each other."""
    claim_marks: bool = False
    """A claim is seen by others and counts as a start: no mark is needed before it."""
    bulk_tx: bool = True
    """What a bulk handler writes through its tx is applied with all of its messages, wherever they are."""
    sweeps_expired: bool = True
    """A record whose own time is over stays until a sweep; else it goes by itself, and no sweep counts it."""


class Finding(msgspec.Struct, frozen=True):
    """Something about a database that endangers what is promised, and what to do about it."""

    name: str
    """A word for it, the same for ever: for filters and tests."""
    text: str
    advice: str
    serious: bool = True
    """Messages may take effect twice. Otherwise it is worth knowing."""


class Found(msgspec.Struct, frozen=True):
    """An existing record, and the database's time when it was read."""

    record: Record
    now: datetime


class Sweepable(StrEnum):
    """Why a processed record may go."""

    EXPIRED = "expired"  # it had a time of its own, which has come
    OLD = "old"  # it had none, and is older than what is kept


class SweptBatch(msgspec.Struct, frozen=True):
    """One batch of a sweep."""

    deleted: int
    more: bool
    """There may be more to delete."""
    last: tuple[Any, Any] | None = None
    """Where the next batch begins. Only the store knows what it means."""


class Done(msgspec.Struct, frozen=True, gc=False):
    """What a duplicate is answered with: the hash to compare, and the result as it was stored."""

    payload_hash: bytes | None
    result: bytes | None


class Claims(msgspec.Struct, frozen=True, gc=False):
    """Many records of runs that succeed, a column each. As objects they would cost more than all else about them."""

    consumer: str
    host: str
    digest: list[bytes]
    """Of their identities."""
    payload_hash: list[bytes]
    key: list[str]
    message_id: list[str]
    tenant: list[str]
    scope: list[str]
    type: list[str]
    source: list[str]
    topic: list[str]
    handler: list[str]
    origin: list[str | None]
    occurred_at: list[datetime | None]
    stream: list[str | None]
    position: list[int | None]
    keep_ms: list[int | None]


class Closing(msgspec.Struct, frozen=True, gc=False):
    """The closing write of one of many; the result is JSON."""

    identity: Identity
    result: bytes | None
    duration_ms: float | None


class InFlight(Exception):
    """A signal of the stores, never seen by users: another transaction has this identity right now."""


class Busy(InFlight):
    """A signal of the stores: the database has one writer at a time, and another transaction is it."""


class Ended(Exception):
    """A signal: a block failed (the cause says how) after it had ended the transaction that it was in."""


class Conflict(Exception):
    """A signal of the stores: the database asks to run the transaction again (40001, 40P01)."""


class Unit(Protocol[Tx_co]):
    """One message through one transaction."""

    @property
    def tx(self) -> Tx_co:
        """What the handler writes through."""

    @property
    def joined(self) -> bool:
        """It is a savepoint in a transaction of the caller's, which `commit` ends; nothing is ours alone."""

    @property
    def claim_marks(self) -> bool:
        """As in Features: a start need not be marked before its claim."""

    @property
    def lost(self) -> bool:
        """The connection, and with it the transaction, is gone."""

    async def claim(self, record: Record) -> Found | None:
        """Begin, and insert the record. None: it is new and ours. InFlight: another transaction has it."""

    async def take(self, found: Record, record: Record) -> bool:
        """Turn the found record into ours, unless it has changed meanwhile or another runner has it."""

    async def unmet(self, record: Record) -> Position | None:
        """The first position the record depends on that this consumer has not processed yet."""

    async def complete(self, record: Record) -> None:
        """The closing write: result, extra and duration."""

    def commit(self) -> Awaitable[None]:
        """Commit, and prove it: CommitNotApplied, CommitUnknown or HandlerEndedTransaction otherwise."""

    async def rollback(self) -> None:
        """Undo everything since the claim. Safe to call at any time, also twice."""

    @property
    def fence(self) -> int | None:
        """Of a claim that is a lease: a number that grows with each claim of the message."""

    async def ended(self) -> bool:
        """Asked before the rollback of a failed run: did the handler end the transaction itself? A joined unit is
        rolled back by asking."""

    def is_conflict(self, error: BaseException) -> bool:
        """A serialization failure or deadlock, which says nothing about the message."""

    # Many messages in one transaction: claim_many, [find_many, take], handlers, [unclaim], [complete_many], commit.

    @property
    def stands(self) -> Callable[[], bool]:
        """Whether, as far as is known without asking the database, the transaction is open and nobody has ended it.
        One and the same question for as long as the transaction lasts: it is asked after each handler."""

    async def claim_many(self, claims: Claims) -> set[bytes]:
        """Begin, and insert the records in their order. That is the order of identities: so two batches that share
        messages cannot wait for each other. The digests of those that are new and ours; the others exist, or
        another transaction has them."""

    async def find_done(self, identities: Sequence[Identity]) -> dict[bytes, Done]:
        """In the open transaction: those that are processed, by digest."""

    async def find_many(self, identities: Sequence[Identity]) -> dict[bytes, Found]:
        """In the open transaction: the records that exist, by digest."""

    async def unclaim(self, identities: Sequence[Identity]) -> None:
        """Remove claims of this transaction, of messages that do not run in it after all."""

    async def complete_many(self, closings: Sequence[Closing]) -> None:
        """The closing write of several."""

    # Each of these is a transaction of its own, on the same connection, outside of the claim's.

    async def find(self, identity: Identity) -> Found | None:
        """The committed record."""

    async def mark(self, found: Record | None, record: Record) -> bool:
        """Commit a start mark. False: the record has changed, or another runner has it."""

    async def unmark(self, record: Record) -> bool:
        """Take a start mark back: the run was interrupted, it did not crash. False: another runner has it."""

    async def fail(
        self, record: Record, failure: Failure, state: State, delay: float | None, *, replayed: bool = False
    ) -> Record | None:
        """Count and keep a failed attempt: state FAILED with a next try after `delay`, or DEAD.

        None when the record is meanwhile somebody else's: it was processed, or another runner has it.
        """

    async def bury(self, record: Record, failure: Failure, *, over: tuple[State, ...]) -> Record | None:
        """Make it a dead letter without counting an attempt, if it is new or in one of the states `over`."""

    async def look_done(self, identities: Sequence[Identity]) -> dict[bytes, Done]:
        """Those that are processed and committed, by digest. What is missing here may still not be called new."""

    async def look_many(self, identities: Sequence[Identity]) -> dict[bytes, Found]:
        """The committed records, by digest."""

    async def repair(
        self, *, unclaim: Sequence[Identity], complete: Sequence[Closing], bury: Sequence[tuple[Record, Failure]]
    ) -> None:
        """After a handler has committed a batch in its middle: remove the claims of what did not run, close what
        ran, and make dead letters of what nobody can know."""

    async def sweep(
        self, consumer: str, what: Sweepable, older: float, *, batch: int, after: tuple[Any, Any] | None = None
    ) -> SweptBatch | None:
        """Delete a batch of processed records: expired, or older than so many seconds. None: another one sweeps.

        A store may make its batches smaller than asked for.
        """

    async def sweepable(self, consumer: str, older: float) -> int:
        """How many processed records are expired, or without a time of their own and older than so many seconds."""

    async def now(self) -> datetime:
        """The time by the clock of the database."""

    async def consumers(self) -> list[str]:
        """The names of all consumers that have records."""

    async def stats(self, consumer: str) -> Stats:
        """How many records the consumer has, by state and age."""

    async def queue_stats(self, consumer: str, *, worst: int = 20) -> QueueStats:
        """What was accepted and is not settled yet. Cheap, however long the queue is."""

    async def records(
        self, consumer: str, states: tuple[State, ...], *, older: float | None, limit: int
    ) -> list[Record]:
        """The oldest records in these states, older than so many seconds."""

    async def discard(self, identity: Identity) -> bool:
        """DEAD -> DISCARDED."""


class LeaseUnit(Unit[Tx_co], Protocol[Tx_co]):
    """Many messages without a transaction, each of which ends by itself: claim_many, [take], then for each begin_one,
    its handler, handled, and for some at a time [complete_many], end_some; or fail."""

    def begin_one(self, identity: Identity) -> tuple[Tx_co, int]:
        """What the handler of this one writes through, and its fence. LeaseLost: it is not ours any more."""

    def was_stopped(self) -> bool:
        """Whether the cancellation that was just heard was the unit's own: the lease of the one that was begun last is
        lost. Then it is taken back, and others can go on."""

    def handled(self) -> None:
        """The handler of the one that was begun last is over. What it left behind can write no more."""

    async def end_some(self, identities: Sequence[Identity]) -> list[OncewardError | None]:
        """Complete them in one trip. What stood against it, for each."""


Begin = Callable[[Tx], Awaitable[Any]]


class Store(Protocol[Tx_co]):
    """Where records live. Opened once per inbox that uses it; the last one to close it closes it."""

    @property
    def features(self) -> Features: ...

    async def open(self) -> None:
        """Connect, and check that the schema fits."""

    async def close(self) -> None: ...

    async def setup(self) -> None:
        """Make or upgrade the tables, under a lock."""

    async def check(self) -> list[Finding]:
        """What about this database endangers what is promised. Only what can be asked quickly: it is asked at start."""

    def unit(
        self,
        *,
        begin: Begin[Any] | None = None,
        wait: float = 5.0,
        read_only: bool = False,
        keep: float | None = None,
    ) -> AbstractAsyncContextManager[Unit[Tx_co]]:
        """A unit of work. `begin` runs first in each of its transactions; `wait` bounds waiting for a turn; `keep` is
        how many seconds a store whose records end by themselves keeps one that has no time of its own."""

    def listening(self, consumer: str, ring: Callable[[], None]) -> AbstractAsyncContextManager[None]:
        """While it lasts, `ring` is called when somebody says `unit.call(consumer)`, if the store can do that."""

    def join(
        self, tx: Any, *, begin: Begin[Any] | None = None, read_only: bool = False
    ) -> AbstractAsyncContextManager[Unit[Any]]:
        """A unit inside a transaction of the caller's. TransactionUnusable: it has failed, or is somewhere else."""
