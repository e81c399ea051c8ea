"""Valkey: what does a record with a lease and a fencing token cost, beside the two SETs that most people write?

The floor is SET NX and SET by hand: a claim that nobody extends, and a completion that asks nobody whether the claim is
still its own. It goes through the same kind of client, and writes values as long as onceward's. Then how fast "that was
done before" is, how much memory a record takes, what three servers do for it, and what a peer does.

Nothing is written to disk (appendonly no), and the handler does nothing, except where it is asked whether effects are
right.
"""

from __future__ import annotations

import asyncio
import os
import random
import warnings
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack, asynccontextmanager, closing, contextmanager
from functools import cache, partial
from importlib.metadata import version
from importlib.util import find_spec
from typing import Any, cast
from uuid import UUID

import redis
from redis.asyncio import Redis

from bench import valkeys
from bench.batches import BATCH
from bench.duplicates import recognised
from bench.flows.base import Handler, Process
from bench.messages import CONSUMER, new_messages
from bench.peers import MISSING as NOT_INSTALLED
from bench.peers import Account, Flaky, deliver, deliver_pairs
from bench.questions import Facts, World
from bench.rounds import Measured, Plan, Stage, Step, Variant, WorkNotDone, cut, measure
from bench.valkeys import Watch
from onceward import Inbox, Message
from onceward.redis import RedisStore
from tests.services.valkey import Cluster, Server

QUESTION = "redis"
WORKERS = 16
LEASE_MS = 15_000
KEEP_MS = 30 * 86_400_000
MOST_KNOWN = 100_000
"""Records where memory and duplicates are measured."""


async def charge(_message: Message[Any]) -> None:
    """The handler. The cheaper it is, the more of the whole is the inbox."""


def inbox_on(url: str) -> Inbox[Any]:
    """Without its cache, which would answer duplicates by itself."""
    return Inbox(RedisStore(url), consumer=CONSUMER, listeners=(), cache=0)


def inbox_with(client: Redis) -> Inbox[Any]:
    """On a client that is not its own."""
    return Inbox(RedisStore(client=client), consumer=CONSUMER, listeners=(), cache=0)


def key_of(message: Message[Any]) -> str:
    """By hand."""
    return f"seen:{CONSUMER}:{message.id}"


# --- one at a time ------------------------------------------------------------------------------------------------


def by_hand(client: Redis, size: int) -> Step:
    """Two trips. After a crash the claim is in the way until its time is over, and whoever is late completes it too."""
    running, done = b"r" * size, b"p" * size

    async def step(messages: list[Message[Any]]) -> int:
        (message,) = messages
        key = key_of(message)
        if not await client.set(key, running, nx=True, px=LEASE_MS):
            return 0
        await charge(message)
        return int(await client.set(key, done, px=KEEP_MS))

    return step


def processed(inbox: Inbox[Any]) -> Step:
    async def step(messages: list[Message[Any]]) -> int:
        (message,) = messages
        return int((await inbox.process(message, charge)).processed)

    return step


# --- a hundred ----------------------------------------------------------------------------------------------------


def by_hand_many(client: Redis, size: int) -> Step:
    """Two trips for all of them."""
    running, done = b"r" * size, b"p" * size

    async def step(messages: list[Message[Any]]) -> int:
        keys = [key_of(message) for message in messages]
        pipe = client.pipeline(transaction=False)
        for key in keys:
            pipe.set(key, running, nx=True, px=LEASE_MS)
        if not all(await pipe.execute()):
            return 0
        for message in messages:
            await charge(message)
        for key in keys:
            pipe.set(key, done, px=KEEP_MS)
        return sum(await pipe.execute())

    return step


def processed_many(inbox: Inbox[Any]) -> Step:
    async def step(messages: list[Message[Any]]) -> int:
        return sum(outcome.processed for outcome in await inbox.process_many(messages, charge))

    return step


# --- duplicates ---------------------------------------------------------------------------------------------------


def get_each(client: Redis) -> Step:
    """GET by hand, a trip for each. It only says that something is there."""

    async def step(messages: list[Message[Any]]) -> int:
        found = 0
        for message in messages:
            found += await client.get(key_of(message)) is not None
        return found

    return step


def get_all(client: Redis) -> Step:
    """GET by hand, a trip for a hundred."""

    async def step(messages: list[Message[Any]]) -> int:
        pipe = client.pipeline(transaction=False)
        for message in messages:
            pipe.get(key_of(message))
        return sum(one is not None for one in await pipe.execute())

    return step


def known_each(inbox: Inbox[Any]) -> Step:
    async def step(messages: list[Message[Any]]) -> int:
        found = 0
        for message in messages:
            found += recognised(await inbox.process(message, charge))
        return found

    return step


def known_many(inbox: Inbox[Any]) -> Step:
    async def step(messages: list[Message[Any]]) -> int:
        return sum(recognised(outcome) for outcome in await inbox.process_many(messages, charge))

    return step


class Known:
    """Messages with ids that look like random UUIDs, and are the same for the same number."""

    def __init__(self, known: int) -> None:
        self.number = known
        self._random = random.Random(1)

    def make(self, number: int) -> list[Message[Any]]:
        """Some of them, in a random order that is the same in each run."""
        return [self._message(self._random.randint(1, self.number)) for _ in range(number)]

    def batches(self) -> Iterator[list[Message[Any]]]:
        """All of them."""
        for numbers in cut(list(range(1, self.number + 1)), BATCH):
            yield [self._message(number) for number in numbers]

    @staticmethod
    def _message(number: int) -> Message[Any]:
        id_ = str(UUID(int=number * 0x9E3779B97F4A7C15F39CC0605CEDC835 % 2**128, version=4))
        payload = {"order": f"o-{number}", "cents": number % 10_000}
        return Message(id=id_, type="order.paid", payload=payload, source="shop")


# --- memory -------------------------------------------------------------------------------------------------------

Fill = Callable[[list[Message[Any]]], Any]


def setting(client: Redis, value: bytes) -> Fill:
    """SET NX by hand for a hundred, with the same value in all of them."""

    async def fill(messages: list[Message[Any]]) -> None:
        pipe = client.pipeline(transaction=False)
        for message in messages:
            pipe.set(key_of(message), value, nx=True, px=KEEP_MS)
        await pipe.execute()

    return fill


async def weighed(name: str, watch: Watch, client: Redis, known: Known, fill: Fill) -> tuple[str, ...]:
    """What the keys that `fill` makes take, each. They stay."""
    first, *_ = known.batches()
    await fill(first)  # what is allocated once, as scripts and buffers, is there before
    watch.flush()
    before = watch.memory()
    for messages in known.batches():
        await fill(messages)
    if (found := watch.keep()) != known.number:
        raise WorkNotDone(f"{name}: {known.number} messages, {found} keys")
    taken = (watch.memory() - before) / known.number
    key = await client.randomkey()
    return (name, f"{taken:.1f}", str(await client.memory_usage(key)), str(len(key)), str(await client.strlen(key)))


async def memory(watch: Watch, client: Redis, inbox: Inbox[Any], known: Known) -> Facts:
    """The records of all known messages are there afterwards."""

    async def process(messages: list[Message[Any]]) -> None:
        await inbox.process_many(messages, charge)

    return Facts(
        question=QUESTION,
        title=f"Valkey, bytes of memory for each of {known.number:,} processed messages",
        columns=("written by", "used_memory", "MEMORY USAGE", "key", "value"),
        rows=(
            await weighed("SET NX, value 1", watch, client, known, setting(client, b"1")),
            await weighed("onceward", watch, client, known, process),
        ),
        note="used_memory: what the server has more afterwards, through the number of keys, with its share of the hash "
        "tables. The ids are UUIDs as text; the payload is not kept, and half of its hash is. The target is 220.",
    )


# --- three servers ------------------------------------------------------------------------------------------------


async def spread_out(world: World, server: Server, cluster: Cluster, tasks: int) -> Measured:
    """The same batches on one server, and on three."""
    plan = Plan(world.rounds, 0.6, 0.6) if world.full else Plan(world.rounds, 0.1, 0.1)
    watch = Watch([server, *cluster.servers])
    async with inbox_on(server.url) as one, inbox_on(cluster.url) as three:
        stage = Stage(
            question=QUESTION,
            title="",
            workers=tasks,
            batch=BATCH,
            make=new_messages,
            effects=watch.effects,
            server_cpu=watch.server_cpu,
            variants=(Variant("one", processed_many(one)), Variant("three", processed_many(three), ("one",))),
        )
        return await measure(stage, plan, lambda _text: None)


async def one_or_three(world: World, server: Server) -> Facts:
    with valkeys.three() as cluster:
        measured = [await spread_out(world, server, cluster, tasks) for tasks in (1, 3)]
    return Facts(
        question=QUESTION,
        title=f"Valkey, process_many of {BATCH}: one server, or a cluster of three without replicas",
        columns=("servers", "tasks", "per s", "own us", "server us", "ratio", "quartiles"),
        rows=tuple(row for one in measured for row in _rows(one)),
        note=f"All servers and the client share {os.cpu_count()} processors, and the client is one process, so more "
        "servers cannot be faster here. On a cluster each message has a hash slot of its own, so it is a script of its "
        "own. What is seen is what a cluster costs, and not what it could do on machines of its own.",
    )


def _rows(measured: Measured) -> Iterator[tuple[str, ...]]:
    for one in measured.figures:
        assert one.rate is not None
        assert one.cpu_us is not None
        server = "-" if one.server_us is None else f"{one.server_us.middle:,.0f}"
        (ratio,) = one.ratios.values() or (None,)
        compared = ("", "") if ratio is None else (f"{ratio.middle:.2f}", f"{ratio.low:.2f}-{ratio.high:.2f}")
        start = (one.name, str(measured.workers), f"{one.rate.middle:,.0f}", f"{one.cpu_us.middle:,.0f}")
        yield (*start, server, *compared)


# --- the peer -----------------------------------------------------------------------------------------------------

PEER = "powertools"
PACKAGE = "aws-lambda-powertools"
LATE = "doubled, failed late"


def peer_is_there() -> bool:
    return all(find_spec(name) is not None for name in ("aws_lambda_powertools", "boto3"))  # it imports that, too


class Context:
    """What Lambda would say: a claim counts for as long as there is time left."""

    def get_remaining_time_in_millis(self) -> int:
        return LEASE_MS


@contextmanager
def idempotent(url: str, function: Callable[..., None]) -> Iterator[Callable[..., None]]:
    """The function behind the peer's decorator, by the id of its event.

    Its check of the payload is left off: on Redis it refuses every duplicate, as a completed record has no hash.
    """
    from aws_lambda_powertools.utilities.idempotency import IdempotencyConfig, idempotent_function
    from aws_lambda_powertools.utilities.idempotency.persistence.cache import CachePersistenceLayer

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # it warns of its own name, also by the new one
        layer = CachePersistenceLayer(url=url)
    context: Any = Context()
    config = IdempotencyConfig(event_key_jmespath="id", expires_after_seconds=KEEP_MS // 1000, lambda_context=context)
    with closing(cast("redis.Redis", layer.client)):
        yield idempotent_function(
            function, data_keyword_argument="event", persistence_store=layer, config=config, key_prefix=CONSUMER
        )


def event_of(message: Message[Any]) -> dict[str, Any]:
    return {"id": message.id, "type": message.type, "source": message.source, "payload": message.payload}


def charge_event(*, event: dict[str, Any]) -> None:
    """The handler, as the peer calls it."""


def blocking(handle: Callable[..., None]) -> Step:
    """As it is meant: nothing else runs meanwhile. A program with an event loop could not do so."""

    async def step(messages: list[Message[Any]]) -> int:
        for message in messages:
            handle(event=event_of(message))
        return len(messages)

    return step


def threaded(handle: Callable[..., None], threads: ThreadPoolExecutor) -> Step:
    """As a program with an event loop has to call it."""

    async def step(messages: list[Message[Any]]) -> int:
        (message,) = messages
        await asyncio.get_running_loop().run_in_executor(threads, partial(handle, event=event_of(message)))
        return 1

    return step


def by_hand_blocking(client: redis.Redis, size: int) -> Step:
    """The floor of code without an event loop."""
    running, done = b"r" * size, b"p" * size

    async def step(messages: list[Message[Any]]) -> int:
        (message,) = messages
        key = key_of(message)
        if not client.set(key, running, nx=True, px=LEASE_MS):
            return 0
        await charge(message)
        return int(bool(client.set(key, done, px=KEEP_MS)))

    return step


# --- right or wrong -----------------------------------------------------------------------------------------------

CHARGES = "charges:"


class FailsLate:
    """A handler that raises the first time it sees a message, after it has written."""

    def __init__(self) -> None:
        self._seen: set[str] = set()

    async def handler(self, message: Message[Any], write: Any) -> None:
        await write(message)
        if message.id not in self._seen:
            self._seen.add(message.id)
            raise ConnectionError("the bank does not answer")


@asynccontextmanager
async def onceward_consumer(server: Server) -> AsyncIterator[Process]:
    """Its effects are commands of the transaction."""

    @cache
    def adapted(handler: Handler) -> Any:
        async def handle(message: Message[Any], tx: Any) -> None:
            async def write(message: Message[Any]) -> None:
                tx.incr(f"{CHARGES}{message.id}")

            await handler(message, write)

        return handle

    async with inbox_on(server.url) as inbox:

        async def process(message: Message[Any], handler: Handler) -> None:
            await inbox.process(message, adapted(handler))

        yield process


@asynccontextmanager
async def peer_consumer(server: Server) -> AsyncIterator[Process]:
    """In a thread for each delivery. Its handlers have no transaction, and write through a client of their own."""

    loop = asyncio.get_running_loop()

    def handle(*, event: dict[str, Any], run: Callable[[], Any]) -> None:  # noqa: ARG001 - the decorator reads it
        asyncio.run_coroutine_threadsafe(run(), loop).result()

    async with valkeys.client(server) as client:

        async def write(message: Message[Any]) -> None:
            await client.incr(f"{CHARGES}{message.id}")

        with idempotent(server.url, handle) as decorated:

            async def process(message: Message[Any], handler: Handler) -> None:
                async def run() -> None:
                    await handler(message, write)

                await asyncio.to_thread(decorated, event=event_of(message), run=run)

            yield process


Consumer = Callable[[Server], Any]


async def effects_of(client: Redis) -> Account:
    keys = await client.keys(f"{CHARGES}*")
    times = await client.mget(keys) if keys else []
    await client.flushall()
    return Account({key.decode().removeprefix(CHARGES): int(number) for key, number in zip(keys, times, strict=True)})


async def judged(name: str, consumer: Consumer, server: Server, pairs: int) -> tuple[str, ...]:
    """Of so many messages: doubled, run twice, lost though acknowledged, refused for ever, doubled by failing late."""
    flaky, late = Flaky(), FailsLate()
    failing, failing_late = new_messages(pairs), new_messages(pairs)
    async with consumer(server) as one, consumer(server) as other, valkeys.client(server) as client:
        runs = await deliver_pairs(one, other, new_messages(pairs))
        account = await effects_of(client)
        settled = {message.id: await deliver(one, message, flaky.handler) for message in failing}
        after = await effects_of(client)
        for message in failing_late:
            await deliver(one, message, late.handler)
        twice = await effects_of(client)
    ran_twice = sum(times > 1 for times in runs.ended.values())
    lost = sum(settled[message.id] and not after[message.id] for message in failing)
    stuck = sum(not acknowledged for acknowledged in settled.values())
    return (name, *map(str, (account.doubled(), ran_twice, lost, stuck, twice.doubled())))


async def right_or_wrong(world: World, server: Server) -> Facts:
    rows = [await judged("onceward", onceward_consumer, server, world.pairs)]
    if peer_is_there():
        rows.append(await judged(PEER, peer_consumer, server, world.pairs))
    else:
        rows.append((PEER, *[NOT_INSTALLED] * 5))
    return Facts(
        question=QUESTION,
        title=f"Valkey, right or wrong, of {world.pairs} messages each",
        columns=("flow", f"doubled of {world.pairs}", "ran twice", f"lost of {world.pairs}", "stuck", LATE),
        rows=tuple(rows),
        note="Doubled, ran twice: two consumers got the message at the same moment. Lost: its handler failed once, and "
        "the next delivery was acknowledged without an effect. Stuck: it is refused from then on. Failed late: its "
        "handler wrote, failed, and was called again. What the handler of onceward writes is applied by the script "
        "that completes its message; the other's is written at once.",
    )


# --- stages -------------------------------------------------------------------------------------------------------


async def stages(world: World) -> AsyncGenerator[Stage | Facts, None]:
    if not valkeys.is_there():
        yield Facts(QUESTION, "Valkey", ("not available",), ((valkeys.MISSING,),))
        return
    with valkeys.server() as server:
        yield about(server)
        async for stage in _speed(world, server):
            yield stage
        yield await right_or_wrong(world, server)
        server.ask("FLUSHALL", "SYNC")
        yield await one_or_three(world, server)


def about(server: Server) -> Facts:
    peer = version(PACKAGE) if peer_is_there() else NOT_INSTALLED
    return Facts(
        question=QUESTION,
        title="Valkey, what is measured on",
        columns=("server", "appendonly", "save", "redis-py", "hiredis", PACKAGE),
        rows=((valkeys.version(server), "no", "never", version("redis"), version("hiredis"), peer),),
    )


async def _speed(world: World, server: Server) -> AsyncGenerator[Stage | Facts, None]:
    watch = Watch([server])
    async with AsyncExitStack() as stack:
        client = await stack.enter_async_context(valkeys.client(server))
        inbox = await stack.enter_async_context(inbox_on(server.url))
        given = await stack.enter_async_context(inbox_with(client))
        size = await record_size(inbox, client)
        single = (
            Variant("by hand", by_hand(client, size)),
            Variant("onceward", processed(inbox), ("by hand",)),
            Variant("onceward, your client", processed(given), ("by hand",)),
        )
        for workers in (1, WORKERS):
            yield stage(watch, "one new message at a time", single, workers=workers)
        many = (
            Variant("by hand", by_hand_many(client, size)),
            Variant("process_many", processed_many(inbox), ("by hand",)),
        )
        yield stage(watch, f"batches of {BATCH} new messages", many, batch=BATCH)
        for one in beside_peer(stack, watch, server, inbox, floor=single[0], size=size):
            yield one
        known = Known(min(world.known, MOST_KNOWN))
        yield await memory(watch, client, inbox, known)
        fill = setting(client, b"p" * size)
        for messages in known.batches():
            await fill(messages)
        watch.keep()
        yield only_duplicates(watch, client, inbox, known)
        watch.flush()


def only_duplicates(watch: Watch, client: Redis, inbox: Inbox[Any], known: Known) -> Stage:
    """One at a time and a hundred at once in the same rounds, so that they can be compared."""
    return stage(
        watch,
        f"only duplicates, {known.number:,} known, one at a time and {BATCH} at once",
        (
            Variant("GET", get_each(client)),
            Variant("GET, pipelined", get_all(client), ("GET",)),
            Variant("onceward", known_each(inbox), ("GET",)),
            Variant("process_many", known_many(inbox), ("GET, pipelined", "onceward")),
        ),
        make=known.make,
        batch=BATCH,
        effects_per_message=0,
    )


def beside_peer(
    stack: AsyncExitStack, watch: Watch, server: Server, inbox: Inbox[Any], *, floor: Variant, size: int
) -> Iterator[Stage]:
    """The peer blocks, so a trip of its costs less than one through an event loop: there is a floor of either kind."""
    threads = stack.enter_context(ThreadPoolExecutor(WORKERS))
    plain = stack.enter_context(closing(redis.Redis.from_url(server.url)))
    direct, in_thread = (Variant(name, None, missing=NOT_INSTALLED) for name in (PEER, f"{PEER}, threads"))
    if peer_is_there():
        handle = stack.enter_context(idempotent(server.url, charge_event))
        direct = Variant(direct.name, blocking(handle), ("by hand, blocking",))
        in_thread = Variant(in_thread.name, threaded(handle, threads), ("by hand",))
    floors = (floor, Variant("by hand, blocking", by_hand_blocking(plain, size), ("by hand",)))
    of_all = ("by hand", "by hand, blocking", direct.name, in_thread.name)
    onceward = Variant("onceward", processed(inbox), of_all)
    many = Variant("process_many", processed_many(inbox), (direct.name,))
    new = "new messages, beside a peer"
    yield stage(watch, f"{new}, one at a time", (*floors, direct, in_thread, onceward))
    yield stage(watch, f"{new}, one at a time", (floor, in_thread, onceward), workers=WORKERS)
    yield stage(watch, f"{new}, {BATCH} at once where it can", (direct, many), batch=BATCH)


def stage(watch: Watch, title: str, variants: tuple[Variant, ...], **options: Any) -> Stage:
    usual = {"make": new_messages, "effects": watch.effects, "server_cpu": watch.server_cpu}
    return Stage(question=QUESTION, title=f"Valkey, appendonly no, {title}", variants=variants, **usual | options)


async def record_size(inbox: Inbox[Any], client: Redis) -> int:
    """Bytes of a completed record, for the values of the floor."""
    await inbox.process(new_messages(1)[0], charge)
    size: int = await client.strlen(await client.randomkey())
    await client.flushall()
    return size
