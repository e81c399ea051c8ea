"""Worker processes that come, go, die and freeze at any time: rules 12 and 16."""

from __future__ import annotations

import asyncio
import signal
import time
from typing import Any

import pytest

from onceward import Message, State
from onceward.testing.contract.base import SOON, needs
from onceward.testing.contract.queue.base import TAKEOVER, at, drain, record_of, until
from onceward.testing.hand import Hand
from onceward.testing.lab import Lab, Recorder

KILLED = -signal.SIGKILL


async def make_ledger(lab: Lab) -> None:
    await lab.query(f"CREATE TABLE ledger ({lab.numbered}, id text, stream text, position bigint, pid bigint)")


async def first_to_run(hands: list[Hand]) -> Hand:
    """Which of them has got something to do: on SQLite others may be done with everything before one of them looks."""
    listening = {asyncio.ensure_future(hand.hear("ran")): hand for hand in hands}
    ran, others = await asyncio.wait(listening, return_when=asyncio.FIRST_COMPLETED)
    for one in others:
        one.cancel()
    await asyncio.gather(*others, return_exceptions=True)
    return listening[ran.pop()]


async def all_done(lab: Lab) -> bool:
    rows = await lab.query("SELECT count(*) FROM onceward_records WHERE state <> 'processed'")
    return rows == [(0,)]


class FleetContract:
    async def test_what_was_accepted_survives_the_process_at_once(self, lab: Lab) -> None:
        """Rule 18: settled means processed or durably kept."""
        hand = await lab.hand(accept=["m1", "m2"], kill_at="before begin_turn")
        await hand.hear("accepted")
        assert await hand.ended() == KILLED
        inbox, handler = await lab.inbox(), Recorder(lab)
        await drain(inbox, handler)
        assert sorted(handler.runs) == ["m1", "m2"]

    @pytest.mark.parametrize(
        "point",
        ["after begin_turn", "after take_lanes", "effect", "before close_and_commit", "after close_and_commit"],
    )
    async def test_a_worker_that_dies_anywhere_loses_and_doubles_nothing(self, lab: Lab, point: str) -> None:
        inbox, handler = await lab.inbox(retry=SOON), Recorder(lab)
        await inbox.accept([at(lab, "a1"), at(lab, "a2"), at(lab, "b1")])
        if point == "after take_lanes":  # which is said apart from the claim where the worker before died
            await lab.query("UPDATE onceward_lanes SET claims = 1")
        hand = await lab.hand(kill_at=point)
        await hand.hear("at")
        assert await hand.ended() == KILLED

        async def done() -> bool:
            await drain(inbox, handler)
            return await all_done(lab)

        took = await until(done)
        assert took < TAKEOVER
        assert await lab.effects() == ["a1", "a2", "b1"]
        assert [id_ for id_ in handler.runs if id_ != "b1"] in (["a1", "a2"], ["a2"], [])
        rows = await lab.query("SELECT DISTINCT state, attempts, started FROM onceward_records")
        assert rows == [("processed", 1, 0)], "one crash is no reason to count"

    async def test_a_worker_that_dies_with_lanes_of_other_turns_in_hand_costs_nobody_an_attempt(self, lab: Lab) -> None:
        """Under backlog it claims the lanes of several turns at once, also where a turn is one message."""
        inbox, handler = await lab.inbox(retry=SOON), Recorder(lab)
        messages = [lab.message(f"m{number:02}") for number in range(60)]
        await inbox.accept(messages)
        hand = await lab.hand(batch=1, die=["m40"])
        await hand.hear("dying")
        assert await hand.ended() == KILLED

        async def done() -> bool:
            await drain(inbox, handler)
            return await all_done(lab)

        assert await until(done) < TAKEOVER
        assert await lab.effects() == [message.id for message in messages]
        rows = await lab.query("SELECT DISTINCT state, attempts, started FROM onceward_records")
        assert rows == [("processed", 1, 0)]

    async def test_after_kill_9_another_worker_takes_over_within_5_seconds(self, lab: Lab) -> None:
        """Rule 12."""
        inbox, handler = await lab.inbox(retry=SOON, wait=30), Recorder(lab)
        await inbox.accept([at(lab, "a1"), at(lab, "a2")])
        hand = await lab.hand(hold=["a1"])
        await hand.hear("running")
        async with inbox.worker(handler, poll_interval=0.2):
            if lab.store().features.concurrent_units:
                await inbox.accept(at(lab, "b1"))

                async def other_lanes_go_on() -> bool:
                    return "b1" in handler.runs

                await until(other_lanes_go_on)
            assert "a1" not in handler.runs
            died = time.monotonic()
            assert await hand.kill() == KILLED

            async def taken_over() -> bool:
                return await all_done(lab)

            await until(taken_over)
            assert time.monotonic() - died < TAKEOVER
        assert [id_ for id_ in handler.runs if id_ != "b1"] == ["a1", "a2"]
        assert [id_ for id_ in await lab.effects() if id_ != "b1"] == ["a1", "a2"]
        record = await record_of(inbox, at(lab, "a1"))
        assert (record.state, record.attempts) == (State.PROCESSED, 1)

    async def test_workers_in_many_processes_do_each_message_once_and_in_order(self, lab: Lab) -> None:
        await make_ledger(lab)
        inbox = await lab.inbox(wait=30)
        streams = [f"s{number}" for number in range(12)]
        messages = [
            lab.message(f"{stream}-{position}", stream=stream, position=position)
            for position in range(1, 11)
            for stream in streams
        ]
        hands = [await lab.hand(ledger=True, concurrency=2, batch=4) for _ in range(3)]
        for hand in hands:
            await hand.hear("ready")
        for start in range(0, len(messages), 30):
            await inbox.accept(messages[start : start + 30])
        # One of those who work dies in the middle of it, without a word; another one joins.
        dying = await first_to_run(hands)
        await dying.kill()
        hands.remove(dying)
        hands.append(await lab.hand(ledger=True))
        await hands[-1].hear("ready")

        async def done() -> bool:
            return await all_done(lab)

        await until(done, within=60)
        assert [await hand.stop() for hand in hands] == [0, 0, 0]
        rows = await lab.query("SELECT id, stream, position FROM ledger ORDER BY n")
        assert sorted(row[0] for row in rows) == sorted(message.id for message in messages), "each one once"
        for stream in streams:
            assert [row[2] for row in rows if row[1] == stream] == list(range(1, 11))

    async def test_a_message_that_kills_its_process_ends_as_a_dead_letter(self, lab: Lab) -> None:
        """Rule 12, and its neighbours keep their attempts."""
        inbox, handler = await lab.inbox(retry=SOON), Recorder(lab)
        neighbours = [f"n{number}" for number in range(10)]
        await inbox.accept([at(lab, "a1"), at(lab, "a2"), *(lab.message(id_) for id_ in neighbours)])
        crashes = 0
        for _ in range(8):
            hand = await lab.hand(die=["a1"], max_attempts=3)
            await hand.hear("ready")

            async def gone_or_done(hand: Any = hand) -> bool:
                if hand.process.returncode is not None:
                    return True
                return (await record_of(inbox, at(lab, "a1"))).state is State.DEAD

            ended = asyncio.ensure_future(hand.ended())
            await until(gone_or_done)
            if (await record_of(inbox, at(lab, "a1"))).state is State.DEAD:
                hand.process.terminate()
                await ended
                break
            assert await ended == KILLED
            crashes += 1
            await lab.let_time_pass()  # the claim of the dead is over
        else:
            pytest.fail("it kills for ever")
        assert 1 <= crashes <= 4
        record = await record_of(inbox, at(lab, "a1"))
        assert (record.attempts, record.payload) == (0, {"amount": 7})
        assert record.started == 3
        assert "AttemptsExhausted" in record.last_error
        await lab.let_time_pass()
        await drain(inbox, handler)
        await inbox.discard(at(lab, "a1"))
        await drain(inbox, handler)
        rows = await lab.query(
            "SELECT DISTINCT state, attempts, started FROM onceward_records WHERE message_id <> 'a1'"
        )
        assert rows == [("processed", 1, 0)]
        assert await lab.effects() == sorted(["a2", *neighbours])

    async def test_a_worker_process_stops_gracefully(self, lab: Lab) -> None:
        inbox = await lab.inbox()
        await inbox.accept([at(lab, "a1"), at(lab, "a2")])
        hand = await lab.hand(hold=["a1"])
        await hand.hear("running")
        hand.process.terminate()
        hand.go()
        assert await hand.ended() == 0
        assert hand.lines[-1] == {"kind": "stopped"}
        assert "a1" in await lab.effects()
        await drain(inbox, Recorder(lab))
        assert await lab.query("SELECT DISTINCT attempts, started FROM onceward_records") == [(1, 0)]

    # --- freezes: a process that is stopped and goes on later -----------------------------------------------

    async def test_a_turn_cannot_hold_its_lanes_for_ever(self, lab: Lab) -> None:
        """Rule 16: should the worker freeze, the database ends the transaction."""
        needs(lab, "network")
        inbox, found = await lab.inbox(), []

        async def handler(message: Message[Any], tx: Any) -> None:
            found.extend(await lab.run(tx, "SELECT current_setting('idle_in_transaction_session_timeout')"))

        await inbox.accept(lab.message())
        await drain(inbox, handler)
        assert found != [("0",)]

    async def test_a_stricter_limit_of_the_database_stays(self, lab: Lab) -> None:
        needs(lab, "network")
        name = lab.url.rsplit("/", 1)[1]
        await lab.query(f"ALTER DATABASE {name} SET idle_in_transaction_session_timeout = '700ms'")
        inbox, found = await lab.inbox(), []

        async def handler(message: Message[Any], tx: Any) -> None:
            found.extend(await lab.run(tx, "SELECT current_setting('idle_in_transaction_session_timeout')"))

        await inbox.accept(lab.message())
        await drain(inbox, handler)
        assert found == [("700ms",)]

    async def test_a_worker_that_froze_in_its_transaction_is_replaced_and_changes_nothing(self, lab: Lab) -> None:
        needs(lab, "network")
        inbox, handler = await lab.inbox(retry=SOON), Recorder(lab)
        await inbox.accept([at(lab, "a1"), at(lab, "a2")])
        hand = await lab.hand(hold=["a1"], freeze_after=0.7)
        await hand.hear("running")
        froze = time.monotonic()
        hand.freeze()
        async with inbox.worker(handler, poll_interval=0.1):

            async def taken_over() -> bool:
                return await all_done(lab)

            await until(taken_over)
        assert time.monotonic() - froze < TAKEOVER + 1
        hand.go()
        hand.thaw()
        await self._still_of_use(lab, hand, inbox)
        assert handler.runs == ["a1", "a2"]
        assert await lab.effects() == ["a1", "a2", "c1"]
        record = await record_of(inbox, at(lab, "a1"))
        assert (record.state, record.attempts, record.started) == (State.PROCESSED, 1, 0)

    async def test_a_worker_that_froze_after_its_claim_is_replaced_and_changes_nothing(self, lab: Lab) -> None:
        """It holds nothing but its name on the lane, and that is another one's by now."""
        needs(lab, "network")
        inbox, handler = await lab.inbox(retry=SOON), Recorder(lab)
        await inbox.accept([at(lab, "a1"), at(lab, "a2")])
        await lab.query("UPDATE onceward_lanes SET claims = 1")  # then its turn begins in another trip than its claim
        hand = await lab.hand(freeze_at="after begin_turn")
        await hand.hear("at")
        async with inbox.worker(handler, poll_interval=0.1):

            async def taken_over() -> bool:
                return await all_done(lab)

            assert await until(taken_over) < TAKEOVER
        hand.thaw()
        await self._still_of_use(lab, hand, inbox)
        assert handler.runs == ["a1", "a2"]
        assert await lab.effects() == ["a1", "a2", "c1"]

    async def test_a_worker_that_froze_in_a_leased_handler_is_replaced_and_changes_nothing(self, lab: Lab) -> None:
        inbox, handler = await lab.inbox(retry=SOON), Recorder(lab)
        await inbox.accept([at(lab, "a1"), at(lab, "a2")])
        hand = await lab.hand(hold=["a1"], lease=1.0)
        await hand.hear("running")
        hand.freeze()
        async with inbox.worker(handler, poll_interval=0.1):

            async def taken_over() -> bool:
                return await all_done(lab)

            assert await until(taken_over) < TAKEOVER
        hand.go()
        hand.thaw()
        lost = await hand.hear("lost")
        assert lost["error"] == "LeaseLost"
        await self._still_of_use(lab, hand, inbox)
        assert handler.runs == ["a1", "a2"]
        assert await lab.effects() == ["a1", "a2", "c1"]
        record = await record_of(inbox, at(lab, "a1"))
        assert (record.state, record.attempts) == (State.PROCESSED, 1)

    async def _still_of_use(self, lab: Lab, hand: Any, inbox: Any) -> None:
        """The zombie has found out, and works on with something else."""
        await inbox.accept(at(lab, "c1"))

        async def done() -> bool:
            return await all_done(lab)

        await until(done)
        assert await hand.stop() == 0
        assert [line["id"] for line in hand.lines if line["kind"] == "ran"][-1:] == ["c1"]
