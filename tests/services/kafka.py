"""A throwaway Kafka: one process that is broker and controller (KRaft). In this order: ONCEWARD_TEST_KAFKA (the address
of one that runs), ONCEWARD_TEST_KAFKA_HOME (a folder with libs/ in it), the broker's own jars from Maven Central in
.venv/kafka. `python -m tests.services.kafka ensure` gets them, and Java, where needed.

Clients connect to the address that a broker advertises. So there is a second listener, which advertises a port that is
kept free for a proxy: see `Kafka.proxy`. Nothing here sleeps and hopes: what has to be so is asked for until it is.

Where neither can be had there is librdkafka's mock of a broker (`mock`). It says so: `is_mock`.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
from base64 import urlsafe_b64encode
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import ExitStack, asynccontextmanager, contextmanager, suppress
from functools import cache
from pathlib import Path
from secrets import token_bytes

from confluent_kafka import Consumer, KafkaError, KafkaException, Producer, TopicPartition
from confluent_kafka.admin import AdminClient, ClusterMetadata, NewTopic, OffsetSpec, TopicMetadata

from onceward.testing.proxy import Proxy
from tests.services import debian
from tests.services.postgres import memory
from tests.services.tied import Ports, Tied, wait_until

VARIABLE = "ONCEWARD_TEST_KAFKA"
HOME_VARIABLE = "ONCEWARD_TEST_KAFKA_HOME"
VERSION = "4.1.1"
LOG4J = "2.24.3"
CACHE = Path(__file__).parents[2] / ".venv" / "kafka" / VERSION

_ARCHIVE = "classes.jsa"
_JVM = [
    "-Xmx192m",
    "-XX:+UseSerialGC",
    "-XX:TieredStopAtLevel=1",
    "-XX:-UsePerfData",  # a file in /tmp that stays there after a kill
    "-Dlog4j2.configurationFile=log4j2.properties",
]
_PATIENCE = 30.0
_NOT_YET = {
    KafkaError.COORDINATOR_LOAD_IN_PROGRESS,
    KafkaError.COORDINATOR_NOT_AVAILABLE,
    KafkaError.NOT_COORDINATOR,
}


def home() -> Path | None:
    """A folder with the broker's jars in libs/."""
    given = os.environ.get(HOME_VARIABLE)
    folder = Path(given) if given else CACHE
    return folder if any((folder / "libs").glob("kafka_2.1*.jar")) else None


@cache
def java() -> str | None:
    """One of at least version 17, which the broker needs."""
    candidates = [os.environ.get("JAVA_HOME", "/nowhere") + "/bin/java", shutil.which("java") or "/nowhere"]
    candidates += sorted(str(path) for path in Path("/usr/lib/jvm").glob("*/bin/java"))
    return next((path for path in candidates if Path(path).is_file() and _version(path) >= 17), None)


def _version(path: str) -> int:
    said = subprocess.run([path, "-version"], check=False, capture_output=True, text=True).stderr
    found = re.search(r'version "(\d+)', said)
    return int(found[1]) if found else 0


def can_start() -> bool:
    return home() is not None and java() is not None


def ensure() -> None:
    """Make sure that there is a Kafka to start."""
    if os.environ.get(VARIABLE):
        print("Kafka for the tests: the one that", VARIABLE, "names")
        return
    if java() is None:
        debian.install("default-jre-headless")
        java.cache_clear()
    if home() is None and not os.environ.get(HOME_VARIABLE):
        _copy_jars()
    if can_start():
        _archive_classes()
        print("Kafka for the tests:", home())
    else:
        print("No Kafka could be found or installed: there is only a mock of it. Set", VARIABLE)


def _copy_jars() -> None:
    """From Maven Central, with all that they need. In one piece or not at all."""
    if not shutil.which("mvn"):
        debian.install("maven")
    if not shutil.which("mvn"):
        print("Maven is not there, which would get Kafka; install it")
        return
    print(f"Getting Kafka {VERSION} for the tests ...")
    CACHE.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=CACHE.parent) as place:
        (Path(place) / "pom.xml").write_text(_pom())
        command = ["mvn", "-B", "-q", "dependency:copy-dependencies", "-DoutputDirectory=new/libs"]
        ran = subprocess.run(command, check=False, cwd=place, capture_output=True, text=True)
        if ran.returncode == 0:
            (Path(place) / "new").rename(CACHE)
        else:
            print(ran.stdout[-2000:], ran.stderr[-2000:])


def _pom() -> str:
    wanted = [("org.apache.kafka", "kafka_2.13", VERSION), ("org.apache.logging.log4j", "log4j-slf4j-impl", LOG4J)]
    dependencies = "".join(
        f"<dependency><groupId>{group}</groupId><artifactId>{name}</artifactId><version>{version}</version></dependency>"
        for group, name, version in wanted
    )
    return (
        "<project><modelVersion>4.0.0</modelVersion>"
        "<groupId>onceward</groupId><artifactId>kafka-for-the-tests</artifactId><version>1</version>"
        f"<dependencies>{dependencies}</dependencies></project>"
    )


def _archive_classes() -> None:
    """Classes that are read and verified already. With them a start takes half as long; not every Java can do it."""
    archive = _home() / _ARCHIVE
    if archive.exists() or not os.access(_home(), os.W_OK):
        return
    new = archive.with_suffix(".new")
    with suppress(RuntimeError), throwaway(jvm=[f"-XX:ArchiveClassesAtExit={new}"]) as server:
        server.create_topic("any")
        server.stop()
    if new.exists():
        new.rename(archive)


class Broker:
    """A Kafka that runs somewhere, and what can be seen of it from outside."""

    is_mock = False

    def __init__(self, bootstrap: str) -> None:
        self.bootstrap = bootstrap

    def admin(self) -> AdminClient:
        """Each time a new one, as an old one may be waiting before it connects again."""
        return AdminClient({"bootstrap.servers": self.bootstrap, "log_level": 0})

    def create_topic(self, name: str, partitions: int = 1, **config: str | int) -> None:
        """Options are the topic's own, as `retention_ms=1000`. Comes back when each partition has a leader."""
        settings = {key.replace("_", "."): str(value) for key, value in config.items()}
        topic = NewTopic(name, partitions, 1, config=settings)
        admin = self.admin()  # its answers are lost when it is
        admin.create_topics([topic], request_timeout=_PATIENCE)[name].result()
        wait_until(lambda: self._not_led(name, partitions))

    def end_offsets(self, topic: str) -> dict[int, int]:
        """For each partition the offset that the next message gets."""
        admin = self.admin()
        places = {place: OffsetSpec.latest() for place in _places(admin, topic)}
        found = admin.list_offsets(places, request_timeout=_PATIENCE)
        return {place.partition: answer.result().offset for place, answer in found.items()}

    def committed(self, group: str, topic: str) -> dict[int, int | None]:
        """For each partition what the group has committed: the offset of the next message that it wants."""
        found: list[TopicPartition] = []
        places = _places(self.admin(), topic)
        wait_until(lambda: self._not_told(group, places, found))
        _raise_for(found)
        return {one.partition: one.offset if one.offset >= 0 else None for one in found}

    def _not_told(self, group: str, places: list[TopicPartition], found: list[TopicPartition]) -> str:
        """A server that has just begun, or was frozen, may still be reading what groups have committed.

        As a consumer, which does not join. When such a server says NOT_COORDINATOR to an AdminClient that asks for
        offsets, librdkafka up to 2.16 ends the process.
        """
        consumer = Consumer({"bootstrap.servers": self.bootstrap, "group.id": group, "log_level": 0})
        try:
            found[:] = consumer.committed(places, timeout=_PATIENCE)
        except KafkaException as error:
            if error.args[0].code() in _NOT_YET:
                return str(error)
            raise
        finally:
            consumer.close()
        return ""

    def _not_led(self, topic: str, partitions: int) -> str:
        found = self.admin().list_topics(topic, timeout=_PATIENCE).topics[topic].partitions
        led = [one for one in found.values() if one.leader >= 0]
        return "" if len(led) == partitions else f"{len(led)} of {partitions} partitions of {topic} have a leader"


def _raise_for(found: Sequence[TopicPartition | TopicMetadata]) -> None:
    for one in found:
        if one.error:
            raise KafkaException(one.error)


def _places(admin: AdminClient, topic: str) -> list[TopicPartition]:
    found = admin.list_topics(topic, timeout=_PATIENCE).topics[topic]
    _raise_for([found])
    return [TopicPartition(topic, partition) for partition in sorted(found.partitions)]


class Kafka(Broker, Tied):
    """A Kafka of ours. It can be killed, frozen and stopped, and started again in its folder and on its ports."""

    def __init__(self, folder: Path, *, jvm: list[str], **settings: str | int) -> None:
        self.folder = folder
        self._jvm = jvm
        self._settings = settings
        self._ports = Ports()
        self.port, self._control, self._behind, self._front = (self._ports.reserve() for _ in range(4))
        # The first byte makes it begin with a letter: the tool would take a dash for an option.
        self._cluster = urlsafe_b64encode(b"\0" + token_bytes(15)).decode().rstrip("=")
        Broker.__init__(self, f"127.0.0.1:{self.port}")
        Tied.__init__(self, folder / "server.log")

    @asynccontextmanager
    async def proxy(self) -> AsyncIterator[Proxy]:
        """A network that can be cut. Clients whose bootstrap server is 127.0.0.1 with its `port` stay behind it."""
        async with Proxy("127.0.0.1", self._behind).running(self._front) as running:
            yield running

    def format(self) -> None:
        """The folder's first use."""
        (self.folder / "log4j2.properties").write_text(_LOGGING)
        (self.folder / "server.properties").write_text(self._properties())
        tool = ["kafka.tools.StorageTool", "format", "-t", self._cluster, "-c", "server.properties"]
        subprocess.run(self._command(*tool), check=True, stdout=subprocess.DEVNULL, cwd=self.folder)

    def start(self) -> None:
        """Comes back when each partition has a leader and groups can be formed. A kill makes it a little longer."""
        self.launch(self._command(*self._jvm, "kafka.Kafka", "server.properties"))
        wait_until(self._not_ready)
        wait_until(lambda: self._not_told("any", [TopicPartition("any", 0)], []))

    def restart(self) -> None:
        self.stop()
        self.start()

    def close(self) -> None:
        """The end: nothing is kept, and the ports are free for others."""
        self.kill()
        self._ports.release()

    def _not_ready(self) -> str:
        self.complain_if_ended()
        try:
            seen: ClusterMetadata = self.admin().list_topics(timeout=1)
        except KafkaException as error:
            return str(error)
        if seen.cluster_id != self._cluster:
            return f"somebody else answers on port {self.port}"
        if not seen.brokers:
            return "it does not take part yet"
        unled = [
            name for name, topic in seen.topics.items() if any(one.leader < 0 for one in topic.partitions.values())
        ]
        return f"no leader for {unled}" if unled else ""

    def _command(self, *words: str) -> list[str]:
        command, jars = java(), sorted(str(jar) for jar in (_home() / "libs").glob("*.jar"))
        assert command is not None
        archive = _home() / _ARCHIVE
        shared = ["-Xshare:auto", f"-XX:SharedArchiveFile={archive}"] if archive.exists() else []
        return [command, *_JVM, *shared, "-cp", os.pathsep.join(jars), *words]

    def _properties(self) -> str:
        names = {"DIRECT": self.port, "CONTROL": self._control, "PROXIED": self._behind}
        options: dict[str, str | int] = {
            "process_roles": "broker,controller",
            "node_id": 1,
            "controller_quorum_voters": f"1@127.0.0.1:{self._control}",
            "controller_listener_names": "CONTROL",
            "inter_broker_listener_name": "DIRECT",
            "listeners": ",".join(f"{name}://127.0.0.1:{port}" for name, port in names.items()),
            "advertised_listeners": f"DIRECT://127.0.0.1:{self.port},PROXIED://127.0.0.1:{self._front}",
            "listener_security_protocol_map": ",".join(f"{name}:PLAINTEXT" for name in names),
            "log_dirs": str(self.folder / "data"),
            "auto_create_topics_enable": "false",
            "offsets_topic_num_partitions": 1,
            "offsets_topic_replication_factor": 1,
            "transaction_state_log_num_partitions": 1,
            "transaction_state_log_replication_factor": 1,
            "transaction_state_log_min_isr": 1,
            "group_initial_rebalance_delay_ms": 0,  # it would wait three seconds for more members
            "group_min_session_timeout_ms": 1000,
            # One that was killed may come back only when its session is over; by default that takes nine seconds.
            "broker_session_timeout_ms": 2000,
            "broker_heartbeat_interval_ms": 300,
            "log_cleaner_dedupe_buffer_size": 2**21,  # instead of 128 MB
        }
        return "".join(f"{key.replace('_', '.')}={value}\n" for key, value in (options | self._settings).items())


_LOGGING = """\
status=ERROR
appender.out.type=Console
appender.out.name=out
appender.out.layout.type=PatternLayout
appender.out.layout.pattern=%d{ISO8601} %p %c{1} %m%n
rootLogger.level=WARN
rootLogger.appenderRef.out.ref=out
"""


@contextmanager
def throwaway(*, in_memory: bool = False, jvm: list[str] | None = None, **settings: str | int) -> Iterator[Kafka]:
    """A server in a temp folder, gone afterwards. Settings are its own, as `group_max_size=2`; `jvm` is for Java."""
    _home()
    where = memory() if in_memory else None
    with tempfile.TemporaryDirectory(prefix="onceward-kafka-", dir=where) as place, ExitStack() as stack:
        server = Kafka(Path(place), jvm=jvm or [], **settings)
        stack.callback(server.close)
        server.format()
        server.start()
        yield server


def _home() -> Path:
    found = home()
    if found is None or java() is None:
        raise FileNotFoundError(f"no Kafka or no Java 17 here; set {HOME_VARIABLE} or run `make test` once")
    return found


@contextmanager
def mock() -> Iterator[Broker]:
    """librdkafka's own, in this process: it knows groups and offsets, keeps nothing and cannot be killed."""
    keeper = Producer({"test.mock.num.brokers": 1, "log_level": 0})
    (only,) = keeper.list_topics(timeout=_PATIENCE).brokers.values()
    yield _Mock(f"{only.host}:{only.port}")
    del keeper


class _Mock(Broker):
    is_mock = True

    def create_topic(self, name: str, partitions: int = 1, **config: str | int) -> None:
        """It makes topics when they are asked for, always with four partitions."""
        wait_until(lambda: self._not_led(name, 4))


if __name__ == "__main__":
    if sys.argv[1:] == ["ensure"]:
        ensure()
    else:
        sys.exit("usage: python -m tests.services.kafka ensure")
