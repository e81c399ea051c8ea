"""Prometheus metrics: every count comes from a real inbox, and what docs/metrics.md says is run.

PromQL and the text of a scrape are checked by promtool, where the machine has it (Debian: the package prometheus).
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.multiprocess import MultiProcessCollector, mark_process_dead

from onceward import (
    Inbox,
    Message,
    MissingDriver,
    PayloadMismatch,
    Reject,
    RetryPolicy,
    State,
    TryLater,
    UsageError,
    events,
)
from onceward.errors import InvalidMessage, StoreUnavailable
from onceward.events import Batch, Deferred, Ignored, Processed, SweepFailed, Swept
from onceward.observe.prometheus import PrometheusMetrics
from onceward.observe.series import BUCKETS, COUNTERS, MAX_REASONS
from onceward.testing import Lab, PostgresLab, SqliteLab
from onceward.testing.contract.base import Longest
from onceward.testing.lab import Gate

PAGE = Path(__file__).parent.parent / "docs" / "metrics.md"
PAID = Message("m-1", "order.paid", {"cents": 7})


async def charge(message: Message[Any]) -> dict[str, str]:
    return {"charged": message.id}


async def fail(message: Message[Any]) -> None:
    raise ConnectionError("the bank does not answer")


async def reject(message: Message[Any]) -> None:
    raise Reject("no such customer")


async def deliver(inbox: Inbox[Any], message: Message[Any], handler: Any, **options: Any) -> object:
    try:
        return await inbox.process(message, handler, **options)
    except Exception as error:
        return error


class Meters:
    """The metrics under test, and what they say."""

    def __init__(self, **options: Any) -> None:
        self.registry = CollectorRegistry()
        self.listener = PrometheusMetrics(self.registry, **options)

    def value(self, name: str, type_: str = "order.paid", consumer: str = "billing", **more: str) -> float | None:
        labels = {"consumer_name": consumer, "event_type": type_, **more}
        return self.registry.get_sample_value(f"consumer_inbox_{name}", labels)

    def counted(self, type_: str = "order.paid") -> dict[str, float]:
        """The counters of a type that are not zero."""
        return counted(self.registry, type_)

    def types(self, name: str = "processed", consumer: str = "billing") -> set[str]:
        return {
            sample.labels["event_type"]
            for family in self.registry.collect()
            for sample in family.samples
            if sample.name == f"consumer_inbox_{name}_total" and sample.labels["consumer_name"] == consumer
        }

    def text(self) -> str:
        return generate_latest(self.registry).decode()


def counted(registry: CollectorRegistry, type_: str = "order.paid") -> dict[str, float]:
    return {
        re.sub(r"^consumer_inbox_|_total$", "", sample.name): sample.value
        for family in registry.collect()
        for sample in family.samples
        if sample.name.endswith("_total") and sample.labels.get("event_type") == type_ and sample.value
    }


@pytest.fixture
def meters() -> Meters:
    return Meters()


@pytest.fixture
async def inbox(meters: Meters) -> AsyncIterator[Inbox[Any]]:
    async with Inbox.connect("sqlite://", consumer="billing", listeners=[events.log, meters.listener]) as opened:
        yield opened


# --- each metric, through an inbox --------------------------------------------------------------------------


async def test_of_two_deliveries_one_is_processed_and_one_a_duplicate(inbox: Inbox[Any], meters: Meters) -> None:
    for _ in range(2):
        await inbox.process(PAID, charge)
    assert meters.counted() == {"processed": 1, "duplicates": 1}


async def test_subscribing_later_counts_from_then_on(meters: Meters) -> None:
    async with Inbox.connect("sqlite://", consumer="billing") as inbox:
        await inbox.process(PAID, charge)
        stop = inbox.subscribe(meters.listener)
        await inbox.process(PAID, charge)
        stop()
        await inbox.process(PAID, charge)
    assert meters.counted() == {"duplicates": 1}


async def test_a_failing_handler_is_a_failed_attempt_and_its_next_run_a_retried_one(
    inbox: Inbox[Any], meters: Meters
) -> None:
    await deliver(inbox, PAID, fail)
    assert meters.counted() == {"failed": 1}
    await deliver(inbox, PAID, fail)
    assert meters.counted() == {"failed": 2, "retried": 1}
    await deliver(inbox, PAID, charge)
    assert meters.counted() == {"failed": 2, "retried": 2, "processed": 1}


async def test_the_last_attempt_is_dead_and_not_failed_and_what_comes_after_is_a_duplicate(
    inbox: Inbox[Any], meters: Meters
) -> None:
    policy = RetryPolicy(max_attempts=2, base=0.0)
    for _ in range(3):
        await deliver(inbox, PAID, fail, retry=policy)
    assert meters.counted() == {"failed": 1, "retried": 1, "dead": 1, "duplicates": 1}


async def test_a_rejected_message_is_dead_at_once(inbox: Inbox[Any], meters: Meters) -> None:
    await deliver(inbox, PAID, reject)
    assert meters.counted() == {"dead": 1}


async def test_a_replay_is_a_retried_attempt(inbox: Inbox[Any], meters: Meters) -> None:
    await deliver(inbox, PAID, reject)
    await inbox.replay(PAID, charge)
    assert meters.counted() == {"dead": 1, "retried": 1, "processed": 1}


async def test_a_handler_that_ends_the_transaction_makes_a_dead_letter(inbox: Inbox[Any], meters: Meters) -> None:
    async def meddling(message: Message[Any], tx: Any) -> None:
        await tx.execute("COMMIT")

    await deliver(inbox, PAID, meddling)
    assert meters.counted() == {"dead": 1}


@pytest.mark.parametrize("on_mismatch", ["report", "raise"])
async def test_another_payload_is_a_mismatch_and_a_duplicate(meters: Meters, on_mismatch: str) -> None:
    options: Any = {"listeners": [meters.listener], "on_mismatch": on_mismatch}
    async with Inbox.connect("sqlite://", consumer="billing", **options) as inbox:
        await inbox.process(PAID, charge)
        said = await deliver(inbox, Message("m-1", "order.paid", {"cents": 8}), charge)
    assert isinstance(said, PayloadMismatch) == (on_mismatch == "raise")
    assert meters.counted() == {"processed": 1, "duplicates": 1, "mismatches": 1}


async def test_another_payload_after_a_failure_is_a_mismatch_that_is_processed(
    inbox: Inbox[Any], meters: Meters
) -> None:
    await deliver(inbox, PAID, fail)
    await deliver(inbox, Message("m-1", "order.paid", {"cents": 8}), charge)
    assert meters.counted() == {"failed": 1, "retried": 1, "processed": 1, "mismatches": 1}


async def test_a_delivery_that_comes_too_early_is_deferred_with_its_reason(inbox: Inbox[Any], meters: Meters) -> None:
    policy = Longest(max_attempts=5, base=3600.0)
    await deliver(inbox, PAID, fail, retry=policy)
    assert isinstance(await deliver(inbox, PAID, charge, retry=policy), TryLater)
    assert meters.value("deferred_total", reason="backoff") == 1
    assert meters.counted() == {"failed": 1, "deferred": 1}


async def test_a_handler_that_asks_to_be_run_later_has_run_and_failed(inbox: Inbox[Any], meters: Meters) -> None:
    async def not_now(message: Message[Any]) -> None:
        raise TryLater(60)

    await deliver(inbox, PAID, not_now)
    assert meters.counted() == {"failed": 1}


async def test_a_message_that_cannot_be_kept_is_refused(inbox: Inbox[Any], meters: Meters) -> None:
    assert isinstance(await deliver(inbox, Message("m-1", "order.paid", float("nan")), charge), InvalidMessage)
    assert meters.counted() == {"refused": 1}


async def test_a_database_that_goes_away_leaves_deliveries_unsettled(postgres_lab: PostgresLab, meters: Meters) -> None:
    async def cut_off(message: Message[Any], tx: Any) -> None:
        await tx.execute("SELECT pg_terminate_backend(pg_backend_pid())")

    inbox = await postgres_lab.inbox(listeners=[meters.listener])
    assert isinstance(await deliver(inbox, PAID, cut_off), StoreUnavailable)
    assert meters.counted() == {"unsettled": 1}


async def test_an_ignored_message_leaves_no_series(meters: Meters) -> None:
    options: Any = {"listeners": [meters.listener], "unhandled": "ignore"}
    async with Inbox.connect("sqlite://", consumer="billing", **options) as inbox:
        await inbox.process(PAID)
    assert meters.types() == set()


async def test_consumers_and_types_are_told_apart(meters: Meters) -> None:
    for consumer in ("billing", "shipping"):
        async with Inbox.connect("sqlite://", consumer=consumer, listeners=[meters.listener]) as inbox:
            for type_ in ("order.paid", "order.shipped"):
                await inbox.process(Message(type_, type_, None), charge)
    for consumer in ("billing", "shipping"):
        for type_ in ("order.paid", "order.shipped"):
            assert meters.value("processed_total", type_, consumer) == 1


async def test_an_event_that_the_metrics_do_not_count_is_no_error(meters: Meters) -> None:
    meters.listener(Ignored(consumer="billing", type="order.paid", message_id="m-1"))
    assert meters.types() == set()


# --- durations ----------------------------------------------------------------------------------------------


async def test_only_a_run_that_was_processed_has_a_duration(inbox: Inbox[Any], meters: Meters) -> None:
    await deliver(inbox, PAID, fail)
    assert meters.value("processing_duration_seconds_count") == 0
    await inbox.process(PAID, charge)
    assert meters.value("processing_duration_seconds_count") == 1
    await inbox.process(PAID, charge)
    await deliver(inbox, Message("m-2", "order.paid", float("nan")), charge)
    assert meters.value("processing_duration_seconds_count") == 1


def test_durations_are_seconds_in_the_buckets_given() -> None:
    meters = Meters(buckets=(0.1, 1.0))
    meters.listener(processed("order.paid", duration_ms=250.0))
    assert meters.value("processing_duration_seconds_sum") == 0.25
    found = [meters.value("processing_duration_seconds_bucket", le=le) for le in ("0.1", "1.0", "+Inf")]
    assert found == [0, 1, 1]


def test_the_default_buckets_reach_from_a_millisecond_to_a_minute(meters: Meters) -> None:
    meters.listener(processed("order.paid", duration_ms=61_000.0))
    assert (BUCKETS[0], BUCKETS[-1]) == (0.001, 60.0)
    assert meters.value("processing_duration_seconds_bucket", le="60.0") == 0
    assert meters.value("processing_duration_seconds_bucket", le="+Inf") == 1


# --- labels -------------------------------------------------------------------------------------------------


def processed(type_: str, *, consumer: str = "billing", duration_ms: float = 1.0) -> Processed:
    return Processed(consumer=consumer, type=type_, message_id="m", attempt=1, duration_ms=duration_ms)


def test_types_beyond_the_limit_share_a_label() -> None:
    meters = Meters(max_types=2)
    for type_ in ("a", "b", "c", "d", "a"):
        meters.listener(processed(type_))
    assert meters.types() == {"a", "b", "_other_"}
    assert [meters.value("processed_total", type_) for type_ in ("a", "b", "_other_")] == [2, 1, 2]


def test_each_consumer_has_a_limit_of_its_own() -> None:
    meters = Meters(max_types=1)
    for consumer in ("billing", "shipping"):
        meters.listener(processed("a", consumer=consumer))
    assert meters.types(consumer="billing") == meters.types(consumer="shipping") == {"a"}


def test_a_flood_of_types_costs_no_memory() -> None:
    meters = Meters(max_types=3)
    for number in range(1000):
        meters.listener(processed(f"type-{number}"))
    assert len(meters.listener._known) == 3
    assert len(meters.types()) == 4
    assert meters.value("processed_total", "_other_") == 997


def test_a_flood_of_reasons_is_bounded_too(meters: Meters) -> None:
    for number in range(100):
        meters.listener(Deferred(consumer="billing", type="order.paid", message_id="m", reason=f"reason-{number}"))
    assert meters.value("deferred_total", reason="reason-0") == 1
    assert meters.value("deferred_total", reason="_other_") == 100 - MAX_REASONS


async def test_control_characters_in_a_type_are_escaped(inbox: Inbox[Any], meters: Meters) -> None:
    await inbox.process(Message("m-1", "order\x1b[31m\n.paid", None), charge)
    assert meters.types() == {r"order\x1b[31m\n.paid"}
    assert "\x1b" not in meters.text()


def test_a_long_type_is_cut(meters: Meters) -> None:
    meters.listener(processed("x" * 5000))
    assert [len(type_) for type_ in meters.types()] == [200]


def test_the_series_of_a_type_start_at_zero_together(meters: Meters) -> None:
    """`a / (a + b)` has no answer in PromQL while one of the two does not exist."""
    meters.listener(processed("order.paid"))
    assert {name: meters.value(f"{name}_total") for name in COUNTERS} == {
        name: float(name == "processed") for name in COUNTERS
    }


@pytest.mark.parametrize("type_", ["order.paid", "one too many"])
def test_series_that_are_there_are_found_without_asking_for_labels(type_: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_labels: object) -> None:
        raise AssertionError("labels() was called for series that are known")

    meters = Meters(max_types=1)
    meters.listener(processed("order.paid"))
    deferred = Deferred(consumer="billing", type=type_, message_id="m", reason="backoff")
    for event in (processed(type_), deferred):
        meters.listener(event)
    families = meters.listener._families
    for family in (*families.counters.values(), families.deferred, families.duration, families.in_flight):
        monkeypatch.setattr(family, "labels", refuse)
    before = meters.text()
    for event in (processed(type_), deferred):
        meters.listener(event)
    assert meters.text() != before


# --- what is in flight, batches and cleanups -----------------------------------------------------------------------


async def test_what_is_in_flight_goes_up_and_down_however_it_ends(meters: Meters, postgres_lab: PostgresLab) -> None:
    inbox, gate = await postgres_lab.inbox(listeners=[meters.listener]), Gate(postgres_lab)
    running = [asyncio.ensure_future(inbox.process(postgres_lab.message(), gate)) for _ in range(3)]
    async with asyncio.timeout(10):
        while len(gate.runs) < 3:
            await asyncio.sleep(0.01)
    assert meters.value("in_flight") == 3
    running[0].cancel()
    await asyncio.wait(running[:1])
    assert meters.value("in_flight") == 2
    assert meters.counted() == {"cancelled": 1}
    gate.go.set()
    await asyncio.wait(running)
    for handler in (fail, reject, charge):
        await deliver(inbox, postgres_lab.message(), handler)
    assert meters.value("in_flight") == 0
    assert meters.counted() == {"cancelled": 1, "processed": 3, "failed": 1, "dead": 1}


async def test_metrics_that_come_and_go_while_a_delivery_runs_are_not_left_with_half_of_it(
    meters: Meters, postgres_lab: PostgresLab
) -> None:
    gates = [Gate(postgres_lab), Gate(postgres_lab)]
    inbox = await postgres_lab.inbox()
    before = asyncio.ensure_future(inbox.process(postgres_lab.message(), gates[0]))
    await gates[0].started.wait()
    stop = inbox.subscribe(meters.listener)
    during = asyncio.ensure_future(inbox.process(postgres_lab.message(), gates[1]))
    await gates[1].started.wait()
    assert meters.value("in_flight") == 1
    gates[0].go.set()
    await before
    assert meters.value("in_flight") == 1
    stop()
    gates[1].go.set()
    await during
    assert meters.value("in_flight") == 0


def of_consumer(meters: Meters, name: str, **labels: str) -> float | None:
    return meters.registry.get_sample_value(f"consumer_inbox_{name}", {"consumer_name": "billing", **labels})


def test_a_batch_is_measured_by_its_size(meters: Meters) -> None:
    for size in (1, 100, 100):
        meters.listener(Batch(consumer="billing", handler="many", size=size, duration_ms=5.0))
    assert of_consumer(meters, "batch_size_count") == 3
    assert of_consumer(meters, "batch_size_sum") == 201
    assert of_consumer(meters, "batch_size_bucket", le="50.0") == 1


async def test_a_cleanup_is_counted_and_timed(inbox: Inbox[Any], meters: Meters) -> None:
    for number in range(3):
        await inbox.process(Message(f"m-{number}", "order.paid", None), charge)
    assert await inbox.cleanup(timedelta(0), batch=2) == 3
    assert await inbox.cleanup(timedelta(0)) == 0
    assert of_consumer(meters, "cleanup_deleted_total") == 3
    assert of_consumer(meters, "cleanup_duration_seconds_count") == 2
    assert of_consumer(meters, "cleanup_failures_total") == 0


def test_a_cleanup_that_fails_is_counted_with_what_it_deleted(meters: Meters) -> None:
    meters.listener(SweepFailed(consumer="billing", error=OSError("away"), deleted=2, duration_ms=1500.0))
    assert of_consumer(meters, "cleanup_deleted_total") == 2
    assert of_consumer(meters, "cleanup_duration_seconds_sum") == 1.5
    assert of_consumer(meters, "cleanup_failures_total") == 1


# --- how it is set up ---------------------------------------------------------------------------------------


def test_without_the_package_the_error_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    with pytest.raises(MissingDriver, match=r"onceward\[metrics\]") as caught:
        PrometheusMetrics()
    assert caught.value.extra == "metrics"


def test_the_module_can_be_imported_without_the_package() -> None:
    code = "import sys; sys.modules['prometheus_client'] = None; import onceward.observe.prometheus"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_second_set_in_one_registry_is_refused_and_the_first_goes_on(meters: Meters) -> None:
    with pytest.raises(UsageError, match="give it to every inbox"):
        PrometheusMetrics(meters.registry)
    meters.listener(processed("order.paid"))
    assert meters.counted() == {"processed": 1}


# --- several processes --------------------------------------------------------------------------------------

_CHILD = """
import asyncio
from onceward import Inbox, Message
from onceward.observe.prometheus import PrometheusMetrics

async def charge(message):
    return None

async def work(metrics):
    async with Inbox.connect("sqlite://", consumer="billing", listeners=[metrics]) as inbox:
        for _ in range(3):
            await inbox.process(Message("m-1", "order.paid", None), charge)
"""

_ALONE = """
asyncio.run(work(PrometheusMetrics()))
"""

_FORKED = """
import os
from onceward.events import Processed

metrics = PrometheusMetrics()
metrics(Processed(consumer="billing", type="order.paid", message_id="m", attempt=1, duration_ms=1.0))
children = []
for _ in range(2):
    child = os.fork()
    if not child:
        asyncio.run(work(metrics))
        os._exit(0)
    children.append(child)
assert all(os.waitpid(child, 0)[1] == 0 for child in children)
"""


def start(code: str, folder: Path) -> subprocess.Popen[bytes]:
    environment = os.environ | {"PROMETHEUS_MULTIPROC_DIR": str(folder)}
    return subprocess.Popen([sys.executable, "-c", code], env=environment)


def together(folder: Path) -> CollectorRegistry:
    registry = CollectorRegistry()
    MultiProcessCollector(registry, str(folder))
    return registry


def test_what_two_processes_count_adds_up(tmp_path: Path) -> None:
    children = [start(_CHILD + _ALONE, tmp_path) for _ in range(2)]
    assert [child.wait(60) for child in children] == [0, 0]
    registry = together(tmp_path)
    assert counted(registry) == {"processed": 2, "duplicates": 4}
    labels = {"consumer_name": "billing", "event_type": "order.paid"}
    assert registry.get_sample_value("consumer_inbox_processing_duration_seconds_count", labels) == 2


def test_series_that_were_cached_before_a_fork_count_for_the_child(tmp_path: Path) -> None:
    assert start(_CHILD + _FORKED, tmp_path).wait(60) == 0
    assert counted(together(tmp_path)) == {"processed": 3, "duplicates": 4}
    assert len(list(tmp_path.glob("counter_*.db"))) == 3


_KILLED = """
import os
from onceward.events import Started

started = Started(consumer="billing", type="order.paid", message_id="m")
metrics = PrometheusMetrics()
metrics(started)
child = os.fork()
if not child:
    metrics(started)
    metrics(started)
    os._exit(1)
os.waitpid(child, 0)
print(child)
"""


def test_what_a_process_had_in_flight_when_it_died_is_not_in_flight(tmp_path: Path) -> None:
    environment = os.environ | {"PROMETHEUS_MULTIPROC_DIR": str(tmp_path)}
    ran = subprocess.run([sys.executable, "-c", _CHILD + _KILLED], env=environment, check=True, capture_output=True)
    labels = {"consumer_name": "billing", "event_type": "order.paid"}
    assert together(tmp_path).get_sample_value("consumer_inbox_in_flight", labels) == 3
    mark_process_dead(int(ran.stdout), str(tmp_path))
    assert together(tmp_path).get_sample_value("consumer_inbox_in_flight", labels) == 1


# --- what the page says -------------------------------------------------------------------------------------


def blocks(language: str) -> Iterator[tuple[str, str]]:
    """Heading and text of each block of a language, in the order of the page."""
    heading = ""
    for found in re.finditer(r"^#+ ([^\n]+)$|^```(\w+)\n(.*?)^```$", PAGE.read_text("utf-8"), re.MULTILINE | re.DOTALL):
        heading = found[1] or heading
        if found[2] == language:
            yield heading, found[3]


def test_the_page_lists_every_metric_and_no_other(meters: Meters) -> None:
    listed = re.findall(r"^\| `(consumer_inbox_\w+)` \|", PAGE.read_text("utf-8"), re.MULTILINE)
    made = [family.name + "_total" * (family.type == "counter") for family in meters.registry.collect()]
    assert sorted(listed) == sorted(made)


def promtool(*arguments: str, text: str = "") -> None:
    binary = shutil.which("promtool")
    if binary is None:
        pytest.skip("no promtool here; it is in Debian's package prometheus")
    ran = subprocess.run([binary, *arguments], input=text, capture_output=True, text=True, check=False)
    assert (ran.returncode, ran.stderr) == (0, ""), ran.stdout + ran.stderr


async def test_the_text_of_a_scrape_is_clean(inbox: Inbox[Any], meters: Meters) -> None:
    for handler in (fail, charge, charge):
        await deliver(inbox, PAID, handler)
    await deliver(inbox, Message("m-2", 'odd "type"\n\\ é', None), charge)
    meters.listener(Deferred(consumer="billing", type="order.paid", message_id="m", reason="backoff"))
    meters.listener(Batch(consumer="billing", handler="many", size=7, duration_ms=1.0))
    meters.listener(Swept(consumer="billing", deleted=7, duration_ms=1.0))
    promtool("check", "metrics", text=meters.text())


def test_the_text_of_several_processes_is_clean(tmp_path: Path) -> None:
    assert start(_CHILD + _ALONE, tmp_path).wait(60) == 0
    promtool("check", "metrics", text=generate_latest(together(tmp_path)).decode())


# Per second, for one busy type and a quiet one. Each query of the page, and what it says of these.
_SCRAPED = {
    "processed_total": 3.0,
    "duplicates_total": 1.0,
    "failed_total": 0.75,
    "dead_total": 0.25,
    "refused_total": 0.0,
    "mismatches_total": 0.0,
    "unsettled_total": 0.5,
    "processing_duration_seconds_sum": 1.5,
    "processing_duration_seconds_count": 3.0,
    'processing_duration_seconds_bucket{le="1"}': 3.0,
    'processing_duration_seconds_bucket{le="+Inf"}': 3.0,
    "in_flight": 0.001,
    "cleanup_failures_total": 0.001,
}
_BUSY, _CONSUMER = '{consumer_name="billing", event_type="paid"}', '{consumer_name="billing"}'
_ANSWERS = {
    "Duplicate rate": [(_BUSY, 0.25)],
    "Average processing time": [(_CONSUMER, 0.5)],
    "Events by consumer": [(_CONSUMER, 3.0)],
    "Slow messages": [(_CONSUMER, 0.95)],
    "Failure rate": [(_CONSUMER, 0.25)],
    "Somebody has to look": [(_BUSY, 225.0)],
    "The database is in trouble": [(_CONSUMER, 0.5)],
    "In flight": [(_CONSUMER, 3.6)],
    "Cleanup does not work": [(_CONSUMER, 3.6)],
}


def scraped(name: str, type_: str, per_second: float) -> dict[str, str]:
    name, _, bucket = name.partition("{")
    labels = ", ".join(filter(None, ['consumer_name="billing"', f'event_type="{type_}"', bucket.rstrip("}")]))
    return {"series": f"consumer_inbox_{name}{{{labels}}}", "values": f"0+{per_second * 60:g}x60"}


def question(query: str, answers: list[tuple[str, float]]) -> dict[str, Any]:
    """As promtool wants it. NaN, which equals nothing, is left out."""
    samples = [{"labels": labels, "value": value} for labels, value in answers]
    return {"expr": f"round({query}, 0.01) >= 0", "eval_time": "1h", "exp_samples": samples}


def ask(questions: list[dict[str, Any]], folder: Path) -> None:
    series = [scraped(name, "paid", rate) for name, rate in _SCRAPED.items()]
    series += [scraped(name, "quiet", 0.0) for name in _SCRAPED]
    test = {"interval": "1m", "input_series": series, "promql_expr_test": questions}
    (folder / "page.yml").write_text(json.dumps({"evaluation_interval": "1m", "tests": [test]}), "utf-8")
    promtool("test", "rules", str(folder / "page.yml"))


def test_the_promql_of_the_page_answers_what_it_says(tmp_path: Path) -> None:
    queries = dict(blocks("promql"))
    assert list(queries) == list(_ANSWERS)
    ask([question(query, _ANSWERS[heading]) for heading, query in queries.items()], tmp_path)


def test_an_average_of_quotients_has_no_answer_while_a_type_is_quiet(tmp_path: Path) -> None:
    rates = [f"rate(consumer_inbox_processing_duration_seconds_{part}[5m])" for part in ("sum", "count")]
    ask([question(f"avg({' / '.join(rates)})", [])], tmp_path)


@pytest.fixture(params=["sqlite", "postgres"])
def lab(request: pytest.FixtureRequest) -> Lab:
    found: Lab = request.getfixturevalue(f"{request.param}_lab")
    return found


def sql(lab: Lab, heading: str) -> str:
    """The page's query under a heading, for this lab's database."""
    database = "SQLite" if isinstance(lab, SqliteLab) else "PostgreSQL"
    [query] = [text for title, text in blocks("sql") if title == heading and database in text.partition("\n")[0]]
    return query


async def fill(lab: Lab) -> None:
    """Three processed, a failure and a dead letter of billing, one processed of shipping; p-2 and f are old."""
    billing, shipping = await lab.inbox(), await lab.inbox(consumer="shipping")
    for id_ in ("p-1", "p-2", "p-3"):
        await billing.process(lab.message(id_), charge)
    await deliver(billing, lab.message("f"), fail)
    await deliver(billing, lab.message("d"), reject)
    await shipping.process(lab.message("p-1"), charge)
    for id_, ago in (("p-2", "2 days"), ("f", "3 hours"), ("d", "10 minutes")):
        await age(lab, id_, ago)


async def received(lab: Lab, message_id: str, consumer: str = "billing") -> object:
    where = f"consumer = '{consumer}' AND message_id = '{message_id}'"
    return (await lab.query(f"SELECT received_at FROM onceward_records WHERE {where}"))[0][0]


async def test_sql_tells_how_many_records_each_consumer_has(lab: Lab) -> None:
    await fill(lab)
    assert await lab.query(sql(lab, "How many records each consumer has")) == [("billing", 5), ("shipping", 1)]


async def test_sql_tells_the_oldest_record_of_each_consumer(lab: Lab) -> None:
    await fill(lab)
    assert await lab.query(sql(lab, "The oldest record of each consumer")) == [
        ("billing", await received(lab, "p-2")),
        ("shipping", await received(lab, "p-1", "shipping")),
    ]


async def test_sql_tells_how_fast_the_table_grows(lab: Lab) -> None:
    await fill(lab)
    assert await lab.query(sql(lab, "How fast the table grows")) == [("billing", 5, 4, 3), ("shipping", 1, 1, 1)]


async def test_sql_tells_what_is_not_processed(lab: Lab) -> None:
    await fill(lab)
    assert await lab.query(sql(lab, "What is not processed")) == [
        ("billing", "dead", 1, await received(lab, "d")),
        ("billing", "failed", 1, await received(lab, "f")),
    ]


async def test_sql_tells_what_is_stuck(lab: Lab) -> None:
    await fill(lab)
    await deliver(await lab.inbox(), lab.message("failed just now"), fail)
    [row] = await lab.query(sql(lab, "What is stuck"))
    assert row[:6] == ("billing", "order.paid", "f", "failed", 1, 0)


@pytest.mark.parametrize("heading", ["What is not processed", "What is stuck"])
async def test_what_is_unfinished_is_found_by_its_index(lab: Lab, heading: str) -> None:
    """Among many processed records. The planner of PostgreSQL wants to know how many."""
    inbox = await lab.inbox()
    for number in range(200):
        await inbox.process(lab.message(f"p-{number}"), charge)
    await deliver(inbox, lab.message("f"), fail)
    await lab.query("ANALYZE onceward_records")
    explain = "EXPLAIN QUERY PLAN" if isinstance(lab, SqliteLab) else "EXPLAIN"
    plan = await lab.query(f"{explain}\n{sql(lab, heading)}")
    assert "onceward_records_unfinished" in str(plan), plan


async def test_sql_tells_what_runs_right_now_on_postgresql(postgres_lab: PostgresLab) -> None:
    query = sql(postgres_lab, "What runs right now")
    inbox, gate = await postgres_lab.inbox(), Gate(postgres_lab)
    running = asyncio.create_task(inbox.process(postgres_lab.message(), gate))
    await gate.started.wait()
    assert await postgres_lab.query(query) == [], "not five minutes yet"
    assert len(await postgres_lab.query(query.replace("5 minutes", "0 minutes"))) == 1
    gate.go.set()
    await running
    assert await postgres_lab.query(query.replace("5 minutes", "0 minutes")) == []


# --- a known run, told three times --------------------------------------------------------------------------


async def test_metrics_sql_and_stats_tell_the_same_of_a_known_run(lab: Lab, meters: Meters) -> None:
    """Six processed, two of them at the second try, with five duplicates; two failed, one dead; two of them swept."""
    inbox = await lab.inbox(listeners=[meters.listener])
    for id_ in ("f-1", "f-2", "r-1", "r-2"):
        await deliver(inbox, lab.message(id_), fail)
    await deliver(inbox, lab.message("d"), reject)
    for id_ in ("p-1", "p-2", "p-3", "p-4", "r-1", "r-2"):
        await inbox.process(lab.message(id_), charge)
    for id_ in ("p-1", "p-1", "p-2", "r-1", "d"):
        await deliver(inbox, lab.message(id_), charge)
    for id_ in ("p-1", "p-2"):
        await lab.make_older(id_, days=40)
    await age(lab, "f-1", "10 minutes")
    assert await inbox.cleanup() == 2

    assert meters.counted() == {"processed": 6, "duplicates": 5, "failed": 4, "dead": 1, "retried": 2}
    assert meters.value("processing_duration_seconds_count") == 6
    assert meters.value("in_flight") == 0
    assert of_consumer(meters, "cleanup_deleted_total") == 2

    assert await lab.query(sql(lab, "How many records each consumer has")) == [("billing", 7)]
    assert await lab.query(sql(lab, "How fast the table grows")) == [("billing", 7, 7, 7)]
    assert [row[:3] for row in await lab.query(sql(lab, "What is not processed"))] == [
        ("billing", "dead", 1),
        ("billing", "failed", 2),
    ]
    assert [row[2] for row in await lab.query(sql(lab, "What is stuck"))] == ["f-1"]

    stats = await inbox.stats()
    told = (stats.total, stats.last_day, stats.last_hour, stats.processed, stats.failed, stats.dead, stats.running)
    assert told == (7, 7, 7, 4, 2, 1, 0)
    [[_, oldest]] = await lab.query(sql(lab, "The oldest record of each consumer"))
    assert stats.oldest == (datetime.fromisoformat(oldest) if isinstance(oldest, str) else oldest)
    stuck = await inbox.records(State.RUNNING, State.FAILED, older_than=timedelta(minutes=5))
    assert [record.message_id for record in stuck] == ["f-1"]
    assert [record.message_id for record in await inbox.records(State.DEAD)] == ["d"]


async def age(lab: Lab, message_id: str, age: str) -> None:
    then = f"now() - interval '{age}'"
    if isinstance(lab, SqliteLab):
        then = f"strftime('%Y-%m-%dT%H:%M:%fZ', 'now', '-{age}')"
    await lab.query(
        f"UPDATE onceward_records SET received_at = {then}, "
        f"processed_at = CASE WHEN processed_at IS NULL THEN NULL ELSE {then} END WHERE message_id = '{message_id}'"
    )
