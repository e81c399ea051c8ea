"""Prometheus metrics: a listener that turns events into counters, histograms and a gauge.

    inbox = Inbox(store, consumer="billing", listeners=[events.log, PrometheusMetrics()])

An event finds the series of its consumer and type, and `_NOTES` says what it adds to them. That is all; the listener
never looks at the inbox or its store. The series of a type are made together when its first event comes, and are
kept: after that an event costs a look into a dict. All of them start at zero then, because PromQL has no answer for
`a / (a + b)` while one of the two does not exist. Batches and cleanups have series by consumer alone.

A type comes with the message, so whoever sends messages could make series without end. Each consumer has `max_types`
of its own, first come, first served; all others are counted together as `_other_`.

In prometheus_client's multi-process mode the series of all processes add up, the gauge over those that live, and
cached series stay right after a fork. prometheus_client is imported when the metrics are made. It looks for
PROMETHEUS_MULTIPROC_DIR at that moment, and without it this module can still be imported.
"""

from __future__ import annotations

from collections import Counter as Tally
from collections.abc import Callable, Sequence
from threading import Lock
from typing import TYPE_CHECKING, Any

from onceward import events
from onceward.events import Event, InboxEvent
from onceward.observe.series import BUCKETS, OTHER, ConsumerSeries, Families, Series

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry


class PrometheusMetrics:
    """A listener for one inbox or for many; what tells them apart is the label `consumer_name`.

    `registry` is prometheus_client's own if none is given. `buckets` are those of the processing time, in seconds.
    `max_types` is how many message types of one consumer get a label of their own.
    """

    hears_starts = True

    def __init__(
        self, registry: CollectorRegistry | None = None, *, buckets: Sequence[float] = BUCKETS, max_types: int = 100
    ) -> None:
        self._families = Families(buckets)
        self._families.register(registry)
        self._max_types = max_types
        self._known: dict[tuple[str, str], Series] = {}
        self._others: dict[str, Series] = {}
        self._consumers: dict[str, ConsumerSeries] = {}
        self._types: Tally[str] = Tally()
        self._admitting = Lock()

    def __call__(self, event: Event) -> None:
        if isinstance(event, InboxEvent):
            note = _NOTES.get(type(event))
            if note is not None:
                note(self._series(event.consumer, event.type), event)
            return
        noted = _CONSUMER_NOTES.get(type(event))
        if noted is not None:
            noted(self._consumer(event.consumer), event)

    def _series(self, consumer: str, type_: str) -> Series:
        return self._find(consumer, type_) or self._admit(consumer, type_)

    def _find(self, consumer: str, type_: str) -> Series | None:
        return self._known.get((consumer, type_)) or self._others.get(consumer)

    def _admit(self, consumer: str, type_: str) -> Series:
        """A type that is new, or the first one too many."""
        with self._admitting:
            found = self._find(consumer, type_)  # another thread may have been here
            if found is not None:
                return found
            if self._types[consumer] >= self._max_types:
                self._others[consumer] = others = Series(self._families, consumer, OTHER)
                return others
            self._known[consumer, type_] = series = Series(self._families, consumer, type_)
            self._types[consumer] += 1
            return series

    def _consumer(self, consumer: str) -> ConsumerSeries:
        found = self._consumers.get(consumer)
        if found is None:  # two threads may both be here; they get the same children
            found = self._consumers[consumer] = ConsumerSeries(self._families, consumer)
        return found


# --- what an event adds -------------------------------------------------------------------------------------


def _processed(series: Series, event: events.Processed) -> None:
    series.count("processed")
    series.count("retried", when=event.attempt > 1)
    series.count("mismatches", when=event.mismatch)
    series.observe(event.duration_ms / 1000)


def _duplicate(series: Series, event: events.Duplicate) -> None:
    series.count("duplicates")
    series.count("mismatches", when=event.mismatch)


def _failed(series: Series, event: events.Failed) -> None:
    series.count("failed")
    series.count("retried", when=event.attempt > 1)


def _dead(series: Series, event: events.Dead) -> None:
    series.count("dead")
    series.count("retried", when=event.attempt > 1)


def _swept(series: ConsumerSeries, event: events.Swept | events.SweepFailed) -> None:
    series.cleaned.inc(event.deleted)
    series.cleanup_duration.observe(event.duration_ms / 1000)


def _sweep_failed(series: ConsumerSeries, event: events.SweepFailed) -> None:
    series.cleanup_failures.inc()
    _swept(series, event)


# An event that is not here leaves no series behind either: ignored types are just those that never end.
_NOTES: dict[type[Event], Callable[[Series, Any], None]] = {
    events.Processed: _processed,
    events.Duplicate: _duplicate,
    events.Failed: _failed,
    events.Dead: _dead,
    events.Deferred: lambda series, event: series.defer(event.reason),
    events.Refused: lambda series, _: series.count("refused"),
    events.Unsettled: lambda series, _: series.count("unsettled"),
    events.Cancelled: lambda series, _: series.count("cancelled"),
    events.Started: lambda series, _: series.in_flight.inc(),
    events.Finished: lambda series, _: series.in_flight.dec(),
}
_CONSUMER_NOTES: dict[type[Event], Callable[[ConsumerSeries, Any], None]] = {
    events.Batch: lambda series, event: series.batch_size.observe(event.size),
    events.Swept: _swept,
    events.SweepFailed: _sweep_failed,
}
