"""`onceward setup`, `onceward schema`, and connecting by URL."""

from __future__ import annotations

import builtins
import sqlite3
import sys
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from onceward import Inbox, MissingDriver, Router, UnknownScheme
from onceward.cli import main
from onceward.errors import UsageError
from tests.services.postgres import free_port


def test_setup_makes_the_tables_and_may_run_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    url = f"sqlite:///{tmp_path}/shop.db"
    assert main(["setup", url]) == 0
    assert main(["setup", url]) == 0
    assert "up to date" in capsys.readouterr().out
    with closing(sqlite3.connect(tmp_path / "shop.db")) as connection:
        assert connection.execute("SELECT count(*) FROM onceward_records").fetchone() == (0,)


def test_setup_makes_the_tables_on_postgresql(postgres_dsn: str) -> None:
    assert main(["setup", postgres_dsn]) == 0
    assert main(["setup", postgres_dsn, "--schema", "inbox"]) == 0


@pytest.mark.parametrize("dialect", ["postgresql", "sqlite"])
def test_schema_prints_sql(dialect: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["schema", dialect]) == 0
    assert "CREATE TABLE onceward_records" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["setup", "mysql://localhost/shop"], "no store for mysql://"),
        (["setup", "shop.db"], "not a database URL"),
        (["worker", "shop"], "such as shop.main:inbox"),
        (["worker", "no_such_module:inbox"], "no module 'no_such_module'"),
        (["worker", "onceward.cli:nothing"], "has no 'nothing'"),
        (["worker", "onceward:Message"], "not an Inbox"),
        (["worker", "onceward:stream_of"], "without arguments"),
        (["setup", "sqlite:////no/such/folder/shop.db"], "folder exists"),
        (["setup", "sqlite:///shop.db", "--schema", "x"], "SQLite has no schemas"),
        (["setup", f"postgresql://nobody@127.0.0.1:{free_port()}/x"], "cannot connect"),
    ],
)
def test_an_error_is_one_line_and_exit_code_one(
    arguments: list[str], text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == 1
    err = capsys.readouterr().err
    assert text in err
    assert err.count("\n") == 1
    assert err.startswith("onceward: ")


@pytest.mark.parametrize(
    "arguments", [[], ["nonsense"], ["schema", "oracle"], ["setup"], ["worker", "shop:inbox", "--log-level", "loud"]]
)
def test_wrong_usage_is_exit_code_two(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    assert caught.value.code == 2
    assert "usage: onceward" in capsys.readouterr().err


@pytest.mark.parametrize("arguments", [["--help"], ["setup", "--help"], ["schema", "--help"]])
def test_help_has_examples(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    assert caught.value.code == 0
    assert "onceward" in capsys.readouterr().out


def test_a_missing_driver_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    original = builtins.__import__

    def without_asyncpg(name: str, *args: Any, **options: Any) -> Any:
        if name == "asyncpg":
            raise ImportError(name)
        return original(name, *args, **options)

    for module in [module for module in sys.modules if "asyncpg" in module]:
        monkeypatch.delitem(sys.modules, module)
    monkeypatch.setattr(builtins, "__import__", without_asyncpg)
    with pytest.raises(MissingDriver, match=r"onceward\[asyncpg\]"):
        Inbox.connect("postgresql://localhost/shop", consumer="billing")


def test_an_unknown_scheme_names_the_known_ones() -> None:
    with pytest.raises(UnknownScheme, match=r"known are .*postgresql.*sqlite"):
        Inbox.connect("oracle://localhost/shop", consumer="billing")


def test_options_of_an_inbox_are_checked() -> None:
    for options in ({"consumer": ""}, {"consumer": None}):
        with pytest.raises(UsageError, match="consumer"):
            Inbox.connect("sqlite://", **options)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match=r"handlers=\[router\]"):
        Inbox.connect("sqlite://", consumer="c", handlers=Router())
    for options in ({"unhandled": "drop"}, {"on_mismatch": "ignore"}):
        with pytest.raises(UsageError, match="it is one of"):
            Inbox.connect("sqlite://", consumer="c", **options)
