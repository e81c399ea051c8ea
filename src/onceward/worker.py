"""Workers: claim lanes that are due, take their turns, and wait for more.

Any number of them, in any number of processes, come and go freely. A worker that dies holds its lanes for a few seconds
at most: then another one has them, and works on each alone, with its first message marked, so that a message that kills
its process is found out and its neighbours do not pay for it.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from functools import partial
from secrets import token_hex
from time import monotonic
from typing import Any

import msgspec

from onceward import events
from onceward.errors import CommitUnknown, InboxClosed, OncewardError, StoreUnavailable, TryLater, UsageError
from onceward.handlers import BulkHandler
from onceward.lease import run_leased
from onceward.outcome import Kind, Outcome
from onceward.queue import LaneClaim, QueueUnit, Share
from onceward.settle import CONFLICTS, Settler
from onceward.shield import finish
from onceward.store import Conflict, InFlight
from onceward.turn import CROWDED_PAUSE, Again, Care, Limits, Settings, Slot, Turn
from onceward.wake import Bell

_log = logging.getLogger("onceward")

CLAIM_LEASE = 3.0
"""Seconds between the claim of a lane and the moment when others may have it, unless its turn has begun."""
OVERDUE_EVERY = 1.0
"""Seconds between two looks for dependencies that did not come in time."""
TAKEN_PAUSE = 0.05
"""Seconds that a worker rests when a lane is due that it cannot have: somebody has locked it."""
PASSING = ("26000", "40", "53", "55P03", "57014")
"""SQLSTATEs of PostgreSQL: a handler made it forget what was prepared; deadlock or serialization failure; out of
connections, memory or disk; lock_timeout; statement_timeout. Of our own statements: those of handlers are attempts."""
LONG = 0.5
"""Seconds. After a turn that took longer, the next one is smaller; after a quick one that was full it is larger."""


class Pace:
    """How much a worker takes at once: little when it is quiet, so that others have something to do too; more under
    backlog, less where handlers are slow."""

    SMALL = 1
    PAUSE = 16
    """Turns until long lanes are looked for again."""

    def __init__(self, largest: int) -> None:
        self._largest = max(1, largest)
        self.size = min(self.SMALL, self._largest)
        self._depth = 1
        """Messages of one lane. Of long lanes fewer are taken, and more of each: a lane costs as much as a message."""
        self._pause = 0

    @property
    def lanes(self) -> int:
        return max(1, self.size // self._depth)

    def found(self, lanes: int, messages: int) -> None:
        """What there was in a turn."""
        if messages >= lanes * self._depth:
            if self._pause:
                self._pause -= 1
            else:
                self._depth = min(self._largest, self._depth * 2)
        elif messages * 2 <= lanes * self._depth:
            self._depth, self._pause = max(1, self._depth // 2), self.PAUSE

    def after(self, seconds: float, *, full: bool) -> None:
        if seconds > LONG:
            self.size = max(1, self.size // 2)
        elif full and seconds < LONG / 4:
            self.size = min(self._largest, self.size * 2)

    def idle(self) -> None:
        self.size = min(self.SMALL, self._largest)


class Step(msgspec.Struct):
    """What one claim came to."""

    slots: list[Slot]
    claimed: Sequence[bytes] = ()
    """Lanes."""
    full: bool = False
    due: float | None = None
    """Seconds until a lane is due, when none was claimed."""


class Options(msgspec.Struct, frozen=True, kw_only=True):
    given: Callable[..., Any] | None = None
    bulk: BulkHandler | None = None
    share: Share | None = None
    concurrency: int = 1
    poll_interval: float = 1.0
    batch: int = 100
    grace: float = 25.0


def check_share(share: Any) -> Share | None:
    if share is None:
        return None
    try:
        number, shares = share
        if type(number) is int and type(shares) is int and 0 <= number < shares:
            return number, shares
    except (TypeError, ValueError):
        pass
    raise UsageError(f"share={share!r}: (0, 3) is the first third of all lanes, (2, 3) the last")


class Crew:
    """The workers of one inbox in this process."""

    def __init__(self, settler: Settler[Any], settings: Settings, bus: events.Bus, bell: Bell) -> None:
        self._settler = settler
        self._settings = settings
        self._bus = bus
        self.bell = bell
        self.limits = Limits()
        self._left: list[tuple[str, list[bytes]]] = []
        """Lanes that could not be given back when that was tried."""
        self._looked = 0.0
        self.running = 0
        """Workers."""
        self.leased = 0
        """Workers in a leased handler, which may take as long as it likes."""
        self.closed = False
        """The inbox is: whoever works on its queue ends."""
        self.last_step = monotonic()

    def unit(self, *, read_only: bool = False) -> AbstractAsyncContextManager[Any]:
        return self._settler.plain_unit(read_only=read_only)

    def check_open(self) -> None:
        if self.closed:
            raise InboxClosed("the inbox was closed while it was worked on; stop its workers first")

    # --- one step -------------------------------------------------------------------------------------------

    async def dispatch(self, options: Options) -> Slot | None:
        """One message, or None when nothing is ready."""
        seen: set[bytes] = set()
        while True:
            step = await self.step(options, lanes=1, most=1)
            if step.slots:
                return step.slots[0]
            if seen.issuperset(step.claimed):  # none, or one that came up empty a moment ago
                return None
            seen.update(step.claimed)

    async def step(self, options: Options, *, lanes: int, most: int) -> Step:
        """Claim, and take turns with what was claimed."""
        self.last_step = monotonic()
        owner = f"{self._settings.intake.host}#{token_hex(6)}"
        step, leased = Step([]), None
        try:
            async with self._settler.plain_unit() as unit:
                await self._give_back_left(unit)
                await self._wake_overdue(unit)
                leased = await self._claim(unit, owner, options, lanes=lanes, most=most, step=step)
        except BaseException:
            if leased is not None:
                await finish(self._put_off(owner, leased))
            raise
        finally:
            self._tell(step.slots)  # they are committed, whatever became of the rest
        if leased is not None:
            ran = await self._leased(owner, leased)
            self._tell(ran)
            step.slots += ran
        return step

    async def _claim(
        self, unit: QueueUnit[Any], owner: str, options: Options, *, lanes: int, most: int, step: Step
    ) -> Slot | None:
        """What was claimed is worked on or given back, whatever happens."""
        consumer, claims = self._settings.intake.consumer, list[LaneClaim]()

        async def claim() -> None:
            claims.extend(await unit.claim_lanes(consumer, owner, most=lanes, lease=CLAIM_LEASE, share=options.share))

        try:
            await finish(claim())
            if not claims:
                step.due = await unit.due_in(consumer, options.share)
                return None
            step.claimed = [claim.lane for claim in claims]
            return await self._turns(unit, owner, claims, options, most=most, step=step)
        except SystemExit:
            raise  # a handler ends the process: as any crash, so that one which always does is found out
        except BaseException:
            if claims:
                await finish(self._give_back(unit, owner, [claim.lane for claim in claims]))
            raise

    async def _leased(self, owner: str, slot: Slot) -> list[Slot]:
        handler = slot.handler
        assert handler is not None  # noqa: S101 - see Turn
        if not self.limits.enter(handler):  # the turn that has found it is over, and has left
            await finish(self._put_off(owner, slot, CROWDED_PAUSE))
            return []
        self.leased += 1
        try:
            return [await run_leased(self._settler, self._settings, owner, slot)]
        finally:
            self.leased -= 1
            self.limits.leave(handler)

    async def _put_off(self, owner: str, slot: Slot, delay: float = 0.0) -> None:
        """Its lane is still ours, and nobody crashed. When the database is away: its claim will be over."""
        with suppress(OncewardError):
            async with self._settler.plain_unit() as unit:
                if slot.marked:
                    await unit.unmark_start(slot.queued.record.identity)
                await unit.release(owner, [slot.queued.lane], delay=delay)

    async def _turns(
        self, unit: QueueUnit[Any], owner: str, claims: Sequence[LaneClaim], options: Options, *, most: int, step: Step
    ) -> Slot | None:
        """What is settled goes into the step; what is to be run with a lease comes back."""
        sound = [claim.lane for claim in claims if claim.claims == 1]
        suspect = [claim.lane for claim in claims if claim.claims > 1]
        leased: Slot | None = None
        later: list[bytes] = []  # one lease at a time
        for lanes, number in self._groups(sound, most):
            for turn, slots in await self._together(unit, owner, lanes, options, number):
                step.slots += slots
                step.full = step.full or turn.full
                if leased is None:
                    leased = turn.leased
                elif turn.leased is not None:
                    later.append(turn.leased.queued.lane)
        for lane in suspect:
            if leased is not None:
                later.append(lane)
                continue
            alone, slots = await self._alone(unit, owner, lane, options)
            step.slots += slots
            leased = None if alone is None else alone.leased
        try:
            if later:
                await unit.release(owner, later)
        except BaseException:
            if leased is not None and leased.marked:
                await finish(self._unmark(unit, leased.queued.record.identity))
            raise
        return leased

    def _groups(self, lanes: list[bytes], most: int) -> list[tuple[list[bytes], int]]:
        """What shares a transaction, and how many messages of each lane."""
        if not lanes:
            return []
        if self._settings.on_begin is not None:  # it says whose transaction this is
            return [([lane], 1) for lane in lanes]
        return [(lanes, max(1, most // len(lanes)))]

    async def _together(
        self, unit: QueueUnit[Any], owner: str, lanes: list[bytes], options: Options, most: int
    ) -> list[tuple[Turn, list[Slot]]]:
        """In one turn; where that cannot be, each lane has its own, with one message."""
        with suppress(Again):
            return [await self._patiently(partial(self._turn, unit, owner, lanes, options, most=most))]
        alone = partial(self._turn, unit, owner, options=options, most=1)
        return [await self._patiently(partial(alone, [lane]), Care.ALONE) for lane in lanes]

    def _turn(
        self,
        unit: QueueUnit[Any],
        owner: str,
        lanes: Sequence[bytes],
        options: Options,
        *,
        most: int,
        care: Care,
        marked: bytes | None = None,
    ) -> Turn:
        return Turn(
            unit, owner, lanes, self._settings,
            most=most, given=options.given, bulk=options.bulk, limits=self.limits, care=care, marked=marked,
        )  # fmt: skip

    async def _patiently(self, turn_of: Callable[..., Turn], care: Care = Care.OPTIMISTIC) -> tuple[Turn, list[Slot]]:
        """Again with more care where it failed, and again as it was where the database asks for that."""
        conflicts = 0
        while True:
            turn = turn_of(care=care)
            try:
                return turn, await turn.work()
            except Again:
                await turn.unit.rollback()
                if care is not Care.OPTIMISTIC:
                    raise
                care = Care.CAREFUL
            except Conflict as conflict:
                await turn.unit.rollback()
                conflicts += 1
                if conflicts >= CONFLICTS:
                    text = f"the database asked {conflicts} times to run the transaction again"
                    raise TryLater(reason="store_busy", text=text) from conflict.__cause__
                await asyncio.sleep(0.005 * random.random() * conflicts)  # noqa: S311 - jitter

    async def _alone(
        self, unit: QueueUnit[Any], owner: str, lane: bytes, options: Options
    ) -> tuple[Turn | None, list[Slot]]:
        """Its last worker died, or froze. If the first message was the reason, that is known the next time."""
        taken = await unit.take_lanes(owner, [lane], most=1)
        await unit.rollback()
        if lane not in taken.lanes:
            return None, []
        head = taken.messages[0].record.identity if taken.messages else None
        marked, settled = None if head is None else head.digest, False
        try:
            if head is not None and await finish(unit.mark_start(owner, lane, head)) is None:
                settled = True
                return None, []
            turn, slots = await self._patiently(
                partial(self._turn, unit, owner, [lane], options, most=1, marked=marked)
            )
            ours = slots if turn.leased is None else [*slots, turn.leased]
            settled = any(slot.queued.record.identity == head for slot in ours)
            return turn, slots
        except SystemExit:
            settled = True  # a crash: its mark stays
            raise
        finally:
            if head is not None and not settled:
                await finish(self._unmark(unit, head))

    async def _unmark(self, unit: QueueUnit[Any], head: Any) -> None:
        with suppress(OncewardError):
            await unit.rollback()
            await unit.unmark_start(head)

    # --- giving back ----------------------------------------------------------------------------------------

    async def _give_back(self, unit: QueueUnit[Any], owner: str, lanes: list[bytes]) -> None:
        """Nobody crashed: others may have them at once. What was worked on is not ours any more, and left alone."""
        try:
            await unit.rollback()
            await unit.release(owner, lanes)
        except Exception:  # noqa: BLE001 - the database is away: when it is back, or when the claim is over
            self._left.append((owner, lanes))

    async def _give_back_left(self, unit: QueueUnit[Any]) -> None:
        while self._left:
            owner, lanes = self._left.pop()  # or another worker would give them back too
            try:
                await unit.release(owner, lanes)
            except BaseException:
                self._left.append((owner, lanes))
                raise

    async def _wake_overdue(self, unit: QueueUnit[Any]) -> None:
        if monotonic() - self._looked >= OVERDUE_EVERY:
            self._looked = monotonic()
            await unit.wake_overdue(self._settings.intake.consumer)

    def _tell(self, slots: Sequence[Slot]) -> None:
        bus, consumer, quiet = self._bus, self._settings.intake.consumer, self._bus.is_quiet
        for slot in slots:
            outcome = slot.outcome
            if outcome is None or (quiet and outcome.error is None):
                continue
            message, identity = slot.message, slot.queued.record.identity
            if outcome.kind is Kind.IGNORED:
                bus.emit(events.Ignored(consumer=consumer, type=message.type, message_id=message.id))
            elif outcome.kind is Kind.BUSY and isinstance(outcome.error, UsageError):
                bus.emit(events.Unsettled(
                    consumer=consumer, type=message.type, message_id=message.id, error=outcome.error
                ))  # fmt: skip
            else:
                bus.emit(events.of_outcome(consumer, message, identity, outcome))

    # --- working until told to stop -------------------------------------------------------------------------

    async def run(self, options: Options, stop: asyncio.Event) -> None:
        """Until `stop` is set; then finish what was begun, within the grace."""
        async with self._settler.listening(self._settings.intake.consumer, self.bell.ring):
            await self._run(options, stop)

    async def _run(self, options: Options, stop: asyncio.Event) -> None:
        tasks = [asyncio.ensure_future(self._work(options, stop)) for _ in range(options.concurrency)]
        stopping = asyncio.ensure_future(stop.wait())
        try:
            await asyncio.wait([stopping, *tasks], return_when=asyncio.FIRST_COMPLETED)
            failed = any(task.done() and task.exception() is not None for task in tasks)
            stop_now = stopping.done() or failed
            if stop_now:
                self._halt(stop)
                await asyncio.wait(tasks, timeout=0.0 if failed else options.grace)
        finally:
            stopping.cancel()
            for task in tasks:
                task.cancel()
            # Each gives its lanes back before it ends.
            await finish(_gathered(tasks))
        for task in tasks:
            if not task.cancelled() and task.exception() is not None:
                task.result()

    def _halt(self, stop: asyncio.Event) -> None:
        stop.set()
        self.bell.ring()

    async def _work(self, options: Options, stop: asyncio.Event) -> None:
        ear, pace, trouble = self.bell.ear(), Pace(options.batch), 0
        task = asyncio.current_task()
        self.running += 1
        try:
            # A cancellation may be lost on its way: a handler swallows it, or a driver that hears of a lost connection.
            while not stop.is_set() and not (task is not None and task.cancelling()):
                self.check_open()
                ear.clear()
                began = monotonic()
                try:
                    step = await self.step(options, lanes=pace.lanes, most=pace.size)
                except Exception as error:
                    if not _passes(error):
                        raise
                    trouble += 1
                    _log.warning("a worker of %s pauses: %s", self._settings.intake.consumer, error)
                    await self._rest(ear, min(5.0, 0.05 * 2**trouble) * (0.5 + random.random()))  # noqa: S311
                    continue
                trouble = 0
                if step.claimed:
                    full = step.full or len(step.claimed) >= pace.lanes
                    pace.found(len(step.claimed), len(step.slots))
                    pace.after(monotonic() - began, full=full)
                    continue
                pace.idle()
                patience = options.poll_interval if step.due is None else min(options.poll_interval, step.due)
                await self._rest(ear, patience or min(options.poll_interval, TAKEN_PAUSE))
        finally:
            self.running -= 1
            self.bell.forget(ear)

    @staticmethod
    async def _rest(ear: asyncio.Event, seconds: float) -> None:
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await ear.wait()


def _passes(error: BaseException | None) -> bool:
    """Whether it is the database that has trouble, and not for ever. SQLAlchemy keeps the driver's error as cause."""
    if isinstance(error, (StoreUnavailable, CommitUnknown, TryLater, InFlight, Again)):
        return True
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        if str(getattr(error, "sqlstate", None)).startswith(PASSING):
            return True
        seen.add(id(error))
        error = error.__cause__
    return False


async def _gathered(tasks: Sequence[asyncio.Task[None]]) -> None:
    await asyncio.gather(*tasks, return_exceptions=True)


class RunningWorker:
    """What `inbox.worker()` gives: workers in the background."""

    def __init__(self, stop: asyncio.Event, task: asyncio.Task[None], bell: Bell) -> None:
        self._stop = stop
        self._task = task
        self._bell = bell

    def stop(self) -> None:
        """Take no more; what was begun is finished. Leaving the block waits for that."""
        self._stop.set()
        self._bell.ring()

    @property
    def running(self) -> bool:
        return not self._task.done()


@asynccontextmanager
async def in_background(crew: Crew, options: Options) -> AsyncIterator[RunningWorker]:
    stop = asyncio.Event()
    task = asyncio.ensure_future(crew.run(options, stop))
    worker = RunningWorker(stop, task, crew.bell)
    try:
        yield worker
    finally:
        worker.stop()
        try:
            await asyncio.shield(task)
        except asyncio.CancelledError:
            task.cancel()
            await finish(_gathered([task]))
            raise


def outcome_of_slot(slot: Slot | None) -> Outcome[Any] | None:
    """For those who dispatch: an unhandled type is raised, everything else is an outcome."""
    if slot is None:
        return None
    outcome = slot.outcome
    if outcome is not None and outcome.kind is Kind.BUSY and isinstance(outcome.error, UsageError):
        raise outcome.error
    return outcome
