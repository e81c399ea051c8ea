"""Alembic and the tables of onceward, with real projects: whoever makes them, `alembic check` has nothing to say."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa

from onceward import Inbox, Message, Position
from onceward.cli import main
from onceward.testing import PostgresLab, SqliteLab
from onceward.testing.labs import SqlLab

pytestmark = pytest.mark.slow

ENV = """
import sqlalchemy as sa
from alembic import context
from onceward.sqlalchemy import add_tables, include_object

metadata = sa.MetaData()
sa.Table("invoices", metadata, sa.Column("id", sa.Integer, primary_key=True))
{prepare}

url = context.config.get_main_option("sqlalchemy.url")
engine = sa.create_engine(url)
with engine.connect() as connection:
    context.configure(connection=connection, target_metadata=metadata, {options})
    with context.begin_transaction():
        context.run_migrations()
engine.dispose()
"""
TEMPLATE = '''"""${message}"""
from alembic import op
import sqlalchemy as sa
${imports if imports else ""}
revision = ${repr(up_revision)}
down_revision = ${repr(down_revision)}


def upgrade():
    ${upgrades if upgrades else "pass"}


def downgrade():
    ${downgrades if downgrades else "pass"}
'''
ADDED = "add_tables(metadata)"
NOT_LOOKED_AT = "include_object=include_object"
STRICT = "compare_type=True"


class Project:
    """An Alembic project in a folder, as `alembic init` lays it out."""

    def __init__(self, folder: Path, url: str, *, prepare: str = "", options: str = STRICT) -> None:
        self.folder = folder
        (folder / "versions").mkdir()
        (folder / "env.py").write_text(ENV.format(prepare=prepare, options=options))
        (folder / "script.py.mako").write_text(TEMPLATE)
        (folder / "alembic.ini").write_text(f"[alembic]\nscript_location = {folder}\nsqlalchemy.url = {url}\n")

    def run(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "alembic", "-c", str(self.folder / "alembic.ini"), *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)

    def ok(self, *arguments: str) -> None:
        done = self.run(*arguments)
        assert done.returncode == 0, done.stdout + done.stderr


@pytest.fixture(params=["sqlite", "postgresql"])
def urls(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[str, str]:
    """For SQLAlchemy's ordinary engine, and for onceward."""
    if request.param == "sqlite":
        return f"sqlite:///{tmp_path}/shop.db", f"sqlite:///{tmp_path}/shop.db"
    dsn: str = request.getfixturevalue("postgres_dsn")
    return dsn.replace("postgresql://", "postgresql+psycopg://", 1), dsn


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = tmp_path / "alembic"
    made.mkdir()
    return made


def _works(url: str, **options: Any) -> None:
    async def once() -> Any:
        async with Inbox.connect(url, consumer="billing", **options) as inbox:
            await inbox.accept(Message("n", "paid", 1, depends_on=(Position("s", 1),)))
            assert await inbox.dispatch(lambda _message: None) is None
            await inbox.process(Message("o", "paid", 1, stream="s", position=1), lambda _message: None)
            woken = await inbox.dispatch(lambda _message: None)
            assert woken is not None
            assert woken.processed
            await inbox.process(Message("m", "paid", {"amount": 1}), lambda _message: "done")
            return await inbox.process(Message("m", "paid", {"amount": 1}), lambda _message: "again")

    outcome = asyncio.run(once())
    assert outcome.duplicate
    assert outcome.result == "done"


def _lab(url: str) -> SqlLab:
    return PostgresLab(url) if url.startswith("postgresql") else SqliteLab(Path(url.removeprefix("sqlite:///")))


ALL = {
    "sqlite": """
        SELECT type, name, tbl_name FROM sqlite_master WHERE tbl_name LIKE 'onceward%' AND sql IS NOT NULL ORDER BY 2;
        SELECT sql FROM sqlite_master WHERE type = 'trigger' ORDER BY 1;
        SELECT version, name, since FROM onceward_schema ORDER BY 1
    """,
    "postgresql": """
        SELECT table_name, column_name, data_type, is_nullable, column_default FROM information_schema.columns
        WHERE table_name LIKE 'onceward%' ORDER BY 1, 2;
        SELECT indexdef FROM pg_indexes WHERE tablename LIKE 'onceward%' ORDER BY 1;
        SELECT pg_get_constraintdef(oid) FROM pg_constraint
        WHERE conrelid::regclass::text LIKE 'onceward%' ORDER BY 1;
        SELECT pg_get_functiondef(oid) FROM pg_proc WHERE proname LIKE 'onceward%' ORDER BY 1;
        SELECT pg_get_triggerdef(oid) FROM pg_trigger WHERE tgname LIKE 'onceward%' ORDER BY 1;
        SELECT relname, relkind FROM pg_class WHERE relname LIKE 'onceward%' AND relkind = 'S' ORDER BY 1;
        SELECT version, name, since FROM onceward_schema ORDER BY 1
    """,
}


def _all_of(lab: SqlLab) -> list[Any]:
    """All that there is of ours in a database."""
    return [asyncio.run(lab.query(look)) for look in ALL[lab.dialect].split(";")]


@pytest.fixture
def set_up(urls: tuple[str, str]) -> list[Any]:
    """What `onceward setup` makes; the database is empty again."""
    _, url = urls
    assert main(["setup", url]) == 0
    made = _all_of(_lab(url))
    asyncio.run(_lab(url).back_to(0))
    return made


@pytest.mark.parametrize(
    ("prepare", "options"), [(ADDED, STRICT), ("", f"{STRICT}, {NOT_LOOKED_AT}")], ids=["added", "not looked at"]
)
def test_tables_made_by_setup_are_left_alone(urls: tuple[str, str], folder: Path, prepare: str, options: str) -> None:
    alembic_url, url = urls
    assert main(["setup", url]) == 0
    project = Project(folder, alembic_url, prepare=prepare, options=options)
    project.ok("revision", "--autogenerate", "-m", "first")
    script = next((folder / "versions").glob("*.py")).read_text()
    assert "invoices" in script
    assert "onceward_" not in script, script
    project.ok("upgrade", "head")
    project.ok("check")
    _works(url)


def test_without_either_autogenerate_would_drop_them(urls: tuple[str, str], folder: Path) -> None:
    alembic_url, url = urls
    assert main(["setup", url]) == 0
    project = Project(folder, alembic_url)
    project.ok("revision", "--autogenerate", "-m", "first")
    assert "drop_table('onceward_records')" in next((folder / "versions").glob("*.py")).read_text()


@pytest.mark.parametrize("before", [0, 3], ids=["new", "upgrade"])
def test_tables_made_by_alembic_are_those_of_setup_after_a_stamp(
    urls: tuple[str, str], folder: Path, set_up: list[Any], before: int
) -> None:
    alembic_url, url = urls
    if before:
        assert main(["setup", url]) == 0
        asyncio.run(_lab(url).back_to(before))
    project = Project(folder, alembic_url, prepare=ADDED)
    project.ok("revision", "--autogenerate", "-m", "first")
    project.ok("upgrade", "head")
    assert main(["stamp", url]) == 0
    assert _all_of(_lab(url)) == set_up
    project.ok("check")
    _works(url)


def test_alembic_and_a_schema_of_its_own(postgres_dsn: str, folder: Path) -> None:
    asyncio.run(PostgresLab(postgres_dsn).query("CREATE SCHEMA inbox"))
    project = Project(
        folder,
        postgres_dsn.replace("postgresql://", "postgresql+psycopg://", 1),
        prepare='add_tables(metadata, schema="inbox")',
        options=f"{STRICT}, include_schemas=True",
    )
    project.ok("revision", "--autogenerate", "-m", "first")
    project.ok("upgrade", "head")
    assert main(["stamp", postgres_dsn, "--schema", "inbox"]) == 0
    project.ok("check")
    _works(postgres_dsn, schema="inbox")


def test_a_stamp_is_refused_while_a_table_is_missing(urls: tuple[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    _, url = urls
    assert main(["setup", url]) == 0
    asyncio.run(_lab(url).query("DROP TABLE onceward_waits"))
    assert main(["stamp", url]) == 1
    assert "there is no table onceward_waits" in capsys.readouterr().err


def test_a_difference_is_found(urls: tuple[str, str], folder: Path) -> None:
    """The control: the comparison does look at the columns and indexes."""
    alembic_url, url = urls
    assert main(["setup", url]) == 0
    engine = sa.create_engine(alembic_url)
    with engine.begin() as connection:
        connection.execute(sa.text("ALTER TABLE onceward_records DROP COLUMN host"))
        connection.execute(sa.text("DROP INDEX onceward_records_position"))
    engine.dispose()
    project = Project(folder, alembic_url, prepare=ADDED)
    done = project.run("check")
    assert done.returncode != 0
    assert "host" in done.stdout + done.stderr
    assert "onceward_records_position" in done.stdout + done.stderr
