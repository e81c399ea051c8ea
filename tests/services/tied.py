"""Server processes that do not outlive the tests, on ports that stay theirs.

`Tied` is one process: started, frozen, killed, and started again. Who is killed with SIGKILL takes it along: the kernel
is asked for that (`setpriv --pdeathsig`), as nobody would be left to do it. `Ports` holds free ports, also while nobody
listens on them.
"""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path

_starter = ThreadPoolExecutor(max_workers=1, thread_name_prefix="service-starter")
"""A tied process ends with the thread that started it, and this one lives as long as we do."""


@cache
def can_be_tied() -> bool:
    if shutil.which("setpriv") is None:
        return False
    attempt = ["setpriv", "--pdeathsig", "KILL", "true"]
    return subprocess.run(attempt, check=False, stderr=subprocess.DEVNULL).returncode == 0


def wait_until(complaint: Callable[[], str], seconds: float = 100) -> None:
    """Ask until there is no complaint any more."""
    deadline = time.monotonic() + seconds
    while heard := complaint():
        if time.monotonic() > deadline:
            raise TimeoutError(f"after {seconds} seconds still: {heard}")
        time.sleep(0.02)


def is_alive(pid: int) -> bool:
    """One that nobody has waited for yet, as its parent is gone, is dead all the same."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


class Tied:
    """A process that ends with us, where that can be had. What it says goes to its log."""

    def __init__(self, log: Path) -> None:
        self.log = log
        self._process: subprocess.Popen[bytes] | None = None
        self._frozen = False

    @property
    def pid(self) -> int:
        if self._process is None:
            raise RuntimeError("this server is not running; call start()")
        return self._process.pid

    @property
    def live(self) -> bool:
        """Running, and not frozen."""
        return self._process is not None and self._process.poll() is None and not self._frozen

    def launch(self, command: list[str], environment: Mapping[str, str] | None = None) -> None:
        if self._process is not None and self._process.poll() is None:
            raise RuntimeError(f"this server is running, as process {self.pid}")
        if can_be_tied():
            command = ["setpriv", "--pdeathsig", "KILL", *command]
        with self.log.open("ab") as log:
            starting = _starter.submit(
                subprocess.Popen, command, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT,
                env=environment, cwd=self.log.parent,
            )  # fmt: skip
            self._process = starting.result()
        self._frozen = False

    def complain_if_ended(self) -> None:
        if self._process is None or self._process.poll() is not None:
            said = self.log.read_text(errors="replace")
            raise RuntimeError(f"the server ended while it was starting:\n{said[-3000:]}")

    def stop(self) -> None:
        """In an orderly way. One that does not run is no error."""
        if self._frozen:
            self.thaw()
        self._end(signal.SIGTERM)

    def kill(self) -> None:
        """At once. Frozen ones die as well. What was written stays, as the system has it."""
        self._end(signal.SIGKILL)

    def _end(self, how: signal.Signals) -> None:
        if self._process is not None:
            self._process.send_signal(how)
            self._process.wait(60)
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


class Ports:
    """Free ports on loopback that stay ours.

    As long as a socket is bound to one, Linux gives it to nobody who asks for any port, and to no connection as its
    near end. A server that names it gets it all the same, as both sides say SO_REUSEADDR and only one listens.
    """

    def __init__(self) -> None:
        self._held: list[socket.socket] = []

    def reserve(self) -> int:
        held = socket.socket()
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        held.bind(("127.0.0.1", 0))
        port = int(held.getsockname()[1])
        if sys.platform == "linux":
            self._held.append(held)
        else:
            held.close()
        return port

    def release(self) -> None:
        while self._held:
            self._held.pop().close()
