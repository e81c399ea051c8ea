"""The documentation is true: its Python runs and prints what it says, links lead somewhere, no public name is left out.

The blocks of a page run in order in one namespace, in an empty folder, with `await` allowed at the top level:

- `python`: runs. `expression  # -> value` is checked against the value's repr or str.
- `text` right after `python`: what that block printed.
- `sh`: `onceward ...` runs through the command line's own main; `make ...` names a target that exists.

A page that says postgresql://localhost/shop gets a throwaway database instead, and one that says
postgresql://localhost:6432/shop the same database through a throwaway PgBouncer. redis://localhost:6379 is a throwaway
Valkey, and redis+cluster://localhost:7000 a cluster of them; both are emptied before. amqp://guest:guest@localhost/ is
a throwaway RabbitMQ, and KAFKA = "localhost:9092" a throwaway Kafka.
"""

from __future__ import annotations

import ast
import asyncio
import builtins
import inspect
import io
import re
import shlex
import tokenize
from collections.abc import Iterator
from pathlib import Path
from types import FunctionType
from typing import Any, NamedTuple

import pytest
import redis

import onceward
from onceward.cli import main
from onceward.outcome import Verdict, verdict_of
from onceward.testing import PostgresLab

ROOT = Path(__file__).parent.parent
README = ROOT / "README.md"
DOCS = ROOT / "docs"
PAGES = [README, ROOT / "CONTRIBUTING.md", *sorted(DOCS.glob("*.md"))]
GROUPS = {"kafka.md": ["kafka"], "rabbitmq.md": ["rabbitmq"]}
"""Pages that run with other tests of the same broker, so that there is one of it."""
EVERY_PAGE = pytest.mark.parametrize(
    "page",
    [
        pytest.param(page, id=page.name, marks=[pytest.mark.xdist_group(name) for name in GROUPS.get(page.name, ())])
        for page in PAGES
    ],
)
DSN = "postgresql://localhost/shop"
BOUNCED = "postgresql://localhost:6432/shop"
REDIS = "redis://localhost:6379"
CLUSTER = "redis+cluster://localhost:7000"
RABBITMQ = "amqp://guest:guest@localhost/"
KAFKA = '"localhost:9092"'

_BLOCK = re.compile(r"^```(\w*)[^\n]*\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"\]\(([^)\s]+)\)")
_HEADING = re.compile(r"^#+ (.+)$", re.MULTILINE)
_PROMISED = re.compile(r"^#\s*->\s*(.+)$")


class Block(NamedTuple):
    language: str
    text: str
    line: int
    """Of the page, where the text begins."""


def blocks(page: Path) -> Iterator[Block]:
    text = page.read_text("utf-8")
    for found in _BLOCK.finditer(text):
        yield Block(found[1], found[2], text.count("\n", 0, found.start(2)) + 1)


# --- running a page -----------------------------------------------------------------------------------------


class Reader:
    """Does what a page says, block by block."""

    def __init__(self, page: Path, real: dict[str, str], runner: asyncio.Runner, capsys: Any) -> None:
        self._page = page
        self._real = real
        self._runner = runner
        self._capsys = capsys
        self._namespace: dict[str, Any] = {"__name__": "__main__", "__builtins__": builtins, "__shows__": shows}

    def read(self) -> None:
        before, printed = "", ""
        for block in blocks(self._page):
            text = block.text
            for told, real in self._real.items():
                text = text.replace(told, real)
            if block.language == "python":
                self._capsys.readouterr()
                self._run(text, block.line)
                printed = self._capsys.readouterr().out
            elif block.language == "text" and before == "python":
                assert printed == text, f"{self._page.name}:{block.line}"
            elif block.language == "sh":
                for line in text.splitlines():
                    self._shell(line)
            before = block.language

    def _run(self, text: str, line: int) -> None:
        tree = ast.parse(text, self._page.name)
        _check_promises(tree, text)
        ast.increment_lineno(tree, line - 1)
        code = compile(tree, self._page, "exec", ast.PyCF_ALLOW_TOP_LEVEL_AWAIT, dont_inherit=True)
        returned = FunctionType(code, self._namespace)()
        # Without an `await` it was run outside of a loop, as a script is: `asyncio.run` works in it.
        if inspect.iscoroutine(returned):
            self._runner.run(returned)

    def _shell(self, line: str) -> None:
        words = shlex.split(line.partition(">")[0], comments=True)
        if words[:1] == ["onceward"]:
            assert main(words[1:]) == 0, line
        elif words[:1] == ["make"]:
            assert set(words[1:]) <= _targets(), line


def shows(value: object, promised: str) -> None:
    assert promised in (repr(value), str(value)), f"shows {value!r}, the page says {promised}"


def _check_promises(tree: ast.Module, text: str) -> None:
    """Turn `expression  # -> value` into a check. Elsewhere such a comment would never be looked at."""
    tokens = tokenize.generate_tokens(io.StringIO(text).readline)
    comments = ((token.start[0], _PROMISED.match(token.string)) for token in tokens if token.type == tokenize.COMMENT)
    promises = {line: found[1].strip() for line, found in comments if found}
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr) and node.end_lineno in promises:
            promised = ast.Constant(promises.pop(node.end_lineno))
            node.value = ast.Call(ast.Name("__shows__", ast.Load()), [node.value, promised], [])
    ast.fix_missing_locations(tree)
    assert not promises, f"not after an expression: {promises}"


def _targets() -> set[str]:
    return set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text("utf-8"), re.MULTILINE))


@EVERY_PAGE
def test_a_page_does_what_it_says(
    page: Path,
    request: pytest.FixtureRequest,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    real, text = {}, page.read_text("utf-8")
    if DSN in text:
        real[DSN] = request.getfixturevalue("postgres_dsn")
        asyncio.run(PostgresLab(real[DSN]).store().setup())
    if BOUNCED in text:
        real[BOUNCED] = request.getfixturevalue("bouncer").dsn(real[DSN])
    if REDIS in text:
        real[REDIS] = request.getfixturevalue("valkey_server")
        with redis.Redis.from_url(real[REDIS]) as client:
            client.flushall()
    if CLUSTER in text:
        cluster = request.getfixturevalue("valkey_cluster")
        cluster.flush()
        real[CLUSTER] = cluster.url
    if f"KAFKA = {KAFKA}" in text:
        real[KAFKA] = repr(request.getfixturevalue("kafka_server").bootstrap)
    if RABBITMQ in text:
        real[RABBITMQ] = request.getfixturevalue("rabbitmq_server").url
    monkeypatch.chdir(tmp_path)
    with asyncio.Runner() as runner:
        Reader(page, real, runner, capsys).read()


def test_a_value_that_is_not_so_is_found() -> None:
    for wrong in ("1 + 1  # -> 3", "if True:\n    'a'  # -> b", "x = 1  # -> 1"):
        tree = ast.parse(wrong)
        with pytest.raises(AssertionError):
            _check_promises(tree, wrong)
            exec(compile(tree, "page", "exec"), {"__shows__": shows})


# --- what the pages say about the library -------------------------------------------------------------------


async def test_sql_and_python_compute_the_same_identity(postgres_lab: PostgresLab) -> None:
    checked = 0
    for block in blocks(DOCS / "keys-and-identity.md"):
        if block.language == "sql" and "onceward_id" in block.text:
            rows = await postgres_lab.query(block.text)
            for promised in re.findall(r"^-- -> (.+)$", block.text, re.MULTILINE):
                assert str(rows[0][0]) == promised
                checked += 1
    assert checked


def test_the_table_of_verdicts_is_what_verdict_of_says() -> None:
    page = (DOCS / "retries-and-dead-letters.md").read_text("utf-8")
    rows = re.findall(r"^\| `(\w+)` \|.*\| ([A-Z]+) \|$", page, re.MULTILINE)
    told = {name: Verdict[verdict] for name, verdict in rows}
    assert len(told) > 10
    assert told == {name: verdict_of(getattr(onceward, name)()) for name in told}


def test_every_public_name_is_mentioned() -> None:
    told = "\n".join(page.read_text("utf-8") for page in [README, *DOCS.glob("*.md")])
    missing = [name for name in onceward.__all__ if not re.search(rf"\b{name}\b", told)]
    assert missing == []


# --- links --------------------------------------------------------------------------------------------------


def _anchors(page: Path) -> set[str]:
    """As GitHub makes them from headings."""
    outside = _BLOCK.sub("", page.read_text("utf-8"))
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in _HEADING.findall(outside)}


@EVERY_PAGE
def test_every_link_leads_somewhere(page: Path) -> None:
    broken = []
    for link in _LINK.findall(_BLOCK.sub("", page.read_text("utf-8"))):
        if "://" in link or link.startswith("mailto:"):
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        if not target.exists() or (anchor and anchor not in _anchors(target)):
            broken.append(link)
    assert broken == []
