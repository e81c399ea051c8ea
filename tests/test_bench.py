"""The benchmark runs, does the work that it measures, and notices when it does not. Nothing here is timed."""

import json
from pathlib import Path
from typing import Any

import pytest

from bench import __main__ as bench
from bench import (
    accept,
    batches,
    brokers,
    dispatch,
    duplicates,
    embedded_queue,
    events,
    growth,
    kafka_,
    latency,
    peers,
    rabbitmq_,
    redis_,
    redis_admin,
    single,
    valkeys,
)
from bench.handwritten import claim_of, identity_of
from bench.messages import CONSUMER, new_messages
from bench.questions import World
from bench.queues import onceward_
from bench.rounds import Figure, Plan, Slice, Stage, Variant, WorkNotDone, figure, in_turn, measure, only
from bench.stored import yard
from onceward import Inbox
from onceward.brokers.memory import MemorySource
from onceward.identity import digest
from tests.conftest import missing
from tests.services import kafka, rabbitmq, valkey

TINY = Plan(rounds=1, seconds=0.001, warm_up=0.001)


async def measured(question: Any, world: World) -> dict[str, Figure]:
    figures: dict[str, Figure] = {}
    async for stage in question(world):
        if isinstance(stage, Stage):
            found = await measure(stage, TINY, lambda _text: None)
            figures |= {f"{one.name} x{found.workers}": one for one in found.figures}
    return figures


@pytest.fixture
def world(postgres_server: str, tmp_path: Path) -> World:
    return World(
        postgres_dsn=postgres_server, folder=tmp_path, known=200, pairs=3, calls=10, rounds=1, bulk=150, lasting=0.1,
        full=False,
    )  # fmt: skip


async def test_one_message_at_a_time_on_postgresql_does_the_work(world: World):
    figures = await measured(single.stages, world)
    assert {"no inbox x1", "by hand x16", "naive x16", "onceward x16", "onceward, result x16"} <= set(figures)
    assert set(figures["onceward x16"].ratios) == {"no inbox", "no inbox, riding", "by hand"}
    assert figures["onceward x16"].server_us is not None or not Path("/proc/self/schedstat").exists()


async def test_batches_on_postgresql_do_the_work(world: World):
    figures = await measured(batches.stages, world)
    assert figures["by hand, bulk x16"].rate is not None
    missing = "" if hasattr(Inbox, "process_bulk") else "not available"
    assert figures["process_bulk x16"].missing == missing


async def test_known_messages_are_recognised_as_duplicates(world: World):
    figures = await measured(duplicates.stages, world)
    assert {"select first x1", "insert first x1", "onceward x16", "= any() x16"} <= set(figures)


@pytest.mark.slow
async def test_peers_are_judged_by_the_same_deliveries(world: World):
    *stages, facts = [stage async for stage in peers.stages(world)]
    assert [stage.workers for stage in stages] == [1, 16]
    rows = {row[0]: row[1:] for row in facts.rows}
    assert rows["onceward"] == ("0", "0", "0", "0")
    assert len(rows) == 5


async def test_all_queues_keep_what_they_accept(world: World):
    figures = await measured(accept.stages, world)
    assert {"by hand x1", "onceward x16", "onceward, streams x1", "by hand, COPY x1"} <= set(figures)
    assert "by hand" in figures["onceward x16"].ratios


async def test_all_queues_work_on_what_they_have(world: World):
    async def stages(world: World) -> Any:
        async with yard(world.postgres_dsn) as place:
            for part in (dispatch.single(place, 2, write=True), dispatch.loops(place, write=False)):
                async for stage in part:
                    yield stage

    figures = await measured(stages, world)
    assert {"by hand x2", "onceward x2", "onceward, batch=1 x1", "onceward, streams x1", "onceward, bulk x1"} <= set(
        figures
    )
    assert "by hand" in figures["onceward, bulk x1"].ratios


async def test_a_queue_is_judged_by_what_its_handlers_saw(world: World):
    async with yard(world.postgres_dsn) as place:
        assert await dispatch.judged(onceward_, place, 5) == ("onceward", "0", "0", "0", "0")


@pytest.mark.slow
async def test_queues_are_judged_by_the_same_messages(world: World):
    *_, facts = [stage async for stage in dispatch.stages(world)]
    assert facts.rows[0] == ("onceward", "0", "0", "0", "0")
    assert len(facts.rows) == 3


@pytest.mark.slow
async def test_the_time_until_a_message_is_handled_is_measured(world: World):
    (facts,) = [one async for one in latency.stages(world)]
    assert [row[0] for row in facts.rows][:2] == ["onceward, one inbox", "onceward"]
    assert facts.rows[0][-1] == "5"


AS_MUCH = 1.5
"""Dead rows are read over until somebody cleans up, which with few messages depends on what else the server does. What
would have to look at each of two hundred others is far above."""


async def test_a_message_is_no_more_work_when_others_are_blocked_ahead_of_it(world: World):
    found = growth.Situations(world)
    await growth.blocked_ahead(world, found, (0, 200))
    work = {row[0]: (float(row[6]), float(row[-1])) for row in found.rows}
    assert all(of_the_first <= AS_MUCH for pair in work.values() for of_the_first in pair), found.rows


async def test_a_message_is_no_more_work_when_more_is_in_the_tables(world: World):
    found = growth.Situations(world)
    await growth.pending(world, found, (0, 2_000))
    work = {row[0]: (float(row[6]), float(row[-1])) for row in found.rows}
    assert all(of_the_first <= AS_MUCH for pair in work.values() for of_the_first in pair), found.rows


async def test_a_message_is_no_more_work_when_many_are_done_that_vacuum_has_not_seen(world: World):
    found = growth.Situations(world)
    await growth.remains(world, found, (0, 3_000))
    before, after = found.rows
    assert float(after[6]) <= 1.1
    assert float(after[4]) <= 1.5 * float(before[4]), "buffers: what is gone is looked at again and again"


@pytest.mark.slow
async def test_growth_is_measured_by_work_done(world: World):
    grown, *_others, bloat = [facts async for facts in growth.stages(world)]
    assert len(grown.rows) == 18
    assert len(bloat.rows) == 3


async def test_the_queues_on_sqlite_do_the_work(world: World):
    figures = await measured(embedded_queue.stages, world)
    assert {"by hand x16", "onceward x16", "onceward, bulk x1"} <= set(figures)


@pytest.fixture
def needs_valkey() -> None:
    if valkey.binary() is None:
        missing(f"no Valkey or Redis here; set {valkey.BINARY_VARIABLE}")


async def test_a_record_on_valkey_that_is_only_claimed_is_no_effect(needs_valkey: None):
    with valkeys.server() as server:
        watch = valkeys.Watch([server])
        server.ask("SET", "done", "1", "PX", 60_000)
        assert [await watch.effects(), await watch.effects()] == [1, 0]
        server.ask("SET", "claimed", "1")
        with pytest.raises(WorkNotDone, match="1 of 1 records are claimed"):
            await watch.effects()


@pytest.mark.slow
async def test_valkey_does_the_work_and_its_peer_is_judged(needs_valkey: None, tmp_path: Path):
    world = World(postgres_dsn="", folder=tmp_path, known=200, pairs=3, rounds=1, full=False)
    figures: dict[str, Figure] = {}
    facts: dict[str, Any] = {}
    async for stage in redis_.stages(world):
        if isinstance(stage, Stage):
            found = await measure(stage, TINY, lambda _text: None)
            figures |= {f"{one.name} x{found.workers}": one for one in found.figures}
        else:
            facts |= {row[0]: row[1:] for row in stage.rows}
    assert {"by hand x16", "onceward x16", "onceward, your client x1", "process_many x1", "GET x1"} <= set(figures)
    assert facts["onceward"] == ("0", "0", "0", "0", "0")
    assert {"powertools", "SET NX, value 1", "one", "three"} <= set(facts)


OURS = {"onceward, inline", "onceward, many", "onceward, bulk", "onceward, accept"}


def each(*names: str) -> set[str]:
    return {f"{name} x{workers}" for name in (*OURS, "no inbox", "naive", *names) for workers in (1, 4)}


@pytest.mark.slow
@pytest.mark.xdist_group("kafka")
async def test_from_kafka_to_postgresql_all_variants_do_the_work(
    world: World, kafka_server: kafka.Broker, monkeypatch: pytest.MonkeyPatch
):
    if kafka_server.is_mock:
        missing(f"only a mock of Kafka here; set {kafka.VARIABLE}")
    monkeypatch.setenv(kafka.VARIABLE, kafka_server.bootstrap)
    figures = await measured(kafka_.stages, world)
    assert each("confluent, inline", "confluent, many", "onceward, many, careful") <= set(figures)
    assert set(figures["onceward, bulk x4"].ratios) == {"no inbox", "naive"}


@pytest.mark.slow
@pytest.mark.xdist_group("rabbitmq")
async def test_from_rabbitmq_to_postgresql_all_variants_do_the_work(
    world: World, rabbitmq_server: rabbitmq.Broker, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv(rabbitmq.VARIABLE, rabbitmq_server.url)
    figures = await measured(rabbitmq_.stages, world)
    assert each("onceward, prefetch=100") <= set(figures)


@pytest.mark.xdist_group("kafka")
async def test_a_topic_whose_offsets_nobody_committed_is_noticed(kafka_server: kafka.Broker):
    topic = kafka_.Topic(kafka_server, 1)
    topic.check()
    await topic.fill(new_messages(2))
    with pytest.raises(WorkNotDone, match="is committed"):
        topic.check()


async def test_a_gate_comes_to_its_end_after_as_many_as_were_asked_for():
    gate = brokers.Gate(MemorySource(new_messages(5)))
    gate.left = 3
    assert [len(await gate.receive(2)) for _ in range(3)] == [2, 1, 0]
    gate.left = 2
    assert len(await gate.receive(10)) == 2


async def test_sqlite_does_the_work_and_writes_its_figures_as_json(tmp_path: Path):
    options = bench.arguments(["--only", "sqlite", "--only", "events", "--rounds", "1", "--seconds", "0.001"])
    path = tmp_path / "out" / "figures.json"
    options.out, options.quick = path, True
    report = await bench.run(options, None, bench.Console(quiet=True))
    report.save(path)
    saved = json.loads(path.read_bytes())
    assert [stage["workers"] for stage in saved["stages"]] == [1, 64, 1]
    assert saved["facts"][0]["question"] == "events"


def test_some_variants_can_be_measured_alone():
    async def step(_messages: list[Any]) -> int:
        return 0

    async def nothing() -> int:
        return 0

    variants = (Variant("floor", step), Variant("other", step), Variant("one", step, ("floor", "other")))
    stage = Stage(question="q", title="t", variants=variants, make=new_messages, effects=nothing)
    part = only(stage, ["one", "floor"])
    assert part is not None
    assert [(variant.name, variant.floors) for variant in part.variants] == [("floor", ()), ("one", ("floor",))]
    assert only(stage, ["none"]) is None


def test_a_variant_that_does_not_exist_is_said(capsys: pytest.CaptureFixture[str]):
    assert bench.main(["--only", "sqlite", "--quick", "--variant", "onceword"]) == 2
    assert "no variant onceword" in capsys.readouterr().out


async def test_events_are_measured_with_and_without_listeners():
    found = await events.measure(calls=10, rounds=1)
    assert "nobody listens" in found


async def test_a_variant_that_does_not_do_the_work_is_an_error():
    async def lazy(messages: list[Any]) -> int:
        return len(messages)

    async def nothing() -> int:
        return 0

    stage = Stage(question="q", title="t", variants=(Variant("lazy", lazy),), make=new_messages, effects=nothing)
    with pytest.raises(WorkNotDone, match="lazy: 1 messages, 1 settled, 0 effects"):
        await measure(stage, TINY, lambda _text: None)


def test_ratios_are_taken_within_the_round():
    def slices(*rates: int) -> list[Slice]:
        return [Slice(rate, 1.0, 1.0) for rate in rates]

    async def step(_messages: list[Any]) -> int:
        return 0

    found = figure(Variant("one", step, ("floor",)), {"one": slices(50, 10, 40), "floor": slices(100, 20, 80)})
    assert found.ratios["floor"].middle == 0.5
    assert found.ratios["floor"].low == found.ratios["floor"].high == 0.5


def test_every_variant_comes_first_in_some_round():
    variants = [Variant(name, None) for name in "abc"]
    orders = ["".join(one.name for one in in_turn(variants, number)) for number in range(6)]
    assert {order[0] for order in orders} == set("abc")
    assert len(set(orders)) == 6


def test_hand_written_code_computes_identities_as_onceward_does():
    parts = ("billing", "default", "source:shop", "ü-1")
    assert identity_of(*parts) == digest(*parts)


async def test_hand_written_code_keeps_the_same_identity_and_hash_as_onceward():
    message = new_messages(1)[0]

    async def handler(_message: Any) -> None:
        pass

    async with Inbox.connect("sqlite://", consumer=CONSUMER) as inbox:
        await inbox.process(message, handler)
        record = await inbox.get_record(message)
    claim = claim_of(message)
    assert record is not None
    assert (record.identity.digest, record.payload_hash) == (claim.identity, claim.payload_hash)


async def test_looking_around_among_records_on_valkey_is_timed(needs_valkey: None, tmp_path: Path) -> None:
    world = World(postgres_dsn="", folder=tmp_path, full=False)
    [facts] = [one async for one in redis_admin.stages(world)]
    assert [row[0].partition("(")[0] for row in facts.rows] == ["stats", "records", "records", "sweepable", "cleanup"]
