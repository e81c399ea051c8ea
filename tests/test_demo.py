"""The demo is the first thing that people see of onceward: it has to work, and its audit has to be able to fail."""

import asyncio
import os
import shutil
import signal
import sqlite3
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import pytest
from rich.console import Console

from onceward.demo.__main__ import conclude
from onceward.demo.audit import audit, damage, verdict
from onceward.demo.books import Books, Charge
from onceward.demo.broker import Broker
from onceward.demo.faults import Faults, Moment
from onceward.demo.shop import Order, make_orders
from onceward.demo.tally import Tally
from onceward.demo.view import line
from onceward.demo.world import Demo

DEMO = [sys.executable, "-m", "onceward.demo"]
NO_FAULTS = Faults(1, repeated=0, ack_lost=0, shuffled_within=0)


def charged(order: Order) -> Charge:
    return Charge(order.id, order.customer, order.cents)


def write(books: Books, *charges: Charge) -> None:
    with closing(sqlite3.connect(books.path)) as connection, connection:
        connection.executemany("INSERT INTO charges (order_id, customer, cents) VALUES (?, ?, ?)", charges)


@pytest.fixture
def demo(tmp_path: Path) -> Demo:
    """Ten orders were sent, and nothing is charged yet."""
    demo = Demo(tmp_path, make_orders(10, seed=1), NO_FAULTS)
    for world in demo.worlds:
        world.broker.ledger.extend(demo.orders)
    return demo


@pytest.mark.slow
def test_a_small_run_charges_every_order_once():
    ran = subprocess.run([*DEMO, "--orders", "60", "--seconds", "30", "--plain"], capture_output=True, text=True)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert "60 orders, 60 charges, 0 lost, 0 doubled" in ran.stdout
    assert "without an inbox" in ran.stdout
    assert "\x1b" not in ran.stdout
    assert ran.stderr == ""


@pytest.mark.slow
def test_a_run_that_is_cut_short_is_not_called_exact():
    ran = subprocess.run([*DEMO, "--orders", "500", "--seconds", "2"], capture_output=True, text=True)
    assert ran.returncode == 1
    assert "Given up after 2 s" in ran.stdout


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("ps") is None, reason="needs ps to see the worker processes")
@pytest.mark.parametrize("stop", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_demo_leaves_no_process_and_no_file_behind(stop: signal.Signals, tmp_path: Path):
    if signal.getsignal(stop) is signal.SIG_IGN:
        pytest.skip("this process was started with the signal ignored, and so would be the demo")
    environment = os.environ | {"TMPDIR": str(tmp_path)}
    with subprocess.Popen([*DEMO, "--plain"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment) as ran:
        assert ran.stdout is not None
        ran.stdout.readline()
        children = subprocess.run(["ps", "-o", "pid=", "--ppid", str(ran.pid)], capture_output=True, check=True).stdout
        ran.send_signal(stop)
        ran.communicate(timeout=20)
    assert ran.returncode == 130
    assert children.split()
    for child in map(int, children.split()):
        with pytest.raises(ProcessLookupError):
            os.kill(child, 0)
    assert not list(tmp_path.iterdir())


def test_the_audit_is_content_when_every_order_is_charged_once(demo: Demo):
    write(demo.onceward.books, *map(charged, demo.orders))
    assert conclude(Console(quiet=True), demo) == 0


def test_the_audit_finds_a_lost_and_a_doubled_order(demo: Demo):
    lost, doubled, *others = demo.orders
    write(demo.onceward.books, charged(doubled), *map(charged, [doubled, *others]))
    account = audit(demo.orders, demo.onceward.books.charges())
    assert account.lost == (lost,)
    assert account.doubled == ((doubled, 2),)
    assert account.overcharged == doubled.cents
    assert str(account) == "10 orders, 10 charges, 1 lost, 1 doubled"
    assert verdict(account) == [f"lost: {lost.id}", f"doubled: {doubled.id}"]
    assert conclude(Console(quiet=True), demo) == 1


def test_the_audit_finds_wrong_amounts_and_charges_that_nobody_ordered(demo: Demo):
    first, *others = demo.orders
    stranger = Charge("o-9999", "Nobody", 100)
    write(demo.onceward.books, charged(first)._replace(cents=1), *map(charged, others), stranger)
    account = audit(demo.orders, demo.onceward.books.charges())
    assert (account.wrong, account.unknown) == ((first,), (stranger,))
    assert conclude(Console(quiet=True), demo) == 1


def test_trouble_with_the_demo_itself_is_not_a_success(demo: Demo):
    write(demo.onceward.books, *map(charged, demo.orders))
    assert conclude(Console(quiet=True), demo, "a worker ended by itself") == 1


def test_the_damage_is_named_and_luck_is_called_luck(demo: Demo):
    orders = demo.orders[:2]
    once, thrice = map(charged, orders)
    assert "luck" in damage(audit(orders, [once, thrice]))[0]
    too_much = f"1 customer was charged twice, {2 * thrice.cents / 100:.2f} EUR too much."
    assert damage(audit(orders, [once, thrice, thrice, thrice]))[0] == too_much


def test_the_view_counts_charges_in_the_database(demo: Demo):
    first, second, *_ = map(charged, demo.orders)
    write(demo.plain.books, first, first, second)
    assert "no-inbox    3 charges   1 twice" in line(demo)
    assert len(line(demo)) <= 80


def test_both_worlds_suffer_the_same_faults():
    one, same, other = Faults(1), Faults(1), Faults(2)
    ids = [order.id for order in make_orders(200, seed=1)]
    assert [one.repeat(i) for i in ids] == [same.repeat(i) for i in ids] != [other.repeat(i) for i in ids]
    assert one.kills(1000) == same.kills(1000)
    assert set(one.kills(1000).values()) == set(Moment)
    assert all(1 <= after <= 60 for after in one.kills(60))


async def test_the_broker_brings_again_what_a_dead_connection_had():
    broker = Broker(NO_FAULTS, Tally())
    broker.send(make_orders(1, seed=1)[0])
    broker.close()
    first = await broker.take()
    assert broker.bring_again([first.number]) == 1
    second = await broker.take()
    broker.ack(first.number)
    assert not broker.done.is_set(), "the ack came too late"
    broker.ack(second.number)
    assert broker.done.is_set()
    assert (first.times, second.times) == (1, 2)


async def test_the_broker_brings_again_what_stays_unsettled(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("onceward.demo.broker.PATIENCE", 0.01)
    broker = Broker(Faults(1, repeated=0, ack_lost=1, shuffled_within=0), Tally())
    broker.send(make_orders(1, seed=1)[0])
    first = await broker.take()
    broker.ack(first.number)  # lost
    async with asyncio.timeout(5):
        second = await broker.take()
    assert second.message == first.message
