"""Every wrong variant is caught by an assertion of the conformance test that it names."""

from __future__ import annotations

import asyncio
import gc
import os
from inspect import isawaitable, signature
from itertools import count
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit, urlunsplit

import pytest

from onceward.testing import JoinedContract, Lab, QueueContract, SqliteLab, StoreContract
from onceward.testing.kinds import AsyncpgCaller, Caller, SqliteCaller, place
from tests.mutants import MUTANTS, Mutant
from tests.queue_mutants import QUEUE_MUTANTS, make_mistakes

_numbers = count(1)

CASES = [(mutant, lab) for mutant in MUTANTS for lab in mutant.on]
QUEUE_CASES = [(mutant, lab) for mutant in QUEUE_MUTANTS for lab in mutant.on]
REQUIRED = {
    "claim after the effect",
    "check-then-act",
    "ignored row count",
    "attempt in the same transaction",
    "identity without consumer",
    "identity without tenant",
    "identity without scope",
    "return instead of TryLater",
    "ack on a rolled-back commit",
    "payload check skipped on the cached path",
    "a sweep by age alone",
    "a sweep without the lock",
    "claim without a savepoint",
    "a joined run is cached",
    "a failure recorded in the caller's transaction",
    "joined without looking which database it is",
    "mark_processed ignores the conflict",
}


@pytest.fixture
def lab(request: pytest.FixtureRequest) -> Lab:
    found: Lab = request.getfixturevalue(request.param)
    return found


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize(("mutant", "lab"), CASES, ids=lambda value: getattr(value, "name", value), indirect=["lab"])
async def test_a_wrong_variant_is_caught(
    mutant: Mutant, lab: Lab, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    contract: Any = JoinedContract() if hasattr(JoinedContract, mutant.caught_by) else StoreContract()
    case = getattr(contract, mutant.caught_by)
    asked = {"kind": kind_for, "elsewhere": elsewhere_for}
    wanted = {name: give(lab, tmp_path) for name, give in asked.items() if name in signature(case).parameters}
    given = {name: await value if isawaitable(value) else value for name, value in wanted.items()}
    mutant.apply(monkeypatch)
    # An assert that fails, or a pytest.raises that did not see its error.
    with pytest.raises((AssertionError, pytest.fail.Exception)):
        await case(lab, **given, **mutant.params)
    await end_what_was_left()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize(
    ("mutant", "lab"), QUEUE_CASES, ids=lambda value: getattr(value, "name", value), indirect=["lab"]
)
async def test_a_wrong_queue_is_caught(mutant: Mutant, lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    case = getattr(QueueContract(), mutant.caught_by)
    mutant.apply(monkeypatch)
    await make_mistakes(lab, mutant)
    with pytest.raises((AssertionError, pytest.fail.Exception)):
        await case(lab, **mutant.params)
    await end_what_was_left()


def kind_for(lab: Lab, _folder: Path) -> type[Caller]:
    return SqliteCaller if isinstance(lab, SqliteLab) else AsyncpgCaller


async def elsewhere_for(lab: Lab, folder: Path) -> str:
    """Another database, with the same tables."""
    if isinstance(lab, SqliteLab):
        other: Lab = SqliteLab(folder / "elsewhere.db")
    else:
        name = f"elsewhere_{os.getpid()}_{next(_numbers)}"
        await lab.query(f"CREATE DATABASE {name}")
        lab.stack.push_async_callback(lab.query, f"DROP DATABASE {name} WITH (FORCE)")
        other = type(lab)(urlunsplit(urlsplit(place(lab))._replace(path=f"/{name}")))  # type: ignore[call-arg, arg-type]
    await other.set_up()
    return place(other)


async def end_what_was_left() -> None:
    """A case that fails in its middle leaves its tasks behind; they must not fail the tests after it."""
    left = asyncio.all_tasks() - {asyncio.current_task()}
    for task in left:
        task.cancel()
    if left:
        await asyncio.wait(left, timeout=10)
    del left
    gc.collect()


def test_the_known_mistakes_of_the_field_are_all_there() -> None:
    assert {mutant.name for mutant in MUTANTS} >= REQUIRED
