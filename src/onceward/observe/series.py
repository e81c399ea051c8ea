"""The metrics of PrometheusMetrics, before and after they have labels."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from onceward.codec import printable
from onceward.errors import MissingDriver, UsageError

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
"""Seconds: from a handler that writes one row to one that waits for a slow service."""

SIZES = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000)
"""Messages of a batch."""

CLEANUPS = (0.01, 0.1, 1.0, 10.0, 60.0, 300.0, 1800.0)
"""Seconds: from a sweep that finds nothing to the first one of a large table."""

OTHER = "_other_"
MAX_REASONS = 20
"""Of one type's deferrals. The inbox knows four; an `on_begin` that raises TryLater may bring its own."""
MAX_LABEL = 200

_CONSUMER = ("consumer_name",)
_LABELS = ("consumer_name", "event_type")
COUNTERS = {
    "processed": "Messages whose handler ran and whose transaction is committed.",
    "duplicates": "Deliveries skipped because their message was settled before.",
    "failed": "Attempts that raised and left the message to be tried again.",
    "retried": "Attempts after a message's first that ran, however they ended.",
    "dead": "Attempts and deliveries that ended with their message as a dead letter.",
    "mismatches": "Deliveries whose payload differs from that of the same message before.",
    "refused": "Deliveries whose message cannot be kept, for want of a usable key, tenant or payload.",
    "unsettled": "Deliveries whose fate the store could not tell.",
    "cancelled": "Deliveries cancelled before they were settled, most often by a shutdown.",
}


class Families:
    """The metrics before they have labels."""

    def __init__(self, buckets: Sequence[float]) -> None:
        try:
            from prometheus_client import REGISTRY, Counter, Gauge, Histogram  # noqa: PLC0415 - an extra
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
        # livesum: of the processes that live. What a process had in flight when it died is not in flight.
        self.in_flight: Gauge = Gauge(
            "consumer_inbox_in_flight",
            "Deliveries that the inbox is working on, or that wait for their turn.",
            _LABELS, registry=None, multiprocess_mode="livesum",
        )  # fmt: skip
        self.counters: dict[str, Counter] = {
            name: Counter(f"consumer_inbox_{name}_total", text, _LABELS, registry=None)
            for name, text in COUNTERS.items()
        }
        self.batch_size: Histogram = Histogram(
            "consumer_inbox_batch_size", "Messages of a batch.", _CONSUMER, buckets=SIZES, registry=None
        )
        self.cleaned: Counter = Counter(
            "consumer_inbox_cleanup_deleted_total", "Records deleted by cleanup.", _CONSUMER, registry=None
        )
        self.cleanup_failures: Counter = Counter(
            "consumer_inbox_cleanup_failures_total", "Cleanups that could not go on.", _CONSUMER, registry=None
        )
        self.cleanup_duration: Histogram = Histogram(
            "consumer_inbox_cleanup_duration_seconds", "Time of a cleanup, however it ended.",
            _CONSUMER, buckets=CLEANUPS, registry=None,
        )  # fmt: skip

    def register(self, registry: CollectorRegistry | None) -> None:
        registry = self._default if registry is None else registry
        by_type = (*self.counters.values(), self.deferred, self.duration, self.in_flight)
        by_consumer = (self.batch_size, self.cleaned, self.cleanup_failures, self.cleanup_duration)
        try:
            for family in (*by_type, *by_consumer):
                registry.register(family)
        except ValueError as error:
            raise UsageError(
                "the registry has these metrics already. Make one PrometheusMetrics and give it to every inbox."
            ) from error


class Series:
    """What is counted for one consumer and type."""

    def __init__(self, families: Families, consumer: str, type_: str) -> None:
        self._labels = (printable(consumer, MAX_LABEL), printable(type_, MAX_LABEL))
        self._counters = {name: family.labels(*self._labels) for name, family in families.counters.items()}
        self._deferred = families.deferred
        self._reasons: dict[str, Counter] = {}
        self.in_flight: Gauge = families.in_flight.labels(*self._labels)
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


class ConsumerSeries:
    """What is counted for one consumer as a whole."""

    def __init__(self, families: Families, consumer: str) -> None:
        label = printable(consumer, MAX_LABEL)
        self.batch_size: Histogram = families.batch_size.labels(label)
        self.cleaned: Counter = families.cleaned.labels(label)
        self.cleanup_failures: Counter = families.cleanup_failures.labels(label)
        self.cleanup_duration: Histogram = families.cleanup_duration.labels(label)
