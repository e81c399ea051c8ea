"""Debian packages for the tests, installed where we are root. No package may start a server of its own."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_POLICY = Path("/usr/sbin/policy-rc.d")


def install(*packages: str) -> None:
    """As far as that can be done here. Who asks looks for himself what is there afterwards."""
    if os.geteuid() != 0 or not shutil.which("apt-get"):
        return
    print("Installing", *packages, "for the tests ...")
    environment = os.environ | {"DEBIAN_FRONTEND": "noninteractive"}
    subprocess.run(["apt-get", "update", "-q"], env=environment, check=False, stdout=subprocess.DEVNULL)
    command = ["apt-get", "install", "-qy", "--no-install-recommends", *packages]
    with _no_service_starts():
        subprocess.run(command, env=environment, check=False, stdout=subprocess.DEVNULL)


@contextmanager
def _no_service_starts() -> Iterator[None]:
    """This is how Debian wants to be told. A policy that is there is left alone."""
    if _POLICY.exists():
        yield
        return
    _POLICY.write_text("#!/bin/sh\nexit 101\n")
    _POLICY.chmod(0o755)
    try:
        yield
    finally:
        _POLICY.unlink()
