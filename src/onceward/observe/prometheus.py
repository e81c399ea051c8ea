"""Prometheus metrics: a listener that turns events into counters and one histogram.

    inbox = Inbox(store, consumer="billing", listeners=[events.log, PrometheusMetrics()])

An event finds the series of its consumer and type, and `_NOTES` says what it adds to them. That is all; the listener
never looks at the inbox or its store. The series of a type are made together when its first event comes, and are
kept: after that an event costs a look into a dict. All of them start at zero then, because PromQL has no answer for
`a / (a + b)` while one of the two does not exist.

A type comes with the message, so whoever sends messages could make series without end. Each consumer has `max_types`
of its own, first come, first served; all others are counted together as `_other_`.

Only counters and histograms are used: in prometheus_client's multi-process mode those of all processes add up, and
cached series stay right after a fork. prometheus_client is imported when the metrics are made. It looks for
PROMETHEUS_MULTIPROC_DIR at that moment, and without it this module can still be imported.
"""

from __future__ import annotations

from collections import Counter as Tally
from collections.abc import Callable, Sequence
from threading import Lock
from typing import TYPE_CHECKING, Any

from onceward.codec import printable
from onceward.errors import MissingDriver, UsageError
from onceward.events import Dead, Deferred, Duplicate, Failed, InboxEvent, Processed, Refused, Unsettled

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry, Counter, Histogram

BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
"""Seconds: from a handler that writes one row to one that waits for a slow service."""

OTHER = "_other_"
MAX_REASONS = 20
"""Of one type's deferrals. The inbox knows four; an `on_begin` that raises TryLater may bring its own."""
MAX_LABEL = 200

_LABELS = ("consumer_name", "event_type")
_COUNTERS = {
    "processed": "Messages whose handler ran and whose transaction is committed.",
    "duplicates": "Deliveries skipped because their message was settled before.",
    "failed": "Attempts that raised and left the message to be tried again.",
    "retried": "Attempts after a message's first that ran, however they ended.",
    "dead": "Attempts and deliveries that ended with their message as a dead letter.",
    "mismatches": "Deliveries whose payload differs from that of the same message before.",
    "refused": "Deliveries whose message cannot be kept, for want of a usable key, tenant or payload.",
    "unsettled": "Deliveries whose fate the store could not tell.",
}


class PrometheusMetrics:
    """A listener for one inbox or for many; what tells them apart is the label `consumer_name`.

    `registry` is prometheus_client's own if none is given. `buckets` are the histogram's, in seconds. `max_types` is
    how many message types of one consumer get a label of their own.
    """

    def __init__(
        self, registry: CollectorRegistry | None = None, *, buckets: Sequence[float] = BUCKETS, max_types: int = 100
    ) -> None:
        self._families = _Families(buckets)
        self._families.register(registry)
        self._max_types = max_types
        self._known: dict[tuple[str, str], _Series] = {}
        self._others: dict[str, _Series] = {}
        self._types: Tally[str] = Tally()
        self._admitting = Lock()

    def __call__(self, event: InboxEvent) -> None:
        note = _NOTES.get(type(event))
        if note is not None:
            note(self._series(event.consumer, event.type), event)

    def _series(self, consumer: str, type_: str) -> _Series:
        return self._find(consumer, type_) or self._admit(consumer, type_)

    def _find(self, consumer: str, type_: str) -> _Series | None:
        return self._known.get((consumer, type_)) or self._others.get(consumer)

    def _admit(self, consumer: str, type_: str) -> _Series:
        """A type that is new, or the first one too many."""
        with self._admitting:
            found = self._find(consumer, type_)  # another thread may have been here
            if found is not None:
                return found
            if self._types[consumer] >= self._max_types:
                self._others[consumer] = others = _Series(self._families, consumer, OTHER)
                return others
            self._known[consumer, type_] = series = _Series(self._families, consumer, type_)
            self._types[consumer] += 1
            return series


class _Families:
    """The metrics before they have labels."""

    def __init__(self, buckets: Sequence[float]) -> None:
        try:
            from prometheus_client import REGISTRY, Counter, Histogram  # noqa: PLC0415 - an extra
        except ImportError as error:
            raise MissingDriver(
                "PrometheusMetrics needs prometheus-client, which is not installed: pip install 'onceward[metrics]'",
                extra="metrics",
            ) from error
        self._default = REGISTRY
        self.duration: Histogram = Histogram(
            "consumer_inbox_processing_duration_seconds",
            "From the start of a handler to the end of its commit, of messages that were processed.",
            _LABELS, buckets=buckets, registry=None,
        )  # fmt: skip
        self.deferred: Counter = Counter(
            "consumer_inbox_deferred_total",
            "Deliveries that the inbox put off without running them.",
            (*_LABELS, "reason"), registry=None,
        )  # fmt: skip
        self.counters: dict[str, Counter] = {
            name: Counter(f"consumer_inbox_{name}_total", text, _LABELS, registry=None)
            for name, text in _COUNTERS.items()
        }

    def register(self, registry: CollectorRegistry | None) -> None:
        registry = self._default if registry is None else registry
        try:
            for family in (*self.counters.values(), self.deferred, self.duration):
                registry.register(family)
        except ValueError as error:
            raise UsageError(
                "the registry has these metrics already. Make one PrometheusMetrics and give it to every inbox."
            ) from error


class _Series:
    """What is counted for one consumer and type."""

    def __init__(self, families: _Families, consumer: str, type_: str) -> None:
        self._labels = (printable(consumer, MAX_LABEL), printable(type_, MAX_LABEL))
        self._counters = {name: family.labels(*self._labels) for name, family in families.counters.items()}
        self._deferred = families.deferred
        self._reasons: dict[str, Counter] = {}
        self.observe = families.duration.labels(*self._labels).observe

    def count(self, name: str, *, when: bool = True) -> None:
        if when:
            self._counters[name].inc()

    def defer(self, reason: str) -> None:
        counter = self._reasons.get(reason)
        if counter is None:
            if len(self._reasons) >= MAX_REASONS:
                reason = OTHER
            counter = self._reasons[reason] = self._deferred.labels(*self._labels, printable(reason, MAX_LABEL))
        counter.inc()


# --- what an event adds -------------------------------------------------------------------------------------


def _processed(series: _Series, event: Processed) -> None:
    series.count("processed")
    series.count("retried", when=event.attempt > 1)
    series.count("mismatches", when=event.mismatch)
    series.observe(event.duration_ms / 1000)


def _duplicate(series: _Series, event: Duplicate) -> None:
    series.count("duplicates")
    series.count("mismatches", when=event.mismatch)


def _failed(series: _Series, event: Failed) -> None:
    series.count("failed")
    series.count("retried", when=event.attempt > 1)


def _dead(series: _Series, event: Dead) -> None:
    series.count("dead")
    series.count("retried", when=event.attempt > 1)


def _deferred(series: _Series, event: Deferred) -> None:
    series.defer(event.reason)


def _refused(series: _Series, _event: Refused) -> None:
    series.count("refused")


def _unsettled(series: _Series, _event: Unsettled) -> None:
    series.count("unsettled")


# An event that is not here leaves no series behind either: ignored types are just those that never end.
_NOTES: dict[type[InboxEvent], Callable[[_Series, Any], None]] = {
    Processed: _processed,
    Duplicate: _duplicate,
    Failed: _failed,
    Dead: _dead,
    Deferred: _deferred,
    Refused: _refused,
    Unsettled: _unsettled,
}
