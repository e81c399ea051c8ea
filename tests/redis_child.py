"""A worker process on Redis that can be killed and frozen, `python -m tests.redis_child`, and how a test sees it.

The first line of its input is a job, each one after that an order, all as JSON; it says what happens as JSON lines. A
handler writes one effect through its tx. One that is held says that it is running, and waits until it is told to go on.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable
from contextlib import suppress
from typing import Any

import msgspec
import redis

from onceward import Inbox, Message, RetryPolicy
from onceward.connect import store_from_url
from onceward.current import current_or_none
from onceward.errors import CommitUnknown, LeaseLost, StoreUnavailable, TryLater
from onceward.redis.scripts import Script
from onceward.redis.servers import Servers

COMES_AGAIN = (StoreUnavailable, CommitUnknown, TryLater, LeaseLost)
"""What a broker loop answers with another delivery."""


class Job(msgspec.Struct):
    url: str
    consumer: str = "billing"
    wait: float = 10.0
    max_attempts: int | None = None
    kill_at: str = ""
    """ "before claim" and "after claim", as well for any other script; "handler" and "effect", "handler of m-1": there
    the process kills itself."""
    slow: float = 0.0
    """Seconds that a handler takes."""


class Order(msgspec.Struct):
    do: str
    """process, many, bulk: deliver once; drain: deliver each until it is settled; go: go on with what is held."""
    ids: list[str]
    hold: str = ""
    """ "await": handlers wait for `go`; "block": they wait for an entry in the list go:ID, and all else waits too."""
    fail: str = ""
    """ "error": handlers raise; "command": the second command of their tx fails; "cancel": they are cancelled."""
    concurrency: int = 8
    within: float = 30.0


def say(**line: Any) -> None:
    sys.stdout.write(json.dumps(line) + "\n")
    sys.stdout.flush()


class Working:
    """The orders of one job."""

    def __init__(self, job: Job, inbox: Inbox[Any]) -> None:
        self._job = job
        self._inbox = inbox
        self._going: dict[str, asyncio.Event] = {}
        self._orders: set[asyncio.Task[None]] = set()

    def take(self, order: Order) -> None:
        if order.do == "go":
            for id_ in order.ids:
                self._gate(id_).set()
            return
        task = asyncio.ensure_future(self._obey(order))
        self._orders.add(task)
        task.add_done_callback(self._orders.discard)

    async def done(self) -> None:
        await asyncio.gather(*self._orders)

    def _gate(self, id_: str) -> asyncio.Event:
        return self._going.setdefault(id_, asyncio.Event())

    async def _obey(self, order: Order) -> None:
        match order.do:
            case "process":
                await asyncio.gather(*(self._deliver(id_, order) for id_ in order.ids))
            case "drain":
                await self._drain(order)
            case _:
                await self._deliver_all(order)
        say(kind="obeyed", do=order.do)

    async def _deliver(self, id_: str, order: Order) -> bool:
        """Whether it is settled."""
        try:
            outcome = await self._inbox.process(message(id_), self._handler(order))
        except asyncio.CancelledError:
            say(kind="ended", id=id_, how="CancelledError")
        except Exception as error:
            say(kind="ended", id=id_, how=type(error).__name__)
            if not isinstance(error, (*COMES_AGAIN, ValueError)):
                say(kind="surprise", id=id_, text=f"{type(error).__name__}: {error}")
        else:
            say(kind="ended", id=id_, how=outcome.kind)
            return True
        return False

    async def _drain(self, order: Order) -> None:
        room, deadline = asyncio.Semaphore(order.concurrency), time.monotonic() + order.within

        async def settle(id_: str) -> None:
            async with room:
                while not await self._deliver(id_, order) and time.monotonic() < deadline:
                    await asyncio.sleep(0.02)

        await asyncio.gather(*(settle(id_) for id_ in order.ids))

    async def _deliver_all(self, order: Order) -> None:
        handler, messages = self._handler(order), [message(id_) for id_ in order.ids]

        async def together(messages: list[Message[Any]], tx: Any) -> list[Any]:
            return [await handler(one, tx) for one in messages]

        if order.do == "bulk":
            outcomes = await self._inbox.process_bulk(messages, together)
        else:
            outcomes = await self._inbox.process_many(messages, handler)
        for id_, outcome in zip(order.ids, outcomes, strict=True):
            say(kind="ended", id=id_, how=outcome.kind)

    def _handler(self, order: Order) -> Callable[[Message[Any], Any], Awaitable[Any]]:
        async def charge(message: Message[Any], tx: Any) -> dict[str, str]:
            reached(self._job, "handler", message.id)
            tx.rpush(tx.beside("effects"), message.id)
            reached(self._job, "effect", message.id)
            say(kind="running", id=message.id, fence=getattr(current_or_none(), "fence", None))
            await self._hold(message.id, order.hold)
            await fail(tx, order.fail)
            if self._job.slow:
                await asyncio.sleep(self._job.slow)
            return {"charged": message.id}

        return charge

    async def _hold(self, id_: str, how: str) -> None:
        if not how:
            return
        if how == "block":
            with redis.Redis.from_url(self._job.url.partition("?")[0]) as client:
                client.blpop([f"go:{id_}"], timeout=30)
            return
        try:
            await self._gate(id_).wait()
        except asyncio.CancelledError:
            say(kind="told", id=id_)
            raise


async def fail(tx: Any, how: str) -> None:
    match how:
        case "error":
            raise ValueError("no")
        case "command":
            tx.set(tx.beside("text"), "text").incr(tx.beside("text"))
        case "cancel":
            task = asyncio.current_task()
            assert task is not None
            task.cancel()
            await asyncio.sleep(0)


def message(id_: str) -> Message[Any]:
    return Message(id_, "order.paid", {"amount": 7})


def reached(job: Job, point: str, id_: str = "") -> None:
    if job.kill_at in (point, f"{point} of {id_}"):
        os.kill(os.getpid(), signal.SIGKILL)


def watch(job: Job) -> None:
    """Each script is a step, and before and after each the process may die."""

    def pointed(verb: Any) -> Any:
        async def run(self: Servers, script: Script, *args: Any, **options: Any) -> Any:
            reached(job, f"before {script.name}")
            reply = await verb(self, script, *args, **options)
            reached(job, f"after {script.name}")
            return reply

        return run

    for name in ("run", "run_all", "run_claims"):
        setattr(Servers, name, pointed(getattr(Servers, name)))


async def work() -> None:
    heard = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(heard), sys.stdin)
    job = msgspec.json.decode(await heard.readline(), type=Job)
    watch(job)
    retry = None if job.max_attempts is None else RetryPolicy(max_attempts=job.max_attempts, base=0.0)
    store = store_from_url(job.url)
    async with Inbox(store, consumer=job.consumer, retry=retry, wait=job.wait, listeners=()) as inbox:
        working = Working(job, inbox)
        say(kind="ready")
        while line := await heard.readline():
            working.take(msgspec.json.decode(line, type=Order))
        await working.done()


# --- as a test sees it --------------------------------------------------------------------------------------


class Child:
    """Such a process. All it says is heard at once, and kept."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self.process = process
        self.lines: list[dict[str, Any]] = []
        self._heard = asyncio.Condition()
        self._listening = asyncio.ensure_future(self._listen())

    @classmethod
    async def start(cls, url: str, **job: Any) -> Child:
        """One that is connected and waits for orders."""
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "tests.redis_child", stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE
        )
        child = cls(process)
        child._write({"url": url} | job)
        try:
            await child.hear(lambda: child.count("ready"))
        except BaseException:
            await child.clean_up()
            raise
        return child

    def _write(self, line: dict[str, Any]) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(line).encode() + b"\n")

    async def _listen(self) -> None:
        assert self.process.stdout is not None
        while raw := await self.process.stdout.readline():
            async with self._heard:
                self.lines.append(json.loads(raw))
                self._heard.notify_all()
        async with self._heard:
            self._heard.notify_all()

    def tell(self, do: str, ids: Iterable[str], **order: Any) -> None:
        self._write({"do": do, "ids": list(ids)} | order)

    def said(self, kind: str) -> dict[str, dict[str, Any]]:
        """The last line of this kind about each message."""
        return {line["id"]: line for line in self.lines if line["kind"] == kind and "id" in line}

    def ended(self) -> dict[str, str]:
        """How the last delivery of each message ended."""
        return {id_: line["how"] for id_, line in self.said("ended").items()}

    def count(self, kind: str) -> int:
        return Counter(line["kind"] for line in self.lines)[kind]

    async def hear(self, holds: Callable[[], Any], within: float = 30.0) -> None:
        """Listen until this is so."""

        def ready() -> bool:
            return bool(holds()) or self._listening.done() or self._at_end()

        async with self._heard:
            await asyncio.wait_for(self._heard.wait_for(ready), within)
        assert holds(), f"it ended before that: {self.lines[-5:]}"

    def _at_end(self) -> bool:
        assert self.process.stdout is not None
        return self.process.stdout.at_eof()

    async def obeyed(self, orders: int = 1, within: float = 30.0) -> None:
        await self.hear(lambda: self.count("obeyed") >= orders, within)

    async def running(self, ids: Iterable[str]) -> dict[str, int]:
        """The fences of these, once all of them are at work."""
        wanted = set(ids)
        await self.hear(lambda: wanted <= self.said("running").keys())
        return {id_: self.said("running")[id_]["fence"] for id_ in wanted}

    async def all_ended(self, ids: Iterable[str]) -> None:
        wanted = set(ids)
        await self.hear(lambda: wanted <= self.ended().keys())

    def freeze(self) -> None:
        """Comes back when it stands still."""
        self.process.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, self.process.pid, os.WSTOPPED)

    def thaw(self) -> None:
        self.process.send_signal(signal.SIGCONT)

    async def died(self, within: float = 30.0) -> None:
        """It has killed itself, or was killed."""
        assert await asyncio.wait_for(self.process.wait(), within) == -signal.SIGKILL
        await self._listening

    async def stop(self) -> None:
        """All orders are obeyed first."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        assert await asyncio.wait_for(self.process.wait(), 30) == 0
        await self._listening

    async def clean_up(self) -> None:
        """At the end of a test, whatever has become of it."""
        with suppress(ProcessLookupError):
            self.process.kill()
        await self.process.wait()
        await self._listening
        assert self.process.stdin is not None
        self.process.stdin.close()
        with suppress(OSError):
            await self.process.stdin.wait_closed()


if __name__ == "__main__":
    with suppress(BrokenPipeError):
        asyncio.run(work())
