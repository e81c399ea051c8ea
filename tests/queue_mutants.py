"""Wrong variants of the stored inbox, kept as data: each names the test of QueueContract that must catch it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from onceward import accept, lanes, lease
from onceward.accept import Acceptor
from onceward.identity import digest
from onceward.queue import LAST, LaneEnd, QueueLine, Then, TurnClosing
from onceward.sql.unit import SqlUnit
from onceward.testing import Lab
from tests.mutants import POSTGRES, Mutant, Patch


def closing_says(change: Callable[[TurnClosing], TurnClosing]) -> Patch:
    """What a turn came to is written down wrongly."""

    def apply(patch: pytest.MonkeyPatch) -> None:
        def wrongly(close: Any) -> Any:
            async def closing_wrongly(self: SqlUnit[Any], closing: TurnClosing, **of_all: Any) -> Any:
                return await close(self, change(closing), **of_all)

            return closing_wrongly

        patch.setattr(SqlUnit, "close_lanes", wrongly(SqlUnit.close_lanes))
        patch.setattr(SqlUnit, "close_and_commit", wrongly(SqlUnit.close_and_commit))

    return apply


def a_dead_letter_blocks_nobody(closing: TurnClosing) -> TurnClosing:
    ends = [LaneEnd(one.lane) if one.then is Then.BLOCKED else one for one in closing.lanes]
    return msgspec.structs.replace(closing, lanes=ends)


def failures_are_not_counted(closing: TurnClosing) -> TurnClosing:
    failed = [msgspec.structs.replace(one, counted=False) for one in closing.failed]
    return msgspec.structs.replace(closing, failed=failed)


def nobody_remembers_who_waits(closing: TurnClosing) -> TurnClosing:
    return msgspec.structs.replace(closing, blocked=())


def a_retry_is_due_at_once(closing: TurnClosing) -> TurnClosing:
    failed = [msgspec.structs.replace(one, delay=0.0) for one in closing.failed]
    ends = [msgspec.structs.replace(one, delay=0.0) for one in closing.lanes]
    return msgspec.structs.replace(closing, failed=failed, lanes=ends)


def line_says(change: Callable[[QueueLine], dict[str, Any]]) -> Patch:
    """A message is kept with something wrong about it."""

    def apply(patch: pytest.MonkeyPatch) -> None:
        def line(self: Acceptor, work: Any, about: Any) -> QueueLine:
            found = original(self, work, about)
            return msgspec.structs.replace(found, **change(found))

        original = Acceptor.line
        patch.setattr(Acceptor, "line", line)

    return apply


def signed(line: QueueLine) -> dict[str, Any]:
    return {"share": int.from_bytes(bytes.fromhex(line.lane)[:4], "big", signed=True)}


def without_a_tenant(line: QueueLine) -> dict[str, Any]:
    return {"lane": line.lane if line.lane_name is None else digest("lane", line.lane_name).hex()}


def a_part_of_the_uri(patch: pytest.MonkeyPatch) -> None:
    def pick(self: lanes.Lane, message: Any, key: str = "") -> str | None:
        found = original(self, message, key)
        return found if found is None else found.split("//")[-1].split("/")[0]

    original = lanes.Lane.__call__
    patch.setattr(lanes.Lane, "__call__", pick)


def payloads_are_not_compared(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(accept, "compare", lambda *_: False)


def nothing_is_given_back(patch: pytest.MonkeyPatch) -> None:
    async def release(*_: Any, **__: Any) -> None: ...

    patch.setattr(SqlUnit, "release", release)


def no_heartbeat(patch: pytest.MonkeyPatch) -> None:
    async def heartbeat(_self: Any) -> None: ...

    patch.setattr(lease.Lease, "heartbeat", heartbeat)


def a_zombie_may_complete(patch: pytest.MonkeyPatch) -> None:
    """The lane is locked, and nobody asks whose it is."""

    async def hold_lanes(self: SqlUnit[Any], owner: str, wanted: Any) -> frozenset[bytes]:
        await original(self, owner, wanted)
        return frozenset(wanted)

    original = SqlUnit.hold_lanes
    patch.setattr(SqlUnit, "hold_lanes", hold_lanes)


def nothing(_patch: pytest.MonkeyPatch) -> None:
    """The mistake is in the database."""


async def make_mistakes(lab: Lab, mutant: Mutant) -> None:
    """Other versions of functions of the database."""
    for function, old, new in mutant.functions:
        ((source,),) = await lab.query(f"SELECT pg_get_functiondef(oid) FROM pg_proc WHERE proname = '{function}'")
        assert old in source, f"{function} has changed: look for where its mistake would be now"
        await lab.query(source.replace(old, new))


ON_POSTGRES = (POSTGRES,)

QUEUE_MUTANTS = [
    Mutant(
        "a dead letter blocks nobody",
        closing_says(a_dead_letter_blocks_nobody),
        "test_a_dead_letter_holds_its_lane_until_a_person_says_so",
        {"shared": False},
    ),
    Mutant(
        "failures in the queue are not counted",
        closing_says(failures_are_not_counted),
        "test_a_failing_message_is_an_outcome_and_leaves_nothing",
    ),
    Mutant(
        "nobody remembers who waits",
        closing_says(nobody_remembers_who_waits),
        "test_a_worker_without_work_does_not_spin",
    ),
    Mutant("no backoff", closing_says(a_retry_is_due_at_once), "test_a_retry_parks_its_lane_and_no_other"),
    Mutant("shares are signed", line_says(signed), "test_shares_are_disjoint_and_complete"),
    Mutant(
        "a stream runs as it came",
        line_says(lambda line: {} if line.rank < 0 else {"rank": LAST}),
        "test_in_a_stream_the_lowest_position_runs_first",
        {"order": ("a3", "a2", "a1")},
    ),
    Mutant(
        "a shared lane forgets its streams",
        line_says(lambda _line: {"track": None}),
        "test_a_blocked_message_is_set_aside_and_other_streams_overtake",
    ),
    Mutant(
        "lanes without a tenant",
        line_says(without_a_tenant),
        "test_a_strategy_says_which_messages_wait_for_each_other",
        {"name": "by_stream, the same of two tenants"},
    ),
    Mutant(
        "a lane is a part of the URI",
        a_part_of_the_uri,
        "test_a_strategy_says_which_messages_wait_for_each_other",
        {"name": "by_topic, another partition key"},
    ),
    Mutant(
        "accept compares no payloads",
        payloads_are_not_compared,
        "test_another_payload_under_an_accepted_identity_is_reported",
        {"when": "waiting"},
    ),
    Mutant(
        "nothing is given back",
        nothing_is_given_back,
        "test_a_cancelled_dispatch_gives_its_message_back_at_once",
    ),
    Mutant("no heartbeat", no_heartbeat, "test_a_heartbeat_keeps_the_lease_for_as_long_as_it_takes"),
    Mutant("a zombie may complete", a_zombie_may_complete, "test_a_zombie_cannot_complete", {"then": "completes"}),
    Mutant(
        "no fence on going idle",
        nothing,
        "test_nobody_gets_a_message_before_the_caller_has_committed",
        on=ON_POSTGRES,
        functions=(("onceward_touch", "ORDER BY lane FOR KEY SHARE", ""),),
    ),
    Mutant(
        "no fence on beginning to wait",
        nothing,
        "test_a_position_that_is_settled_while_a_turn_begins_to_wait_wakes_it",
        on=ON_POSTGRES,
        functions=(("onceward_close", "ELSIF NOT onceward_is_done(", "ELSIF true OR NOT onceward_is_done("),),
    ),
    Mutant(
        "inline work wakes nobody",
        nothing,
        "test_inline_work_counts_and_wakes_what_waits_for_it",
        {"how": "process"},
        on=ON_POSTGRES,
        functions=(("onceward_settled", "BEGIN", "BEGIN RETURN NULL;"),),
    ),
    Mutant(
        "a position that is being settled is waited for in vain",
        nothing,
        "test_a_position_that_is_being_settled_is_not_waited_for_in_vain",
        {"constraints": "immediate"},
        on=ON_POSTGRES,
        functions=(
            ("onceward_close", "IF NOT pg_try_advisory_xact_lock(", "IF false AND NOT pg_try_advisory_xact_lock("),
        ),
    ),
]
