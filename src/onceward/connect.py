"""From a URL to a store. The only place that knows all stores; each is imported when it is asked for.

The scheme says which driver, never what happens to be installed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from urllib.parse import parse_qsl, unquote, urlencode, urlsplit, urlunsplit

from onceward.errors import MissingDriver, UnknownScheme, UsageError
from onceward.store import Store


def store_from_url(url: str, *, schema: str | None = None) -> Store[Any]:
    """`sqlite:///shop.db`, `sqlite:////var/lib/shop.db`, `sqlite://` (in memory), `postgresql://user@host/db`.

    `redis://host:6379/0`, `redis+cluster://host:6379` (any node); `?lease=15&prefix=onceward&replicas=1` are options
    of RedisStore.

    `?pgbouncer=true` at the end of a PostgreSQL URL: there is a PgBouncer in transaction mode behind it.
    """
    if not isinstance(url, str) or "://" not in url:
        raise UsageError(f"{url!r} is not a database URL, such as sqlite:///shop.db or postgresql://user@host/db")
    scheme = url.split("://", 1)[0].lower()
    opener = _SCHEMES.get(scheme)
    if opener is None:
        raise UnknownScheme(f"no store for {scheme}://; known are {', '.join(sorted(_SCHEMES))}", scheme=scheme)
    return opener(url, schema)


def _sqlite(url: str, schema: str | None) -> Store[Any]:
    from onceward.sqlite import SqliteStore  # noqa: PLC0415

    if schema is not None:
        raise UsageError("SQLite has no schemas; leave schema= and --schema away")
    parts = urlsplit(url)
    if parts.netloc:
        raise UsageError(
            f"{url!r} names a host; a file is sqlite:///shop.db, with an absolute path sqlite:////var/shop.db"
        )
    path = unquote(parts.path)
    return SqliteStore(path[1:] if len(path) > 1 else ":memory:")


def _asyncpg(url: str, schema: str | None) -> Store[Any]:
    try:
        from onceward.asyncpg import AsyncpgStore  # noqa: PLC0415
    except ImportError as error:
        raise MissingDriver(
            "postgresql:// needs asyncpg, which is not installed: pip install 'onceward[asyncpg]'",
            extra="asyncpg",
        ) from error
    dsn, bounced = _behind_pgbouncer(url.replace("postgresql+asyncpg://", "postgresql://", 1))
    options: dict[str, Any] = {"statement_cache_size": 0} if bounced else {}
    return AsyncpgStore(dsn=dsn, schema=schema, **options)


def _psycopg(url: str, schema: str | None) -> Store[Any]:
    try:
        from onceward.psycopg import PsycopgStore  # noqa: PLC0415
    except ImportError as error:
        raise MissingDriver(
            "postgresql+psycopg:// needs psycopg, which is not installed: pip install 'onceward[psycopg]'",
            extra="psycopg",
        ) from error
    dsn, bounced = _behind_pgbouncer(url.replace("postgresql+psycopg://", "postgresql://", 1))
    options: dict[str, Any] = {"kwargs": {"prepare_threshold": None}} if bounced else {}
    return PsycopgStore(dsn, schema=schema, **options)


def _behind_pgbouncer(url: str) -> tuple[str, bool]:
    """The URL as the driver wants it, and whether it said that nothing may be prepared on a connection."""
    if "pgbouncer=" not in url:
        return url, False
    parts = urlsplit(url)
    options = parse_qsl(parts.query, keep_blank_values=True)
    said = {value for name, value in options if name == "pgbouncer"}
    if not said <= {"true", "false"}:
        raise UsageError("pgbouncer= in a database URL is true or false")
    rest = urlencode([(name, value) for name, value in options if name != "pgbouncer"])
    return urlunsplit(parts._replace(query=rest)), "true" in said


def _sqlalchemy(url: str, schema: str | None) -> Store[Any]:
    scheme = url.split("://", 1)[0]
    try:
        from onceward.sqlalchemy import SqlAlchemyStore  # noqa: PLC0415
    except ImportError as error:
        raise MissingDriver(
            f"{scheme}:// needs SQLAlchemy, which is not installed: pip install 'onceward[sqlalchemy]'",
            extra="sqlalchemy",
        ) from error
    try:
        return SqlAlchemyStore(url.removeprefix("sqlalchemy+"), schema=schema)
    except ImportError as error:
        raise MissingDriver(
            f"{url.split('://', maxsplit=1)[0]}:// needs {error.name}: pip install {error.name}"
        ) from error


def _redis(url: str, schema: str | None) -> Store[Any]:
    scheme = url.split("://", 1)[0]
    try:
        from onceward.redis import RedisStore  # noqa: PLC0415
    except ImportError as error:
        raise MissingDriver(
            f"{scheme}:// needs redis, which is not installed: pip install 'onceward[redis]'", extra="redis"
        ) from error
    if schema is not None:
        raise UsageError("Redis has no schemas; leave schema= and --schema away, or use ?prefix=NAME in the URL")
    parts = urlsplit(url)
    asked = dict(parse_qsl(parts.query, keep_blank_values=True))
    ours = {name: _number(name, asked.pop(name), kind) for name, kind in _REDIS_OPTIONS.items() if name in asked}
    return RedisStore(urlunsplit(parts._replace(query=urlencode(asked))), **ours)


_REDIS_OPTIONS: dict[str, Callable[[str], Any]] = {
    "prefix": str, "lease": float, "replicas": int, "replicas_timeout": float,
}  # fmt: skip


def _number(name: str, value: str, kind: Callable[[str], Any]) -> Any:
    try:
        return kind(value)
    except ValueError:
        raise UsageError(f"{name}={value} in a database URL is not a number") from None


_SCHEMES: dict[str, Callable[[str, str | None], Store[Any]]] = {
    "sqlite": _sqlite,
    "postgres": _asyncpg,
    "postgresql": _asyncpg,
    "postgresql+asyncpg": _asyncpg,
    "postgresql+psycopg": _psycopg,
    "redis": _redis,
    "rediss": _redis,
    "redis+cluster": _redis,
    "rediss+cluster": _redis,
    "sqlite+aiosqlite": _sqlalchemy,
    "sqlalchemy+postgresql+asyncpg": _sqlalchemy,
    "sqlalchemy+postgresql+psycopg": _sqlalchemy,
    "sqlalchemy+sqlite+aiosqlite": _sqlalchemy,
}
