"""The janitor: when it comes, that it goes, and that nothing keeps it from coming again."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import UTC, datetime, time, timedelta
from itertools import pairwise
from typing import Any
from zoneinfo import ZoneInfo

import pytest
from hypothesis import given
from hypothesis import strategies as st

from onceward import Inbox, Janitor, Message, UsageError, janitor
from onceward.errors import StoreUnavailable
from onceward.events import Event, SweepFailed, Swept
from onceward.schedule import Daily, Every, next_run, schedule_of
from onceward.testing import Lab, PostgresLab, SqliteLab
from onceward.testing.contract.base import Listener
from onceward.testing.lab import Recorder

BERLIN, SAMOA = ZoneInfo("Europe/Berlin"), ZoneInfo("Pacific/Apia")
ZONES = [UTC, BERLIN, SAMOA, *map(ZoneInfo, ("America/St_Johns", "Australia/Lord_Howe", "Asia/Kathmandu"))]

# --- when it comes ------------------------------------------------------------------------------------------

YEARS = datetime(1971, 1, 1), datetime(2100, 1, 1)  # noqa: DTZ001 - in the zone that the strategy adds
moments = st.datetimes(*YEARS, timezones=st.just(UTC))
times = st.times().map(lambda moment: moment.replace(microsecond=0))
zones = st.sampled_from(ZONES)


@given(moments, times, zones)
def test_the_next_run_is_later_and_within_a_day_or_so(now: datetime, at: time, tz: Any) -> None:
    due = next_run(now, at, tz)
    assert due.tzinfo is UTC
    assert now < due <= now + timedelta(hours=50 if tz is SAMOA else 26)


@given(moments, times, zones)
def test_at_the_next_run_clocks_show_the_time_unless_the_day_does_not_have_it(now: datetime, at: time, tz: Any) -> None:
    local = next_run(now, at, tz).astimezone(tz)
    assert local.fold == 0, "of two the first"
    if local.time() != at:
        wanted = datetime.combine(local.date(), at, tz)
        assert wanted.astimezone(UTC).astimezone(tz).time() != at, "that time was left out when clocks were set"


@given(moments, times, zones)
def test_runs_follow_each_other_once_a_day(now: datetime, at: time, tz: Any) -> None:
    runs = [next_run(now, at, tz)]
    for _ in range(5):
        runs.append(next_run(runs[-1], at, tz))
    for before, after in pairwise(runs):
        assert timedelta(hours=22) <= after - before <= timedelta(hours=50 if tz is SAMOA else 26)
        assert next_run(after - timedelta(seconds=1), at, tz) == after, "nothing in between"


@pytest.mark.parametrize(
    ("now", "at", "due"),
    [
        ("2026-03-28T12:00+01:00", "02:30", "2026-03-29T03:30+02:00"),  # there is no 02:30 on the 29th
        ("2026-03-29T12:00+02:00", "02:30", "2026-03-30T02:30+02:00"),
        ("2026-10-24T12:00+02:00", "02:30", "2026-10-25T02:30+02:00"),  # there are two on the 25th
        ("2026-10-25T02:30+02:00", "02:30", "2026-10-26T02:30+01:00"),  # and the second one is none
        ("2026-01-01T03:30+01:00", "03:30", "2026-01-02T03:30+01:00"),
        ("2026-01-01T03:29:59+01:00", "03:30", "2026-01-01T03:30+01:00"),
    ],
)
def test_when_clocks_are_set(now: str, at: str, due: str) -> None:
    assert next_run(datetime.fromisoformat(now), time.fromisoformat(at), BERLIN) == datetime.fromisoformat(due)


def test_jitter_is_added_to_both_kinds_of_schedule() -> None:
    now = datetime(2026, 1, 1, 12, tzinfo=UTC)
    hourly = schedule_of(None, None, "UTC", None)
    assert hourly == Every(timedelta(hours=1), timedelta(minutes=6))
    assert hourly.due(now, 0.5, first=True) == now + timedelta(minutes=3)
    assert hourly.due(now, 0.5, first=False) == now + timedelta(hours=1, minutes=3)
    daily = schedule_of(None, "13:00", "UTC", timedelta(minutes=10))
    assert isinstance(daily, Daily)
    assert daily.due(now, 0.5, first=True) == now + timedelta(hours=1, minutes=5)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"every": timedelta(hours=1), "at": "03:30"}, "not both"),
        ({"every": timedelta(0)}, "more than nothing"),
        ({"every": 3600}, "timedelta"),
        ({"at": "half past three"}, "03:30"),
        ({"at": "25:00"}, "03:30"),
        ({"at": "03:30+02:00"}, "say where with tz="),
        ({"at": "03:30", "tz": "Europe/Atlantis"}, "no such time zone"),
        ({"at": "03:30", "tz": "../etc/passwd"}, "no such time zone"),
        ({"jitter": timedelta(seconds=-1)}, "not negative"),
        ({"older_than": timedelta(days=-1)}, "not negative"),
        ({"batch": 0}, "a batch is from"),
    ],
)
def test_options_that_make_no_sense_are_refused(options: dict[str, Any], text: str) -> None:
    with pytest.raises(UsageError, match=text):
        Janitor(Inbox.connect("sqlite://", consumer="billing"), **options)


# --- at work ------------------------------------------------------------------------------------------------

NONE = timedelta(0)
OFTEN: dict[str, Any] = {"every": timedelta(milliseconds=20), "older_than": NONE}


@pytest.fixture(params=["sqlite", "postgres"])
def lab(request: pytest.FixtureRequest) -> Lab:
    found: Lab = request.getfixturevalue(f"{request.param}_lab")
    return found


class Heard(Listener):
    """Events that can be waited for."""

    def __init__(self) -> None:
        super().__init__()
        self.more = asyncio.Event()

    def __call__(self, event: Event) -> None:
        super().__call__(event)
        self.more.set()

    async def until(self, kind: type[Event], times: int = 1) -> None:
        async with asyncio.timeout(30):
            while sum(isinstance(event, kind) for event in self) < times:
                self.more.clear()
                await self.more.wait()


@pytest.fixture
async def heard() -> Heard:
    return Heard()


async def test_in_the_background_it_sweeps_again_and_again(lab: Lab, heard: Heard) -> None:
    inbox = await lab.inbox(listeners=[heard])
    await inbox.process(lab.message(), Recorder(lab))
    async with Janitor(inbox, **OFTEN):
        await heard.until(Swept, 3)
        await inbox.process(lab.message(), Recorder(lab))
        await heard.until(Swept, len(heard) + 2)
    assert sum(event.deleted for event in heard if isinstance(event, Swept)) == 2
    before = len(heard)
    await asyncio.sleep(0.1)
    assert len(heard) == before, "it has stopped"


async def test_in_the_foreground_it_runs_until_it_is_stopped(lab: Lab, heard: Heard) -> None:
    inbox, stop = await lab.inbox(listeners=[heard]), asyncio.Event()
    running = asyncio.create_task(Janitor(inbox, **OFTEN).run(stop=stop))
    await heard.until(Swept, 2)
    stop.set()
    await asyncio.wait_for(running, 5)
    running = asyncio.create_task(Janitor(inbox, **OFTEN).run())
    await heard.until(Swept, len(heard) + 1)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running


async def test_a_sweep_that_fails_is_told_and_the_next_one_comes(lab: Lab, heard: Heard) -> None:
    inbox, original = await lab.inbox(listeners=[heard]), lab.query
    await inbox.process(lab.message(), Recorder(lab))
    await original("ALTER TABLE onceward_records RENAME TO elsewhere")
    async with Janitor(inbox, **OFTEN):
        await heard.until(SweepFailed, 2)
        await original("ALTER TABLE elsewhere RENAME TO onceward_records")
        await heard.until(Swept)
    assert sum(event.deleted for event in heard if isinstance(event, Swept)) == 1


async def test_a_database_that_is_away_is_told_and_asked_again(
    postgres_lab: PostgresLab, heard: Heard, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(janitor, "PATIENCE", timedelta(milliseconds=10))
    inbox = await postgres_lab.inbox(listeners=[heard])
    store: Any = inbox.store
    unit, away = store.unit, True

    def perhaps(**options: Any) -> Any:
        if away:
            raise StoreUnavailable("away")
        return unit(**options)

    monkeypatch.setattr(store, "unit", perhaps)
    async with Janitor(inbox, at="00:00", jitter=NONE):
        await heard.until(SweepFailed, 3)
        away = False
        await asyncio.sleep(0.05)
    assert {type(event) for event in heard} == {SweepFailed}, "it is not midnight, so there was no sweep"


async def test_it_comes_at_its_time_by_the_databases_clock(lab: Lab, heard: Heard) -> None:
    inbox = await lab.inbox(listeners=[heard])
    async with inbox.store.unit(read_only=True) as unit:
        soon = await unit.now() + timedelta(seconds=1.2)
    async with Janitor(inbox, at=soon.astimezone(BERLIN).time(), tz="Europe/Berlin", jitter=NONE):
        await asyncio.sleep(0.6)
        assert heard == []
        await heard.until(Swept)
    async with inbox.store.unit(read_only=True) as unit:
        assert await unit.now() >= soon


class Slow:
    """A store, and its units, whose sweeps take their time after their first batch."""

    def __init__(self, behind: Any, swept: asyncio.Event) -> None:
        self._behind = behind
        self._swept = swept

    def __getattr__(self, name: str) -> Any:
        return getattr(self._behind, name)

    @asynccontextmanager
    async def unit(self, **options: Any) -> AsyncIterator[Slow]:
        async with self._behind.unit(**options) as unit:
            yield Slow(unit, self._swept)

    async def sweep(self, *args: Any, **options: Any) -> Any:
        if self._swept.is_set():
            await asyncio.sleep(60)
        done = await self._behind.sweep(*args, **options)
        if done.deleted:
            self._swept.set()
        return done


async def test_it_stops_at_once_in_the_middle_of_a_long_sweep(lab: Lab, heard: Heard) -> None:
    swept = asyncio.Event()
    inbox = await lab.inbox(store=Slow(lab.store(), swept), listeners=[heard])
    for _ in range(50):
        await inbox.process(lab.message(), Recorder(lab))
    async with asyncio.timeout(10), Janitor(inbox, batch=10, **OFTEN):
        await swept.wait()
        await asyncio.sleep(0.05)
    [event] = [event for event in heard if isinstance(event, Swept)]
    assert event.deleted == 10
    assert len(await lab.query("SELECT 1 FROM onceward_records")) == 40


async def test_many_janitors_delete_each_record_once(lab: Lab) -> None:
    inboxes = [await lab.inbox(listeners=[Heard()]) for _ in range(4)]
    for _ in range(100):
        await inboxes[0].process(lab.message(), Recorder(lab))
    janitors = [Janitor(inbox, batch=7, **OFTEN) for inbox in inboxes]
    for one in janitors:
        await one.__aenter__()
    async with asyncio.timeout(30):
        while await lab.query("SELECT 1 FROM onceward_records LIMIT 1"):
            await asyncio.sleep(0.02)
    for one in janitors:
        await one.__aexit__()
    heard = [event for inbox in inboxes for event in inbox._bus.listeners[0]]
    assert sum(event.deleted for event in heard if isinstance(event, Swept)) == 100
    assert not [event for event in heard if isinstance(event, SweepFailed)]


async def test_a_closed_inbox_is_waited_for(
    sqlite_lab: SqliteLab, heard: Heard, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(janitor, "PATIENCE", timedelta(milliseconds=10))
    inbox = Inbox(sqlite_lab.store(), consumer="billing", listeners=[heard])
    async with Janitor(inbox, **OFTEN):
        await asyncio.sleep(0.05)
        async with inbox:
            await inbox.process(Message("m", "order.paid", None), lambda _: None)
            await heard.until(Swept)
        await asyncio.sleep(0.05)
    assert {type(event).__name__ for event in heard} <= {"Processed", "Swept"}


async def test_one_janitor_works_once(lab: Lab) -> None:
    one = Janitor(await lab.inbox())
    async with one:
        with pytest.raises(UsageError, match="at work already"):
            await one.__aenter__()
    async with one:
        pass
