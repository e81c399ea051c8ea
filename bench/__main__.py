"""What onceward costs, beside the hand-written code that it is compared with. See bench/rounds.py for how."""

from __future__ import annotations

import argparse
import asyncio
import sys
import tempfile
import time
from contextlib import aclosing, nullcontext
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from bench import (
    accept,
    batches,
    dispatch,
    duplicates,
    embedded,
    embedded_queue,
    events,
    growth,
    kafka_,
    latency,
    peers,
    postgres,
    rabbitmq_,
    redis_,
    redis_admin,
    report,
    single,
)
from bench.questions import Facts, Question, World
from bench.report import Report
from bench.rounds import Measured, Plan, Stage, WorkNotDone, measure, only, slices_of
from tests.services.postgres import VARIABLE

QUESTIONS: dict[str, Question] = {
    "single": single.stages,
    "batches": batches.stages,
    "duplicates": duplicates.stages,
    "sqlite": embedded.stages,
    "peers": peers.stages,
    "events": events.stages,
    "accept": accept.stages,
    "dispatch": dispatch.stages,
    "latency": latency.stages,
    "growth": growth.stages,
    "stored-sqlite": embedded_queue.stages,
    "redis": redis_.stages,
    "redis-admin": redis_admin.stages,
    "kafka": kafka_.stages,
    "rabbitmq": rabbitmq_.stages,
}
WITHOUT_POSTGRES = {"sqlite", "events", "stored-sqlite", "redis", "redis-admin"}

EXAMPLES = """examples:
  make bench                                     all questions, about half an hour
  make bench ARGS=--quick                        all questions, about four minutes
  python -m bench --only single --only sqlite    two of them
  python -m bench --only duplicates --known 10000000
  python -m bench --only dispatch --variant ascetic-ddd --variant "onceward, batch=1" --rounds 25
  python -m bench --only growth --quick          a thousandth of the promised rows
  ONCEWARD_TEST_POSTGRES=postgresql://... python -m bench    on a server of yours, in databases of its own
"""


def arguments(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m bench",
        description=__doc__,
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--only", action="append", choices=QUESTIONS, help="only this question; may be repeated")
    parser.add_argument("--variant", action="append", help="only this variant, as in the tables; may be repeated")
    parser.add_argument("--quick", action="store_true", help="few and short rounds: a look, not a measurement")
    parser.add_argument("--rounds", type=count, help="rounds of each stage (7; quick: 3)")
    parser.add_argument("--seconds", type=seconds, help="of each slice, about (0.6; quick: 0.1)")
    parser.add_argument("--known", type=count, help="messages known before (1000000; quick: 100000)")
    parser.add_argument("--out", type=Path, help="where the JSON goes (bench/results/TIME.json)")
    return parser.parse_args(argv)


def count(text: str) -> int:
    if (number := int(text)) < 1:
        raise ValueError
    return number


def seconds(text: str) -> float:
    if (number := float(text)) <= 0:
        raise ValueError
    return number


def plan_of(options: argparse.Namespace) -> Plan:
    rounds, long = (3, 0.1) if options.quick else (7, 0.6)
    return Plan(options.rounds or rounds, options.seconds or long, warm_up=options.seconds or long)


async def answer(
    name: str, world: World, plan: Plan, console: Console, variants: list[str] | None
) -> list[Measured | Facts]:
    """Measure what a question asks for, and show it as it comes."""
    found: list[Measured | Facts] = []
    with progress(console) as bar:
        task = bar.add_task(f"{name}: setting up", total=None)
        async with aclosing(QUESTIONS[name](world)) as stages:
            async for stage in stages:
                if isinstance(stage, Stage):
                    part = stage if variants is None else only(stage, variants)
                    if part is None:
                        continue
                    bar.reset(task, total=slices_of(part, plan), description=f"{name}, {part.workers} workers")

                    def tick(text: str, workers: int = part.workers) -> None:
                        bar.update(task, advance=1, description=f"{name}, {workers} workers: {text}")

                    measured = await measure(part, plan, tick)
                    report.show_stage(bar.console, measured)
                    found.append(measured)
                else:
                    report.show_facts(bar.console, stage)
                    found.append(stage)
                bar.reset(task, total=None, description=f"{name}: setting up")
    return found


def progress(console: Console) -> Progress:
    """Where there is a terminal, what is going on; the tables are enough elsewhere."""
    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    return Progress(*columns, console=console, transient=True, disable=not console.is_terminal)


async def run(options: argparse.Namespace, server_dsn: str | None, console: Console) -> Report:
    plan = plan_of(options)
    known = options.known or (100_000 if options.quick else 1_000_000)
    about = report.machine(await postgres.about(server_dsn) if server_dsn else {})
    report.show_machine(console, about)
    console.print(report.READING, style="dim", highlight=False)
    console.print()
    found: list[Measured | Facts] = []
    for name in options.only or QUESTIONS:
        if server_dsn is None and name not in WITHOUT_POSTGRES:
            console.print(f"{name}: not available, there is no PostgreSQL here. Set {VARIABLE}.\n", style="yellow")
            continue
        with tempfile.TemporaryDirectory(prefix="onceward-bench-") as folder:
            world = World(
                postgres_dsn=server_dsn or "",
                folder=Path(folder),
                known=known,
                rounds=plan.rounds,
                calls=20_000 if options.quick else 200_000,
                bulk=2_000 if options.quick else 10_000,
                lasting=2.0 if options.quick else 10.0,
                full=not options.quick,
            )
            found += await answer(name, world, plan, console, options.variant)
    return Report(
        at=report.now(),
        machine=about,
        options={"rounds": plan.rounds, "seconds": plan.seconds, "known": known, "only": options.only},
        stages=[one for one in found if isinstance(one, Measured)],
        facts=[one for one in found if isinstance(one, Facts)],
    )


def main(argv: list[str] | None = None) -> int:
    options = arguments(argv)
    console = Console(highlight=False)
    began = time.monotonic()
    needed = any(name not in WITHOUT_POSTGRES for name in options.only or QUESTIONS)
    with postgres.server() if needed else nullcontext() as server_dsn:
        try:
            done = asyncio.run(run(options, server_dsn, console))
        except WorkNotDone as error:
            console.print(f"The benchmark is wrong, and so are its figures: {error}", style="bold red")
            return 1
    unknown = set(options.variant or ()) - {figure.name for stage in done.stages for figure in stage.figures}
    if unknown:
        console.print(f"no variant {', '.join(sorted(unknown))} here; the tables have their names", style="red")
        return 2
    path = options.out or Path(__file__).parent / "results" / f"{done.at.replace(':', '')}.json"
    done.save(path)
    console.print(f"{time.monotonic() - began:.0f} s. The figures are in {path}", style="dim")
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        print("Stopped.", file=sys.stderr)
        sys.exit(130)
