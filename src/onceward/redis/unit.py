"""RedisUnit: the verbs of a store, where a claim is a lease and its end a script that knows the fencing token.

Whatever is said to the server is said to its end, before a cancellation is heard (`finish_here`): so it is known what
is claimed. What goes through redis-py has a task of its own for that (`apart`).

What is claimed stays visible to others until it is completed, failed or given back. So `rollback` only forgets what the
handler said; what was neither completed nor failed when the block ends is given back as it was before.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Sequence
from datetime import datetime
from time import monotonic
from typing import TYPE_CHECKING, Any, Self

import msgspec

from onceward import codec
from onceward.errors import (
    CommandFailed,
    CommitUnknown,
    HandlerEndedTransaction,
    LeaseLost,
    OncewardError,
    StoreError,
    StoreUnavailable,
    UsageError,
)
from onceward.identity import Identity
from onceward.message import Position
from onceward.record import Change, Failure, Record, State, from_states
from onceward.redis import scripts, value
from onceward.redis.heart import Lease
from onceward.redis.looking import Looking
from onceward.redis.servers import Call, Servers
from onceward.redis.tx import RedisTx
from onceward.shield import finish_here
from onceward.store import Begin, Claims, Closing, Done, Found

if TYPE_CHECKING:
    from onceward.redis.store import RedisStore

KEPT_ERRORS = 10


class Held(msgspec.Struct, eq=False, gc=False):
    """A claim that is ours."""

    digest: bytes
    key: bytes
    fence: int
    """0: it was asked for, and nobody heard the answer."""
    columns: value.Columns
    before: bytes = b""
    """The record as it was; nothing: there was none."""
    counted: int = 1
    """Whether the claim counts as a start."""
    changed: bool = False
    """Its columns are not those that the record has."""
    tx: RedisTx | None = None
    name: str = ""
    """Of the claim."""
    lost: bool = False
    dead: bool = False
    """A command failed after others had been applied."""
    touches: list[bytes] = []
    """Keys of its commands. On a cluster a script has to name them, so that it is sent on, or has to wait, while some
    of them have moved to another server and others have not."""


class RedisUnit(Looking):
    """One message, or several, from their claim to their end."""

    joined = False
    claim_marks = True

    def __init__(self, store: RedisStore, begin: Begin[Any] | None, keep: float) -> None:
        self._store = store
        self._servers: Servers = store.servers
        self._heart = store.heart
        self._begin = begin
        self._keep_ms = max(1, round(keep * 1000))
        self._held: dict[bytes, Held] = {}
        self._seen: dict[bytes, bytes] = {}
        """Records that were found where a claim was tried."""
        self._read_at = (0, 0.0)
        """The server's time in microseconds, and ours when it was heard."""
        self._tx = RedisTx("")
        self._task: asyncio.Task[Any] | None = None
        self._at_work = False
        """A handler of ours runs."""
        self._current: bytes | None = None
        self._stopped = False
        """The task was cancelled because the lease of what it runs is lost."""

    async def __aenter__(self) -> Self:
        self._heart.add(self)
        self._task = asyncio.current_task()
        return self

    async def __aexit__(self, _kind: object, error: BaseException | None, _trace: object) -> None:
        self._at_work = False
        self._tx.end()
        try:
            if self._held:
                await finish_here(self._give_back(list(self._held.values())))
        finally:
            self._heart.remove(self)
        if self.was_stopped() and isinstance(error, asyncio.CancelledError):
            raise LeaseLost from None

    def was_stopped(self) -> bool:
        stopped, self._stopped = self._stopped, False
        return stopped and self._task is not None and self._task.uncancel() == 0

    # --- what the core asks ---------------------------------------------------------------------------------

    @property
    def tx(self) -> RedisTx:
        return self._tx

    @property
    def fence(self) -> int | None:
        held = self._held.get(self._current) if self._current is not None else None
        return None if held is None else held.fence

    @property
    def lost(self) -> bool:
        return False

    @property
    def stands(self) -> Callable[[], bool]:
        return _stands

    async def ended(self) -> bool:
        return False

    def is_conflict(self, _error: BaseException) -> bool:
        return False

    # --- one message ----------------------------------------------------------------------------------------

    async def claim(self, record: Record) -> Found | None:
        key = self._store.key(record.identity)
        self._tx = self._store.tx_beside(key)
        if self._begin is not None:
            await self._begin(self._tx)
        found = await finish_here(self._claim(record, key))
        if found is None:
            self._begin_work(record.identity.digest)
        return found

    async def _claim(self, record: Record, key: bytes) -> Found | None:
        identity = record.identity
        held = Held(identity.digest, key, 0, value.columns_of(record))
        name, lease = self._store.next_claim(), self._store.lease_us
        packed = value.packed(held.columns)
        held.name, held.tx = name, self._tx
        self._held[held.digest] = held  # also while nobody knows whether it is: then it is given back by its name
        call = Call([held.key], [name, lease, 1, int(self._servers.waits), packed])
        [answer], error = await self._servers.run_claims(scripts.CLAIM, [call])
        if answer is None:
            raise _known(error)
        now, reply = answer
        self._heard(now)
        if isinstance(reply, bytes):
            del self._held[held.digest]
            self._seen[held.digest] = reply
            if error is not None:
                raise error
            return Found(value.record_of(identity.consumer, reply), value.moment(now))
        held.fence = reply
        if error is not None:
            raise error  # and what is held is given back
        return None

    async def take(self, found: Record, record: Record) -> bool:
        taken = await finish_here(self._take(found, record, counted=0 if self._many else 1))
        if taken and not self._many:
            self._begin_work(found.identity.digest)
        return taken

    def _begin_work(self, digest: bytes) -> None:
        """From now on a lost lease is told to who runs."""
        self._current, self._at_work = digest, True

    async def _take(self, found: Record, record: Record, *, counted: int) -> bool:
        identity = found.identity
        before = self._seen[identity.digest]
        held = Held(identity.digest, self._store.key(identity), 0, self._following(record, before), before, counted)
        held.changed, held.name, held.tx = True, self._store.next_claim(), None if self._many else self._tx
        self._held[held.digest] = held
        call = Call([held.key], [held.name, self._store.lease_us, counted, before[: value.SEEN]])
        [fence], error = await self._servers.run_claims(scripts.TAKE, [call])
        held.fence = fence or 0
        if fence == 0:
            del self._held[held.digest]
        if error is not None:
            raise error
        return bool(fence)

    def _following(self, record: Record, before: bytes) -> value.Columns:
        """The columns of a record that was there before: when it was received, and what went wrong, stays."""
        known = value.record_of(record.identity.consumer, before)
        return value.columns_of(msgspec.structs.replace(record, received_at=known.received_at, errors=known.errors))

    async def unmet(self, _record: Record) -> Position | None:
        raise UsageError(
            "a Redis store cannot tell whether a position of a stream is processed, so depends_on= does not work here; "
            "SQLite and PostgreSQL stores can"
        )

    async def complete(self, record: Record) -> None:
        held = self._held[record.identity.digest]
        held.columns, held.changed = value.closed(held.columns, record), True

    def commit(self) -> Awaitable[None]:
        return finish_here(self._commit())

    async def _commit(self) -> None:
        self._at_work = False
        self._tx.end()
        held = list(self._held.values())
        if self._many:
            held[0].tx = self._tx  # one for all of them
        if len(held) == 1 and not self._servers.is_cluster:
            outcomes = [await self._complete_one(held[0])]
        else:
            outcomes = await self._complete(held, together=True)
        for error in outcomes:
            if error is not None:
                raise error

    async def rollback(self) -> None:
        """What the handler said is forgotten. The claim is given back when the block ends, or fails before that."""
        self._at_work = False
        self._tx.end()
        self._tx.forget()

    # --- its end --------------------------------------------------------------------------------------------

    async def _complete(self, held: list[Held], *, together: bool) -> list[OncewardError | None]:
        """What came of each; all or none, as far as they share a slot. What is done is not held any more."""
        outcomes = await self._misplaced(held, together=together)
        if any(outcomes):
            right = [one for one, wrong in zip(held, outcomes, strict=True) if wrong is None]
            later = iter(await self._complete_all(right, together=together) if right and not together else [])
            return [wrong or next(later, wrong) for wrong in outcomes]
        return await self._complete_all(held, together=together)

    async def _complete_one(self, held: Held) -> OncewardError | None:
        """The short way of most: there is nothing to be split, and nothing can be in another slot."""
        words = (1, held.counted, *self._completion(held))
        try:
            [reply] = await self._servers.run(scripts.COMPLETE, [held.key], *words, safe=True)
        except StoreUnavailable as error:
            raise _unheard(error) from error
        return self._completed(held, reply)

    async def _complete_all(self, held: list[Held], *, together: bool) -> list[OncewardError | None]:
        counted = held[0].counted

        def args(places: list[int]) -> list[Any]:
            return [int(together), counted, *(arg for place in places for arg in self._completion(held[place]))]

        keys = [one.key for one in held]
        try:
            if together and held[0].tx is not None and held[0].tx.commands:
                places = [list(range(len(held)))]  # what they said is applied once, so one script has to have them all
            else:
                places = self._servers.split(keys)
            calls = [Call([*(keys[one] for one in part), *_touched(held, part)], args(part)) for part in places]
            parts = zip(places, await self._servers.run_all(scripts.COMPLETE, calls, safe=True), strict=True)
        except StoreUnavailable as error:  # what did not happen after all is given back when the block ends
            raise _unheard(error) from error
        outcomes: list[OncewardError | None] = [None] * len(held)
        for part, replies in parts:
            for place, reply in zip(part, replies, strict=True):
                outcomes[place] = self._completed(held[place], reply)
        return outcomes

    def _completion(self, held: Held) -> tuple[Any, ...]:
        keep = held.columns[value.KEEP_MS] if len(held.columns) > value.KEEP_MS else None
        commands = held.tx.packed() if held.tx is not None else b""
        columns = value.packed(held.columns) if held.changed else b""
        own = int(keep is not None)
        return held.fence, self._keep_ms if keep is None else max(1, keep), own, columns, commands

    def _completed(self, held: Held, reply: Any) -> OncewardError | None:
        if isinstance(reply, list):
            applied, said = reply[0], codec.printable(reply[1].decode(errors="replace"))
            if not applied:
                return CommandFailed(f"the server refused a command of the handler, so nothing was applied: {said}")
            held.dead = True
            return HandlerEndedTransaction(value.refusal(applied, said))
        if reply > 0:
            self._held.pop(held.digest, None)
            return None
        if reply == 0:
            self._held.pop(held.digest, None)
        return LeaseLost()

    async def _misplaced(self, held: list[Held], *, together: bool) -> list[OncewardError | None]:
        """Commands are applied with the completion, so on a cluster all they touch has to be in its slot."""
        if not self._servers.is_cluster:
            return [None] * len(held)
        if together:
            return [await self._misplaced_in(held)] * len(held)
        return [await self._misplaced_in([one]) for one in held]

    async def _misplaced_in(self, held: list[Held]) -> OncewardError | None:
        commands = [command for tx in {id(one.tx): one.tx for one in held}.values() if tx for command in tx.commands]
        if not commands:
            return None
        slots = {self._servers.slot(one.key) for one in held}
        keys = await self._servers.keys_of(commands)
        held[0].touches = list(dict.fromkeys(keys))
        other = next((key for key in keys if {self._servers.slot(key)} != slots), None)
        if other is None and len(slots) == 1:
            return None
        named = "several messages" if other is None else repr(other.decode(errors="replace"))
        return UsageError(
            f"{named}: not all of it is in the hash slot of the message, so it cannot be applied with it. "
            'Name keys with tx.beside("..."), or give the store tag= so that messages and keys share a slot.'
        )

    async def fail(
        self, record: Record, failure: Failure, state: State, delay: float | None, *, replayed: bool = False
    ) -> Record | None:
        over = (State.DEAD,) if replayed else from_states(Change.FAIL)
        await self._hook_for(record.identity)
        return await finish_here(self._end(record, failure, state, delay, over=over, attempts=1))

    async def bury(self, record: Record, failure: Failure, *, over: tuple[State, ...]) -> Record | None:
        await self._hook_for(record.identity)
        return await finish_here(self._end(record, failure, State.DEAD, None, over=over, attempts=0))

    async def _end(
        self, record: Record, failure: Failure, state: State, delay: float | None, *, over: tuple[State, ...],
        attempts: int,
    ) -> Record | None:  # fmt: skip
        self._at_work = False
        held = self._held.get(record.identity.digest) or await self._claim_free(record, over)
        if held is None:
            return None
        columns = self._failed_columns(held, record, failure)
        packed = value.packed(columns)
        if held.dead:
            await self._servers.run(scripts.EXPLAIN, [held.key], held.fence, packed)
            self._held.pop(held.digest, None)
            return record
        wait = -1 if delay is None else round(delay * 1_000_000)
        letter = value.LETTERS[state]
        at = await self._servers.run(
            scripts.FAIL, [held.key], held.fence, held.counted, letter, attempts, wait, packed, safe=True
        )
        self._held.pop(held.digest, None)
        if at < 0:
            return None
        before = value.front_of(held.before) if held.before else value.Front(state, 0, 0, 0, 0, held.fence)
        front = before._replace(state=state, fence=held.fence, at=at, attempts=before.attempts + attempts, note="")
        return value.record_of(record.identity.consumer, value.packed_front(front) + packed)

    def _failed_columns(self, held: Held, record: Record, failure: Failure) -> value.Columns:
        said = msgspec.structs.replace(failure, at=self._now().isoformat())
        known = held.columns[value.ERRORS] if len(held.columns) > value.ERRORS else None
        columns = value.columns_of(record)
        columns[value.ERRORS] = [*(known or ()), msgspec.to_builtins(said)][-KEPT_ERRORS:]
        columns.append(record.host)
        return columns

    async def _claim_free(self, record: Record, over: tuple[State, ...]) -> Held | None:
        """A claim that no handler runs for: to write down what somebody says of a message. None: it is not free."""
        digest = record.identity.digest
        found = await self._claim(record, self._store.key(record.identity))
        if found is None:
            return self._held[digest]
        if found.record.state not in over or found.record.state is State.PROCESSED or _is_running(found):
            return None
        if not await self._take(found.record, record, counted=0):
            return None
        return self._held[digest]

    async def _give_back(self, held: list[Held]) -> None:
        """As they were before. If it cannot be said, their leases end by themselves."""

        def args(places: list[int]) -> list[Any]:
            return [arg for place in places for arg in (held[place].fence, held[place].name, held[place].before)]

        for one in held:
            self._held.pop(one.digest, None)
        free = [one for one in held if not one.dead]
        if not free:
            return
        held = free
        try:
            await self._servers.run_split(scripts.RELEASE, [one.key for one in held], args)
        except OncewardError:
            return

    # --- many -----------------------------------------------------------------------------------------------

    _many = False
    _hooked = 0
    """Commands that on_begin gave to the tx of them all."""

    async def claim_many(self, claims: Claims) -> set[bytes]:
        self._many = True
        store, rows = self._store, value.columns_of_claims(claims)
        keys = store.keys(claims)
        self._tx = store.tx_beside(keys[0])
        await self._hook(self._tx)
        self._hooked, self._consumer = len(self._tx), claims.consumer
        return await finish_here(self._claim_many(claims, keys, rows))

    async def _claim_many(self, claims: Claims, keys: list[bytes], rows: list[value.Columns]) -> set[bytes]:
        name, lease, waits = self._store.next_claim(), self._store.lease_us, int(self._servers.waits)
        ours: set[bytes] = set()

        def args(places: list[int]) -> list[Any]:
            return [name, lease, 0, waits, *(value.packed(rows[place]) for place in places)]

        for place, digest in enumerate(claims.digest):  # until it is known which of them are
            self._held[digest] = Held(digest, keys[place], 0, rows[place], b"", 0, name=name)
        parts = self._servers.split(keys)
        calls = [Call([keys[place] for place in part], args(part)) for part in parts]
        answers, error = await self._servers.run_claims(scripts.CLAIM, calls)
        for places, answer in zip(parts, answers, strict=True):
            if answer is None:
                continue
            now, *replies = answer
            self._heard(now)
            for place, reply in zip(places, replies, strict=True):
                digest = claims.digest[place]
                if isinstance(reply, bytes):
                    del self._held[digest]
                    self._seen[digest] = reply
                else:
                    self._held[digest].fence = reply
                    ours.add(digest)
        if error is not None:
            raise error
        return ours

    async def find_done(self, identities: Sequence[Identity]) -> dict[bytes, Done]:
        """Of what was found where a claim was tried."""
        return _done(self._seen_of(identities))

    async def find_many(self, identities: Sequence[Identity]) -> dict[bytes, Found]:
        now = self._now()
        return {digest: Found(value.record_of(self._consumer, one), now) for digest, one in self._seen_of(identities)}

    def _seen_of(self, identities: Iterable[Identity]) -> list[tuple[bytes, bytes]]:
        return [(one.digest, self._seen[one.digest]) for one in identities if one.digest in self._seen]

    async def unclaim(self, identities: Sequence[Identity]) -> None:
        await finish_here(self._give_back([self._held[one.digest] for one in identities if one.digest in self._held]))

    async def complete_many(self, closings: Sequence[Closing]) -> None:
        for closing in closings:
            held = self._held[closing.identity.digest]
            held.columns, held.changed = value.closed(held.columns, closing), True

    def begin_one(self, identity: Identity) -> tuple[RedisTx, int]:
        held = self._held[identity.digest]
        if held.lost:
            raise LeaseLost
        if self._hooked:
            raise UsageError("on_begin gave commands to its tx; in process_many that is not the tx of a message")
        self._tx = held.tx = self._store.tx_for(identity)
        self._begin_work(identity.digest)
        return self._tx, held.fence

    def handled(self) -> None:
        self._tx.end()
        self._current, self._at_work = None, False

    async def end_some(self, identities: Sequence[Identity]) -> list[OncewardError | None]:
        held = [self._held[one.digest] for one in identities]
        return await finish_here(self._complete(held, together=False))

    # --- each by itself -------------------------------------------------------------------------------------

    async def find(self, identity: Identity) -> Found | None:
        await self._hook_for(identity)
        return await finish_here(self._find(identity))

    async def _find(self, identity: Identity) -> Found | None:
        now, found = await self._servers.run(scripts.LOOK, [self._store.key(identity)])
        self._heard(now)
        if found is None:
            return None
        self._seen[identity.digest] = found
        return Found(value.record_of(identity.consumer, found), value.moment(now))

    async def mark(self, _found: Record | None, _record: Record) -> bool:
        """Its claim will be the mark."""
        return True

    async def unmark(self, _record: Record) -> bool:
        return True

    async def look_done(self, identities: Sequence[Identity]) -> dict[bytes, Done]:
        return _done(await self._look(identities))

    async def look_many(self, identities: Sequence[Identity]) -> dict[bytes, Found]:
        found = await self._look(identities)
        now, consumer = self._now(), identities[0].consumer if identities else ""
        return {digest: Found(value.record_of(consumer, one), now) for digest, one in found}

    async def _look(self, identities: Sequence[Identity]) -> list[tuple[bytes, bytes]]:
        if not identities:
            return []
        await self._hook_for(identities[0])
        return await finish_here(self._look_now(identities))

    async def _look_now(self, identities: Sequence[Identity]) -> list[tuple[bytes, bytes]]:
        keys = [self._store.key(one) for one in identities]
        found = []
        for places, (now, *replies) in await self._servers.run_split(scripts.LOOK, keys, lambda _places: ()):
            self._heard(now)
            found += [
                (identities[place].digest, reply)
                for place, reply in zip(places, replies, strict=True)
                if reply is not None
            ]
        return found

    async def repair(
        self,
        *,
        unclaim: Sequence[Identity],  # noqa: ARG002 - what has not run is given back with the unit
        complete: Sequence[Closing],  # noqa: ARG002
        bury: Sequence[tuple[Record, Failure]],
    ) -> None:
        for record, failure in bury:
            await self.bury(record, failure, over=())

    # --- leases ---------------------------------------------------------------------------------------------

    def leases(self) -> list[Lease]:
        """What is held, as far as is known."""
        return [
            Lease(self, one.digest, one.key, one.fence) for one in self._held.values() if one.fence and not one.lost
        ]

    def lose(self, digest: bytes) -> None:
        """Somebody else may have it. Who runs it is told, by a cancellation that ends as LeaseLost."""
        held = self._held.get(digest)
        if held is None:
            return
        held.lost = True
        if self._at_work and self._current == digest and self._task is not None:
            self._stopped, self._at_work = True, False
            self._task.cancel()

    async def discard(self, identity: Identity) -> bool:
        found = await self.find(identity)
        if found is None or not (found.record.state is State.DEAD or _was_left(found)):
            return False
        before = self._seen[identity.digest]
        seen, columns = before[: value.SEEN], value.packed(value.without_payload(value.columns_in(before)))
        return bool(await finish_here(self._servers.run(scripts.DISCARD, [self._store.key(identity)], seen, columns)))

    # --- clocks and hooks -----------------------------------------------------------------------------------

    def _heard(self, micros: int) -> None:
        self._read_at = (micros, monotonic())

    def _now(self) -> datetime:
        """The server's time, as far as it can be known without asking."""
        micros, heard = self._read_at
        return value.moment(micros + round((monotonic() - heard) * 1_000_000))

    async def _hook(self, tx: RedisTx) -> None:
        if self._begin is not None:
            await self._begin(tx)

    async def _hook_for(self, identity: Identity) -> None:
        if self._begin is not None:
            await self._begin(self._store.tx_for(identity))


def _touched(held: list[Held], places: list[int]) -> list[bytes]:
    return [key for place in places for key in held[place].touches]


def _unheard(error: StoreUnavailable) -> CommitUnknown:
    return CommitUnknown(f"nobody said whether the message was completed: {error}")


def _known(error: StoreError | None) -> StoreError:
    return StoreUnavailable("the server did not answer") if error is None else error


def _stands() -> bool:
    return True


def _was_left(found: Found) -> bool:
    """Its runner is gone, as when a replay of a dead letter has killed its process."""
    return found.record.state is State.RUNNING and not _is_running(found)


def _is_running(found: Found) -> bool:
    """Somebody has a lease on it."""
    record = found.record
    return record.state is State.RUNNING and record.next_try_at is not None and record.next_try_at > found.now


def _done(found: Iterable[tuple[bytes, bytes]]) -> dict[bytes, Done]:
    done = {}
    for digest, one in found:
        if one[:1] == b"p":
            payload_hash, result = value.answer_of(one)
            done[digest] = Done(payload_hash, result)
    return done
