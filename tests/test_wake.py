"""Calling workers: none misses it, many calls are few, and none outlives its inbox."""

from __future__ import annotations

import asyncio

import pytest

from onceward import StoreUnavailable, wake
from onceward.wake import Bell, Herald


async def test_each_worker_has_an_ear_of_its_own() -> None:
    bell = Bell()
    first, second = bell.ear(), bell.ear()
    bell.ring()
    first.clear()
    assert second.is_set()
    bell.forget(second)
    second.clear()
    bell.ring()
    assert first.is_set()
    assert not second.is_set()


async def test_calls_that_come_during_one_are_one_more() -> None:
    calls, go = [], asyncio.Event()

    async def tell() -> None:
        calls.append(len(calls))
        await go.wait()

    herald = Herald(tell)
    herald.call()
    await asyncio.sleep(0)
    for _ in range(10):
        herald.call()
    go.set()
    await herald.close()
    assert calls == [0, 1]


async def test_a_call_that_fails_is_not_the_last() -> None:
    calls = []

    async def tell() -> None:
        calls.append(1)
        raise StoreUnavailable

    herald = Herald(tell)
    for _ in range(2):
        herald.call()
        await herald.close()
    assert calls == [1, 1]


async def test_a_call_that_hangs_does_not_outlive_its_inbox(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wake, "PATIENCE", 0.01)
    ended = asyncio.Event()

    async def tell() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()

    herald = Herald(tell)
    herald.call()
    await asyncio.sleep(0)
    await herald.close()
    assert ended.is_set()
