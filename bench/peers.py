"""PostgreSQL: what others do, how fast, and whether it is right when a message comes twice or its handler fails.

Speed is that of new messages, against the same floors as in `single`. Then two counts, because a fast inbox that loses
messages is not an inbox: each message is given to two consumers at the same moment, and each message has a handler that
fails the first time. What is not acknowledged is delivered again, as a broker would.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack
from importlib import import_module
from typing import Any, cast

import asyncpg

from bench import postgres, single
from bench.flows import onceward_
from bench.flows.base import Flow, Handler, Process, Write
from bench.messages import new_messages
from bench.questions import Facts, World
from bench.rounds import Stage, Step, Variant
from onceward import Message

SLOW = 0.005
"""Seconds that the handler of a pair takes."""

DELIVERIES = 3
"""How often a message is delivered before we call it stuck."""


# By name, because a package may not be installed.
NAMES = ("sagaz_", "exactly_once_", "sqlalchemy_inbox", "processed_events")
MISSING = "not installed"


def others() -> dict[str, Flow | None]:
    """The flows by name; None where a package is missing."""
    return {name.rstrip("_"): _imported(name) for name in NAMES}


def _imported(name: str) -> Flow | None:
    try:
        return cast("Flow", import_module(f"bench.flows.{name}"))
    except ModuleNotFoundError as error:
        if error.name is None or error.name.startswith("bench"):
            raise
        return None


# --- speed --------------------------------------------------------------------------------------------------------


async def charge(message: Message[Any], write: Write) -> None:
    await write(message)


def stepping(process: Process) -> Step:
    async def step(messages: list[Message[Any]]) -> int:
        (message,) = messages
        await process(message, charge)
        return 1

    return step


# --- twice at the same moment -------------------------------------------------------------------------------------


class Runs:
    """A handler that takes a while, and counts how often it came to its end."""

    def __init__(self) -> None:
        self.ended: Counter[str] = Counter()

    async def handler(self, message: Message[Any], write: Write) -> None:
        await asyncio.sleep(SLOW)
        await write(message)
        self.ended[message.id] += 1


async def deliver_pairs(one: Process, other: Process, messages: list[Message[Any]]) -> Runs:
    """Each message to both consumers at once; what was not acknowledged comes again."""
    runs = Runs()
    for message in messages:
        acks = await asyncio.gather(*(acknowledged(process, message, runs.handler) for process in (one, other)))
        if not all(acks):
            await deliver(one, message, runs.handler)
    return runs


async def acknowledged(process: Process, message: Message[Any], handler: Handler) -> bool:
    try:
        await process(message, handler)
    except Exception:  # noqa: BLE001 - whatever it is: the broker will deliver it again
        return False
    return True


async def deliver(process: Process, message: Message[Any], handler: Handler) -> bool:
    """Again and again, like a broker, but not for ever."""
    for _ in range(DELIVERIES):
        if await acknowledged(process, message, handler):
            return True
    return False


# --- failing the first time ---------------------------------------------------------------------------------------


class Flaky:
    """A handler that raises the first time it sees a message."""

    def __init__(self) -> None:
        self._seen: set[str] = set()

    async def handler(self, message: Message[Any], write: Write) -> None:
        if message.id not in self._seen:
            self._seen.add(message.id)
            raise ConnectionError("the bank does not answer")
        await write(message)


class Account(Counter[str]):
    """How often each message took effect, by its id."""

    def doubled(self) -> int:
        return sum(times > 1 for times in self.values())


async def effects_of(dsn: str) -> Account:
    connection = await asyncpg.connect(dsn)
    try:
        rows = await connection.fetch("SELECT message_id, count(*) AS times FROM charges GROUP BY 1")
        await connection.execute("TRUNCATE charges")
    finally:
        await connection.close()
    return Account({row["message_id"]: row["times"] for row in rows})


async def judged(flow: Flow, dsn: str, pairs: int) -> tuple[str, ...]:
    """Of so many messages: doubled in the database, run twice, lost though acknowledged, refused for ever."""
    async with flow.consumer(dsn, 1) as one, flow.consumer(dsn, 1) as other:
        runs = await deliver_pairs(one, other, new_messages(pairs))
        account = await effects_of(dsn)
        ran_twice = sum(times > 1 for times in runs.ended.values())
        flaky = Flaky()
        failing = new_messages(pairs)
        settled = {message.id: await deliver(one, message, flaky.handler) for message in failing}
        after = await effects_of(dsn)
    lost = sum(settled[message.id] and not after[message.id] for message in failing)
    stuck = sum(not acknowledged for acknowledged in settled.values())
    return (flow.NAME, str(account.doubled()), str(ran_twice), str(lost), str(stuck))


async def stages(world: World) -> AsyncGenerator[Stage | Facts, None]:
    known: dict[str, Flow | None] = {"onceward": onceward_, **others()}
    async with postgres.database(world.postgres_dsn) as dsn:
        for installed in filter(None, known.values()):
            await installed.set_up(dsn)
        for connections in (1, 16):
            async with AsyncExitStack() as stack:
                watch = await stack.enter_async_context(postgres.watching(dsn))
                pool = await stack.enter_async_context(postgres.pool(dsn, connections))
                riding = await stack.enter_async_context(postgres.riding_pool(dsn, connections, [single.CLAIM]))
                floors = ("no inbox", "by hand")
                variants = [
                    Variant("no inbox", single.no_inbox(pool)),
                    Variant("by hand", single.hand_written(riding), floors[:1]),
                ]
                for name, flow in known.items():
                    if flow is None:
                        variants.append(Variant(name, None, missing=MISSING))
                    else:
                        process = await stack.enter_async_context(flow.consumer(dsn, connections))
                        variants.append(Variant(flow.NAME, stepping(process), floors))
                yield Stage(
                    question="peers",
                    title="PostgreSQL, what others do, one new message at a time",
                    workers=connections,
                    make=new_messages,
                    effects=watch.effects,
                    server_cpu=watch.server_cpu,
                    variants=tuple(variants),
                )
        rows = [
            await judged(flow, dsn, world.pairs) if flow else (name, *[MISSING] * 4) for name, flow in known.items()
        ]
    yield Facts(
        question="peers",
        title=f"Right or wrong, of {world.pairs} messages each",
        columns=(
            "flow",
            f"doubled of {world.pairs}",
            "ran twice",
            f"lost of {world.pairs}",
            "stuck",
        ),
        rows=tuple(rows),
        note="Doubled, ran twice: two consumers got the message at the same moment. Lost: its handler failed once, and "
        "the next delivery was acknowledged without an effect. Stuck: it is refused from then on.",
    )
