"""SQLAlchemy: repositories that open their own sessions, and what a handler can do with the session that it gets."""

from __future__ import annotations

import asyncio
import contextlib
import gc
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import Column, Text, event, insert, select, text
from sqlalchemy.ext.asyncio import (
    AsyncEngine,
    AsyncSession,
    async_scoped_session,
    async_sessionmaker,
    create_async_engine,
)
from sqlalchemy.orm import Session, declarative_base

from onceward import Inbox, Kind, Message, State
from onceward.errors import CommitNotApplied, HandlerEndedTransaction, UsageError
from onceward.sql.drivers import sqlalchemy_shared
from onceward.sqlalchemy import SecondConnectionWarning, SqlAlchemyStore, joining
from onceward.testing import Lab, PostgresLab, SqliteLab

Base: Any = declarative_base()


class Effect(Base):
    __tablename__ = "effects"
    what = Column(Text, primary_key=True)


class Shop:
    """An engine, an inbox on it, and a repository that opens its own sessions and commits them."""

    def __init__(self, lab: Lab, engine: AsyncEngine, inbox: Inbox[AsyncSession]) -> None:
        self.lab = lab
        self.engine = engine
        self.inbox = inbox
        self.ordinary = async_sessionmaker(engine)
        self.Session = joining(self.ordinary)

    async def save(self, what: str) -> None:
        """A repository as people write them: it knows nothing of inboxes."""
        async with self.Session() as session:
            session.add(Effect(what=what))
            await session.commit()

    async def effects(self) -> list[str]:
        return await self.lab.effects()


@pytest.fixture(params=["asyncpg", "psycopg", "aiosqlite"])
def place(request: pytest.FixtureRequest) -> tuple[Lab, str]:
    if request.param == "aiosqlite":
        file: SqliteLab = request.getfixturevalue("sqlite_lab")
        return file, f"sqlite+aiosqlite:///{file.path}"
    server: PostgresLab = request.getfixturevalue("postgres_lab")
    return server, server.url.replace("postgresql://", f"postgresql+{request.param}://", 1)


@pytest.fixture
async def shop(place: tuple[Lab, str]) -> AsyncIterator[Shop]:
    lab, url = place
    engine = create_async_engine(url)
    async with Inbox(SqlAlchemyStore(engine), consumer="billing") as inbox:
        yield Shop(lab, engine, inbox)
    await engine.dispose()


async def is_processed(shop: Shop, message: Message[Any]) -> bool:
    return await shop.inbox.is_processed(message)


# --- repositories -------------------------------------------------------------------------------------------


async def test_without_joining_a_repository_writes_outside_and_is_told(shop: Shop) -> None:
    if shop.engine.dialect.name == "sqlite":
        pytest.skip("the second connection would wait for the write lock of the first")
    shop.Session = shop.ordinary

    async def on_paid(message: Message[Any]) -> None:
        await shop.save("outside")
        raise ValueError("no")

    with pytest.warns(SecondConnectionWarning, match="on_paid"), pytest.raises(ValueError, match="no"):
        await shop.inbox.process(shop.lab.message(), on_paid)
    assert await shop.effects() == ["outside"], "it stands, although the message failed"


async def test_with_joining_a_repository_takes_effect_with_the_message(shop: Shop) -> None:
    async def on_paid(message: Message[Any], tx: AsyncSession) -> None:
        tx.add(Effect(what="handler"))
        await shop.save("repository")
        assert await shop.effects() == [], "its commit is not the database's"

    message = shop.lab.message()
    for kind in (Kind.PROCESSED, Kind.DUPLICATE):
        assert (await shop.inbox.process(message, on_paid)).kind is kind
    assert await shop.effects() == ["handler", "repository"]


async def test_with_joining_a_repository_is_undone_with_the_message(shop: Shop) -> None:
    async def on_paid(message: Message[Any]) -> None:
        await shop.save("repository")
        raise ValueError("after its commit")

    message = shop.lab.message()
    with pytest.raises(ValueError, match="after its commit"):
        await shop.inbox.process(message, on_paid)
    assert await shop.effects() == []
    record = await shop.inbox.get_record(message)
    assert record is not None
    assert (record.state, record.attempts) == (State.FAILED, 1)


async def test_the_rollback_of_a_repository_undoes_its_part_only(shop: Shop) -> None:
    async def on_paid(message: Message[Any], tx: AsyncSession) -> None:
        tx.add(Effect(what="handler"))
        await tx.flush()
        async with shop.Session() as session:
            session.add(Effect(what="undone"))
            await session.flush()
            await session.rollback()
            session.add(Effect(what="second try"))
            await session.commit()
            session.add(Effect(what="closed without commit"))
            await session.flush()

    assert (await shop.inbox.process(shop.lab.message(), on_paid)).processed
    assert await shop.effects() == ["handler", "second try"]


async def test_an_sql_error_in_a_repository_can_be_survived(shop: Shop) -> None:
    async def on_paid(message: Message[Any], tx: AsyncSession) -> None:
        await shop.save("one")
        for wrong in ("SELECT * FROM no_such_table", "INSERT INTO no_such_table VALUES (1)"):
            with pytest.raises(Exception, match="no_such_table"):
                async with shop.Session() as session:
                    await session.execute(text(wrong))
        await shop.save("two")

    assert (await shop.inbox.process(shop.lab.message(), on_paid)).processed
    assert await shop.effects() == ["one", "two"]


async def test_the_ways_to_open_a_session(shop: Shop) -> None:
    async def on_paid(message: Message[Any]) -> None:
        async with shop.Session.begin() as session:
            session.add(Effect(what="Session.begin()"))
        async with shop.Session() as session, session.begin():
            session.add(Effect(what="session.begin()"))
        async with shop.Session() as session:
            async with session.begin_nested():
                session.add(Effect(what="begin_nested()"))
            with contextlib.suppress(ValueError):
                async with session.begin_nested():
                    session.add(Effect(what="undone"))
                    await session.flush()
                    raise ValueError
            await session.commit()
        session = shop.Session()
        await (await session.connection()).execute(insert(Effect).values(what="connection()"))
        await session.commit()
        await session.close()
        with pytest.raises(ValueError, match="no"):
            async with shop.Session.begin() as session:
                session.add(Effect(what="also undone"))
                await session.flush()
                raise ValueError("no")

    assert (await shop.inbox.process(shop.lab.message(), on_paid)).processed
    assert await shop.effects() == ["Session.begin()", "begin_nested()", "connection()", "session.begin()"]


async def test_repositories_may_be_nested(shop: Shop) -> None:
    async def on_paid(message: Message[Any], tx: AsyncSession) -> None:
        async with shop.Session() as outer:
            outer.add(Effect(what="outer"))
            await outer.flush()
            await shop.save("inner")
            assert len((await outer.scalars(select(Effect))).all()) == 2
            await outer.commit()
        await shop.save("after")

    assert (await shop.inbox.process(shop.lab.message(), on_paid)).processed
    assert await shop.effects() == ["after", "inner", "outer"]


async def test_a_session_that_only_reads_undoes_nothing_of_others(shop: Shop) -> None:
    """It is closed without commit. A plain savepoint would take with it what was committed meanwhile."""

    async def on_paid(message: Message[Any], tx: AsyncSession) -> None:
        async with shop.Session() as reading:
            await reading.scalars(select(Effect))
            await shop.save("inner repository")
            tx.add(Effect(what="handler"))
            await tx.flush()
        async with shop.Session() as reading:
            await reading.scalars(select(Effect))
            async with shop.Session() as writing:
                writing.add(Effect(what="later"))
                await writing.flush()
                await reading.rollback()
                await writing.commit()

    assert (await shop.inbox.process(shop.lab.message(), on_paid)).processed
    assert await shop.effects() == ["handler", "inner repository", "later"]


@pytest.mark.parametrize("order", ["a b", "b a"])
async def test_sessions_that_overlap_may_end_in_any_order(shop: Shop, order: str) -> None:
    async def on_paid(message: Message[Any]) -> None:
        sessions = {"a": shop.Session(), "b": shop.Session()}
        for name, session in sessions.items():
            session.add(Effect(what=f"{name} one"))
            await session.flush()
        for name, session in sessions.items():
            session.add(Effect(what=f"{name} two"))
            await session.flush()
        for name in order.split():
            await sessions[name].commit()
            await sessions[name].close()

    assert (await shop.inbox.process(shop.lab.message(), on_paid)).processed
    assert await shop.effects() == ["a one", "a two", "b one", "b two"]


@pytest.mark.parametrize("swallow", [False, True])
async def test_what_cannot_be_undone_alone_is_never_committed(shop: Shop, swallow: bool) -> None:
    """Both have written, and the one that began first is undone. Nobody may lose a write without hearing of it."""

    async def on_paid(message: Message[Any]) -> None:
        async with shop.Session() as outer:
            outer.add(Effect(what="outer"))
            await outer.flush()
            await shop.save("inner")
            with contextlib.suppress(*([UsageError] if swallow else [])):
                await outer.rollback()

    message = shop.lab.message()
    with pytest.raises(UsageError, match="cannot be undone without theirs"):
        await shop.inbox.process(message, on_paid)
    assert await shop.effects() == []
    assert not await is_processed(shop, message)


async def test_an_open_session_that_has_written_is_not_committed_by_chance(shop: Shop) -> None:
    left = []

    async def on_paid(message: Message[Any]) -> None:
        session = shop.Session()
        left.append(session)
        session.add(Effect(what="never committed"))
        await session.flush()

    with pytest.raises(UsageError, match="still open"):
        await shop.inbox.process(shop.lab.message(), on_paid)
    assert await shop.effects() == []
    with pytest.raises(UsageError, match="over"):
        await left[0].execute(text("SELECT 1"))
    await left[0].close()


async def test_a_savepoint_of_the_handler_takes_repositories_with_it(shop: Shop) -> None:
    async def on_paid(message: Message[Any], tx: AsyncSession) -> None:
        with contextlib.suppress(ValueError):
            async with tx.begin_nested():
                await shop.save("undone")
                raise ValueError
        await shop.save("kept")

    assert (await shop.inbox.process(shop.lab.message(), on_paid)).processed
    assert await shop.effects() == ["kept"]


async def test_outside_of_a_handler_a_session_is_an_ordinary_one(shop: Shop) -> None:
    await shop.save("before")
    assert await shop.effects() == ["before"]

    async def on_paid(message: Message[Any]) -> None:
        pass

    await shop.inbox.process(shop.lab.message(), on_paid)
    await shop.save("after")
    assert await shop.effects() == ["after", "before"]
    async with shop.Session() as session:
        assert session.bind is shop.engine


async def test_another_engine_is_not_joined(shop: Shop, tmp_path: Path) -> None:
    other = create_async_engine(f"sqlite+aiosqlite:///{tmp_path}/other.db")
    async with other.begin() as connection:
        await connection.exec_driver_sql("CREATE TABLE effects (what text)")
    Session = joining(async_sessionmaker(other))

    async def on_paid(message: Message[Any]) -> None:
        async with Session.begin() as session:
            session.add(Effect(what="elsewhere"))
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        await shop.inbox.process(shop.lab.message(), on_paid)
    async with Session() as session:
        assert (await session.scalars(select(Effect.what))).all() == ["elsewhere"]
    await other.dispose()


async def test_a_task_of_the_handler_joins_and_one_that_outlives_it_does_not(shop: Shop) -> None:
    go, late = asyncio.Event(), []

    async def later() -> None:
        await go.wait()
        await shop.save("late")

    async def on_paid(message: Message[Any]) -> None:
        await asyncio.ensure_future(shop.save("task"))
        late.append(asyncio.ensure_future(later()))
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        await shop.inbox.process(shop.lab.message(), on_paid)
    assert await shop.effects() == []
    go.set()
    await late[0]
    assert await shop.effects() == ["late"], "an ordinary session of its own"


@pytest.mark.parametrize("verb", ["process", "claim"])
async def test_repositories_join_a_transaction_of_the_callers_too(shop: Shop, verb: str) -> None:
    async def work(message: Message[Any], tx: AsyncSession) -> None:
        await shop.save(f"repository {message.id}")
        if message.id == "bad":
            raise ValueError("no")

    async def deliver(message: Message[Any], session: AsyncSession) -> None:
        if verb == "process":
            await shop.inbox.process(message, work, tx=session)
            return
        async with shop.inbox.claim(message, tx=session) as claim:
            if claim.first:
                await work(message, session)

    async with shop.ordinary() as session, session.begin():
        session.add(Effect(what="caller"))
        await deliver(shop.lab.message("good"), session)
        with pytest.raises(ValueError, match="no"):
            await deliver(shop.lab.message("bad"), session)
        async with shop.Session() as ordinary:
            assert ordinary.bind is shop.engine, "after the block sessions are ordinary again"
        assert await shop.effects() == []
    assert await shop.effects() == ["caller", "repository good"]


async def test_a_scoped_session_can_be_joined(shop: Shop) -> None:
    scoped = async_scoped_session(shop.ordinary, scopefunc=asyncio.current_task)
    message = shop.lab.message()
    async with shop.inbox.claim(message, tx=scoped) as claim:
        assert claim.first
        scoped.add(Effect(what="scoped"))
    await scoped.commit()
    await scoped.remove()
    assert await shop.effects() == ["scoped"]
    assert await is_processed(shop, message)


async def test_nothing_is_kept_of_connections_that_were_shared(shop: Shop) -> None:
    async def on_paid(message: Message[Any], tx: AsyncSession) -> None:
        await shop.save(message.id)

    for _ in range(3):
        await shop.inbox.process(shop.lab.message(), on_paid)
    gc.collect()
    assert len(sqlalchemy_shared._ledgers) == 0


def test_joining_takes_a_sessionmaker() -> None:
    with pytest.raises(UsageError, match="async_sessionmaker"):
        joining(AsyncSession)  # type: ignore[arg-type]


async def test_a_joining_sessionmaker_keeps_its_options(shop: Shop) -> None:
    class Mine(AsyncSession):
        pass

    Session = joining(async_sessionmaker(shop.engine, class_=Mine, expire_on_commit=False, info={"a": 1}))

    async def on_paid(message: Message[Any]) -> None:
        async with Session() as session:
            assert type(session) is Mine
            effect = Effect(what="kept")
            session.add(effect)
            await session.commit()
            assert effect.what == "kept"
            assert session.info == {"a": 1}

    assert (await shop.inbox.process(shop.lab.message(), on_paid)).processed
    assert await shop.effects() == ["kept"]


# --- what a handler does with its session -------------------------------------------------------------------


async def test_commit_of_the_handler_is_harmless(shop: Shop) -> None:
    async def on_paid(message: Message[Any], tx: AsyncSession) -> None:
        tx.add(Effect(what="one"))
        await tx.commit()
        tx.add(Effect(what="two"))
        assert await shop.effects() == []
        if message.id == "bad":
            raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        await shop.inbox.process(shop.lab.message("bad"), on_paid)
    assert await shop.effects() == []
    assert (await shop.inbox.process(shop.lab.message("good"), on_paid)).processed
    assert await shop.effects() == ["one", "two"]


async def test_rollback_of_the_handler_and_return_is_found_out(shop: Shop) -> None:
    async def on_paid(message: Message[Any], tx: AsyncSession) -> None:
        tx.add(Effect(what="one"))
        await tx.flush()
        await tx.rollback()

    message = shop.lab.message()
    with pytest.raises(HandlerEndedTransaction, match="begin_nested"):
        await shop.inbox.process(message, on_paid)
    assert await shop.effects() == []
    assert (await shop.inbox.process(message, on_paid)).kind is Kind.DEAD


async def test_rollback_of_the_handler_and_an_error_is_a_failed_attempt(shop: Shop) -> None:
    async def on_paid(message: Message[Any], tx: AsyncSession) -> None:
        tx.add(Effect(what="one"))
        await tx.flush()
        await tx.rollback()
        raise ValueError("no")

    message = shop.lab.message()
    with pytest.raises(ValueError, match="no"):
        await shop.inbox.process(message, on_paid)
    record = await shop.inbox.get_record(message)
    assert record is not None
    assert (record.state, record.attempts) == (State.FAILED, 1)


async def test_blocks_of_the_session_work_inside_a_handler(shop: Shop) -> None:
    async def on_paid(message: Message[Any], tx: AsyncSession) -> None:
        async with tx.begin():
            tx.add(Effect(what="begin"))
        async with tx.begin_nested():
            tx.add(Effect(what="nested"))
        with contextlib.suppress(ValueError):
            async with tx.begin_nested():
                tx.add(Effect(what="undone"))
                raise ValueError

    assert (await shop.inbox.process(shop.lab.message(), on_paid)).processed
    assert await shop.effects() == ["begin", "nested"]


async def test_a_flush_that_fails_at_the_end_is_a_failed_attempt(shop: Shop) -> None:
    await shop.lab.query("CREATE UNIQUE INDEX one_of_each ON effects (what)")
    await shop.lab.query("INSERT INTO effects VALUES ('taken')")

    async def on_paid(message: Message[Any], tx: AsyncSession) -> None:
        tx.add(Effect(what="taken"))

    message = shop.lab.message()
    with pytest.raises(Exception, match=r"(?i)unique"):
        await shop.inbox.process(message, on_paid)
    record = await shop.inbox.get_record(message)
    assert record is not None
    assert (record.state, record.attempts, record.errors[0].type) == (State.FAILED, 1, "IntegrityError")
    assert await shop.effects() == ["taken"]


async def test_a_swallowed_flush_error_is_not_acknowledged(shop: Shop) -> None:
    await shop.lab.query("CREATE UNIQUE INDEX one_of_each ON effects (what)")
    await shop.lab.query("INSERT INTO effects VALUES ('taken')")

    async def on_paid(message: Message[Any], tx: AsyncSession) -> None:
        tx.add(Effect(what="taken"))
        with pytest.raises(Exception, match=r"(?i)unique"):
            await tx.flush()

    message = shop.lab.message()
    with pytest.raises(CommitNotApplied, match="flush failed"):
        await shop.inbox.process(message, on_paid)
    assert await shop.inbox.get_record(message) is None
    assert await shop.effects() == ["taken"]


async def test_the_sessionmaker_of_the_user_makes_the_sessions(shop: Shop) -> None:
    class Mine(AsyncSession):
        pass

    committed, seen = [], []

    async def on_paid(message: Message[Any], tx: AsyncSession) -> None:
        event.listen(tx.sync_session, "after_commit", lambda _session: committed.append(message.id))
        seen.append(tx)
        effect = Effect(what=message.id)
        tx.add(effect)
        await tx.commit()
        assert effect.what == message.id, "expire_on_commit=False is kept"
        committed.clear()
        if message.id == "bad":
            raise ValueError("no")

    maker = async_sessionmaker(shop.engine, class_=Mine, expire_on_commit=False)
    await shop.inbox.close()
    async with Inbox(SqlAlchemyStore(maker), consumer="billing") as inbox:
        with pytest.raises(ValueError, match="no"):
            await inbox.process(shop.lab.message("bad"), on_paid)
        assert committed == []
        assert (await inbox.process(shop.lab.message("good"), on_paid)).processed
    assert committed == ["good"], "after the real commit, and only then"
    assert all(type(tx) is Mine for tx in seen)
    assert await shop.effects() == ["good"]


async def test_a_handler_without_tx_makes_no_session(shop: Shop) -> None:
    made = []

    class Counted(AsyncSession):
        def __init__(self, *args: Any, **options: Any) -> None:
            made.append(1)
            super().__init__(*args, **options)

    async def without(message: Message[Any]) -> None:
        pass

    async def with_tx(message: Message[Any], tx: AsyncSession) -> None:
        pass

    await shop.inbox.close()
    async with Inbox(SqlAlchemyStore(async_sessionmaker(shop.engine, class_=Counted)), consumer="billing") as inbox:
        await inbox.process(shop.lab.message(), without)
        assert made == []
        await inbox.process(shop.lab.message(), with_tx)
        assert made == [1]


async def test_an_engine_that_pings_works(postgres_lab: PostgresLab, sqlite_lab: SqliteLab) -> None:
    for lab, url in (
        (postgres_lab, postgres_lab.url.replace("postgresql://", "postgresql+asyncpg://")),
        (postgres_lab, postgres_lab.url.replace("postgresql://", "postgresql+psycopg://")),
        (sqlite_lab, f"sqlite+aiosqlite:///{sqlite_lab.path}"),
    ):
        engine = create_async_engine(url, pool_pre_ping=True)
        async with Inbox(SqlAlchemyStore(engine), consumer="billing") as inbox:

            async def on_paid(message: Message[Any], tx: AsyncSession) -> None:
                tx.add(Effect(what=message.id))

            for _ in range(3):
                message = lab.message()
                assert (await inbox.process(message, on_paid)).processed
                assert message.id in await lab.effects()
        await engine.dispose()


async def test_what_a_store_is_made_of(sqlite_lab: SqliteLab) -> None:
    url = f"sqlite+aiosqlite:///{sqlite_lab.path}"
    engine = create_async_engine(url)
    for bind in (engine, async_sessionmaker(engine), url):
        async with Inbox(SqlAlchemyStore(bind), consumer="billing") as inbox:
            assert (await inbox.process(sqlite_lab.message(), lambda _message: None)).processed
    await engine.dispose()


@pytest.mark.parametrize(
    ("bind", "options", "says"),
    [
        (async_sessionmaker(), {}, "has no engine"),
        (7, {}, "takes an AsyncEngine"),
        ("mysql+asyncmy://localhost/shop", {}, "knows PostgreSQL and SQLite"),
        ("sqlite+aiosqlite:///x.db", {"schema": "s"}, "no schemas"),
        ("sqlite+aiosqlite:///x.db", {"second_connection": "sometimes"}, "second_connection="),
    ],
)
def test_a_store_cannot_be_made_of_everything(bind: Any, options: dict[str, Any], says: str) -> None:
    with pytest.raises(UsageError, match=says):
        SqlAlchemyStore(bind, **options)


async def test_an_engine_cannot_be_given_options(sqlite_lab: SqliteLab) -> None:
    engine = create_async_engine(f"sqlite+aiosqlite:///{sqlite_lab.path}")
    with pytest.raises(UsageError, match="pool_size"):
        SqlAlchemyStore(engine, pool_size=3)
    await engine.dispose()


async def test_what_runs_beside_a_session_is_not_undone_with_it(shop: Shop) -> None:
    """Two tasks of a handler at once are a mistake; a write that is lost in silence would be a worse one."""

    async def gives_up(what: str) -> None:
        async with shop.Session() as session:
            session.add(Effect(what=what))
            await session.flush()

    async def on_paid(message: Message[Any], tx: AsyncSession) -> None:
        connection = await tx.connection()
        other = asyncio.ensure_future(gives_up(f"given up {message.id}"))
        for _ in range(int(message.id)):
            await asyncio.sleep(0)
        await asyncio.gather(other, connection.execute(insert(Effect).values(what=message.id)))

    for turn in range(6):
        message = Message(id=str(turn), type="order.paid", payload=None)
        with contextlib.suppress(UsageError):
            await shop.inbox.process(message, on_paid)
        there = message.id in await shop.effects()
        assert there == await is_processed(shop, message), turn


async def test_a_session_that_cannot_be_undone_alone_is_a_failed_attempt(shop: Shop) -> None:
    """Counted, or a message that always does so would come again for ever."""

    async def on_paid(message: Message[Any]) -> None:
        async with shop.Session() as outer:
            outer.add(Effect(what="outer"))
            await outer.flush()
            await shop.save("inner")

    message = shop.lab.message()
    with pytest.raises(UsageError, match="cannot be undone without theirs"):
        await shop.inbox.process(message, on_paid)
    record = await shop.inbox.get_record(message)
    assert record is not None
    assert (record.state, record.attempts) == (State.FAILED, 1)


async def test_a_session_that_locks_what_it_reads_has_written_nothing(shop: Shop) -> None:
    if shop.engine.dialect.name == "sqlite":
        pytest.skip("SQLite has no FOR UPDATE")

    async def on_paid(message: Message[Any]) -> None:
        async with shop.Session() as outer:
            await outer.execute(select(Effect).with_for_update())
            await outer.execute(select(Effect).with_for_update(key_share=True))
            await shop.save("inner")

    assert (await shop.inbox.process(shop.lab.message(), on_paid)).processed
    assert await shop.effects() == ["inner"]


@pytest.mark.parametrize("fails", [False, True])
async def test_what_before_commit_listeners_do_is_part_of_the_transaction(shop: Shop, fails: bool) -> None:
    class Audited(Session):
        pass

    @event.listens_for(Audited, "before_commit")
    def audit(session: Session) -> None:
        session.add(Effect(what="audit"))
        if fails:
            raise ValueError("the listener refuses")

    async def on_paid(message: Message[Any], tx: AsyncSession) -> None:
        tx.add(Effect(what="handler"))

    maker = async_sessionmaker(shop.engine, sync_session_class=Audited)
    message = shop.lab.message()
    async with Inbox(SqlAlchemyStore(maker), consumer="audited") as inbox:
        with pytest.raises(ValueError, match="refuses") if fails else contextlib.nullcontext():
            await inbox.process(message, on_paid)
        assert await inbox.is_processed(message) is not fails
    assert await shop.effects() == ([] if fails else ["audit", "handler"])


@pytest.mark.parametrize("how", ["binds", "get_bind"])
async def test_a_session_that_goes_elsewhere_is_refused(shop: Shop, how: str) -> None:
    """What it wrote there would be committed before the message, or after it, and not with it."""
    other = create_async_engine(shop.engine.url)

    class Routed(Session):
        def get_bind(self, *_: Any, **__: Any) -> Any:
            return other.sync_engine

    options: dict[str, Any] = {"binds": {Effect: other}} if how == "binds" else {"sync_session_class": Routed}

    async def on_paid(message: Message[Any], tx: AsyncSession) -> None:
        tx.add(Effect(what="elsewhere"))
        await tx.commit()

    message = shop.lab.message()
    async with Inbox(SqlAlchemyStore(async_sessionmaker(shop.engine, **options)), consumer="routed") as inbox:
        with pytest.raises(UsageError, match="another connection"):
            await inbox.process(message, on_paid)
        assert not await inbox.is_processed(message)
    assert await shop.effects() == []
    await other.dispose()


@pytest.mark.parametrize("how", ["process", "claim"])
async def test_a_cancellation_leaves_the_busy_timeout_of_the_engine_alone(sqlite_lab: SqliteLab, how: str) -> None:
    engine = create_async_engine(f"sqlite+aiosqlite:///{sqlite_lab.path}")
    sessions = async_sessionmaker(engine)

    async def handler(message: Message[Any]) -> None:
        pass

    async with Inbox(SqlAlchemyStore(engine), consumer="billing") as inbox:

        async def deliver() -> None:
            if how == "process":
                await inbox.process(sqlite_lab.message(), handler)
                return
            async with sessions() as session, session.begin(), inbox.claim(sqlite_lab.message(), tx=session):
                pass

        for turn in range(60):
            task = asyncio.ensure_future(deliver())
            for _ in range(turn):
                await asyncio.sleep(0.0002 if turn % 2 else 0)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            async with engine.connect() as connection:
                assert (await connection.execute(text("PRAGMA busy_timeout"))).scalar() == 5000
    await engine.dispose()


@pytest.mark.parametrize("begin", ["BEGIN", "BEGIN IMMEDIATE"])
async def test_an_engine_whose_listener_begins_works(sqlite_lab: SqliteLab, begin: str) -> None:
    """As SQLAlchemy's own pages say how to get real transactions from Python's sqlite3."""
    engine = create_async_engine(f"sqlite+aiosqlite:///{sqlite_lab.path}")

    @event.listens_for(engine.sync_engine, "connect")
    def leave_it_to_us(connection: Any, _record: Any) -> None:
        connection.isolation_level = None

    @event.listens_for(engine.sync_engine, "begin")
    def do_begin(connection: Any) -> None:
        connection.exec_driver_sql(begin)

    async def on_paid(message: Message[Any], tx: AsyncSession) -> None:
        tx.add(Effect(what=message.id))
        await tx.flush()
        if message.payload:
            raise ValueError("no")

    async with Inbox(SqlAlchemyStore(engine), consumer="billing") as inbox:
        for kind in (Kind.PROCESSED, Kind.DUPLICATE):
            assert (await inbox.process(Message(id="a", type="order.paid", payload=None), on_paid)).kind is kind
        with pytest.raises(ValueError, match="no"):
            await inbox.process(Message(id="b", type="order.paid", payload=True), on_paid)
        claimed = Message(id="c", type="order.paid", payload=None)
        async with async_sessionmaker(engine)() as session, session.begin(), inbox.claim(claimed, tx=session):
            session.add(Effect(what="c"))
    assert await sqlite_lab.effects() == ["a", "c"]
    await engine.dispose()
