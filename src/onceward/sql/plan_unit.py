"""How plans are run: the session of a unit, and which transaction a plan is in."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, Generic, Self, TypeVar

from onceward.sql.driver import Driver, Session
from onceward.sql.plan import Plan, Result, Statement, run
from onceward.store import Begin

Tx = TypeVar("Tx")
T = TypeVar("T")


class PlanUnit(Generic[Tx]):
    """On a session of its own, which is there while the block lasts, or on a joined one."""

    claim_marks = False
    fence: int | None = None
    _placed = False
    """There is a savepoint in the open transaction."""
    _unused = False
    """And nothing was done since."""

    def __init__(
        self,
        driver: Driver[Tx],
        begin: Begin[Tx] | None,
        wait: float,
        *,
        read_only: bool = False,
        joined: Session[Tx] | None = None,
    ) -> None:
        self.joined = joined is not None
        self._driver = driver
        self._wait = wait
        self._dialect = driver.dialect
        self._begin = begin
        if joined is not None:
            self._session = joined
        else:
            self._sessions = driver.session(wait=wait, read_only=read_only)

    async def __aenter__(self) -> Self:
        self._session = await self._sessions.__aenter__()
        return self

    def __aexit__(self, *_error: object) -> Coroutine[Any, Any, bool | None]:
        return self._sessions.__aexit__(None, None, None)  # which rolls back what is left open

    @property
    def tx(self) -> Tx:
        return self._session.tx

    @property
    def lost(self) -> bool:
        return self._session.lost

    @property
    def gone(self) -> bool:
        return self._session.gone

    async def ended(self) -> bool:
        return await self._session.ended()

    def is_conflict(self, error: BaseException) -> bool:
        return self._session.is_conflict(error)

    @property
    def stands(self) -> Callable[[], bool]:
        return self._session.stands

    def commit(self) -> Awaitable[None]:
        return self._session.commit()

    def rollback(self) -> Coroutine[Any, Any, None]:
        return self._session.rollback()

    async def _say(self, plan: Plan[T]) -> T:
        return await run(plan, self._session.execute)

    async def _start(self, plan: Plan[T]) -> T:
        """Begin a transaction with this plan; the caller ends it."""
        self._placed = self._unused = False
        return await run(plan, self._session.execute, first=self._first)

    def _first(self, statement: Statement) -> Coroutine[Any, Any, Result]:
        """Begin a transaction with this statement, behind `on_begin` where there is one."""
        return self._session.begin(statement) if self._begin is None else self._behind(self._begin, statement)

    async def _behind(self, begin: Begin[Tx], statement: Statement) -> Result:
        await self._session.begin()
        await begin(self._session.tx)
        return await self._session.execute(statement)

    async def _at_once(self, plan: Plan[T]) -> T:
        """A transaction of its own; one statement is one by itself, and needs one trip."""
        session: Any = self._session  # of PostgreSQL
        if self._begin is None and self._dialect.sets and not session.gone and await session.is_plain():
            return await self._say(plan)
        return await self._alone(plan)

    async def _alone(self, plan: Plan[T]) -> T:
        """A transaction of its own, with `on_begin` in it: row-level security applies to our tables too."""
        if self._session.gone:
            async with type(self)(self._driver, self._begin, self._wait) as unit:
                return await unit._alone(plan)  # noqa: SLF001 - the same, on another session
        try:
            value = await self._start(plan)
            await self.commit()
            return value
        finally:
            await self.rollback()
