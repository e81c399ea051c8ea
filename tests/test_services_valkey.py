"""The throwaway servers themselves: what other tests rely on when they kill, freeze and move."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from secrets import token_hex

import pytest
import redis

from tests.conftest import missing
from tests.services import valkey
from tests.services.valkey import Cluster, Server


@pytest.fixture(scope="module", autouse=True)
def needs_a_binary() -> None:
    if valkey.binary() is None:
        missing(f"no Valkey or Redis here; set {valkey.BINARY_VARIABLE}")


@pytest.fixture(scope="module")
def cluster(needs_a_binary: None) -> Iterator[Cluster]:
    with valkey.throwaway_cluster() as running:
        yield running


def test_a_server_answers_and_is_gone_afterwards() -> None:
    with valkey.throwaway(in_memory=True, maxmemory="64mb", maxmemory_policy="noeviction") as server:
        with redis.Redis.from_url(server.url) as client:
            assert client.ping()
        assert server.ask("CONFIG", "GET", "maxmemory") == ["maxmemory", str(64 * 2**20)]
        pid, folder = server.pid, server.folder
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)
    assert not folder.exists()
    with pytest.raises(redis.ConnectionError):
        server.ask("PING")


def test_data_survives_a_kill_when_every_write_is_synced() -> None:
    with valkey.throwaway(appendonly="yes", appendfsync="always") as server:
        port = server.port
        server.ask("SET", "key", "value")
        server.kill()
        with pytest.raises(redis.ConnectionError):
            server.ask("PING")
        server.start()
        assert server.ask("GET", "key") == "value"
        assert server.port == port


def test_a_start_waits_until_the_data_is_loaded() -> None:
    with valkey.throwaway(in_memory=True) as server:
        server.ask("MSET", *(word for number in range(500) for word in (f"key-{number}", token_hex(100))))
        server.ask("SAVE")
        server.kill()
        # It loads slowly, and answers meanwhile: with an error.
        server.options |= {"key_load_delay": 1000, "loading_process_events_interval_bytes": 1024}
        server.launch()
        valkey.wait_until(lambda: "" if _is_loading(server) else "it is not loading")
        server.wait_until_ready()
        assert server.ask("DBSIZE") == 500


def _is_loading(server: Server) -> bool:
    try:
        server.ask("PING")
    except redis.BusyLoadingError:
        return True
    return False


def test_a_frozen_server_keeps_its_connections_and_answers_nobody() -> None:
    with valkey.throwaway(in_memory=True) as server, server.client(socket_timeout=0.1) as client:
        client.set("key", "value")
        server.freeze()
        with pytest.raises(redis.TimeoutError):
            client.get("key")
        server.thaw()
        assert client.get("key") == b"value"
        server.freeze()
        server.kill()


@pytest.mark.skipif(sys.platform != "linux", reason="others do not share a port between a socket and a server")
def test_a_port_is_nobody_elses_while_its_server_is_down() -> None:
    with valkey.throwaway(in_memory=True) as server, socket.socket() as other:
        server.kill()
        with pytest.raises(OSError, match="in use"):
            other.bind(("127.0.0.1", server.port))
        server.start()


def test_a_server_whose_port_was_taken_takes_another(tmp_path: Path) -> None:
    command = valkey.binary()
    assert command is not None
    with valkey.throwaway(in_memory=True) as first:
        second = Server(command, tmp_path)
        second.port = first.port
        try:
            second.start()
            assert second.port != first.port
            assert second.ask("PING") == "PONG"
        finally:
            second.close()


def test_a_server_outlives_the_thread_that_started_it() -> None:
    with valkey.throwaway(in_memory=True) as server:
        server.kill()
        thread = threading.Thread(target=server.start)
        thread.start()
        thread.join()
        # For Python it is over a little earlier than for the system.
        task = Path(f"/proc/self/task/{thread.native_id}")
        valkey.wait_until(lambda: "the thread is there" if task.exists() else "")
        assert server.ask("PING") == "PONG"


def test_a_server_does_not_outlive_a_test_run_that_is_killed() -> None:
    if not valkey._can_be_tied():
        pytest.skip("no setpriv here that knows --pdeathsig")
    script = (
        "import time\n"
        "from tests.services import valkey\n"
        "with valkey.throwaway(in_memory=True) as server:\n"
        "    print(server.pid, server.folder, flush=True)\n"
        "    time.sleep(60)\n"
    )
    root = Path(__file__).parents[1]
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True, cwd=root) as run:
        assert run.stdout is not None
        pid, _, folder = run.stdout.readline().strip().partition(" ")
        run.kill()
    valkey.wait_until(lambda: f"{pid} is alive" if _is_alive(int(pid)) else "")
    shutil.rmtree(folder)


def _is_alive(pid: int) -> bool:
    """One that nobody has waited for yet, as its parent is gone, is dead all the same."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_a_cluster_forms(cluster: Cluster) -> None:
    assert len(cluster.primaries()) == len(cluster.replicas()) == 3
    assert {cluster.replica_of(primary) for primary in cluster.primaries()} == set(cluster.replicas())
    with redis.RedisCluster.from_url(cluster.url.replace("redis+cluster", "redis")) as client:
        for number in range(100):
            client.set(f"key-{number}", number)
    assert sum(primary.ask("DBSIZE") for primary in cluster.primaries()) == 100
    cluster.flush()
    assert [server.ask("DBSIZE") for server in cluster.servers] == [0] * 6


def test_a_slot_on_the_move_gives_ask_and_then_moved(cluster: Cluster) -> None:
    slot, source = cluster.slot_of("{moving}"), cluster.primary_of("{moving}")
    target = next(server for server in cluster.primaries() if server is not source)
    source.ask("SET", "{moving}there", "value")
    cluster.begin_move(slot, source, target)
    assert source.ask("GET", "{moving}there") == "value"
    with pytest.raises(redis.exceptions.AskError) as asked:
        source.ask("SET", "{moving}new", "value")
    assert asked.type is redis.exceptions.AskError  # MOVED is one of them, too
    assert asked.value.port == target.port
    with pytest.raises(redis.exceptions.MovedError):
        target.ask("SET", "{moving}new", "value")
    cluster.finish_move(slot, source, target)
    assert cluster.primary_of("{moving}") is target
    assert target.ask("GET", "{moving}there") == "value"
    with pytest.raises(redis.exceptions.MovedError) as moved:
        source.ask("GET", "{moving}there")
    assert moved.value.port == target.port
    cluster.move_slot(slot, source)
    assert source.ask("GET", "{moving}there") == "value"


def test_a_failover_elects_the_replica_and_the_old_primary_comes_back_behind_it(cluster: Cluster) -> None:
    replica = cluster.replica_of(cluster.primary_of("key"))
    old = cluster.kill_primary_of("key")
    assert cluster.wait_for_failover(old) is replica
    assert cluster.primary_of("key") is replica
    assert old not in cluster.primaries()
    cluster.restart(old)
    assert cluster.replica_of(replica) is old


def test_a_frozen_primary_is_replaced_and_follows_after_it_thawed(cluster: Cluster) -> None:
    old = cluster.primary_of("other")
    replica = cluster.replica_of(old)
    old.freeze()
    assert cluster.wait_for_failover(old) is replica
    old.thaw()
    cluster.wait_until_agreed()
    assert cluster.replica_of(replica) is old
