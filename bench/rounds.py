"""How it is measured: variants take turns in short rounds of one run, and are compared within the round.

No machine is quiet for minutes, but the noise of a second hits neighbours alike. So a variant is never compared with a
number from another run: in each round its rate is divided by the rate that its floor had in the same round, and what is
reported is the median of these ratios with their quartiles.

A slice is a fixed number of messages, made before the clock starts. After each slice the effects in the database are
counted: a variant that did not do the work is an error, not a fast variant.
"""

from __future__ import annotations

import asyncio
import gc
import math
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from statistics import quantiles
from typing import Any, TypeVar

import msgspec

from onceward import Message

T = TypeVar("T")

Step = Callable[[list[Message[Any]]], Awaitable[int]]
"""Settles the messages of one step, one or a batch, and says how many it has settled."""


class Variant(msgspec.Struct, frozen=True):
    name: str
    step: Step | None
    """None: it cannot run here, and `missing` says why."""
    floors: tuple[str, ...] = ()
    """The variants of the same stage that it is compared with."""
    missing: str = ""
    prepare: Callable[[list[Message[Any]]], Awaitable[None]] | None = None
    """Before the clock starts: the messages of the slice are put where the step finds them."""
    whole: bool = False
    """The step gets all messages of the slice at once, and shares them out itself."""
    about: int = 0
    """Of one that is whole: about how many it does in a second. Its start is part of the slice, so slices must not be
    short, and what a short one took says little."""
    make: Callable[[int], list[Message[Any]]] | None = None
    """Messages of its own kind, instead of the stage's."""


class Stage(msgspec.Struct, frozen=True, kw_only=True):
    """Variants that take turns on the same database with the same number of workers."""

    question: str
    title: str
    variants: tuple[Variant, ...]
    make: Callable[[int], list[Message[Any]]]
    effects: Callable[[], Awaitable[int]]
    """How many effects are in the database since it was asked last. It removes them."""
    workers: int = 1
    batch: int = 1
    effects_per_message: int = 1
    server_cpu: Callable[[], Awaitable[float | None]] | None = None
    """Seconds of processor time that the database server has used for us so far; None where it cannot be known."""


class Plan(msgspec.Struct, frozen=True):
    """How long to measure."""

    rounds: int
    seconds: float
    """Of one slice, about."""
    warm_up: float


class Slice(msgspec.Struct, frozen=True):
    messages: int
    seconds: float
    cpu: float
    """Seconds of processor time of this process."""
    server_cpu: float | None = None
    """Of the database server. Processor time suffers less from neighbours than the rate does."""

    @property
    def rate(self) -> float:
        return self.messages / self.seconds

    @property
    def cpu_us(self) -> float:
        return self.cpu / self.messages * 1e6

    @property
    def server_us(self) -> float | None:
        return None if self.server_cpu is None else self.server_cpu / self.messages * 1e6


class Spread(msgspec.Struct, frozen=True):
    """The median of some numbers, with the quartiles around it."""

    low: float
    middle: float
    high: float

    @classmethod
    def of(cls, numbers: Sequence[float]) -> Spread:
        if len(numbers) == 1:
            return cls(numbers[0], numbers[0], numbers[0])
        return cls(*quantiles(numbers, n=4, method="inclusive"))


class Figure(msgspec.Struct, frozen=True):
    """What was measured of one variant."""

    name: str
    missing: str = ""
    rate: Spread | None = None
    """Messages in a second."""
    cpu_us: Spread | None = None
    """Microseconds of this process for each message."""
    server_us: Spread | None = None
    """Microseconds of the database server for each message."""
    ratios: dict[str, Spread] = {}
    """By the name of the floor: the rate divided by the floor's in the same round."""
    slices: tuple[Slice, ...] = ()


class Measured(msgspec.Struct, frozen=True):
    question: str
    title: str
    workers: int
    batch: int
    figures: tuple[Figure, ...]


class WorkNotDone(Exception):
    """What a variant said that it did is not what is in the database."""


def only(stage: Stage, names: list[str]) -> Stage | None:
    """The stage with these variants alone: more rounds in the same time. None: it has none of them."""
    variants = [
        msgspec.structs.replace(variant, floors=tuple(floor for floor in variant.floors if floor in names))
        for variant in stage.variants
        if variant.name in names
    ]
    return msgspec.structs.replace(stage, variants=tuple(variants)) if variants else None


async def measure(stage: Stage, plan: Plan, tick: Callable[[str], None]) -> Measured:
    """Warm up, then rounds. `tick` is told before each slice."""
    running = [variant for variant in stage.variants if variant.step is not None]
    sizes: dict[str, int] = {}
    slices: dict[str, list[Slice]] = {variant.name: [] for variant in running}
    for variant in running:
        tick(f"warm-up, {variant.name}")
        sizes[variant.name] = await warm_up(stage, variant, plan)
    for number in range(plan.rounds):
        for variant in in_turn(running, number):
            tick(f"round {number + 1} of {plan.rounds}, {variant.name}")
            slices[variant.name].append(await one_slice(stage, variant, sizes[variant.name], plan))
    figures = tuple(figure(variant, slices) for variant in stage.variants)
    return Measured(stage.question, stage.title, stage.workers, stage.batch, figures)


def slices_of(stage: Stage, plan: Plan) -> int:
    """How often `measure` will tick."""
    return sum(variant.step is not None for variant in stage.variants) * (plan.rounds + 1)


def in_turn(variants: list[Variant], number: int) -> list[Variant]:
    """Another order in each round, so that nobody always comes after the same neighbour."""
    start = number % len(variants)
    order = variants[start:] + variants[:start]
    return order if number % 2 == 0 else order[::-1]


async def warm_up(stage: Stage, variant: Variant, plan: Plan) -> int:
    """Fill pools and caches, and find out how many messages a slice has: as many for each worker."""
    least = stage.workers * stage.batch
    if variant.about:
        size = max(least, math.ceil(variant.about * plan.seconds))
        await one_slice(stage, variant, size, plan)
        return size
    size, spent = least, 0.0
    while True:
        done = await one_slice(stage, variant, size, plan)
        spent += done.seconds
        if spent >= plan.warm_up:
            return max(1, math.ceil(done.rate * plan.seconds / least)) * least
        size = min(size * 2, max(least, math.ceil(done.rate * plan.warm_up / least) * least))


async def one_slice(stage: Stage, variant: Variant, size: int, plan: Plan) -> Slice:
    messages = (variant.make or stage.make)(size)
    if variant.prepare is not None:
        await variant.prepare(messages)
    steps = iter([messages] if variant.whole else list(cut(messages, stage.batch)))
    gc.collect()
    before = await server_cpu(stage)
    began, cpu = time.perf_counter(), time.process_time()
    async with asyncio.timeout(30 + 20 * plan.seconds):
        said = sum(await asyncio.gather(*(worker(variant.step, steps) for _ in range(stage.workers))))
    seconds, cpu = time.perf_counter() - began, time.process_time() - cpu
    after = await server_cpu(stage)
    done = Slice(size, seconds, cpu, None if before is None or after is None else after - before)
    found = await stage.effects()
    if (said, found) != (size, size * stage.effects_per_message):
        text = f"{stage.question}, {variant.name}: {size} messages, {said} settled, {found} effects in the database"
        raise WorkNotDone(text)
    return done


async def server_cpu(stage: Stage) -> float | None:
    return None if stage.server_cpu is None else await stage.server_cpu()


async def worker(step: Step | None, steps: Iterator[list[Message[Any]]]) -> int:
    """Takes what is next until nothing is left."""
    assert step is not None
    said = 0
    for messages in steps:
        said += await step(messages)
    return said


def cut(items: list[T], size: int) -> Iterator[list[T]]:
    for start in range(0, len(items), size):
        yield items[start : start + size]


def figure(variant: Variant, slices: dict[str, list[Slice]]) -> Figure:
    if variant.step is None:
        return Figure(variant.name, missing=variant.missing)
    own = slices[variant.name]
    server = [one.server_us for one in own if one.server_us is not None]
    return Figure(
        variant.name,
        rate=Spread.of([one.rate for one in own]),
        cpu_us=Spread.of([one.cpu_us for one in own]),
        server_us=Spread.of(server) if server else None,
        ratios={
            floor: Spread.of([one.rate / other.rate for one, other in zip(own, slices[floor], strict=True)])
            for floor in variant.floors
            if floor in slices
        },
        slices=tuple(own),
    )
