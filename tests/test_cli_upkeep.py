"""`onceward cleanup`, `stats`, `records` and `stamp`, as people type them."""

from __future__ import annotations

import asyncio
import builtins
import json
import sqlite3
import sys
from contextlib import closing
from datetime import timedelta
from pathlib import Path
from typing import Any

import asyncpg
import pytest

from onceward import Inbox, Message, Reject
from onceward.cli import main, progress
from onceward.sql.store import schema
from onceward.testing import Lab, PostgresLab, SqliteLab
from onceward.testing.redis_labs import RedisLab


@pytest.fixture(params=["sqlite", "postgres", "redis"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """A database with the records of `fill`. Not a lab: `main` runs loops of its own."""
    lab: Lab
    if request.param == "sqlite":
        lab = SqliteLab(tmp_path / "shop.db")
    elif request.param == "redis":
        lab = RedisLab(request.getfixturevalue("valkey_server"))
        asyncio.run(empty(lab))
    else:
        lab = PostgresLab(request.getfixturevalue("postgres_dsn"))
    asyncio.run(fill(lab))
    return lab.url


async def empty(lab: RedisLab) -> None:
    async with lab.client() as client:
        await client.flushall()


async def reject(message: Message[Any]) -> None:
    raise Reject("no such \x1b[31mcustomer")


async def fail(message: Message[Any]) -> None:
    raise ValueError("no")


async def fill(lab: Lab) -> None:
    """Of billing three old ones, one of them to be kept for a year, two new ones, a failure and a dead letter."""
    await lab.store().setup()
    async with Inbox(lab.store(), consumer="billing") as inbox:
        for name in ("old-1", "old-2", "new-1", "new-2"):
            await inbox.process(Message(name, "order.paid", None), lambda _: None)
        await inbox.process(Message("year", "order.paid", None), lambda _: None, retention=timedelta(days=365))
        await inbox.process(Message("dead", "order.paid", {"card": "4111"}), reject)
        with pytest.raises(ValueError, match="no"):
            await inbox.process(Message("failed", "order.paid", None), fail)
    async with Inbox(lab.store(), consumer="shipping") as inbox:
        await inbox.process(Message("old-1", "order.paid", None), lambda _: None)
    for name in ("old-1", "old-2", "year"):
        await lab.make_older(name, days=40)


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    capsys.readouterr()
    assert main(arguments) == 0
    said = capsys.readouterr()
    assert said.err == ""
    return said.out


# --- cleanup ------------------------------------------------------------------------------------------------


def test_cleanup_deletes_what_is_old_and_tells_how_many(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    told = ["cleanup", url, "--consumer", "billing"]
    assert run(capsys, *told, "--dry-run") == "2 records would be deleted\n"
    assert run(capsys, *told, "--older-than", "41d") == "0 records deleted\n"
    assert run(capsys, *told, "--batch", "1") == "2 records deleted\n"
    assert run(capsys, *told) == "0 records deleted\n"
    assert run(capsys, *told, "--older-than", "0s") == "2 records deleted\n"
    assert json.loads(run(capsys, "stats", url, "--json"))[1]["total"] == 1, "another consumer keeps its own"


def test_without_a_terminal_progress_is_a_line_now_and_then(
    url: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(progress, "PAUSE", 0.0)
    assert main(["cleanup", url, "--consumer", "billing", "--batch", "1"]) == 0
    lines = ["onceward: 1 of 2 records deleted", "onceward: 2 of 2 records deleted"]
    at_once = url.startswith("redis")  # a scan may come upon both of them together
    assert capsys.readouterr().err.splitlines() in ([lines, lines[1:]] if at_once else [lines])


@pytest.mark.parametrize("rich", [True, False])
def test_on_a_terminal_progress_is_a_bar_where_rich_is_installed(
    url: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, *, rich: bool
) -> None:
    original = builtins.__import__

    def without_rich(name: str, *args: Any, **options: Any) -> Any:
        if name.startswith("rich"):
            raise ImportError(name)
        return original(name, *args, **options)

    if not rich:
        monkeypatch.setattr(builtins, "__import__", without_rich)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    monkeypatch.setattr(progress, "PAUSE", 0.0)
    assert main(["cleanup", url, "--consumer", "billing"]) == 0
    said = capsys.readouterr()
    assert said.out == "2 records deleted\n"
    assert ("2/2" in said.err) == rich
    assert ("onceward: 2 of 2" in said.err) == (not rich)


# --- stats --------------------------------------------------------------------------------------------------


def test_stats_are_a_table(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    head, billing, shipping = run(capsys, "stats", url).splitlines()
    assert head.split()[:6] == ["consumer", "total", "last", "day", "last", "hour"]
    assert billing.split()[:4] == ["billing", "7", "4", "4"]
    assert billing.split()[-6:] == ["0", "0", "5", "1", "1", "0"]
    assert shipping.split()[:4] == ["shipping", "1", "0", "0"]
    assert len(run(capsys, "stats", url, "--consumer", "shipping").splitlines()) == 2


def test_stats_tell_of_the_queue(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    url = f"sqlite:///{tmp_path}/shop.db"

    async def accept() -> None:
        async with Inbox.connect(url, consumer="billing") as inbox:
            await inbox.accept([Message(f"o-{n}", "order.paid", None, stream="s") for n in range(3)])
            await inbox.accept(Message("later", "order.paid", None), not_before=timedelta(days=1))

    asyncio.run(accept())
    _head, _billing, _empty, head, queue = run(capsys, "stats", url).splitlines()
    shown = dict(zip(head.split(), queue.split(), strict=True))
    assert shown == {
        "queue": "billing", "pending": "4", "lanes": "2", "ready": "1", "running": "0", "retrying": "0", "later": "1",
        "waiting": "0", "blocked": "0",
    }  # fmt: skip
    [billing] = json.loads(run(capsys, "stats", url, "--json"))
    assert billing["queue"]["pending"] == 4


def test_stats_are_json(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    [billing] = json.loads(run(capsys, "stats", url, "--consumer", "billing", "--json"))
    assert {name: number for name, number in billing.items() if isinstance(number, int)} == {
        "total": 7, "last_day": 4, "last_hour": 4, "accepted": 0, "running": 0, "processed": 5, "failed": 1, "dead": 1,
        "discarded": 0,
    }  # fmt: skip
    [nobody] = json.loads(run(capsys, "stats", url, "--consumer", "nobody", "--json"))
    assert (nobody["total"], nobody["oldest"]) == (0, None)


def test_stats_of_an_empty_database(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    url = f"sqlite:///{tmp_path}/empty.db"
    run(capsys, "setup", url)
    assert run(capsys, "stats", url, "--json") == "[]\n"
    assert run(capsys, "stats", url).startswith("consumer")


# --- records ------------------------------------------------------------------------------------------------


def test_dead_letters_are_listed_without_their_payload(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    told = ["records", url, "--consumer", "billing", "--state", "dead"]
    head, dead = run(capsys, *told).splitlines()
    assert head.split()[0] == "state"
    assert dead.startswith("dead")
    assert r"Reject: no such \x1b[31mcustomer" in dead
    [record] = json.loads(run(capsys, *told, "--json"))
    assert (record["message_id"], record["key"], record["attempts"]) == ("dead", "dead", 1)
    assert "4111" not in json.dumps(record)
    [record] = json.loads(run(capsys, *told, "--json", "--payload"))
    assert record["payload"] == {"card": "4111"}


def test_records_are_listed_by_state_and_age(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    def names(*more: str) -> list[str]:
        found = json.loads(run(capsys, "records", url, "--consumer", "billing", "--json", *more))
        return [record["message_id"] for record in found]

    assert names("--older-than", "1h") == ["old-1", "old-2", "year"]
    assert sorted(names("--state", "dead", "--state", "failed")) == ["dead", "failed"]
    assert names("--state", "failed", "--older-than", "5m") == []
    assert names()[:3] == ["old-1", "old-2", "year"]
    assert sorted(names()[3:]) == ["dead", "failed", "new-1", "new-2"]  # they may be of the same millisecond
    assert names("--limit", "2") == ["old-1", "old-2"]


# --- stamp --------------------------------------------------------------------------------------------------


def made_by_another_tool(url: str) -> None:
    """The tables as a migration tool would have them: all of the DDL, and nothing noted."""
    if url.startswith("sqlite"):
        with closing(sqlite3.connect(url.removeprefix("sqlite:///"))) as connection:
            connection.executescript(schema("sqlite"))
            connection.execute("DROP TABLE onceward_schema")
        return

    async def make() -> None:
        connection = await asyncpg.connect(url)
        await connection.execute(schema("postgresql"))
        await connection.execute("DROP TABLE onceward_schema; DROP FUNCTION onceward_id")
        await connection.close()

    asyncio.run(make())


@pytest.fixture(params=["sqlite", "postgres"])
def foreign(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    url = f"sqlite:///{tmp_path}/shop.db" if request.param == "sqlite" else request.getfixturevalue("postgres_dsn")
    made_by_another_tool(url)
    return url


def test_stamped_tables_are_ours(foreign: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(capsys, "stamp", foreign) == "onceward: the tables are marked as up to date\n"
    assert run(capsys, "stamp", foreign), "again, which changes nothing"
    assert run(capsys, "setup", foreign) == "onceward: the tables are up to date\n"

    async def use() -> None:
        async with Inbox.connect(foreign, consumer="billing") as inbox:
            message = Message("m-1", "order.paid", None)
            assert (await inbox.process(message, lambda _: None)).processed

    asyncio.run(use())


def query(url: str, sql: str) -> list[tuple[Any, ...]]:
    lab = SqliteLab(Path(url.removeprefix("sqlite:///"))) if url.startswith("sqlite") else PostgresLab(url)
    return asyncio.run(lab.query(sql))


def test_a_stamp_makes_what_tools_leave_out(foreign: str, capsys: pytest.CaptureFixture[str]) -> None:
    run(capsys, "stamp", foreign)
    [[token]] = query(foreign, "SELECT token FROM onceward_schema WHERE version = 1")
    assert len(token) >= 32
    run(capsys, "stamp", foreign)
    assert query(foreign, "SELECT token FROM onceward_schema WHERE version = 1") == [(token,)]
    if foreign.startswith("postgresql"):
        assert len(query(foreign, "SELECT onceward_id('c', 't', 's', 'k')")) == 1


@pytest.mark.parametrize("empty", ["NULL", "''"])
def test_a_stamp_fills_a_token_that_a_tool_left_empty(
    foreign: str, empty: str, capsys: pytest.CaptureFixture[str]
) -> None:
    now = "datetime('now')" if foreign.startswith("sqlite") else "now()"
    query(foreign, "CREATE TABLE onceward_schema (version integer PRIMARY KEY, name text, applied_at text, token text)")
    query(foreign, f"INSERT INTO onceward_schema VALUES (1, '0001_records', {now}, {empty})")
    run(capsys, "stamp", foreign)
    [[token]] = query(foreign, "SELECT token FROM onceward_schema WHERE version = 1")
    assert len(token) >= 32


def test_a_stamp_in_a_schema(postgres_dsn: str, capsys: pytest.CaptureFixture[str]) -> None:
    query(postgres_dsn, "CREATE SCHEMA inbox")

    async def make() -> None:
        connection = await asyncpg.connect(postgres_dsn)
        await connection.execute("SET search_path TO inbox")
        await connection.execute(schema("postgresql"))
        await connection.execute("DROP TABLE onceward_schema; DROP FUNCTION onceward_id")
        await connection.close()

    asyncio.run(make())
    run(capsys, "stamp", postgres_dsn, "--schema", "inbox")
    assert len(query(postgres_dsn, "SELECT inbox.onceward_id('c', 't', 's', 'k')")) == 1
    assert run(capsys, "stats", postgres_dsn, "--schema", "inbox", "--json") == "[]\n"


def test_a_stamp_without_the_table_is_refused(
    postgres_dsn: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with closing(sqlite3.connect(tmp_path / "shop.db")) as connection:
        connection.execute("CREATE TABLE other (x)")
    for url in (postgres_dsn, f"sqlite:///{tmp_path}/shop.db"):
        assert main(["stamp", url]) == 1
        assert "there is no table onceward_records" in capsys.readouterr().err


def test_a_stamp_of_a_table_that_lacks_something_is_refused(foreign: str, capsys: pytest.CaptureFixture[str]) -> None:
    query(foreign, "ALTER TABLE onceward_records DROP COLUMN host")
    assert main(["stamp", foreign]) == 1
    assert "it lacks host" in capsys.readouterr().err


# --- usage --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["cleanup", "sqlite:///no-such.db", "--consumer", "billing"], "there is no database"),
        (["stats", "sqlite:///no-such.db"], "there is no database"),
        (["stats", "sqlite://"], "there is no database"),
        (["records", "sqlite:///no-such.db", "--consumer", "billing"], "there is no database"),
        (["stamp", "sqlite:///no-such.db"], "there is no database"),
        (["cleanup", "sqlite:///shop.db", "--consumer", ""], "consumer is empty"),
        (["cleanup", "sqlite:///shop.db", "--consumer", "billing", "--batch", "0"], "a batch is from"),
        (["cleanup", "sqlite:///shop.db", "--consumer", "billing", "--older-than", "9999999w"], "thousand years"),
        (["records", "sqlite:///shop.db", "--consumer", "billing", "--limit", "0"], "at least 1"),
    ],
)
def test_an_error_is_one_line_and_exit_code_one(
    arguments: list[str], text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    run(capsys, "setup", "sqlite:///shop.db")
    assert main(arguments) == 1
    err = capsys.readouterr().err
    assert text in err
    assert err.count("\n") == 1
    assert not Path("no-such.db").exists()


@pytest.mark.parametrize(
    "arguments",
    [
        ["cleanup", "sqlite:///shop.db"],
        ["cleanup", "sqlite:///shop.db", "--consumer", "billing", "--older-than", "30 days"],
        ["cleanup", "sqlite:///shop.db", "--consumer", "billing", "--older-than", "-1d"],
        ["cleanup", "sqlite:///shop.db", "--consumer", "billing", "--batch", "many"],
        ["records", "sqlite:///shop.db"],
        ["records", "sqlite:///shop.db", "--consumer", "billing", "--state", "lost"],
        ["stats"],
        ["stamp"],
    ],
)
def test_wrong_usage_is_exit_code_two(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    assert caught.value.code == 2
    assert "usage: onceward" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["cleanup", "stats", "records", "stamp"])
def test_help_has_examples(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main([name, "--help"])
    assert caught.value.code == 0
    assert f"examples:\n  onceward {name} " in capsys.readouterr().out


def test_an_interrupted_command_has_the_exit_code_of_one(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    async def interrupted(*_: Any, **__: Any) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr(Inbox, "cleanup", interrupted)
    assert main(["cleanup", url, "--consumer", "billing"]) == 130
