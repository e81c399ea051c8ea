"""What is SQLite's own: one writer, groups, other processes, files that cannot be written."""

from __future__ import annotations

import asyncio
import json
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from onceward import Inbox, Message, RetryPolicy, StoreReadOnly, StoreUnavailable, TryLater
from onceward.errors import HandlerEndedTransaction, NestedProcess, UsageError
from onceward.sql.drivers import sqlite_writer
from onceward.sqlite import SqliteStore
from onceward.testing import SqliteLab
from onceward.testing.lab import Gate, Recorder


async def test_a_file_held_by_another_process_is_tried_later(sqlite_lab: SqliteLab) -> None:
    inbox, handler = await sqlite_lab.inbox(wait=0.2), Recorder(sqlite_lab)
    with closing(sqlite3.connect(sqlite_lab.path, isolation_level=None)) as other:
        other.execute("BEGIN IMMEDIATE")
        with pytest.raises(TryLater, match="held by another process") as caught:
            await inbox.process(sqlite_lab.message("m"), handler)
        assert caught.value.reason == "store_busy"
        assert await inbox.get_record(sqlite_lab.message("m")) is None, "reading never waits for a writer"
        other.execute("ROLLBACK")
    assert (await inbox.process(sqlite_lab.message("m"), handler)).processed
    assert handler.runs == ["m"]


async def test_a_slow_neighbour_makes_others_try_later(sqlite_lab: SqliteLab) -> None:
    inbox, gate = await sqlite_lab.inbox(wait=0.2), Gate(sqlite_lab)
    slow = asyncio.ensure_future(inbox.process(sqlite_lab.message("slow"), gate))
    await gate.started.wait()
    with pytest.raises(TryLater, match="another handler is slow") as caught:
        await inbox.process(sqlite_lab.message("quick"), Recorder(sqlite_lab))
    assert caught.value.reason == "store_busy"
    gate.go.set()
    assert (await slow).processed
    assert (await inbox.process(sqlite_lab.message("quick"), Recorder(sqlite_lab))).processed


def commits_of(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What the thread that commits has said since."""
    commits: list[str] = []
    original = sqlite_writer.Writer._execute

    def execute(self: sqlite_writer.Writer, sql: str) -> None:
        commits.append(sql)
        original(self, sql)

    monkeypatch.setattr(sqlite_writer.Writer, "_execute", execute)
    return commits


async def test_many_units_share_one_commit(sqlite_lab: SqliteLab, monkeypatch: pytest.MonkeyPatch) -> None:
    inbox, commits = await sqlite_lab.inbox(), commits_of(monkeypatch)
    jobs = [inbox.process(sqlite_lab.message(f"{n:03}"), Recorder(sqlite_lab)) for n in range(250)]
    assert all(outcome.processed for outcome in await asyncio.gather(*jobs))
    assert 3 <= len(commits) <= 100, "groups of up to a hundred, not one commit each"
    assert await sqlite_lab.effects() == [f"{n:03}" for n in range(250)]


async def test_who_is_acknowledged_together_comes_again_together(
    sqlite_lab: SqliteLab, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sqlite_writer, "AGE", 60.0)  # whatever the machine is doing
    inbox, commits = await sqlite_lab.inbox(), commits_of(monkeypatch)

    async def worker(name: str) -> None:
        for n in range(5):
            await inbox.process(sqlite_lab.message(f"{name}-{n}"), Recorder(sqlite_lab))

    await asyncio.gather(*(worker(f"w{n:02}") for n in range(20)))
    assert len(commits) == 5, "nobody is committed alone because it was the first to come back"
    assert len(await sqlite_lab.effects()) == 100


async def test_a_commit_does_not_begin_while_somebody_is_about_to_have_a_turn(
    sqlite_lab: SqliteLab, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sqlite_writer, "AGE", 60.0)  # whatever the machine is doing
    inbox, commits = await sqlite_lab.inbox(), commits_of(monkeypatch)

    def deliver(id_: str) -> asyncio.Future[Any]:
        return asyncio.ensure_future(inbox.process(sqlite_lab.message(id_), Recorder(sqlite_lab)))

    await asyncio.gather(deliver("a"), deliver("b"))
    assert len(commits) == 1
    first = deliver("c")
    await asyncio.sleep(0)  # it lets others come, and one comes a round later
    await asyncio.gather(first, deliver("d"))
    assert len(commits) == 2
    first, second = deliver("e"), deliver("f")
    await asyncio.sleep(0)
    second.cancel()
    assert (await asyncio.wait_for(first, 5)).processed, "who does not come after all is not waited for"
    assert await sqlite_lab.effects() == ["a", "b", "c", "d", "e"]


async def test_handlers_that_wait_run_one_at_a_time_in_the_order_they_came(sqlite_lab: SqliteLab) -> None:
    inbox, ran, running = await sqlite_lab.inbox(), [], 0

    async def handler(message: Message[Any], tx: Any) -> None:
        nonlocal running
        running += 1
        assert running == 1
        ran.append(message.id)
        if int(message.id) % 7 == 3:  # most end before the next one is resumed, and some do not
            await asyncio.sleep(0.002)
        elif int(message.id) % 7 == 5:
            await asyncio.sleep(0)
        await sqlite_lab.write(tx, message.id)
        running -= 1

    ids = [f"{n:03}" for n in range(150)]
    jobs = [asyncio.ensure_future(inbox.process(sqlite_lab.message(id_), handler)) for id_ in ids]
    assert all(outcome.processed for outcome in await asyncio.gather(*jobs))
    assert ran == ids
    assert await sqlite_lab.effects() == ids


async def test_nobody_is_acknowledged_before_the_group_is_committed(
    sqlite_lab: SqliteLab, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sqlite_writer, "AGE", 60.0)  # whatever the machine is doing
    inbox, opening, closing_ = await sqlite_lab.inbox(), Gate(sqlite_lab), Gate(sqlite_lab)
    jobs = [
        asyncio.ensure_future(inbox.process(sqlite_lab.message(f"{number}"), handler))
        for number, handler in enumerate((opening, Recorder(sqlite_lab), closing_))
    ]
    await opening.started.wait()
    opening.go.set()
    await closing_.started.wait()
    assert not any(job.done() for job in jobs), "two have released their savepoints, but nothing is on disk"
    assert await sqlite_lab.effects() == []
    closing_.go.set()
    assert all(outcome.processed for outcome in await asyncio.gather(*jobs))
    assert await sqlite_lab.effects() == ["0", "1", "2"]


async def test_closing_while_a_handler_runs_is_not_acknowledged(
    sqlite_lab: SqliteLab, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sqlite_writer, "CLOSING", 0.05)
    inbox, gate = await sqlite_lab.inbox(), Gate(sqlite_lab)
    job = asyncio.ensure_future(inbox.process(sqlite_lab.message("m"), gate))
    await gate.started.wait()
    await inbox.close()
    gate.go.set()
    with pytest.raises(StoreUnavailable, match="closed"):
        await job
    assert await sqlite_lab.effects() == []


async def test_a_commit_that_fails_fails_every_member_of_its_group(
    sqlite_lab: SqliteLab, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(self: Any, sql: str) -> None:
        raise sqlite3.OperationalError("database or disk is full")

    inbox = await sqlite_lab.inbox()
    with monkeypatch.context() as patch:
        patch.setattr(sqlite_writer.Writer, "_execute", full)
        jobs = [inbox.process(sqlite_lab.message(f"{n}"), Recorder(sqlite_lab)) for n in range(5)]
        results = await asyncio.gather(*jobs, return_exceptions=True)
    assert all(isinstance(result, StoreUnavailable) for result in results)
    assert await sqlite_lab.effects() == []
    jobs = [inbox.process(sqlite_lab.message(f"{n}"), Recorder(sqlite_lab)) for n in range(5)]
    assert all(outcome.processed for outcome in await asyncio.gather(*jobs))


async def test_a_deferred_constraint_fails_the_one_that_broke_it(sqlite_lab: SqliteLab) -> None:
    await sqlite_lab.query("CREATE TABLE parents (id INTEGER PRIMARY KEY)")
    await sqlite_lab.query("CREATE TABLE children (p INTEGER REFERENCES parents DEFERRABLE INITIALLY DEFERRED)")

    async def orphan(message: Message[Any], tx: Any) -> None:
        await tx.execute("INSERT INTO children VALUES (1)")

    inbox = await sqlite_lab.inbox()
    handlers = [orphan if n == 3 else Recorder(sqlite_lab) for n in range(8)]
    jobs = [inbox.process(sqlite_lab.message(f"{n}"), handler) for n, handler in enumerate(handlers)]
    results = await asyncio.gather(*jobs, return_exceptions=True)
    assert [isinstance(result, sqlite3.IntegrityError) for result in results] == [n == 3 for n in range(8)]
    assert await sqlite_lab.effects() == [f"{n}" for n in range(8) if n != 3]
    record = await inbox.get_record(sqlite_lab.message("3"))
    assert record is not None
    assert (record.state, record.attempts) == ("failed", 1)


@pytest.mark.parametrize("again", ["process", "process_many", "process_many with others"])
async def test_a_duplicate_of_what_is_not_committed_is_not_acknowledged(sqlite_lab: SqliteLab, again: str) -> None:
    await sqlite_lab.query("CREATE TABLE parents (id INTEGER PRIMARY KEY)")
    await sqlite_lab.query("CREATE TABLE children (parent INTEGER REFERENCES parents DEFERRABLE INITIALLY DEFERRED)")
    inbox, handler, opening = await sqlite_lab.inbox(), Recorder(sqlite_lab), Gate(sqlite_lab)
    message, writing, orphan = sqlite_lab.message("m"), asyncio.Event(), asyncio.Event()

    async def refused(message: Message[Any], tx: Any) -> None:
        writing.set()
        await orphan.wait()
        await tx.execute("INSERT INTO children VALUES (7)")

    async def deliver() -> list[Any]:
        if again == "process":
            return [await inbox.process(message, handler)]
        others = [sqlite_lab.message("n"), sqlite_lab.message("o")] if "others" in again else []
        return await inbox.process_many([message, *others, message], handler)

    opened = asyncio.ensure_future(inbox.process(sqlite_lab.message("a"), opening))
    await opening.started.wait()
    first = asyncio.ensure_future(inbox.process(message, handler))
    await asyncio.sleep(0)
    neighbour = asyncio.ensure_future(inbox.process(sqlite_lab.message("b"), refused))
    await asyncio.sleep(0)
    opening.go.set()
    await writing.wait()  # the first has written, and waits for the COMMIT of its group
    first.cancel()
    await asyncio.wait([first])
    second = asyncio.ensure_future(deliver())
    for _ in range(3):
        await asyncio.sleep(0)
    orphan.set()
    with pytest.raises(sqlite3.IntegrityError):
        await neighbour
    await opened
    assert {outcome.kind.value for outcome in await second} <= {"processed", "duplicate"}
    assert (await sqlite_lab.effects()).count("m") == 1
    assert (await inbox.process(message, handler)).duplicate


async def test_a_statement_that_rolls_everything_back_harms_only_its_own_message(sqlite_lab: SqliteLab) -> None:
    await sqlite_lab.query("CREATE TABLE single (x INTEGER UNIQUE)")
    await sqlite_lab.query("INSERT INTO single VALUES (1)")

    async def rolling(message: Message[Any], tx: Any) -> None:
        await tx.execute("INSERT OR ROLLBACK INTO single VALUES (1)")

    inbox = await sqlite_lab.inbox()
    handlers = [rolling if n == 3 else Recorder(sqlite_lab) for n in range(8)]
    jobs = [inbox.process(sqlite_lab.message(f"{n}"), handler) for n, handler in enumerate(handlers)]
    results = await asyncio.gather(*jobs, return_exceptions=True)
    assert [isinstance(result, HandlerEndedTransaction) for result in results] == [n == 3 for n in range(8)]
    assert await sqlite_lab.effects() == [f"{n}" for n in range(8) if n != 3]
    record = await inbox.get_record(sqlite_lab.message("3"))
    assert record is not None
    assert record.state == "dead"


async def test_slow_handlers_do_not_delay_what_was_done_before_them(sqlite_lab: SqliteLab) -> None:
    inbox, gate = await sqlite_lab.inbox(), Gate(sqlite_lab)

    async def slow(message: Message[Any], tx: Any) -> None:
        await asyncio.sleep(sqlite_writer.AGE * 2)
        await sqlite_lab.write(tx, message.id)

    first = asyncio.ensure_future(inbox.process(sqlite_lab.message("slow"), slow))
    second = asyncio.ensure_future(inbox.process(sqlite_lab.message("slower"), gate))
    await gate.started.wait()
    await asyncio.wait([first], timeout=5)
    assert first.done(), "committed before the turn went on"
    gate.go.set()
    assert (await second).processed


async def test_a_cancellation_is_heard_while_a_neighbour_works(
    sqlite_lab: SqliteLab, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sqlite_writer, "AGE", 60.0)  # whatever the machine is doing
    inbox, opening, last = await sqlite_lab.inbox(), Gate(sqlite_lab), Gate(sqlite_lab)
    jobs = [
        asyncio.ensure_future(inbox.process(sqlite_lab.message(f"{n}"), handler))
        for n, handler in enumerate((opening, Recorder(sqlite_lab), last))
    ]
    await opening.started.wait()
    opening.go.set()
    await last.started.wait()
    jobs[1].cancel()
    await asyncio.wait([jobs[1]], timeout=2)
    assert jobs[1].cancelled()
    last.go.set()
    assert (await jobs[2]).processed
    assert (await (await sqlite_lab.inbox()).process(sqlite_lab.message("1"), Recorder(sqlite_lab))).duplicate


async def test_nesting_is_noticed_through_a_symbolic_link(sqlite_lab: SqliteLab, tmp_path: Path) -> None:
    (tmp_path / "link.db").symlink_to(sqlite_lab.path)
    inbox = await sqlite_lab.inbox()
    async with (
        Inbox(SqliteStore(tmp_path / "link.db"), consumer="other") as other,
        Inbox.connect("sqlite://", consumer="third") as third,
    ):

        async def inner(message: Message[Any]) -> None:
            await other.process(message, lambda message: None)

        async def middle(message: Message[Any]) -> None:
            await third.process(message, inner)

        for handler in (inner, middle):
            with pytest.raises(NestedProcess):
                await inbox.process(sqlite_lab.message(), handler)


async def test_a_full_disk_is_not_a_crash(sqlite_lab: SqliteLab) -> None:
    async def filling(message: Message[Any], tx: Any) -> None:
        pages = await tx.fetchval("PRAGMA page_count")
        await tx.execute("PRAGMA cache_size = 5")
        await tx.execute(f"PRAGMA max_page_count = {pages + 5}")
        await tx.execute("INSERT INTO effects VALUES (zeroblob(3000000))")

    inbox = await sqlite_lab.inbox(retry=RetryPolicy(max_attempts=3, base=0.0))
    for _ in range(4):
        with pytest.raises((StoreUnavailable, sqlite3.OperationalError)):
            await inbox.process(sqlite_lab.message("m"), filling, redelivered=True)
        record = await inbox.get_record(sqlite_lab.message("m"))
        assert record is None or record.started == 0
        if record is not None and record.attempts >= 2:
            break


async def test_a_setting_that_would_outlast_the_handler_is_refused(sqlite_lab: SqliteLab) -> None:
    async def setting(message: Message[Any], tx: Any) -> None:
        assert await tx.fetchval("PRAGMA query_only") == 0
        await tx.execute("PRAGMA query_only = ON")

    inbox = await sqlite_lab.inbox()
    with pytest.raises(UsageError, match="outlast"):
        await inbox.process(sqlite_lab.message(), setting)
    assert (await inbox.process(sqlite_lab.message(), Recorder(sqlite_lab))).processed


async def test_a_mark_that_could_not_be_taken_back_is_taken_back_later(sqlite_lab: SqliteLab) -> None:
    holder = sqlite3.connect(sqlite_lab.path, isolation_level=None)

    async def reached(point: str) -> None:
        if point == "after mark":
            holder.execute("BEGIN IMMEDIATE")

    inbox = await sqlite_lab.inbox(reached=reached, wait=0.1, retry=RetryPolicy(max_attempts=3, base=0.0))
    with closing(holder):
        with pytest.raises(TryLater) as caught:
            await inbox.process(sqlite_lab.message("m"), Recorder(sqlite_lab), redelivered=True)
        assert caught.value.reason == "store_busy"
        holder.execute("ROLLBACK")
    await inbox.close()
    assert await sqlite_lab.query("SELECT state, started FROM onceward_records") == [("failed", 0)]


async def test_reading_cannot_write(sqlite_lab: SqliteLab) -> None:
    async def on_begin(tx: Any, message: Message[Any]) -> None:
        await tx.execute("INSERT INTO effects VALUES ('begin')")

    inbox = await sqlite_lab.inbox(on_begin=on_begin)
    with pytest.raises(sqlite3.OperationalError, match="readonly"):
        await inbox.get_record(sqlite_lab.message())
    assert await sqlite_lab.effects() == []


async def test_a_transaction_that_sqlite_rolls_back_by_itself_is_not_acknowledged(sqlite_lab: SqliteLab) -> None:
    """A full disk ends the whole transaction, and with it the group."""

    async def filling(message: Message[Any], tx: Any) -> None:
        pages = await tx.fetchval("PRAGMA page_count")
        await tx.execute(f"PRAGMA max_page_count = {pages + 2}")
        try:
            await tx.execute("INSERT INTO effects VALUES (zeroblob(1000000))")
        finally:
            await tx.execute("PRAGMA max_page_count = 1000000") if message.payload else None

    inbox = await sqlite_lab.inbox()
    neighbour = asyncio.ensure_future(inbox.process(sqlite_lab.message("neighbour"), Recorder(sqlite_lab)))
    with pytest.raises((StoreUnavailable, sqlite3.OperationalError)) as caught:
        await inbox.process(sqlite_lab.message("filling"), filling)
    outcome = (await asyncio.gather(neighbour, return_exceptions=True))[0]
    effects = await sqlite_lab.effects()
    assert "full" in str(caught.value) or isinstance(caught.value, StoreUnavailable)
    assert (effects == ["neighbour"]) == (not isinstance(outcome, BaseException)), "acknowledged means kept"


async def test_a_cancelled_waiter_does_not_lose_the_turn(sqlite_lab: SqliteLab) -> None:
    inbox, gate = await sqlite_lab.inbox(), Gate(sqlite_lab)
    first = asyncio.ensure_future(inbox.process(sqlite_lab.message("first"), gate))
    await gate.started.wait()
    waiting = [
        asyncio.ensure_future(inbox.process(sqlite_lab.message(f"w{n}"), Recorder(sqlite_lab))) for n in range(6)
    ]
    await asyncio.wait(waiting, timeout=0.05)
    gate.go.set()
    for task in waiting[::2]:
        task.cancel()
    assert (await asyncio.wait_for(first, 5)).processed
    results = await asyncio.wait_for(asyncio.gather(*waiting, return_exceptions=True), 5)
    assert [isinstance(result, asyncio.CancelledError) for result in results] == [True, False] * 3
    assert await sqlite_lab.effects() == ["first", "w1", "w3", "w5"]


async def test_turns_survive_cancellation_at_every_moment(sqlite_lab: SqliteLab) -> None:
    """Cancel a task after each number of steps of the event loop it may take: the writer stays usable."""
    inbox = await sqlite_lab.inbox(wait=5)
    for steps in range(40):
        tasks = [
            asyncio.ensure_future(inbox.process(sqlite_lab.message(f"{steps}-{n}"), Recorder(sqlite_lab)))
            for n in range(4)
        ]
        for _ in range(steps):
            await asyncio.sleep(0)
        for task in tasks[1:3]:
            task.cancel()
        results = await asyncio.wait_for(asyncio.gather(*tasks, return_exceptions=True), 5)
        effects = await sqlite_lab.effects()
        for n, result in enumerate(results):
            if not isinstance(result, asyncio.CancelledError):
                assert f"{steps}-{n}" in effects
        assert (await inbox.process(sqlite_lab.message(f"{steps}-after"), Recorder(sqlite_lab))).processed


async def test_the_database_in_memory_works() -> None:
    async with Inbox.connect("sqlite://", consumer="billing") as inbox:

        async def write(message: Message[Any], tx: Any) -> int:
            await tx.execute("CREATE TABLE IF NOT EXISTS effects (what text)")
            await tx.execute("INSERT INTO effects VALUES (?)", message.id)
            return int(await tx.fetchval("SELECT count(*) FROM effects"))

        first = await inbox.process(Message("one", "t", None), write)
        assert (first.processed, first.result) == (True, 1)
        assert (await inbox.process(Message("one", "t", None), write)).duplicate
        record = await inbox.get_record(Message("one", "t", None))
        assert record is not None
        assert record.result == 1


async def test_two_databases_in_memory_do_not_wait_for_each_other() -> None:
    async with Inbox.connect("sqlite://", consumer="a") as one, Inbox.connect("sqlite://", consumer="b") as two:

        async def nesting(message: Message[Any]) -> str:
            return str((await two.process(message, lambda _message: None)).kind)

        assert (await one.process(Message("m", "t", None), nesting)).result == "processed"


async def test_the_handle_is_shaped_like_asyncpg(sqlite_lab: SqliteLab) -> None:
    async def use(message: Message[Any], tx: Any) -> None:
        assert await tx.executemany("INSERT INTO effects VALUES ($1)", [("b",), ("a",)]) == 2
        assert [row["what"] for row in await tx.fetch("SELECT what FROM effects ORDER BY 1")] == ["a", "b"]
        assert (await tx.fetchrow("SELECT $2 AS two, $1 AS one", 1, 2))["two"] == 2
        assert await tx.fetchval("SELECT ? || '$1'", "x") == "x$1"
        assert await tx.fetchrow("SELECT 1 WHERE 0") is None
        assert await tx.fetchval("SELECT 1 WHERE 0") is None
        assert await tx.execute("DELETE FROM effects WHERE what = ?", "a") == 1

    assert (await (await sqlite_lab.inbox()).process(sqlite_lab.message(), use)).processed


async def test_a_folder_that_does_not_exist_is_told(tmp_path: Path) -> None:
    with pytest.raises(StoreUnavailable, match="folder exists"):
        await Inbox(SqliteStore(tmp_path / "nowhere" / "shop.db"), consumer="billing").open()


async def test_a_file_that_is_no_database_is_told(tmp_path: Path) -> None:
    path = tmp_path / "shop.db"
    path.write_bytes(b"this is not a database, it is a text" * 100)
    with pytest.raises(StoreUnavailable, match="not a database"):
        await Inbox(SqliteStore(path), consumer="billing").open()


async def test_a_file_that_cannot_be_written_is_told(sqlite_lab: SqliteLab, monkeypatch: pytest.MonkeyPatch) -> None:
    """Root may write any file, so SQLite itself is told to open it read-only."""
    original = sqlite3.connect
    read_only = f"file:{sqlite_lab.path}?mode=ro"
    monkeypatch.setattr(sqlite3, "connect", lambda _path, **options: original(read_only, uri=True, **options))
    inbox = await sqlite_lab.inbox()
    with pytest.raises(StoreReadOnly, match="permissions"):
        await inbox.process(sqlite_lab.message(), Recorder(sqlite_lab))


@pytest.mark.parametrize("url", ["sqlite://shop.db", "shop.db", "", "sqlite:shop.db"])
def test_a_url_that_is_none_is_told(url: str) -> None:
    with pytest.raises(UsageError, match=r"sqlite:///shop\.db"):
        Inbox.connect(url, consumer="billing")


async def test_a_relative_path_is_relative_to_where_it_was_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    async with Inbox.connect("sqlite:///shop.db", consumer="billing"):
        assert (tmp_path / "shop.db").exists()


async def test_a_crash_keeps_what_was_acknowledged(sqlite_lab: SqliteLab) -> None:
    """Durability: whatever a killed process has reported is on disk."""
    process = await sqlite_lab.start_child(ids=[f"{number:05}" for number in range(20000)], concurrency=32)
    assert process.stdout is not None
    lines = [await process.stdout.readline() for _ in range(500)]
    process.kill()
    rest = await process.stdout.read()
    await process.wait()
    whole = [*lines, *rest.splitlines(keepends=True)]
    reported = {json.loads(line)["id"] for line in whole if line.endswith(b"\n")}
    effects = await sqlite_lab.effects()
    assert len(reported) >= 500
    assert len(effects) < 20000
    assert len(set(effects)) == len(effects)
    assert reported <= set(effects)
