"""Causal dependencies, rule 15: a message runs only after what it depends on, and nothing waits for ever unseen."""

from __future__ import annotations

import asyncio
from datetime import timedelta
from itertools import permutations
from typing import Any

import pytest

from onceward import Kind, Position, Reject, State
from onceward.errors import InvalidMessage
from onceward.testing.contract.base import LATER, SOON, needs
from onceward.testing.contract.queue.accepting import kind_of
from onceward.testing.contract.queue.base import Failing, at, drain, record_of, until
from onceward.testing.kinds import place
from onceward.testing.lab import Lab, Recorder

SOON_OVER = timedelta(milliseconds=100)


class DependencyContract:
    async def test_a_message_waits_for_what_it_depends_on(self, lab: Lab) -> None:
        inbox, handler = await lab.inbox(), Recorder(lab)
        await inbox.accept([at(lab, "a1", "z1"), at(lab, "a2"), at(lab, "b1")])
        await drain(inbox, handler)
        assert handler.runs == ["b1"], "its stream waits with it, others do not"
        record = await record_of(inbox, at(lab, "a1"))
        assert (record.state, record.attempts, record.started, record.errors) == (State.ACCEPTED, 0, 0, ())
        await inbox.accept(at(lab, "z1"))
        await drain(inbox, handler)
        assert handler.runs == ["b1", "z1", "a1", "a2"]

    @pytest.mark.parametrize("order", list(permutations(("a1", "b1", "c1"))), ids="-".join)
    async def test_a_chain_runs_in_the_order_of_its_causes(self, lab: Lab, order: tuple[str, ...]) -> None:
        inbox, handler = await lab.inbox(), Recorder(lab)
        chain = {"a1": at(lab, "a1"), "b1": at(lab, "b1", "a1"), "c1": at(lab, "c1", "b1")}
        for id_ in order:
            await inbox.accept(chain[id_])
            await drain(inbox, handler)
        assert handler.runs == ["a1", "b1", "c1"]

    async def test_a_message_may_have_many_causes(self, lab: Lab) -> None:
        inbox, handler = await lab.inbox(), Recorder(lab)
        causes = ["x1", "y1", "y2", "z1"]
        await inbox.accept(at(lab, "a1", *causes))
        for id_ in reversed(causes):
            await drain(inbox, handler)
            assert "a1" not in handler.runs
            await inbox.accept(at(lab, id_))
        await drain(inbox, handler)
        assert handler.runs[-1] == "a1"
        assert len(handler.runs) == 5

    async def test_many_may_wait_for_one(self, lab: Lab) -> None:
        inbox, handler = await lab.inbox(), Recorder(lab)
        ids = [f"{chr(97 + number)}1" for number in range(20)]
        await inbox.accept([at(lab, id_, "zz1") for id_ in ids])
        assert await drain(inbox, handler) == []
        await inbox.accept(at(lab, "zz1"))
        await drain(inbox, handler)
        assert handler.runs[0] == "zz1"
        assert sorted(handler.runs[1:]) == ids

    async def test_a_cause_may_be_of_another_tenant(self, lab: Lab) -> None:
        inbox, handler = await lab.inbox(), Recorder(lab)
        await inbox.accept(at(lab, "a1", Position("z", 1, "south"), tenant="north"))
        await inbox.accept(at(lab, "z1", tenant="north"))
        await drain(inbox, handler)
        assert handler.runs == ["z1"], "the same stream of its own tenant is another"
        await inbox.accept(at(lab, "z1", tenant="south"))
        await drain(inbox, handler)
        assert handler.runs == ["z1", "z1", "a1"]

    async def test_a_cause_without_a_tenant_is_of_the_messages_own(self, lab: Lab) -> None:
        inbox, handler = await lab.inbox(), Recorder(lab)
        await inbox.accept([at(lab, "a1", "z1", tenant="north"), at(lab, "z1", tenant="south")])
        await drain(inbox, handler)
        assert handler.runs == ["z1"]
        await inbox.accept(at(lab, "z1", tenant="north"))
        await drain(inbox, handler)
        assert handler.runs == ["z1", "z1", "a1"]

    async def test_what_another_consumer_has_done_does_not_count(self, lab: Lab) -> None:
        inbox, other, handler = await lab.inbox(), await lab.inbox(consumer="shipping"), Recorder(lab)
        await inbox.accept(at(lab, "a1", "z1"))
        await drain(inbox, handler)
        await other.process(at(lab, "z1"), Recorder(lab))
        assert await drain(inbox, handler) == []

    async def test_messages_without_a_stream_may_depend_too(self, lab: Lab) -> None:
        inbox, handler = await lab.inbox(), Recorder(lab)
        await inbox.accept([lab.message("m", depends_on=(Position("z", 1),)), lab.message("n")])
        await drain(inbox, handler)
        await inbox.accept(at(lab, "z1"))
        await drain(inbox, handler)
        assert handler.runs == ["n", "z1", "m"]

    async def test_a_cause_further_back_in_the_same_lane_runs_first(self, lab: Lab) -> None:
        inbox, handler = await lab.inbox(), Recorder(lab)
        await inbox.accept([at(lab, "a1", "b2"), at(lab, "b1"), at(lab, "b2"), at(lab, "c1")], lane="one")
        await drain(inbox, handler)
        assert sorted(handler.runs) == ["a1", "b1", "b2", "c1"]
        assert handler.runs.index("b2") < handler.runs.index("a1")

    # --- who wakes it ---------------------------------------------------------------------------------------

    @pytest.mark.parametrize(
        "how", ["process", "process_many", "process_bulk", "mark_processed", "claim", "process(tx=)"]
    )
    async def test_inline_work_counts_and_wakes_what_waits_for_it(self, lab: Lab, how: str) -> None:
        inbox, handler, cause = await lab.inbox(), Recorder(lab), at(lab, "z1")
        await inbox.accept(at(lab, "a1", "z1"))
        assert await drain(inbox, handler) == []

        async def bulk(messages: Any, tx: Any) -> None: ...

        async with kind_of(lab).opened(place(lab)) as caller:
            match how:
                case "process":
                    await inbox.process(cause, Recorder(lab))
                case "process_many":
                    await inbox.process_many([cause, lab.message()], Recorder(lab))
                case "process_bulk":
                    await inbox.process_bulk([cause, lab.message()], bulk)
                case _:
                    await caller.begin()
                    if how == "claim":
                        async with inbox.claim(cause, tx=caller.tx) as claim:
                            assert claim.first
                    elif how == "mark_processed":
                        await inbox.mark_processed(cause, tx=caller.tx)
                    else:
                        await inbox.process(cause, Recorder(lab), tx=caller.tx)
                    if lab.store().features.concurrent_units:
                        assert await drain(inbox, handler) == [], "nothing is settled before the caller commits"
                    await caller.commit()

        async def ran() -> bool:
            await drain(inbox, handler)
            return bool(handler.runs)

        await until(ran, within=8)
        assert handler.runs == ["a1"]

    @pytest.mark.parametrize("level", ["REPEATABLE READ", "SERIALIZABLE"])
    async def test_work_at_another_isolation_level_wakes_too(self, lab: Lab, level: str) -> None:
        """A transaction that began before somebody waited cannot see that; it must be seen to later."""
        needs(lab, "errors_abort")
        inbox, handler = await lab.inbox(), Recorder(lab)
        async with kind_of(lab).opened(place(lab)) as caller:
            await caller.begin()
            await caller.run(f"SET TRANSACTION ISOLATION LEVEL {level}")
            await caller.run("SELECT count(*) FROM effects")  # its snapshot is taken now
            await inbox.accept(at(lab, "a1", "z1"))
            assert await drain(inbox, handler) == []
            await inbox.mark_processed(at(lab, "z1"), tx=caller.tx)
            await caller.commit()
        async with inbox.worker(handler, poll_interval=0.1):

            async def ran() -> bool:
                return bool(handler.runs)

            await until(ran)

    @pytest.mark.parametrize("constraints", ["deferred", "immediate"])
    async def test_a_position_that_is_being_settled_is_not_waited_for_in_vain(self, lab: Lab, constraints: str) -> None:
        """Somebody settles the position, and has not committed; the waiter cannot see it, and the settler not the
        waiter, least of all where it has looked for waiters already. Whichever comes first, the message runs."""
        needs(lab, "concurrent_units")
        inbox, handler = await lab.inbox(), Recorder(lab)
        await inbox.accept(at(lab, "a1", "z1"))
        async with kind_of(lab).opened(place(lab)) as caller:
            await caller.begin()
            await inbox.mark_processed(at(lab, "z1"), tx=caller.tx)
            if constraints == "immediate":
                await caller.run("SET CONSTRAINTS ALL IMMEDIATE")
            assert await drain(inbox, handler) == []
            await caller.commit()

        async def ran() -> bool:
            await drain(inbox, handler)
            return bool(handler.runs)

        await until(ran, within=8)

    async def test_a_position_that_is_settled_while_a_turn_begins_to_wait_wakes_it(self, lab: Lab) -> None:
        """The turn has read that z1 is missing, and z1 is settled before the turn writes down that it waits."""
        needs(lab, "concurrent_units")
        other, handler = await lab.inbox(), Recorder(lab)
        settled: list[Any] = []

        async def reached(point: str) -> None:
            if point in ("before close_lanes", "before close_and_commit") and not settled:
                settled.append(await other.process(at(lab, "z1"), Recorder(lab)))

        inbox = await lab.inbox(reached=reached)
        await inbox.accept(at(lab, "a1", "z1"))

        async def ran() -> bool:
            await drain(inbox, handler)
            return bool(handler.runs)

        await until(ran, within=5)
        assert len(settled) == 1
        assert handler.runs == ["a1"]

    async def test_a_failed_cause_does_not_wake_and_its_retry_does(self, lab: Lab) -> None:
        inbox, handler = await lab.inbox(retry=LATER), Failing(lab, "z1")
        await inbox.accept([at(lab, "a1", "z1"), at(lab, "z1")])
        await drain(inbox, handler)
        assert handler.runs == ["z1"]
        handler.ids.clear()
        await lab.let_time_pass()
        await drain(inbox, handler)
        assert handler.runs == ["z1", "z1", "a1"]

    # --- what never comes -----------------------------------------------------------------------------------

    async def test_a_missing_cause_has_a_deadline_that_ends_in_a_dead_letter(self, lab: Lab) -> None:
        inbox, handler = await lab.inbox(dependency_timeout=SOON_OVER), Recorder(lab)
        await inbox.accept([at(lab, "a1", "z1"), at(lab, "b1")])
        async with inbox.worker(handler, poll_interval=0.05):

            async def dead() -> bool:
                return (await record_of(inbox, at(lab, "a1"))).state is State.DEAD

            await until(dead)
        assert handler.runs == ["b1"]
        record = await record_of(inbox, at(lab, "a1"))
        assert record.errors[-1].type == "DependencyMissing"
        assert "z" in record.errors[-1].text
        assert record.payload == {"amount": 7}
        await inbox.process(at(lab, "z1"), Recorder(lab))
        assert (await inbox.replay(at(lab, "a1"))).kind is Kind.ACCEPTED
        await drain(inbox, handler)
        assert handler.runs == ["b1", "a1"]

    async def test_until_the_deadline_it_waits(self, lab: Lab) -> None:
        inbox, handler = await lab.inbox(dependency_timeout=timedelta(hours=1)), Recorder(lab)
        await inbox.accept(at(lab, "a1", "z1"))
        async with inbox.worker(handler, poll_interval=0.02):
            await inbox.accept([lab.message() for _ in range(5)])

            async def others_ran() -> bool:
                return len(handler.runs) == 5

            await until(others_ran)
        assert (await record_of(inbox, at(lab, "a1"))).state is State.ACCEPTED

    # --- a dead cause ---------------------------------------------------------------------------------------

    @pytest.mark.parametrize("accepted", ["before", "after"])
    @pytest.mark.parametrize("policy", ["wait", "dead", "run"])
    async def test_a_dead_cause_is_treated_as_the_policy_says(self, lab: Lab, policy: str, accepted: str) -> None:
        inbox, handler = await lab.inbox(on_dead_dependency=policy), Failing(lab, "z1", error=Reject("bad"))
        first, second = at(lab, "z1"), at(lab, "a1", "z1")
        for message in (first, second) if accepted == "after" else (second, first):
            await inbox.accept(message)
            await drain(inbox, handler)
        await drain(inbox, handler)
        record = await record_of(inbox, second)
        match policy:
            case "wait":
                assert (record.state, handler.runs) == (State.ACCEPTED, ["z1"])
                handler.ids.clear()
                await inbox.replay(first)
                await drain(inbox, handler)
                assert handler.runs == ["z1", "z1", "a1"]
            case "dead":
                assert (record.state, handler.runs) == (State.DEAD, ["z1"])
                assert "z" in record.last_error
            case "run":
                assert (record.state, handler.runs) == (State.PROCESSED, ["z1", "a1"])

    async def test_waiting_for_a_dead_cause_is_the_default(self, lab: Lab) -> None:
        inbox, handler = await lab.inbox(), Failing(lab, "z1", error=Reject("bad"))
        await inbox.accept([at(lab, "z1"), at(lab, "a1", "z1")])
        await drain(inbox, handler)
        assert (await record_of(inbox, at(lab, "a1"))).state is State.ACCEPTED

    # --- what can never be met ------------------------------------------------------------------------------

    async def test_a_message_that_depends_on_itself_is_refused(self, lab: Lab) -> None:
        inbox = await lab.inbox()
        with pytest.raises(InvalidMessage, match="its own"):
            at(lab, "a1", "a1")
        with pytest.raises(InvalidMessage):
            await inbox.accept(at(lab, "a1", Position("a", 1, "default")))
        assert await lab.query("SELECT count(*) FROM onceward_records") == [(0,)]

    async def test_a_later_position_of_its_own_stream_is_refused(self, lab: Lab) -> None:
        inbox = await lab.inbox()
        for wrong in (at(lab, "a1", "a2"), at(lab, "a1", Position("a", 2, "default"))):
            with pytest.raises(InvalidMessage):
                await inbox.accept(wrong)
        assert (await inbox.accept(at(lab, "a2", "a1"))).kind is Kind.ACCEPTED

    @pytest.mark.parametrize("length", [2, 3])
    @pytest.mark.parametrize("how", ["one by one", "in a list"])
    async def test_a_cycle_that_can_be_seen_is_refused(self, lab: Lab, how: str, length: int) -> None:
        """Whoever finds it is a dead letter that says so, and does not wait for a day."""
        inbox, handler, names = await lab.inbox(), Recorder(lab), ["a1", "b1", "c1"][:length]
        cycle = [at(lab, name, names[(number + 1) % length]) for number, name in enumerate(names)]
        if how == "in a list":
            await inbox.accept(cycle)
        else:
            for message in cycle:
                await inbox.accept(message)
                await drain(inbox, handler)
        await drain(inbox, handler)
        records = [await record_of(inbox, message) for message in cycle]
        dead = [record for record in records if record.state is State.DEAD]
        assert dead
        assert {record.errors[-1].type for record in dead} == {"DependencyCycle"}
        assert handler.runs == []

    # --- what was satisfied stays satisfied -----------------------------------------------------------------

    @pytest.mark.parametrize("how", ["inline", "queue"])
    async def test_a_cause_whose_record_is_gone_still_counts(self, lab: Lab, how: str) -> None:
        inbox, handler = await lab.inbox(), Recorder(lab)
        for id_ in ("z1", "z2"):
            if how == "inline":
                await inbox.process(at(lab, id_), Recorder(lab))
            else:
                await inbox.accept(at(lab, id_))
                await drain(inbox, Recorder(lab))
            await lab.make_older(id_, days=60)
        assert await inbox.cleanup(older_than=timedelta(days=30)) == 2
        await inbox.accept([at(lab, "a1", "z1"), at(lab, "b1", "z2"), at(lab, "c1", "z3")])
        await drain(inbox, handler)
        assert sorted(handler.runs) == ["a1", "b1"]

    async def test_a_cleanup_does_not_satisfy_what_is_unfinished(self, lab: Lab) -> None:
        """A floor is raised past nothing that is still to be done."""
        inbox, handler = await lab.inbox(), Recorder(lab)
        await inbox.process(at(lab, "z1"), Recorder(lab))
        await inbox.accept(at(lab, "z2"), not_before=timedelta(days=1))
        await inbox.process(at(lab, "z3"), Recorder(lab))
        for id_ in ("z1", "z3"):
            await lab.make_older(id_, days=60)
        await inbox.cleanup(older_than=timedelta(days=30))
        await inbox.accept([at(lab, "a1", "z1"), at(lab, "b1", "z2"), at(lab, "c1", "z3")])
        await drain(inbox, handler)
        assert sorted(handler.runs) == ["a1", "c1"], "z1 and z3 are done, z2 is not"
        await lab.let_time_pass()
        await drain(inbox, handler)
        assert sorted(handler.runs) == ["a1", "b1", "c1", "z2"]

    async def test_a_cleanup_does_not_satisfy_what_has_not_come(self, lab: Lab) -> None:
        """Nobody knows whether a position in a gap was done. One above all that was done is not."""
        inbox, handler = await lab.inbox(), Recorder(lab)
        await inbox.process(at(lab, "z3"), Recorder(lab))
        await lab.make_older("z3", days=60)
        assert await inbox.cleanup(older_than=timedelta(days=30)) == 1
        await inbox.accept([at(lab, "a1", "z4"), at(lab, "b1", "z3")])
        await drain(inbox, handler)
        assert handler.runs == ["b1"]

    async def test_an_unmet_cause_is_no_attempt_however_often_it_is_looked_at(self, lab: Lab) -> None:
        inbox, handler = await lab.inbox(retry=SOON), Recorder(lab)
        await inbox.accept([at(lab, "a1", "y1", "z1"), at(lab, "b1", "z1")])
        for _ in range(5):
            await lab.let_time_pass()
            assert await drain(inbox, handler) == []
        await asyncio.gather(*(inbox.process(at(lab, id_), Recorder(lab)) for id_ in ("y1", "z1")))
        await drain(inbox, handler)
        assert sorted(handler.runs) == ["a1", "b1"]
        for id_ in ("a1", "b1"):
            record = await record_of(inbox, at(lab, id_))
            assert (record.attempts, record.started) == (1, 0)
