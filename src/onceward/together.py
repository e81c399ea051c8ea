"""Several messages through one transaction: claim all, run their handlers in the order of arrival, commit.

It is optimistic, without savepoints. When something fails, everything is undone and the parts that are left are given
back: around the message that failed, or in halves where nobody can say which it was. A message that is left alone goes
through `onceward.attempt`, so only a message that fails alone burns an attempt.
"""

from __future__ import annotations

from collections.abc import Iterable
from datetime import timedelta
from inspect import isawaitable
from operator import attrgetter
from time import perf_counter
from types import CoroutineType
from typing import Any

import msgspec

from onceward import codec
from onceward.attempt import blocked_by, compare, dead_outcome, duplicate, failure_of, is_mismatch, too_early
from onceward.current import BulkRun, Current, enter, leave
from onceward.errors import (
    BulkError,
    CommitNotApplied,
    HandlerEndedTransaction,
    LeaseLost,
    NestedProcess,
    PayloadMismatch,
    ResultInvalid,
    StoreError,
    StoreUnavailable,
    TryLater,
)
from onceward.handlers import BulkHandler
from onceward.message import Message, Position
from onceward.outcome import Kind, Outcome, Verdict
from onceward.record import Decision, Record, State, decide
from onceward.shield import finish
from onceward.store import Closing, Conflict, Done, Found, Unit
from onceward.work import Work, claims_of

Place = tuple[str, str, int]


class Slot(msgspec.Struct, eq=False):
    """One message of a batch, until it has its outcome."""

    place: int
    work: Work
    digest: bytes
    lane: tuple[str, str] | None
    """With its tenant: two tenants may give their streams the same name."""
    is_free: bool
    """It has no lane, and waits for nobody."""
    outcome: Outcome[Any] | None = None
    done: Done | None = None
    """What is known of the first run, for its twins."""
    apart: bool = False
    """It was in a try that was undone. If it has to wait then, it comes back alone: who spoils a transaction again and
    again must not do so to its neighbours."""
    waits: str = ""
    """For another runner ("flight"), or behind one that does ("lane"): not in this pass."""
    before: Record | None = None
    """Its record, when it has failed before and may run now."""
    result: Any = None
    encoded: bytes | None = None
    duration_ms: float = 0.0
    seen_before: bool = False


def busy(error: TryLater) -> Outcome[Any]:
    return Outcome(Kind.BUSY, error=error, retry_at=error.retry_at)


def comes_again(outcome: Outcome[Any]) -> bool:
    """It is not settled, so nothing of its lane may overtake it."""
    return outcome.verdict not in (Verdict.ACK, Verdict.REJECT)


BY_DIGEST = attrgetter("digest")
"""Batches that share messages claim them in the same order."""


class Lanes:
    """Where the lanes of a batch have stopped: what comes after that place does not run."""

    def __init__(self) -> None:
        self._stopped: dict[tuple[str, str], int] = {}
        self._held: dict[tuple[str, str], int] = {}

    def stop(self, slot: Slot) -> None:
        self.stop_at(slot.lane, slot.place)

    def stop_at(self, lane: tuple[str, str] | None, place: int) -> None:
        if lane is not None:
            self._stopped[lane] = min(place, self._stopped.get(lane, place))

    def hold(self, slot: Slot) -> None:
        """Until the next pass."""
        if slot.lane is not None:
            self._held[slot.lane] = min(slot.place, self._held.get(slot.lane, slot.place))

    def let_go(self) -> None:
        self._held.clear()

    def bars(self, slot: Slot) -> bool:
        """Whether it may not run now; it is told so."""
        if slot.lane is None:
            return False
        if slot.place > self._stopped.get(slot.lane, slot.place):
            slot.outcome = busy(TryLater(reason="blocked", text="a message before it in its lane has to come first"))
            return True
        if slot.place > self._held.get(slot.lane, slot.place):
            slot.waits = "lane"
            return True
        return False


class _Trouble(Exception):
    """What a handler raised, and whose it was; None where only all of them together can be blamed."""

    def __init__(self, error: BaseException, culprits: list[Slot] | None) -> None:
        super().__init__()
        self.error = error
        self.culprits = culprits


class HookFailed(Exception):
    """The user's `on_begin` raised, for all that would have shared its transaction."""


_PASSES_ON = (TryLater, Conflict, HookFailed, NestedProcess, LeaseLost)
_OF_A_MESSAGE = (CommitNotApplied, HandlerEndedTransaction)


class Segment:
    """One try. `work` gives the parts that are left to be worked on, in their order; none once it is committed."""

    def __init__(self, unit: Unit[Any], slots: list[Slot], lanes: Lanes, bulk: BulkHandler | None) -> None:
        self._unit = unit
        self._slots = slots
        self._lanes = lanes
        self._bulk = bulk
        self._new: set[bytes] = set()
        self._claimed_within = timedelta()
        self._ran: list[Slot] = []
        self._idle: list[Slot] = []
        """Claimed with the others, and not run after all."""

    async def work(self) -> list[list[Slot]]:
        try:
            exhausted = await self._claim()
            if exhausted:
                await self._unit.rollback()
                return self._parts(exhausted)
            await (self._run_each() if self._bulk is None else self._run_bulk(self._bulk))
            await self._close()
        except _Trouble as trouble:
            return await self._undo(trouble.error, trouble.culprits)
        except _PASSES_ON:
            raise
        except Exception as error:
            if isinstance(error, StoreError) and not isinstance(error, _OF_A_MESSAGE):
                raise
            return await self._undo(error, None)
        self._settle(self._ran)
        return []

    # --- the claim ------------------------------------------------------------------------------------------

    async def _claim(self) -> list[Slot]:
        """Those that come back are for the single path."""
        slots = self._slots
        in_order = sorted(slots, key=BY_DIGEST)
        claims = claims_of([slot.work for slot in in_order])
        began = perf_counter()
        self._new = new = await self._unit.claim_many(claims)
        self._claimed_within = timedelta(seconds=perf_counter() - began, milliseconds=1)
        if len(new) == len(slots):
            return []
        rest = [slot for slot in slots if slot.digest not in new]
        done = await self._unit.find_done([slot.work.identity for slot in rest])
        for slot in rest:
            known = done.get(slot.digest)
            if known is not None:
                settle_done(slot, known)
        rest = [slot for slot in rest if slot.outcome is None]
        if not rest:
            return []
        found = await self._unit.find_many([slot.work.identity for slot in rest])
        return [slot for slot in rest if self._is_for_itself(slot, found.get(slot.digest))]

    def _is_for_itself(self, slot: Slot, found: Found | None) -> bool:
        """Its tries are used up; or its runner is gone, and where a claim counts as a start, this one has to count."""
        if _judge(slot, found) is Decision.EXHAUSTED:
            return True
        return self._unit.claim_marks and slot.before is not None and slot.before.state is State.RUNNING

    async def _admits(self, slot: Slot) -> bool:
        """Whether it runs now, in its turn."""
        if slot.outcome is not None:
            if comes_again(slot.outcome):
                self._lanes.stop(slot)
            return False
        if slot.waits:
            self._lanes.hold(slot)
            return False
        if self._lanes.bars(slot):
            self._idle.append(slot)
            return False
        if slot.work.message.depends_on:
            missing = await self._missing(slot.work)
            if missing is not None:
                slot.outcome = busy(blocked_by(missing))
                self._lanes.stop(slot)
                self._idle.append(slot)
                return False
        if slot.before is not None and not await self._unit.take(slot.before, slot.work.draft()):
            slot.waits = "flight"
            self._lanes.hold(slot)
            return False
        return True

    async def _missing(self, work: Work) -> Position | None:
        """What it depends on and has not run. Our own claims of this transaction look processed before they are."""
        ran = {id(slot) for slot in self._ran}
        claimed = {
            _place(slot.work) for slot in self._slots if slot.digest in self._new and id(slot) not in ran
        }  # fmt: skip
        for needed in work.message.depends_on:
            if (needed.tenant or work.identity.tenant, needed.stream, needed.position) in claimed:
                return needed
        return await self._unit.unmet(work.whole())

    # --- the handlers ---------------------------------------------------------------------------------------

    async def _run_each(self) -> None:
        """Little is said between two handlers: with many transactions at once, all of it comes from cold caches."""
        unit, ran, all_new = self._unit, self._ran, len(self._new) == len(self._slots)
        tx, stands = unit.tx, unit.stands
        token, began = None, perf_counter()
        try:
            for slot in self._slots:
                if not (all_new and slot.is_free):
                    if not await self._admits(slot):
                        continue
                    began = perf_counter()
                work = slot.work
                handler = work.handler
                number = 1 if slot.before is None else slot.before.attempts + 1
                before = enter(Current(work.identity, handler.shape.name, number, work.redelivered, work.origin))
                token = token or before
                ran.append(slot)
                try:
                    if work.seen_before is not None and await _seen_before(slot, tx):
                        result = None
                    else:
                        result = handler.to_call(work.message, tx)
                        if type(result) is CoroutineType or isawaitable(result):
                            result = await result
                    slot.encoded = None if result is None else codec.encode(result, "result", ResultInvalid)
                except BaseException as error:
                    raise _Trouble(error, [slot]) from error
                ended = perf_counter()
                slot.result, slot.duration_ms, began = result, (ended - began) * 1000, ended
                if not stands():
                    self._check_not_lost()
                    raise _Trouble(HandlerEndedTransaction(), [slot])
        finally:
            if token is not None:
                leave(token)

    def _check_not_lost(self) -> None:
        if self._unit.lost:
            raise StoreUnavailable("the connection was lost while the handlers ran; nothing was written")

    async def _run_bulk(self, bulk: BulkHandler) -> None:
        tx, began = self._unit.tx, perf_counter()
        all_new, as_it_is = len(self._new) == len(self._slots), bulk.shape.payload is None
        messages, wrong = [], []
        for slot in self._slots:
            if not ((all_new and slot.is_free) or await self._admits(slot)):
                continue
            work = slot.work
            self._ran.append(slot)
            try:
                if work.seen_before is None or not await _seen_before(slot, tx):
                    messages.append(work.message if as_it_is else work.handler.decoded(work.message))
            except Exception:  # noqa: BLE001 - it does not decode; alone it is told what is wrong
                wrong.append(slot)
        if wrong:
            raise _Trouble(ResultInvalid(), wrong)
        slots = [slot for slot in self._ran if not slot.seen_before]
        if not slots:
            return
        token = enter(BulkRun(bulk.shape.name))
        try:
            results = await bulk.run(messages, tx)
        except BaseException as error:
            raise _Trouble(error, _named(error, slots, messages)) from error
        finally:
            leave(token)
        duration_ms = (perf_counter() - began) * 1000
        for slot, result in zip(slots, results, strict=True):
            slot.duration_ms = duration_ms
            slot.result = result
            slot.encoded = None
            if result is not None:
                try:
                    slot.encoded = codec.encode(result, "result", ResultInvalid)
                except ResultInvalid as error:
                    raise _Trouble(error, [slot]) from error

    # --- the end --------------------------------------------------------------------------------------------

    async def _close(self) -> None:
        if not self._ran:
            await self._unit.rollback()
            return
        idle = [slot.work.identity for slot in self._idle if slot.digest in self._new]
        if idle:
            await self._unit.unclaim(idle)
        closings = _closings(self._ran)
        if closings:
            await self._unit.complete_many(closings)
        await self._unit.commit()

    def _settle(self, slots: Iterable[Slot]) -> None:
        """They are committed."""
        processed, duplicate = Kind.PROCESSED, Kind.DUPLICATE
        for slot in slots:
            before = slot.before
            slot.done = Done(slot.work.payload_hash, slot.encoded)
            kind = duplicate if slot.seen_before else processed
            mismatch, number = False, 1
            if before is not None:
                mismatch, number = is_mismatch(slot.work, before.payload_hash), before.attempts + 1
            # kind, result, mismatch, error, retry_at, record, attempts, duration_ms
            slot.outcome = Outcome(kind, slot.result, mismatch, None, None, None, number, slot.duration_ms)

    async def _undo(self, error: BaseException, culprits: list[Slot] | None) -> list[list[Slot]]:
        """Nothing stands, or it is repaired; what is left to be done."""
        unit = self._unit
        # Not to be cancelled before the repair: claims of what has not run may stand.
        parts = await finish(self._roll_back(error, culprits))
        if parts is not None:
            if not isinstance(error, Exception):
                raise error
            return parts
        if not isinstance(error, Exception):
            raise error
        if unit.lost:
            raise StoreUnavailable(f"the connection was lost while the handlers ran: {error}") from error
        if unit.is_conflict(error):
            raise Conflict from error
        return self._parts(culprits)

    async def _roll_back(self, error: BaseException, culprits: list[Slot] | None) -> list[list[Slot]] | None:
        """What is left after a repair; None where nothing had to be repaired."""
        stood = self._unit.stands()
        ended = await self._unit.ended()
        await self._unit.rollback()
        if not ended and not isinstance(error, HandlerEndedTransaction):
            return None
        if culprits is None and self._unit.claim_marks:
            culprits = self._ran  # what they said together was applied in part
        # A handler that ended the transaction and began another is only found out later: it may be any of them.
        return await self._repair(error, None if stood and ended else culprits)

    async def _repair(self, error: BaseException, culprits: list[Slot] | None) -> list[list[Slot]]:
        """A handler ended the transaction. If it was with COMMIT, all claims stand, also of what has not run."""
        ran = [slot for slot in self._ran if slot not in (culprits or ())]
        claimed = [slot for slot in self._slots if slot.digest in self._new or slot in ran]
        found = await self._unit.look_many([slot.work.identity for slot in claimed]) if claimed else {}
        stand = _all_ours(claimed, found, self._claimed_within)
        if culprits is None:
            if not stand:
                return self._parts(None)
            culprits, ran = ran, []
        ended = error if isinstance(error, HandlerEndedTransaction) else HandlerEndedTransaction()
        if ended is not error:
            ended.__cause__ = error
        gone = {id(slot) for slot in (*culprits, *ran)}
        await self._unit.repair(
            unclaim=[slot.work.identity for slot in claimed if id(slot) not in gone] if stand else (),
            complete=_closings(ran) if stand else (),
            bury=[(slot.work.whole(), failure_of(ended)) for slot in culprits],
        )
        for slot in culprits:
            slot.outcome = Outcome(Kind.FAILED, error=ended)
            self._lanes.stop(slot)
        if stand:
            self._settle(ran)
        return self._parts(culprits)

    # --- what is left ---------------------------------------------------------------------------------------

    def _parts(self, culprits: list[Slot] | None) -> list[list[Slot]]:
        for slot in self._ran:
            slot.work = slot.work.afresh()
        left = [slot for slot in self._slots if slot.outcome is None and not slot.waits]
        for slot in left:
            slot.before = None
        if culprits is None:
            middle = len(left) // 2
            return [left[:middle], left[middle:]]
        if self._bulk is not None:
            return _apart(left, culprits)
        parts: list[list[Slot]] = [[]]
        for slot in left:
            if slot in culprits:
                parts += [[slot], []]
            else:
                parts[-1].append(slot)
        return parts


def settle_done(slot: Slot, done: Done) -> None:
    """It is a duplicate, whatever becomes of the others."""
    slot.done = done
    try:
        mismatch = compare(slot.work, done.payload_hash)
    except PayloadMismatch as error:
        slot.outcome = Outcome(Kind.FAILED, error=error)
    else:
        slot.outcome = duplicate(slot.work, done, mismatch=mismatch)


def _judge(slot: Slot, found: Found | None) -> Decision | None:
    """What an existing record means. Neither new nor found: another transaction has it."""
    slot.before = None
    if found is None:
        slot.waits = "flight"
        return None
    work, record = slot.work, found.record
    decision = decide(record, work.retry, found.now)
    try:
        match decision:
            case Decision.RUN:
                slot.before = record
            case Decision.BUSY:
                slot.waits = "flight"
            case Decision.DUPLICATE:
                encoded = None if record.result is None else codec.encode(record.result, "result")
                settle_done(slot, Done(record.payload_hash, encoded))
            case Decision.ACCEPTED:
                mismatch = compare(work, record.payload_hash)
                slot.outcome = Outcome(Kind.ACCEPTED, mismatch=mismatch, record=record)
            case Decision.LATER:
                slot.outcome = busy(too_early(record, found.now))
            case Decision.DEAD:
                slot.outcome = dead_outcome(record, mismatch=compare(work, record.payload_hash))
            case Decision.EXHAUSTED:
                pass
    except PayloadMismatch as error:
        slot.outcome = Outcome(Kind.FAILED, error=error)
    return decision


def _place(work: Work) -> tuple[str, str | None, int | None]:
    return work.identity.tenant, work.message.stream, work.message.position


async def _seen_before(slot: Slot, tx: Any) -> bool:
    hook = slot.work.seen_before
    slot.seen_before = hook is not None and bool(await hook(tx, slot.work.message))
    return slot.seen_before


def _closings(slots: list[Slot]) -> list[Closing]:
    """With nothing to say there is no second write."""
    return [
        Closing(slot.work.identity, slot.encoded, slot.duration_ms)
        for slot in slots
        if slot.encoded is not None or slot.before is not None or slot.work.record_duration
    ]


def _all_ours(claimed: list[Slot], found: dict[bytes, Found], within: timedelta) -> bool:
    """Claims of one transaction stand together, and have one time, or on SQLite that of one claim of many; meanwhile
    another runner may have made its own."""
    records = [found[slot.digest].record for slot in claimed if slot.digest in found]
    times = [one.processed_at for one in records if one.processed_at is not None and one.host == claimed[0].work.host]
    return len(times) == len(claimed) > 0 and max(times) - min(times) <= within


def _named(error: BaseException, slots: list[Slot], messages: list[Message[Any]]) -> list[Slot] | None:
    """The culprits that a bulk handler names, as messages or as indexes."""
    if not isinstance(error, BulkError):
        return None
    places = {id(message): place for place, message in enumerate(messages)}
    ids = {message.id: place for place, message in enumerate(messages)}
    named = []
    for one in error.culprits:
        place = one if isinstance(one, int) else places.get(id(one), ids.get(getattr(one, "id", ""), -1))
        if 0 <= place < len(slots):
            named.append(slots[place])
    return named or None


def _apart(left: list[Slot], culprits: list[Slot]) -> list[list[Slot]]:
    """The others together first, each culprit alone, and what follows a culprit in its lane at the end."""
    others, alone, behind = [], [], []
    after: set[tuple[str, str]] = set()
    for slot in left:
        if slot.lane is not None and slot.lane in after:
            behind.append(slot)
        elif slot in culprits:
            alone.append([slot])
            if slot.lane is not None:
                after.add(slot.lane)
        else:
            others.append(slot)
    return [others, *alone, behind]
