"""Wrong variants, kept as data. Each is a mistake an inbox can make, and names the test that must catch it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import count
from typing import Any

import msgspec
import pytest

from onceward import attempt, codec, identity, settle, together
from onceward.errors import TryLater
from onceward.identity import Identity
from onceward.inbox import Inbox
from onceward.intake import Intake, Maker
from onceward.outcome import Kind, Outcome
from onceward.record import Record, State
from onceward.sql import plan, upkeep, verbs
from onceward.sql.dialect import Dialect
from onceward.sql.drivers import joined_postgresql, joined_sqlite
from onceward.sql.drivers.asyncpg import AsyncpgSession
from onceward.sql.drivers.joined import JoinedSession
from onceward.sql.drivers.sqlite import SqliteSession
from onceward.sql.unit import SqlUnit
from onceward.store import Claims, Done, Found, InFlight
from onceward.work import Work

SQLITE, POSTGRES = "sqlite_lab", "postgres_lab"
BOTH = (SQLITE, POSTGRES)
Patch = Callable[[pytest.MonkeyPatch], None]


@dataclass(frozen=True)
class Mutant:
    name: str
    apply: Patch
    caught_by: str
    params: dict[str, Any] = field(default_factory=dict)
    on: tuple[str, ...] = BOTH
    functions: tuple[tuple[str, str, str], ...] = ()
    """Functions of the database that are wrong: their names, what they say, and what they say instead."""


def claim_late(patch: pytest.MonkeyPatch, claim: Any, insert: Any) -> None:
    """Claim by looking or not at all, and insert the record only when the handler is done."""

    async def late(self: SqlUnit[Any]) -> None:
        record, self.late = getattr(self, "late", None), None  # type: ignore[attr-defined]
        if record is not None:
            await insert(self, record)

    async def complete(self: SqlUnit[Any], record: Record) -> None:
        await late(self)
        await original(self, record)

    async def commit(self: SqlUnit[Any]) -> None:
        await late(self)
        await self._session.commit()

    original = SqlUnit.complete
    patch.setattr(SqlUnit, "claim", claim)
    patch.setattr(SqlUnit, "complete", complete)
    patch.setattr(SqlUnit, "commit", commit)


def claim_after_the_effect(patch: pytest.MonkeyPatch) -> None:
    async def claim(self: SqlUnit[Any], record: Record) -> Found | None:
        self.late = record  # type: ignore[attr-defined]
        await self._session.begin()
        return None

    async def insert(self: SqlUnit[Any], record: Record) -> None:
        await self._session.execute(verbs.claim(self._dialect, record))

    claim_late(patch, claim, insert)


def check_then_act(patch: pytest.MonkeyPatch) -> None:
    async def claim(self: SqlUnit[Any], record: Record) -> Found | None:
        await self._session.begin()
        found = await self._say(verbs.find(self._dialect, record.identity))
        self.late = None if found else record  # type: ignore[attr-defined]
        return found

    async def insert(self: SqlUnit[Any], record: Record) -> None:
        params = verbs._params(self._dialect, record)
        sql = self._dialect("claim", params).sql.replace("WHERE pg_try_advisory_xact_lock(:lock::bigint)", "")
        await self._session.execute(plan.Statement(sql, params))

    claim_late(patch, claim, insert)


def row_count_ignored(patch: pytest.MonkeyPatch) -> None:
    async def claim(self: SqlUnit[Any], record: Record) -> Found | None:
        await self._session.begin(self._dialect("claim", verbs._params(self._dialect, record)))
        return None

    patch.setattr(SqlUnit, "claim", claim)


def attempt_in_the_same_transaction(patch: pytest.MonkeyPatch) -> None:
    async def fail(self: SqlUnit[Any], record: Record, failure: Any, state: State, delay: Any, **_: Any) -> Any:
        over = (State.FAILED, State.RUNNING)
        await self._session.begin()
        kept = await self._say(verbs.fail(self._dialect, record, failure, state=state, over=over, delay=delay))
        await self._session.rollback()  # as the rollback of the work does, when both share a transaction
        return kept

    patch.setattr(SqlUnit, "fail", fail)


def identity_without(part: int) -> Patch:
    original = identity._front

    def apply(patch: pytest.MonkeyPatch) -> None:
        patch.setattr(identity, "_front", lambda *parts: original(*parts[:part], *parts[part + 1 :]))

    return apply


def parts_joined_by_a_separator(patch: pytest.MonkeyPatch) -> None:
    patch.setattr("onceward.keys._json", lambda value: ":".join(map(str, value)) if isinstance(value, list) else value)


def return_instead_of_try_later(patch: pytest.MonkeyPatch) -> None:
    original = Inbox._settle

    async def settling(self: Inbox[Any], work: Any) -> Outcome[Any]:
        try:
            return await original(self, work)
        except TryLater:
            return Outcome(Kind.DUPLICATE)

    patch.setattr(Inbox, "_settle", settling)


def acknowledge_a_rolled_back_commit(patch: pytest.MonkeyPatch) -> None:
    async def commit(self: AsyncpgSession, *_trip: str) -> None:
        await self._connection.execute("COMMIT")  # answers ROLLBACK, and nobody looks

    patch.setattr(AsyncpgSession, "_commit", commit)


def no_payload_check_in_the_cache(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(settle, "compare", lambda *_: False)


def no_payload_check_in_the_store(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(attempt, "compare", lambda *_: False)


def commit_without_the_token(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(AsyncpgSession, "_token_stands", lambda _self: "true")


def commit_that_can_be_cancelled(patch: pytest.MonkeyPatch) -> None:
    async def directly(work: Any) -> Any:
        return await work

    patch.setattr("onceward.sql.driver.finish", directly)
    patch.setattr("onceward.sql.drivers.asyncpg.finish_here", directly)


def a_deadlock_burns_an_attempt(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(SqlUnit, "is_conflict", lambda *_: False)


def a_failure_overwrites_a_success(patch: pytest.MonkeyPatch) -> None:
    original = verbs.fail
    patch.setattr(verbs, "fail", lambda *args, **options: original(*args, **options | {"over": tuple(State)}))


def starts_are_not_marked(patch: pytest.MonkeyPatch) -> None:
    async def unmarked(unit: Any, work: Any) -> Any:
        return await original(unit, attempt.msgspec.structs.replace(work, redelivered=False))

    original = attempt.attempt
    patch.setattr(settle, "attempt", unmarked)


def an_interrupted_run_counts_as_a_crash(patch: pytest.MonkeyPatch) -> None:
    async def unmark(*_: Any) -> None: ...

    patch.setattr(SqlUnit, "unmark", unmark)


def a_wait_that_holds_its_connection(patch: pytest.MonkeyPatch) -> None:
    async def holding(unit: Any, work: Any) -> Any:
        while True:
            try:
                return await original(unit, work)
            except InFlight:
                await unit.rollback()
                await asyncio.sleep(0.01)

    original = attempt.attempt
    patch.setattr(settle, "attempt", holding)


def quotes_are_not_doubled(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(plan, "_text", lambda text: f"'{text.replace(chr(39), '`')}'")


def nan_is_null(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(codec, "_has_nan", lambda _value: False)


def a_read_only_answer_is_new(patch: pytest.MonkeyPatch) -> None:
    """In flight elsewhere, and taken for new."""

    async def claim(self: SqlUnit[Any], record: Record) -> Found | None:
        try:
            return await original(self, record)
        except InFlight:
            return None

    original = SqlUnit.claim
    patch.setattr(SqlUnit, "claim", claim)


def the_handler_may_end_the_transaction(patch: pytest.MonkeyPatch) -> None:
    async def commit(self: SqliteSession) -> None:
        self._ended = False
        await original(self)

    original = SqliteSession.commit
    patch.setattr(SqliteSession, "commit", commit)


def conflicts_are_never_run_again(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(settle, "CONFLICTS", 1)


def a_topic_in_the_scope(patch: pytest.MonkeyPatch) -> None:
    original = Intake.maker

    def maker(self: Intake, type_: str, handler: Any, **asked: Any) -> Maker:
        make = original(self, type_, handler, **asked)

        def made(message: Any, origin: str | None, identity: Identity | None = None) -> Work:
            found = identity or self.identity_of(message, asked.get("key") or handler.key)
            wrong = Identity(found.consumer, found.tenant, found.scope + message.topic, found.key)
            return make(message, origin, wrong)

        return made

    patch.setattr(Intake, "maker", maker)


# --- batches ------------------------------------------------------------------------------------------------


def claims_are_not_sorted(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(together, "BY_DIGEST", lambda _slot: b"")


def a_lane_goes_on_after_a_failure(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(together.Lanes, "bars", lambda _self, _slot: False)


def neighbours_burn_attempts(patch: pytest.MonkeyPatch) -> None:
    """The whole segment is told that it failed, instead of finding out who did."""

    async def undo(self: together.Segment, error: BaseException, culprits: Any) -> Any:
        await self._unit.rollback()
        for slot in self._slots:
            await self._unit.fail(slot.work.whole(), attempt.failure_of(error), State.FAILED, None)
        return self._parts(culprits)

    patch.setattr(together.Segment, "_undo", undo)


def neither_new_nor_found_is_a_duplicate(patch: pytest.MonkeyPatch) -> None:
    def judge(slot: Any, found: Any) -> Any:
        if found is None:
            together.settle_done(slot, Done(None, None))
            return None
        return original(slot, found)

    original = together._judge
    patch.setattr(together, "_judge", judge)


def claims_stay_after_a_commit_in_the_middle(patch: pytest.MonkeyPatch) -> None:
    async def repair(self: SqlUnit[Any], **repairs: Any) -> None:
        await original(self, **repairs | {"unclaim": ()})

    original = SqlUnit.repair
    patch.setattr(SqlUnit, "repair", repair)


def claims_of_what_did_not_run_stay(patch: pytest.MonkeyPatch) -> None:
    async def unclaim(*_: Any) -> None: ...

    patch.setattr(SqlUnit, "unclaim", unclaim)


def a_look_answers_new(patch: pytest.MonkeyPatch) -> None:
    """What a look has not found is taken for new, and run without a claim."""

    async def look_done(self: SqlUnit[Any], identities: Any) -> Any:
        looked.add(True)
        return await original(self, identities)

    async def claim_many(self: SqlUnit[Any], claims: Claims) -> set[bytes]:
        if not looked:
            return await claim(self, claims)
        await self._session.begin()
        return set(claims.digest)

    looked: set[bool] = set()
    original, claim = SqlUnit.look_done, SqlUnit.claim_many
    patch.setattr(SqlUnit, "look_done", look_done)
    patch.setattr(SqlUnit, "claim_many", claim_many)


def the_first_of_a_batch_speaks_for_all(patch: pytest.MonkeyPatch) -> None:
    def claims_of(works: Any) -> Claims:
        claims = original(works)
        alike = {name: [getattr(claims, name)[0]] * len(works) for name in verbs._OFTEN_ALIKE}
        return msgspec.structs.replace(claims, **alike)

    original = together.claims_of
    patch.setattr(together, "claims_of", claims_of)


def a_claimed_position_counts_as_run(patch: pytest.MonkeyPatch) -> None:
    async def missing(self: together.Segment, work: Any) -> Any:
        return await self._unit.unmet(work.whole())

    patch.setattr(together.Segment, "_missing", missing)


def a_bulk_is_never_halved(patch: pytest.MonkeyPatch) -> None:
    """One by one as soon as anything fails."""

    def parts(self: together.Segment, culprits: Any) -> Any:
        return [[slot] for slot in self._slots if slot.outcome is None and not slot.waits]

    patch.setattr(together.Segment, "_parts", parts)


def on_begin_for_the_first_tenant_only(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(settle.Settler, "has_hook", False)


def sweep_says(old: str, new: str) -> Patch:
    """Another text in the statements of a sweep."""

    def apply(patch: pytest.MonkeyPatch) -> None:
        def say(self: Dialect, name: str, params: Any = None) -> plan.Statement:
            said = original(self, name, params)
            return plan.Statement(said.sql.replace(old, new), said.params) if name.startswith("sweep_") else said

        original = Dialect.__call__
        patch.setattr(Dialect, "__call__", say)

    return apply


def sweep_without_the_lock(patch: pytest.MonkeyPatch) -> None:
    numbers = count(1)
    patch.setattr(upkeep, "sweep_lock", lambda _consumer: next(numbers))


# --- in a transaction of the caller's ------------------------------------------------------------------------


def claim_without_a_savepoint(patch: pytest.MonkeyPatch) -> None:
    async def begin(self: Any, _savepoint: str, first: Any) -> Any:
        if self.dialect == "sqlite":
            await joined_sqlite.begin_as_python_would(self.tx)
        return await self.execute(first)

    async def nothing(_self: Any, _savepoint: str) -> None: ...

    for kind in (joined_postgresql.JoinedPostgres, joined_sqlite.JoinedSqlite):
        patch.setattr(kind, "_begin", begin)
        patch.setattr(kind, "_release", nothing)
        patch.setattr(kind, "_undo", nothing)


def a_joined_run_is_remembered(patch: pytest.MonkeyPatch) -> None:
    async def join(self: Any, work: Any, tx: Any) -> Outcome[Any]:
        outcome = await original(self, work, tx)
        self._remember(work, outcome)
        return outcome

    original = settle.Settler.join
    patch.setattr(settle.Settler, "join", join)


def a_joined_failure_is_recorded(patch: pytest.MonkeyPatch) -> None:
    """In the caller's transaction, which may be rolled back, or may not."""

    async def failed(unit: Any, work: Any, before: Any, error: Any, duration_ms: float) -> Outcome[Any]:
        await unit.rollback()
        await attempt.keep_failure(unit, work, before, error, duration_ms)
        raise error

    patch.setattr(attempt, "_failed", failed)


def any_database_will_do(patch: pytest.MonkeyPatch) -> None:
    async def check(_self: Any) -> None: ...

    patch.setattr(JoinedSession, "check_database", check)


def mark_ignores_the_conflict(patch: pytest.MonkeyPatch) -> None:
    async def mark_processed(self: Inbox[Any], message: Any, *, tx: Any = None, result: Any = None, **_: Any) -> None:
        work = self._claim_work("mark_processed", message)
        async with self._settler.claimed(work, tx) as claim:
            claim.save(result)

    patch.setattr(Inbox, "mark_processed", mark_processed)


def an_ended_transaction_goes_unnoticed(patch: pytest.MonkeyPatch) -> None:
    async def ended(self: JoinedSession) -> bool:
        await self.rollback()
        return False

    patch.setattr(JoinedSession, "ended", ended)


MUTANTS = [
    Mutant(
        "batch: claims not sorted",
        claims_are_not_sorted,
        "test_claims_of_a_batch_are_made_in_the_order_of_their_identities",
    ),
    Mutant(
        "batch: the lane goes on after a failure",
        a_lane_goes_on_after_a_failure,
        "test_one_of_a_hundred_fails_alone_and_burns_one_attempt",
    ),
    Mutant(
        "batch: neighbours burn attempts",
        neighbours_burn_attempts,
        "test_one_of_a_hundred_fails_alone_and_burns_one_attempt",
    ),
    Mutant(
        "batch: neither new nor found is a duplicate",
        neither_new_nor_found_is_a_duplicate,
        "test_what_is_in_flight_elsewhere_comes_again_and_delays_nobody",
        on=(POSTGRES,),
    ),
    Mutant(
        "batch: no unclaim after a commit in the middle",
        claims_stay_after_a_commit_in_the_middle,
        "test_a_handler_that_ends_the_transaction_of_a_batch_loses_and_doubles_nothing",
        {"ending": "COMMIT", "then": "returns"},
        on=(POSTGRES,),
    ),
    Mutant(
        "batch: claims of what did not run stay",
        claims_of_what_did_not_run_stay,
        "test_a_message_that_waits_for_its_next_try_stops_its_lane_only",
    ),
    Mutant("batch: a look answers new", a_look_answers_new, "test_a_look_before_the_claim_never_answers_new"),
    Mutant(
        "batch: the first speaks for all",
        the_first_of_a_batch_speaks_for_all,
        "test_a_batch_keeps_everything_that_a_single_message_keeps",
        {"alike": False},
    ),
    Mutant(
        "batch: a claimed position counts as run",
        a_claimed_position_counts_as_run,
        "test_a_dependency_in_the_batch_counts_once_it_has_run",
    ),
    Mutant(
        "batch: one by one instead of halves",
        a_bulk_is_never_halved,
        "test_a_bulk_of_a_thousand_finds_its_bad_one_in_few_tries",
        on=(SQLITE,),
    ),
    Mutant(
        "batch: one on_begin for all tenants",
        on_begin_for_the_first_tenant_only,
        "test_each_tenant_has_its_own_transaction_where_on_begin_is_set",
    ),
    Mutant("claim after the effect", claim_after_the_effect, "test_the_claim_is_there_before_the_handler_runs"),
    Mutant("claim after the effect", claim_after_the_effect, "test_a_duplicate_is_known_to_another_instance"),
    Mutant("check-then-act", check_then_act, "test_pairs_that_start_together_run_once", on=(POSTGRES,)),
    Mutant("check-then-act", check_then_act, "test_the_claim_is_there_before_the_handler_runs"),
    Mutant("ignored row count", row_count_ignored, "test_a_duplicate_is_known_to_another_instance"),
    Mutant(
        "attempt in the same transaction",
        attempt_in_the_same_transaction,
        "test_a_failed_handler_leaves_no_effect_and_its_attempt_is_kept",
    ),
    Mutant("identity without consumer", identity_without(0), "test_two_consumers_both_process_the_same_message"),
    Mutant("identity without tenant", identity_without(1), "test_two_tenants_may_use_the_same_message_id"),
    Mutant("identity without scope", identity_without(2), "test_two_types_may_use_the_same_business_key"),
    Mutant("identity without scope", identity_without(2), "test_two_sources_may_use_the_same_message_id"),
    Mutant(
        "identity with topic",
        a_topic_in_the_scope,
        "test_a_message_that_comes_back_through_another_topic_is_the_same",
    ),
    Mutant("composite keys joined", parts_joined_by_a_separator, "test_composite_keys_never_collide"),
    Mutant(
        "return instead of TryLater",
        return_instead_of_try_later,
        "test_a_message_in_flight_elsewhere_is_not_run_and_not_acknowledged",
    ),
    Mutant(
        "in flight taken for new",
        a_read_only_answer_is_new,
        "test_a_message_in_flight_elsewhere_is_not_run_and_not_acknowledged",
        on=(POSTGRES,),
    ),
    Mutant(
        "ack on a rolled-back commit",
        acknowledge_a_rolled_back_commit,
        "test_a_swallowed_sql_error_is_never_acknowledged_as_a_commit",
        on=(POSTGRES,),
    ),
    Mutant(
        "payload check skipped on the cached path",
        no_payload_check_in_the_cache,
        "test_another_payload_under_the_same_identity_is_reported",
        {"path": "cache"},
    ),
    Mutant(
        "payload check skipped on the stored path",
        no_payload_check_in_the_store,
        "test_another_payload_under_the_same_identity_is_reported",
        {"path": "store"},
    ),
    Mutant(
        "no token at COMMIT",
        commit_without_the_token,
        "test_a_handler_that_ends_the_transaction_is_found_out",
        {"ending": "COMMIT; BEGIN", "then": "swallows"},
        on=(POSTGRES,),
    ),
    Mutant(
        "a refused COMMIT forgotten",
        the_handler_may_end_the_transaction,
        "test_a_handler_that_ends_the_transaction_is_found_out",
        {"ending": "COMMIT", "then": "swallows"},
        on=(SQLITE,),
    ),
    Mutant(
        "commit not shielded",
        commit_that_can_be_cancelled,
        "test_a_cancellation_during_commit_is_heard_after_it",
        on=(POSTGRES,),
    ),
    Mutant(
        "a deadlock burns an attempt",
        a_deadlock_burns_an_attempt,
        "test_a_deadlock_is_run_again_without_burning_an_attempt",
        on=(POSTGRES,),
    ),
    Mutant(
        "a conflict is not run again",
        conflicts_are_never_run_again,
        "test_a_deadlock_is_run_again_without_burning_an_attempt",
        on=(POSTGRES,),
    ),
    Mutant(
        "a failure overwrites a success",
        a_failure_overwrites_a_success,
        "test_a_failure_never_overwrites_a_success",
        on=(POSTGRES,),
    ),
    Mutant(
        "starts are not marked",
        starts_are_not_marked,
        "test_a_start_mark_is_taken_back_when_the_run_is_interrupted",
    ),
    Mutant(
        "an interrupted run counts as a crash",
        an_interrupted_run_counts_as_a_crash,
        "test_a_start_mark_is_taken_back_when_the_run_is_interrupted",
    ),
    Mutant(
        "waiting holds the connection",
        a_wait_that_holds_its_connection,
        "test_waiting_for_a_twin_holds_no_connection",
        on=(POSTGRES,),
    ),
    Mutant(
        "quotes not doubled",
        quotes_are_not_doubled,
        "test_ids_keep_their_bytes",
        {"one": "a'b", "two": "a`b"},
        on=(POSTGRES,),
    ),
    Mutant(
        "a sweep by age alone",
        sweep_says("state = 'processed' AND", ""),
        "test_cleanup_never_touches_what_is_not_processed",
    ),
    Mutant(
        "a sweep by expiry alone",
        sweep_says("state = 'processed' AND", ""),
        "test_what_expired_and_is_not_processed_is_never_touched",
    ),
    Mutant(
        "a sweep by age takes what has a time of its own",
        sweep_says("AND expires_at IS NULL", ""),
        "test_a_record_with_a_time_of_its_own_outlives_the_others",
    ),
    Mutant(
        "a time of its own is forgotten",
        sweep_says("AND expires_at <", "AND false AND expires_at <"),
        "test_a_record_with_a_time_of_its_own_goes_before_the_others",
    ),
    Mutant("a sweep without the lock", sweep_without_the_lock, "test_one_sweeper_at_a_time", on=(POSTGRES,)),
    Mutant(
        "a sweep that traffic waits for",
        sweep_says("AND pg_try_advisory_xact_lock(", "AND 0 <= 0 * ("),
        "test_a_delivery_of_what_is_just_being_deleted_does_not_wait",
        on=(POSTGRES,),
    ),
    Mutant(
        "claim without a savepoint",
        claim_without_a_savepoint,
        "test_an_error_takes_the_claim_and_its_writes_and_nothing_else",
    ),
    Mutant(
        "a joined run is cached",
        a_joined_run_is_remembered,
        "test_nothing_is_remembered_before_the_caller_commits",
    ),
    Mutant(
        "a failure recorded in the caller's transaction",
        a_joined_failure_is_recorded,
        "test_a_failure_is_counted_only_when_it_is_told",
    ),
    Mutant(
        "joined without looking which database it is",
        any_database_will_do,
        "test_another_database_is_refused_and_left_usable",
    ),
    Mutant("mark_processed ignores the conflict", mark_ignores_the_conflict, "test_marking_twice_is_an_error"),
    Mutant(
        "mark_processed ignores the conflict",
        mark_ignores_the_conflict,
        "test_of_many_that_looked_first_one_may_mark",
    ),
    Mutant(
        "the end of a joined transaction unnoticed",
        an_ended_transaction_goes_unnoticed,
        "test_a_block_that_ends_the_transaction_is_found_out",
        {"verb": "process", "ending": "commit", "then": "raises"},
    ),
    Mutant("NaN is null", nan_is_null, "test_a_message_that_cannot_be_kept_is_refused", {"name": "NaN"}),
]
