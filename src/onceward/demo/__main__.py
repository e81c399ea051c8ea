"""`python -m onceward.demo`: run the shop for a while, then the audit. Exit 0 only if every order is charged once."""

from __future__ import annotations

import argparse
import asyncio
import importlib.util
import signal
import sys
import tempfile
from contextlib import suppress
from pathlib import Path

from onceward.demo.audit import audit
from onceward.demo.crew import WorkerFailed
from onceward.demo.faults import Faults
from onceward.demo.shop import make_orders
from onceward.demo.world import Demo

if importlib.util.find_spec("rich") is None:
    sys.exit("The demo draws with rich, which is not installed: pip install 'onceward[demo]'")

from rich.console import Console

from onceward.demo.view import View, show_account, watching


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m onceward.demo", description=__doc__)
    parser.add_argument("--orders", type=_positive, default=1000, help="how many orders are sent (1000)")
    parser.add_argument("--workers", type=_positive, default=3, help="worker processes in each world (3)")
    parser.add_argument("--seed", type=int, default=1, help="decides the orders, the faults and the kills (1)")
    parser.add_argument("--seconds", type=_positive, default=55, help="give up after this time (55)")
    parser.add_argument("--plain", action="store_true", help="lines instead of the live view")
    return parser.parse_args()


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise ValueError
    return number


async def run(demo: Demo, view: View, *, workers: int, seconds: float) -> str:
    """Run both worlds under the eyes of the view. Returns what was wrong with the demo itself: nothing, we hope."""
    trouble = ""
    _cancel_on_terminate()
    eyes = asyncio.create_task(_watch(view))
    try:
        async with asyncio.timeout(seconds):
            await demo.run(workers)
    except* TimeoutError:
        trouble = f"Given up after {seconds:g} s: what was not settled by then is missing."
    except* WorkerFailed as failed:
        trouble = str(_first(failed))
    finally:
        eyes.cancel()
    return trouble


def _cancel_on_terminate() -> None:
    """As Ctrl-C does: the workers are ended and waited for."""
    task = asyncio.current_task()
    with suppress(NotImplementedError):  # on Windows
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, lambda: task and task.cancel())


async def _watch(view: View) -> None:
    while True:
        await asyncio.sleep(view.period)
        view.draw()


def _first(group: BaseExceptionGroup[WorkerFailed]) -> BaseException:
    error: BaseException = group
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


def conclude(console: Console, demo: Demo, trouble: str = "") -> int:
    """Audit both worlds, print the account, and give the exit code."""
    ours, theirs = (audit(world.broker.ledger, world.books.charges()) for world in demo.worlds)
    show_account(console, demo, ours, theirs)
    if trouble:
        console.print(f" {trouble}\n", style="red", markup=False)
    return 0 if ours.exact and not trouble else 1


def main() -> int:
    options = arguments()
    console = Console(highlight=False)
    with tempfile.TemporaryDirectory(prefix="onceward-demo-") as folder:
        demo = Demo(Path(folder), make_orders(options.orders, options.seed), Faults(options.seed))
        with watching(demo, console, plain=options.plain) as view:
            trouble = asyncio.run(run(demo, view, workers=options.workers, seconds=options.seconds))
        return conclude(console, demo, trouble)


if __name__ == "__main__":
    try:
        sys.exit(main())
    except (KeyboardInterrupt, asyncio.CancelledError):
        print("Stopped. The workers are gone.", file=sys.stderr)
        sys.exit(130)
