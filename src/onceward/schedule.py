"""When the janitor comes: pure decisions about time. The clock they are asked about is the database's."""

from __future__ import annotations

from datetime import UTC, datetime, time, timedelta, tzinfo
from zoneinfo import ZoneInfo

import msgspec

from onceward.errors import UsageError
from onceward.retention import LONGEST


class Every(msgspec.Struct, frozen=True):
    """Again and again, with this pause; the first time soon after the start."""

    pause: timedelta
    jitter: timedelta

    def due(self, now: datetime, chance: float, *, first: bool) -> datetime:
        return now + (timedelta(0) if first else self.pause) + self.jitter * chance


class Daily(msgspec.Struct, frozen=True):
    """Once a day, at a time of day."""

    at: time
    tz: tzinfo
    jitter: timedelta

    def due(self, now: datetime, chance: float, *, first: bool) -> datetime:  # noqa: ARG002 - as Every
        return next_run(now, self.at, self.tz) + self.jitter * chance


def next_run(now: datetime, at: time, tz: tzinfo) -> datetime:
    """The first moment after `now` at which clocks in `tz` show `at`, in UTC.

    Where a day has that time twice, when clocks are set back, it is the first of the two; where a day does not have
    it, when they are set forward, it is as much later as they are set.
    """
    today = now.astimezone(tz).date()
    # Yesterday too: a zone that skipped a whole day (Samoa, 2011) may have moved it past now.
    days = (today + timedelta(days=day) for day in (-1, 0, 1, 2))
    moments = (datetime.combine(day, at.replace(fold=0), tz).astimezone(UTC) for day in days)
    return min(moment for moment in moments if moment > now)


def schedule_of(
    every: timedelta | None, at: str | time | None, tz: str | tzinfo, jitter: timedelta | None
) -> Every | Daily:
    """The schedule that the options of a Janitor say."""
    if every is not None and at is not None:
        raise UsageError("a Janitor takes every= or at=, not both")
    if jitter is not None and not timedelta(0) <= jitter <= LONGEST:
        raise UsageError(f"jitter={jitter}: it is not negative")
    if at is not None:
        return Daily(_time(at), _zone(tz), timedelta(minutes=5) if jitter is None else jitter)
    pause = timedelta(hours=1) if every is None else every
    if not isinstance(pause, timedelta) or not timedelta(0) < pause <= LONGEST:
        raise UsageError(f"every={pause!r}: it is a timedelta of more than nothing, such as timedelta(hours=1)")
    return Every(pause, pause / 10 if jitter is None else jitter)


def _time(at: str | time) -> time:
    try:
        found = time.fromisoformat(at) if isinstance(at, str) else at
    except ValueError:
        raise UsageError(f"at={at!r}: it is a time of day, such as 03:30") from None
    if not isinstance(found, time) or found.tzinfo is not None:
        raise UsageError(f"at={at!r}: it is a time of day, such as 03:30; say where with tz=")
    return found


def _zone(tz: str | tzinfo) -> tzinfo:
    if not isinstance(tz, str):
        return tz
    try:
        return UTC if tz == "UTC" else ZoneInfo(tz)
    except (LookupError, ValueError, OSError):
        raise UsageError(f"tz={tz!r}: there is no such time zone here, such as Europe/Berlin") from None
