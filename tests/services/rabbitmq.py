"""A throwaway RabbitMQ. In this order: ONCEWARD_TEST_RABBITMQ (the AMQP URL of one that runs), the server on this
machine, Debian's package of it. `python -m tests.services.rabbitmq ensure` installs the last where needed.

A node is two processes, Erlang's and its own port mapper (epmd), in a temp folder and on loopback. Erlang looks for
each of a thousand modules in one folder after another, so a node gets a folder with the applications that the server is
made of and no plugins: it starts in half the time. Nothing here sleeps and hopes: what has to be so is asked for until
it is.
"""

from __future__ import annotations

import asyncio
import os
import re
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from secrets import token_hex

import aio_pika

from tests.services import debian
from tests.services.postgres import memory
from tests.services.tied import Ports, Tied, wait_until

VARIABLE = "ONCEWARD_TEST_RABBITMQ"

_NODE = "onceward@127.0.0.1"


def scripts() -> Path | None:
    """The folder with the server's own scripts. What a package puts in front of them would change the user."""
    path = os.pathsep.join([os.environ.get("PATH", ""), "/usr/sbin", "/usr/lib/rabbitmq/bin"])
    found = shutil.which("rabbitmq-server", path=path)
    if found is None or _erts() is None:
        return None
    folder = (Path(found).resolve().parent / "rabbitmq-env").resolve().parent
    return folder if (folder / "rabbitmq-env").exists() else None


def _erts() -> Path | None:
    """The folder with Erlang's epmd and erl_call."""
    found = shutil.which("erl")
    return next(Path(found).resolve().parents[1].glob("erts-*/bin"), None) if found else None


def ensure() -> None:
    """Make sure that there is a RabbitMQ to start."""
    if os.environ.get(VARIABLE):
        print("RabbitMQ for the tests: the one that", VARIABLE, "names")
        return
    if scripts() is None:
        debian.install("rabbitmq-server")
    if scripts() is None:
        print("No RabbitMQ could be found or installed: its tests will be skipped. Set", VARIABLE)
    else:
        print("RabbitMQ for the tests:", scripts())


class Broker:
    """A RabbitMQ that runs somewhere."""

    def __init__(self, url: str) -> None:
        self.url = url

    def count(self, queue: str) -> int:
        """Messages that are ready. What consumers hold cannot be seen from here: close them first."""
        with ThreadPoolExecutor(max_workers=1) as other:  # the caller's thread may have a loop
            return other.submit(asyncio.run, self._ready(queue)).result()

    async def _ready(self, queue: str) -> int:
        async with await aio_pika.connect(self.url) as connection:
            found = await (await connection.channel()).declare_queue(queue, passive=True)
            return found.declaration_result.message_count or 0


class RabbitMQ(Broker, Tied):
    """A node of ours. It can be killed, frozen and stopped, and started again in its folder and on its ports."""

    def __init__(self, scripts: Path, folder: Path, **settings: str | int) -> None:
        self.folder = folder
        self._home = folder / "home"
        self._settings = settings
        self._cookie = token_hex(16)
        self._ports = Ports()
        self.port, self._dist, self._mapper_port = (self._ports.reserve() for _ in range(3))
        self.mapper = Tied(folder / "epmd.log")
        self._furnish(scripts)
        Broker.__init__(self, f"amqp://guest:guest@127.0.0.1:{self.port}/")
        Tied.__init__(self, folder / "server.log")

    def start(self) -> None:
        """Comes back when it listens: by then all queues are there, and quorum queues about to elect their leaders."""
        self.mapper.kill()  # it may have outlived the node
        self.mapper.launch([_tool("epmd"), "-port", str(self._mapper_port), "-address", "127.0.0.1"])
        wait_until(lambda: _nobody_listens(self.mapper, self._mapper_port))
        self.launch([str(self._home / "sbin" / "rabbitmq-server")], self._environment())
        wait_until(lambda: _nobody_listens(self, self.port))

    def stop(self) -> None:
        """In an orderly way."""
        super().stop()
        self.mapper.kill()

    def kill(self) -> None:
        """At once. Messages that were confirmed stay, as the system has them.

        A quorum queue that was declared less than half a second ago would be there and have no leader, for ever: where
        its data is gets written that late. That is RabbitMQ's own, and no test is about it.
        """
        if self.live:
            self.evaluate("[dets:sync(Table) || Table <- dets:all()].")
        super().kill()
        self.mapper.kill()

    def restart(self) -> None:
        self.stop()
        self.start()

    def close(self) -> None:
        """The end: nothing is kept, and the ports are free for others."""
        super().kill()
        self.mapper.kill()
        self._ports.release()

    def count(self, queue: str) -> int:
        """Messages that are in the queue, ready or held by a consumer."""
        return int(self.evaluate(_COUNT.replace("QUEUE", queue)))

    def evaluate(self, expression: str) -> str:
        """Erlang, in the node. Much quicker than `ctl`."""
        command = [_tool("erl_call"), "-address", f"127.0.0.1:{self._dist}", "-c", self._cookie, "-e"]
        ran = self._run(command, f"{expression}\n")
        said = re.fullmatch(r"\{ok, (.*)\}\s*", ran.stdout, re.DOTALL)
        if said is None:
            raise RuntimeError(f"the node did not answer: {ran.stdout}{ran.stderr}")
        return said[1]

    def ctl(self, *words: str) -> str:
        """What rabbitmqctl says. It takes half a second."""
        command = [str(self._home / "sbin" / "rabbitmqctl"), "-q", *words]
        ran = self._run(command)
        if ran.returncode:
            raise RuntimeError(f"rabbitmqctl {' '.join(words)}: {ran.stdout}{ran.stderr}")
        return ran.stdout.strip()

    def _run(self, command: list[str], said: str | None = None) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            command, input=said, env=self._environment(), check=False, capture_output=True, text=True, timeout=60
        )

    def _furnish(self, scripts: Path) -> None:
        """The folder's first use."""
        plugins = scripts.parent / "plugins"
        self._home.mkdir()
        (self._home / "sbin").symlink_to(scripts)
        (self._home / "escript").symlink_to(scripts.parent / "escript")
        needed = _needed(plugins)
        if needed:
            (self._home / "plugins").mkdir()
            for application in needed:
                (self._home / "plugins" / application.name).symlink_to(application)
        else:
            (self._home / "plugins").symlink_to(plugins)
        (self.folder / "enabled_plugins").write_text("[].\n")
        (self.folder / "advanced.config").write_text("[].\n")
        (self.folder / "rabbitmq.conf").write_text(self._config())
        cookie = self.folder / ".erlang.cookie"
        cookie.write_text(self._cookie)
        cookie.chmod(0o400)

    def _config(self) -> str:
        options: dict[str, str | int] = {
            "listeners.tcp.1": f"127.0.0.1:{self.port}",
            "log.console": "true",
            "log.console.level": "warning",
            "log.file": "false",
            "disk_free_limit.absolute": "10MB",
        }
        return "".join(f"{key} = {value}\n" for key, value in (options | self._settings).items())

    def _environment(self) -> dict[str, str]:
        """Nothing of a server that is installed here, and nothing of what the caller has set for one."""
        ours = {name: value for name, value in os.environ.items() if not name.startswith(("RABBITMQ_", "ERL_"))}
        dist = "-kernel inet_dist_use_interface {127,0,0,1}"
        return ours | {
            "HOME": str(self.folder),
            "RUNNING_UNDER_SYSTEMD": "true",  # the script becomes the node and does not start it beside itself
            "ERL_EPMD_PORT": str(self._mapper_port),
            "ERL_EPMD_ADDRESS": "127.0.0.1",
            "RABBITMQ_SCRIPTS_DIR": str(self._home / "sbin"),
            "RABBITMQ_CONF_ENV_FILE": str(self.folder / "rabbitmq-env.conf"),  # there is none
            "RABBITMQ_CONFIG_FILE": str(self.folder / "rabbitmq.conf"),
            "RABBITMQ_CONFIG_FILES": str(self.folder / "conf.d"),  # there is none
            "RABBITMQ_ADVANCED_CONFIG_FILE": str(self.folder / "advanced.config"),
            "RABBITMQ_ENABLED_PLUGINS_FILE": str(self.folder / "enabled_plugins"),
            "RABBITMQ_MNESIA_BASE": str(self.folder / "data"),
            "RABBITMQ_LOG_BASE": str(self.folder / "log"),
            "RABBITMQ_LOGS": "-",
            "RABBITMQ_NODENAME": _NODE,
            "RABBITMQ_USE_LONGNAME": "true",
            "RABBITMQ_DIST_PORT": str(self._dist),
            "RABBITMQ_SERVER_ADDITIONAL_ERL_ARGS": f"{dist} +S 1:1",
            "RABBITMQ_CTL_ERL_ARGS": f"{dist} +S 1:1",
            "RABBITMQ_CTL_DIST_PORT_MIN": "0",
            "RABBITMQ_CTL_DIST_PORT_MAX": "0",
        }


_COUNT = """
{ok, Queue} = rabbit_amqqueue:lookup(rabbit_misc:r(<<"/">>, queue, <<"QUEUE">>)),
case amqqueue:get_type(Queue) of
    rabbit_quorum_queue ->  % what info says of these is some seconds old
        {ok, Total, _} = ra:consistent_query(amqqueue:get_pid(Queue), fun rabbit_fifo:query_messages_total/1),
        Total;
    _ ->
        [{messages, Total}] = rabbit_amqqueue:info(Queue, [messages]),
        Total
end.
"""


def _needed(plugins: Path) -> list[Path]:
    """The applications that the server is made of. None, where they are not folders but archives."""
    found: dict[str, Path] = {}
    wanted = ["rabbit"]
    while wanted:
        name = wanted.pop()
        folder = next((path for path in plugins.glob(f"{name}-[0-9]*") if path.is_dir()), None)
        if folder is not None and name not in found:  # others are Erlang's own
            found[name] = folder
            named = re.search(r"{applications,\s*\[(.*?)\]", (folder / "ebin" / f"{name}.app").read_text(), re.DOTALL)
            wanted += re.findall(r"\w+", named[1]) if named else []
    return list(found.values())


def _nobody_listens(process: Tied, port: int) -> str:
    process.complain_if_ended()
    try:
        socket.create_connection(("127.0.0.1", port), 1).close()
    except OSError as error:
        return str(error)
    return ""


def _tool(name: str) -> str:
    folder = _erts()
    assert folder is not None
    return str(folder / name)


@contextmanager
def throwaway(*, in_memory: bool = False, **settings: str | int) -> Iterator[RabbitMQ]:
    """A node in a temp folder, gone afterwards. Settings are lines of rabbitmq.conf, as `consumer_timeout=10000`."""
    found = scripts()
    if found is None:
        raise FileNotFoundError(f"no RabbitMQ on this machine; set {VARIABLE} or run `make test` once as root")
    where = memory() if in_memory else None
    with tempfile.TemporaryDirectory(prefix="onceward-rabbitmq-", dir=where) as place, ExitStack() as stack:
        server = RabbitMQ(found, Path(place), **settings)
        stack.callback(server.close)
        server.start()
        yield server


if __name__ == "__main__":
    if sys.argv[1:] == ["ensure"]:
        ensure()
    else:
        sys.exit("usage: python -m tests.services.rabbitmq ensure")
