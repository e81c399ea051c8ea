"""Failures: attempts, backoff, dead letters. What a failed handler leaves is a record of it and nothing else."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any

import msgspec
import pytest

from onceward import InvalidMessage, Message, Reject, RetryPolicy, State, TryLater, Verdict
from onceward.errors import PayloadMismatch, StoreUnavailable
from onceward.outcome import Kind, outcome_of, verdict_of
from onceward.testing.contract.base import LATER, SOON, Listener, claims_lapse, counts_nothing, has
from onceward.testing.lab import Gate, Lab, Recorder


class Order(msgspec.Struct):
    amount: int


class Unprintable(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no text")


@dataclass(frozen=True)
class Frozen(Exception):
    text: str


class FailureContract:
    async def test_a_failed_handler_leaves_no_effect_and_its_attempt_is_kept(self, lab: Lab) -> None:
        inbox, message = await lab.inbox(), lab.message(headers={"trace": "t"}, body=b'{"amount":7}')
        error = ValueError("card refused")
        with pytest.raises(ValueError, match="card refused") as caught:
            await inbox.process(message, Recorder(lab, error=error))
        assert caught.value is error
        assert verdict_of(error) is Verdict.RETRY
        behind = outcome_of(error)
        assert behind is not None
        assert (behind.kind, behind.attempts) == (Kind.FAILED, 1)
        assert await lab.effects() == []
        record = await inbox.get_record(message)
        assert record is not None, "the attempt is written after the rollback, so it must survive it"
        assert (record.state, record.attempts, record.started) == (State.FAILED, 1, 0)
        assert (record.errors[0].type, record.errors[0].text) == ("ValueError", "card refused")
        assert record.message() == msgspec.structs.replace(message, tenant="default")

    @pytest.mark.parametrize(
        "error", [InvalidMessage("inner"), StoreUnavailable("elsewhere"), PayloadMismatch("inner")]
    )
    async def test_errors_of_onceward_from_inside_a_handler_are_the_handlers(self, lab: Lab, error: Exception) -> None:
        """A handler may use onceward itself; what it meets there says nothing about this delivery."""
        inbox, message = await lab.inbox(), lab.message()
        with pytest.raises(type(error)) as caught:
            await inbox.process(message, Recorder(lab, error=error))
        assert verdict_of(caught.value) is Verdict.RETRY
        record = await inbox.get_record(message)
        assert record is not None
        assert (record.state, record.attempts) == (State.FAILED, 1)

    async def test_redelivery_of_a_failed_message_runs_it_again(self, lab: Lab) -> None:
        inbox, message = await lab.inbox(), lab.message()
        for _ in range(2):
            with pytest.raises(ValueError, match="no"):
                await inbox.process(message, Recorder(lab, error=ValueError("no")))
        outcome = await (await lab.inbox()).process(message, Recorder(lab))
        assert outcome.processed
        assert await lab.effects() == [message.id]
        record = await inbox.get_record(message)
        assert record is not None
        assert (record.state, record.attempts, len(record.errors)) == (State.PROCESSED, 3, 2)
        assert (record.payload, record.body) == (None, None)

    async def test_bare_process_counts_attempts_without_gate_or_dead_letter(self, lab: Lab) -> None:
        inbox, message = await lab.inbox(), lab.message()
        for attempt in range(1, 13):
            with pytest.raises(ValueError, match="no"):
                await inbox.process(message, Recorder(lab, error=ValueError(f"no {attempt}")))
        record = await inbox.get_record(message)
        assert record is not None
        assert (record.state, record.attempts, record.next_try_at) == (State.FAILED, 12, None)
        assert len(record.errors) == 10, "the history is bounded"
        assert record.errors[-1].text == "no 12"

    async def test_attempts_are_exhausted_into_a_dead_letter(self, lab: Lab) -> None:
        inbox, handler, message = await lab.inbox(retry=SOON), Recorder(lab, error=ValueError("no")), lab.message()
        for _ in range(2):
            with pytest.raises(ValueError, match="no"):
                await inbox.process(message, handler)
        outcome = await inbox.process(message, handler)
        assert outcome.kind is Kind.DEAD
        assert outcome.error is handler.error
        assert outcome.verdict is Verdict.ACK
        record = await inbox.get_record(message)
        assert record is not None
        assert (record.state, record.attempts, record.payload) == (State.DEAD, 3, {"amount": 7})
        assert await lab.effects() == []

    async def test_a_dead_letter_does_not_run_again(self, lab: Lab) -> None:
        inbox, handler, message = await lab.inbox(), Recorder(lab, error=Reject("bad")), lab.message()
        await inbox.process(message, handler)
        outcome = await (await lab.inbox()).process(message, handler)
        assert outcome.kind is Kind.DEAD
        assert "bad" in str(outcome.error)
        assert outcome.verdict is Verdict.ACK
        assert len(handler.runs) == 1

    async def test_reject_makes_a_dead_letter_at_once(self, lab: Lab) -> None:
        inbox, message = await lab.inbox(), lab.message(body=b"raw")
        outcome = await inbox.process(message, Recorder(lab, error=Reject("not ours")))
        assert outcome.kind is Kind.DEAD
        record = await inbox.get_record(message)
        assert record is not None
        assert (record.state, record.body, record.attempts) == (State.DEAD, b"raw", 1)
        assert await lab.effects() == []

    async def test_a_payload_that_does_not_decode_is_a_dead_letter_with_its_body(self, lab: Lab) -> None:
        inbox, runs = await lab.inbox(), []

        @inbox.handler("order.paid", payload=Order)
        async def on_paid(message: Message[Order]) -> None:
            runs.append(message.id)

        wrong = lab.message(payload={"amount": "much"})
        broken = lab.message(payload=None, body=b"{not json")
        for message in (wrong, broken):
            outcome = await inbox.process(message)
            assert outcome.kind is Kind.DEAD
            assert "does not fit Order" in str(outcome.error)
        record = await inbox.get_record(broken)
        assert record is not None
        assert (record.state, record.body) == (State.DEAD, b"{not json")
        assert runs == []
        assert (await inbox.process(lab.message(payload=None, body=b'{"amount": 7}'))).processed

    async def test_a_failed_message_waits_for_its_next_try(self, lab: Lab) -> None:
        inbox, message = await lab.inbox(retry=LATER), lab.message()
        with pytest.raises(ValueError, match="no"):
            await inbox.process(message, Recorder(lab, error=ValueError("no")))
        handler = Recorder(lab)
        with pytest.raises(TryLater) as caught:
            await (await lab.inbox(retry=LATER)).process(message, handler)
        later = caught.value
        assert later.reason == "backoff"
        assert later.retry_at is not None
        assert timedelta(0) < later.retry_at - datetime.now(UTC) <= timedelta(seconds=601)
        assert verdict_of(later) is Verdict.RETRY
        assert handler.runs == []
        record = await inbox.get_record(message)
        assert record is not None
        assert (record.state, record.attempts, record.next_try_at) == (State.FAILED, 1, later.retry_at)

    async def test_a_failed_message_runs_when_its_time_has_come(self, lab: Lab) -> None:
        inbox, message = await lab.inbox(retry=LATER), lab.message()
        with pytest.raises(ValueError, match="no"):
            await inbox.process(message, Recorder(lab, error=ValueError("no")))
        # The schedule lives in the store: move it there, not in this process.
        await lab.let_time_pass()
        assert (await inbox.process(message, Recorder(lab))).processed
        assert await lab.effects() == [message.id]

    async def test_nothing_is_held_while_a_message_waits_for_its_next_try(self, lab: Lab) -> None:
        inbox, message = await lab.inbox(retry=LATER), lab.message()
        with pytest.raises(ValueError, match="no"):
            await inbox.process(message, Recorder(lab, error=ValueError("no")))
        with pytest.raises(TryLater):
            await inbox.process(message, Recorder(lab))
        # Another connection may change the very same record at once.
        await lab.change(extra="1")

    async def test_a_handler_may_ask_to_be_tried_later(self, lab: Lab) -> None:
        inbox, message = await lab.inbox(retry=SOON), lab.message()
        with pytest.raises(TryLater) as caught:
            await inbox.process(message, Recorder(lab, error=TryLater(timedelta(minutes=5))))
        assert caught.value.retry_at is not None
        assert timedelta(minutes=4) < caught.value.retry_at - datetime.now(UTC) < timedelta(minutes=6)
        record = await inbox.get_record(message)
        assert record is not None
        assert (record.state, record.attempts) == (State.FAILED, 1)
        with pytest.raises(TryLater) as caught:
            await inbox.process(message, Recorder(lab))
        assert caught.value.reason == "backoff"
        assert await lab.effects() == []

    async def test_delays_grow_up_to_the_cap_with_full_jitter(self, lab: Lab) -> None:
        policy = RetryPolicy(base=1.0, factor=2.0, cap=30.0)
        assert [policy.ceiling(n) for n in (1, 2, 3, 6, 7, 5000)] == [1, 2, 4, 30, 30, 30]
        assert (policy.delay(3, lambda: 0.0), policy.delay(3, lambda: 1.0)) == (0.0, 4.0)

    async def test_a_failure_never_overwrites_a_success(self, lab: Lab) -> None:
        """Between the rollback and the write of the attempt, another instance may have processed the message."""
        other, message = await lab.inbox(), lab.message()

        async def reached(point: str) -> None:
            if point == "before fail":
                await claims_lapse(lab)
                assert (await other.process(message, Recorder(lab))).processed

        needs_other_connection = not lab.store().features.concurrent_units
        if needs_other_connection:
            pytest.skip(f"{type(lab).__name__}: its writer keeps its turn until the attempt is written")
        inbox = await lab.inbox(reached=reached)
        with pytest.raises(ValueError, match="no"):
            await inbox.process(message, Recorder(lab, error=ValueError("no")))
        record = await inbox.get_record(message)
        assert record is not None
        assert (record.state, record.attempts) == (State.PROCESSED, 1)
        assert await lab.effects() == [message.id]

    async def test_a_dead_letter_that_cannot_be_kept_is_not_acknowledged(self, lab: Lab) -> None:
        """The other instance was quicker: its outcome counts, and not a dead letter that nobody wrote."""
        other, message = await lab.inbox(), lab.message()

        async def reached(point: str) -> None:
            if point == "before fail":
                await claims_lapse(lab)
                await other.process(message, Recorder(lab))

        if not lab.store().features.concurrent_units:
            pytest.skip(f"{type(lab).__name__}: its writer keeps its turn until the attempt is written")
        inbox = await lab.inbox(reached=reached)
        outcome = await inbox.process(message, Recorder(lab, error=Reject("bad")))
        assert outcome.duplicate
        assert await lab.effects() == [message.id]

    async def test_a_handler_that_changes_its_payload_changes_nothing_that_is_kept(self, lab: Lab) -> None:
        async def meddling(message: Message[Any], tx: Any) -> None:
            message.payload["amount"] += 1
            raise ValueError("no")

        inbox, message = await lab.inbox(), lab.message(payload={"amount": 7})
        with pytest.raises(ValueError, match="no"):
            await inbox.process(message, meddling)
        record = await inbox.get_record(message)
        assert record is not None
        assert record.payload == {"amount": 7}

    async def test_a_run_after_a_twin_sees_the_payload_as_it_came(self, lab: Lab) -> None:
        if not lab.store().features.concurrent_units:
            pytest.skip(f"{type(lab).__name__}: its writer keeps its turn until the attempt is written")
        other, message = await lab.inbox(), lab.message(payload={"amount": 7, "tags": (1, 2)})
        seen: list[dict[str, Any]] = []

        async def reached(point: str) -> None:
            if point == "before fail" and len(seen) == 1:
                await claims_lapse(lab)
                with pytest.raises(ValueError, match="other"):
                    await other.process(message, Recorder(lab, error=ValueError("other")))
                if not has(lab, "claim_marks"):  # with them it is not this run's any more
                    await lab.change(state="accepted")

        async def popping(message: Message[Any], tx: Any) -> None:
            seen.append(dict(message.payload))
            message.payload.pop("amount")
            raise Reject("bad")

        inbox = await lab.inbox(reached=reached)
        outcome = await inbox.process(message, popping)
        assert outcome.kind in (Kind.DEAD, Kind.ACCEPTED)
        assert seen[0] == {"amount": 7, "tags": (1, 2)}
        assert all(payload["amount"] == 7 for payload in seen)

    @pytest.mark.parametrize("delay", [float("inf"), 1e15, -5.0, float("nan")])
    async def test_a_handler_may_ask_for_any_delay(self, lab: Lab, delay: float) -> None:
        inbox, message = await lab.inbox(), lab.message()
        with pytest.raises(TryLater):
            await inbox.process(message, Recorder(lab, error=TryLater(delay)))
        record = await inbox.get_record(message)
        assert record is not None
        assert (record.state, record.attempts) == (State.FAILED, 1)

    @pytest.mark.parametrize("error", [Unprintable(), Frozen("no")])
    async def test_strange_errors_are_kept_too(self, lab: Lab, error: Exception) -> None:
        inbox, message = await lab.inbox(listeners=[]), lab.message()
        with pytest.raises(type(error)):
            await inbox.process(message, Recorder(lab, error=error))
        record = await inbox.get_record(message)
        assert record is not None
        assert (record.state, record.errors[0].type) == (State.FAILED, type(error).__name__)

    async def test_another_payload_during_backoff_has_to_wait_too(self, lab: Lab) -> None:
        inbox = await lab.inbox(retry=LATER, on_mismatch="raise")
        with pytest.raises(ValueError, match="no"):
            await inbox.process(lab.message("m", payload=1), Recorder(lab, error=ValueError("no")))
        with pytest.raises(TryLater):
            await inbox.process(lab.message("m", payload=2), Recorder(lab))

    async def test_a_failing_message_does_not_disturb_its_neighbours(self, lab: Lab) -> None:
        inbox, good, bad = await lab.inbox(), Recorder(lab), Recorder(lab, error=ValueError("no"))
        jobs = [inbox.process(lab.message(f"{n:02}"), bad if n % 3 == 0 else good) for n in range(30)]
        results = await asyncio.gather(*jobs, return_exceptions=True)
        assert [isinstance(result, ValueError) for result in results] == [n % 3 == 0 for n in range(30)]
        assert await lab.effects() == [f"{n:02}" for n in range(30) if n % 3]

    async def test_an_error_text_that_no_database_can_hold_is_kept_readable(self, lab: Lab) -> None:
        inbox, message = await lab.inbox(), lab.message()
        with pytest.raises(ValueError, match="bad"):
            await inbox.process(message, Recorder(lab, error=ValueError("bad \0 \ud800 \x1b[31m" + "x" * 9000)))
        record = await inbox.get_record(message)
        assert record is not None
        assert record.errors[0].text.startswith(r"bad \x00 \ud800 \x1b[31m")
        assert len(record.errors[0].text) <= 4000

    async def test_logs_escape_control_characters_and_leave_the_payload_out(
        self, lab: Lab, caplog: pytest.LogCaptureFixture
    ) -> None:
        inbox = await lab.inbox()
        message = lab.message("a\x1b[2Jb", payload={"card": "4111-1111"}, type="order\npaid")
        with pytest.raises(ValueError, match="no"):
            await inbox.process(message, Recorder(lab, error=ValueError("no\nForged line")))
        assert len(caplog.messages) == 1
        assert "\n" not in caplog.text.rstrip("\n")
        assert "\x1b" not in caplog.text
        assert "4111-1111" not in caplog.text

    async def test_a_cancelled_handler_leaves_nothing_and_is_not_an_attempt(self, lab: Lab) -> None:
        heard = Listener()
        inbox, gate, message = await lab.inbox(listeners=[heard]), Gate(lab), lab.message()
        task = asyncio.ensure_future(inbox.process(message, gate))
        await gate.started.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert await lab.effects() == []
        assert counts_nothing(lab, await inbox.get_record(message))
        assert (await (await lab.inbox()).process(message, Recorder(lab))).processed

    async def test_a_cancellation_during_commit_is_heard_after_it(self, lab: Lab) -> None:
        async def reached(point: str) -> None:
            if point == "before commit":
                task.cancel()

        await lab.slow_commits()
        inbox, handler, message = await lab.inbox(reached=reached), Recorder(lab), lab.message()
        task: asyncio.Task[Any] = asyncio.ensure_future(inbox.process(message, handler))
        with pytest.raises(asyncio.CancelledError):
            await task
        assert await lab.effects() == [message.id]
        assert (await (await lab.inbox()).process(message, handler)).duplicate
        assert handler.runs == [message.id]
