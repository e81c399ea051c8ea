"""`onceward setup` upgrades tables that are in use: whoever has them open goes on, and nobody waits for long."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import pytest

from onceward import Inbox, Message, SchemaTooNew
from onceward.sql import store as sql_store
from onceward.sql import verbs
from onceward.sql.catalog import Migration
from onceward.testing import PostgresLab
from onceward.testing.lab import Gate, Recorder
from onceward.testing.labs import SqlLab


async def traffic(inbox: Inbox[Any], lab: PostgresLab, stop: asyncio.Event) -> tuple[int, float]:
    """How many messages, with a position each, and the longest that one took."""
    done, longest, handler = 0, 0.0, Recorder(lab)
    while not stop.is_set():
        done += 1
        began = time.monotonic()
        assert (await inbox.process(lab.message(stream="s", position=done), handler)).processed
        longest = max(longest, time.monotonic() - began)
    return done, longest


async def upgrade_during(lab: PostgresLab, seconds: float) -> tuple[int, float]:
    """An upgrade from version 3 with traffic, and a handler that is at work and goes on for some time."""
    inbox, gate, stop = await lab.inbox(), Gate(lab), asyncio.Event()
    await lab.back_to(3)
    slow = asyncio.create_task(inbox.process(lab.message("slow"), gate))
    await gate.started.wait()
    others = asyncio.create_task(traffic(inbox, lab, stop))
    setup = asyncio.create_task(lab.store().setup())
    await asyncio.sleep(seconds)
    gate.go.set()
    assert (await slow).processed
    await setup
    await asyncio.sleep(0.2)
    stop.set()
    return await others


@pytest.mark.slow
async def test_an_upgrade_under_traffic_lets_others_go_on(postgres_lab: PostgresLab) -> None:
    done, longest = await upgrade_during(postgres_lab, 5.5)
    assert longest < 4.0, "a wait of two seconds at most, on a busy machine"
    assert len(await postgres_lab.effects()) == done + 1
    [[version]] = await postgres_lab.query("SELECT max(version) FROM onceward_schema")
    assert version > 3


@pytest.mark.slow
async def test_without_patience_all_would_wait(postgres_lab: PostgresLab, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sql_store, "PATIENCE", (None,))
    _, longest = await upgrade_during(postgres_lab, 5.5)
    assert longest > 5.0


async def test_an_upgrade_waits_for_as_long_as_it_takes_in_the_end(
    postgres_lab: PostgresLab, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sql_store, "PATIENCE", (0.05, 0.1, None))
    await upgrade_during(postgres_lab, 1.0)
    [[version]] = await postgres_lab.query("SELECT max(version) FROM onceward_schema")
    assert version > 3


async def test_records_of_version_three_are_there_after_the_upgrade(postgres_lab: PostgresLab) -> None:
    inbox = await postgres_lab.inbox(cache=0)
    for position in (1, 2):
        message = postgres_lab.message(f"m-{position}", stream="s", position=position)
        await inbox.process(message, Recorder(postgres_lab))
    dead: Message[Any] = postgres_lab.message("dead")
    with pytest.raises(ValueError, match="no"):
        await inbox.process(dead, Recorder(postgres_lab, error=ValueError("no")))
    look = "SELECT * FROM onceward_records ORDER BY message_id"
    before = await postgres_lab.query(look)
    await postgres_lab.back_to(3)
    await postgres_lab.store().setup()
    assert await postgres_lab.query(look) == before
    assert (await inbox.process(postgres_lab.message("m-1"), Recorder(postgres_lab))).duplicate


# --- older code, newer tables -------------------------------------------------------------------------------


@pytest.fixture(params=["postgres_lab", "sqlite_lab"])
def lab(request: pytest.FixtureRequest) -> SqlLab:
    found: SqlLab = request.getfixturevalue(request.param)
    return found


async def set_up_by_newer_code(lab: SqlLab, *more: str) -> None:
    """As a version of the package that has more migrations."""
    known = verbs.migrations(lab.dialect)
    newer = [Migration(len(known) + place, f"more_{place}", sql) for place, sql in enumerate(more, 1)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(verbs, "migrations", lambda _dialect: (*known, *newer))
        await lab.store().setup()


async def test_a_migration_says_which_older_code_works_with_it(lab: SqlLab) -> None:
    ours = verbs.migrations(lab.dialect)[-1].version
    kind = f"-- since: {ours}\nALTER TABLE onceward_records ADD COLUMN more integer;"
    await set_up_by_newer_code(lab, kind)
    look = "SELECT version, name, since FROM onceward_schema WHERE since IS NOT NULL"
    assert await lab.query(look) == [(ours + 1, "more_1", ours)]
    inbox = await lab.inbox(cache=0)
    for name in ("first", "again"):
        outcome = await inbox.process(lab.message("m"), Recorder(lab))
        assert outcome.processed is (name == "first")
    await lab.store().setup()
    await set_up_by_newer_code(lab, kind, "ALTER TABLE onceward_records ADD COLUMN needed integer;")
    with pytest.raises(SchemaTooNew, match="Upgrade the package"):
        await lab.inbox()


def test_what_a_migration_says_about_older_code_is_a_line_of_its_own() -> None:
    assert Migration(5, "five", "-- since: 4\nSELECT 1;").since == 4
    assert Migration(5, "five", "-- not since: 4\nSELECT 1;").since == 5
    for dialect in ("postgresql", "sqlite"):
        assert all(1 <= one.since <= one.version for one in verbs.migrations(dialect))
