"""The crew: the worker processes of one world, seen from the parent. Those who die are replaced.

A worker's stdin and stdout are its connection to the broker. When the process dies the connection is dead with it:
nothing it may still have said is believed, and what it had is delivered again. Kills are ordered by `strike` and
carried out as soon as a worker is at that moment of its work, with SIGKILL, from one instruction to the next.
"""

from __future__ import annotations

import asyncio
import random
import sys
from asyncio.subprocess import PIPE, Process
from collections import Counter
from contextlib import suppress
from pathlib import Path

from onceward.demo import wire
from onceward.demo.broker import Broker
from onceward.demo.faults import Moment
from onceward.demo.shop import BANK_TAKES
from onceward.demo.tally import News, Tally
from onceward.demo.wire import Line, Said

PREFETCH = 8
"""Deliveries that a worker has in flight, at the most."""


class WorkerFailed(Exception):
    """A worker process ended by itself."""


class Crew:
    def __init__(self, world: str, file: Path, broker: Broker, tally: Tally, news: News) -> None:
        self.world = world
        self.broker = broker
        self.tally = tally
        self.news = news
        self.ordered: Counter[Moment] = Counter()
        """Kills that are ordered and not yet carried out."""
        self._file = file
        self._workers: set[Worker] = set()

    def strike(self, moment: Moment) -> None:
        """Kill the next worker that is at this moment of its work."""
        self.ordered[moment] += 1

    async def run(self, size: int) -> None:
        """Keep so many workers at work until the broker is done."""
        async with asyncio.TaskGroup() as slots:
            for number in range(1, size + 1):
                slots.create_task(self._keep(number))
            await self.broker.done.wait()
            for worker in self._workers:
                worker.dismiss()

    async def _keep(self, number: int) -> None:
        while not self.broker.done.is_set():
            worker = Worker(self, number, await self._start())
            self._workers.add(worker)
            try:
                await worker.serve()
            finally:
                self._workers.discard(worker)
                await worker.bury()
            if worker.fell:
                raise WorkerFailed(f"A worker ({self.world}) ended by itself, exit {worker.code}.\n{self._errors()}")

    async def _start(self) -> Process:
        # A session of its own: Ctrl-C in the terminal is for the parent, which then ends its children itself.
        with self._file.with_suffix(".err").open("ab") as errors:
            return await asyncio.create_subprocess_exec(
                sys.executable, "-m", "onceward.demo.worker", self.world, str(self._file),
                stdin=PIPE, stdout=PIPE, stderr=errors, start_new_session=True,
            )  # fmt: skip

    def _errors(self) -> str:
        return self._file.with_suffix(".err").read_text(errors="replace").strip()[-4000:]


class Worker:
    """One process, and the deliveries it was handed."""

    def __init__(self, crew: Crew, number: int, process: Process) -> None:
        assert process.stdin is not None  # noqa: S101 - they are pipes
        assert process.stdout is not None  # noqa: S101
        self._crew = crew
        self._number = number
        self._process = process
        self._stdin = process.stdin
        self._stdout = process.stdout
        self._room = asyncio.Semaphore(0)
        self._handed: set[int] = set()
        self._working: set[int] = set()
        self._feeding: asyncio.Task[None] | None = None
        self._killed = False

    async def serve(self) -> None:
        """Hand it deliveries and hear what it says, until it is gone."""
        self._feeding = asyncio.create_task(self._feed())
        try:
            if self._crew.broker.done.is_set():
                self.dismiss()
            async for line in self._stdout:
                if not self._killed:
                    self._hear(wire.decode_line(line))
            await self._process.wait()
        finally:
            self._disconnect()

    async def _feed(self) -> None:
        with suppress(ConnectionError):  # it is dead: `serve` hears that too
            while await self._room.acquire():
                delivery = await self._crew.broker.take()
                self._handed.add(delivery.number)
                self._working.add(delivery.number)
                self._stdin.write(wire.encode(delivery))
                await self._stdin.drain()
                self._at(Moment.AT_WORK)

    def _hear(self, line: Line) -> None:
        match line.said:
            case Said.READY:
                for _ in range(PREFETCH):
                    self._room.release()
            case Said.ACK:
                self._handed.discard(line.delivery)
                self._crew.broker.ack(line.delivery)
            case _:
                self._working.discard(line.delivery)
                self._room.release()
                self._count(line.said)

    def _count(self, said: Said) -> None:
        if said is Said.CHARGED:
            self._at(Moment.BEFORE_ACK)
        elif said is Said.SKIPPED:
            self._crew.tally.skipped += 1
        else:
            self._crew.tally.failed += 1

    # --- death ----------------------------------------------------------------------------------------------

    def _at(self, moment: Moment) -> None:
        """Carry out a kill that is ordered for this moment."""
        if not self._killed and self._crew.ordered[moment]:
            self._crew.ordered[moment] -= 1
            if moment is Moment.BEFORE_ACK:
                self._kill(moment)
            else:
                within = random.random() * 2 * BANK_TAKES
                asyncio.get_running_loop().call_later(within, self._kill_at_work)

    def _kill_at_work(self) -> None:
        if self._working and not self._killed:
            self._kill(Moment.AT_WORK)
        else:
            self._crew.strike(Moment.AT_WORK)  # it had just finished: another time

    def _kill(self, moment: Moment) -> None:
        self._killed = True
        with suppress(ProcessLookupError):
            self._process.kill()
        back = self._disconnect()
        self._crew.tally.killed += 1
        again = "1 delivery comes again" if back == 1 else f"{back} deliveries come again"
        self._crew.news.tell(self._crew.world, f"worker {self._number} killed {moment}, {again}")

    def _disconnect(self) -> int:
        """What it had is delivered again, to somebody else."""
        if self._feeding is not None:
            self._feeding.cancel()
        return self._crew.broker.bring_again(self._handed)

    def dismiss(self) -> None:
        """No more deliveries: it finishes and goes."""
        self._stdin.close()

    async def bury(self) -> None:
        """Leave nothing behind, also when the demo is interrupted."""
        if self._process.returncode is None:
            with suppress(ProcessLookupError):
                self._process.kill()
            await self._process.wait()
        self._stdin.close()

    @property
    def code(self) -> int | None:
        return self._process.returncode

    @property
    def fell(self) -> bool:
        """It ended, and neither had we dismissed it nor killed it."""
        return not self._killed and self.code != 0
