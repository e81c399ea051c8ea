"""Batches of several processes that share messages, and crashes in the middle of one."""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter
from typing import Any

import pytest

from onceward import Kind, Message
from onceward.testing import Lab

BATCHES = 50
SIZE = 30


@pytest.fixture(params=["postgres_lab", "psycopg_lab", "sqlite_lab"])
def lab(request: pytest.FixtureRequest) -> Lab:
    found: Lab = request.getfixturevalue(request.param)
    return found


@pytest.mark.slow
@pytest.mark.parametrize("bulk", [False, True])
async def test_overlapping_batches_of_several_processes_run_each_message_once(lab: Lab, bulk: bool) -> None:
    """Fifty batches in five processes, each message in many of them, in every order. Nobody waits for ever."""
    chance, ids = random.Random(7), [f"{number:03}" for number in range(100)]
    jobs = []
    for _ in range(5):
        batches = [chance.sample(ids, SIZE) for _ in range(BATCHES // 5)]
        flat = [id_ for batch in batches for id_ in batch]
        jobs.append(lab.child(ids=flat, batch=SIZE, concurrency=5, bulk=bulk, wait=60.0))
    began = time.monotonic()
    reports = await asyncio.wait_for(asyncio.gather(*jobs), 90)
    assert [code for code, _ in reports] == [0] * 5
    kinds = Counter(line["kind"] for _, lines in reports for line in lines)
    seen = {line["id"] for _, lines in reports for line in lines}
    assert kinds == {"processed": len(seen), "duplicate": BATCHES * SIZE - len(seen)}
    assert await lab.effects() == sorted(seen), "exactly one effect each"
    assert time.monotonic() - began < 60


@pytest.mark.parametrize("at", ["before claim_many", "after claim_many", "effect", "before commit"])
async def test_a_process_killed_in_a_batch_leaves_nothing_of_it(lab: Lab, at: str) -> None:
    ids = [f"{number}" for number in range(5)]
    code, lines = await lab.child(ids=ids, batch=5, kill_at=at)
    assert (code, lines) == (-9, [])
    assert await lab.effects() == []
    code, lines = await lab.child(ids=ids, batch=5)
    assert code == 0
    assert [line["kind"] for line in lines] == ["processed"] * 5
    assert await lab.effects() == ids


async def test_a_process_killed_after_the_commit_of_a_batch_is_answered_with_duplicates(lab: Lab) -> None:
    ids = [f"{number}" for number in range(5)]
    code, _ = await lab.child(ids=ids, batch=5, kill_at="after commit")
    assert code == -9
    inbox = await lab.inbox()

    async def charge(message: Message[Any], tx: Any) -> None:
        raise AssertionError("it has run before")

    outcomes = await inbox.process_many([lab.message(id_) for id_ in ids], charge)
    assert [outcome.kind for outcome in outcomes] == [Kind.DUPLICATE] * 5
    assert outcomes[3].result == {"charged": "3"}
    assert await lab.effects() == ids


async def test_a_message_of_a_batch_that_kills_its_process_takes_nobody_with_it(lab: Lab) -> None:
    """Redelivered, with a retry policy: each message of the batch commits its own start before it runs."""
    ids = ["a", "killer", "b"]
    for _ in range(2):
        code, _ = await lab.child(ids=ids, batch=3, kill_at="handler of killer", redelivered=True, max_attempts=2)
        assert code == -9
        await lab.query("UPDATE onceward_records SET next_try_at = received_at WHERE state = 'running'")
        await lab.query("DELETE FROM effects WHERE what = 'killer'")
    # The runner before may be just slow: its mark has to be old before the message is buried.
    old = "now() - interval '1 hour'" if lab.network else "strftime('%Y-%m-%dT%H:%M:%fZ', 'now', '-1 hours')"
    await lab.query(f"UPDATE onceward_records SET next_try_at = {old} WHERE state = 'running'")
    code, lines = await lab.child(ids=ids, batch=3, redelivered=True, max_attempts=2)
    assert code == 0
    assert [line["kind"] for line in lines] == ["duplicate", "dead", "processed"]
    assert await lab.effects() == ["a", "b"]


@pytest.mark.parametrize("lab", ["postgres_lab", "psycopg_lab"], indirect=True)
async def test_one_of_a_batch_that_leaves_a_statement_running_holds_up_nobody_else(lab: Lab) -> None:
    """Its connection has to be given up, and the server goes on with the statement and holds the claims of all. When it
    is over, each of them is tried alone."""
    inbox, messages = await lab.inbox(wait=30.0), [lab.message(id_) for id_ in "abc"]
    left = []

    async def handler(message: Message[Any], tx: Any) -> dict[str, bool]:
        if message.id == "c":  # the last: psycopg would make the next one wait for it
            left.append(asyncio.ensure_future(lab.run(tx, "SELECT pg_sleep(0.5)")))
            await asyncio.sleep(0.1)  # so that it is on its way
        else:
            await lab.run(tx, "INSERT INTO effects VALUES ($1)", message.id)
        return {"ok": True}

    outcomes = await inbox.process_many(messages, handler)
    await asyncio.gather(*left, return_exceptions=True)
    assert [outcome.kind for outcome in outcomes] == [Kind.PROCESSED, Kind.PROCESSED, Kind.FAILED]
    assert "left behind" in str(outcomes[2].error)
    assert await lab.effects() == ["a", "b"]
