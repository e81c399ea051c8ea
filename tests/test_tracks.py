"""Tracks, rulings and the brake: what `consume` decides, without any I/O."""

from __future__ import annotations

import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from onceward import Message, Reject, TryLater
from onceward.brake import Brake
from onceward.brokers.memory import MemoryDelivery, MemorySource
from onceward.brokers.ruling import Ruling, Step, delay_of, rule
from onceward.brokers.tracks import Item, Tracks
from onceward.errors import HandlerNotFound, KeyMissing, PayloadMismatch, StoreUnavailable
from onceward.outcome import Kind, Outcome

SOURCE = MemorySource()


def item(id_: str, partition: str | None = "0", lane: str | None = None) -> Item:
    delivery = MemoryDelivery(SOURCE, Message(id_, "t", None), id_, partition=partition)
    return Item(delivery, None if lane is None else ("default", lane))


def names(taken: Any) -> list[str]:
    return [] if taken is None else [one.delivery.message.id for one in taken.items]


def test_one_runner_at_a_time_has_a_partition() -> None:
    tracks = Tracks()
    tracks.add([item("a1", "a"), item("a2", "a"), item("b1", "b")])
    first, second = tracks.take(1, 0.0), tracks.take(5, 0.0)
    assert (names(first), names(second)) == (["a1"], ["b1"])
    assert tracks.take(5, 0.0) is None
    assert first is not None
    tracks.done(first)
    assert names(tracks.take(5, 0.0)) == ["a2"]


def test_what_is_free_is_for_anybody() -> None:
    tracks = Tracks()
    tracks.add([item(str(number), partition=None) for number in range(4)])
    assert (names(tracks.take(2, 0.0)), names(tracks.take(2, 0.0))) == (["0", "1"], ["2", "3"])


def test_a_lane_without_a_partition_is_a_track() -> None:
    tracks = Tracks()
    tracks.add([item("1", None, "a"), item("2", None, "a"), item("3", None, "b")])
    assert names(tracks.take(1, 0.0)) == ["1"]
    assert names(tracks.take(5, 0.0)) == ["3"]


def test_what_is_put_off_holds_up_its_lane_and_nobody_else() -> None:
    tracks = Tracks()
    tracks.add([item("a1", lane="a"), item("b1", lane="b"), item("a2", lane="a")])
    taken = tracks.take(2, 0.0)
    assert taken is not None
    tracks.done(taken, [(taken.items[0], 10.0)])
    tracks.add([item("a3", lane="a"), item("b2", lane="b")])
    again = tracks.take(9, 1.0)
    assert names(again) == ["b2"]
    assert again is not None
    tracks.done(again)
    assert tracks.due() == 10.0
    assert (tracks.ready, tracks.held) == (0, 3)
    assert tracks.take(9, 9.0) is None
    assert names(tracks.take(2, 10.0)) == ["a1", "a2"]
    assert (tracks.ready, tracks.held) == (1, 0)


def test_what_is_put_back_comes_first() -> None:
    tracks = Tracks()
    tracks.add([item("1"), item("2"), item("3")])
    taken = tracks.take(2, 0.0)
    assert taken is not None
    tracks.put_back(taken)
    assert names(tracks.take(9, 0.0)) == ["1", "2", "3"]


@settings(max_examples=300, deadline=None)
@given(st.integers(0, 2**32), st.integers(1, 5), st.integers(1, 4))
def test_whatever_happens_lanes_keep_their_order_and_nothing_is_lost(seed: int, most: int, runners: int) -> None:
    chance = random.Random(seed)
    tracks, now, done = Tracks(), 0.0, []
    coming = [
        item(f"{number:03}", chance.choice(["p0", "p1", None]), chance.choice(["a", "b", "c", None]))
        for number in range(40)
    ]
    for one in coming:  # a lane is in one partition, as keys are
        if one.lane is not None:
            one.delivery.partition = {"a": "p0", "b": "p1", "c": None}[one.lane[1]]  # type: ignore[misc]
    waiting, working = list(coming), []
    while len(done) < len(coming):
        now += 1.0
        if waiting and chance.random() < 0.5:
            tracks.add([waiting.pop(0) for _ in range(min(len(waiting), chance.randint(1, 6)))])
        if len(working) < runners and (taken := tracks.take(most, now)) is not None:
            working.append(taken)
        if working and chance.random() < 0.6:
            taken, stopped, again = working.pop(chance.randrange(len(working))), set(), []
            if chance.random() < 0.1:
                tracks.put_back(taken)
                continue
            for one in taken.items:
                if one.lane in stopped or chance.random() < 0.2:
                    again.append((one, now + chance.randint(0, 5)))
                    if one.lane is not None:
                        stopped.add(one.lane)
                else:
                    done.append(one)
            tracks.done(taken, again)
    assert tracks.empty or working
    for lane in {one.lane for one in coming if one.lane is not None}:
        ids = [one.delivery.message.id for one in done if one.lane == lane]
        assert ids == sorted(ids)
    assert len({one.delivery.message.id for one in done}) == 40


# --- rulings ------------------------------------------------------------------------------------------------

FAILED = Outcome[Any](Kind.FAILED, error=ValueError(), attempts=1, delay=3.0)
BEHIND = Outcome[Any](Kind.BUSY, error=TryLater(reason="blocked"))
ELSEWHERE = Outcome[Any](Kind.BUSY, error=TryLater(reason="in_flight"))
DONE = Outcome[Any](Kind.PROCESSED)


def steps(*rows: tuple[str | None, Outcome[Any]], parks: bool) -> list[Step]:
    items = [item(str(number), lane=lane) for number, (lane, _) in enumerate(rows)]
    return [one.step for one in rule(items, [outcome for _, outcome in rows], parks=parks)]


@pytest.mark.parametrize(
    ("outcome", "parking", "holding"),
    [
        (DONE, Step.ACK, Step.ACK),
        (Outcome(Kind.DUPLICATE), Step.ACK, Step.ACK),
        (Outcome(Kind.DEAD), Step.ACK, Step.ACK),
        (Outcome(Kind.ACCEPTED), Step.ACK, Step.ACK),
        (Outcome(Kind.IGNORED), Step.ACK, Step.ACK),
        (Outcome(Kind.FAILED, error=PayloadMismatch()), Step.ACK, Step.ACK),
        (FAILED, Step.PARK, Step.AGAIN),
        (BEHIND, Step.PARK, Step.AGAIN),
        (ELSEWHERE, Step.AGAIN, Step.AGAIN),
        (Outcome(Kind.BUSY, error=TryLater(reason="store_busy")), Step.AGAIN, Step.AGAIN),
        (Outcome(Kind.FAILED, error=KeyMissing()), Step.BURY, Step.BURY),
        (Outcome(Kind.FAILED, error=HandlerNotFound()), Step.STOP, Step.STOP),
    ],
)
def test_what_happened_decides(outcome: Outcome[Any], parking: Step, holding: Step) -> None:
    assert steps((None, outcome), parks=True) == [parking]
    assert steps((None, outcome), parks=False) == [holding]


def test_in_a_lane_the_first_decides_for_those_behind_it() -> None:
    """A message that is parked behind one that another runner has would overtake it."""
    rows = [("a", ELSEWHERE), ("a", BEHIND), ("b", FAILED), ("b", BEHIND), (None, FAILED)]
    assert steps(*rows, parks=True) == [Step.AGAIN, Step.AGAIN, Step.PARK, Step.PARK, Step.PARK]
    assert steps(("a", Outcome(Kind.FAILED, error=HandlerNotFound())), ("a", BEHIND), parks=True) == [
        Step.STOP, Step.AGAIN
    ]  # fmt: skip


def test_a_delay_is_that_of_the_database_or_grows() -> None:
    assert delay_of(Ruling(item("a"), Step.AGAIN, FAILED)) == 3.0
    backoff = Outcome[Any](Kind.BUSY, error=TryLater(7.0, reason="backoff"))
    assert delay_of(Ruling(item("a"), Step.AGAIN, backoff)) == 7.0
    tries = item("a")
    delays = []
    for _ in range(12):
        delays.append(delay_of(Ruling(tries, Step.AGAIN, ELSEWHERE)))
        tries.tries += 1
    assert delays == sorted(delays)
    assert (delays[0], delays[-1]) == (0.1, 5.0)


# --- the brake ----------------------------------------------------------------------------------------------


def test_the_brake_is_on_when_nothing_succeeds_and_off_with_the_first_that_does() -> None:
    now = 0.0
    brake = Brake(failures=3, shortest=1.0, longest=4.0, clock=lambda: now)
    for _ in range(3):
        assert brake.pause() == 0.0
        brake.note(FAILED)
    assert brake.on
    pauses = []
    for _ in range(5):
        assert brake.pause() == 0.0, "one may be tried"
        pauses.append(brake.pause())
        now += pauses[-1]
        brake.note(FAILED)
    assert pauses == [1.0, 2.0, 4.0, 4.0, 4.0]
    assert brake.pause() == 0.0
    assert brake.pause() == 4.0
    brake.give_back()
    assert brake.pause() == 0.0, "whoever had nothing to try lets others"
    brake.note(DONE)
    assert not brake.on
    assert brake.pause() == 0.0


def test_what_says_nothing_about_others_does_not_count() -> None:
    brake = Brake(failures=1)
    for outcome in (
        Outcome[Any](Kind.DUPLICATE),
        Outcome[Any](Kind.DEAD, error=Reject(), attempts=1),
        Outcome[Any](Kind.FAILED, error=StoreUnavailable()),
        BEHIND,
        None,
    ):
        brake.note(outcome)
    assert not brake.on
    brake.note(Outcome(Kind.DEAD, error=ValueError(), attempts=10))
    assert brake.on
