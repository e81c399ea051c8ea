"""The first columns of the decision table: new, duplicate, mismatch, unhandled, accepted, blocked, replay."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import msgspec
import pytest

from onceward import Message, Position, Reject, RetryPolicy, Router, State, TryLater, Verdict, current, keys
from onceward.errors import HandlerNotFound, KeyMissing, NotDead, PayloadMismatch, RecordNotFound, UsageError
from onceward.outcome import Kind, verdict_of
from onceward.testing.contract.base import Listener, needs
from onceward.testing.lab import Lab, Recorder


@dataclass
class Receipt:
    order: str
    cents: int


class OrderPaid(msgspec.Struct):
    order: str
    amount: int


class ProcessingContract:
    async def test_a_new_message_is_processed_and_gives_its_result(self, lab: Lab) -> None:
        inbox, handler, message = await lab.inbox(), Recorder(lab), lab.message()
        outcome = await inbox.process(message, handler)
        assert outcome.processed
        assert outcome.result == {"charged": message.id}
        assert outcome.verdict is Verdict.ACK
        assert await lab.effects() == [message.id]
        record = await inbox.get_record(message)
        assert record is not None
        assert (record.state, record.attempts, record.result) == (State.PROCESSED, 1, {"charged": message.id})
        assert record.payload is None, "a processed record keeps the hash of its payload, not the payload"

    async def test_a_duplicate_is_skipped_and_gives_the_first_result(self, lab: Lab) -> None:
        inbox, handler, message = await lab.inbox(), Recorder(lab), lab.message()
        first = await inbox.process(message, handler)
        second = await inbox.process(message, handler)
        assert second.duplicate
        assert second.verdict is Verdict.ACK
        assert second.result == first.result
        assert handler.runs == [message.id]

    async def test_a_duplicate_is_known_to_another_instance(self, lab: Lab) -> None:
        handler, message = Recorder(lab), lab.message()
        first = await (await lab.inbox()).process(message, handler)
        second = await (await lab.inbox()).process(message, handler)
        assert second.duplicate
        assert second.result == first.result
        assert handler.runs == [message.id]
        assert await lab.effects() == [message.id]

    async def test_a_result_comes_back_as_the_annotated_type(self, lab: Lab) -> None:
        async def pay(message: Message[Any]) -> Receipt:
            return Receipt(message.id, 700)

        message = lab.message()
        first = await (await lab.inbox()).process(message, pay)
        inbox = await lab.inbox()
        from_store, from_cache = await inbox.process(message, pay), await inbox.process(message, pay)
        assert first.result == from_store.result == from_cache.result == Receipt(message.id, 700)

    @pytest.mark.parametrize("result", [[None], {"settled": None}, "null", 0, False, "", [], {}, 1.5, "\0", "é"])
    async def test_a_result_may_be_any_json_value(self, lab: Lab, result: Any) -> None:
        message = lab.message()
        outcomes = [await (await lab.inbox()).process(message, lambda _message: result) for _ in range(2)]
        assert [outcome.kind for outcome in outcomes] == [Kind.PROCESSED, Kind.DUPLICATE]
        assert [outcome.result for outcome in outcomes] == [result, result]

    async def test_a_handler_without_tx_works(self, lab: Lab) -> None:
        async def note(message: Message[Any]) -> str:
            return message.id

        message = lab.message()
        assert (await (await lab.inbox()).process(message, note)).result == message.id

    async def test_a_handler_that_returns_nothing_is_a_duplicate_the_second_time(self, lab: Lab) -> None:
        async def nothing(message: Message[Any], tx: Any) -> None:
            await lab.write(tx, message.id)

        message = lab.message()
        outcomes = [await (await lab.inbox()).process(message, nothing) for _ in range(2)]
        assert [outcome.kind for outcome in outcomes] == [Kind.PROCESSED, Kind.DUPLICATE]
        assert await lab.effects() == [message.id]

    # --- another payload under the same identity -------------------------------------------------------------

    @pytest.mark.parametrize("path", ["cache", "store"])
    async def test_another_payload_under_the_same_identity_is_reported(self, lab: Lab, path: str) -> None:
        heard, handler = Listener(), Recorder(lab)
        inbox = await lab.inbox(listeners=[heard])
        await inbox.process(lab.message("m", payload={"amount": 7}), handler)
        if path == "store":
            inbox = await lab.inbox(listeners=[heard])
        outcome = await inbox.process(lab.message("m", payload={"amount": 8}), handler)
        assert outcome.duplicate
        assert outcome.mismatch, "the payload must be compared on every path"
        assert outcome.verdict is Verdict.ACK
        assert heard[-1].mismatch
        assert handler.runs == ["m"]

    async def test_a_failed_message_that_comes_with_another_payload_runs_and_is_reported(self, lab: Lab) -> None:
        inbox = await lab.inbox(on_mismatch="raise")
        with pytest.raises(ValueError, match="no"):
            await inbox.process(lab.message("m", payload=1), Recorder(lab, error=ValueError("no")))
        outcome = await inbox.process(lab.message("m", payload=2), Recorder(lab))
        assert outcome.processed, "nothing has taken effect yet, so nothing may be skipped"
        assert outcome.mismatch

    @pytest.mark.parametrize("path", ["cache", "store"])
    async def test_another_payload_raises_where_that_is_asked_for(self, lab: Lab, path: str) -> None:
        inbox, handler = await lab.inbox(on_mismatch="raise"), Recorder(lab)
        await inbox.process(lab.message("m", payload={"amount": 7}), handler)
        if path == "store":
            inbox = await lab.inbox(on_mismatch="raise")
        with pytest.raises(PayloadMismatch) as caught:
            await inbox.process(lab.message("m", payload={"amount": 8}), handler)
        assert verdict_of(caught.value) is Verdict.ACK

    async def test_the_order_of_keys_in_a_payload_does_not_matter(self, lab: Lab) -> None:
        handler = Recorder(lab)
        await (await lab.inbox()).process(lab.message("m", payload={"a": 1, "b": 2}), handler)
        outcome = await (await lab.inbox()).process(lab.message("m", payload={"b": 2, "a": 1}), handler)
        assert outcome.duplicate
        assert not outcome.mismatch

    async def test_raw_bytes_are_compared_where_there_are_any(self, lab: Lab) -> None:
        handler = Recorder(lab)
        await (await lab.inbox()).process(lab.message("m", payload=None, body=b"one"), handler)
        outcome = await (await lab.inbox()).process(lab.message("m", payload=None, body=b"two"), handler)
        assert outcome.mismatch

    async def test_a_fingerprint_says_what_is_compared(self, lab: Lab) -> None:
        handler = Recorder(lab)
        inbox = await lab.inbox(fingerprint=lambda message: message.payload["amount"], cache=0)
        await inbox.process(lab.message("m", payload={"amount": 7, "sent": 1}), handler)
        same = await inbox.process(lab.message("m", payload={"amount": 7, "sent": 2}), handler)
        other = await inbox.process(lab.message("m", payload={"amount": 8, "sent": 2}), handler)
        assert (same.mismatch, other.mismatch) == (False, True)

    # --- by type ---------------------------------------------------------------------------------------------

    async def test_a_router_finds_the_handler_and_decodes_the_payload(self, lab: Lab) -> None:
        router, seen = Router(), []

        @router.handler("order.paid", payload=OrderPaid, key=keys.field("order"))
        async def on_paid(message: Message[OrderPaid], tx: Any) -> Receipt:
            seen.append(message.payload)
            return Receipt(message.payload.order, message.payload.amount)

        inbox = await lab.inbox(handlers=[router])
        outcome = await inbox.process(lab.message(payload={"order": "o-1", "amount": 7}))
        again = await inbox.process(lab.message(payload={"order": "o-1", "amount": 7}))
        assert seen == [OrderPaid("o-1", 7)]
        assert outcome.processed
        assert again.duplicate, "another message id, but the same order"
        assert again.result == Receipt("o-1", 7)

    async def test_an_unhandled_type_is_ignored_without_a_row(self, lab: Lab) -> None:
        inbox, message = await lab.inbox(unhandled="ignore"), lab.message()
        outcome = await inbox.process(message)
        assert outcome.kind is Kind.IGNORED
        assert outcome.verdict is Verdict.ACK
        assert await inbox.get_record(message) is None

    async def test_an_unhandled_type_raises_by_default(self, lab: Lab) -> None:
        inbox, message = await lab.inbox(), lab.message()
        with pytest.raises(HandlerNotFound, match=r"order\.paid") as caught:
            await inbox.process(message)
        assert verdict_of(caught.value) is Verdict.STOP
        assert await inbox.get_record(message) is None

    async def test_an_unhandled_type_is_kept_dead_where_that_is_asked_for(self, lab: Lab) -> None:
        inbox, message = await lab.inbox(unhandled="dead"), lab.message()
        outcome = await inbox.process(message)
        assert outcome.kind is Kind.DEAD
        record = await inbox.get_record(message)
        assert record is not None
        assert (record.state, record.payload) == (State.DEAD, {"amount": 7})

    async def test_an_accepted_message_is_acknowledged_and_left_to_its_worker(self, lab: Lab) -> None:
        needs(lab, "queue")
        inbox, handler, message = await lab.inbox(), Recorder(lab, error=ValueError("no")), lab.message()
        with pytest.raises(ValueError, match="no"):
            await inbox.process(message, handler)
        await lab.change(state="accepted")
        outcome = await inbox.process(message, handler)
        assert outcome.kind is Kind.ACCEPTED
        assert outcome.verdict is Verdict.ACK
        assert len(handler.runs) == 1

    async def test_an_unmet_dependency_blocks_until_it_is_processed(self, lab: Lab) -> None:
        needs(lab, "positions")
        inbox, handler = await lab.inbox(), Recorder(lab)
        needed = Position("user-1", 5)
        order = lab.message("order", depends_on=(needed,))
        with pytest.raises(TryLater) as caught:
            await inbox.process(order, handler)
        assert (caught.value.reason, verdict_of(caught.value)) == ("blocked", Verdict.RETRY)
        assert await inbox.get_record(order) is None
        await inbox.process(lab.message("other", tenant="other", stream="user-1", position=5), handler)
        with pytest.raises(TryLater, match="user-1"):
            await inbox.process(order, handler)
        await inbox.process(lab.message("user", stream="user-1", position=5), handler)
        assert (await inbox.process(order, handler)).processed

    # --- dead letters ----------------------------------------------------------------------------------------

    async def test_a_dead_letter_is_replayed_by_its_registered_handler(self, lab: Lab) -> None:
        handler, broken = Recorder(lab), True
        inbox = await lab.inbox()

        @inbox.handler("order.paid")
        async def on_paid(message: Message[Any], tx: Any) -> Any:
            if broken:
                raise Reject("not yet")
            return await handler(message, tx)

        message = lab.message(headers={"trace": "t-1"}, body=b'{"amount": 7}')
        assert (await inbox.process(message)).kind is Kind.DEAD
        assert (await inbox.replay(message)).kind is Kind.DEAD, "it fails again and stays dead"
        broken = False
        outcome = await inbox.replay(inbox.identity_of(message))
        assert outcome.processed
        assert await lab.effects() == [message.id]
        record = await inbox.get_record(message)
        assert record is not None
        assert (record.state, record.attempts, len(record.errors)) == (State.PROCESSED, 3, 2)
        assert (await inbox.process(message)).duplicate

    async def test_a_discarded_dead_letter_never_runs_again(self, lab: Lab) -> None:
        inbox, handler, message = await lab.inbox(), Recorder(lab, error=Reject("bad")), lab.message()
        await inbox.process(message, handler)
        await inbox.discard(message)
        assert (await inbox.process(message, handler)).kind is Kind.DEAD
        assert len(handler.runs) == 1
        record = await inbox.get_record(message)
        assert record is not None
        assert (record.payload, record.last_error) == (None, "Reject: bad"), "nobody will need the payload"
        with pytest.raises(NotDead):
            await inbox.replay(message, handler)

    async def test_only_dead_letters_are_replayed_or_discarded(self, lab: Lab) -> None:
        inbox, handler, message = await lab.inbox(), Recorder(lab), lab.message()
        with pytest.raises(RecordNotFound):
            await inbox.replay(message, handler)
        await inbox.process(message, handler)
        with pytest.raises(NotDead, match="processed"):
            await inbox.replay(message, handler)
        with pytest.raises(NotDead):
            await inbox.discard(message)
        assert handler.runs == [message.id]

    # --- what a handler may know, and hooks ------------------------------------------------------------------

    async def test_current_tells_a_handler_about_its_run(self, lab: Lab) -> None:
        seen = []

        async def look(message: Message[Any]) -> None:
            seen.append(current())
            if len(seen) == 1:
                raise ValueError("again")

        inbox, message = await lab.inbox(), lab.message()
        with pytest.raises(ValueError, match="again"):
            await inbox.process(message, look, origin="orders/0/17")
        await inbox.process(message, look, origin="orders/0/17", redelivered=True)
        first, second = seen
        assert (first.attempt, second.attempt, second.redelivered, second.origin) == (1, 2, True, "orders/0/17")
        assert first.idempotency_key == second.idempotency_key == str(inbox.identity_of(message))
        with pytest.raises(UsageError, match="inside a handler"):
            current()

    async def test_on_begin_comes_before_the_handler(self, lab: Lab) -> None:
        """What it prepares is there when the handler runs, and where it fails the handler does not."""
        said: list[str] = []

        async def on_begin(tx: Any, message: Message[Any]) -> None:
            if message.id == "refused":
                raise LookupError("no such tenant")
            said.append(f"begin {message.id}")

        async def handler(message: Message[Any]) -> None:
            said.append(f"run {message.id}")

        inbox = await lab.inbox(on_begin=on_begin)
        for name in ("a", "b"):
            assert (await inbox.process(lab.message(name), handler)).processed
        with pytest.raises(LookupError):
            await inbox.process(lab.message("refused"), handler)
        assert list(dict.fromkeys(said)) == ["begin a", "run a", "begin b", "run b"]
        assert [one for one in said if one.startswith("run")] == ["run a", "run b"]

    async def test_on_begin_runs_before_the_claim_in_every_transaction(self, lab: Lab) -> None:
        needs(lab, "transactional")
        begun: list[int] = []

        async def on_begin(tx: Any, message: Message[Any]) -> None:
            rows = await lab.run(tx, "SELECT 1 FROM onceward_records WHERE message_id = $1", message.id)
            begun.append(len(rows))

        inbox, message = await lab.inbox(on_begin=on_begin), lab.message()
        with pytest.raises(ValueError, match="no"):
            await inbox.process(message, Recorder(lab, error=ValueError("no")))
        assert begun == [0, 0], "for the work, and for the failure that is kept"
        await inbox.process(message, Recorder(lab))
        assert begun == [0, 0, 1]

    async def test_seen_before_adopts_what_was_done_elsewhere(self, lab: Lab) -> None:
        known = {"old"}

        async def seen_before(tx: Any, message: Message[Any]) -> bool:
            return message.id in known

        inbox, handler = await lab.inbox(seen_before=seen_before), Recorder(lab)
        assert (await inbox.process(lab.message("old"), handler)).duplicate
        assert (await inbox.process(lab.message("new"), handler)).processed
        known.clear()
        assert (await (await lab.inbox(seen_before=seen_before)).process(lab.message("old"), handler)).duplicate
        assert handler.runs == await lab.effects() == ["new"]

    async def test_seen_before_adopts_what_an_old_table_knows(self, lab: Lab) -> None:
        needs(lab, "transactional")

        async def seen_before(tx: Any, message: Message[Any]) -> bool:
            return bool(await lab.run(tx, "SELECT 1 FROM old_inbox WHERE id = $1", message.id))

        await lab.query("CREATE TABLE old_inbox (id text)")
        await lab.query("INSERT INTO old_inbox VALUES ('old')")
        inbox, handler = await lab.inbox(seen_before=seen_before), Recorder(lab)
        assert (await inbox.process(lab.message("old"), handler)).duplicate
        assert (await inbox.process(lab.message("new"), handler)).processed
        assert handler.runs == ["new"]
        assert (await (await lab.inbox()).process(lab.message("old"), handler)).duplicate

    async def test_seen_before_is_asked_however_the_message_comes(self, lab: Lab) -> None:
        answers: list[bool | Exception] = [ValueError("not now"), True, True]

        async def seen_before(tx: Any, message: Message[Any]) -> bool:
            answer = answers.pop(0)
            if isinstance(answer, Exception):
                raise answer
            return answer

        inbox, handler = await lab.inbox(seen_before=seen_before, retry=RetryPolicy(base=0.0)), Recorder(lab)
        with pytest.raises(ValueError, match="not now"):
            await inbox.process(lab.message("old"), handler)
        assert (await inbox.process(lab.message("old"), handler)).duplicate, "also after a failure"
        assert (await inbox.process(lab.message("older"), handler, redelivered=True)).duplicate, "also with a mark"
        assert handler.runs == []

    async def test_closing_forgets_what_was_cached(self, lab: Lab) -> None:
        inbox, handler = await lab.inbox(), Recorder(lab)
        await inbox.process(lab.message("m"), handler)
        await inbox.close()
        await lab.forget()
        await inbox.open()
        assert (await inbox.process(lab.message("m"), handler)).processed

    async def test_events_tell_what_happened(self, lab: Lab) -> None:
        heard = Listener()
        inbox, message = await lab.inbox(listeners=[heard]), lab.message()
        with pytest.raises(ValueError, match="no"):
            await inbox.process(message, Recorder(lab, error=ValueError("no")))
        await inbox.process(message, Recorder(lab))
        await inbox.process(message, Recorder(lab))
        dead = lab.message()
        for _ in range(2):
            await inbox.process(dead, Recorder(lab, error=Reject("bad")))
        with pytest.raises(KeyMissing):
            await inbox.process(lab.message(), Recorder(lab), key=keys.field("nothing"))
        assert heard.names() == ["Failed", "Processed", "Duplicate", "Dead", "Duplicate", "Refused"]

    async def test_a_listener_that_fails_harms_nobody(self, lab: Lab) -> None:
        def broken(event: Any) -> None:
            raise RuntimeError("listener")

        inbox = await lab.inbox(listeners=[broken])
        assert (await inbox.process(lab.message(), Recorder(lab))).processed

    async def test_an_idempotent_function_runs_once_per_key(self, lab: Lab) -> None:
        inbox = await lab.inbox()

        @inbox.idempotent(key="order_id")
        async def refund(tx: Any, order_id: str, amount: int = 5) -> Receipt:
            await lab.write(tx, order_id)
            return Receipt(order_id, amount)

        assert await refund("o-1", amount=5) == Receipt("o-1", 5)
        assert await refund(order_id="o-1") == Receipt("o-1", 5)
        assert await lab.effects() == ["o-1"]
        with pytest.raises(PayloadMismatch):
            await refund("o-1", amount=6)

    async def test_an_idempotent_method_shares_its_history_between_objects(self, lab: Lab) -> None:
        inbox = await lab.inbox()

        class Shop:
            @inbox.idempotent(key=("customer", "order_id"), name="shop.refund")
            async def refund(self, customer: str, order_id: str, tx: Any) -> None:
                await lab.write(tx, order_id)

        await Shop().refund("c", "o-1")
        await Shop().refund("c", "o-1")
        await Shop().refund("c", "o-2")
        assert await lab.effects() == ["o-1", "o-2"]
