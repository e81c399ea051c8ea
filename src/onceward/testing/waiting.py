"""Waiting for something to be so, as tests do that have no event to wait for."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable
from time import monotonic
from typing import Any


async def until(holds: Callable[[], Any], *, within: float = 30.0) -> None:
    """Ask until it holds; what is asked may be awaitable. TimeoutError: it never did."""
    deadline = monotonic() + within
    while True:
        found = holds()
        if inspect.isawaitable(found):
            found = await found
        if found:
            return
        if monotonic() > deadline:
            raise TimeoutError(f"after {within:g} seconds it is still not so: {getattr(holds, '__qualname__', holds)}")
        await asyncio.sleep(0.01)
