"""docs/guarantees.md names tests that exist, and shows the state machine that is in the code."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from onceward.record import TRANSITIONS
from onceward.testing import QueueContract, StoreContract

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "guarantees.md"
MARKS = ("<!-- transitions -->\n", "<!-- /transitions -->")


def diagram() -> str:
    """The state machine as Mermaid text."""
    lines = [
        f"    {'[*]' if state is None else state} --> {following}: {change}"
        for (state, change), following in TRANSITIONS.items()
    ]
    return "```mermaid\nstateDiagram-v2\n" + "\n".join(lines) + "\n```\n"


def test_the_diagram_is_made_from_the_table() -> None:
    before, rest = PAGE.read_text().split(MARKS[0])
    shown, after = rest.split(MARKS[1])
    if shown != diagram():
        PAGE.write_text(before + MARKS[0] + diagram() + MARKS[1] + after)
    assert shown == diagram(), "docs/guarantees.md has been written anew: look at it and commit it"


@pytest.mark.parametrize("page", sorted((ROOT / "docs").glob("*.md")), ids=lambda page: page.name)
def test_every_test_that_a_page_names_exists(page: Path) -> None:
    text = page.read_text("utf-8")
    files = [*(ROOT / "tests").glob("test_*.py"), *(ROOT / "src" / "onceward" / "testing").rglob("*.py")]
    everywhere = "\n".join(path.read_text("utf-8") for path in files)
    for name in re.findall(r"`(test_\w+)`", text):
        assert f"def {name}(" in everywhere, name
    for file in re.findall(r"tests/(\w+\.py)", text):
        assert (ROOT / "tests" / file).exists(), file


def test_every_conformance_test_stands_on_its_own_feet() -> None:
    for contract in (StoreContract, QueueContract):
        names = [name for name in dir(contract) if name.startswith("test_")]
        assert len(names) > 80
        assert all(getattr(contract, name).__code__.co_argcount >= 2 for name in names)


def test_all_rules_are_on_the_page() -> None:
    numbers = [int(number) for number in re.findall(r"^(\d+)\. ", PAGE.read_text(), re.MULTILINE)]
    assert numbers == list(range(1, 25))
