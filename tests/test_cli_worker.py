"""`onceward worker`, as a service manager runs it."""

from __future__ import annotations

import asyncio
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest

from onceward import Inbox, Message
from onceward.cli import main

APP = """
import asyncio
from onceward import Inbox

inbox = Inbox.connect("sqlite:///shop.db", consumer="billing")
number = 3

def make():
    return inbox

@inbox.handler("order.paid")
async def charge(message, tx):
    await tx.execute("INSERT INTO charges VALUES (?)", message.id)
    print("ran", message.id, flush=True)
    if message.payload == "slow":
        await asyncio.sleep(60)
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "shop.py").write_text(APP)
    with closing(sqlite3.connect(tmp_path / "shop.db")) as connection:
        connection.execute("CREATE TABLE charges (id TEXT)")
    return tmp_path


def accept(folder: Path, *messages: Message[str]) -> None:
    async def keep() -> None:
        async with Inbox.connect(f"sqlite:///{folder}/shop.db", consumer="billing", listeners=()) as inbox:
            await inbox.accept(messages)

    asyncio.run(keep())


@contextmanager
def worker(folder: Path, *options: str, app: str = "shop:inbox") -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-m", "onceward", "worker", app, "--poll-interval", "0.1", *options]
    process = subprocess.Popen(command, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        yield process
    finally:
        if process.poll() is None:
            process.kill()
        process.communicate(timeout=30)


def query(folder: Path, sql: str) -> list[tuple[object, ...]]:
    with closing(sqlite3.connect(folder / "shop.db", timeout=30)) as connection:
        return connection.execute(sql).fetchall()


def until(holds: Callable[[], bool]) -> None:
    give_up = time.monotonic() + 60
    while not holds():
        assert time.monotonic() < give_up
        time.sleep(0.05)


@pytest.mark.parametrize("app", ["shop:inbox", "shop:make"])
def test_it_works_until_it_is_told_to_stop(folder: Path, app: str) -> None:
    accept(folder, *(Message(f"m{number}", "order.paid", "") for number in range(20)))
    with worker(folder, "--concurrency", "2", app=app) as process:
        until(lambda: len(query(folder, "SELECT id FROM charges")) == 20)
        process.send_signal(signal.SIGTERM)
        _, said = process.communicate(timeout=60)
        assert process.returncode == 0
    assert "working on billing with 2 workers" in said
    assert "SIGTERM: taking no more" in said
    assert query(folder, "SELECT DISTINCT state FROM onceward_records") == [("processed",)]


def test_what_does_not_end_within_the_grace_is_undone_and_no_crash_is_counted(folder: Path) -> None:
    accept(folder, Message("m", "order.paid", "slow"))
    with worker(folder, "--grace", "0.1") as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ran m\n"
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=60)
        assert process.returncode == 0
    assert query(folder, "SELECT id FROM charges") == []
    assert query(folder, "SELECT state, attempts, started FROM onceward_records") == [("accepted", 0, 0)]
    assert query(folder, "SELECT state, claims, owner FROM onceward_lanes") == [("ready", 0, None)]


def test_a_share_is_a_part_of_the_lanes(folder: Path) -> None:
    accept(folder, *(Message(f"m{number}", "order.paid", "") for number in range(40)))
    ran = []
    for share in ("0/2", "1/2"):
        before = {id_ for (id_,) in query(folder, "SELECT id FROM charges")}
        mine = f"SELECT count(*) FROM onceward_lanes WHERE share % 2 = {share[0]}"
        with worker(folder, "--share", share) as process:
            until(lambda mine=mine: query(folder, mine) == [(0,)])  # type: ignore[misc]
            process.send_signal(signal.SIGTERM)
            process.communicate(timeout=60)
        ran.append({id_ for (id_,) in query(folder, "SELECT id FROM charges")} - before)
    assert len(ran[0]) + len(ran[1]) == 40
    assert ran[0]
    assert ran[1]


@pytest.mark.parametrize(
    ("app", "told"),
    [
        ("shop", "name the module and the inbox"),
        ("no_such_shop:inbox", "there is no module 'no_such_shop'"),
        ("shop:outbox", "shop has no 'outbox'"),
        ("shop:number", "shop:number is a int, not an Inbox"),
    ],
)
def test_a_wrong_name_is_told(
    folder: Path, app: str, told: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(folder)
    monkeypatch.syspath_prepend(folder)
    assert main(["worker", app]) == 1
    assert told in capsys.readouterr().err


@pytest.mark.parametrize("share", ["3/3", "half", "1"])
def test_a_share_that_is_none_is_told(share: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["worker", "shop:inbox", "--share", share])
    assert "is not a share" in capsys.readouterr().err
