"""`onceward consume` as a person runs it."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

APP = """
from onceward import Inbox
inbox = Inbox.connect("sqlite:///shop.db", consumer="billing")

@inbox.handler("order.paid")
async def charge(message, tx):
    await tx.execute("CREATE TABLE IF NOT EXISTS charges (id TEXT)")
    await tx.execute("INSERT INTO charges VALUES (?)", message.id)
    if message.id == "bad":
        raise ValueError("never")

from onceward import RetryPolicy
inbox2 = Inbox.connect("sqlite:///shop.db", consumer="other", retry=RetryPolicy(max_attempts=2, base=0.01))
inbox2.handler("order.paid")(charge)
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "shop.py").write_text(APP)
    return tmp_path


def lines(*ids: str) -> str:
    return "".join(json.dumps({"id": id_, "type": "order.paid", "payload": 1}) + "\n" for id_ in ids)


def run(folder: Path, *arguments: str, stdin: str = "") -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "onceward", "consume", *arguments]
    return subprocess.run(command, cwd=folder, input=stdin, capture_output=True, text=True, timeout=60, check=False)


def charges(folder: Path) -> list[str]:
    import sqlite3
    from contextlib import closing

    with closing(sqlite3.connect(folder / "shop.db")) as connection:
        return sorted(id_ for (id_,) in connection.execute("SELECT id FROM charges"))


def test_a_file_takes_effect_once_however_often_it_is_read(folder: Path) -> None:
    (folder / "events.ndjson").write_text(lines("a", "b", "a") + "not json\n")
    first = run(folder, "shop:inbox", "--from", "events.ndjson")
    assert (first.returncode, first.stdout) == (0, "2 processed, 1 duplicate, 1 dead\n"), first.stderr
    again = run(folder, "shop:inbox", "--from", "events.ndjson")
    assert again.stdout == "4 duplicate\n"
    assert charges(folder) == ["a", "b"]


def test_standard_input_is_read_as_it_comes(folder: Path) -> None:
    done = run(folder, "shop:inbox", "--from", "-", stdin=lines("a", "b"))
    assert (done.returncode, done.stdout) == (0, "2 processed\n"), done.stderr


def test_what_fails_for_good_is_dead_and_the_rest_is_done(folder: Path) -> None:
    done = run(folder, "shop:inbox2", "--from", "-", stdin=lines("a", "bad", "b"))
    assert done.stdout == "2 processed, 1 dead\n"
    assert charges(folder) == ["a", "b"]


def test_accepted_is_kept_for_workers(folder: Path) -> None:
    done = run(folder, "shop:inbox", "--from", "-", "--mode", "accept", stdin=lines("a", "a"))
    assert done.stdout == "1 accepted, 1 duplicate\n"


def test_a_missing_file_is_told(folder: Path) -> None:
    done = run(folder, "shop:inbox", "--from", "nowhere.ndjson")
    assert done.returncode == 1
    assert done.stderr == "onceward: there is no file nowhere.ndjson\n"


def test_sigterm_ends_it_although_standard_input_is_silent(folder: Path) -> None:
    command = [sys.executable, "-m", "onceward", "consume", "shop:inbox", "--from", "-"]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen(command, cwd=folder, text=True, **pipes) as process:  # type: ignore[call-overload]
        process.stdin.write(lines("a"))
        process.stdin.flush()
        deadline = time.monotonic() + 30
        while not (folder / "shop.db").exists() or "a" not in _charges_if_any(folder):
            assert time.monotonic() < deadline
            time.sleep(0.05)
        process.send_signal(signal.SIGTERM)
        out, err = process.communicate(timeout=30)
    assert process.returncode == 0
    assert "1 processed" in out
    assert "stopped before the end" in err


def _charges_if_any(folder: Path) -> list[str]:
    try:
        return charges(folder)
    except Exception:
        return []
