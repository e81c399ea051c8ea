"""Dispatching: one message at a time, and what becomes of it. Attempts, backoff, dead letters, wrong handlers."""

from __future__ import annotations

import asyncio
import contextlib
import sys
import time
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from typing import Any

import msgspec
import pytest

import onceward
from onceward import Kind, Message, Reject, RetryPolicy, State, TryLater
from onceward.errors import HandlerNotFound, NotDead, SecondConnection, StoreUnavailable
from onceward.testing.contract.base import LATER, SOON, needs
from onceward.testing.contract.queue.base import TAKEOVER, Failing, at, drain, record_of, until
from onceward.testing.lab import Gate, Lab, Recorder
from onceward.testing.proxy import Proxy


class Order(msgspec.Struct):
    amount: int


class DispatchContract:
    async def test_nothing_ready_is_none(self, lab: Lab) -> None:
        inbox, handler = await lab.inbox(), Recorder(lab)
        assert await inbox.dispatch(handler) is None
        await inbox.accept(lab.message())
        assert (await drain(inbox, handler))[0].kind is Kind.PROCESSED
        assert await inbox.dispatch(handler) is None

    async def test_a_dispatched_message_takes_effect_once_and_its_record_says_so(self, lab: Lab) -> None:
        inbox, message, handler = await lab.inbox(), lab.message(body=b"raw"), Recorder(lab)
        await inbox.accept(message)
        outcome = await inbox.dispatch(handler)
        assert outcome is not None
        assert (outcome.kind, outcome.result) == (Kind.PROCESSED, {"charged": message.id})
        record = await record_of(inbox, message)
        assert (record.state, record.attempts, record.started) == (State.PROCESSED, 1, 0)
        assert (record.result, record.payload, record.body) == ({"charged": message.id}, None, None)
        assert record.processed_at is not None
        assert record.processed_position is not None
        assert record.received_position is not None
        assert record.duration_ms is not None
        assert record.handler is not None
        assert await lab.effects() == [message.id]
        again = await (await lab.inbox()).process(message, handler)
        assert (again.duplicate, again.result) == (True, {"charged": message.id})
        for table in ("onceward_lanes", "onceward_pending", "onceward_waits"):
            assert await lab.query(f"SELECT * FROM {table}") == [], f"{table} is empty when there is nothing to do"  # noqa: S608

    async def test_positions_of_arrival_and_of_completion_are_on_the_record(self, lab: Lab) -> None:
        inbox, ids = await lab.inbox(), ["a2", "a1", "b1"]
        for id_ in ids:
            await inbox.accept(at(lab, id_))
        handler = Recorder(lab)
        await drain(inbox, handler)
        records = {id_: await record_of(inbox, at(lab, id_)) for id_ in ids}
        assert sorted(ids, key=lambda id_: records[id_].received_position or 0) == ids
        assert sorted(ids, key=lambda id_: records[id_].processed_position or 0) == handler.runs

    async def test_the_handlers_write_and_the_completion_are_one_transaction(self, lab: Lab) -> None:
        """Until it commits, nobody else sees the effect, and the message is still to be done."""
        needs(lab, "concurrent_units")
        inbox, message, gate = await lab.inbox(), lab.message(), Gate(lab)
        await inbox.accept(message)
        running = asyncio.ensure_future(inbox.dispatch(gate))
        await gate.started.wait()
        assert await lab.effects() == []
        assert (await record_of(await lab.inbox(), message)).state is not State.PROCESSED
        assert await (await lab.inbox()).dispatch(Recorder(lab)) is None, "its lane is claimed"
        gate.go.set()
        outcome = await running
        assert outcome is not None
        assert outcome.processed
        assert await lab.effects() == [message.id]

    async def test_the_registered_handler_runs_where_none_is_given(self, lab: Lab) -> None:
        inbox, runs = await lab.inbox(), []

        @inbox.handler("order.paid", payload=Order)
        async def on_paid(message: Message[Order]) -> dict[str, Any]:
            runs.append((message.payload, onceward.current().attempt, onceward.current().identity.key))
            return {"amount": message.payload.amount}

        await inbox.accept(lab.message("m"))
        outcome = await inbox.dispatch()
        assert outcome is not None
        assert outcome.result == {"amount": 7}
        assert runs == [(Order(7), 1, "m")]

    async def test_on_begin_runs_in_the_transaction_of_the_message(self, lab: Lab) -> None:
        async def begin(tx: Any, message: Message[Any]) -> None:
            seen.append(message.tenant)
            await lab.run(tx, "SELECT 1")

        seen: list[str | None] = []
        inbox, during = await lab.inbox(on_begin=begin), []

        async def handler(message: Message[Any], tx: Any) -> None:
            during.append((seen[-1], message.tenant))

        await inbox.accept([lab.message(tenant="north"), lab.message(tenant="south")])
        seen.clear()
        assert [outcome.kind for outcome in await drain(inbox, handler)] == [Kind.PROCESSED] * 2
        assert sorted(during) == [("north", "north"), ("south", "south")]

    # --- rules 2, 12, 13, 14: failures ----------------------------------------------------------------------

    async def test_a_failing_message_is_an_outcome_and_leaves_nothing(self, lab: Lab) -> None:
        inbox, message, error = await lab.inbox(retry=LATER), lab.message(), ValueError("card refused")
        await inbox.accept(message)
        outcome = await inbox.dispatch(Recorder(lab, error=error))
        assert outcome is not None
        assert (outcome.kind, outcome.error, outcome.attempts) == (Kind.FAILED, error, 1)
        assert outcome.retry_at is not None
        assert timedelta(0) < outcome.retry_at - datetime.now(UTC) <= timedelta(seconds=601)
        assert await lab.effects() == []
        record = await record_of(inbox, message)
        assert (record.state, record.attempts, record.payload) == (State.FAILED, 1, {"amount": 7})
        assert (record.errors[0].type, record.errors[0].text) == ("ValueError", "card refused")
        assert record.next_try_at is not None
        assert abs(record.next_try_at - outcome.retry_at) < timedelta(seconds=5)

    async def test_a_retry_parks_its_lane_and_no_other(self, lab: Lab) -> None:
        """Rules 13 and 14: the backoff lives in the store."""
        inbox, handler = await lab.inbox(retry=LATER), Failing(lab, "a1")
        await inbox.accept([at(lab, "a1"), at(lab, "a2"), at(lab, "b1"), at(lab, "b2"), lab.message("alone")])
        await drain(inbox, handler)
        assert handler.runs.count("a1") == 1
        assert sorted(handler.runs) == ["a1", "alone", "b1", "b2"]
        assert await drain(await lab.inbox(retry=LATER), handler) == [], "another worker knows of it"
        await lab.query("UPDATE onceward_records SET extra = '1'")  # nothing is held meanwhile
        await lab.query("UPDATE onceward_lanes SET share = share")
        handler.ids.clear()
        await lab.let_time_pass()
        await drain(inbox, handler)
        assert handler.runs[-2:] == ["a1", "a2"]
        record = await record_of(inbox, at(lab, "a1"))
        assert (record.state, record.attempts) == (State.PROCESSED, 2)
        assert await lab.effects() == ["a1", "a2", "alone", "b1", "b2"]

    async def test_the_backoff_is_by_the_clock_of_the_database(self, lab: Lab) -> None:
        """Rule 17: a worker whose clock is wrong by a day changes nothing."""
        inbox, message = await lab.inbox(retry=LATER), lab.message()
        await inbox.accept(message)
        with _clock_ahead(timedelta(days=1)):
            outcome = await inbox.dispatch(Recorder(lab, error=ValueError("no")))
            assert outcome is not None
            assert await inbox.dispatch(Recorder(lab)) is None
            await inbox.accept(lab.message("later"), not_before=timedelta(hours=1))
        record = await record_of(inbox, message)
        assert record.next_try_at is not None
        assert record.next_try_at - datetime.now(UTC) <= timedelta(seconds=601)
        record = await record_of(inbox, lab.message("later"))
        assert record.next_try_at is not None
        assert record.next_try_at - datetime.now(UTC) <= timedelta(minutes=61)

    @pytest.mark.parametrize(("delay", "least", "most"), [(timedelta(minutes=5), 4, 6), (600, 9, 11)])
    async def test_a_handler_may_ask_to_be_tried_later(self, lab: Lab, delay: Any, least: int, most: int) -> None:
        inbox, message = await lab.inbox(retry=SOON), lab.message()
        await inbox.accept(message)
        outcome = await inbox.dispatch(Recorder(lab, error=TryLater(delay)))
        assert outcome is not None
        assert outcome.kind is Kind.FAILED
        assert outcome.retry_at is not None
        assert timedelta(minutes=least) < outcome.retry_at - datetime.now(UTC) < timedelta(minutes=most)
        record = await record_of(inbox, message)
        assert (record.state, record.attempts) == (State.FAILED, 1)
        assert await drain(inbox, Recorder(lab)) == []
        await lab.let_time_pass()
        assert [one.kind for one in await drain(inbox, Recorder(lab))] == [Kind.PROCESSED]

    async def test_attempts_are_exhausted_into_a_dead_letter(self, lab: Lab) -> None:
        inbox, message, handler = await lab.inbox(retry=SOON), lab.message(), Recorder(lab, error=ValueError("no"))
        await inbox.accept(message)
        outcomes = await drain(inbox, handler)
        assert [outcome.kind for outcome in outcomes] == [Kind.FAILED, Kind.FAILED, Kind.DEAD]
        assert outcomes[-1].error is handler.error
        record = await record_of(inbox, message)
        assert (record.state, record.attempts, record.payload) == (State.DEAD, 3, {"amount": 7})
        assert len(record.errors) == 3
        assert await drain(inbox, handler) == []
        assert await lab.effects() == []

    async def test_without_a_policy_there_are_ten_attempts(self, lab: Lab) -> None:
        inbox, message, handler = await lab.inbox(), lab.message(), Recorder(lab, error=ValueError("no"))
        await inbox.accept(message)
        kinds = []
        for _ in range(10):
            await lab.let_time_pass()
            outcome = await inbox.dispatch(handler)
            assert outcome is not None
            kinds.append(outcome.kind)
        assert kinds == [Kind.FAILED] * 9 + [Kind.DEAD]
        await lab.let_time_pass()
        assert await drain(inbox, handler) == []

    async def test_the_policy_of_the_handler_counts(self, lab: Lab) -> None:
        inbox = await lab.inbox(retry=LATER)

        @inbox.handler("order.paid", retry=RetryPolicy(max_attempts=2, base=0.0))
        async def on_paid(message: Message[Any]) -> None:
            raise ValueError("no")

        await inbox.accept(lab.message())
        assert [outcome.kind for outcome in await drain(inbox)] == [Kind.FAILED, Kind.DEAD]

    async def test_reject_makes_a_dead_letter_at_once(self, lab: Lab) -> None:
        inbox, message = await lab.inbox(), lab.message(body=b"raw")
        await inbox.accept(message)
        outcomes = await drain(inbox, Recorder(lab, error=Reject("not ours")))
        assert [outcome.kind for outcome in outcomes] == [Kind.DEAD]
        record = await record_of(inbox, message)
        assert (record.state, record.attempts, record.body) == (State.DEAD, 1, b"raw")
        assert await lab.effects() == []

    async def test_a_payload_that_does_not_decode_is_a_dead_letter_with_its_body(self, lab: Lab) -> None:
        inbox, runs = await lab.inbox(), []

        @inbox.handler("order.paid", payload=Order)
        async def on_paid(message: Message[Order]) -> None:
            runs.append(message.id)

        wrong, broken = lab.message("w", payload={"amount": "much"}), lab.message("b", payload=None, body=b"{not json")
        await inbox.accept([wrong, broken, lab.message("good")])
        assert sorted(outcome.kind for outcome in await drain(inbox)) == [Kind.DEAD, Kind.DEAD, Kind.PROCESSED]
        assert runs == ["good"]
        record = await record_of(inbox, broken)
        assert (record.state, record.body) == (State.DEAD, b"{not json")
        assert "does not fit Order" in record.last_error

    async def test_an_unhandled_type_can_be_a_dead_letter(self, lab: Lab) -> None:
        inbox = await lab.inbox(unhandled="dead")
        await inbox.accept(lab.message("m"))
        outcomes = await drain(inbox)
        assert [outcome.kind for outcome in outcomes] == [Kind.DEAD]
        assert (await record_of(inbox, lab.message("m"))).state is State.DEAD

    async def test_an_unhandled_type_can_be_ignored(self, lab: Lab) -> None:
        inbox = await lab.inbox(unhandled="ignore")
        await inbox.accept([at(lab, "a1"), at(lab, "a2")])
        assert [outcome.kind for outcome in await drain(inbox)] == [Kind.IGNORED, Kind.IGNORED]
        assert (await record_of(inbox, at(lab, "a1"))).state is State.PROCESSED
        assert (await inbox.accept(at(lab, "a1"))).kind is Kind.DUPLICATE

    async def test_an_unhandled_type_is_told_and_waits_for_a_version_that_has_a_handler(self, lab: Lab) -> None:
        inbox = await lab.inbox()
        await inbox.accept(at(lab, "a1"))
        with pytest.raises(HandlerNotFound, match="no handler is registered"):
            await inbox.dispatch()
        assert await inbox.dispatch() is None, "no hot loop"
        record = await record_of(inbox, at(lab, "a1"))
        assert (record.state, record.attempts, record.started) == (State.ACCEPTED, 0, 0)
        await lab.let_time_pass()
        assert [outcome.kind for outcome in await drain(inbox, Recorder(lab))] == [Kind.PROCESSED]

    # --- dead letters in lanes ------------------------------------------------------------------------------

    @pytest.mark.parametrize("shared", [False, True], ids=["stream", "shared"])
    async def test_a_dead_letter_holds_its_lane_until_a_person_says_so(self, lab: Lab, shared: bool) -> None:
        inbox, handler = await lab.inbox(), Failing(lab, "a1", error=Reject("bad"))
        lane = "x" if shared else None
        await inbox.accept([at(lab, "a1"), at(lab, "a2")], lane=lane)
        await inbox.accept(at(lab, "b1"))
        await drain(inbox, handler)
        assert sorted(handler.runs) == ["a1", "b1"]
        await inbox.accept(at(lab, "a3"), lane=lane)
        assert await drain(inbox, handler) == [], "a new message does not open a blocked lane"
        await lab.let_time_pass()
        assert await drain(inbox, handler) == []
        await inbox.discard(at(lab, "a1"))
        await drain(inbox, handler)
        assert handler.runs[2:] == ["a2", "a3"]
        assert (await record_of(inbox, at(lab, "a1"))).state is State.DISCARDED
        assert await lab.effects() == ["a2", "a3", "b1"]

    async def test_a_lane_can_go_on_after_a_dead_letter(self, lab: Lab) -> None:
        inbox, handler = await lab.inbox(on_dead="skip"), Failing(lab, "a1", error=Reject("bad"))
        await inbox.accept([at(lab, "a1"), at(lab, "a2")])
        assert [outcome.kind for outcome in await drain(inbox, handler)] == [Kind.DEAD, Kind.PROCESSED]
        assert handler.runs == ["a1", "a2"]

    async def test_a_dead_letter_without_a_lane_holds_nobody(self, lab: Lab) -> None:
        inbox, handler = await lab.inbox(), Failing(lab, "dead", error=Reject("bad"))
        await inbox.accept([lab.message("dead"), lab.message("alive")])
        await drain(inbox, handler)
        assert sorted(handler.runs) == ["alive", "dead"]
        await inbox.accept(lab.message("later"))
        assert [outcome.kind for outcome in await drain(inbox, handler)] == [Kind.PROCESSED]

    @pytest.mark.parametrize("shared", [False, True], ids=["stream", "shared"])
    async def test_a_replayed_dead_letter_is_back_at_its_place(self, lab: Lab, shared: bool) -> None:
        inbox, handler = await lab.inbox(retry=SOON), Failing(lab, "a1")
        await inbox.accept([at(lab, "a1"), at(lab, "a2")], lane="x" if shared else None)
        assert [outcome.kind for outcome in await drain(inbox, handler)][-1] is Kind.DEAD
        assert (await inbox.replay(at(lab, "a1"))).kind is Kind.ACCEPTED
        record = await record_of(inbox, at(lab, "a1"))
        assert (record.state, record.attempts, record.started) == (State.ACCEPTED, 0, 0)
        with pytest.raises(NotDead):
            await inbox.replay(at(lab, "a1"))
        handler.runs.clear()
        handler.ids.clear()
        await drain(inbox, handler)
        assert handler.runs == ["a1", "a2"]
        assert await lab.effects() == ["a1", "a2"]

    async def test_a_replayed_dead_letter_has_all_its_attempts_again(self, lab: Lab) -> None:
        inbox, handler = await lab.inbox(retry=SOON), Recorder(lab, error=ValueError("no"))
        await inbox.accept(lab.message("m"))
        await drain(inbox, handler)
        await inbox.replay(inbox.identity_of(lab.message("m")))
        assert [outcome.kind for outcome in await drain(inbox, handler)] == [Kind.FAILED, Kind.FAILED, Kind.DEAD]

    @pytest.mark.parametrize("shared", [False, True])
    async def test_a_dead_letter_that_is_replayed_with_a_handler_frees_its_lane(self, lab: Lab, shared: bool) -> None:
        """If it succeeds; else a person still has to decide."""
        inbox, handler = await lab.inbox(retry=SOON), Failing(lab, "a1", error=Reject("bad"))
        await inbox.accept([at(lab, "a1"), at(lab, "a2")], lane="x" if shared else None)
        await drain(inbox, handler)
        assert (await inbox.replay(at(lab, "a1"), handler)).kind is Kind.DEAD
        assert await drain(inbox, handler) == []
        handler.ids.clear()
        assert (await inbox.replay(at(lab, "a1"), handler)).kind is Kind.PROCESSED
        assert [outcome.kind for outcome in await drain(inbox, handler)] == [Kind.PROCESSED]
        assert await lab.effects() == ["a1", "a2"]

    async def test_a_replay_after_the_lane_went_on_runs_alone(self, lab: Lab) -> None:
        inbox, handler = await lab.inbox(on_dead="skip"), Failing(lab, "a1", error=Reject("bad"))
        await inbox.accept([at(lab, "a1"), at(lab, "a2")])
        await drain(inbox, handler)
        handler.ids.clear()
        await inbox.replay(at(lab, "a1"))
        assert [outcome.kind for outcome in await drain(inbox, handler)] == [Kind.PROCESSED]
        assert handler.runs == ["a1", "a2", "a1"]

    # --- rules 4, 5, 7, 8, 22 in stored mode: handlers that do what they must not ---------------------------

    async def test_a_swallowed_sql_error_is_never_taken_for_done(self, lab: Lab) -> None:
        needs(lab, "errors_abort")
        inbox, careless = await lab.inbox(retry=SOON), [True]

        async def swallowing(message: Message[Any], tx: Any) -> None:
            await lab.write(tx, message.id)
            if message.id == "bad" and careless:
                careless.pop()
                with contextlib.suppress(Exception):
                    await lab.run(tx, "SELECT * FROM no_such_table")

        await inbox.accept([lab.message("bad"), lab.message("good")])
        outcomes = await drain(inbox, swallowing)
        assert sorted(outcome.kind for outcome in outcomes) == [Kind.FAILED, Kind.PROCESSED, Kind.PROCESSED]
        record = await record_of(inbox, lab.message("bad"))
        assert (record.state, record.attempts) == (State.PROCESSED, 2)
        assert (await record_of(inbox, lab.message("good"))).attempts == 1
        assert await lab.effects() == ["bad", "good"]

    @pytest.mark.parametrize("then", ["returns", "raises", "swallows"])
    @pytest.mark.parametrize("ending", ["COMMIT", "ROLLBACK"])
    async def test_a_handler_that_ends_the_transaction_is_found_out(self, lab: Lab, ending: str, then: str) -> None:
        inbox, handler = await lab.inbox(retry=SOON), Recorder(lab)

        async def meddling(message: Message[Any], tx: Any) -> None:
            if message.id != "a1":
                await handler(message, tx)
                return
            handler.runs.append(message.id)
            if then == "swallows":
                with contextlib.suppress(Exception):
                    await lab.run(tx, ending)
                return
            await lab.run(tx, ending)
            if then == "raises":
                raise ValueError("no")

        await inbox.accept([at(lab, "a1"), at(lab, "a2"), at(lab, "b1")])
        outcomes = await drain(inbox, meddling)
        assert Kind.DEAD in [outcome.kind for outcome in outcomes]
        record = await record_of(inbox, at(lab, "a1"))
        assert record.state is State.DEAD
        assert "HandlerEndedTransaction" in record.last_error
        assert record.payload == {"amount": 7}
        assert handler.runs.count("a1") == 1, "part of its effect may stand: a person has to look"
        assert "a2" not in handler.runs
        await inbox.discard(at(lab, "a1"))
        await drain(inbox, meddling)
        assert sorted(await lab.effects()) == ["a2", "b1"]
        assert [(await record_of(inbox, at(lab, id_))).state for id_ in ("a2", "b1")] == [State.PROCESSED] * 2

    async def test_a_savepoint_of_the_handler_can_be_undone_alone(self, lab: Lab) -> None:
        async def careful(message: Message[Any], tx: Any) -> None:
            await lab.write(tx, "kept")
            with contextlib.suppress(RuntimeError):
                async with lab.savepoint(tx):
                    await lab.write(tx, "undone")
                    raise RuntimeError("inner")

        inbox = await lab.inbox()
        await inbox.accept(lab.message())
        assert [outcome.kind for outcome in await drain(inbox, careful)] == [Kind.PROCESSED]
        assert await lab.effects() == ["kept"]

    async def test_a_second_connection_is_warned_about_by_name(self, lab: Lab) -> None:
        needs(lab, "guards_pool")
        inbox = await lab.inbox()

        async def on_paid(message: Message[Any], tx: Any) -> None:
            async with lab.second_connection(inbox.store) as other:
                await other.execute("SELECT 1")

        await inbox.accept(lab.message())
        with pytest.warns(UserWarning, match="on_paid"):
            assert [outcome.kind for outcome in await drain(inbox, on_paid)] == [Kind.PROCESSED]

    async def test_a_second_connection_can_be_refused(self, lab: Lab) -> None:
        needs(lab, "guards_pool")
        inbox = await lab.inbox(store=lab.store(second_connection="raise"), retry=LATER)

        async def on_paid(message: Message[Any], tx: Any) -> None:
            async with lab.second_connection(inbox.store) as other:
                await other.execute("INSERT INTO effects VALUES ('stray')")

        await inbox.accept(lab.message())
        outcomes = await drain(inbox, on_paid)
        assert [outcome.kind for outcome in outcomes] == [Kind.FAILED]
        assert isinstance(outcomes[0].error, SecondConnection)
        assert await lab.effects() == []

    async def test_a_serialization_failure_burns_no_attempt(self, lab: Lab) -> None:
        needs(lab, "errors_abort")
        inbox, message, runs = await lab.inbox(retry=LATER), lab.message(), []

        async def unlucky(message: Message[Any], tx: Any) -> None:
            runs.append(message.id)
            await lab.write(tx, message.id)
            if len(runs) == 1:
                await lab.run(tx, "DO $$ BEGIN RAISE EXCEPTION 'again' USING ERRCODE = '40001'; END $$")

        await inbox.accept(message)
        assert [outcome.kind for outcome in await drain(inbox, unlucky)] == [Kind.PROCESSED]
        record = await record_of(inbox, message)
        assert (record.attempts, record.started, record.errors) == (1, 0, ())
        assert await lab.effects() == [message.id]

    async def test_a_lost_connection_is_not_an_attempt(self, lab: Lab) -> None:
        needs(lab, "network")
        proxy, message = Proxy(*lab.address), lab.message()
        async with proxy.running():
            inbox = await lab.inbox(store=lab.store_behind(proxy.port), retry=SOON)
            await inbox.accept(message)

            async def unlucky(message: Message[Any], tx: Any) -> None:
                proxy.cut()
                await lab.write(tx, message.id)

            with pytest.raises(StoreUnavailable):
                await inbox.dispatch(unlucky)
            other, handler = await lab.inbox(retry=SOON), Recorder(lab)

            async def taken_over() -> bool:
                return bool(await drain(other, handler))

            await until(taken_over, within=TAKEOVER)
            await inbox.close()
        record = await record_of(other, message)
        assert (record.state, record.attempts, record.started) == (State.PROCESSED, 1, 0)
        assert await lab.effects() == [message.id]

    async def test_a_cancelled_dispatch_gives_its_message_back_at_once(self, lab: Lab) -> None:
        """Rule 7, and rule 16: nobody crashed, so nothing is counted and nobody has to wait."""
        inbox, message, gate = await lab.inbox(retry=RetryPolicy(max_attempts=1, base=0.0)), lab.message(), Gate(lab)
        await inbox.accept(message)
        running = asyncio.ensure_future(inbox.dispatch(gate))
        await gate.started.wait()
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        assert await lab.effects() == []
        record = await record_of(inbox, message)
        assert (record.state, record.attempts, record.started) == (State.ACCEPTED, 0, 0)
        assert [outcome.kind for outcome in await drain(await lab.inbox(), Recorder(lab))] == [Kind.PROCESSED]
        record = await record_of(inbox, message)
        assert (record.attempts, record.started) == (1, 0)
        assert await lab.effects() == [message.id]

    async def test_a_cancelled_claim_is_given_back_at_once(self, lab: Lab) -> None:
        """Wherever it is cancelled: also between the claim, or the mark of a start, and the answer to it."""
        point = ""

        async def reached(here: str) -> None:
            if here == point:
                running.cancel()
                await asyncio.sleep(0)

        inbox, message = await lab.inbox(reached=reached), lab.message("m")
        await inbox.accept(message)
        for point in ("after begin_turn", "after mark_start"):
            await lab.query("UPDATE onceward_lanes SET claims = 1")  # as if a worker had died
            running = asyncio.ensure_future(inbox.dispatch(Recorder(lab)))
            with pytest.raises(asyncio.CancelledError):
                await running
            record = await record_of(inbox, message)
            assert (record.attempts, record.started) == (0, 0), point
            assert await lab.query("SELECT state, claims FROM onceward_lanes") == [("ready", 1)], point
        point = ""
        assert [outcome.kind for outcome in await drain(inbox, Recorder(lab))] == [Kind.PROCESSED]

    async def test_a_handler_that_raises_cancelled_by_itself_fails(self, lab: Lab) -> None:
        """Nobody cancelled the worker, so it goes on, and the message does not come for ever."""
        inbox, handler = await lab.inbox(retry=SOON), Failing(lab, "a1", error=asyncio.CancelledError())
        await inbox.accept([at(lab, "a1"), lab.message("other")])
        async with inbox.worker(handler) as worker:

            async def dead() -> bool:
                return (await record_of(inbox, at(lab, "a1"))).state is State.DEAD

            await until(dead)
            assert worker.running
        record = await record_of(inbox, at(lab, "a1"))
        assert (record.attempts, record.errors[-1].type) == (3, "HandlerCancelled")
        assert await lab.effects() == ["other"]

    async def test_a_message_that_ends_the_process_in_order_is_a_dead_letter_too(self, lab: Lab) -> None:
        """SystemExit in a handler is how a process dies: as with any crash the second one counts against it."""
        inbox, outcome = await lab.inbox(retry=SOON), None
        await inbox.accept(lab.message("m"))
        exits = 0
        while outcome is None:
            try:
                outcome = await inbox.dispatch(Recorder(lab, error=SystemExit(3)))
            except SystemExit:
                exits += 1
                assert exits < 10, "it never ends"
                await lab.let_time_pass()
        assert (outcome.kind, type(outcome.error).__name__) == (Kind.DEAD, "AttemptsExhausted")
        assert exits == 4
        assert await lab.effects() == []

    @pytest.mark.parametrize("outlasts", [False, True])
    async def test_a_failure_is_known_before_the_lane_is_free(
        self, lab: Lab, monkeypatch: pytest.MonkeyPatch, outlasts: bool
    ) -> None:
        """Rule 2 in stored mode: of two workers, none gets the second message while the first one fails; also not when
        its turn lasts longer than its claim."""
        if outlasts:
            monkeypatch.setattr("onceward.crew.CLAIM_LEASE", 0.1)
        one, two = await lab.inbox(retry=LATER), await lab.inbox(retry=LATER)
        gate, other = Gate(lab), Recorder(lab)
        await one.accept([at(lab, "a1"), at(lab, "a2")])

        async def failing(message: Message[Any], tx: Any) -> None:
            await gate(message, tx)
            raise ValueError("no")

        first = asyncio.ensure_future(one.dispatch(failing))
        await gate.started.wait()
        await asyncio.sleep(0.3 if outlasts else 0)
        if lab.store().features.concurrent_units:
            assert await two.dispatch(other) is None
        gate.go.set()
        while not first.done():
            assert await two.dispatch(other) is None
        outcome = await first
        assert outcome is not None
        assert outcome.kind is Kind.FAILED
        assert await two.dispatch(other) is None
        assert (gate.runs, other.runs) == (["a1"], [])

    async def test_what_was_processed_by_hand_is_not_run(self, lab: Lab) -> None:
        """A message in the queue belongs to the queue: mark_processed and claim do not take it away unseen."""
        inbox, message, handler = await lab.inbox(), lab.message(), Recorder(lab)
        await inbox.accept(message)
        with contextlib.suppress(Exception):
            await inbox.mark_processed(message)
        await drain(inbox, handler)
        record = await record_of(inbox, message)
        assert record.state is State.PROCESSED
        assert len(handler.runs) <= 1
        assert await lab.query("SELECT * FROM onceward_pending") == []


class _AnyDatetime(type):
    def __instancecheck__(cls, instance: object) -> bool:
        return isinstance(instance, datetime)


@contextlib.contextmanager
def _clock_ahead(by: timedelta) -> Iterator[None]:
    """The clock of this process is wrong, for all of onceward that asks it."""

    class Ahead(datetime, metaclass=_AnyDatetime):
        @classmethod
        def now(cls, tz: Any = None) -> datetime:  # type: ignore[override]
            return datetime.now(tz) + by

    with pytest.MonkeyPatch.context() as patch:
        seconds = time.time
        patch.setattr(time, "time", lambda: seconds() + by.total_seconds())
        for name, module in list(sys.modules.items()):
            ours = name.startswith("onceward") and not name.startswith("onceward.testing")
            if ours and getattr(module, "datetime", None) is datetime:
                patch.setattr(module, "datetime", Ahead)
        yield
