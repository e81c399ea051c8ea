"""A race: publishers that send everything twice, workers that come, go, die and freeze, hot lanes, failures by chance
and dependencies. Afterwards nothing is lost, doubled, reordered within a stream or before its cause, or stranded.

The ledger is written by the handlers in their transactions, so it says what took effect, and in which order. The same
race with a known mistake is lost: that is what shows that it can be.
"""

from __future__ import annotations

import asyncio
import os
import random
import time
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from itertools import cycle
from typing import Any

import asyncpg
import pytest

from onceward import Inbox, Kind, Message, Position
from onceward.testing import PostgresLab
from onceward.testing.contract.queue.fleets import make_ledger
from onceward.testing.hand import Hand
from tests.race_child import MISTAKE, VARIABLE

SECONDS = 60.0
HOT, COLD, SHARED = 2, 20, 6
"""Streams that get most of the messages, those that get the others, and those that share a lane."""
MOST_PENDING = 400
PENDING = "SELECT (SELECT count(*) FROM onceward_pending) + (SELECT count(seq) FROM onceward_lanes)"
STRANDED = """
    SELECT count(*) FROM onceward_pending p WHERE NOT EXISTS (SELECT FROM onceward_lanes l WHERE l.lane = p.lane)
"""


class Plan:
    """What is published, in this order; who depends on what."""

    def __init__(self, chance: random.Random) -> None:
        self.chance = chance
        self.next: Counter[str] = Counter()
        self.published: list[Message[Any]] = []

    def message(self, stream: str, *, loose: bool = False, **payload: Any) -> Message[Any]:
        self.next[stream] += 1
        number, needed = self.next[stream], ()
        recent = [one for one in self.published[-60:] if one.stream is not None]
        if recent and self.chance.random() < 0.15:
            causes = [self.chance.choice(recent) for _ in range(self.chance.randint(1, 2))]
            needed = tuple(Position(one.stream or "", one.position or 0) for one in causes if one.stream != stream)
        place: dict[str, Any] = {} if loose else {"stream": stream, "position": number}
        message = Message(f"{stream}-{number}", "order.paid", {"n": number} | payload, depends_on=needed, **place)
        self.published.append(message)
        return message

    def some(self, of: str) -> list[Message[Any]]:
        """A list for one call: one or several streams, the positions of each in any order. A stream is of one
        publisher: what is accepted after something else of its stream comes later."""
        streams = [f"hot{of}{n}" for n in range(HOT)] * 6 + [f"cold{of}{n}" for n in range(COLD)]
        found = [self.message(self.chance.choice(streams)) for _ in range(self.chance.randint(1, 12))]
        self.chance.shuffle(found)
        return found


class Race:
    def __init__(self, lab: PostgresLab, *, seed: int, control: bool = False, mistake: str = "") -> None:
        self.lab = lab
        self.chance = random.Random(seed)
        self.plan = Plan(self.chance)
        self.mistake = mistake
        self.control = control
        """It is known that something is wrong."""
        self.over = asyncio.Event()
        self.hands: list[Hand] = []
        self.problems: list[str] = []
        self.killed = self.frozen = 0
        self.troubles = cycle(["kill", "freeze", "kill", "stop"])

    # --- publishers -----------------------------------------------------------------------------------------

    async def publish(self, name: str, one: Inbox[Any], two: Inbox[Any], pool: asyncpg.Pool) -> None:
        """Everything twice: by two instances, at the same time or one after the other."""
        while not self.over.is_set():
            await self._not_too_many(pool)
            messages = self.plan.some(name)
            if self.chance.random() < 0.3:
                await asyncio.gather(self._accept(one, messages), self._accept(two, messages[::-1]))
            else:
                await self._accept(one, messages)
                await self._accept(two, self.chance.sample(messages, len(messages)))
            if self.chance.random() < 0.05 and messages[0].depends_on == ():
                await one.process(messages[0], _never)  # a delivery to the inline side: it is in the queue

    async def _accept(self, inbox: Inbox[Any], messages: list[Message[Any]], **options: Any) -> None:
        for outcome in await inbox.accept(messages, **options):
            if outcome.kind not in (Kind.ACCEPTED, Kind.DUPLICATE):
                self.problems.append(f"accept said {outcome}")

    async def publish_in_transactions(self, inbox: Inbox[Any], pool: asyncpg.Pool) -> None:
        """Lanes that end while somebody is adding to them: the second message of a lane is added while the first one
        runs, and committed when that is done. Some are rolled back, and sent again."""
        number = 0
        while not self.over.is_set():
            await self._not_too_many(pool)
            number += 1
            stream = f"brief{number}"  # no message comes later that would wake it
            first, second = self.plan.message(stream, seconds=0.15), self.plan.message(stream)
            await self._accept(inbox, [first])
            async with pool.acquire() as connection:
                if self.chance.random() < 0.3:
                    transaction = connection.transaction()
                    await transaction.start()
                    await self._accept(inbox, [second], tx=connection)
                    await transaction.rollback()
                async with connection.transaction():
                    await self._accept(inbox, [second], tx=connection)
                    await self._is_done(first.id, pool)
            if self.chance.random() < 0.5:
                await self._accept(inbox, [second])

    async def _is_done(self, id_: str, pool: asyncpg.Pool) -> None:
        deadline = time.monotonic() + 15
        while not await pool.fetchval("SELECT 1 FROM ledger WHERE id = $1", id_) and time.monotonic() < deadline:
            if self.over.is_set():
                return
            await asyncio.sleep(0.005)

    async def publish_shared(self, inbox: Inbox[Any], pool: asyncpg.Pool) -> None:
        """Several streams in one lane, where who waits is overtaken."""
        while not self.over.is_set():
            await self._not_too_many(pool)
            found = [self.plan.message(f"shared{self.chance.randrange(SHARED)}") for _ in range(6)]
            await self._accept(inbox, found, lane="shared")
            await self._accept(inbox, found, lane="shared")

    async def publish_loose(self, one: Inbox[Any], two: Inbox[Any], pool: asyncpg.Pool) -> None:
        """Messages without a stream, some of which wait for others."""
        while not self.over.is_set():
            await self._not_too_many(pool)
            found = [self.plan.message("loose", loose=True) for _ in range(self.chance.randint(1, 8))]
            await asyncio.gather(self._accept(one, found), self._accept(two, found[::-1]))

    async def _not_too_many(self, pool: asyncpg.Pool) -> None:
        await asyncio.sleep(0.03)
        while await pool.fetchval(PENDING) > MOST_PENDING and not self.over.is_set():
            await asyncio.sleep(0.05)

    # --- workers --------------------------------------------------------------------------------------------

    async def hire(self) -> Hand:
        job = {"ledger": True, "concurrency": 2, "batch": self.chance.choice([1, 3, 20]), "quiet": True}
        chance = {"fail": 0.03, "after": 0.05, "base": 0.01, "cap": 0.05, "max_attempts": 1000, "freeze_after": 2.0}
        hand = await self.lab.hand(module="tests.race_child", **job, **chance)
        await hand.hear("ready")
        self.hands.append(hand)
        return hand

    async def disturb(self) -> None:
        """Every now and then one of the workers is killed, told to stop, or frozen for a while; another one comes."""
        while not self.over.is_set():
            with suppress(TimeoutError):
                await asyncio.wait_for(self.over.wait(), self.chance.uniform(1.0, 4.0))
            if self.over.is_set():
                return
            await self.hire()
            hand = self.hands.pop(self.chance.randrange(len(self.hands) - 1))
            match next(self.troubles):
                case "kill":
                    await hand.kill()
                    self.killed += 1
                case "stop":
                    if await hand.stop() != 0:
                        self.problems.append(f"a worker ended badly: {hand.lines[-3:]}")
                case _:
                    hand.freeze()
                    await asyncio.sleep(self.chance.uniform(0.5, 4.0))
                    hand.thaw()
                    self.hands.append(hand)
                    self.frozen += 1

    # --- the whole ------------------------------------------------------------------------------------------

    async def run(self, seconds: float, *, patience: float = 40.0) -> list[str]:
        lab = self.lab
        await make_ledger(lab)
        one, two = await lab.inbox(wait=30, listeners=()), await lab.inbox(wait=30, listeners=())
        async with self._environment(), asyncpg.create_pool(lab.url, min_size=1, max_size=6) as pool:
            await asyncio.gather(*(self.hire() for _ in range(3)))
            tasks = [
                asyncio.ensure_future(job)
                for job in (
                    self.publish("x", one, two, pool),
                    self.publish("y", two, one, pool),
                    self.publish_shared(one, pool),
                    self.publish_loose(one, two, pool),
                    self.publish_in_transactions(two, pool),
                    self.disturb(),
                )
            ]
            await asyncio.wait(tasks, timeout=seconds, return_when=asyncio.FIRST_EXCEPTION)
            while not self.control and (self.killed < 2 or not self.frozen) and not any(task.done() for task in tasks):
                await asyncio.sleep(0.1)  # a machine that has too much to do
            self.over.set()
            for error in await asyncio.gather(*tasks, return_exceptions=True):
                if error is not None:
                    self.problems.append(f"a publisher failed: {error!r}")
            await self._finish(pool, patience)
            ends = [hand.stop() if not self.control else hand.kill() for hand in self.hands]
            codes = await asyncio.gather(*ends)
            if any(codes) and not self.control:
                self.problems.append(f"workers ended with {codes}")
            await self._audit(pool)
        return self.problems

    @asynccontextmanager
    async def _environment(self) -> AsyncIterator[None]:
        os.environ[VARIABLE] = self.mistake
        try:
            yield
        finally:
            del os.environ[VARIABLE]

    async def _finish(self, pool: asyncpg.Pool, patience: float) -> None:
        deadline = time.monotonic() + patience
        while await pool.fetchval(PENDING) and time.monotonic() < deadline:
            await asyncio.sleep(0.1)

    async def _audit(self, pool: asyncpg.Pool) -> None:
        plan, rows = self.plan, await pool.fetch("SELECT n, id, stream, position FROM ledger ORDER BY n")
        published = {message.id for message in plan.published}
        times = Counter(row["id"] for row in rows)
        place = {row["id"]: row["n"] for row in rows}
        lost = published - times.keys()
        doubled = [id_ for id_, count in times.items() if count > 1]
        last: dict[str, int] = {}
        reordered = []
        for row in rows:
            if row["stream"] and row["position"] <= last.get(row["stream"], 0):
                reordered.append(row["id"])
            last[row["stream"]] = row["position"]
        causes = [
            (message.id, cause)
            for message in plan.published
            for needed in message.depends_on
            if place.get(cause := f"{needed.stream}-{needed.position}", 0) > place.get(message.id, 0) > 0
        ]
        left = {
            table: await pool.fetchval(f"SELECT count(*) FROM {table}")
            for table in ("onceward_lanes", "onceward_pending", "onceward_waits")
        }
        states = dict(await pool.fetch("SELECT state, count(*) FROM onceward_records GROUP BY state"))
        for what, found in (
            ("lost", sorted(lost)), ("doubled", doubled), ("reordered", reordered), ("before its cause", causes),
            ("unknown", sorted(times.keys() - published)),
        ):  # fmt: skip
            if found:
                self.problems.append(f"{len(found)} {what}: {found[:5]}")
        if any(left.values()):
            self.problems.append(f"not done: {left}")
        if stranded := await pool.fetchval(STRANDED):
            self.problems.append(f"{stranded} stranded: no worker will ever look for them")
        if states != {"processed": len(published)}:
            self.problems.append(f"{len(published)} were published, and the records are {states}")


async def _never(message: Message[Any], tx: Any) -> None:
    raise AssertionError("the queue has it")


@pytest.mark.slow
@pytest.mark.timeout(240)
async def test_a_race_of_a_minute_loses_doubles_reorders_and_strands_nothing(postgres_lab: PostgresLab) -> None:
    race = Race(postgres_lab, seed=int(os.environ.get("ONCEWARD_RACE_SEED", "0")) or random.randrange(2**32))
    assert await race.run(float(os.environ.get("ONCEWARD_RACE_SECONDS", SECONDS))) == []
    assert len(race.plan.published) > 500
    assert race.killed >= 2
    dependants = [message for message in race.plan.published if message.depends_on]
    assert len(dependants) > 20


@pytest.mark.slow
@pytest.mark.timeout(120)
async def test_control_claim_and_read_in_one_statement_is_caught(postgres_lab: PostgresLab) -> None:
    """As written by hand: without the row count that notices afterwards."""
    closing = await source_of(postgres_lab, "onceward_close")
    assert "IF missing > 0 THEN" in closing, "onceward_close has changed: look for where it counts"
    await postgres_lab.query(closing.replace("IF missing > 0 THEN", "IF false THEN"))
    source = await source_of(postgres_lab, "onceward_take")
    held = "turn tid[] := current_setting('onceward.turn');"
    assert held in source, "onceward_take has changed: look for which lanes it reads"
    seen = "turn tid[] := ARRAY (SELECT l.ctid FROM onceward_lanes l WHERE l.lane = ANY (claimed));"
    reading = source.replace(held, seen).replace("onceward_take(", "onceward_read(")
    assert "number integer)" in reading, "onceward_take has other parameters"
    reading = reading.replace("number integer)", "number integer, claimed uuid[])", 1)
    await postgres_lab.query(reading.replace("LANGUAGE plpgsql", "LANGUAGE plpgsql STABLE", 1))
    race = Race(postgres_lab, seed=1, control=True, mistake=MISTAKE)
    problems = await race.run(8, patience=3)
    assert any("doubled" in problem for problem in problems), f"the race would not have noticed: {problems}"


@pytest.mark.slow
@pytest.mark.timeout(120)
async def test_control_no_fence_on_going_idle_is_caught(postgres_lab: PostgresLab) -> None:
    """A lane is put to sleep, or ended, while somebody is adding to it."""
    source, fence = await source_of(postgres_lab, "onceward_touch"), "ORDER BY lane FOR KEY SHARE"
    assert fence in source, "onceward_touch has changed: look for where the fence is now"
    await postgres_lab.query(source.replace(fence, ""))
    problems = await Race(postgres_lab, seed=1, control=True).run(6, patience=3)
    assert any("stranded" in problem for problem in problems), f"the race would not have noticed: {problems}"


async def source_of(lab: PostgresLab, function: str) -> str:
    ((source,),) = await lab.query(f"SELECT pg_get_functiondef(oid) FROM pg_proc WHERE proname = '{function}'")
    return str(source)
