"""Batches: one transaction for many messages, and still one outcome, one attempt and one effect for each."""

from __future__ import annotations

import asyncio
import math
from collections import Counter
from typing import Any

import msgspec
import pytest

from onceward import (
    BulkError,
    Inbox,
    Message,
    Position,
    Reject,
    RetryPolicy,
    Router,
    State,
    TryLater,
    UsageError,
    Verdict,
    current,
    keys,
    tenants,
)
from onceward.errors import (
    CommitNotApplied,
    HandlerEndedTransaction,
    HandlerNotFound,
    InboxClosed,
    InvalidHandler,
    PayloadMismatch,
    PayloadTooLarge,
    ResultInvalid,
    StoreUnavailable,
)
from onceward.outcome import Kind, Outcome
from onceward.testing.contract.base import LATER, Listener, cut_off, has, needs, visible
from onceward.testing.lab import Gate, Lab, Recorder
from onceward.testing.proxy import Proxy


class Order(msgspec.Struct):
    amount: int


class Failing(Recorder):
    """Fails for some ids, as often as is said."""

    def __init__(self, lab: Lab, *ids: str, times: float = math.inf, error: BaseException | None = None) -> None:
        super().__init__(lab)
        self.left = dict.fromkeys(ids, times)
        self.raised = error or ValueError("no")

    async def __call__(self, message: Message[Any], tx: Any) -> dict[str, str]:
        result = await super().__call__(message, tx)
        if self.left.get(message.id, 0) > 0:
            self.left[message.id] -= 1
            raise self.raised
        return result


class Bulk:
    """A bulk handler that writes one effect for each, and fails when one of some ids is there."""

    def __init__(self, lab: Lab, *bad: str) -> None:
        self.lab = lab
        self.bad = set(bad)
        self.calls: list[list[str]] = []

    def check(self, messages: list[Message[Any]]) -> None:
        if any(message.id in self.bad for message in messages):
            raise ValueError("no")

    async def __call__(self, messages: list[Message[Any]], tx: Any) -> list[dict[str, str]]:
        self.calls.append([message.id for message in messages])
        for message in messages:
            await self.lab.write(tx, message.id)
        self.check(messages)
        return [{"charged": message.id} for message in messages]


def kinds(outcomes: list[Outcome[Any]]) -> list[str]:
    return [outcome.kind.value for outcome in outcomes]


async def attempts(inbox: Inbox[Any], message: Message[Any]) -> tuple[State, int] | None:
    record = await inbox.get_record(message)
    return None if record is None else (record.state, record.attempts)


async def cancelled_in_the_middle(inbox: Inbox[Any], lab: Lab, messages: list[Message[Any]]) -> None:
    """Run them in a batch that is cancelled while the handler of the third has written and is still at work."""
    recorder, started = Recorder(lab), asyncio.Event()

    async def slow(message: Message[Any], tx: Any) -> None:
        await recorder(message, tx)
        if message is messages[2]:
            started.set()
            await asyncio.sleep(60)

    task = asyncio.ensure_future(inbox.process_many(messages, slow))
    await started.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def states(lab: Lab) -> Counter[tuple[str, int]]:
    """How many records there are, by state and attempts."""
    return Counter((record["state"], record["attempts"]) for record in await lab.kept())


class BatchContract:
    # --- the plain case -------------------------------------------------------------------------------------

    async def test_a_batch_is_processed_in_the_order_of_arrival(self, lab: Lab) -> None:
        inbox, handler = await lab.inbox(), Recorder(lab)
        messages = [lab.message() for _ in range(20)]
        outcomes = await inbox.process_many(messages, handler)
        ids = [message.id for message in messages]
        assert handler.runs == ids
        assert kinds(outcomes) == ["processed"] * 20
        assert [outcome.result for outcome in outcomes] == [{"charged": id_} for id_ in ids]
        assert [outcome.attempts for outcome in outcomes] == [1] * 20
        assert await lab.effects() == sorted(ids)
        record = await inbox.get_record(messages[7])
        assert record is not None
        assert (record.state, record.attempts, record.result) == (State.PROCESSED, 1, {"charged": ids[7]})
        assert (record.message_id, record.type, record.payload_hash is not None) == (ids[7], "order.paid", True)

    async def test_a_batch_is_one_transaction_with_all_claims_first(self, lab: Lab) -> None:
        needs(lab, "transactional")
        inbox, seen = await lab.inbox(), []

        async def look(message: Message[Any], tx: Any) -> None:
            ((claimed,),) = await lab.run(tx, "SELECT count(*) FROM onceward_records")
            seen.append(claimed)

        await inbox.process_many([lab.message() for _ in range(5)], look)
        assert seen == [5] * 5

    async def test_claims_of_a_batch_are_made_in_the_order_of_their_identities(self, lab: Lab) -> None:
        """Two batches that share messages then meet in the same order, and cannot wait for each other."""
        needs(lab, "transactional")
        inbox, messages = await lab.inbox(), [lab.message() for _ in range(30)]
        await inbox.process_many(messages, lambda message: None)
        order = "ctid" if lab.network else "rowid"
        rows = await lab.query(f"SELECT message_id FROM onceward_records ORDER BY {order}")  # noqa: S608
        expected = sorted(messages, key=lambda message: inbox.identity_of(message).digest)
        assert [row[0] for row in rows] == [message.id for message in expected]

    @pytest.mark.parametrize("seen", [False, True])
    async def test_the_result_of_a_try_that_was_undone_is_forgotten(self, lab: Lab, seen: bool) -> None:
        """Its neighbour failed, so it runs again, and has nothing to say this time."""
        needs(lab, "transactional")
        runs: Counter[str] = Counter()

        async def seen_before(_tx: Any, message: Message[Any]) -> bool:
            return seen and runs[message.id] > 0

        async def answers_once(message: Message[Any]) -> Any:
            runs[message.id] += 1
            if message.id == "bad":
                raise ValueError("no")
            return {"run": 1} if runs[message.id] == 1 else None

        inbox = await lab.inbox(seen_before=seen_before)
        messages = [lab.message(id_) for id_ in ("a", "b", "bad", "d")]
        outcomes = await inbox.process_many(messages, answers_once)
        assert runs["a"] == (1 if seen else 2)
        assert [outcome.result for outcome in outcomes[:2]] == [None, None]
        record = await inbox.get_record(messages[0])
        assert record is not None
        assert record.result is None

    async def test_a_batch_keeps_texts_to_the_letter(self, lab: Lab) -> None:
        """Also those that a database could take for its own signs."""
        inbox = await lab.inbox()
        texts = [
            "NULL",
            "null",
            "{a,b}",
            "a,b",
            "\\",
            '"',
            "'",
            "\\x41",
            '\\"',
            " a ",
            "a\nb",
            "%s",
            ":name",
            "$1",
            "ü\U0001f600",
        ]
        messages = [
            lab.message(text, type=text, source=text, topic=text, stream=text, position=place, tenant=text)
            for place, text in enumerate(texts)
        ]
        origins = [f"from {text}" for text in texts]
        for kind in ("processed", "duplicate"):
            outcomes = await inbox.process_many(messages, lambda message: None, origins=origins)
            assert kinds(outcomes) == [kind] * len(texts)
        for place, (text, message) in enumerate(zip(texts, messages, strict=True)):
            record = await inbox.get_record(message)
            assert record is not None
            kept = (record.message_id, record.type, record.source, record.topic, record.stream, record.tenant)
            assert kept == (text,) * 6
            assert record.position == place

    @pytest.mark.parametrize("alike", [False, True])
    async def test_a_batch_keeps_everything_that_a_single_message_keeps(self, lab: Lab, alike: bool) -> None:
        inbox = await lab.inbox(record_duration=True)
        fields: dict[str, Any] = {
            "source": "shop's \\ \"one\"", "topic": "kafka://orders/7", "stream": "order-1", "position": 7,
            "tenant": "a\tcme",
        }  # fmt: skip
        messages = [lab.message(f"ü{number}\u2028'%s:x", **fields | {"position": number}) for number in range(3)]
        other = messages[2] if alike else lab.message(source="", topic="", type="order.sent")
        await inbox.process(messages[0], Recorder(lab), origin="orders/0/7")
        await inbox.process_many([messages[1], other], Recorder(lab), origins=["orders/0/7", None])
        single, batched, beside = [await inbox.get_record(message) for message in (*messages[:2], other)]
        assert single is not None
        assert batched is not None
        assert beside is not None
        assert (beside.tenant, beside.type, beside.source, beside.topic, beside.origin) == (
            "a\tcme" if alike else "default", other.type, other.source, other.topic, None,
        )  # fmt: skip
        for name in ("scope", "tenant", "type", "source", "topic", "origin", "state", "attempts", "started", "stream"):
            assert getattr(batched, name) == getattr(single, name), name
        assert (batched.message_id, batched.position, batched.key) == (messages[1].id, 1, messages[1].id)
        assert (batched.handler, batched.host, batched.payload_hash) == (
            single.handler, single.host, single.payload_hash,
        )  # fmt: skip
        assert batched.processed_at is not None
        assert batched.duration_ms is not None

    @pytest.mark.parametrize(
        "result", ["a\u0000b", {"deep": [1, None, "\\u0000'"]}, 0, False, "", 12345678901234567890]
    )
    async def test_results_of_a_batch_come_back_to_the_letter(self, lab: Lab, result: Any) -> None:
        messages = [lab.message() for _ in range(3)]

        async def give(message: Message[Any]) -> Any:
            return result

        await (await lab.inbox()).process_many(messages, give)
        outcomes = await (await lab.inbox()).process_many(messages, give)
        assert kinds(outcomes) == ["duplicate"] * 3
        assert [outcome.result for outcome in outcomes] == [result] * 3

    async def test_sync_handlers_and_handlers_without_tx_work_in_batches(self, lab: Lab) -> None:
        inbox = await lab.inbox()

        def plain(message: Message[Any]) -> str:
            return message.id

        def plain_bulk(messages: list[Message[Any]]) -> list[str]:
            return [message.id for message in messages]

        assert [one.result for one in await inbox.process_many([lab.message("a"), lab.message("b")], plain)] == [
            "a",
            "b",
        ]
        assert [one.result for one in await inbox.process_bulk([lab.message("c"), lab.message("d")], plain_bulk)] == [
            "c", "d",
        ]  # fmt: skip

    async def test_an_empty_batch_does_nothing(self, lab: Lab) -> None:
        inbox = await lab.inbox()
        assert await inbox.process_many([], Recorder(lab)) == []
        assert await inbox.process_bulk([], Bulk(lab)) == []

    async def test_what_cannot_be_meant_is_refused_before_anything_runs(self, lab: Lab) -> None:
        inbox, handler = await lab.inbox(), Recorder(lab)
        wrong: Any
        for wrong in (lab.message(), "text", 7, [lab.message(), {"id": "m"}], None):
            with pytest.raises(UsageError):
                await inbox.process_many(wrong, handler)
        with pytest.raises(UsageError, match="origins"):
            await inbox.process_many([lab.message()], handler, origins=[])
        with pytest.raises(InvalidHandler):
            await inbox.process_bulk([lab.message()], lambda: None)
        nothing: Any = None
        with pytest.raises(UsageError):
            await inbox.process_bulk([lab.message()], nothing)
        await inbox.close()
        with pytest.raises(InboxClosed):
            await inbox.process_many([lab.message()], handler)
        assert handler.runs == []

    async def test_a_batch_of_more_than_five_thousand_takes_several_transactions(self, lab: Lab) -> None:
        inbox, sizes = await lab.inbox(), []

        async def note(messages: list[Message[Any]], tx: Any) -> None:
            sizes.append(len(messages))

        outcomes = await inbox.process_bulk([lab.message() for _ in range(5_300)], note)
        assert Counter(kinds(outcomes)) == {"processed": 5_300}
        assert sizes == [5_000, 300]
        assert len(await lab.kept()) == 5_300

    async def test_each_run_in_a_batch_knows_its_own_message(self, lab: Lab) -> None:
        inbox, messages, seen = await lab.inbox(), [lab.message() for _ in range(3)], []

        async def ask(message: Message[Any]) -> None:
            seen.append((current().idempotency_key, current().origin))

        await inbox.process_many(messages, ask, origins=["0/1", "0/2", None])
        expected = [str(inbox.identity_of(message)) for message in messages]
        assert seen == list(zip(expected, ["0/1", "0/2", None], strict=True))
        with pytest.raises(UsageError):
            current()

    async def test_a_bulk_handler_is_told_that_it_has_no_one_identity(self, lab: Lab) -> None:
        inbox, told = await lab.inbox(), []

        async def ask(messages: list[Message[Any]]) -> None:
            with pytest.raises(UsageError, match="identity_of") as caught:
                current()
            told.append(str(caught.value))

        await inbox.process_bulk([lab.message(), lab.message()], ask)
        await inbox.process_bulk([lab.message()], ask)
        assert len(told) == 2, "also when it is called with one"

    async def test_a_second_connection_in_a_batch_is_warned_about_by_name(self, lab: Lab) -> None:
        needs(lab, "guards_pool")
        inbox = await lab.inbox()

        async def on_each(message: Message[Any], tx: Any) -> None:
            async with lab.second_connection(inbox.store) as other:
                await other.execute("SELECT 1")

        async def on_all(messages: list[Message[Any]], tx: Any) -> None:
            await on_each(messages[0], tx)

        for many, handler, name in ((True, on_each, "on_each"), (False, on_all, "on_all")):
            process: Any = inbox.process_many if many else inbox.process_bulk
            with pytest.warns(UserWarning, match=name):
                await process([lab.message(), lab.message()], handler)

    # --- duplicates -----------------------------------------------------------------------------------------

    @pytest.mark.parametrize("path", ["cache", "store"])
    async def test_duplicates_in_a_batch_give_the_first_result(self, lab: Lab, path: str) -> None:
        inbox, handler = await lab.inbox(), Recorder(lab)
        messages = [lab.message() for _ in range(10)]
        await inbox.process_many(messages[:6], handler)
        again = inbox if path == "cache" else await lab.inbox(cache=0)
        for _ in range(8):  # mostly duplicates: from some point on it looks first
            outcomes = await again.process_many(messages[:6], handler)
            assert kinds(outcomes) == ["duplicate"] * 6
        outcomes = await again.process_many(messages, handler)
        assert kinds(outcomes) == ["duplicate"] * 6 + ["processed"] * 4
        assert [outcome.result for outcome in outcomes] == [{"charged": message.id} for message in messages]
        assert handler.runs == [message.id for message in messages]

    async def test_a_look_before_the_claim_never_answers_new(self, lab: Lab) -> None:
        """After many duplicates a batch is looked up first. What is not found there still has to be claimed."""
        inbox, messages, claimed = await lab.inbox(cache=0), [lab.message() for _ in range(6)], []
        await inbox.process_many(messages, Recorder(lab))
        for _ in range(8):
            assert kinds(await inbox.process_many(messages, Recorder(lab))) == ["duplicate"] * 6

        async def look(message: Message[Any], tx: Any) -> None:
            claimed.append(await visible(lab, tx, message.id))

        new = [lab.message() for _ in range(3)]
        outcomes = await inbox.process_many([*messages, *new], look)
        assert kinds(outcomes) == ["duplicate"] * 6 + ["processed"] * 3
        assert claimed == [1, 1, 1]
        assert kinds(await inbox.process_many(new, look)) == ["duplicate"] * 3

    async def test_a_batch_and_single_messages_know_each_other(self, lab: Lab) -> None:
        inbox, other, handler = await lab.inbox(), await lab.inbox(), Recorder(lab)
        one, two = lab.message(), lab.message()
        await inbox.process(one, handler)
        assert kinds(await other.process_many([one, two], handler)) == ["duplicate", "processed"]
        outcome = await inbox.process(two, handler)
        assert (outcome.kind, outcome.result) == (Kind.DUPLICATE, {"charged": two.id})

    @pytest.mark.parametrize("path", ["cache", "store"])
    async def test_another_payload_in_a_batch_is_reported(self, lab: Lab, path: str) -> None:
        inbox, heard = await lab.inbox(), Listener()
        await inbox.process(lab.message("m", payload=1), Recorder(lab))
        again = inbox if path == "cache" else await lab.inbox()
        again.subscribe(heard)
        outcomes = await again.process_many([lab.message("m", payload=2), lab.message()], Recorder(lab))
        assert kinds(outcomes) == ["duplicate", "processed"]
        assert outcomes[0].mismatch
        assert heard[0].mismatch

    @pytest.mark.parametrize("path", ["cache", "store"])
    async def test_another_payload_in_a_batch_is_an_outcome_where_it_would_be_raised(self, lab: Lab, path: str) -> None:
        inbox = await lab.inbox(on_mismatch="raise")
        await inbox.process(lab.message("m", payload=1), Recorder(lab))
        again = inbox if path == "cache" else await lab.inbox(on_mismatch="raise")
        outcomes = await again.process_many([lab.message("m", payload=2), lab.message()], Recorder(lab))
        assert kinds(outcomes) == ["failed", "processed"]
        assert isinstance(outcomes[0].error, PayloadMismatch)
        assert outcomes[0].verdict is Verdict.ACK

    async def test_a_twin_in_a_batch_follows_its_first(self, lab: Lab) -> None:
        inbox, handler, heard = await lab.inbox(), Recorder(lab), Listener()
        inbox.subscribe(heard)
        message, other = lab.message("m"), lab.message()
        outcomes = await inbox.process_many([message, other, message, lab.message("m", payload="new")], handler)
        assert kinds(outcomes) == ["processed", "processed", "duplicate", "duplicate"]
        assert [outcome.result for outcome in outcomes[2:]] == [{"charged": "m"}] * 2
        assert [outcome.mismatch for outcome in outcomes] == [False, False, False, True]
        assert handler.runs == ["m", other.id]
        assert Counter(heard.names()) == {"Processed": 2, "Duplicate": 2, "Batch": 1}

    async def test_a_twin_of_a_failed_one_comes_again(self, lab: Lab) -> None:
        inbox, message, dead = await lab.inbox(), lab.message("m"), lab.message("dead")
        handler = Failing(lab, "m")

        async def reject(message: Message[Any], tx: Any) -> Any:
            if message.id == "dead":
                raise Reject("bad")
            return await handler(message, tx)

        outcomes = await inbox.process_many([message, message, dead, dead], reject)
        assert kinds(outcomes) == ["failed", "busy", "dead", "dead"]
        assert outcomes[1].verdict is Verdict.RETRY
        assert await attempts(inbox, message) == (State.FAILED, 1)

    async def test_a_twin_with_another_payload_is_an_outcome_where_it_would_be_raised(self, lab: Lab) -> None:
        inbox = await lab.inbox(on_mismatch="raise")
        outcomes = await inbox.process_many([lab.message("m", payload=1), lab.message("m", payload=2)], Recorder(lab))
        assert kinds(outcomes) == ["processed", "failed"]
        assert isinstance(outcomes[1].error, PayloadMismatch)
        assert outcomes[1].verdict is Verdict.ACK

    # --- failures -------------------------------------------------------------------------------------------

    async def test_one_of_a_hundred_fails_alone_and_burns_one_attempt(self, lab: Lab) -> None:
        inbox, heard = await lab.inbox(), Listener()
        inbox.subscribe(heard)
        messages = [lab.message(f"{number:02}", stream=f"lane-{number % 10}") for number in range(100)]
        handler = Failing(lab, "42")
        outcomes = await inbox.process_many(messages, handler)
        mates = [number for number in range(43, 100) if number % 10 == 2]
        for number, outcome in enumerate(outcomes):
            expected = Kind.FAILED if number == 42 else Kind.BUSY if number in mates else Kind.PROCESSED
            assert outcome.kind is expected, number
        assert (outcomes[42].error, outcomes[42].attempts) == (handler.raised, 1)
        assert {outcomes[number].verdict for number in (42, *mates)} == {Verdict.RETRY}
        assert await attempts(inbox, messages[42]) == (State.FAILED, 1)
        for number in mates:
            assert await attempts(inbox, messages[number]) is None, "a lane mate has not run and leaves no record"
        assert await states(lab) == {("failed", 1): 1, ("processed", 1): 94}
        assert await lab.effects() == [f"{n:02}" for n in range(100) if n != 42 and n not in mates]
        assert not set(handler.runs) & {f"{number:02}" for number in mates}
        assert Counter(heard.names()) == {"Processed": 94, "Failed": 1, "Deferred": 5, "Batch": 1}
        again = await inbox.process_many(messages, Recorder(lab))
        assert Counter(kinds(again)) == {"duplicate": 94, "processed": 6}

    async def test_a_message_that_fails_only_among_others_burns_no_attempt(self, lab: Lab) -> None:
        needs(lab, "transactional")
        inbox, handler = await lab.inbox(), Failing(lab, "b", times=1)
        messages = [lab.message(id_) for id_ in "abc"]
        outcomes = await inbox.process_many(messages, handler)
        assert kinds(outcomes) == ["processed"] * 3
        assert await attempts(inbox, messages[1]) == (State.PROCESSED, 1)
        assert await lab.effects() == ["a", "b", "c"]

    async def test_many_failures_in_a_batch_burn_one_attempt_each(self, lab: Lab) -> None:
        inbox, messages = await lab.inbox(), [lab.message(f"{number}") for number in range(10)]
        for tries in (1, 2):
            outcomes = await inbox.process_many(messages, Failing(lab, *"13579"))
            assert kinds(outcomes)[1::2] == ["failed"] * 5
            assert {outcome.attempts for outcome in outcomes[1::2]} == {tries}
        for message in messages[1::2]:
            assert await attempts(inbox, message) == (State.FAILED, 2)
        assert await lab.effects() == ["0", "2", "4", "6", "8"]
        assert kinds(await inbox.process_many(messages, Recorder(lab)))[1::2] == ["processed"] * 5
        for message in messages[1::2]:
            assert await attempts(inbox, message) == (State.PROCESSED, 3)

    async def test_two_tenants_may_name_their_lanes_alike(self, lab: Lab) -> None:
        inbox = await lab.inbox(tenant=tenants.header("t"))
        messages = [lab.message(id_, stream="s", headers={"t": id_[0]}) for id_ in ("a1", "b1", "a2", "b2")]
        outcomes = await inbox.process_many(messages, Failing(lab, "a1"))
        assert kinds(outcomes) == ["failed", "processed", "busy", "processed"]

    async def test_a_reject_in_a_batch_is_a_dead_letter_and_harms_nobody(self, lab: Lab) -> None:
        inbox = await lab.inbox()
        messages = [lab.message(id_, stream="s") for id_ in "abc"]
        outcomes = await inbox.process_many(messages, Failing(lab, "b", error=Reject("bad")))
        assert kinds(outcomes) == ["processed", "dead", "processed"], "it is settled, so its lane goes on"
        assert [outcome.verdict for outcome in outcomes] == [Verdict.ACK] * 3
        assert await attempts(inbox, messages[1]) == (State.DEAD, 1)

    async def test_attempts_are_exhausted_in_a_batch_too(self, lab: Lab) -> None:
        inbox, messages = (
            await lab.inbox(retry=RetryPolicy(max_attempts=2, base=0.0)),
            [lab.message(id_) for id_ in "ab"],
        )
        for expected in ("failed", "dead", "dead"):
            outcomes = await inbox.process_many(messages, Failing(lab, "b"))
            assert outcomes[1].kind.value == expected
        assert await attempts(inbox, messages[1]) == (State.DEAD, 2)
        stricter = await lab.inbox(retry=RetryPolicy(max_attempts=1))
        failed = [lab.message(id_) for id_ in "cd"]
        await inbox.process_many(failed, Failing(lab, "d"))
        outcomes = await stricter.process_many([lab.message(), *failed, lab.message()], Recorder(lab))
        assert kinds(outcomes) == ["processed", "duplicate", "dead", "processed"]

    async def test_a_message_that_waits_for_its_next_try_stops_its_lane_only(self, lab: Lab) -> None:
        inbox = await lab.inbox(retry=LATER)
        waiting = lab.message("w", stream="s")
        with pytest.raises(ValueError, match="no"):
            await inbox.process(waiting, Recorder(lab, error=ValueError("no")))
        handler = Recorder(lab)
        batch = [lab.message("a", stream="s"), waiting, lab.message("b", stream="s"), lab.message("c")]
        outcomes = await inbox.process_many(batch, handler)
        assert kinds(outcomes) == ["processed", "busy", "busy", "processed"]
        later = outcomes[1].error
        assert isinstance(later, TryLater)
        assert (later.reason, outcomes[1].retry_at) == ("backoff", later.retry_at)
        assert later.retry_at is not None
        assert outcomes[1].verdict is Verdict.RETRY
        assert handler.runs == ["a", "c"]
        assert await attempts(inbox, batch[2]) is None, "its claim is removed again"
        assert await attempts(inbox, waiting) == (State.FAILED, 1)

    async def test_a_message_that_failed_before_runs_in_a_batch_when_it_may(self, lab: Lab) -> None:
        inbox, failed = await lab.inbox(), lab.message("f", payload=1)
        with pytest.raises(ValueError, match="no"):
            await inbox.process(failed, Recorder(lab, error=ValueError("no")))
        outcomes = await inbox.process_many([lab.message(), lab.message("f", payload=2)], Recorder(lab))
        assert kinds(outcomes) == ["processed", "processed"]
        assert (outcomes[1].attempts, outcomes[1].mismatch) == (2, True)
        record = await inbox.get_record(failed)
        assert record is not None
        assert (record.state, record.attempts, record.payload, record.result) == (
            State.PROCESSED, 2, None, {"charged": "f"},
        )  # fmt: skip

    async def test_a_result_that_is_no_json_fails_its_message_only(self, lab: Lab) -> None:
        async def give(message: Message[Any], tx: Any) -> Any:
            await lab.write(tx, message.id)
            return object() if message.id == "b" else None

        async def give_all(messages: list[Message[Any]], tx: Any) -> Any:
            return [await give(message, tx) for message in messages]

        inbox = await lab.inbox()
        for process, handler in ((inbox.process_many, give), (inbox.process_bulk, give_all)):
            messages = [lab.message("a"), lab.message("b"), lab.message("c")]
            outcomes = await process(messages, handler)
            assert outcomes[1].kind is Kind.FAILED
            assert isinstance(outcomes[1].error, ResultInvalid)
        assert await lab.effects() == ["a", "c"]

    async def test_a_handler_that_changes_its_payload_finds_it_as_it_came_in_every_run(self, lab: Lab) -> None:
        seen: list[tuple[str, Any]] = []

        async def popping(message: Message[Any], tx: Any) -> None:
            seen.append((message.id, message.payload.pop("amount")))
            if message.id == "b":
                raise ValueError("no")

        inbox = await lab.inbox()
        outcomes = await inbox.process_many([lab.message(id_) for id_ in "abc"], popping)
        assert kinds(outcomes) == ["processed", "failed", "processed"]
        assert {amount for _, amount in seen} == {7}

    # --- what cannot run ------------------------------------------------------------------------------------

    async def test_a_message_that_cannot_be_kept_is_an_outcome_in_a_batch(self, lab: Lab) -> None:
        inbox, heard = await lab.inbox(max_payload=100, key=keys.field("key")), Listener()
        inbox.subscribe(heard)
        big = lab.message(payload={"key": 1, "text": "x" * 200})
        keyless = lab.message(payload={"no": "key"})
        good = [lab.message(payload={"key": number}) for number in (2, 3)]
        outcomes = await inbox.process_many([good[0], big, keyless, good[1]], Recorder(lab))
        assert kinds(outcomes) == ["processed", "failed", "failed", "processed"]
        assert isinstance(outcomes[1].error, PayloadTooLarge)
        assert [outcome.verdict for outcome in outcomes] == [Verdict.ACK, Verdict.REJECT, Verdict.REJECT, Verdict.ACK]
        assert Counter(heard.names()) == {"Processed": 2, "Refused": 2, "Batch": 1}

    async def test_a_message_whose_key_cannot_be_made_is_not_overtaken_in_its_lane(self, lab: Lab) -> None:
        def key(message: Message[Any]) -> str:
            if message.id == "bad":
                raise ValueError("no key")
            return message.id

        inbox, handler = await lab.inbox(key=key), Recorder(lab)
        messages = [lab.message(name, stream=stream) for name, stream in (("bad", "s"), ("b", "s"), ("c", "t"))]
        outcomes = await inbox.process_many(messages, handler)
        assert [outcome.verdict for outcome in outcomes] == [Verdict.RETRY, Verdict.RETRY, Verdict.ACK]
        assert handler.runs == ["c"]

    async def test_types_in_a_batch_find_their_handlers(self, lab: Lab) -> None:
        router, runs = Router(), list[Any]()

        @router.handler("order.paid", payload=Order, key=keys.field("amount"))
        async def on_paid(message: Message[Order]) -> str:
            runs.append(message.payload.amount)
            return "paid"

        @router.handler("order.sent")
        def on_sent(message: Message[Any], tx: Any) -> str:
            runs.append(message.id)
            return "sent"

        def batch() -> list[Message[Any]]:
            return [
                lab.message(type="order.paid", payload={"amount": 1}),
                lab.message("s", type="order.sent"),
                lab.message(type="order.lost", stream="s"),
                lab.message(type="order.paid", payload={"amount": "much"}),
                lab.message(type="order.paid", payload={"amount": 1}),
                lab.message(type="order.sent", stream="s"),
            ]

        raising = await lab.inbox(handlers=[router])
        outcomes = await raising.process_many(batch())
        assert kinds(outcomes) == ["processed", "processed", "failed", "dead", "duplicate", "busy"]
        assert isinstance(outcomes[2].error, HandlerNotFound)
        assert outcomes[2].verdict is Verdict.STOP
        assert [outcomes[place].result for place in (0, 1, 4)] == ["paid", "sent", "paid"]
        assert list(dict.fromkeys(runs)) == [1, "s"]
        ignoring = await lab.inbox(handlers=[router], unhandled="ignore", consumer="other")
        outcomes = await ignoring.process_many(batch())
        assert kinds(outcomes) == ["processed", "processed", "ignored", "dead", "duplicate", "processed"]
        burying = await lab.inbox(handlers=[router], unhandled="dead", consumer="third")
        assert kinds(await burying.process_many(batch()))[2] == "dead"

    async def test_seen_before_is_asked_for_each_of_a_batch(self, lab: Lab) -> None:
        async def seen_before(tx: Any, message: Message[Any]) -> bool:
            return message.id.startswith("old")

        for process in ("process_many", "process_bulk"):
            inbox = await lab.inbox(seen_before=seen_before, consumer=process)
            handler: Any = Recorder(lab) if process == "process_many" else Bulk(lab)
            batch = [lab.message("old-1"), lab.message("new-1"), lab.message("old-2")]
            assert kinds(await getattr(inbox, process)(batch, handler)) == ["duplicate", "processed", "duplicate"]
            assert kinds(await getattr(inbox, process)(batch, handler)) == ["duplicate"] * 3
        assert await lab.effects() == ["new-1", "new-1"]

    async def test_a_dependency_in_the_batch_counts_once_it_has_run(self, lab: Lab) -> None:
        """All of a batch are claimed as processed at its beginning. That must not satisfy what waits for them."""
        needs(lab, "positions")
        inbox, handler = await lab.inbox(), Recorder(lab)

        def at(position: int, *needs: int) -> Message[Any]:
            depends = tuple(Position("s", needed) for needed in needs)
            return lab.message(f"p{position}", topic=f"t{position}", stream="s", position=position, depends_on=depends)

        lanes = await lab.inbox(lane=lambda message: message.topic, consumer="topics")
        outcomes = await lanes.process_many([at(2, 1), at(1), at(3, 1), at(4, 2)], handler)
        assert kinds(outcomes) == ["busy", "processed", "processed", "busy"]
        blocked = outcomes[0].error
        assert isinstance(blocked, TryLater)
        assert blocked.reason == "blocked"
        assert handler.runs == ["p1", "p3"]
        assert await attempts(lanes, at(2, 1)) is None
        outcomes = await lanes.process_many([at(2, 1), at(4, 2)], handler)
        assert kinds(outcomes) == ["processed", "processed"]
        bulk = Bulk(lab)
        outcomes = await inbox.process_bulk([at(1), at(2, 1), at(3, 9), at(4)], bulk)
        assert kinds(outcomes) == ["processed", "processed", "busy", "busy"]
        assert bulk.calls == [["p1", "p2"]]

    async def test_each_of_a_batch_runs_after_the_on_begin_of_its_own_tenant(self, lab: Lab) -> None:
        begun: list[str | None] = []
        ran: list[tuple[str | None, str | None]] = []

        async def on_begin(tx: Any, message: Message[Any]) -> None:
            begun.append(message.tenant)

        async def look(message: Message[Any]) -> None:
            ran.append((message.tenant, begun[-1]))

        inbox = await lab.inbox(on_begin=on_begin, tenant=tenants.header("t"))
        messages = [lab.message(headers={"t": tenant}) for tenant in "abab"]
        assert kinds(await inbox.process_many(messages, look)) == ["processed"] * 4
        assert sorted(ran) == [("a", "a"), ("a", "a"), ("b", "b"), ("b", "b")]

    async def test_each_tenant_has_its_own_transaction_where_on_begin_is_set(self, lab: Lab) -> None:
        needs(lab, "transactional")
        begun: list[str | None] = []
        together: list[tuple[str | None, int]] = []

        async def on_begin(tx: Any, message: Message[Any]) -> None:
            begun.append(message.tenant)
            await lab.write(tx, f"begin {message.tenant}")

        async def look(message: Message[Any], tx: Any) -> None:
            ((count,),) = await lab.run(tx, "SELECT count(*) FROM onceward_records WHERE tenant = $1", message.tenant)
            together.append((message.tenant, count))

        inbox = await lab.inbox(on_begin=on_begin, tenant=tenants.header("t"))
        messages = [lab.message(headers={"t": tenant}) for tenant in "abab"]
        assert kinds(await inbox.process_many(messages, look)) == ["processed"] * 4
        assert begun == ["a", "b"]
        assert together == [("a", 2), ("a", 2), ("b", 2), ("b", 2)]
        assert await lab.effects() == ["begin a", "begin b"]

    async def test_claims_of_a_batch_are_told_from_duplicates_in_a_savepoint_too(self, lab: Lab) -> None:
        """What is new is neither taken for a duplicate of itself, nor a duplicate for new."""
        needs(lab, "transactional")
        needs(lab, "errors_abort")

        async def on_begin(tx: Any, message: Message[Any]) -> None:
            await lab.run(tx, "SAVEPOINT left_open")

        handler = Recorder(lab)
        inbox = await lab.inbox(on_begin=on_begin, cache=0)
        known = [lab.message(str(number)) for number in range(3)]
        assert kinds(await inbox.process_many(known, handler)) == ["processed"] * 3
        fresh = [lab.message(f"new {number}") for number in range(3)]
        mixed = [message for pair in zip(known, fresh, strict=True) for message in pair]
        assert kinds(await inbox.process_many(mixed, handler)) == ["duplicate", "processed"] * 3
        assert sorted(await lab.effects()) == sorted(message.id for message in (*known, *fresh))

    async def test_an_on_begin_that_fails_harms_its_own_tenant_only(self, lab: Lab) -> None:
        async def on_begin(tx: Any, message: Message[Any]) -> None:
            if message.tenant == "a":
                raise LookupError("no such tenant")

        inbox = await lab.inbox(on_begin=on_begin, tenant=tenants.header("t"))
        messages = [lab.message(headers={"t": tenant}) for tenant in "abab"]
        outcomes = await inbox.process_many(messages, Recorder(lab))
        assert kinds(outcomes) == ["failed", "processed", "failed", "processed"]
        assert isinstance(outcomes[0].error, LookupError)
        assert outcomes[0].verdict is Verdict.RETRY

    # --- in flight ------------------------------------------------------------------------------------------

    async def test_what_is_in_flight_elsewhere_comes_again_and_delays_nobody(self, lab: Lab) -> None:
        needs(lab, "concurrent_units")
        gate, handler, message = Gate(lab), Recorder(lab), lab.message("m", stream="s")
        one, two = await lab.inbox(), await lab.inbox(wait=0.3)
        first = asyncio.ensure_future(one.process(message, gate))
        await gate.started.wait()
        batch = [lab.message("a", stream="s"), message, lab.message("b", stream="s"), lab.message("c")]
        outcomes = await asyncio.wait_for(two.process_many(batch, handler), 5)
        assert kinds(outcomes) == ["processed", "busy", "busy", "processed"]
        later = outcomes[1].error
        assert isinstance(later, TryLater), "neither new nor a duplicate"
        assert later.reason == "in_flight"
        assert handler.runs == ["a", "c"]
        gate.go.set()
        assert (await first).processed
        assert kinds(await two.process_many(batch, handler)) == ["duplicate", "duplicate", "processed", "duplicate"]
        assert await lab.effects() == ["a", "b", "c", "m"]

    async def test_a_twin_of_a_batch_elsewhere_is_waited_for_without_a_connection(self, lab: Lab) -> None:
        needs(lab, "concurrent_units")
        gate, handler, message = Gate(lab), Recorder(lab), lab.message("m", stream="s")
        one, two = await lab.inbox(), await lab.inbox(store=lab.store(max_size=1), wait=20)
        first = asyncio.ensure_future(one.process(message, gate))
        await gate.started.wait()
        batch = [message, lab.message("b", stream="s"), lab.message("c")]
        second = asyncio.ensure_future(two.process_many(batch, handler))
        while await lab.effects() != ["c"]:  # noqa: ASYNC110 - a transaction elsewhere
            await asyncio.sleep(0.01)
        assert (await asyncio.wait_for(two.process(lab.message("d"), handler), 5)).processed
        assert not second.done()
        gate.go.set()
        assert (await first).processed
        outcomes = await second
        assert kinds(outcomes) == ["duplicate", "processed", "processed"]
        assert outcomes[0].result == {"charged": "m"}
        assert handler.runs == ["c", "d", "b"]

    async def test_batches_and_single_messages_of_one_process_wait_for_each_other(self, lab: Lab) -> None:
        inbox, gate, handler, message = await lab.inbox(), Gate(lab), Recorder(lab), lab.message("m")
        batch = asyncio.ensure_future(inbox.process_many([message, lab.message("n")], gate))
        await gate.started.wait()
        single = asyncio.ensure_future(inbox.process(message, handler))
        other = asyncio.ensure_future(inbox.process_many([message, lab.message("o")], handler))
        await asyncio.sleep(0.05)
        assert not single.done()
        gate.go.set()
        assert kinds(await batch) == ["processed", "processed"]
        assert (await single).duplicate
        assert kinds(await other) == ["duplicate", "processed"]
        assert handler.runs == ["o"]
        assert await lab.effects() == ["m", "n", "o"]

    async def test_overlapping_batches_run_each_message_once(self, lab: Lab) -> None:
        inboxes = [await lab.inbox(wait=30, cache=0) for _ in range(2)]
        handler, ids = Recorder(lab), [f"{number:02}" for number in range(40)]
        jobs = []
        for number in range(12):
            turned = ids[number * 3 :] + ids[: number * 3]
            batch = [lab.message(id_) for id_ in (turned if number % 2 else turned[::-1])]
            jobs.append(inboxes[number % 2].process_many(batch, handler))
        results = await asyncio.wait_for(asyncio.gather(*jobs), 60)
        counted = Counter(kind for outcomes in results for kind in kinds(outcomes))
        if has(lab, "claim_marks"):  # where the machine stood still for a moment, a lease is lost, and it comes again
            batch = [lab.message(id_) for id_ in ids]
            assert set(kinds(await inboxes[0].process_many(batch, handler))) <= {"processed", "duplicate"}
        else:
            assert counted == {"processed": 40, "duplicate": 440}
        assert await lab.effects() == ids

    # --- the transaction ------------------------------------------------------------------------------------

    async def test_a_swallowed_sql_error_in_a_batch_is_found_and_harms_nobody(self, lab: Lab) -> None:
        needs(lab, "transactional")

        async def careless(message: Message[Any], tx: Any) -> str:
            await lab.write(tx, message.id)
            if message.id == "3":
                with pytest.raises(Exception, match="no_such_table"):
                    await lab.run(tx, "INSERT INTO no_such_table VALUES (1)")
            return "result"

        inbox = await lab.inbox()
        messages = [lab.message(f"{number}") for number in range(8)]
        outcomes = await inbox.process_many(messages, careless)
        if not inbox.store.features.errors_abort:
            assert kinds(outcomes) == ["processed"] * 8
            return
        assert kinds(outcomes) == ["failed" if number == 3 else "processed" for number in range(8)]
        assert isinstance(outcomes[3].error, CommitNotApplied)
        assert outcomes[3].verdict is Verdict.PAUSE
        assert await lab.effects() == [f"{number}" for number in range(8) if number != 3]
        assert await inbox.get_record(messages[3]) is None
        for number in (2, 4):
            assert await attempts(inbox, messages[number]) == (State.PROCESSED, 1)

    @pytest.mark.parametrize("then", ["returns", "swallows", "raises"])
    @pytest.mark.parametrize("ending", ["COMMIT", "ROLLBACK", "COMMIT; BEGIN", "ROLLBACK; BEGIN"])
    async def test_a_handler_that_ends_the_transaction_of_a_batch_loses_and_doubles_nothing(
        self, lab: Lab, ending: str, then: str
    ) -> None:
        """COMMIT in the middle commits the claims of all, also of those that have not run."""
        needs(lab, "transactional")
        if ";" in ending:
            needs(lab, "multiple_statements")
        runs: list[str] = []

        async def meddling(message: Message[Any], tx: Any) -> str:
            runs.append(message.id)
            await lab.write(tx, message.id)
            if message.id == "3":
                try:
                    await lab.run(tx, ending)
                except HandlerEndedTransaction:
                    if then == "returns":
                        raise
                if then == "raises":
                    raise ValueError("and an error on top")
            return f"result of {message.id}"

        inbox, heard = await lab.inbox(), Listener()
        inbox.subscribe(heard)
        messages = [lab.message(f"{number}", stream=f"lane-{number % 4}") for number in range(8)]
        outcomes = await inbox.process_many(messages, meddling)
        assert outcomes[3].kind is Kind.FAILED
        assert isinstance(outcomes[3].error, HandlerEndedTransaction)
        assert outcomes[3].verdict is Verdict.RETRY
        assert await attempts(inbox, messages[3]) in ((State.DEAD, 0), (State.DEAD, 1))
        assert "Dead" in heard.names()
        effects = Counter(await lab.effects())
        states = [await attempts(inbox, message) for message in messages]
        again = await (await lab.inbox()).process_many(messages, Recorder(lab))
        assert again[3].kind is Kind.DEAD
        for number, outcome in enumerate(outcomes):
            if number == 3:
                continue
            if outcome.kind is Kind.PROCESSED:
                assert effects[str(number)] == 1, "nothing is doubled"
                assert (again[number].kind, again[number].result) == (Kind.DUPLICATE, f"result of {number}")
            elif outcome.kind is Kind.BUSY:
                assert (effects[str(number)], states[number]) == (0, None), "nothing is lost"
                assert again[number].kind is Kind.PROCESSED
            else:
                # It began another transaction, so nobody can know what became of those that ran with it.
                assert ending == "COMMIT; BEGIN"
                assert isinstance(outcome.error, HandlerEndedTransaction)
                assert effects[str(number)] <= 1
                assert states[number] in ((State.DEAD, 0), (State.DEAD, 1))
        if ending != "COMMIT; BEGIN":
            assert Counter(kinds(outcomes)) == {"processed": 6, "failed": 1, "busy": 1}

    @pytest.mark.parametrize("pause", [0.0, 0.001, 0.002])
    async def test_a_batch_cancelled_twice_after_a_handler_committed_is_repaired(self, lab: Lab, pause: float) -> None:
        needs(lab, "transactional")
        needs(lab, "multiple_statements")
        inbox, committed = await lab.inbox(), asyncio.Event()

        async def committing(message: Message[Any], tx: Any) -> None:
            await lab.write(tx, message.id)
            if message.id == "b":
                await lab.run(tx, "COMMIT; BEGIN")
                committed.set()
                await asyncio.sleep(10)

        messages = [lab.message(name) for name in "abcd"]
        running = asyncio.ensure_future(inbox.process_many(messages, committing))
        await committed.wait()
        running.cancel()
        await asyncio.sleep(pause)
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        outcomes = await inbox.process_many(messages, Recorder(lab))
        assert [outcome.kind.value for outcome in outcomes[2:]] == ["processed", "processed"]
        assert await lab.effects() == ["a", "b", "c", "d"]

    async def test_a_cancelled_batch_leaves_nothing(self, lab: Lab) -> None:
        needs(lab, "transactional")
        inbox, messages = await lab.inbox(), [lab.message(f"{number}") for number in range(5)]
        await cancelled_in_the_middle(inbox, lab, messages)
        assert await lab.effects() == []
        assert await lab.kept() == []
        assert kinds(await inbox.process_many(messages, Recorder(lab))) == ["processed"] * 5

    async def test_a_cancelled_batch_loses_and_doubles_nothing(self, lab: Lab) -> None:
        """Where each of a batch ends by itself, those before the cancellation stand."""
        inbox, messages = await lab.inbox(), [lab.message(f"{number}") for number in range(5)]
        await cancelled_in_the_middle(inbox, lab, messages)
        assert set(await states(lab)) <= {("processed", 1), ("failed", 0)}
        assert set(await lab.effects()) <= {"0", "1"}
        assert {record["started"] for record in await lab.kept()} <= {0}
        outcomes = await inbox.process_many(messages, Recorder(lab))
        assert kinds(outcomes)[2:] == ["processed"] * 3
        assert await states(lab) == {("processed", 1): 5}
        assert await lab.effects() == ["0", "1", "2", "3", "4"]

    async def test_a_connection_lost_in_a_batch_loses_and_doubles_nothing(self, lab: Lab) -> None:
        """Where each of a batch ends by itself, those before it stand; of the one that was cut nobody may know."""
        needs(lab, "network")
        proxy = Proxy(*lab.address)
        async with proxy.running():
            inbox = await lab.inbox(store=lab.store_behind(proxy.port))

            async def unlucky(message: Message[Any], tx: Any) -> None:
                await lab.write(tx, message.id)
                if message.id == "2":
                    proxy.cut()

            messages = [lab.message(f"{number}") for number in range(5)]
            await cut_off(lab, inbox.process_many(messages, unlucky), StoreUnavailable)
            outcomes = await inbox.process_many(messages, Recorder(lab))
            assert set(kinds(outcomes)) <= {"processed", "duplicate"}
            assert await states(lab) == {("processed", 1): 5}
            assert await lab.effects() == ["0", "1", "2", "3", "4"]
            await inbox.close()

    async def test_a_connection_lost_in_a_batch_is_raised_and_nobody_burns_an_attempt(self, lab: Lab) -> None:
        needs(lab, "transactional")
        needs(lab, "network")
        proxy = Proxy(*lab.address)
        async with proxy.running():
            inbox, heard = await lab.inbox(store=lab.store_behind(proxy.port)), Listener()
            inbox.subscribe(heard)
            for swallow in (False, True):

                async def unlucky(message: Message[Any], tx: Any, swallow: bool = swallow) -> None:
                    await lab.write(tx, message.id)
                    if message.id.endswith("2"):
                        proxy.cut()
                        try:
                            await lab.write(tx, "after")
                        except Exception:
                            if not swallow:
                                raise

                messages = [lab.message(f"{number}") for number in range(5)]
                with pytest.raises(StoreUnavailable):
                    await inbox.process_many(messages, unlucky)
                assert await lab.effects() == []
                assert await lab.kept() == []
            assert set(heard.names()) == {"Unsettled", "Batch"}
            assert kinds(await inbox.process_many(messages, Recorder(lab))) == ["processed"] * 5
            await inbox.close()

    async def test_a_deadlock_runs_a_batch_again_without_burning_an_attempt(self, lab: Lab) -> None:
        needs(lab, "transactional")
        needs(lab, "concurrent_units")
        await lab.query("CREATE TABLE accounts (id int PRIMARY KEY, balance int)")
        await lab.query("INSERT INTO accounts VALUES (1, 0), (2, 0)")
        inbox, both, met = await lab.inbox(), asyncio.Barrier(2), list[str]()

        async def add(message: Message[Any], tx: Any) -> None:
            await lab.run(tx, "UPDATE accounts SET balance = balance + 1 WHERE id = $1", message.payload)
            if len(met) < 2:
                met.append(message.id)
                await both.wait()

        batches = [[lab.message(payload=1), lab.message(payload=2)], [lab.message(payload=2), lab.message(payload=1)]]
        results = await asyncio.gather(*(inbox.process_many(batch, add) for batch in batches))
        assert [kinds(outcomes) for outcomes in results] == [["processed"] * 2] * 2
        assert await lab.query("SELECT balance FROM accounts") == [(2,), (2,)]
        assert await states(lab) == {("processed", 1): 4}

    async def test_a_commit_that_is_refused_is_traced_to_its_message(self, lab: Lab) -> None:
        """A deferred constraint speaks at COMMIT, when nobody knows whose row it was."""
        needs(lab, "transactional")
        await lab.query("CREATE TABLE parents (id int PRIMARY KEY)")
        await lab.query("CREATE TABLE children (parent int REFERENCES parents (id) DEFERRABLE INITIALLY DEFERRED)")
        await lab.query("INSERT INTO parents VALUES (1)")

        async def adopt(message: Message[Any], tx: Any) -> None:
            await lab.run(tx, "INSERT INTO children VALUES ($1)", message.payload)

        inbox = await lab.inbox()
        messages = [lab.message(f"{number}", payload=2 if number == 5 else 1) for number in range(9)]
        outcomes = await inbox.process_many(messages, adopt)
        assert kinds(outcomes) == ["failed" if number == 5 else "processed" for number in range(9)]
        assert await attempts(inbox, messages[5]) == (State.FAILED, 1)
        assert await lab.query("SELECT count(*) FROM children") == [(8,)]

    async def test_redelivered_batches_mark_their_starts_one_by_one(self, lab: Lab) -> None:
        inbox, marks = await lab.inbox(retry=RetryPolicy(max_attempts=3, base=0.0)), []

        async def look(message: Message[Any]) -> None:
            marks.append([record["message_id"] for record in await lab.kept() if record["started"] > 0])
            if message.id == "b":
                raise ValueError("no")

        messages = [lab.message(id_, stream="s" if id_ in "bc" else None) for id_ in "abcd"]
        outcomes = await inbox.process_many(messages, look, redelivered=True)
        assert kinds(outcomes) == ["processed", "failed", "busy", "processed"]
        assert marks == [["a"], ["b"], ["d"]], "a message that kills the process leaves its own mark only"

    # --- bulk -----------------------------------------------------------------------------------------------

    async def test_a_bulk_handler_gets_what_is_new_in_the_order_of_arrival(self, lab: Lab) -> None:
        needs(lab, "bulk_tx")
        inbox, bulk = await lab.inbox(), Bulk(lab)
        messages = [lab.message() for _ in range(6)]
        await inbox.process_many(messages[1:3], Recorder(lab))
        outcomes = await inbox.process_bulk([*messages, messages[5]], bulk)
        ids = [message.id for message in messages]
        assert bulk.calls == [[ids[0], *ids[3:]]]
        assert kinds(outcomes) == ["processed", "duplicate", "duplicate", *["processed"] * 3, "duplicate"]
        assert [outcome.result for outcome in outcomes] == [{"charged": id_} for id_ in [*ids, ids[5]]]
        again = await (await lab.inbox()).process_bulk(messages, bulk)
        assert [outcome.result for outcome in again] == [{"charged": id_} for id_ in ids]
        assert len(bulk.calls) == 1

    async def test_a_bulk_handler_gets_its_payload_model(self, lab: Lab) -> None:
        inbox, seen = await lab.inbox(), []

        async def charge(messages: list[Message[Order]], tx: Any) -> list[Order]:
            seen.append([message.payload.amount for message in messages])
            return [message.payload for message in messages]

        wrong = lab.message(payload={"amount": "much"})
        messages = [lab.message(payload={"amount": 1}), wrong, lab.message(payload={"amount": 3})]
        outcomes = await inbox.process_bulk(messages, charge)
        assert kinds(outcomes) == ["processed", "dead", "processed"]
        assert seen == [[1, 3]]
        assert [outcome.result for outcome in outcomes] == [Order(1), None, Order(3)]
        again = await (await lab.inbox()).process_bulk(messages, charge)
        assert [outcome.result for outcome in again] == [Order(1), None, Order(3)]

    async def test_a_bulk_of_a_thousand_finds_its_bad_one_in_few_tries(self, lab: Lab) -> None:
        inbox, tries = await lab.inbox(), []
        messages = [lab.message(f"{number:03}") for number in range(1000)]

        async def charge(messages: list[Message[Any]], tx: Any) -> None:
            tries.append(len(messages))
            if any(message.id == "617" for message in messages):
                raise ValueError("no")

        outcomes = await inbox.process_bulk(messages, charge)
        assert [number for number, outcome in enumerate(outcomes) if outcome.kind is not Kind.PROCESSED] == [617]
        assert (outcomes[617].kind, outcomes[617].attempts) == (Kind.FAILED, 1)
        assert len(tries) <= 2 * math.ceil(math.log2(1000)) + 1
        assert await states(lab) == {("failed", 1): 1, ("processed", 1): 999}

    @pytest.mark.parametrize("named", ["message", "index"])
    async def test_a_bulk_error_names_its_culprits(self, lab: Lab, named: str) -> None:
        needs(lab, "bulk_tx")

        class Naming(Bulk):
            def check(self, messages: list[Message[Any]]) -> None:
                wrong = [place for place, message in enumerate(messages) if message.id in self.bad]
                if wrong:
                    raise BulkError(
                        "bad ones", culprits=wrong if named == "index" else [messages[place] for place in wrong]
                    )

        inbox, bulk = await lab.inbox(), Naming(lab, "2", "5")
        messages = [lab.message(f"{number}", stream="s" if number in (1, 2, 3, 5, 6) else None) for number in range(9)]
        outcomes = await inbox.process_bulk(messages, bulk)
        assert kinds(outcomes) == [
            "processed", "processed", "failed", "busy", "processed", "busy", "busy", "processed", "processed",
        ]  # fmt: skip
        assert bulk.calls[1:] == [["0", "1", "4", "7", "8"], ["2"]]
        assert await attempts(inbox, messages[2]) == (State.FAILED, 1)
        assert await attempts(inbox, messages[5]) is None
        assert await lab.effects() == ["0", "1", "4", "7", "8"]

    async def test_a_lane_goes_on_in_order_after_a_culprit_that_succeeds_alone(self, lab: Lab) -> None:
        needs(lab, "bulk_tx")

        class Once(Bulk):
            def check(self, messages: list[Message[Any]]) -> None:
                if len(messages) > 1 and len(self.calls) == 1:
                    raise BulkError(culprits=[1])

        inbox, bulk = await lab.inbox(), Once(lab)
        outcomes = await inbox.process_bulk([lab.message(id_, stream="s") for id_ in "abcd"], bulk)
        assert kinds(outcomes) == ["processed"] * 4
        assert bulk.calls == [["a", "b", "c", "d"], ["a"], ["b"], ["c", "d"]]

    @pytest.mark.parametrize("wrong", [[1], "ab", {"a": 1}, 7])
    async def test_a_bulk_handler_gives_a_result_for_each_or_none(self, lab: Lab, wrong: Any) -> None:
        inbox = await lab.inbox()

        async def give(messages: list[Message[Any]], tx: Any) -> Any:
            return wrong if any(message.id == "x" for message in messages) and len(messages) > 0 else None

        messages = [lab.message("x"), lab.message("y"), lab.message("z")]
        outcomes = await inbox.process_bulk(messages, give)
        if wrong == [1]:  # for one message it is a list of the right length
            assert outcomes[0].result == 1
            return
        assert kinds(outcomes) == ["failed", "processed", "processed"]
        assert isinstance(outcomes[0].error, ResultInvalid)

    @pytest.mark.parametrize("ending", ["COMMIT", "ROLLBACK"])
    async def test_a_bulk_handler_that_ends_the_transaction_is_buried_and_nothing_runs_twice(
        self, lab: Lab, ending: str
    ) -> None:
        needs(lab, "transactional")
        inbox = await lab.inbox()

        async def meddling(messages: list[Message[Any]], tx: Any) -> None:
            for message in messages:
                await lab.write(tx, message.id)
            if any(message.id == "b" for message in messages):
                await lab.run(tx, ending)

        messages = [lab.message(id_) for id_ in "abcd"]
        outcomes = await inbox.process_bulk(messages, meddling)
        assert outcomes[1].kind is Kind.FAILED
        assert isinstance(outcomes[1].error, HandlerEndedTransaction)
        assert await attempts(inbox, messages[1]) in ((State.DEAD, 0), (State.DEAD, 1))
        effects = Counter(await lab.effects())
        assert max(effects.values()) == 1
        for message, outcome in zip(messages, outcomes, strict=True):
            record = await inbox.get_record(message)
            assert record is not None, "nothing is lost"
            assert (record.state is State.PROCESSED) == (outcome.kind is Kind.PROCESSED)
