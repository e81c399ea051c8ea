"""The throwaway RabbitMQ itself: what other tests rely on when they kill it and freeze it."""

from __future__ import annotations

import asyncio
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from secrets import token_hex

import aio_pika
import pytest
from aio_pika.abc import AbstractChannel

from tests.conftest import missing
from tests.services import rabbitmq
from tests.services.rabbitmq import Broker, RabbitMQ
from tests.services.tied import can_be_tied, is_alive, wait_until

pytestmark = pytest.mark.xdist_group("rabbitmq")

KINDS = ["classic", "quorum"]


@pytest.fixture
def server(rabbitmq_server: Broker) -> Iterator[RabbitMQ]:
    """The session's, if it is ours. It runs again afterwards."""
    if not isinstance(rabbitmq_server, RabbitMQ):
        missing("no RabbitMQ here that may be killed; install the package rabbitmq-server")
    yield rabbitmq_server
    if not rabbitmq_server.live:
        rabbitmq_server.kill()
        rabbitmq_server.start()


async def declare(channel: AbstractChannel, kind: str) -> str:
    """The name of a new queue."""
    name = f"queue-{token_hex(4)}"
    await channel.declare_queue(name, durable=True, arguments={"x-queue-type": kind})
    return name


async def publish(channel: AbstractChannel, queue: str, body: bytes) -> None:
    """Comes back when it is confirmed."""
    message = aio_pika.Message(body, delivery_mode=aio_pika.DeliveryMode.PERSISTENT)
    await channel.default_exchange.publish(message, queue)


@pytest.mark.parametrize("kind", KINDS)
async def test_messages_are_counted_ready_or_not(server: RabbitMQ, kind: str) -> None:
    async with await aio_pika.connect(server.url) as connection:
        channel = await connection.channel()
        queue = await declare(channel, kind)
        await publish(channel, queue, b"a")
        await publish(channel, queue, b"b")
        assert server.count(queue) == 2
        message = await (await channel.get_queue(queue)).get()
        assert message.body == b"a"
        assert server.count(queue) == 2
        assert Broker(server.url).count(queue) == 1  # as for one that is not ours
        await message.ack()
        wait_until(lambda: "" if server.count(queue) == 1 else "the message is there")
    assert queue in server.ctl("list_queues", "name")


@pytest.mark.parametrize("how", ["kill", "stop"])
async def test_durable_messages_survive(server: RabbitMQ, how: str) -> None:
    port = server.port
    async with await aio_pika.connect(server.url) as connection:
        channel = await connection.channel()
        queues = [await declare(channel, kind) for kind in KINDS]
        for queue in queues:
            await publish(channel, queue, b"a")
    getattr(server, how)()
    server.start()
    assert server.port == port
    assert [server.count(queue) for queue in queues] == [1, 1]
    async with await aio_pika.connect(server.url) as connection:
        channel = await connection.channel()
        for queue in queues:
            message = await (await channel.get_queue(queue)).get(timeout=60)
            assert message.body == b"a"
            await message.ack()


async def test_a_frozen_server_keeps_its_connections_and_answers_nobody(server: RabbitMQ) -> None:
    async with await aio_pika.connect(server.url) as connection:
        channel = await connection.channel()
        queue = await declare(channel, "classic")
        server.freeze()
        publishing = asyncio.ensure_future(publish(channel, queue, b"a"))
        done, _ = await asyncio.wait([publishing], timeout=0.3)
        assert not done
        server.thaw()
        await asyncio.wait_for(publishing, 60)
    assert server.count(queue) == 1


@pytest.mark.usefixtures("server")
def test_a_second_server_is_another_one_and_leaves_nothing() -> None:
    with rabbitmq.throwaway() as second:
        assert f"port: {second.port}, protocol: amqp" in second.ctl("status")
        pids, folder = [second.pid, second.mapper.pid], second.folder
    assert not any(is_alive(pid) for pid in pids)
    assert not folder.exists()


@pytest.mark.usefixtures("server")
def test_a_server_does_not_outlive_a_test_run_that_is_killed() -> None:
    if not can_be_tied():
        pytest.skip("no setpriv here that knows --pdeathsig")
    script = (
        "import time\n"
        "from tests.services import rabbitmq\n"
        "with rabbitmq.throwaway(in_memory=True) as server:\n"
        "    print(server.pid, server.mapper.pid, server.folder, flush=True)\n"
        "    time.sleep(60)\n"
    )
    root = Path(__file__).parents[1]
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True, cwd=root) as run:
        assert run.stdout is not None
        node, mapper, folder = run.stdout.readline().split()
        run.kill()
    wait_until(lambda: f"{node} or {mapper} is alive" if is_alive(int(node)) or is_alive(int(mapper)) else "")
    shutil.rmtree(folder)
