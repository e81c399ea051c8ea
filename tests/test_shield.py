"""Work that ends before a cancellation is heard, and waiting that costs no timer."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from onceward.shield import finish_here, within


def waiting() -> asyncio.Future[Any]:
    return asyncio.get_running_loop().create_future()


async def test_a_cancellation_is_heard_after_the_work() -> None:
    one, two, ended = waiting(), waiting(), []

    async def work() -> str:
        ended.append(await one)
        await asyncio.sleep(0)
        ended.append(await two)
        return "done"

    async def run() -> str:
        return await finish_here(work())

    task = asyncio.ensure_future(run())
    await asyncio.sleep(0)
    assert task.cancel()
    assert task.cancel()
    one.set_result(1)
    await asyncio.sleep(0.01)
    assert ended == [1]
    assert not task.done()
    two.set_result(2)
    with pytest.raises(asyncio.CancelledError):
        await task
    assert ended == [1, 2]


async def test_without_a_cancellation_it_is_as_if_it_were_not_there() -> None:
    future, failing = waiting(), waiting()

    async def work() -> Any:
        value = await future
        try:
            await failing
        except KeyError as error:
            return value, type(error)

    asyncio.get_running_loop().call_soon(future.set_result, "value")
    asyncio.get_running_loop().call_later(0.01, failing.set_exception, KeyError("no"))
    assert await finish_here(work()) == ("value", KeyError)


async def test_an_error_of_the_work_is_the_cause_of_the_cancellation() -> None:
    future = waiting()

    async def work() -> None:
        await future

    async def run() -> None:
        await finish_here(work())

    task = asyncio.ensure_future(run())
    await asyncio.sleep(0)
    task.cancel()
    future.set_exception(OSError("gone"))
    with pytest.raises(asyncio.CancelledError) as caught:
        await task
    assert isinstance(caught.value.__cause__, OSError)


async def test_what_the_work_itself_cancels_is_its_own_business() -> None:
    future = waiting()

    async def work() -> str:
        try:
            await future
        except asyncio.CancelledError:
            return "seen"
        return "not seen"

    asyncio.get_running_loop().call_soon(future.cancel)
    assert await finish_here(work()) == "seen"


async def test_one_inside_the_other() -> None:
    future = waiting()

    async def work() -> str:
        return await finish_here(inner())

    async def inner() -> str:
        return str(await future)

    async def run() -> str:
        return await finish_here(work())

    task = asyncio.ensure_future(run())
    await asyncio.sleep(0)
    task.cancel()
    await asyncio.sleep(0.01)
    assert not task.done()
    future.set_result("x")
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_what_need_not_wait_is_given_without_a_timer(monkeypatch: pytest.MonkeyPatch) -> None:
    async def now() -> int:
        return 1

    monkeypatch.setattr(asyncio, "timeout", None)
    assert await within(0.0, now()) == 1


async def test_what_has_to_wait_waits_within_its_time() -> None:
    future, never, cleaned = waiting(), waiting(), []

    async def twice() -> Any:
        await asyncio.sleep(0)
        return await future

    asyncio.get_running_loop().call_later(0.01, future.set_result, 2)
    assert await within(5.0, twice()) == 2

    async def long() -> None:
        try:
            await never
        finally:
            cleaned.append(True)

    with pytest.raises(TimeoutError):
        await within(0.01, long())
    assert cleaned == [True]


async def test_a_cancellation_ends_what_has_to_wait() -> None:
    never = waiting()

    async def run() -> None:
        await within(5.0, wait())

    async def wait() -> None:
        await never

    task = asyncio.ensure_future(run())
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert never.cancelled()


async def test_an_error_comes_out_as_it_is() -> None:
    failing = waiting()

    async def work() -> None:
        await failing

    asyncio.get_running_loop().call_soon(failing.set_exception, OSError("no"))
    with pytest.raises(OSError, match="no"):
        await within(5.0, work())
