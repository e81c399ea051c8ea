"""How long a record is kept: the values that make sense."""

from __future__ import annotations

from datetime import timedelta

from onceward.errors import UsageError

LONGEST = timedelta(days=365 * 1000)
"""No database could write the date of much more."""


def check_retention(retention: timedelta) -> timedelta:
    """A time that a record can be kept for."""
    if not isinstance(retention, timedelta):
        raise UsageError(f"retention={retention!r}: it is a timedelta, such as timedelta(days=30)")
    if not timedelta(0) < retention <= LONGEST:
        raise UsageError(f"retention={retention}: it is more than nothing, and at most a thousand years")
    return retention


def check_age(older_than: timedelta) -> timedelta:
    """An age that cleanup and lists can ask for."""
    if not isinstance(older_than, timedelta):
        raise UsageError(f"older_than={older_than!r}: it is a timedelta, such as timedelta(days=30)")
    if not timedelta(0) <= older_than <= LONGEST:
        raise UsageError(f"older_than={older_than}: it is not negative, and at most a thousand years")
    return older_than


def milliseconds(retention: timedelta | None) -> int | None:
    return None if retention is None else round(retention / timedelta(milliseconds=1))
