"""Commands of many tasks on one connection: whose answer is whose, and what becomes of them when it is lost."""

from __future__ import annotations

import asyncio
import os
import shutil
import ssl
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from redis import exceptions
from redis._parsers import _AsyncRESP2Parser, _AsyncRESP3Parser
from redis.asyncio import Redis

from onceward import Inbox, Message
from onceward.errors import StoreUnavailable, UsageError
from onceward.redis import RedisStore, scripts, wire
from onceward.redis.line import LONG, Line
from onceward.redis.servers import Call, connect_one
from onceward.redis.shelf import TRIES
from onceward.testing.contract.queue.base import until as until_async
from onceward.testing.proxy import Proxy
from onceward.testing.redis_labs import RedisLab
from tests.services import valkey


async def nothing(_message: Message[Any]) -> None: ...


@asynccontextmanager
async def line_to(url: str, **options: Any) -> AsyncIterator[Any]:
    client = connect_one(url, **options)
    line = Line(client.connection_pool)  # type: ignore[arg-type]
    try:
        yield line
    finally:
        await line.close()
        assert not client.connection_pool._in_use_connections, "all are given back"  # type: ignore[attr-defined]
        await client.aclose()


@pytest.fixture
async def line(redis_lab: RedisLab) -> AsyncIterator[Any]:
    async with line_to(redis_lab.plain_url) as line:
        yield line


@asynccontextmanager
async def no_writes(lab: RedisLab) -> AsyncIterator[None]:
    """Who writes is not answered, and neither is anything behind it on the same connection."""
    async with lab.client() as client:
        await client.execute_command("CLIENT", "PAUSE", 60_000, "WRITE")
        try:
            yield
        finally:
            await client.execute_command("CLIENT", "UNPAUSE")


async def until(holds: Callable[[], bool]) -> None:
    async def asked() -> bool:
        return holds()

    await until_async(asked)


async def on_their_way(line: Any, number: int) -> None:
    await until(lambda: line._wire is not None and len(line._wire._waiting) == number)


async def answers(asked: Iterable[Awaitable[Any]]) -> list[Any]:
    """Of all of them, or what was raised."""
    async with asyncio.timeout(60):
        return await asyncio.gather(*asked, return_exceptions=True)


def started(*work: Coroutine[Any, Any, Any]) -> list[asyncio.Task[Any]]:
    return [asyncio.ensure_future(one) for one in work]


async def connections(lab: RedisLab, kind: str) -> int:
    async with lab.client() as client:
        return sum(one["name"] == kind for one in await client.client_list())


# --- answers ------------------------------------------------------------------------------------------------


async def test_everybody_gets_the_own_answer_on_one_connection(redis_lab: RedisLab) -> None:
    async with line_to(redis_lab.plain_url, client_name="line") as line:

        async def ask(who: int) -> None:
            for number in range(20):
                assert await line.say("ECHO", f"{who}/{number}") == f"{who}/{number}".encode()

        await asyncio.gather(*(ask(who) for who in range(50)))
        assert await connections(redis_lab, "line") == 1


async def test_the_answer_of_who_has_gone_is_nobody_elses(redis_lab: RedisLab, line: Any) -> None:
    async with no_writes(redis_lab):
        asked = started(line.say("SET", "a", 1), *(line.say("ECHO", number) for number in range(10)))
        await on_their_way(line, 11)
        for one in asked[::2]:
            one.cancel()
        await asyncio.wait(asked[::2])
        assert len(line._wire._waiting) == 11, "they keep their places"
    assert await answers(asked[1::2]) == [b"0", b"2", b"4", b"6", b"8"]
    assert await line.say("ECHO", "next") == b"next"


async def test_an_error_is_for_who_asked(line: Any) -> None:
    wrong, right = started(line.say("EVALSHA", "0" * 40, 0), line.say("ECHO", "x"))
    with pytest.raises(exceptions.NoScriptError):
        await wrong
    assert await right == b"x"
    assert line._wire is not None, "the connection is as good as before"


async def test_a_server_that_is_loading_is_asked_again_and_the_others_are_answered(line: Any) -> None:
    await line.say("PING")
    loading = "redis.call('INCR', 'n') return redis.error_reply('LOADING Redis is loading the dataset in memory')"
    asked = started(line.say("EVAL", loading, 0), *(line.say("ECHO", number) for number in range(5)))
    assert await answers(asked[1:]) == [b"0", b"1", b"2", b"3", b"4"]
    with pytest.raises(exceptions.BusyLoadingError):
        await asked[0]
    assert await line.say("GET", "n") == str(TRIES + 1).encode()
    assert len(line._pool._in_use_connections) == 1, "what it left was given back"


async def test_what_a_server_says_by_itself_is_no_answer(redis_lab: RedisLab) -> None:
    async with line_to(redis_lab.plain_url, protocol=3) as line, redis_lab.client() as client:
        await line.say("CLIENT", "TRACKING", "ON", "BCAST")
        here, heard = line._wire, []
        here._pushed = heard.append
        for number in range(50):
            await client.set("news", number)
            assert await line.say("ECHO", number) == str(number).encode()
        await until(lambda: len(heard) == 50)
        assert line._wire is here


async def test_what_a_server_says_by_itself_is_told_to_redis_py(redis_lab: RedisLab) -> None:
    heard = []

    async def hear(push: Any) -> None:
        heard.append(push)

    async with line_to(redis_lab.plain_url, protocol=3) as line, redis_lab.client() as client:
        await line.say("CLIENT", "TRACKING", "ON", "BCAST")
        line._wire.connection._parser.set_invalidation_push_handler(hear)
        await client.set("news", 1)
        await until(lambda: bool(heard))
        assert b"invalidate" in heard[0]


async def test_what_came_before_the_connection_was_shared_is_read_too(redis_lab: RedisLab) -> None:
    async with redis_lab.client() as client, redis_lab.client() as other:
        connection: Any = await client.connection_pool.get_connection()
        await connection.send_command("CLIENT", "TRACKING", "ON", "BCAST")
        await connection.read_response()
        await other.set("news", 1)
        await until(lambda: bool(connection._reader._buffer))
        heard: list[Any] = []

        async def hear(push: Any) -> None:
            heard.append(push)

        connection._parser.set_invalidation_push_handler(hear)
        here: Any = wire.wire_on(connection, lambda _wire: None)
        assert await here.ask(wire.packed(("ECHO", "x"))) == b"x"
        await until(lambda: len(heard) == 1)
        here.close()
        await connection.disconnect()
        await client.connection_pool.release(connection)


# --- lost connections ---------------------------------------------------------------------------------------


async def test_what_is_on_its_way_when_the_connection_is_lost_is_said_again(redis_lab: RedisLab) -> None:
    async with Proxy(*redis_lab.address).running() as proxy, line_to(f"redis://127.0.0.1:{proxy.port}") as line:
        async with no_writes(redis_lab):
            asked = started(line.say("SET", "a", 1), *(line.say("ECHO", number) for number in range(30)))
            await on_their_way(line, 31)
            before = line._wire
            proxy.cut()
            await until(lambda: line._wire not in {None, before})
        heard = await answers(asked)
        assert heard[1:] == [str(number).encode() for number in range(30)]
        await asyncio.gather(*(line.say("PING") for _ in range(5)))
        assert len(line._pool._in_use_connections) == 1, "the dead one was given back"


async def test_a_server_that_always_hangs_up_is_asked_so_often_and_no_more(redis_lab: RedisLab) -> None:
    async with line_to(redis_lab.plain_url, client_name="line") as line, redis_lab.client() as client:
        # It ends its own connection, and is answered by nobody.
        kill = "redis.call('INCR', 'n') return 1"
        await line.say("PING")

        async def cut() -> None:
            for number in range(TRIES + 1):
                await until(lambda number=number: line._wire is not None and len(line._wire._waiting) > 0)  # type: ignore[misc]
                [mine] = [one for one in await client.client_list() if one["name"] == "line"]
                here = line._wire
                await client.client_kill_filter(_id=mine["id"])
                await until(lambda here=here: here.is_lost)  # type: ignore[misc]

        async with no_writes(redis_lab):
            asked, cutting = started(line.say("EVAL", kill, 0), cut())
            with pytest.raises(exceptions.ConnectionError):
                await asked
            await cutting
        assert await line.say("GET", "n") is None
        assert await line.say("ECHO", "x") == b"x"


async def test_a_server_that_is_not_there_is_told_to_all(redis_lab: RedisLab) -> None:
    async with Proxy(*redis_lab.address).running() as proxy:
        port = proxy.port
    async with line_to(f"redis://127.0.0.1:{port}") as line:
        heard = await answers(line.say("PING") for _ in range(10))
        assert all(isinstance(one, exceptions.ConnectionError) for one in heard)


async def test_one_that_is_not_answered_in_time_ends_the_connection(redis_lab: RedisLab) -> None:
    async with line_to(redis_lab.plain_url, socket_timeout=0.2) as line:
        await line.say("PING")
        before = line._wire
        async with no_writes(redis_lab):
            asked = started(line.say("SET", "a", 1), line.say("SET", "b", 1))
            heard = await answers(asked)
        assert all(isinstance(one, exceptions.TimeoutError) for one in heard)
        assert line._wire is not before
        assert await line.say("ECHO", "x") == b"x", "and not the answer of one that was late"


async def test_an_answer_that_is_there_and_unread_is_not_late(
    redis_lab: RedisLab, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The event loop was held up, by a handler that computes for too long."""
    monkeypatch.setattr(wire, "ONCE_MORE", 30.0)
    async with line_to(redis_lab.plain_url) as line:
        await line.say("PING")
        here = line._wire
        [asked] = started(line.say("ECHO", "x"))
        await asyncio.sleep(0)
        [(future, since)] = here._waiting
        here._waiting[0] = (future, since - 10)
        here._look()  # the timer comes before the answer is read, as in uvloop
        assert await asked == b"x"
        assert line._wire is here


async def test_who_is_cancelled_while_the_line_connects_takes_nobody_along(redis_lab: RedisLab) -> None:
    async def deaf(_reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await gate.wait()
        finally:
            writer.close()

    gate = asyncio.Event()
    server = await asyncio.start_server(deaf, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    async with line_to(f"redis://127.0.0.1:{port}") as line:
        asked, other = started(line.say("PING"), line.say("PING"))
        await until(lambda: line._connecting is not None)
        asked.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asked
        gate.set()
        server.close()
        [heard] = await answers([other])
        assert isinstance(heard, exceptions.ConnectionError), "it waits on, and hears of the server"
    await server.wait_closed()


# --- others are not held up ---------------------------------------------------------------------------------


async def test_nobody_waits_behind_a_long_command(redis_lab: RedisLab, line: Any) -> None:
    async with no_writes(redis_lab):
        [long] = started(line.say("SET", "a", b"x" * LONG))
        async with redis_lab.client() as client:
            await until_async(lambda: _blocked(client))
        async with asyncio.timeout(30):
            assert await line.say("ECHO", "x") == b"x"
        assert not long.done()
    assert await long == b"OK"


async def test_nobody_waits_behind_a_pipeline(redis_lab: RedisLab) -> None:
    inbox = await redis_lab.inbox()
    servers: Any = inbox.store.servers  # type: ignore[attr-defined]
    async with no_writes(redis_lab):
        [many] = started(servers.run_all(scripts.LOOK, [Call([b"a"], []), Call([b"b"], [])]))
        async with redis_lab.client() as client:
            await until_async(lambda: _blocked(client))
        async with asyncio.timeout(30):
            assert await servers._line.say("ECHO", "x") == b"x"
        assert not many.done()
    assert len(await many) == 2


async def _blocked(client: Redis) -> bool:
    return int((await client.info("clients"))["blocked_clients"]) > 0


async def test_what_is_not_sent_yet_is_bounded() -> None:
    with valkey.throwaway() as server:
        async with line_to(server.url, socket_timeout=120) as line:
            await line.say("PING")
            server.freeze()
            try:
                asked = started(*(line.say("ECHO", b"x" * (LONG - 100)) for _ in range(800)))
                await until(lambda: line._wire.is_full)
                for _ in range(3):
                    await asyncio.sleep(0)
                size = line._wire._transport.get_write_buffer_size()
            finally:
                server.thaw()
            assert size < 20 * LONG
            assert {len(answer) for answer in await answers(asked)} == {LONG - 100}


async def test_who_waits_for_room_is_told_when_the_connection_is_lost() -> None:
    with valkey.throwaway() as server:
        async with line_to(server.url, socket_timeout=120) as line:
            await line.say("PING")
            server.freeze()
            asked = started(*(line.say("ECHO", b"x" * (LONG - 100)) for _ in range(800)))
            await until(lambda: line._wire.is_full)
            server.kill()
            heard = await answers(asked)
            assert all(isinstance(one, exceptions.ConnectionError) for one in heard)


# --- as redis-py connects -----------------------------------------------------------------------------------


@pytest.mark.parametrize("protocol", [2, 3])
async def test_user_database_name_and_protocol_are_as_redis_py_is_told(redis_lab: RedisLab, protocol: int) -> None:
    async with redis_lab.client() as client:
        await client.execute_command("ACL", "SETUSER", "app", "on", ">secret", "~*", "+@all")
        try:
            url = f"redis://app:secret@{redis_lab.address[0]}:{redis_lab.address[1]}/3"
            async with line_to(url, client_name="billing", protocol=protocol) as line:
                said = (await line.say("CLIENT", "INFO")).decode().split()
                assert line._wire is not None
        finally:
            await client.execute_command("ACL", "DELUSER", "app")
    assert {"db=3", "name=billing", "user=app", f"resp={protocol}"} <= set(said)


@pytest.mark.parametrize("parser", [_AsyncRESP2Parser, _AsyncRESP3Parser])
async def test_with_another_parser_each_command_has_a_connection(redis_lab: RedisLab, parser: Any) -> None:
    protocol = 2 if parser is _AsyncRESP2Parser else 3
    async with line_to(redis_lab.plain_url, parser_class=parser, protocol=protocol) as line:
        heard = await answers(line.say("ECHO", number) for number in range(20))
        assert heard == [str(number).encode() for number in range(20)]
        assert line._wire is None


async def test_a_pool_of_one_is_left_to_all(redis_lab: RedisLab) -> None:
    async with line_to(redis_lab.plain_url, max_connections=1, timeout=30) as line:
        assert await line.say("ECHO", "x") == b"x"
        assert await Redis.from_pool(line._pool).ping()


async def test_a_hiredis_that_cannot_tell_is_not_trusted_with_protocol_3(
    redis_lab: RedisLab, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(wire, "_Push", None)
    for protocol, shared in ((2, True), (3, False)):
        async with line_to(redis_lab.plain_url, protocol=protocol) as line:
            assert await line.say("ECHO", "x") == b"x"
            assert (line._wire is not None) == shared


WITHOUT = """
import asyncio, sys
sys.modules["hiredis"] = None
from onceward import Inbox, Message
from onceward.redis import RedisStore, wire

async def main():
    assert not wire.can_be()
    async with Inbox(RedisStore(sys.argv[1], prefix="plain"), consumer="billing", listeners=()) as inbox:
        work = [inbox.process(Message(str(n), "t", n), lambda message: message.id) for n in range(30)]
        assert [one.result for one in await asyncio.gather(*work)] == [str(n) for n in range(30)]

asyncio.run(main())
"""


def test_without_hiredis_it_works_all_the_same(valkey_server: str) -> None:
    command = [sys.executable, "-W", "error", "-c", WITHOUT, valkey_server]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("tls")
    key, certificate = folder / "key.pem", folder / "certificate.pem"
    if shutil.which("openssl") is None:
        pytest.skip("no openssl here")
    made = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "1", "-subj", "/CN=localhost"]
    made += ["-addext", "subjectAltName=IP:127.0.0.1", "-keyout", str(key), "-out", str(certificate)]
    subprocess.run(made, check=True, capture_output=True, timeout=60)
    return key, certificate


@asynccontextmanager
async def tls_before(lab: RedisLab, key: Path, certificate: Path) -> AsyncIterator[int]:
    """Speaks TLS, and passes on what it hears."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key)
    proxy = Proxy(*lab.address)
    tasks: set[asyncio.Task[None]] = set()

    def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.ensure_future(proxy._serve(reader, writer))
        tasks.add(task)

    server = await asyncio.start_server(accept, "127.0.0.1", 0, ssl=context)
    try:
        yield server.sockets[0].getsockname()[1]
    finally:
        server.close()
        proxy.cut()
        await asyncio.gather(*tasks, return_exceptions=True)
        await server.wait_closed()


async def test_it_speaks_tls(redis_lab: RedisLab, certificate: tuple[Path, Path]) -> None:
    async with tls_before(redis_lab, *certificate) as port:
        url = f"rediss://127.0.0.1:{port}?ssl_ca_certs={certificate[1]}"
        async with line_to(url) as line:
            heard = await answers(line.say("ECHO", str(number) * 3000) for number in range(10))
            assert heard == [str(number).encode() * 3000 for number in range(10)]
            assert line._wire._transport.get_extra_info("cipher")
        async with Inbox(RedisStore(url), consumer="billing") as inbox:
            assert (await inbox.process(redis_lab.message(), nothing)).processed


# --- loops and processes ------------------------------------------------------------------------------------


def test_another_event_loop_has_to_open_the_store_itself(valkey_server: str) -> None:
    store = RedisStore(valkey_server, prefix="loops2")
    inbox = Inbox(store, consumer="billing")
    with asyncio.Runner() as first:
        first.run(inbox.open())
        assert first.run(inbox.process(Message("m", "t", 1), nothing)).processed
        with asyncio.Runner() as second, pytest.raises(UsageError, match="another event loop"):
            second.run(asyncio.wait_for(store.servers._line.say("PING"), 30))  # type: ignore[union-attr]
        assert first.run(inbox.process(Message("o", "t", 1), nothing)).processed
        first.run(inbox.close())


def test_a_process_that_was_forked_off_does_not_use_the_connection(valkey_server: str) -> None:
    async def make() -> tuple[Any, Any]:
        client = connect_one(valkey_server)
        line: Any = Line(client.connection_pool)  # type: ignore[arg-type]
        await line.say("PING")
        return client, line

    async def end() -> None:
        await line.close()
        await client.aclose()

    with asyncio.Runner() as runner:
        client, line = runner.run(make())
        child = os.fork()
        if not child:  # it has the same loop, and the same socket
            code = 1
            try:
                runner.get_loop().run_until_complete(line.say("ECHO", "theirs"))
            except UsageError:
                code = 0
            finally:
                os._exit(code)
        assert os.waitpid(child, 0)[1] == 0
        assert runner.run(line.say("ECHO", "ours")) == b"ours"
        runner.run(end())


def test_it_works_on_uvloop(valkey_server: str) -> None:
    uvloop = pytest.importorskip("uvloop")

    async def main() -> None:
        async with Inbox(RedisStore(valkey_server, prefix="uv"), consumer="billing", listeners=()) as inbox:
            work = (inbox.process(Message(str(number), "t", number), nothing) for number in range(100))
            assert all(one.processed for one in await asyncio.gather(*work))
            store: Any = inbox.store
            assert store.servers._line._wire is not None

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(main())


# --- its end ------------------------------------------------------------------------------------------------


async def test_a_line_that_is_closed_says_so_and_leaves_nothing_open(redis_lab: RedisLab) -> None:
    client = connect_one(redis_lab.plain_url, client_name="closed")
    line = Line(client.connection_pool)  # type: ignore[arg-type]
    await asyncio.gather(*(line.say("PING") for _ in range(5)))
    assert await connections(redis_lab, "closed") == 1
    await line.close()
    await client.aclose()
    with pytest.raises(exceptions.ConnectionError, match="closed"):
        await line.say("PING")
    async with redis_lab.client() as other:
        await until_async(lambda: _gone(other, "closed"))


async def _gone(client: Redis, name: str) -> bool:
    return not any(one["name"] == name for one in await client.client_list())


async def test_who_waits_when_the_line_is_closed_is_told(redis_lab: RedisLab) -> None:
    async with line_to(redis_lab.plain_url) as line:
        async with no_writes(redis_lab):
            asked = started(line.say("SET", "a", 1), line.say("PING"))
            await on_their_way(line, 2)
            await line.close()
            heard = await answers(asked)
        assert all(isinstance(one, exceptions.ConnectionError) for one in heard)


async def test_a_completion_is_said_to_its_end_before_a_cancellation_is_heard(redis_lab: RedisLab) -> None:
    """In the task of the caller: it has no other."""
    inbox, message, ready = await redis_lab.inbox(), redis_lab.message(), asyncio.Event()
    paused = no_writes(redis_lab)

    async def handle(_message: Message[Any]) -> None:
        await paused.__aenter__()
        ready.set()

    [running] = started(inbox.process(message, handle))
    await ready.wait()
    store: Any = inbox.store
    await on_their_way(store.servers._line, 1)
    running.cancel()
    for _ in range(10):
        await asyncio.sleep(0)
    assert len(store.servers._line._wire._waiting) == 1, "nothing is said before the answer is there"
    assert not running.done()
    await paused.__aexit__(None, None, None)
    with pytest.raises(asyncio.CancelledError):
        await running
    assert [row["state"] for row in await redis_lab.kept()] == ["processed"]


async def test_a_claim_whose_caller_was_cancelled_is_given_back(redis_lab: RedisLab) -> None:
    inbox, message = await redis_lab.inbox(), redis_lab.message()
    store: Any = inbox.store
    await inbox.process(redis_lab.message("before"), nothing)
    async with no_writes(redis_lab):
        [running] = started(inbox.process(message, nothing))
        await on_their_way(store.servers._line, 1)
        running.cancel()
        for _ in range(10):
            await asyncio.sleep(0)
        assert len(store.servers._line._wire._waiting) == 1, "nothing is said before the answer is there"
        assert not running.done()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert [row["message_id"] for row in await redis_lab.kept()] == ["before"]


async def test_a_cut_connection_costs_a_crowd_nothing(redis_lab: RedisLab) -> None:
    """Each effect is there once, although completions are lost on their way again and again."""
    async with Proxy(*redis_lab.address).running() as proxy:
        inbox = await redis_lab.inbox(store=RedisStore(f"redis://127.0.0.1:{proxy.port}"), cache=0)
        todo = iter([redis_lab.message(str(number)) for number in range(300)])
        unsure = []

        async def pay(message: Message[Any], tx: Any) -> None:
            tx.incr(f"paid:{message.id}")
            if int(message.id) % 50 == 25:
                proxy.cut_at, proxy.deliver = redis_lab.commit_word, True

        async def work() -> None:
            for message in todo:
                try:
                    await inbox.process(message, pay)
                except StoreUnavailable:
                    unsure.append(message)

        await asyncio.gather(*(work() for _ in range(16)))
        for message in unsure:
            await inbox.process(message, pay)
        async with redis_lab.client() as client:
            paid = [await client.get(f"paid:{number}") for number in range(300)]
        assert paid == [b"1"] * 300
        await inbox.close()
