"""Every wrong variant is caught by an assertion of the conformance test that it names."""

from __future__ import annotations

import asyncio
import gc

import pytest

from onceward.testing import Lab, StoreContract
from tests.mutants import MUTANTS, Mutant

CASES = [(mutant, lab) for mutant in MUTANTS for lab in mutant.on]
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
}


@pytest.fixture
def lab(request: pytest.FixtureRequest) -> Lab:
    found: Lab = request.getfixturevalue(request.param)
    return found


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize(("mutant", "lab"), CASES, ids=lambda value: getattr(value, "name", value), indirect=["lab"])
async def test_a_wrong_variant_is_caught(mutant: Mutant, lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    case = getattr(StoreContract(), mutant.caught_by)
    mutant.apply(monkeypatch)
    # An assert that fails, or a pytest.raises that did not see its error.
    with pytest.raises((AssertionError, pytest.fail.Exception)):
        await case(lab, **mutant.params)
    await end_what_was_left()


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
