"""A turn: messages of some lanes through one transaction.

Read `Turn.work` first. It takes the lanes that are still its own, runs what may run, in order, writes down what became
of each message and how each lane goes on, and commits. It is optimistic: with one savepoint, at its beginning. When a
handler fails after others ran, the turn is given up (`Again`) and done a second time, **careful**, with a savepoint
before each message; and where the database refuses the whole of it, a third time, **alone**, with one message. So only
a message that fails by itself burns an attempt, and its failure is written in the transaction that holds its lane.
"""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from enum import IntEnum
from time import perf_counter
from typing import Any

import msgspec

from onceward import codec
from onceward.current import BulkRun, enter, leave
from onceward.errors import (
    AttemptsExhausted,
    BulkError,
    CommitNotApplied,
    DependencyCycle,
    DependencyDead,
    DependencyMissing,
    HandlerEndedTransaction,
    HandlerNotFound,
    ResultInvalid,
    StoreError,
    StoreUnavailable,
)
from onceward.handlers import BulkHandler, Handler
from onceward.outcome import Kind, Outcome
from onceward.queue import Begun, BlockedLine, Claiming, LaneEnd, Queued, QueueUnit, Taken, Then, TurnClosing
from onceward.record import State
from onceward.shield import finish
from onceward.slot import Settings, Slot, awaited, told_apart
from onceward.store import Conflict

NO_RECORD_PAUSE = 30.0
"""Seconds that a lane waits whose next message has no record. The other lanes go on."""
NO_HANDLER_PAUSE = 30.0
"""Seconds that a lane waits whose message has no handler here: another version of the service may have one."""
LONG_TURN = 1.0
"""Seconds after which a turn begins no more messages: others may have the rest."""
CROWDED_PAUSE = 0.02
"""Seconds that a lane waits whose handler already runs as often as it may."""

RECORDLESS = (
    "a message in the queue has no record: somebody has deleted it. Its lane waits. Delete the message from "
    "onceward_pending and its lane from onceward_lanes too, where it is the last one."
)


class Care(IntEnum):
    OPTIMISTIC = 0
    CAREFUL = 1
    ALONE = 2


class Again(Exception):
    """A signal: nothing of this turn stands; take it again, with more care."""


class Limits:
    """How many turns of this process run a handler, where that is limited."""

    def __init__(self) -> None:
        self._running: dict[str, int] = {}

    def enter(self, handler: Handler) -> bool:
        running = self._running.get(handler.name, 0)
        if handler.concurrency is not None and running >= handler.concurrency:
            return False
        self._running[handler.name] = running + 1
        return True

    def leave(self, handler: Handler) -> None:
        self._running[handler.name] -= 1


class Ahead:
    """The next turn, where it begins in the trip that ends this one."""

    def __init__(self, ask: Callable[[Turn], Claiming | None]) -> None:
        self.ask = ask
        """How it is to begin. None: it is not."""
        self.found: tuple[Claiming, Begun] | None = None
        """How it has begun."""


class Turn:
    """See `work`."""

    def __init__(
        self,
        unit: QueueUnit[Any],
        owner: str,
        settings: Settings,
        *,
        lanes: Sequence[bytes],
        most: int,
        given: Callable[..., Any] | None = None,
        bulk: BulkHandler | None = None,
        limits: Limits | None = None,
        care: Care = Care.OPTIMISTIC,
        marked: bytes | None = None,
        taken: Taken | None = None,
        ahead: Ahead | None = None,
    ) -> None:
        self.unit = self._unit = unit
        self._owner = owner
        self._lanes = lanes
        self._settings = settings
        self._most = most
        self._given = given
        self._bulk = bulk
        self._limits = limits or Limits()
        self.care = care
        self._marked = marked
        """The digest of a message whose start was marked by us."""
        self._ahead = ahead
        self._taken = taken or Taken(frozenset(), ())
        self._has_begun = taken is not None
        self._slots: list[Slot] = []
        self._ends: dict[bytes, LaneEnd] = {}
        """Of lanes in which nothing more runs in this turn."""
        self._stopped: set[tuple[bytes, str]] = set()
        """Tracks in which nothing more runs in this turn."""
        self._blocked: list[BlockedLine] = []
        self._behind: list[int] = []
        self._using: list[Handler] = []
        self._handlers: dict[str, Handler | None] = {}
        self._plain: dict[str, Handler] = {}
        """Those of them with neither a limit nor a lease."""
        self.leased: Slot | None = None
        """A message whose handler runs without a transaction: its lane stays ours."""
        self.full = False
        """There was as much to do as was asked for."""

    async def work(self) -> list[Slot]:
        """What was settled, in its order; committed."""
        unit = self._unit
        if not self._has_begun:
            self._taken = await unit.take_lanes(
                self._owner, self._lanes, most=self._most, idle_limit=self._settings.freeze_after
            )
        if not self._taken.lanes:
            await unit.rollback()
            return []
        self.full = self._is_full()
        self._put_off_recordless()
        try:
            runnable = await self._sort()
            if runnable:
                await unit.savepoint()
                await (self._run_each(runnable) if self._bulk is None else self._run_bulk(self._bulk, runnable))
            await self._end()
        except _Written:
            pass
        finally:
            for handler in self._using:
                self._limits.leave(handler)
        return [slot for slot in self._slots if slot.outcome is not None]

    def _is_full(self) -> bool:
        messages = self._taken.messages
        if len(messages) < self._most or len(self._taken.lanes) == 1:
            return len(messages) >= self._most
        return max(Counter([queued.lane for queued in messages]).values()) >= self._most

    @property
    def messages(self) -> int:
        """So many were settled."""
        return len(self._slots)

    # --- what may run ---------------------------------------------------------------------------------------

    def _put_off_recordless(self) -> None:
        """Nobody can run what they hold, and it is not ours to throw away."""
        for lane in self._taken.recordless:
            self._ends[lane] = LaneEnd(lane.hex(), Then.LATER, NO_RECORD_PAUSE)
            warnings.warn(RECORDLESS, RuntimeWarning, stacklevel=2)

    async def _sort(self) -> list[Slot]:
        """What may run. Anything else is judged only as the first of its lane, when it is known how what comes before
        it has ended: until then it waits for another turn, with all that is behind it."""
        runnable: list[Slot] = []
        begun: set[bytes] = set()
        left: set[bytes] = set()
        for queued in self._taken.messages:
            slot, lane = self._slot_of(queued), queued.lane
            if lane in left or self._bars(slot):
                continue
            plain = self._plain.get(queued.message.type)
            if plain is not None and queued.is_plain:  # as nearly always
                slot.handler = plain
                runnable.append(slot)
                begun.add(lane)
            elif lane in begun and not self._may_follow(slot):
                left.add(lane)
            elif await self._admits(slot):
                runnable.append(slot)
                begun.add(lane)
        return runnable

    def _slot_of(self, queued: Queued) -> Slot:
        marked = self._marked is not None and queued.identity.digest == self._marked
        return Slot(queued, queued.message, int(marked))

    def _may_follow(self, slot: Slot) -> bool:
        queued = slot.queued
        if queued.behind or queued.waits > 0 or queued.unmet is not None or queued.started:
            return False
        try:
            handler = self._handler_of(slot)
        except HandlerNotFound:
            return False
        if handler is None or (handler.lease is not None and self._bulk is None):
            return False
        return handler.concurrency is None or handler in self._using

    def _bars(self, slot: Slot) -> bool:
        """Something before it in its lane, or in its track, has to come first."""
        queued = slot.queued
        return queued.lane in self._ends or (queued.track is not None and (queued.lane, queued.track) in self._stopped)

    async def _admits(self, slot: Slot) -> bool:
        queued = slot.queued
        if queued.behind:
            self._behind.append(queued.seq)
            self._stop_track(slot)
            return False
        if queued.waits > 0:
            self._stop(slot, Then.RETRY if queued.attempts else Then.LATER, queued.waits)
            return False
        if queued.unmet is not None and not await self._dependencies_met(slot):
            return False
        return self._has_handler(slot)

    async def _dependencies_met(self, slot: Slot) -> bool:
        queued, unmet = slot.queued, slot.queued.unmet
        if unmet is not None and self._settings.on_dead_dependency == "run" and _is_dead(unmet.state):
            unmet = await self._next_unmet(slot)
        if unmet is None:
            return True
        needed, timeout = unmet.position, self._settings.dependency_timeout
        deadline = None if timeout is None or queued.received_at is None else queued.received_at + timeout
        text = f"position {needed.position} of {needed.stream!r}"
        problem: Exception | None = None
        if _is_dead(unmet.state) and self._settings.on_dead_dependency == "dead":
            problem = DependencyDead(f"it depends on {text}, which is a dead letter", position=needed)
        elif deadline is not None and deadline <= queued.now:
            problem = DependencyMissing(f"it depends on {text}, which did not come within {timeout}", position=needed)
        elif await self._unit.waits_in_circle(queued, needed):
            problem = DependencyCycle(f"it depends on {text}, which waits for it", position=needed)
        if problem is not None:
            self._settle(slot, slot.bury(problem, self._settings, counted=False))
            return False
        self._blocked.append(
            BlockedLine(
                seq=queued.seq,
                identity=slot.identity,
                lane=queued.lane.hex(),
                tenant=needed.tenant or queued.identity.tenant,
                stream=needed.stream,
                position=needed.position,
                deadline=deadline,
            )
        )
        if queued.rank >= 0:  # its lane is its stream
            self._stop(slot, Then.WAIT)
        else:
            self._stop_track(slot)
        return False

    async def _next_unmet(self, slot: Slot) -> Any:
        """Apart from those that are dead."""
        queued, tenant = slot.queued, slot.queued.identity.tenant
        left = list(queued.message.depends_on)
        while left:
            missing = await self._unit.unmet_of(queued, left)
            if missing is None or not _is_dead(missing.state):
                return missing
            found = missing.position
            left = [one for one in left if (one.tenant or tenant, one.stream, one.position)
                    != (found.tenant or tenant, found.stream, found.position)]  # fmt: skip
        return None

    def _has_handler(self, slot: Slot) -> bool:
        try:
            handler = self._handler_of(slot)
        except HandlerNotFound as error:
            slot.outcome = Outcome(Kind.BUSY, error=error)
            self._stop(slot, Then.LATER, NO_HANDLER_PAUSE)
            self._slots.append(slot)
            return False
        if handler is None:
            slot.outcome = Outcome(Kind.IGNORED, attempts=slot.attempts)
            self._slots.append(slot)
            return False
        slot.handler = handler
        if handler.concurrency is not None and handler not in self._using:
            if not self._limits.enter(handler):
                self._stop(slot, Then.LATER, CROWDED_PAUSE)
                return False
            self._using.append(handler)
        attempts, crashes = slot.queued.attempts, slot.crashes
        if crashes > 0 and slot.retry(self._settings).exhausted(attempts + crashes):
            died = f"the process died, or lost its connection, {crashes} times while handling it; no attempts are left"
            exhausted = AttemptsExhausted(died, attempts=attempts)
            self._settle(slot, slot.bury(exhausted, self._settings, counted=False))
            return False
        if handler.lease is not None and self._bulk is None:
            self._stop(slot, Then.NEXT)  # one at a time: others may take the rest
            if self.leased is None:
                self.leased = slot
            return False
        if handler.concurrency is None:
            self._plain[slot.message.type] = handler
        return True

    def _handler_of(self, slot: Slot) -> Handler | None:
        """Looked up once for each type of message."""
        type_ = slot.message.type
        if type_ not in self._handlers:
            if self._bulk is not None:
                self._handlers[type_] = self._bulk.of_one(self._settings.intake.router.find(type_))
            else:
                self._handlers[type_] = self._settings.intake.handler_for(slot.message, self._given)
        return self._handlers[type_]

    # --- handlers -------------------------------------------------------------------------------------------

    async def _run_each(self, slots: list[Slot]) -> None:
        careful, alone, began = self.care >= Care.CAREFUL, True, perf_counter()
        for slot in slots:
            if self._bars(slot):
                continue
            if self._slots and perf_counter() - began > LONG_TURN:
                break
            try:
                await self._run(slot)
                if careful:
                    await self._unit.savepoint()  # it also tells whether the transaction is still alive
            except BaseException as error:  # noqa: BLE001 - also cancellation: everything must be undone
                await self._failed(slot, error, alone=alone or careful)
                careful = True  # we are back at the savepoint, with nothing before it
                continue
            alone = False

    async def _run(self, slot: Slot) -> None:
        unit, handler, message, settings = self._unit, slot.handler, slot.message, self._settings
        assert handler is not None  # noqa: S101 - see _admits
        began, token = perf_counter(), enter(slot.run(handler))
        try:
            if settings.on_begin is not None:
                await settings.on_begin(unit.tx, message)
            if await self._seen_before(slot):
                result, kind = None, Kind.DUPLICATE
            else:
                result, kind = await awaited(handler, handler.call(message, unit.tx)), Kind.PROCESSED
            slot.keep_result(result)
            if not unit.stands() and not unit.lost:
                raise HandlerEndedTransaction
        finally:
            slot.duration_ms = (perf_counter() - began) * 1000
            leave(token)
        slot.succeed(result, kind)
        self._slots.append(slot)

    async def _seen_before(self, slot: Slot) -> bool:
        hook = self._settings.intake.seen_before
        return hook is not None and bool(await hook(self._unit.tx, slot.message))

    async def _failed(self, slot: Slot, error: BaseException, *, alone: bool) -> None:
        unit, error = self._unit, told_apart(error)
        if not isinstance(error, Exception):
            raise error
        if unit.lost:
            raise StoreUnavailable(f"the connection was lost while the handler ran: {error}") from error
        if isinstance(error, HandlerEndedTransaction) or not unit.stands():
            await self._bury_ended(slot, error)
        is_conflict = unit.is_conflict(error)
        if isinstance(error, StoreUnavailable) and not is_conflict:
            raise error
        if is_conflict or not alone:  # all of it again, unless the handler has committed it
            await self._bury_if_committed(slot, error)
            raise (Conflict if is_conflict else Again) from error
        try:
            await unit.back_to_savepoint()
        except HandlerEndedTransaction as ended:
            await self._bury_ended(slot, ended)
        slot.outcome = None
        if slot in self._slots:
            self._slots.remove(slot)
        self._settle(slot, slot.fail(error, self._settings))

    def _settle(self, slot: Slot, end: LaneEnd | None) -> None:
        """It failed, or is dead; `end` is how its lane goes on."""
        self._slots.append(slot)
        if end is not None:
            self._ends[slot.queued.lane] = end

    def _stop(self, slot: Slot, then: Then, delay: float = 0.0) -> None:
        self._ends[slot.queued.lane] = LaneEnd(slot.queued.lane.hex(), then, delay)

    def _stop_track(self, slot: Slot) -> None:
        if slot.queued.track is not None:
            self._stopped.add((slot.queued.lane, slot.queued.track))

    # --- bulk handlers --------------------------------------------------------------------------------------

    async def _run_bulk(self, bulk: BulkHandler, slots: list[Slot]) -> None:
        """All at once; in halves when that fails, until the one that fails is alone."""
        parts, first = [slots], True
        while parts:
            part = [slot for slot in parts.pop(0) if not self._bars(slot)]
            if not part:
                continue
            if not first:
                await self._unit.savepoint()
            first = False
            try:
                await self._run_part(bulk, part, carefully=len(part) < len(slots) or self.care >= Care.CAREFUL)
            except BaseException as error:  # noqa: BLE001 - also cancellation: everything must be undone
                if len(part) == 1:
                    await self._failed(part[0], error, alone=True)
                    continue
                await self._undo_part(part, error)
                parts = [*_parted(part, error), *parts]
                for slot in part:  # a handler that changed its payload must not find the change
                    payload = slot.queued.payload
                    kept = None if payload is None else codec.decode(payload)
                    slot.message = msgspec.structs.replace(slot.message, payload=kept)

    async def _run_part(self, bulk: BulkHandler, part: list[Slot], *, carefully: bool) -> None:
        unit, settings, began = self._unit, self._settings, perf_counter()
        token = enter(BulkRun(bulk.shape.name))
        try:
            if settings.on_begin is not None:
                await settings.on_begin(unit.tx, part[0].message)
            seen = [slot for slot in part if settings.intake.seen_before and await self._seen_before(slot)]
            part = [slot for slot in part if slot not in seen] if seen else part
            messages = [slot.handler.decoded(slot.message) for slot in part if slot.handler is not None]
            results = await bulk.run(messages, unit.tx) if messages else ()
            encoded = [None if one is None else codec.encode(one, "result", ResultInvalid) for one in results]
            if not unit.stands() and not unit.lost:
                raise HandlerEndedTransaction
            if carefully:
                await unit.savepoint()  # it also tells whether the transaction is still alive
        finally:
            leave(token)
        for slot in seen:
            slot.succeed(None, Kind.DUPLICATE)
            self._slots.append(slot)
        duration_ms = (perf_counter() - began) * 1000
        for slot, result, code in zip(part, results, encoded, strict=True):
            slot.encoded, slot.duration_ms = code, duration_ms
            slot.succeed(result)
            self._slots.append(slot)

    async def _undo_part(self, part: list[Slot], error: BaseException) -> None:
        unit, error = self._unit, told_apart(error)
        if not isinstance(error, Exception):
            raise error
        if unit.lost:
            raise StoreUnavailable(f"the connection was lost while the handler ran: {error}") from error
        if isinstance(error, HandlerEndedTransaction) or not unit.stands():
            await self._bury_ended(None, error, ran=part)
        if unit.is_conflict(error):
            await self._bury_if_committed(None, error, ran=part)
            raise Conflict from error
        try:
            await unit.back_to_savepoint()
        except HandlerEndedTransaction as ended:
            await self._bury_ended(None, ended, ran=part)

    # --- the end --------------------------------------------------------------------------------------------

    async def _end(self) -> None:
        unit, closing, ahead = self._unit, self._closing(), self._ahead
        then = None if ahead is None or self.leased is not None else ahead.ask(self)
        try:
            if ahead is None or then is None:
                await self._close_and_commit(closing)
            else:
                await unit.to_its_end(self._go_on(closing, ahead, then))
        except HandlerEndedTransaction as error:
            await self._bury_ended(None, error)
        except CommitNotApplied as error:
            await self._refused(error)
        except StoreError:
            raise
        except Exception as error:
            if unit.is_conflict(error):
                raise Conflict from error
            await self._refused(error)

    async def _close_and_commit(self, closing: TurnClosing, then: Claiming | None = None) -> Begun | None:
        intake = self._settings.intake
        return await self._unit.close_and_commit(closing, consumer=intake.consumer, host=intake.host, then=then)

    async def _go_on(self, closing: TurnClosing, ahead: Ahead, then: Claiming) -> None:
        """Kept where it is found if we are cancelled."""
        begun = await self._close_and_commit(closing, then)
        ahead.found = None if begun is None else (then, begun)

    def _closing(self) -> TurnClosing:
        done, failed, settled = [], [], []
        for slot in self._slots:
            outcome = slot.outcome
            if outcome is None or outcome.kind is Kind.BUSY:
                continue
            if outcome.kind in (Kind.FAILED, Kind.DEAD):
                failed.append(slot.failed_line(outcome))
            else:
                done.append(slot.done_line())
            settled += slot.settled()
        if self.leased is not None:
            self._stop(self.leased, Then.KEPT)
        ends = [self._ends.get(lane) or LaneEnd(lane.hex()) for lane in sorted(self._taken.lanes)]
        lone = len(done) == len(ends) and not any(slot.is_ordered for slot in self._slots)
        return TurnClosing(self._owner, ends, done, failed, self._blocked, self._behind, lone, settled, self._taken.xid)

    async def _refused(self, error: Exception) -> None:
        """Nothing was written. Who is to blame is known only when one message ran."""
        await self._unit.rollback()
        ran = [slot for slot in self._slots if _ran(slot)]
        if len(ran) != 1 or len(self._slots) != 1 or self.leased is not None:
            raise Again from error
        (slot,) = ran
        self._forget()
        self._settle(slot, slot.fail(error, self._settings))
        await self._write_outside()

    async def _bury_if_committed(self, culprit: Slot | None, error: BaseException, *, ran: Sequence[Slot] = ()) -> None:
        """Where a handler has said COMMIT, and BEGIN, to do it all again would double what the others did."""
        await self._unit.rollback()
        if await finish(self._unit.stood(self._taken)):
            await self._bury_ended(culprit, error, ran=ran)

    async def _bury_ended(self, culprit: Slot | None, error: BaseException, *, ran: Sequence[Slot] = ()) -> None:
        """A handler has ended the transaction. If it was with COMMIT, what ran before it stands; a person has to look
        at the message itself, or at all of them where nobody can say whose handler it was."""
        unit = self._unit
        await unit.rollback()
        stood = await finish(unit.stood(self._taken))
        before = [slot for slot in self._slots if slot is not culprit and _ran(slot)]
        # One that failed may have done it too, with a savepoint that looks like ours.
        failed = [slot for slot in self._slots if slot.was_called and not _ran(slot)]
        culprits = [culprit] if culprit is not None else [*before, *failed, *ran]
        if culprit is None:
            before = []
        if stood is False and culprit is None and len(culprits) > 1:
            raise Again from error
        self._forget()
        if stood is not False:
            if stood is None and before:
                culprits, before = [*before, *culprits], []
            self._slots = before
        ended = error if isinstance(error, HandlerEndedTransaction) else HandlerEndedTransaction()
        if ended is not error:
            ended.__cause__ = error
        for slot in culprits:
            self._settle(slot, slot.bury(ended, self._settings, counted=False))
        await self._write_outside()
        raise _Written

    def _forget(self) -> None:
        self._slots, self._blocked, self._behind = [], [], []
        self._ends.clear()

    async def _write_outside(self) -> None:
        """In a transaction of its own, if the lanes are still ours."""

        async def write() -> None:
            held = await self._unit.hold_lanes(self._owner, self._lanes)
            self._taken = msgspec.structs.replace(self._taken, lanes=held)
            self._slots = [slot for slot in self._slots if slot.queued.lane in held]
            await self._close_and_commit(self._closing())

        await finish(write())


class _Written(Exception):
    """A signal within a turn: it is over."""


def _is_dead(state: State | None) -> bool:
    return state in (State.DEAD, State.DISCARDED)


def _ran(slot: Slot) -> bool:
    return slot.outcome is not None and slot.outcome.kind in (Kind.PROCESSED, Kind.DUPLICATE)


def _parted(part: list[Slot], error: BaseException) -> list[list[Slot]]:
    """In halves, or apart from those that the handler named."""
    named: list[Slot] = []
    if isinstance(error, BulkError):
        for one in error.culprits:
            if isinstance(one, int):
                named += part[one : one + 1]
            else:
                named += [slot for slot in part if slot.message.id == getattr(one, "id", None)]
    if 0 < sum(slot in named for slot in part) < len(part):
        others: list[Slot] = []
        rest: list[list[Slot]] = []  # in their order, each that was named alone
        after: set[bytes] = set()
        for slot in part:
            if slot in named:
                rest.append([slot])
                after.add(slot.queued.lane)
            elif slot.queued.lane not in after:
                others.append(slot)
            elif rest[-1][0] in named:
                rest.append([slot])
            else:
                rest[-1].append(slot)
        return [others, *rest]
    middle = len(part) // 2
    return [part[:middle], part[middle:]]
