"""The obvious loop (process, then commit, no error handling) under a broker and a cluster that are no friends of it.

The broker lives here: a log with partitions and committed offsets, as Kafka has. Everything after the committed offset
is delivered again to whoever gets the partition next. A consumer that is silent for too long loses its partitions while
it is still at work, so two have the same message in hand, and its commits are refused from then on. The log itself says
a quarter of its messages twice. The consumers (tests/naive_consumer.py) are real processes: they die of every error,
some are killed at work, some between their own commit and the broker's, some are shut down, and all are started again.

At the end every message has exactly one effect. That the trouble was real is asserted too, and two loops that are wrong
have to be caught by the same harness.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import re
import signal
import sys
from asyncio.subprocess import PIPE, Process
from collections import Counter, deque
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from enum import Enum
from pathlib import Path
from typing import Any

import pytest

from onceward import Message
from onceward.testing import Lab
from onceward.testing.lab import Recorder

CONSUMERS = 3
PARTITIONS = 3
MESSAGES = 150
REPEATED = MESSAGES // 4
SLOW = 3
REFUSED = 4
SESSION = 1.0
"""Seconds a consumer may keep a record in hand, before its partitions go to others."""
TAKES = 1.6
"""Seconds that a slow handler takes: longer than the session."""
DEADLINE = 90.0
"""Seconds for all of it. It needs a fraction of them; then it is stuck."""
SEED = 20240116


@pytest.fixture(params=["sqlite", "postgres"])
def lab(request: pytest.FixtureRequest) -> Lab:
    found: Lab = request.getfixturevalue(f"{request.param}_lab")
    return found


# --- what there is to do, and what goes wrong -----------------------------------------------------------------------


class Record:
    """One entry of the log."""

    def __init__(self, id_: str, payload: dict[str, Any]) -> None:
        self.id = id_
        self.payload = payload
        self.delivered = 0


class Log:
    """Which messages, in which partition, how often. The last record of partition 0 is the finale: slow, and alone."""

    def __init__(self, chance: random.Random) -> None:
        self.ids = [f"order-{number:03}" for number in range(MESSAGES)]
        troubled = chance.sample(self.ids, SLOW + REFUSED)
        self.slow, self.refused = set(troubled[:SLOW]), set(troubled[SLOW:])
        said = list(self.ids)
        for id_ in chance.sample(self.ids, REPEATED):
            said.insert(chance.randint(said.index(id_) + 1, len(said)), id_)
        self.partitions: list[list[Record]] = [[] for _ in range(PARTITIONS)]
        for id_ in said:
            self.partitions[chance.randrange(PARTITIONS)].append(self._record(id_))
        self.finale = Record("finale", {"takes": TAKES, "refused": 0})
        self.partitions[0].append(self.finale)
        self.ids.append("finale")

    def _record(self, id_: str) -> Record:
        return Record(id_, {"takes": TAKES if id_ in self.slow else 0, "refused": 2 if id_ in self.refused else 0})

    def __len__(self) -> int:
        return sum(map(len, self.partitions))


class Moment(Enum):
    """When a consumer is struck."""

    AT_WORK = "killed while it has a record in hand"
    BEFORE_ACK = "killed when its commit is on the way, which gets lost"
    SHUT_DOWN = "interrupted while it has a record in hand"


MOMENTS = [Moment.AT_WORK] * 5 + [Moment.BEFORE_ACK] * 5 + [Moment.SHUT_DOWN] * 3
SIGNALS = {Moment.SHUT_DOWN: signal.SIGINT}

Strike = Callable[[int, signal.Signals], bool]


# --- the broker -----------------------------------------------------------------------------------------------------


class Partition:
    def __init__(self, number: int, log: list[Record]) -> None:
        self.number = number
        self.log = log
        self.committed = 0
        self.position = 0
        self.owner: Session | None = None

    def give_to(self, session: Session) -> None:
        self.owner = session
        self.position = self.committed

    @property
    def done(self) -> bool:
        return self.committed == len(self.log)


class Session:
    """One connected consumer."""

    def __init__(self, pid: int, writer: asyncio.StreamWriter) -> None:
        self.pid = pid
        self.writer = writer
        self.polling = False
        self.in_hand: tuple[Partition, Record] | None = None
        self.patience: asyncio.TimerHandle | None = None

    def say(self, **answer: Any) -> None:
        self.writer.write(json.dumps(answer).encode() + b"\n")

    def heard(self) -> None:
        if self.patience is not None:
            self.patience.cancel()
            self.patience = None


class Broker:
    """Hands out records, remembers commits, and is the one who knows when a consumer is at a bad moment."""

    def __init__(self, log: Log, chance: random.Random) -> None:
        self.log = log
        self.partitions = [Partition(number, records) for number, records in enumerate(log.partitions)]
        self.done = asyncio.Event()
        self.tally: Counter[str] = Counter()
        self.strike: Strike = lambda _pid, _signal: False
        self._chance = chance
        self._members: list[Session] = []
        self._evicted: set[Session] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        # After how many deliveries which trouble is ordered; it strikes as soon as somebody is at that moment.
        moments = chance.sample(MOMENTS, len(MOMENTS))
        self._plan = dict(zip(chance.sample(range(5, len(log) - 40), len(moments)), moments, strict=True))
        self._ordered: deque[Moment] = deque()

    def __str__(self) -> str:
        at = ", ".join(f"{p.committed} of {len(p.log)}" for p in self.partitions)
        return f"committed {at}; {dict(self.tally)}"

    @asynccontextmanager
    async def listening(self) -> AsyncIterator[int]:
        """The port, as long as the block lasts."""

        def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            task = asyncio.ensure_future(self._serve(reader, writer))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

        server = await asyncio.start_server(accept, "127.0.0.1", 0)
        try:
            yield server.sockets[0].getsockname()[1]
        finally:
            server.close()
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)
            await server.wait_closed()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        session: Session | None = None
        try:
            async for line in reader:
                match json.loads(line):
                    case {"join": pid}:
                        session = Session(pid, writer)
                        self._join(session)
                    case {"poll": True} if session is not None:
                        self._poll(session)
                    case {"commit": [number, offset]} if session is not None:
                        self._commit(session, self.partitions[number], offset)
        except ConnectionError:
            pass  # it is dead, which ends the connection in one way or the other
        finally:
            if session is not None:
                self._leave(session)
            writer.close()
            with suppress(ConnectionError):
                await writer.wait_closed()

    # --- who has which partition ---------------------------------------------------------------------------------

    def _join(self, session: Session) -> None:
        self._members.append(session)
        self._balance()

    def _leave(self, session: Session) -> None:
        session.heard()
        self._evicted.discard(session)
        if session in self._members:
            self._members.remove(session)
            self._balance()

    def _evict(self, session: Session) -> None:
        """It has said nothing for too long. It may still be at work, and nobody tells it."""
        self.tally["evictions"] += 1
        self._members.remove(session)
        self._evicted.add(session)
        self._balance()

    def _balance(self) -> None:
        for partition in self.partitions:
            if partition.owner not in self._members:
                partition.owner = None
                if self._members:
                    partition.give_to(min(self._members, key=self._load))
        self._share_with_newcomers()
        self._hand_out()

    def _share_with_newcomers(self) -> None:
        for poor in [session for session in self._members if self._load(session) == 0]:
            rich = max(self._members, key=self._load)
            spare = [
                p for p in self.partitions if p.owner is rich and (rich.in_hand is None or p is not rich.in_hand[0])
            ]
            if self._load(rich) > 1 and spare:
                spare[0].give_to(poor)

    def _load(self, session: Session) -> int:
        return sum(partition.owner is session for partition in self.partitions)

    # --- records -------------------------------------------------------------------------------------------------

    def _poll(self, session: Session) -> None:
        session.heard()
        session.in_hand = None
        if session in self._evicted:
            session.say(fenced=True)
            return
        session.polling = True
        self._hand_out()

    def _hand_out(self) -> None:
        for session in list(self._members):
            if not session.polling:
                continue
            if self.done.is_set():
                session.polling = False
                session.say(end=True)
                continue
            ready = [p for p in self.partitions if p.owner is session and self._is_ready(p)]
            if ready:
                self._deliver(session, self._chance.choice(ready))

    def _is_ready(self, partition: Partition) -> bool:
        if partition.position == len(partition.log):
            return False
        if partition.log[partition.position] is not self.log.finale:
            return True
        # The finale needs an audience: somebody idle, who is handed it too as soon as the first one is too slow.
        rest = sum(p.committed for p in self.partitions) == len(self.log) - 1
        return rest and (self.log.finale.delivered > 0 or sum(session.polling for session in self._members) > 1)

    def _deliver(self, session: Session, partition: Partition) -> None:
        offset, record = partition.position, partition.log[partition.position]
        partition.position += 1
        self.tally["deliveries"] += 1
        self.tally["redeliveries"] += record.delivered > 0
        self.tally["takeovers"] += any(slow.in_hand == (partition, record) for slow in self._evicted)
        record.delivered += 1
        session.polling, session.in_hand = False, (partition, record)
        session.patience = asyncio.get_running_loop().call_later(SESSION, self._evict, session)
        session.say(
            partition=partition.number, offset=offset, times=record.delivered, id=record.id, payload=record.payload
        )
        self._trouble(session)

    def _commit(self, session: Session, partition: Partition, offset: int) -> None:
        session.heard()
        if Moment.BEFORE_ACK in self._ordered and self._strike(session, Moment.BEFORE_ACK):
            self._ordered.remove(Moment.BEFORE_ACK)
            return
        session.in_hand = None
        if partition.owner is not session:
            self.tally["fenced"] += 1
            session.say(fenced=True)
            return
        partition.committed = offset
        session.say(committed=offset)
        if all(p.done for p in self.partitions):
            self.done.set()
        self._hand_out()

    # --- trouble -------------------------------------------------------------------------------------------------

    def _trouble(self, session: Session) -> None:
        ordered = self._plan.get(self.tally["deliveries"])
        if ordered is not None:
            self._ordered.append(ordered)
        for moment in (Moment.AT_WORK, Moment.SHUT_DOWN):
            if moment in self._ordered:
                self._ordered.remove(moment)
                within = self._chance.uniform(0, 0.02)
                asyncio.get_running_loop().call_later(within, self._strike_at_work, session, moment)
                return

    def _strike_at_work(self, session: Session, moment: Moment) -> None:
        if session.in_hand is None or session not in self._members or not self._strike(session, moment):
            self._ordered.append(moment)  # it had just finished, or died of something else: the next one

    def _strike(self, session: Session, moment: Moment) -> bool:
        struck = not self.done.is_set() and self.strike(session.pid, SIGNALS.get(moment, signal.SIGKILL))
        self.tally[moment.name] += struck
        return struck


# --- the cluster ----------------------------------------------------------------------------------------------------


@asynccontextmanager
async def started(job: dict[str, Any]) -> AsyncIterator[Process]:
    """A consumer process, which does not outlive the block."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, str(Path(__file__).with_name("naive_consumer.py")), json.dumps(job),
        stdout=PIPE, stderr=PIPE, start_new_session=True, env=os.environ | {"PYTHONDONTWRITEBYTECODE": "1"},
    )  # fmt: skip
    try:
        yield process
    finally:
        if process.returncode is None:
            process.kill()
            await process.communicate()


class Cluster:
    """Keeps so many consumers running, whatever they die of, and counts what that was."""

    EXPECTED = frozenset({"CardRefused", "TryLater", "CommitFenced"})

    def __init__(self, loop: str, lab: Lab, broker: Broker, port: int, chance: random.Random) -> None:
        self.deaths: Counter[str] = Counter()
        self.events: Counter[str] = Counter()
        self.longest_shut_down = 0.0
        self._job = {"loop": loop, "url": lab.url, "port": port}
        self._broker = broker
        self._chance = chance
        self._running: dict[int, Process] = {}
        self._struck: dict[int, float] = {}
        broker.strike = self._strike

    def __str__(self) -> str:
        return f"deaths {dict(self.deaths)}; events {dict(self.events)}"

    async def run(self) -> None:
        async with asyncio.TaskGroup() as slots:
            for _ in range(CONSUMERS):
                slots.create_task(self._keep_one())

    async def _keep_one(self) -> None:
        while not self._broker.done.is_set():
            async with started(self._job | {"wait": self._chance.choice([0.2, 5.0])}) as process:
                self._running[process.pid] = process
                try:
                    out, err = await process.communicate()
                finally:
                    del self._running[process.pid]
            self._count(process, out.decode(), err.decode())

    def _strike(self, pid: int, how: signal.Signals) -> bool:
        process = self._running.get(pid)
        if process is None or process.returncode is not None or pid in self._struck:
            return False
        self._struck[pid] = asyncio.get_running_loop().time()
        with suppress(ProcessLookupError):
            os.kill(pid, how)  # process.send_signal() would reap the dead before asyncio does, and their code is lost
        return True

    def _count(self, process: Process, out: str, err: str) -> None:
        """By what it died of. Anything but what this test does to it is a failure of the test, at once."""
        self.events.update(line for line in out.split("\n")[:-1] if line)
        code, struck = process.returncode or 0, self._struck.pop(process.pid, None)
        if code < 0 and struck is not None:
            self.deaths[signal.Signals(-code).name] += 1
            took = asyncio.get_running_loop().time() - struck
            self.longest_shut_down = max(self.longest_shut_down, took)
            return
        names = re.findall(r"^(?:\w+\.)*([A-Z]\w*)(?::.*)?$", err, re.MULTILINE)
        if code != 0 and names and names[-1] in self.EXPECTED:
            self.deaths[names[-1]] += 1
        elif code != 0 or not self._broker.done.is_set():
            raise AssertionError(f"a consumer ended with {code}, which nobody meant it to:\n{err}")


class Result:
    def __init__(self, log: Log, broker: Broker, cluster: Cluster, effects: list[str]) -> None:
        self.log = log
        self.broker = broker
        self.cluster = cluster
        self.effects = Counter(effects)
        self.lost = sorted(set(log.ids) - set(effects))
        self.doubled = sorted(id_ for id_, times in self.effects.items() if times > 1)


async def run(loop: str, lab: Lab) -> Result:
    """Until everything is committed and every consumer, also one that was given up, has ended."""
    chance = random.Random(SEED)
    log = Log(chance)
    broker = Broker(log, chance)
    async with broker.listening() as port:
        cluster = Cluster(loop, lab, broker, port, chance)
        try:
            async with asyncio.timeout(DEADLINE):
                await cluster.run()
        except TimeoutError:
            pytest.fail(f"not done after {DEADLINE:g} s: {broker}; {cluster}")
    print(f"{broker}; {cluster}")
    return Result(log, broker, cluster, await lab.effects())


# --- the claims -----------------------------------------------------------------------------------------------------


@pytest.mark.slow
async def test_the_naive_loop_loses_nothing_and_doubles_nothing(lab: Lab) -> None:
    result = await run("onceward", lab)
    assert (result.lost, result.doubled) == ([], [])
    assert result.effects == Counter(result.log.ids)
    assert [p.committed for p in result.broker.partitions] == [len(p.log) for p in result.broker.partitions]
    states = await lab.query("SELECT state, count(*) FROM onceward_records GROUP BY state")
    assert states == [("processed", len(result.log.ids))]
    refused = await lab.query("SELECT message_id, attempts FROM onceward_records WHERE attempts > 1")
    assert dict(refused) == dict.fromkeys(result.log.refused, 3), "two refusals and a success, through all the deaths"
    # And it was not a walk in the park.
    tally, deaths, events = result.broker.tally, result.cluster.deaths, result.cluster.events
    assert len(result.log) == MESSAGES + REPEATED + 1
    assert deaths["SIGKILL"] >= 8
    assert deaths["SIGINT"] >= 1
    assert result.cluster.longest_shut_down < 5, "whoever is told to go, goes"
    assert deaths["CardRefused"] >= REFUSED
    assert deaths["TryLater"] >= 1
    assert deaths["CommitFenced"] >= 1
    assert tally["redeliveries"] >= 10
    assert tally["takeovers"] >= 1
    assert events["Deferred backoff"] >= 1
    assert events["Duplicate"] >= REPEATED


@pytest.mark.slow
async def test_without_an_inbox_the_same_trouble_doubles_effects(lab: Lab) -> None:
    """A control: the harness notices what it is there to notice."""
    result = await run("no inbox", lab)
    said = Counter(record.id for records in result.log.partitions for record in records)
    assert result.lost == []
    assert len(result.doubled) >= 1
    assert [id_ for id_ in result.doubled if result.effects[id_] > said[id_]], "not only what the log repeats"
    assert result.effects["finale"] >= 2, "two had it in hand at the same time"
    assert result.cluster.deaths["SIGKILL"] >= 8
    assert result.broker.tally["takeovers"] >= 1


@pytest.mark.slow
async def test_with_the_commit_first_the_same_trouble_loses_messages(lab: Lab) -> None:
    """The other control: acknowledged and not processed is gone, even with an inbox."""
    result = await run("commit first", lab)
    assert result.doubled == []
    assert result.log.refused <= set(result.lost), "refused after the commit, and never seen again"


# --- the end of a process -------------------------------------------------------------------------------------------


async def test_a_process_whose_main_function_ends_in_the_middle_of_the_work_ends_too(lab: Lab) -> None:
    """A pod that is told to stop: asyncio.run() cancels every task that there is, and waits for all of them."""
    ids = [f"{number:02}" for number in range(6)]
    async with started({"loop": "torn down", "url": lab.url, "port": 0, "ids": ids}) as process:
        try:
            async with asyncio.timeout(10):
                out, err = await process.communicate()
        except TimeoutError:
            pytest.fail("10 s after its main function has ended, the process is still there")
    assert (process.returncode, err.decode()) == (0, "")
    assert int(out) >= 2, "several were at work"
    inbox = await lab.inbox()
    for id_ in ids:
        await inbox.process(Message(id_, "order.paid", {"takes": 0, "refused": 0}, source="shop"), Recorder(lab))
    assert await lab.effects() == ids, "committed or rolled back, and the redelivery knows which"
