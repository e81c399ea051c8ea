"""The transaction: alive until COMMIT, ended by us alone, and never called committed when it is not."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any

import pytest

from onceward import Message, State, Verdict
from onceward.errors import (
    CommitNotApplied,
    CommitUnknown,
    HandlerEndedTransaction,
    NestedProcess,
    SecondConnection,
    StoreUnavailable,
)
from onceward.outcome import Kind, verdict_of
from onceward.testing.contract.base import cut_off, needs, visible
from onceward.testing.lab import Lab, Recorder
from onceward.testing.proxy import Proxy

ENDINGS = ["COMMIT", "ROLLBACK", "COMMIT; BEGIN", "ROLLBACK; BEGIN"]


class TransactionContract:
    async def test_the_claim_is_there_before_the_handler_runs(self, lab: Lab) -> None:
        claimed = []

        async def look(message: Message[Any], tx: Any) -> None:
            claimed.append(await visible(lab, tx, message.id))

        await (await lab.inbox()).process(lab.message(), look)
        assert claimed == [1], "the claim is made first, and seen by the handler"

    async def test_a_savepoint_of_the_handler_can_be_undone_alone(self, lab: Lab) -> None:
        needs(lab, "transactional")

        async def careful(message: Message[Any], tx: Any) -> None:
            await lab.write(tx, "kept")
            with contextlib.suppress(RuntimeError):
                async with lab.savepoint(tx):
                    await lab.write(tx, "undone")
                    raise RuntimeError
            async with lab.savepoint(tx), lab.savepoint(tx):
                await lab.write(tx, "nested")

        assert (await (await lab.inbox()).process(lab.message(), careful)).processed
        assert await lab.effects() == ["kept", "nested"]

    async def test_an_sql_error_inside_a_savepoint_can_be_survived(self, lab: Lab) -> None:
        needs(lab, "transactional")

        async def careful(message: Message[Any], tx: Any) -> None:
            await lab.write(tx, "kept")
            with pytest.raises(Exception, match="no_such_table"):
                async with lab.savepoint(tx):
                    await lab.run(tx, "INSERT INTO no_such_table VALUES (1)")

        assert (await (await lab.inbox()).process(lab.message(), careful)).processed
        assert await lab.effects() == ["kept"]

    @pytest.mark.parametrize("swallow", [False, True])
    async def test_savepoints_of_two_tasks_that_cross_are_never_committed_half(self, lab: Lab, swallow: bool) -> None:
        """A savepoint ends all that were made after it. Two tasks that interleave them undo each other's rows."""
        needs(lab, "transactional")
        needs(lab, "tasks_share_tx")

        async def crossing(message: Message[Any], tx: Any) -> None:
            one_began, two_began, one_failed = asyncio.Event(), asyncio.Event(), asyncio.Event()

            async def one() -> None:
                try:
                    async with lab.savepoint(tx):
                        await lab.write(tx, "one")
                        one_began.set()
                        await two_began.wait()
                        raise RuntimeError
                except RuntimeError:
                    pass
                finally:
                    one_failed.set()

            async def two() -> None:
                await one_began.wait()
                async with lab.savepoint(tx):
                    await lab.write(tx, "two")
                    two_began.set()
                    await one_failed.wait()

            await asyncio.gather(one(), two(), return_exceptions=message.payload["swallow"])

        inbox, message = await lab.inbox(), lab.message(payload={"swallow": swallow})
        with pytest.raises(Exception, match=r"savepoint|nesting|at the same time|COMMIT rolled back"):
            await inbox.process(message, crossing)
        assert await lab.effects() == []
        record = await inbox.get_record(message)
        assert record is None or (record.state, record.attempts) == (State.FAILED, 1)

    async def test_a_swallowed_sql_error_is_never_acknowledged_as_a_commit(self, lab: Lab) -> None:
        needs(lab, "transactional")

        async def careless(message: Message[Any], tx: Any) -> Any:
            await lab.write(tx, message.id)
            with pytest.raises(Exception, match="no_such_table"):
                await lab.run(tx, "INSERT INTO no_such_table VALUES (1)")
            return message.payload

        inbox = await lab.inbox()
        for result in (None, "a result"):
            message = lab.message(payload=result)
            if not inbox.store.features.errors_abort:
                assert (await inbox.process(message, careless)).processed
                assert message.id in await lab.effects()
                continue
            with pytest.raises(CommitNotApplied) as caught:
                await inbox.process(message, careless)
            assert verdict_of(caught.value) is Verdict.PAUSE
            assert await lab.effects() == []
            assert await inbox.get_record(message) is None
            assert (await inbox.process(message, Recorder(lab))).processed
            await lab.clear_effects()

    @pytest.mark.parametrize("then", ["returns", "swallows", "raises"])
    @pytest.mark.parametrize("ending", ENDINGS)
    async def test_a_handler_that_ends_the_transaction_is_found_out(self, lab: Lab, ending: str, then: str) -> None:
        needs(lab, "transactional")
        if ";" in ending:
            needs(lab, "multiple_statements")

        async def meddling(message: Message[Any], tx: Any) -> None:
            await lab.write(tx, "before")
            try:
                await lab.run(tx, ending)
                await lab.write(tx, "after")
            except HandlerEndedTransaction:
                if then == "returns":
                    raise
            if then == "raises":
                raise ValueError("and an error on top")

        inbox, message = await lab.inbox(), lab.message()
        with pytest.raises(HandlerEndedTransaction) as caught:
            await inbox.process(message, meddling)
        assert verdict_of(caught.value) is Verdict.RETRY
        outcome = await (await lab.inbox()).process(message, Recorder(lab))
        assert outcome.kind is Kind.DEAD, "a person has to look: part of the effect may stand"
        assert outcome.verdict is Verdict.ACK
        record = await inbox.get_record(message)
        assert record is not None
        assert record.state is State.DEAD
        assert record.errors[-1].type == "HandlerEndedTransaction"
        assert (await inbox.process(lab.message(), Recorder(lab))).processed, "the next message works"

    async def test_the_handle_is_dead_after_the_run(self, lab: Lab) -> None:
        kept = []

        async def keeping(message: Message[Any], tx: Any) -> None:
            kept.append(tx)

        await (await lab.inbox()).process(lab.message(), keeping)
        with pytest.raises(Exception, match=r"over|permanently closed"):
            await lab.write(kept[0], "late")
        assert await lab.effects() == []

    async def test_process_inside_a_handler_is_refused_or_works(self, lab: Lab) -> None:
        inbox, inner = await lab.inbox(), lab.message("inner")

        async def nesting(message: Message[Any], tx: Any) -> None:
            await inbox.process(inner, Recorder(lab))

        if inbox.store.features.concurrent_units:
            assert (await inbox.process(lab.message("outer"), nesting)).processed
            assert await lab.effects() == ["inner"]
            return
        with pytest.raises(NestedProcess, match="wait for itself"):
            await inbox.process(lab.message("outer"), nesting)
        assert (await inbox.process(inner, Recorder(lab))).processed

    async def test_a_connection_lost_while_a_handler_runs_loses_and_doubles_nothing(self, lab: Lab) -> None:
        needs(lab, "network")
        proxy = Proxy(*lab.address)
        async with proxy.running():
            inbox, message = await lab.inbox(store=lab.store_behind(proxy.port)), lab.message()

            async def unlucky(message: Message[Any], tx: Any) -> None:
                await lab.write(tx, message.id)
                proxy.cut()

            first = await cut_off(lab, inbox.process(message, unlucky), StoreUnavailable, CommitUnknown)
            outcome = await inbox.process(message, Recorder(lab))
            assert outcome.kind in ((Kind.DUPLICATE,) if first else (Kind.PROCESSED, Kind.DUPLICATE))
            record = await inbox.get_record(message)
            assert record is not None
            assert (record.state, record.attempts) == (State.PROCESSED, 1)
            assert await lab.effects() == [message.id]
            await inbox.close()

    async def test_a_connection_lost_in_the_handler_is_not_an_attempt(self, lab: Lab) -> None:
        needs(lab, "transactional")
        needs(lab, "network")
        proxy = Proxy(*lab.address)
        async with proxy.running():
            inbox, message = await lab.inbox(store=lab.store_behind(proxy.port)), lab.message()

            async def unlucky(message: Message[Any], tx: Any) -> None:
                await lab.write(tx, message.id)
                proxy.cut()
                await lab.write(tx, "after")

            with pytest.raises(StoreUnavailable) as caught:
                await inbox.process(message, unlucky)
            assert verdict_of(caught.value) is Verdict.PAUSE
            assert await lab.effects() == []
            assert await (await lab.inbox()).get_record(message) is None
            assert (await inbox.process(message, Recorder(lab))).processed, "the pool recovers"
            await inbox.close()

    async def test_a_lost_connection_that_the_handler_swallows_is_not_acknowledged(self, lab: Lab) -> None:
        needs(lab, "transactional")
        needs(lab, "network")
        proxy = Proxy(*lab.address)
        async with proxy.running():
            inbox, message = await lab.inbox(store=lab.store_behind(proxy.port)), lab.message()

            async def careless(message: Message[Any], tx: Any) -> None:
                proxy.cut()
                with pytest.raises(Exception):  # noqa: B017, PT011 - whatever the driver says
                    await lab.write(tx, message.id)

            with pytest.raises(StoreUnavailable):
                await inbox.process(message, careless)
            assert await (await lab.inbox()).get_record(message) is None
            await inbox.close()

    @pytest.mark.parametrize("arrives", [True, False])
    async def test_a_connection_lost_during_commit_is_unknown_and_redelivery_decides(
        self, lab: Lab, arrives: bool
    ) -> None:
        needs(lab, "network")
        proxy = Proxy(*lab.address)
        proxy.deliver = arrives
        async with proxy.running():
            inbox, handler, message = await lab.inbox(store=lab.store_behind(proxy.port)), Recorder(lab), lab.message()

            async def reached(point: str) -> None:
                if point == "before commit":
                    proxy.cut_at = lab.commit_word

            pointed = await lab.inbox(store=lab.store_behind(proxy.port), reached=reached)
            first = await cut_off(lab, pointed.process(message, handler), CommitUnknown)
            assert proxy.was_cut.is_set()
            outcome = await inbox.process(message, handler)
            assert outcome.kind is (Kind.DUPLICATE if arrives or first else Kind.PROCESSED)
            assert outcome.result == {"charged": message.id}
            assert await lab.effects() == [message.id]
            await inbox.close()
            await pointed.close()

    async def test_a_deadlock_is_run_again_without_burning_an_attempt(self, lab: Lab) -> None:
        needs(lab, "transactional")
        needs(lab, "concurrent_units")
        await lab.query("CREATE TABLE accounts (id int PRIMARY KEY, balance int)")
        await lab.query("INSERT INTO accounts VALUES (1, 0), (2, 0)")
        inbox, runs, both_hold_one, other_is_done = await lab.inbox(), [], asyncio.Barrier(2), asyncio.Event()

        def transfer(first: int, second: int) -> Any:
            async def handler(message: Message[Any], tx: Any) -> None:
                runs.append(message.id)
                if len(runs) > 2:
                    await other_is_done.wait()  # or it might be quicker than the other wakes up, and in its way again
                await lab.run(tx, "UPDATE accounts SET balance = balance + 1 WHERE id = $1", first)
                if len(runs) <= 2:
                    await both_hold_one.wait()
                await lab.run(tx, "UPDATE accounts SET balance = balance + 1 WHERE id = $1", second)

            return handler

        async def process(message: Message[Any], handler: Any) -> Any:
            try:
                return await inbox.process(message, handler)
            finally:
                other_is_done.set()

        one, two = lab.message("one"), lab.message("two")
        outcomes = await asyncio.gather(
            process(one, transfer(1, 2)), process(two, transfer(2, 1)), return_exceptions=True
        )
        assert [getattr(outcome, "kind", outcome) for outcome in outcomes] == [Kind.PROCESSED] * 2
        assert len(runs) == 3, "the victim of the deadlock ran again"
        assert await lab.query("SELECT balance FROM accounts") == [(2,), (2,)]
        for message in (one, two):
            record = await inbox.get_record(message)
            assert record is not None
            assert (record.attempts, record.errors) == (1, ())

    async def test_a_second_connection_is_warned_about_by_name(self, lab: Lab) -> None:
        needs(lab, "guards_pool")
        inbox = await lab.inbox()

        async def on_paid(message: Message[Any], tx: Any) -> None:
            async with lab.second_connection(inbox.store) as other:
                await other.execute("SELECT 1")

        with pytest.warns(UserWarning, match="on_paid"):
            assert (await inbox.process(lab.message(), on_paid)).processed

    async def test_a_second_connection_can_be_refused(self, lab: Lab) -> None:
        needs(lab, "guards_pool")
        inbox, message = await lab.inbox(store=lab.store(second_connection="raise")), lab.message()

        async def on_paid(message: Message[Any], tx: Any) -> None:
            async with lab.second_connection(inbox.store) as other:
                await other.execute("INSERT INTO effects VALUES ('stray')")

        with pytest.raises(SecondConnection, match="on_paid"):
            await inbox.process(message, on_paid)
        assert await lab.effects() == []
        async with lab.second_connection(inbox.store) as outside:
            await outside.execute("SELECT 1")

    @pytest.mark.filterwarnings("ignore:the handler")
    async def test_handlers_that_take_a_second_connection_cannot_deadlock_the_pool(self, lab: Lab) -> None:
        needs(lab, "guards_pool")
        needs(lab, "concurrent_units")
        store: Any = lab.store(max_size=2)
        store.driver.watch.timeout = 0.2
        inbox, both = await lab.inbox(store=store), asyncio.Barrier(2)

        async def greedy(message: Message[Any], tx: Any) -> None:
            await both.wait()
            async with lab.second_connection(store):
                pass

        jobs = [inbox.process(lab.message(), greedy) for _ in range(2)]
        results = await asyncio.wait_for(asyncio.gather(*jobs, return_exceptions=True), 10)
        assert all("imeout" in type(result).__name__ for result in results)
        assert (await inbox.process(lab.message(), Recorder(lab))).processed
