"""`consume`: from a broker through an inbox, until told to stop.

    async with KafkaSource("orders", group="billing", bootstrap="localhost:9092") as source:
        await consume(source, inbox)

One task receives, some runners take what has come (`tracks`), let it take effect or keep it, decide what to do with
each delivery (`ruling`), and settle it. Settled means processed or durably kept, so nothing is lost when this process
dies at any moment: what was not settled comes again, and what had taken effect is a duplicate then.

What becomes of a message that fails is said by `on_failure`:

- **park**: it goes to the queue of the inbox with its attempts, and so do the later ones of its lane; they are settled,
  and workers that `consume` runs itself try them again. The broker never waits for a failing message.
- **hold**: it stays with the broker, and comes again when its next try is due. The later ones of its lane wait behind
  it, and others go on.

When the database is away nothing is settled, nothing more is received, and what is here is tried again after a pause.
While everything fails little is tried (`onceward.brake`). `inbox.health()` tells all of that.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Callable, Sequence
from contextlib import suppress
from time import monotonic
from typing import Any, Literal

from onceward import events
from onceward.brake import Brake
from onceward.brokers.base import Source
from onceward.brokers.parking import Parking
from onceward.brokers.ruling import Ruling, Step, delay_of, rule
from onceward.brokers.tracks import Item, Taken, Tracks
from onceward.errors import InvalidMessage, StoreError, TryLater, UsageError
from onceward.inbox import Inbox
from onceward.outcome import Kind, Outcome, Verdict
from onceward.shield import finish, finish_here
from onceward.stored import SourceHealth
from onceward.worker import RunningWorker

_log = logging.getLogger("onceward")

Mode = Literal["inline", "accept"]
OnFailure = Literal["park", "hold"]

MOST_HELD = 10_000
"""Deliveries that are put off. With more, no more are received."""
LONGEST_PAUSE = 5.0
"""Seconds between two looks whether the database is back."""


async def consume(
    source: Source,
    inbox: Inbox[Any],
    handler: Callable[..., Any] | None = None,
    *,
    bulk: Callable[..., Any] | None = None,
    mode: Mode = "inline",
    on_failure: OnFailure | None = None,
    batch: int = 100,
    concurrency: int = 4,
    workers: int = 1,
    stop: asyncio.Event | None = None,
    grace: float = 25.0,
    brake: Brake | None = None,
) -> None:
    """Let every message of a source take effect exactly once, until `stop` is set or the source has come to its end.

    Each message runs with `handler`, or with the registered handler of its type; `bulk` is a handler that gets a list.
    With mode="accept" messages are only kept, and worked on from the queue. Up to `batch` messages share a transaction,
    and up to `concurrency` of those are open at once; partitions and lanes keep their order. `on_failure` is "park"
    where the store has a queue, and else "hold". `workers` work on the queue meanwhile; 0 where others do that, see
    `inbox.run`. After `stop`, what was begun has `grace` seconds to end; the rest stays with the broker.
    """
    parks = _parks(inbox, mode, on_failure)
    _check(handler, bulk, batch=batch, concurrency=concurrency, workers=workers, grace=grace)
    if workers and (parks or mode == "accept"):
        brake = brake or Brake()
        async with inbox.worker(handler, bulk=bulk, concurrency=workers, grace=grace, brake=brake) as worker:
            await Loop(source, inbox, handler, bulk, mode=mode, parks=parks, batch=batch, concurrency=concurrency,
                       stop=stop, grace=grace, brake=brake, worker=worker).run()  # fmt: skip
    else:
        await Loop(source, inbox, handler, bulk, mode=mode, parks=parks, batch=batch, concurrency=concurrency,
                   stop=stop, grace=grace, brake=brake or Brake()).run()  # fmt: skip


class Loop:
    """One call of `consume`."""

    def __init__(
        self,
        source: Source,
        inbox: Inbox[Any],
        handler: Callable[..., Any] | None,
        bulk: Callable[..., Any] | None,
        *,
        mode: Mode,
        parks: bool,
        batch: int,
        concurrency: int,
        stop: asyncio.Event | None,
        grace: float,
        brake: Brake,
        worker: RunningWorker | None = None,
    ) -> None:
        self._source = source
        self._inbox = inbox
        self._handler = handler
        self._bulk = bulk
        self._mode = mode
        self._batch = batch
        self._concurrency = concurrency
        self._stop = stop or asyncio.Event()
        self._grace = grace
        self._brake = brake
        self._worker = worker
        self._parking = Parking(inbox, source) if parks else None
        # A task of its own would cost as much as a short handler does. Who waits may need one, for its timeouts.
        self._finish = finish_here if getattr(source, "settles_at_once", False) else finish
        self._tracks = Tracks()
        self._news = asyncio.Event()
        """Something has come, has ended or is over: who waits looks again."""
        self._draining = False
        """Nothing more is begun."""
        self._ended = False
        """The source has no more."""
        self._trouble = 0
        """How often in a row the database could not be used."""
        self._paused_until = 0.0
        self._in_work = self._received = self._settled = 0

    # --- life -----------------------------------------------------------------------------------------------

    async def run(self) -> None:
        await self._look_for_risks()
        with self._inbox.reporting(self.health):
            stopping = asyncio.ensure_future(self._stop.wait())
            receiving = asyncio.ensure_future(self._receive())
            runners = [asyncio.ensure_future(self._work_off()) for _ in range(self._concurrency)]
            others = [] if self._worker is None else [asyncio.ensure_future(self._worker.wait())]
            try:
                await self._until_over(stopping, receiving, runners, others)
                self._drain()
                receiving.cancel()
                await asyncio.wait(runners, timeout=self._grace)
            finally:
                self._drain()
                await finish(self._end([stopping, receiving, *runners, *others]))
            for task in (*runners, receiving, *others):
                if not task.cancelled() and task.exception() is not None:
                    task.result()

    async def _until_over(
        self,
        stopping: asyncio.Future[Any],
        receiving: asyncio.Future[None],
        runners: Sequence[asyncio.Future[None]],
        others: Sequence[asyncio.Future[None]],
    ) -> None:
        """Until somebody says stop, something has failed, or all is done."""
        pending: set[asyncio.Future[Any]] = {stopping, receiving, *runners, *others}
        while not all(runner.done() for runner in runners):
            done, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
            if stopping in done or any(task.cancelled() or task.exception() is not None for task in done):
                return

    def _drain(self) -> None:
        self._draining = True
        self._news.set()
        if self._worker is not None:
            self._worker.stop()

    async def _end(self, tasks: Sequence[asyncio.Future[Any]]) -> None:
        """What was not begun goes back to its broker, and the broker is told what was settled."""
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for item in self._tracks.drop():
            with suppress(Exception):  # a delivery that nobody settles comes again as well
                await item.delivery.settle(Verdict.RETRY)
        try:
            await self._source.flush()
        except Exception as error:  # noqa: BLE001 - what the broker was not told comes again, as duplicates
            _log.warning("%s was not told what is settled: %s", self._source.name, error)

    async def _look_for_risks(self) -> None:
        findings = [(finding.name, finding.text) for finding in await self._source.check()]
        horizon, retention = self._source.redelivery_horizon, self._inbox.retention
        if horizon is not None and horizon > retention:
            text = (
                f"{self._source.name} may deliver a message again after {horizon}, and records are kept for {retention}"
            )
            findings.append(("retention-too-short", f"{text}: set retention= on the inbox to more than that"))
        for name, text in findings:
            self._inbox.emit(events.AtRisk(consumer=self._inbox.consumer, finding=name, text=text))

    def health(self) -> SourceHealth:
        trouble = self._source.trouble()
        in_flight = self._in_work + self._tracks.ready + self._tracks.held
        return SourceHealth(
            self._source.name, trouble is None, self._state(), self._received, self._settled, in_flight,
            self._tracks.held, trouble,
        )  # fmt: skip

    def _state(self) -> str:
        if self._draining:
            return "draining"
        if self._trouble:
            return "paused"
        return "braking" if self._brakes else "running"

    # --- receiving ------------------------------------------------------------------------------------------

    async def _receive(self) -> None:
        while not self._draining:
            room = self._room()
            if not room:
                await self._hear_news()
                continue
            deliveries = await self._source.receive(room)
            if not deliveries:
                self._ended = True
                self._news.set()
                return
            self._received += len(deliveries)
            self._tracks.add(Item(delivery, self._lane_of(delivery)) for delivery in deliveries)
            self._news.set()

    def _lane_of(self, delivery: Any) -> tuple[str, str] | None:
        return None if delivery.problem is not None else self._inbox.lane_of(delivery.message)

    def _room(self) -> int:
        """As much as the runners work on at once, and as much again. While everything fails, one to try."""
        if self._trouble or self._tracks.held >= MOST_HELD:
            return 0
        here = self._tracks.ready + self._in_work
        return max(0, (1 if self._brakes else 2 * self._batch * self._concurrency) - here)

    @property
    def _brakes(self) -> bool:
        """To keep messages needs nobody but the database, whatever fails."""
        return self._brake.on and self._mode == "inline"

    # --- working --------------------------------------------------------------------------------------------

    async def _work_off(self) -> None:
        """One runner."""
        while not self._draining:
            pause = self._pause()
            taken = None if pause else self._tracks.take(1 if self._brakes else self._batch, monotonic())
            if taken is not None:
                await self._take_through(taken)
            elif self._ended and self._tracks.empty:
                self._news.set()
                return
            else:
                await self._rest(pause)

    def _pause(self) -> float:
        """Seconds that nothing may be begun for."""
        now = monotonic()
        if now < self._paused_until:
            return self._paused_until - now
        if not self._brakes or not self._tracks.has(now):
            return 0.0
        return min(1.0, self._brake.pause())  # workers of the queue may take the brake off meanwhile

    async def _rest(self, pause: float) -> None:
        """Until there is news, or something is due."""
        due = None if pause else self._tracks.due()
        times = [pause] if pause else [] if due is None else [max(0.005, due - monotonic())]
        with suppress(TimeoutError):
            async with asyncio.timeout(times[0] if times else None):
                await self._hear_news()

    async def _hear_news(self) -> None:
        self._news.clear()
        await self._news.wait()

    async def _take_through(self, taken: Taken) -> None:
        """Let them take effect or be kept, and settle them."""
        taken.items = [item for item in taken.items if item.delivery.begin()]
        number = len(taken.items)
        self._in_work += number
        try:
            rulings = await self._ruled(taken.items)
        except BaseException as error:
            self._give_up(taken)
            if not isinstance(error, StoreError):
                raise
            self._wait_for_store(error)
        else:
            self._trouble = 0
            await self._finish(self._settle(taken, rulings))
            _raise_what_stops(rulings)
        finally:
            self._in_work -= number
            self._news.set()

    def _give_up(self, taken: Taken) -> None:
        """Nobody knows what became of them: they are tried again, and what took effect is a duplicate then."""
        for item in taken.items:
            item.delivery.put_back()
        self._tracks.put_back(taken)

    def _wait_for_store(self, error: StoreError) -> None:
        """Longer each time. Other runners may hear of the same trouble a moment later."""
        if self._trouble and monotonic() < self._paused_until:
            return
        self._trouble += 1
        pause = min(LONGEST_PAUSE, 0.1 * 2.0 ** min(self._trouble, 10)) * (0.5 + random.random() / 2)  # noqa: S311
        self._paused_until = monotonic() + pause
        _log.warning("%s pauses for %.1f s: %s", self._source.name, pause, error)

    # --- what becomes of them -------------------------------------------------------------------------------

    async def _ruled(self, items: Sequence[Item]) -> list[Ruling]:
        """All that has to do with the database. Nothing is settled before it is through."""
        sound = [item for item in items if item.delivery.problem is None]
        rulings = await self._kept(sound) if self._mode == "accept" else await self._processed(sound)
        rulings += [
            Ruling(item, Step.BURY, Outcome(Kind.FAILED, error=item.delivery.problem))
            for item in items
            if item.delivery.problem is not None
        ]
        rulings = await self._parked(rulings)
        return [await self._buried(one) if one.step is Step.BURY else one for one in rulings]

    async def _kept(self, items: Sequence[Item]) -> list[Ruling]:
        if not items:
            return []
        messages, origins = [item.delivery.message for item in items], [item.delivery.origin for item in items]
        return rule(items, await self._inbox.accept(messages, origins=origins), parks=False)

    async def _processed(self, items: Sequence[Item]) -> list[Ruling]:
        queued = await self._parking.lanes_of(items) if self._parking is not None else frozenset()
        if not queued and len(_runs(items)) == 1:  # as nearly always
            return rule(items, await self._delivered(items), parks=self._parking is not None)
        outcomes: dict[Item, Outcome[Any]] = {}
        stopped: set[tuple[str, str] | None] = set()
        for part in _runs([item for item in items if item.lane not in queued]):
            free = [item for item in part if item.lane is None or item.lane not in stopped]
            outcomes |= zip(free, await self._delivered(free), strict=True)
            outcomes |= dict.fromkeys((item for item in part if item not in outcomes), _BEHIND)
            stopped |= {item.lane for item in part if outcomes[item].verdict not in (Verdict.ACK, Verdict.REJECT)}
        outcomes |= dict.fromkeys((item for item in items if item not in outcomes), _BEHIND)
        return rule(items, [outcomes[item] for item in items], parks=self._parking is not None)

    async def _delivered(self, items: Sequence[Item]) -> list[Outcome[Any]]:
        if not items:
            return []
        deliveries = [item.delivery for item in items]
        outcomes = await self._inbox.deliver(
            [delivery.message for delivery in deliveries],
            self._handler,
            bulk=self._bulk,
            redelivered=deliveries[0].redelivered,
            origins=[delivery.origin for delivery in deliveries],
        )
        for outcome in outcomes:
            self._brake.note(outcome)
        return outcomes

    async def _parked(self, rulings: list[Ruling]) -> list[Ruling]:
        items = [ruling.item for ruling in rulings if ruling.step is Step.PARK]
        if not items or self._parking is None:
            return rulings
        return [one for one in rulings if one.step is not Step.PARK] + await self._parking.park(items)

    async def _buried(self, ruling: Ruling) -> Ruling:
        delivery, error = ruling.item.delivery, ruling.outcome.error
        cause = error if isinstance(error, Exception) else InvalidMessage()
        try:
            outcome = await self._inbox.bury(delivery.message, cause, origin=delivery.origin)
        except TryLater as later:
            return Ruling(ruling.item, Step.AGAIN, Outcome(Kind.BUSY, error=later))
        except InvalidMessage:
            return Ruling(ruling.item, Step.REJECT, ruling.outcome)
        return Ruling(ruling.item, Step.ACK, outcome)

    async def _settle(self, taken: Taken, rulings: Sequence[Ruling]) -> None:
        """To its end, whoever is cancelled: what is done is told to the broker."""
        again: list[tuple[Item, float]] = []
        order = {item: at for at, item in enumerate(taken.items)}
        for ruling in sorted(rulings, key=lambda one: order[one.item]):
            item, delivery = ruling.item, ruling.item.delivery
            try:
                if ruling.step in (Step.AGAIN, Step.STOP):
                    await self._put_off(ruling, again)
                else:
                    verdict = Verdict.ACK if ruling.step is Step.ACK else Verdict.REJECT
                    await delivery.settle(verdict, outcome=ruling.outcome)
                    self._settled += 1
            except Exception as error:  # noqa: BLE001 - it comes again, as a duplicate
                _log.warning("%s could not be settled: %s: %s", delivery.origin, type(error).__name__, error)
            item.tries += 1
        self._tracks.done(taken, again)

    async def _put_off(self, ruling: Ruling, again: list[tuple[Item, float]]) -> None:
        delay = delay_of(ruling)
        if self._source.redelivers:
            await ruling.item.delivery.settle(Verdict.RETRY, delay=delay, outcome=ruling.outcome)
        else:
            ruling.item.delivery.put_back()
            again.append((ruling.item, monotonic() + delay))


_BEHIND: Outcome[Any] = Outcome(Kind.BUSY, error=TryLater(reason="blocked", text="its lane waits"))


def _runs(items: Sequence[Item]) -> list[list[Item]]:
    """In their order, in parts that are redelivered or not: those that may have killed a process are marked first."""
    runs: list[list[Item]] = []
    for item in items:
        if runs and runs[-1][0].delivery.redelivered == item.delivery.redelivered:
            runs[-1].append(item)
        else:
            runs.append([item])
    return runs


def _raise_what_stops(rulings: Sequence[Ruling]) -> None:
    for ruling in rulings:
        if ruling.step is Step.STOP and ruling.outcome.error is not None:
            raise ruling.outcome.error


def _parks(inbox: Inbox[Any], mode: Mode, on_failure: OnFailure | None) -> bool:
    if mode not in ("inline", "accept"):
        raise UsageError(f'mode={mode!r}: it is "inline" or "accept"')
    if on_failure not in (None, "park", "hold"):
        raise UsageError(f'on_failure={on_failure!r}: it is "park" or "hold"')
    has_queue = inbox.store.features.queue
    if not has_queue and (mode == "accept" or on_failure == "park"):
        what = 'mode="accept"' if mode == "accept" else 'on_failure="park"'
        raise UsageError(f'{type(inbox.store).__name__} has no queue, which {what} needs: on_failure="hold" works')
    return mode == "inline" and has_queue and on_failure != "hold"


def _check(handler: object, bulk: object, *, grace: float, **numbers: int) -> None:
    if handler is not None and bulk is not None:
        raise UsageError("give either a handler, or a bulk handler")
    for name, value in numbers.items():
        least = 0 if name == "workers" else 1
        if type(value) is not int or value < least:
            raise UsageError(f"{name}={value!r}: it is a whole number, at least {least}")
    if not isinstance(grace, (int, float)) or isinstance(grace, bool) or not grace >= 0:
        raise UsageError(f"grace={grace!r}: it is a number of seconds, not negative")
