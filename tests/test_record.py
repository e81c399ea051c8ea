"""The state machine and the pure decision."""

from __future__ import annotations

import re
from datetime import UTC, datetime, timedelta

import pytest

from onceward import Identity, Record, RetryPolicy, State, Verdict, errors, verdict_of
from onceward.errors import OncewardError, UsageError
from onceward.record import TRANSITIONS, Change, Decision, decide, from_states
from onceward.sql.dialect import DIALECTS

NOW = datetime(2026, 1, 1, tzinfo=UTC)
POLICY = RetryPolicy(max_attempts=3)


def record(state: State, **fields: object) -> Record:
    return Record(identity=Identity("c", "t", "s", "k"), message_id="m", type="t", state=state, **fields)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("found", "policy", "decision"),
    [
        (record(State.PROCESSED), None, Decision.DUPLICATE),
        (record(State.PROCESSED), POLICY, Decision.DUPLICATE),
        (record(State.ACCEPTED), POLICY, Decision.ACCEPTED),
        (record(State.DEAD), None, Decision.DEAD),
        (record(State.DISCARDED), POLICY, Decision.DEAD),
        (record(State.FAILED, attempts=9), None, Decision.RUN),
        (record(State.FAILED, attempts=2), POLICY, Decision.RUN),
        (record(State.FAILED, attempts=3), POLICY, Decision.EXHAUSTED),
        (record(State.RUNNING, attempts=1, started=2), POLICY, Decision.EXHAUSTED),
        (record(State.RUNNING, started=3, next_try_at=NOW - timedelta(seconds=29)), POLICY, Decision.BUSY),
        (record(State.RUNNING, started=3, next_try_at=NOW - timedelta(seconds=31)), POLICY, Decision.EXHAUSTED),
        (record(State.RUNNING, attempts=1, started=1), POLICY, Decision.RUN),
        (record(State.RUNNING, started=9), None, Decision.RUN),
        (record(State.RUNNING, started=1, next_try_at=NOW + timedelta(seconds=1)), POLICY, Decision.BUSY),
        (record(State.RUNNING, started=9, next_try_at=NOW + timedelta(seconds=1)), None, Decision.BUSY),
        (record(State.RUNNING, started=1, next_try_at=NOW), POLICY, Decision.RUN),
        (record(State.FAILED, attempts=1, next_try_at=NOW + timedelta(seconds=1)), POLICY, Decision.LATER),
        (record(State.FAILED, attempts=1, next_try_at=NOW), POLICY, Decision.RUN),
        (record(State.FAILED, attempts=1, next_try_at=NOW + timedelta(seconds=1)), None, Decision.RUN),
    ],
)
def test_the_record_decides_what_a_delivery_means(
    found: Record, policy: RetryPolicy | None, decision: Decision
) -> None:
    assert decide(found, policy, NOW) is decision


def test_every_state_can_be_reached_and_only_two_are_ends() -> None:
    reached = set(TRANSITIONS.values())
    left = {state for state, _ in TRANSITIONS if state is not None}
    assert reached == set(State)
    assert set(State) - left == {State.DISCARDED}
    assert from_states(Change.DISCARD) == (State.DEAD,)


@pytest.mark.parametrize("dialect", DIALECTS)
def test_the_states_in_sql_are_those_of_the_table(dialect: str) -> None:
    statements = DIALECTS[dialect]().statements
    of_lanes = {"ready", "running", "retrying", "later", "waiting", "blocked"}
    for name, sql in statements.items():
        known = {state.value for state in State} | (of_lanes if name.startswith("queue_") else set())
        assert set(re.findall(r"state = '(\w+)'", sql)) <= known
    assert "AND state = 'dead'" in statements["discard"]
    assert f"THEN '{TRANSITIONS[State.RUNNING, Change.INTERRUPT]}'" in statements["unmark"]


def test_every_error_has_a_docstring_as_message_and_a_verdict() -> None:
    classes = [value for value in vars(errors).values() if isinstance(value, type) and issubclass(value, OncewardError)]
    assert len(classes) > 25
    for cls in classes:
        error = cls()
        assert str(error), cls
        assert isinstance(verdict_of(error), Verdict)


def test_a_policy_that_makes_no_sense_is_refused() -> None:
    for wrong in ({"max_attempts": 0}, {"base": -1.0}, {"factor": 0.5}, {"cap": -1.0}):
        with pytest.raises(UsageError):
            RetryPolicy(**wrong)  # type: ignore[arg-type]
