"""One step of a worker: claim lanes that are due, take turns with them, give back what was not worked on.

A worker that dies holds its lanes for a few seconds at most: then another one has them, and works on each alone, with
its first message marked, so that a message that kills its process is found out and its neighbours do not pay for it.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager, suppress
from functools import partial
from time import monotonic
from typing import Any

import msgspec

from onceward import events
from onceward.brake import Brake
from onceward.errors import InboxClosed, OncewardError, TryLater, UsageError
from onceward.handlers import BulkHandler
from onceward.lease import run_leased
from onceward.outcome import Kind, Outcome
from onceward.pace import Pace
from onceward.queue import Begun, Claiming, QueueUnit, Share, Taken
from onceward.settle import CONFLICTS, Settler
from onceward.shield import finish
from onceward.slot import Settings, Slot
from onceward.spares import Spares
from onceward.store import Conflict
from onceward.turn import CROWDED_PAUSE, Again, Ahead, Care, Limits, Turn
from onceward.wake import Bell

CLAIM_LEASE = 3.0
"""Seconds between the claim of a lane and the moment when others may have it, unless its turn has begun."""
LARGEST = 1_000
"""Messages that a worker takes at once, at most, unless told otherwise: more gain little."""
ROUND = 0.1
"""Seconds for which a worker goes on with the same connection: then others may have it."""
OVERDUE_EVERY = 1.0
"""Seconds between two looks for dependencies that did not come in time."""


class Step(msgspec.Struct):
    """What one claim came to."""

    claiming: Claiming
    """What was asked for."""
    slots: list[Slot] = []
    claimed: Sequence[bytes] = ()
    """Lanes."""
    full: bool = False
    again: bool = False
    """A turn had to be done again, with more care."""
    due: float | None = None
    """Seconds until a lane is due, when none was claimed."""
    told: bool = False
    """The pace knows of it."""


class Options(msgspec.Struct, frozen=True, kw_only=True):
    given: Callable[..., Any] | None = None
    bulk: BulkHandler | None = None
    share: Share | None = None
    concurrency: int = 1
    poll_interval: float = 1.0
    batch: int = LARGEST
    grace: float = 25.0
    brake: Brake | None = None

    @property
    def brakes(self) -> bool:
        return self.brake is not None and self.brake.on


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
    """What the workers of one inbox in this process share."""

    def __init__(self, settler: Settler[Any], settings: Settings, bus: events.Bus, bell: Bell) -> None:
        self._settler = settler
        self._settings = settings
        self._bus = bus
        self.bell = bell
        self.limits = Limits()
        self._left: list[tuple[str, list[bytes], bool]] = []
        """Lanes that could not be given back when that was tried, by whom, and whether they are suspect."""
        self._looked = 0.0
        self.running = 0
        """Workers."""
        self.leased = 0
        """Workers in a leased handler, which may take as long as it likes."""
        self.closed = False
        """The inbox is: whoever works on its queue ends."""
        self.last_step = monotonic()

    @property
    def consumer(self) -> str:
        return self._settings.intake.consumer

    def listening(self) -> AbstractAsyncContextManager[None]:
        """While it lasts, workers hear what is accepted in other processes."""
        return self._settler.listening(self.consumer, self.bell.ring)

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
            step = await self.step(options, Pace(1))
            if step.slots:
                return step.slots[0]
            if seen.issuperset(step.claimed):  # none, or one that came up empty a moment ago
                return None
            seen.update(step.claimed)

    async def step(self, options: Options, pace: Pace, goes_on: Callable[[], bool] | None = None) -> Step:
        """Claim, and take turns with what was claimed.

        With `goes_on`, while that says so, the next claim is made in the trip that ends a turn: so this may be several
        steps, of which the last comes back.
        """
        self.last_step = began = monotonic()
        step, leased, begun = Step(self._claiming(options, pace)), None, None
        spares = Spares(self._give_back_elsewhere)

        def ask(turn: Turn) -> Claiming | None:
            if goes_on is None or self.closed or self._left or not goes_on() or options.brakes:
                return None
            if not spares and monotonic() - began > ROUND:
                return None
            step.told = True
            pace.went(len(step.claimed), turn.messages, full=turn.full, again=turn.care is not Care.OPTIMISTIC)
            return spares.next(step.claiming, pace.lanes) or self._claiming(options, pace, ahead=True)

        try:
            async with self._settler.plain_unit() as unit:
                await self._give_back_left(unit)
                await self._wake_overdue(unit)
                # With on_begin each lane has a transaction of its own, and the next may be another tenant's.
                ahead = Ahead(ask) if unit.goes_on and self._settings.on_begin is None else None
                try:
                    while True:
                        pace.begin()
                        leased = await self._claim(unit, step, begun, options, ahead, goes_on=goes_on)
                        if step.claimed and not step.told:
                            pace.went(len(step.claimed), len(step.slots), full=step.full, again=step.again)
                        if ahead is None or ahead.found is None:
                            break
                        self._tell(step.slots, options)
                        (claiming, begun), ahead.found = ahead.found, None
                        spares.went_on(claiming, begun)
                        pace.claimed(len(begun.claimed) + len(begun.spare), claiming)
                        step, self.last_step = Step(claiming), monotonic()
                finally:
                    await finish(self._give_back_spares(unit, step.claiming.owner, spares))
        except BaseException:
            if leased is not None:
                await finish(self._put_off(step.claiming.owner, leased))
            raise
        finally:
            self._tell(step.slots, options)  # they are committed, whatever became of the rest
        if leased is not None:
            ran = await self._leased(step.claiming.owner, leased)
            self._tell(ran, options)
            step.slots += ran
        return step

    def _claiming(self, options: Options, pace: Pace, *, ahead: bool = False) -> Claiming:
        owner, lanes = f"{self._settings.intake.host}#{random.getrandbits(48):x}", pace.lanes
        return Claiming(
            self.consumer, owner, pace.ahead if ahead else lanes, pace.size, CLAIM_LEASE, options.share,
            self._settings.freeze_after, lanes,
        )  # fmt: skip

    async def _claim(
        self,
        unit: QueueUnit[Any],
        step: Step,
        begun: Begun | None,
        options: Options,
        ahead: Ahead | None,
        *,
        goes_on: Callable[[], bool] | None,
    ) -> Slot | None:
        """What was claimed, now or ahead of this, is worked on or given back, whatever happens."""
        claiming, found = step.claiming, [] if begun is None else [begun]

        async def begin() -> None:
            found.append(await unit.begin_turn(claiming, apart=self._settings.on_begin is not None))

        try:
            if not found:
                await unit.to_its_end(begin())
            step.claimed = found[0].claimed
            if not step.claimed:
                step.due = await unit.due_in(self.consumer, options.share)
                return None
            return await self._turns(unit, step, found[0], options, ahead, goes_on=goes_on)
        except SystemExit:
            raise  # a handler ends the process: as any crash, so that one which always does is found out
        except BaseException as error:
            if found:
                suspect = _cost_the_connection(unit, error)
                await finish(self._give_back(unit, claiming.owner, found[0].claimed, suspect=suspect))
            if ahead is not None and ahead.found is not None:
                claiming, begun = ahead.found
                spare = [one.lane for one in begun.spare]
                await finish(self._give_back(unit, claiming.owner, [*begun.claimed, *spare]))
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
                    await unit.unmark_start(slot.queued.identity)
                await unit.release(owner, [slot.queued.lane], delay=delay)

    async def _turns(
        self,
        unit: QueueUnit[Any],
        step: Step,
        begun: Begun,
        options: Options,
        ahead: Ahead | None,
        *,
        goes_on: Callable[[], bool] | None,
    ) -> Slot | None:
        """What is settled goes into the step; what is to be run with a lease comes back."""
        leased: Slot | None = None
        later: list[bytes] = []  # for others: one lease at a time, and who is told to stop begins nothing more
        owner, groups = step.claiming.owner, self._groups(begun.lanes, step.claiming.most)
        turn_of = partial(
            Turn, unit, owner, self._settings, given=options.given, bulk=options.bulk, limits=self.limits
        )  # fmt: skip
        last = None if begun.suspects or len(groups) != 1 else ahead  # only what ends all of this may go on
        for at, (lanes, number) in enumerate(groups):
            if at and goes_on is not None and not goes_on():
                later += lanes
                continue
            for turn, slots in await self._together(turn_of, lanes, number, begun.taken, last):
                step.slots += slots
                step.full = step.full or turn.full
                step.again = step.again or turn.care is not Care.OPTIMISTIC
                if leased is None:
                    leased = turn.leased
                elif turn.leased is not None:
                    later.append(turn.leased.queued.lane)
        for at, lane in enumerate(begun.suspects):
            if leased is not None or ((groups or at) and goes_on is not None and not goes_on()):
                later.append(lane)
                continue
            alone, slots = await self._alone(unit, owner, lane, turn_of)
            step.slots += slots
            leased = None if alone is None else alone.leased
        try:
            if later:
                await unit.release(owner, later)
        except BaseException:
            if leased is not None and leased.marked:
                await finish(self._unmark(unit, leased.queued.identity))
            raise
        return leased

    def _groups(self, lanes: Sequence[bytes], most: int) -> list[tuple[Sequence[bytes], int]]:
        """What shares a transaction, and how many messages of each lane."""
        if not lanes:
            return []
        if self._settings.on_begin is not None:  # it says whose transaction this is
            return [([lane], 1) for lane in lanes]
        return [(lanes, max(1, most // len(lanes)))]

    async def _together(
        self,
        turn_of: Callable[..., Turn],
        lanes: Sequence[bytes],
        most: int,
        taken: Taken | None,
        ahead: Ahead | None,
    ) -> list[tuple[Turn, list[Slot]]]:
        """In one turn; where that cannot be, each lane has its own, with one message."""
        with suppress(Again):
            return [await self._patiently(partial(turn_of, lanes=lanes, most=most, ahead=ahead), taken=taken)]
        return [await self._patiently(partial(turn_of, lanes=[lane], most=1), Care.ALONE) for lane in lanes]

    async def _patiently(
        self, turn_of: Callable[..., Turn], care: Care = Care.OPTIMISTIC, taken: Taken | None = None
    ) -> tuple[Turn, list[Slot]]:
        """Again with more care where it failed, and again as it was where the database asks for that."""
        conflicts = 0
        while True:
            turn, taken = turn_of(care=care, taken=taken), None  # what was taken counts for the first try
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
        self, unit: QueueUnit[Any], owner: str, lane: bytes, turn_of: Callable[..., Turn]
    ) -> tuple[Turn | None, list[Slot]]:
        """Its last worker died, or froze. If the first message was the reason, that is known the next time."""
        taken = await unit.take_lanes(owner, [lane], most=1)
        await unit.rollback()
        if lane not in taken.lanes:
            return None, []
        head = taken.messages[0].identity if taken.messages else None
        marked, settled = None if head is None else head.digest, False
        try:
            if head is not None and await finish(unit.mark_start(owner, lane, head)) is None:
                settled = True
                return None, []
            turn, slots = await self._patiently(partial(turn_of, lanes=[lane], most=1, marked=marked))
            ours = slots if turn.leased is None else [*slots, turn.leased]
            settled = any(slot.queued.identity == head for slot in ours)
            return turn, slots
        except SystemExit:
            settled = True  # a crash: its mark stays
            raise
        except Exception as error:
            settled = _cost_the_connection(unit, error)  # as a crash does
            raise
        finally:
            if head is not None and not settled:
                await finish(self._unmark(unit, head))

    async def _unmark(self, unit: QueueUnit[Any], head: Any) -> None:
        with suppress(OncewardError):
            await unit.rollback()
            await unit.unmark_start(head)

    # --- giving back ----------------------------------------------------------------------------------------

    async def _give_back(self, unit: QueueUnit[Any], owner: str, lanes: list[bytes], *, suspect: bool = False) -> None:
        """The process lives: others may have them at once. What was worked on is not ours any more, and left alone."""
        try:
            await unit.rollback()
            await unit.release(owner, lanes, suspect=suspect)
        except Exception:  # noqa: BLE001 - the database is away: when it is back, or when the claim is over
            self._left.append((owner, lanes, suspect))

    async def _give_back_spares(self, unit: QueueUnit[Any], owner: str, spares: Spares) -> None:
        lanes = await spares.end()
        if lanes:
            await self._give_back(unit, owner, lanes)

    async def _give_back_elsewhere(self, owner: str, lanes: list[bytes]) -> None:
        """Through another connection: ours is in a turn."""
        try:
            async with self._settler.plain_unit() as unit:
                await unit.release(owner, lanes)
        except Exception:  # noqa: BLE001 - the database is away, or the pool has no other: when there is one
            self._left.append((owner, lanes, False))

    async def _give_back_left(self, unit: QueueUnit[Any]) -> None:
        while self._left:
            owner, lanes, suspect = self._left.pop()  # or another worker would give them back too
            try:
                await unit.release(owner, lanes, suspect=suspect)
            except BaseException:
                self._left.append((owner, lanes, suspect))
                raise

    async def _wake_overdue(self, unit: QueueUnit[Any]) -> None:
        if monotonic() - self._looked >= OVERDUE_EVERY:
            self._looked = monotonic()
            await unit.wake_overdue(self._settings.intake.consumer)

    def _tell(self, slots: Sequence[Slot], options: Options) -> None:
        if options.brake is not None:
            for slot in slots:
                options.brake.note(slot.outcome)
        bus, consumer, quiet = self._bus, self._settings.intake.consumer, self._bus.is_quiet
        for slot in slots:
            outcome = slot.outcome
            if outcome is None or (quiet and outcome.error is None):
                continue
            message, identity = slot.message, slot.queued.identity
            if outcome.kind is Kind.IGNORED:
                bus.emit(events.Ignored(consumer=consumer, type=message.type, message_id=message.id))
            elif outcome.kind is Kind.BUSY and isinstance(outcome.error, UsageError):
                bus.emit(events.Unsettled(
                    consumer=consumer, type=message.type, message_id=message.id, error=outcome.error
                ))  # fmt: skip
            else:
                bus.emit(events.of_outcome(consumer, message, identity, outcome))


def _cost_the_connection(unit: QueueUnit[Any], error: BaseException) -> bool:
    """A handler may have been the reason: its statement ended the server's process, or it left one running. Nobody can
    say which handler, or whether it was the network; so it is treated as the death of a worker would be."""
    return isinstance(error, Exception) and unit.gone


def outcome_of_slot(slot: Slot | None) -> Outcome[Any] | None:
    """For those who dispatch: an unhandled type is raised, everything else is an outcome."""
    if slot is None:
        return None
    outcome = slot.outcome
    if outcome is not None and outcome.kind is Kind.BUSY and isinstance(outcome.error, UsageError):
        raise outcome.error
    return outcome
