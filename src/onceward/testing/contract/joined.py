"""A transaction of the caller's: a claim is a savepoint in it, and it ends as the caller says, together with the rest.

Each case runs with every kind of transaction (`onceward.testing.kinds`) that fits the store's database.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from datetime import timedelta
from typing import Any

import pytest

from onceward import Kind, Message, State, TryLater
from onceward.errors import (
    AlreadyProcessed,
    CommitNotApplied,
    HandlerEndedTransaction,
    MessageDead,
    NestedProcess,
    PayloadMismatch,
    Reject,
    ResultInvalid,
    SchemaMissing,
    TransactionUnusable,
)
from onceward.inbox import Inbox
from onceward.testing.contract.base import Listener, Longest
from onceward.testing.kinds import Caller, place
from onceward.testing.lab import Gate, Lab, Recorder

LATER = Longest(max_attempts=2, base=600.0, cap=600.0)


@contextlib.asynccontextmanager
async def caller_of(lab: Lab, kind: type[Caller]) -> AsyncIterator[Caller]:
    """A caller on the lab's database, in a transaction."""
    async with kind.opened(place(lab)) as caller:
        await caller.begin()
        yield caller


def needs(kind: type[Caller], quality: str, *, wanted: bool = True) -> None:
    if getattr(kind, quality) is not wanted:
        pytest.skip(f"{kind.__name__}: {quality} is {not wanted}")


async def is_known(inbox: Inbox[Any], message: Message[Any]) -> bool:
    """Outside of every transaction."""
    return await inbox.get_record(message) is not None


async def claim_and_write(inbox: Inbox[Any], caller: Caller, message: Message[Any], result: Any = None) -> bool:
    """What users write: whether it was the first."""
    async with inbox.claim(message, tx=caller.tx) as claim:
        if claim.first:
            await caller.write(message.id)
            claim.save(result)
    return claim.first


class JoinedContract:
    """Subclass it with fixtures `lab` and `kind`, a class of onceward.testing.kinds."""

    # --- the claim ------------------------------------------------------------------------------------------

    async def test_a_claim_is_committed_by_the_caller_and_by_nobody_else(self, lab: Lab, kind: type[Caller]) -> None:
        inbox, message = await lab.inbox(), lab.message()
        async with caller_of(lab, kind) as caller:
            await caller.write("before")
            async with inbox.claim(message, tx=caller.tx) as claim:
                assert claim.first
                assert (claim.outcome, claim.record, claim.mismatch) == (None, None, False)
                await caller.write(message.id)
                claim.save({"invoice": 1}, extra={"by": "caller"})
            assert claim.result == {"invoice": 1}
            await caller.write("then")
            assert await lab.effects() == [], "nothing is committed for the caller"
            assert not await is_known(inbox, message)
            await caller.commit()
        assert await lab.effects() == ["before", message.id, "then"]
        other: Inbox[Any] = await lab.inbox()
        record = await other.get_record(message)
        assert record is not None
        assert (record.state, record.attempts, record.result) == (State.PROCESSED, 1, {"invoice": 1})
        assert record.extra == {"by": "caller"}
        async with caller_of(lab, kind) as caller:
            async with other.claim(message, tx=caller.tx) as claim:
                assert not claim.first
            assert claim.outcome is not None
            assert (claim.outcome.kind, claim.result) == (Kind.DUPLICATE, {"invoice": 1})
            assert claim.record == record
            await caller.write("still usable")
            await caller.commit()
        assert "still usable" in await lab.effects()
        again: Any = await other.process(message, Recorder(lab))
        assert (again.duplicate, again.result) == (True, {"invoice": 1})

    async def test_a_claim_goes_with_the_callers_rollback(self, lab: Lab, kind: type[Caller]) -> None:
        inbox, message = await lab.inbox(), lab.message()
        async with caller_of(lab, kind) as caller:
            assert await claim_and_write(inbox, caller, message)
            await caller.rollback()
            assert await lab.effects() == []
            assert not await is_known(inbox, message)
            await caller.begin()
            assert await claim_and_write(inbox, caller, message), "the redelivery is the first again"
            await caller.commit()
        assert await lab.effects() == [message.id]

    async def test_an_error_takes_the_claim_and_its_writes_and_nothing_else(self, lab: Lab, kind: type[Caller]) -> None:
        inbox, message = await lab.inbox(), lab.message()
        async with caller_of(lab, kind) as caller:
            await caller.write("before")
            with pytest.raises(ValueError, match="no"):
                async with inbox.claim(message, tx=caller.tx):
                    await caller.write("inside")
                    raise ValueError("no")
            await caller.write("then")
            await caller.commit()
        assert await lab.effects() == ["before", "then"]
        assert not await is_known(inbox, message)

    async def test_a_claim_inside_a_savepoint_of_the_callers_goes_with_it(self, lab: Lab, kind: type[Caller]) -> None:
        inbox, undone, kept = await lab.inbox(), lab.message("undone"), lab.message("kept")
        async with caller_of(lab, kind) as caller:
            await caller.write("before")
            with pytest.raises(ValueError, match="no"):
                async with caller.savepoint():
                    assert await claim_and_write(inbox, caller, undone, "result")
                    raise ValueError("no")
            async with caller.savepoint():
                assert await claim_and_write(inbox, caller, kept)
            await caller.commit()
        assert await lab.effects() == ["before", "kept"]
        assert not await is_known(inbox, undone)
        assert await is_known(inbox, kept)

    async def test_a_savepoint_inside_the_block_can_be_undone_alone(self, lab: Lab, kind: type[Caller]) -> None:
        inbox, message = await lab.inbox(), lab.message()
        async with caller_of(lab, kind) as caller:
            async with inbox.claim(message, tx=caller.tx):
                await caller.write("kept")
                with pytest.raises(ValueError, match="no"):
                    async with caller.savepoint():
                        await caller.write("undone")
                        raise ValueError("no")
            await caller.commit()
        assert await lab.effects() == ["kept"]
        assert await is_known(inbox, message)

    async def test_several_messages_share_a_transaction(self, lab: Lab, kind: type[Caller]) -> None:
        inbox, one, two = await lab.inbox(), lab.message("one"), lab.message("two")
        async with caller_of(lab, kind) as caller:
            assert await claim_and_write(inbox, caller, one, "first result")
            assert await claim_and_write(inbox, caller, two)
            async with inbox.claim(one, tx=caller.tx) as again:
                assert not again.first
                assert again.result == "first result"
            await caller.commit()
        assert await lab.effects() == ["one", "two"]

    async def test_a_cancelled_block_is_undone_and_the_rest_stands(self, lab: Lab, kind: type[Caller]) -> None:
        inbox, message, inside = await lab.inbox(), lab.message(), asyncio.Event()

        async with caller_of(lab, kind) as caller:

            async def block() -> None:
                async with inbox.claim(message, tx=caller.tx):
                    await caller.write("inside")
                    inside.set()
                    await asyncio.Event().wait()

            await caller.write("before")
            task = asyncio.ensure_future(block())
            await inside.wait()
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            await caller.commit()
        assert await lab.effects() == ["before"]
        assert not await is_known(inbox, message)

    async def test_a_result_that_is_no_json_undoes_the_block(self, lab: Lab, kind: type[Caller]) -> None:
        inbox, message = await lab.inbox(), lab.message()
        async with caller_of(lab, kind) as caller:
            with pytest.raises(ResultInvalid):
                await claim_and_write(inbox, caller, message, object())
            await caller.commit()
        assert await lab.effects() == []
        assert not await is_known(inbox, message)

    # --- process(tx=) ---------------------------------------------------------------------------------------

    async def test_process_runs_the_handler_in_the_callers_transaction(self, lab: Lab, kind: type[Caller]) -> None:
        inbox, other, message, seen = await lab.inbox(), await lab.inbox(), lab.message(), []

        async def handler(message: Message[Any], tx: Any) -> dict[str, str]:
            seen.append(tx)
            await lab.write(tx, message.id)
            return {"charged": message.id}

        async with caller_of(lab, kind) as caller:
            first = await inbox.process(message, handler, tx=caller.tx)
            assert (first.processed, first.result) == (True, {"charged": message.id})
            assert seen == [caller.tx]
            twice = await inbox.process(message, handler, tx=caller.tx)
            assert (twice.duplicate, twice.result) == (True, {"charged": message.id})
            assert await lab.effects() == []
            await caller.commit()
        assert await lab.effects() == [message.id]
        async with caller_of(lab, kind) as caller:
            again = await other.process(message, handler, tx=caller.tx)
            assert (again.duplicate, again.result) == (True, {"charged": message.id})
        assert len(seen) == 1

    async def test_nothing_is_remembered_before_the_caller_commits(self, lab: Lab, kind: type[Caller]) -> None:
        inbox, message, handler = await lab.inbox(), lab.message(), Recorder(lab)
        async with caller_of(lab, kind) as caller:
            assert (await inbox.process(message, handler, tx=caller.tx)).processed
            assert (await inbox.process(message, handler, tx=caller.tx)).duplicate
            await caller.rollback()
        assert (await inbox.process(message, handler)).processed, "what was rolled back is not a duplicate"
        assert handler.runs == [message.id] * 2
        assert await lab.effects() == [message.id]

    async def test_what_is_told_is_what_is_known(self, lab: Lab, kind: type[Caller]) -> None:
        heard = Listener()
        inbox, message = await lab.inbox(listeners=[heard], retry=LATER), lab.message()
        async with caller_of(lab, kind) as caller:
            await inbox.process(message, Recorder(lab), tx=caller.tx)
            assert await claim_and_write(inbox, caller, lab.message())
            with pytest.raises(ValueError, match="no"):
                await inbox.process(lab.message(), Recorder(lab, error=ValueError("no")), tx=caller.tx)
            assert heard == [], "nothing is processed before the caller commits, and a failure is the caller's"
            await caller.commit()
        async with caller_of(lab, kind) as caller:
            await inbox.process(message, Recorder(lab), tx=caller.tx)
            assert not await claim_and_write(inbox, caller, message)
            with pytest.raises(AlreadyProcessed):
                await inbox.mark_processed(message, tx=caller.tx)
        assert heard.names() == ["Duplicate"] * 3
        heard.clear()
        failing = lab.message()
        await inbox.record_failure(failing, ValueError("no"))
        async with caller_of(lab, kind) as caller:
            with pytest.raises(TryLater):
                await inbox.process(failing, Recorder(lab), tx=caller.tx)
            with pytest.raises(TryLater):
                await claim_and_write(inbox, caller, failing)
        assert heard.names() == ["Failed", "Deferred", "Deferred"]

    async def test_a_failure_is_counted_only_when_it_is_told(self, lab: Lab, kind: type[Caller]) -> None:
        inbox, message, error = await lab.inbox(retry=LATER), lab.message(), ValueError("card refused")
        async with caller_of(lab, kind) as caller:
            await caller.write("before")
            with pytest.raises(ValueError, match="card refused") as caught:
                await inbox.process(message, Recorder(lab, error=error), tx=caller.tx)
            assert caught.value is error
            await caller.commit()
        assert await lab.effects() == ["before"]
        assert not await is_known(inbox, message), "deduplication only"

        outcome = await inbox.record_failure(message, error)
        assert (outcome.kind, outcome.attempts, outcome.error) == (Kind.FAILED, 1, error)
        assert outcome.record is not None
        assert outcome.retry_at == outcome.record.next_try_at is not None
        assert outcome.record.payload == message.payload
        async with caller_of(lab, kind) as caller:
            for verb in (claim_and_write(inbox, caller, message), inbox.mark_processed(message, tx=caller.tx)):
                with pytest.raises(TryLater) as later:
                    await verb
                assert (later.value.reason, later.value.retry_at) == ("backoff", outcome.retry_at)
            await caller.write("then")
            await caller.commit()
        assert await lab.effects() == ["before", "then"]

        last = await inbox.record_failure(message, error)
        assert (last.kind, last.attempts) == (Kind.DEAD, 2)
        handler = Recorder(lab)
        async with caller_of(lab, kind) as caller:
            dead = await inbox.process(message, handler, tx=caller.tx)
            async with inbox.claim(message, tx=caller.tx) as claim:
                assert not claim.first
            assert claim.outcome is not None
            assert (dead.kind, claim.outcome.kind, handler.runs) == (Kind.DEAD, Kind.DEAD, [])
            await caller.commit()
        late = await inbox.record_failure(message, error)
        assert (late.kind, late.record and late.record.attempts) == (Kind.DEAD, 2), "it is dead, and stays as it is"

    async def test_a_failed_message_is_taken_over_when_its_time_has_come(self, lab: Lab, kind: type[Caller]) -> None:
        inbox, message = await lab.inbox(retry=LATER), lab.message()
        await inbox.record_failure(message, ValueError("no"))
        await lab.query("UPDATE onceward_records SET next_try_at = received_at")
        async with caller_of(lab, kind) as caller:
            async with inbox.claim(message, tx=caller.tx) as claim:
                assert claim.first
                assert claim.record is not None
                assert (claim.record.state, claim.record.attempts) == (State.FAILED, 1)
            await caller.commit()
        record = await inbox.get_record(message)
        assert record is not None
        assert (record.state, record.attempts, record.payload) == (State.PROCESSED, 2, None)

    async def test_a_reject_is_told_as_a_dead_letter(self, lab: Lab, kind: type[Caller]) -> None:
        inbox, message = await lab.inbox(), lab.message()
        async with caller_of(lab, kind) as caller:
            with pytest.raises(Reject) as caught:
                await inbox.process(message, Recorder(lab, error=Reject("not ours")), tx=caller.tx)
            await caller.rollback()
        assert (await inbox.record_failure(message, caught.value)).kind is Kind.DEAD

    async def test_a_failure_never_overwrites_what_the_caller_committed(self, lab: Lab, kind: type[Caller]) -> None:
        inbox, message = await lab.inbox(), lab.message()
        async with caller_of(lab, kind) as caller:
            assert await claim_and_write(inbox, caller, message, "kept")
            await caller.commit()
        outcome = await inbox.record_failure(message, ValueError("late"))
        assert (outcome.kind, outcome.result) == (Kind.DUPLICATE, "kept")
        assert await inbox.is_processed(message)

    async def test_a_failure_told_before_the_rollback_is_refused(self, lab: Lab, kind: type[Caller]) -> None:
        """The claim is in the way. Saying nothing would lose the count."""
        inbox, message = await lab.inbox(wait=0.05), lab.message()
        async with caller_of(lab, kind) as caller:
            assert await claim_and_write(inbox, caller, message)
            with pytest.raises((TryLater, NestedProcess)):
                await inbox.record_failure(message, ValueError("too early"))
            await caller.rollback()
        assert (await inbox.record_failure(message, ValueError("now"))).attempts == 1

    # --- the pair: is_processed, mark_processed --------------------------------------------------------------

    async def test_is_processed_sees_what_its_transaction_sees(self, lab: Lab, kind: type[Caller]) -> None:
        inbox, message = await lab.inbox(), lab.message()
        async with caller_of(lab, kind) as caller:
            assert not await inbox.is_processed(message, tx=caller.tx)
            await caller.write(message.id)
            await inbox.mark_processed(message, tx=caller.tx)
            assert await inbox.is_processed(message, tx=caller.tx)
            assert not await inbox.is_processed(message), "outside it has not happened"
            await caller.commit()
        assert await inbox.is_processed(message)
        assert await lab.effects() == [message.id]

    async def test_a_failed_or_dead_message_is_not_processed(self, lab: Lab, kind: type[Caller]) -> None:
        inbox, message = await lab.inbox(retry=LATER), lab.message()
        for _ in range(2):
            await inbox.record_failure(message, ValueError("no"))
            async with caller_of(lab, kind) as caller:
                assert not await inbox.is_processed(message, tx=caller.tx)
        async with caller_of(lab, kind) as caller:
            with pytest.raises(MessageDead):
                await inbox.mark_processed(message, tx=caller.tx)
            await caller.write("still usable")
            await caller.commit()
        assert await lab.effects() == ["still usable"]

    async def test_marking_twice_is_an_error(self, lab: Lab, kind: type[Caller]) -> None:
        inbox, message = await lab.inbox(), lab.message()
        async with caller_of(lab, kind) as caller:
            await inbox.mark_processed(message, tx=caller.tx, result="first")
            with pytest.raises(AlreadyProcessed):
                await inbox.mark_processed(message, tx=caller.tx, result="second")
            await caller.commit()
        with pytest.raises(AlreadyProcessed):
            await (await lab.inbox()).mark_processed(message)
        record = await inbox.get_record(message)
        assert record is not None
        assert record.result == "first"

    async def test_of_many_that_looked_first_one_may_mark(self, lab: Lab, kind: type[Caller]) -> None:
        """Everybody sees "not processed". The mark decides, and the others roll back."""
        needs(kind, "many")
        inbox, message, everybody = await lab.inbox(wait=30), lab.message(), asyncio.Barrier(3)

        async def consume(number: int) -> str:
            async with caller_of(lab, kind) as caller:
                seen = await inbox.is_processed(message, tx=caller.tx)
                await caller.rollback()
                await everybody.wait()
                await caller.begin()
                try:
                    await inbox.mark_processed(message, tx=caller.tx)
                    await caller.write(str(number))
                except AlreadyProcessed:
                    await caller.rollback()
                    return f"{seen} late"
                await caller.commit()
                return f"{seen} marked"

        said = await asyncio.gather(*(consume(number) for number in range(3)))
        assert sorted(said) == ["False late", "False late", "False marked"]
        assert len(await lab.effects()) == 1

    async def test_get_record_sees_the_callers_own(self, lab: Lab, kind: type[Caller]) -> None:
        inbox, message = await lab.inbox(), lab.message(source="orders")
        async with caller_of(lab, kind) as caller:
            assert await inbox.get_record(message, tx=caller.tx) is None
            await inbox.mark_processed(message, tx=caller.tx, result=1, extra={"by": "hand"}, origin="orders/0/7")
            record = await inbox.get_record(message, tx=caller.tx)
            assert record is not None
            assert (record.state, record.result, record.extra) == (State.PROCESSED, 1, {"by": "hand"})
            assert (record.source, record.origin, record.type) == ("orders", "orders/0/7", message.type)
            assert await inbox.get_record(record.identity, tx=caller.tx) == record
            assert await inbox.get_record(message) is None
            await caller.rollback()
        assert await inbox.get_record(message) is None

    async def test_a_record_can_have_a_time_of_its_own(self, lab: Lab, kind: type[Caller]) -> None:
        inbox, message = await lab.inbox(), lab.message()
        async with caller_of(lab, kind) as caller:
            async with inbox.claim(message, tx=caller.tx, retention=timedelta(days=1)):
                pass
            record = await inbox.get_record(message, tx=caller.tx)
            await caller.commit()
        assert record is not None
        assert record.expires_at is not None
        assert record.processed_at is not None
        assert abs(record.expires_at - record.processed_at - timedelta(days=1)) < timedelta(seconds=1)

    # --- handles that cannot be used ------------------------------------------------------------------------

    async def test_a_transaction_that_has_failed_is_refused(self, lab: Lab, kind: type[Caller]) -> None:
        needs(kind, "postgres")
        inbox, message = await lab.inbox(), lab.message()
        async with caller_of(lab, kind) as caller:
            with pytest.raises(Exception, match="no_such_table"):
                await caller.run("INSERT INTO no_such_table VALUES (1)")
            for verb in self._verbs(inbox, lab, caller, message):
                with pytest.raises(TransactionUnusable, match="roll it back"):
                    await verb
            await caller.rollback()
            await caller.begin()
            assert await claim_and_write(inbox, caller, message)
            await caller.commit()
        assert await lab.effects() == [message.id]

    async def test_a_closed_handle_is_refused(self, lab: Lab, kind: type[Caller]) -> None:
        inbox, message = await lab.inbox(), lab.message()
        async with kind.opened(place(lab)) as caller:
            if kind.guarded:
                await caller.begin()
            await caller.close()
            for verb in self._verbs(inbox, lab, caller, message):
                with pytest.raises(TransactionUnusable, match=r"closed|over"):
                    await verb
        assert not await is_known(inbox, message)

    async def test_a_handle_without_a_transaction_is_refused(self, lab: Lab, kind: type[Caller]) -> None:
        """RELEASE of an outermost savepoint would commit, and the claim would protect nothing."""
        inbox, message = await lab.inbox(), lab.message()
        async with kind.opened(place(lab)) as caller:
            if not await caller.autocommit():
                pytest.skip(f"{kind.__name__} is always in a transaction")
            with pytest.raises(TransactionUnusable, match="begin one first"):
                await claim_and_write(inbox, caller, message)
            with pytest.raises(TransactionUnusable, match="begin one first"):
                await inbox.process(message, Recorder(lab), tx=caller.tx)
        assert await lab.effects() == []
        assert not await is_known(inbox, message)

    async def test_another_database_is_refused_and_left_usable(
        self, lab: Lab, kind: type[Caller], elsewhere: str
    ) -> None:
        """It has the tables of onceward too, and a table of effects. The claim would protect nothing there."""
        inbox, message = await lab.inbox(), lab.message()
        async with kind.opened(elsewhere) as caller:
            for _ in range(2):
                await caller.begin()
                await caller.write("before")
                for verb in self._verbs(inbox, lab, caller, message):
                    with pytest.raises(TransactionUnusable, match="another database"):
                        await verb
                assert await caller.run("SELECT what FROM effects") == [("before",)], "the transaction is as it was"
                assert await caller.run("SELECT count(*) FROM onceward_records") == [(0,)]
                await caller.rollback()
        assert not await is_known(inbox, message)

    async def test_a_database_without_our_tables_is_refused_and_left_usable(
        self, lab: Lab, kind: type[Caller], empty: str
    ) -> None:
        if kind.guarded:
            pytest.skip(f"{kind.__name__}: a handler's inbox has its tables")
        inbox, message = await lab.inbox(), lab.message()
        async with kind.opened(empty) as caller:
            await caller.begin()
            await caller.run("CREATE TABLE theirs (what text)")
            await caller.run("INSERT INTO theirs VALUES ('before')")
            for verb in self._verbs(inbox, lab, caller, message):
                with pytest.raises(SchemaMissing):
                    await verb
            assert await caller.run("SELECT what FROM theirs") == [("before",)]
            await caller.rollback()

    def _verbs(self, inbox: Inbox[Any], lab: Lab, caller: Caller, message: Message[Any]) -> Any:
        yield claim_and_write(inbox, caller, message)
        yield inbox.process(message, Recorder(lab), tx=caller.tx)
        yield inbox.mark_processed(message, tx=caller.tx)
        yield inbox.is_processed(message, tx=caller.tx)
        yield inbox.get_record(message, tx=caller.tx)

    # --- what the block does to the transaction -------------------------------------------------------------

    @pytest.mark.parametrize(("verb", "result"), [("claim", None), ("process", "a result")])
    async def test_a_swallowed_sql_error_is_never_taken_for_done(
        self, lab: Lab, kind: type[Caller], verb: str, result: Any
    ) -> None:
        inbox, message = await lab.inbox(), lab.message()

        async with caller_of(lab, kind) as caller:

            async def careless(message: Message[Any], tx: Any) -> Any:
                await caller.write("inside")
                with pytest.raises(Exception, match="no_such_table"):
                    await caller.run("INSERT INTO no_such_table VALUES (1)")
                return result

            await caller.write("before")
            doing = self._do(inbox, caller, message, careless, verb)
            if not kind.postgres:
                await doing
                await caller.commit()
                assert await lab.effects() == ["before", "inside"], "there the error undid its statement only"
                return
            with pytest.raises(CommitNotApplied):
                await doing
            await caller.write("then")
            await caller.commit()
        assert await lab.effects() == ["before", "then"]
        assert not await is_known(inbox, message)

    @pytest.mark.parametrize("ending", ["commit", "rollback"])
    @pytest.mark.parametrize(
        ("verb", "then"), [("claim", "returns"), ("process", "raises"), ("claim", "raises"), ("process", "goes on")]
    )
    async def test_a_block_that_ends_the_transaction_is_found_out(
        self, lab: Lab, kind: type[Caller], verb: str, ending: str, then: str
    ) -> None:
        needs(kind, "guarded", wanted=False)
        inbox, message = await lab.inbox(), lab.message()

        async with caller_of(lab, kind) as caller:

            async def meddling(message: Message[Any], tx: Any) -> None:
                await caller.write("inside")
                await getattr(caller, ending)()
                if then == "goes on":
                    await caller.begin()
                    await caller.write("and on")
                    await caller.commit()
                if then == "raises":
                    raise ValueError("and an error on top")

            doing = self._do(inbox, caller, message, meddling, verb)
            if (ending, then) == ("rollback", "raises"):
                with pytest.raises(ValueError, match="on top"):
                    await doing  # nothing stands, and nothing is hidden: it can be run again
                assert not await is_known(inbox, message)
                return
            with pytest.raises((HandlerEndedTransaction, ValueError)) as caught:
                await doing
            assert isinstance(caught.value, HandlerEndedTransaction), "part of it may stand"
        record = await (await lab.inbox()).get_record(message)
        assert record is not None
        assert (record.state, record.errors[-1].type) == (State.DEAD, "HandlerEndedTransaction")
        assert (await inbox.process(message, Recorder(lab))).kind is Kind.DEAD, "a person has to look"

    async def _do(self, inbox: Inbox[Any], caller: Caller, message: Message[Any], handler: Any, verb: str) -> None:
        if verb == "process":
            await inbox.process(message, handler, tx=caller.tx)
            return
        async with inbox.claim(message, tx=caller.tx) as claim:
            claim.save(await handler(message, caller.tx))

    # --- twins ----------------------------------------------------------------------------------------------

    async def test_a_twin_in_flight_is_tried_later(self, lab: Lab, kind: type[Caller]) -> None:
        needs(kind, "many")
        heard = Listener()
        inbox, message = await lab.inbox(wait=0.05, listeners=[heard]), lab.message()
        async with caller_of(lab, kind) as one, caller_of(lab, kind) as two:
            assert await claim_and_write(inbox, one, message)
            handler = Recorder(lab)
            for verb in (
                claim_and_write(inbox, two, message),
                inbox.process(message, handler, tx=two.tx),
                inbox.mark_processed(message, tx=two.tx),
                inbox.process(message, handler),
            ):
                with pytest.raises(TryLater) as caught:
                    await verb
                assert caught.value.reason == ("in_flight" if kind.postgres else "store_busy")
            assert handler.runs == []
            assert heard.names() == ["Deferred"] * 4
            await one.commit()
            assert not await claim_and_write(inbox, two, message), "the transaction is as good as it was"
            await two.commit()
        assert await lab.effects() == [message.id]

    @pytest.mark.parametrize("ending", ["commit", "rollback"])
    async def test_a_twin_in_flight_is_waited_for(self, lab: Lab, kind: type[Caller], ending: str) -> None:
        needs(kind, "many")
        message, tries, tried_again = lab.message(), [], asyncio.Event()

        async def reached(point: str) -> None:
            if point == "before claim":
                tries.append(point)
                if len(tries) > 2:
                    tried_again.set()

        inbox = await lab.inbox(wait=30, reached=reached)
        async with caller_of(lab, kind) as one, caller_of(lab, kind) as two:
            assert await claim_and_write(inbox, one, message, "result")
            second = asyncio.ensure_future(claim_and_write(inbox, two, message))
            await tried_again.wait()
            await getattr(one, ending)()
            assert await second is (ending == "rollback")
            await two.commit()
        assert await lab.effects() == [message.id]

    async def test_a_run_of_an_inbox_is_waited_for(self, lab: Lab, kind: type[Caller]) -> None:
        inbox, message, gate = await lab.inbox(wait=0.05), lab.message(), Gate(lab)
        running = asyncio.ensure_future((await lab.inbox()).process(message, gate))
        await gate.started.wait()
        if kind.many:
            async with caller_of(lab, kind) as caller:
                with pytest.raises(TryLater):
                    await claim_and_write(inbox, caller, message)
        gate.go.set()
        await running
        async with caller_of(lab, kind) as caller:
            assert not await claim_and_write(inbox, caller, message)
        assert await lab.effects() == [message.id]

    # --- options of the inbox -------------------------------------------------------------------------------

    async def test_on_begin_runs_inside_of_the_claim(self, lab: Lab, kind: type[Caller]) -> None:
        seen = []

        async def on_begin(tx: Any, message: Message[Any]) -> None:
            seen.append((tx, message.id))
            await lab.write(tx, "begun")

        inbox, message = await lab.inbox(on_begin=on_begin), lab.message()
        async with caller_of(lab, kind) as caller:
            with pytest.raises(ValueError, match="no"):
                await inbox.process(message, Recorder(lab, error=ValueError("no")), tx=caller.tx)
            assert await claim_and_write(inbox, caller, message)
            assert seen == [(caller.tx, message.id)] * 2
            await caller.commit()
        assert await lab.effects() == ["begun", message.id], "what it wrote for the failed run went with that"

    async def test_another_payload_is_reported(self, lab: Lab, kind: type[Caller]) -> None:
        inbox, strict = await lab.inbox(), await lab.inbox(on_mismatch="raise")
        async with caller_of(lab, kind) as caller:
            assert await claim_and_write(inbox, caller, lab.message("m", payload=1))
            other = lab.message("m", payload=2)
            async with inbox.claim(other, tx=caller.tx) as claim:
                assert (claim.first, claim.mismatch) == (False, True)
            assert (await inbox.process(other, Recorder(lab), tx=caller.tx)).mismatch
            for verb in (claim_and_write(strict, caller, other), strict.process(other, Recorder(lab), tx=caller.tx)):
                with pytest.raises(PayloadMismatch):
                    await verb
            await caller.commit()
        assert await lab.effects() == ["m"]

    async def test_what_was_seen_before_is_adopted(self, lab: Lab, kind: type[Caller]) -> None:
        async def seen_before(tx: Any, message: Message[Any]) -> bool:
            return message.id.startswith("old")

        inbox, handler, old = await lab.inbox(seen_before=seen_before), Recorder(lab), lab.message("old-1")
        async with caller_of(lab, kind) as caller:
            async with inbox.claim(old, tx=caller.tx) as claim:
                assert not claim.first
            assert claim.outcome is not None
            assert claim.outcome.kind is Kind.DUPLICATE
            assert (await inbox.process(lab.message("old-2"), handler, tx=caller.tx)).duplicate
            assert await claim_and_write(inbox, caller, lab.message("new"))
            await caller.commit()
        assert handler.runs == []
        assert await inbox.is_processed(old), "it is adopted with the caller's commit"
        assert await lab.effects() == ["new"]

    async def test_rows_of_the_callers_own_shape_do_not_matter(self, lab: Lab, kind: type[Caller]) -> None:
        inbox, message = await lab.inbox(), lab.message()
        async with caller_of(lab, kind) as caller:
            caller.odd_rows()
            assert await claim_and_write(inbox, caller, message, "result")
            async with inbox.claim(message, tx=caller.tx) as claim:
                assert (claim.first, claim.result) == (False, "result")
            await caller.commit()

    async def test_a_repeatable_read_caller_never_doubles(self, lab: Lab, kind: type[Caller]) -> None:
        """Its snapshot does not show what was committed since. The database says so, and the caller starts again."""
        needs(kind, "postgres")
        needs(kind, "guarded", wanted=False)
        inbox, message, fresh = await lab.inbox(), lab.message(), lab.message()
        async with caller_of(lab, kind) as caller:
            await caller.run("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ")
            await caller.run("SELECT count(*) FROM effects")
            assert (await (await lab.inbox()).process(message, Recorder(lab))).processed
            assert await claim_and_write(inbox, caller, fresh)
            with pytest.raises(Exception, match="could not serialize"):
                await claim_and_write(inbox, caller, message)
            assert await caller.run("SELECT 1") == [(1,)], "only the claim was undone"
            await caller.rollback()
            await caller.begin()
            assert not await claim_and_write(inbox, caller, message)
        assert await lab.effects() == [message.id]

    # --- objects of SQLAlchemy ------------------------------------------------------------------------------

    async def test_objects_of_a_failed_block_are_gone_from_the_session(self, lab: Lab, kind: type[Caller]) -> None:
        needs(kind, "orm")
        effect, inbox, message = effects_model(), await lab.inbox(), lab.message()
        async with caller_of(lab, kind) as caller:
            before = effect(what="before")
            caller.tx.add(before)
            with pytest.raises(ValueError, match="no"):
                async with inbox.claim(message, tx=caller.tx):
                    gone = effect(what="inside")
                    caller.tx.add(gone)
                    raise ValueError("no")
            assert gone not in caller.tx
            assert before in caller.tx
            await caller.commit()
        assert await lab.effects() == ["before"]

    async def test_objects_are_flushed_by_the_end_of_the_claim(self, lab: Lab, kind: type[Caller]) -> None:
        needs(kind, "orm")
        effect, inbox, message = effects_model(), await lab.inbox(), lab.message()
        async with caller_of(lab, kind) as caller:
            async with inbox.claim(message, tx=caller.tx):
                caller.tx.add(effect(what="inside"))
            assert await caller.run("SELECT what FROM effects") == [("inside",)]
            await caller.commit()
        assert await lab.effects() == ["inside"]

    @pytest.mark.parametrize("swallow", [False, True])
    async def test_a_flush_that_fails_undoes_the_block_and_the_session_goes_on(
        self, lab: Lab, kind: type[Caller], swallow: bool
    ) -> None:
        needs(kind, "orm")
        effect, inbox, message = effects_model(), await lab.inbox(), lab.message()
        await lab.query("CREATE UNIQUE INDEX one_of_each ON effects (what)")
        try:
            async with caller_of(lab, kind) as caller:
                await caller.write("taken")
                with pytest.raises(CommitNotApplied if swallow else Exception, match=r"(?i)unique|COMMIT"):
                    async with inbox.claim(message, tx=caller.tx):
                        caller.tx.add(effect(what="taken"))
                        if swallow:
                            with pytest.raises(Exception, match=r"(?i)unique"):
                                await caller.tx.flush()
                await caller.write("then")
                await caller.commit()
        finally:
            await lab.query("DROP INDEX one_of_each")
        assert await lab.effects() == ["taken", "then"]
        assert not await is_known(inbox, message)


def effects_model() -> Any:
    """The table of effects as a class of SQLAlchemy."""
    from sqlalchemy import Column, Text  # noqa: PLC0415 - an extra
    from sqlalchemy.orm import declarative_base  # noqa: PLC0415

    base: Any = declarative_base()

    class Effect(base):  # type: ignore[misc]
        __tablename__ = "effects"
        what = Column(Text, primary_key=True)

    return Effect
