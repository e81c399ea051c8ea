"""A throwaway PgBouncer in transaction mode, in front of a PostgreSQL that is there. It is found on this machine, or
installed from Debian's package by `python -m tests.services.pgbouncer ensure`.
"""

from __future__ import annotations

import os
import re
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import unquote, urlsplit, urlunsplit

from tests.services import debian
from tests.services.postgres import as_user, free_port

POOL_SIZE = 5
"""Connections to PostgreSQL for each database, far fewer than the tests have clients. A prime: a client that needs the
same number of transactions for each message still comes to all of them in turn.
"""


def binary() -> str | None:
    return shutil.which("pgbouncer", path=os.pathsep.join([os.environ.get("PATH", ""), "/usr/sbin"]))


def ensure() -> None:
    """Make sure that there is a PgBouncer to start."""
    if binary():
        return
    debian.install("pgbouncer")
    if not binary():
        print("No PgBouncer could be found or installed: its tests will be skipped")


class Bouncer:
    """A running PgBouncer."""

    def __init__(self, port: int) -> None:
        self.port = port

    def dsn(self, direct: str) -> str:
        """The same database, through the bouncer."""
        return urlunsplit(urlsplit(direct)._replace(netloc=f"onceward@127.0.0.1:{self.port}"))


@contextmanager
def throwaway(server: str, **settings: str | int) -> Iterator[Bouncer]:
    """In front of all databases of the server with this DSN. Gone afterwards."""
    command = binary()
    if command is None:
        raise FileNotFoundError("no PgBouncer on this machine; run `make test` once, or install the package pgbouncer")
    port = free_port()
    with tempfile.TemporaryDirectory(prefix="onceward-pgbouncer-") as place:
        Path(place).chmod(0o755)
        config, log = Path(place) / "pgbouncer.ini", Path(place) / "pgbouncer.log"
        config.write_text(_config(server, port, _version(command), settings))
        with log.open("ab") as output:
            process = subprocess.Popen(as_user([command, str(config)]), stdout=output, stderr=subprocess.STDOUT)
        try:
            _wait_until_ready(process, port, log)
            yield Bouncer(port)
        finally:
            process.terminate()
            process.wait(30)


def _config(server: str, port: int, version: tuple[int, ...], settings: dict[str, str | int]) -> str:
    to = urlsplit(server)
    target = {"host": to.hostname or "127.0.0.1", "port": to.port or 5432, "user": to.username or "postgres"}
    if to.password:
        target["password"] = "'" + unquote(to.password).replace("'", "''") + "'"
    options: dict[str, str | int] = {
        "listen_addr": "127.0.0.1",
        "listen_port": port,
        "unix_socket_dir": "",
        "auth_type": "any",  # everybody is the user above
        "pool_mode": "transaction",
        "default_pool_size": POOL_SIZE,
        "max_client_conn": 500,
        # The worst case, always: one client's transactions go to one server connection after the other.
        "server_round_robin": 1,
        "server_login_retry": 1,
        "query_wait_timeout": 30,
    }
    if version >= (1, 21):
        options["max_prepared_statements"] = 0  # newer ones can follow prepared statements; the tests rely on nothing
    lines = [f"{name} = {value}" for name, value in (options | settings).items()]
    there = " ".join(f"{name}={value}" for name, value in target.items())
    return "\n".join(["[databases]", f"* = {there}", "[pgbouncer]", *lines, ""])


def _version(command: str) -> tuple[int, ...]:
    said = subprocess.run([command, "--version"], check=True, capture_output=True, text=True).stdout
    found = re.search(r"(\d+)\.(\d+)", said)
    assert found, said
    return int(found[1]), int(found[2])


def _wait_until_ready(process: subprocess.Popen[bytes], port: int, log: Path) -> None:
    deadline = time.monotonic() + 30
    while True:
        try:
            socket.create_connection(("127.0.0.1", port), 1).close()
            return
        except OSError:
            if process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(log.read_text()[-2000:]) from None
            time.sleep(0.02)


if __name__ == "__main__":
    if sys.argv[1:] == ["ensure"]:
        ensure()
    else:
        sys.exit("usage: python -m tests.services.pgbouncer ensure")
