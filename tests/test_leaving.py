"""`leaves_loop`: which ways out of a block leave the loop around it."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Awaitable, Callable
from contextlib import nullcontext, suppress
from typing import Any

import pytest

from onceward.leaving import leaves_loop


class Block:
    def __init__(self, seen: list[bool]) -> None:
        self._seen = seen

    async def __aenter__(self) -> tuple[int, int]:
        return (1, 2)

    def __aexit__(self, *_error: object) -> Awaitable[None]:
        self._seen.append(leaves_loop(sys._getframe(1)))
        return asyncio.sleep(0)


class Blocks:
    """Gives out blocks, as an inbox gives out work."""

    def __init__(self, number: int = 3) -> None:
        self.seen: list[bool] = []
        self._left = number

    def __aiter__(self) -> Blocks:
        return self

    async def __anext__(self) -> Block:
        self._left -= 1
        if self._left < 0:
            raise StopAsyncIteration
        return Block(self.seen)


# --- these leave the loop -----------------------------------------------------------------------------------------


async def break_in_if(blocks: Any) -> None:
    async for work in blocks:
        async with work as (a, _):
            if a:
                break
            await asyncio.sleep(0)
    await asyncio.sleep(0)


async def break_at_the_end(blocks: Any) -> None:
    async for work in blocks:
        async with work:
            await asyncio.sleep(0)
            break


async def break_in_else(blocks: Any) -> None:
    async for work in blocks:
        async with work as (a, _):
            if not a:
                pass
            else:
                break
        await asyncio.sleep(0)
    else:
        await asyncio.sleep(0)


async def break_behind_a_block(blocks: Any) -> None:
    async for work in blocks:
        with nullcontext():
            async with work as (a, _):
                if a:
                    break


async def break_behind_an_async_block(blocks: Any) -> None:
    turn = asyncio.Semaphore()
    async for work in blocks:
        async with turn:  # noqa: SIM117 - this is what is tested
            async with work as (a, _):
                if a:
                    break
                await asyncio.sleep(0)


async def break_in_an_inner_block(blocks: Any) -> None:
    async for work in blocks:
        async with work as (a, _):
            with suppress(KeyError):
                if a:
                    break


async def break_in_try(blocks: Any) -> None:
    async for work in blocks:
        try:
            async with work as (a, _):
                if a:
                    break
        except ValueError:
            pass


async def break_of_two(blocks: Any) -> None:
    async for work in blocks:
        async with work as (a, _), asyncio.Semaphore():
            if a:
                break


async def break_in_match(blocks: Any) -> None:
    async for work in blocks:
        async with work as (a, _):
            match a:
                case 1:
                    break
                case _:
                    pass


async def plain_return(blocks: Any) -> None:
    async for work in blocks:
        async with work as (a, _):
            if a:
                return
    await asyncio.sleep(0)


async def return_of_something(blocks: Any) -> int:
    async for work in blocks:
        async with work as (a, _):
            return a
    return 0


# --- these do not -------------------------------------------------------------------------------------------------


async def to_the_end(blocks: Any) -> None:
    async for work in blocks:
        async with work:
            await asyncio.sleep(0)


async def with_continue(blocks: Any) -> None:
    async for work in blocks:
        async with work as (a, _):
            if a:
                continue
            await asyncio.sleep(0)


async def break_after_it(blocks: Any) -> None:
    async for work in blocks:
        async with work:
            await asyncio.sleep(0)
        break


async def break_after_it_in_if(blocks: Any) -> None:
    async for work in blocks:
        async with work as (a, _):
            await asyncio.sleep(0)
        if a:
            break


async def return_after_it(blocks: Any) -> Any:
    async for work in blocks:
        async with work as (a, _):
            await asyncio.sleep(0)
        return a
    return None


async def break_of_an_inner_loop(blocks: Any) -> None:
    async for work in blocks:
        async with work:
            for number in range(3):
                if number:
                    break


LEAVE = [
    break_in_if, break_at_the_end, break_in_else, break_behind_a_block, break_behind_an_async_block,
    break_in_an_inner_block, break_in_try, break_of_two, break_in_match, plain_return, return_of_something,
]  # fmt: skip
STAY = [
    to_the_end, with_continue, break_after_it, break_after_it_in_if, return_after_it, break_of_an_inner_loop,
]  # fmt: skip


@pytest.mark.parametrize("way", LEAVE, ids=lambda way: way.__name__)
async def test_the_way_out_leaves_the_loop(way: Callable[[Any], Awaitable[Any]]):
    blocks = Blocks()
    await way(blocks)
    assert blocks.seen == [True]


@pytest.mark.parametrize("way", STAY, ids=lambda way: way.__name__)
async def test_the_way_out_ends_the_block(way: Callable[[Any], Awaitable[Any]]):
    blocks = Blocks()
    await way(blocks)
    assert blocks.seen
    assert not any(blocks.seen)
