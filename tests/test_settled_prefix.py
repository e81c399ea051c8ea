"""How far a partition of Kafka may be committed, whatever is settled in whatever order."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from onceward.brokers import kafka_partitions
from onceward.brokers.kafka_partitions import Partition, Partitions
from onceward.brokers.kafka_prefix import SettledPrefix
from onceward.brokers.kafka_records import Fetched

OFFSETS = st.lists(st.integers(0, 10_000), unique=True, max_size=60).map(sorted)
"""With gaps, as compaction and transactions leave them."""


@st.composite
def histories(draw: st.DrawFn) -> list[tuple[str, int]]:
    """Offsets are delivered in growing order; each is settled after that, some twice, some never."""
    waiting, delivered, told = draw(OFFSETS), [], []
    while waiting or delivered:
        if waiting and (not delivered or draw(st.booleans())):
            delivered.append(waiting.pop(0))
            told.append(("deliver", delivered[-1]))
        else:
            offset = draw(st.sampled_from(delivered))
            what = draw(st.sampled_from(["settle", "twice", "never"]))
            if what != "twice":
                delivered.remove(offset)
            if what != "never":
                told.append(("settle", offset))
    return told


def expected(delivered: Sequence[int], settled: set[int]) -> int | None:
    """By its definition."""
    unsettled = [offset for offset in delivered if offset not in settled]
    if unsettled:
        return unsettled[0]
    return delivered[-1] + 1 if delivered else None


@given(histories())
def test_all_below_what_may_be_committed_is_settled_and_it_is_as_far_as_can_be(history: list[tuple[str, int]]) -> None:
    prefix, delivered, settled = SettledPrefix(), list[int](), set[int]()
    for what, offset in history:
        if what == "deliver":
            prefix.deliver(offset)
            delivered.append(offset)
        else:
            prefix.settle(offset)
            settled.add(offset)
        first = expected(delivered, settled)
        assert prefix.committable == first
        assert prefix.unsettled == len(set(delivered) - settled)
        assert prefix.ahead == len([one for one in settled if first is not None and one > first])


@given(histories())
def test_what_may_be_committed_never_goes_back(history: list[tuple[str, int]]) -> None:
    prefix, before = SettledPrefix(), -1
    for what, offset in history:
        (prefix.deliver if what == "deliver" else prefix.settle)(offset)
        now = prefix.committable
        assert now is not None
        assert now >= before
        before = now


@given(OFFSETS, st.randoms())
def test_nothing_is_kept_of_what_is_settled(offsets: list[int], random: object) -> None:
    prefix = SettledPrefix()
    for offset in offsets:
        prefix.deliver(offset)
    random.shuffle(offsets)  # type: ignore[attr-defined]
    for offset in offsets:
        prefix.settle(offset)
    assert not prefix._order
    assert not prefix._open


def test_what_was_never_delivered_cannot_be_settled() -> None:
    prefix = SettledPrefix()
    prefix.settle(5)
    prefix.deliver(5)
    assert prefix.committable == 5


# --- partitions ---------------------------------------------------------------------------------------------


def records(first: int, last: int, partition: int = 0) -> list[Fetched]:
    return [Fetched("t", partition, offset, None, b"", (), None) for offset in range(first, last + 1)]


def partitions(prefetch: int = 10, careful: int = 0) -> Partitions:
    made = Partitions(prefetch=prefetch, careful=careful, room=lambda: None)
    made.add([("t", 0), ("t", 1)])
    return made


def offsets(taken: Sequence[tuple[Partition, Fetched, bool]]) -> list[tuple[int, int]]:
    return [(record.partition, record.offset) for _partition, record, _redelivered in taken]


def test_each_partition_gives_about_as_much() -> None:
    ours = partitions()
    ours.put(("t", 0), records(0, 9))
    ours.put(("t", 1), records(0, 2, 1))
    assert offsets(ours.take(4)) == [(0, 0), (0, 1), (1, 0), (1, 1)]
    assert offsets(ours.take(1)) == [(0, 2)]
    assert offsets(ours.take(1)) == [(1, 2)], "the other one comes first"
    assert offsets(ours.take(100)) == [(0, offset) for offset in range(3, 10)]


@given(st.integers(1, 30), st.lists(st.integers(1, 20), max_size=40))
def test_what_is_buffered_never_exceeds_prefetch(prefetch: int, takes: list[int]) -> None:
    ours, next_offset = partitions(prefetch), 0
    (first, _second) = ours.all()
    for most in takes:
        while first.place not in ours.resting():
            ours.put(first.place, records(next_offset, next_offset + ours.portion - 1))
            next_offset += ours.portion
            assert len(first.buffer) <= prefetch
        ours.take(most)


def test_a_full_partition_has_room_again_when_it_is_nearly_empty() -> None:
    told: list[str] = []
    ours = Partitions(prefetch=8, careful=0, room=lambda: told.append("room"))
    ours.add([("t", 0)])
    ours.put(("t", 0), records(0, 3))
    assert ours.resting() == set()
    ours.put(("t", 0), records(4, 7))
    assert ours.resting() == {("t", 0)}
    ours.take(5)
    assert (ours.resting(), told) == ({("t", 0)}, [])
    ours.take(1)
    assert (ours.resting(), told) == (set(), ["room"])


def test_a_partition_whose_first_message_is_unsettled_for_long_gives_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kafka_partitions, "MOST_AHEAD", 5)
    ours = partitions(prefetch=100)
    ours.put(("t", 0), records(0, 30))
    taken = ours.take(6)
    for partition, record, _redelivered in taken[1:]:
        partition.settle(record.offset)
    ours.put(("t", 1), records(0, 0, 1))
    assert offsets(ours.take(100)) == [(1, 0)], "the other one goes on"
    taken[0][0].settle(0)
    assert len(ours.take(100)) == 25


def test_a_partition_that_was_taken_and_came_back_is_another_one() -> None:
    ours = partitions()
    ours.put(("t", 0), records(0, 3))
    (old, _record, _redelivered), *_rest = ours.take(2)
    assert old.begin()
    changes = ours.changes
    assert ours.remove([("t", 0)]) == [old]
    ours.put(("t", 0), records(4, 5))  # what was on its way; its next owner fetches it
    assert not old.begin()
    assert not old.buffer
    ours.add([("t", 0)])
    assert ours.changes > changes
    assert ours.take(10) == []
    ours.put(("t", 0), records(2, 3))
    assert offsets(ours.take(10)) == [(0, 2), (0, 3)]
    old.settle(0)
    (new,) = [one for one in ours.all() if one.place == ("t", 0)]
    assert new.committable is None


def test_a_partition_whose_offsets_go_back_begins_again() -> None:
    """The topic was made anew, or somebody has reset the offsets: what was settled before says nothing about now."""
    ours = partitions(prefetch=100)
    ours.put(("t", 0), records(100, 102))
    old = ours.take(10)
    ours.put(("t", 0), records(0, 2))
    assert offsets(ours.take(10)) == [(0, 0), (0, 1), (0, 2)]
    assert not old[0][0].begin()
    assert old[0][0].gone


def test_the_first_records_of_an_assignment_may_have_been_delivered_before() -> None:
    ours = partitions(careful=2)
    ours.put(("t", 0), records(0, 3))
    assert [redelivered for *_rest, redelivered in ours.take(10)] == [True, True, False, False]
