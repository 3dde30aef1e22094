"""A function that no worker can be sent: the run says which function, what it holds and where, before it opens anything."""

from __future__ import annotations

import functools
import random
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from stormproof import BasicBolt, MemorySink, MemorySource, Topology
from stormproof.core.base.errors import TopologyError
from stormproof.core.base.machine_faults import unpickled
from stormproof.core.base.message import Guarantee
from stormproof.core.bolt import BoltContext, Emit, Tuple
from stormproof.core.engine.shipping import require_shippable
from stormproof.core.graph.plan import compile_topology
from stormproof.core.start.settings import Settings
from stormproof.topology import CombinerAggregator
from stormproof.trident.driver.run import run

RNG = random.SystemRandom()
LOCK = threading.Lock()
OUT = sys.stderr


def by_global(line: str) -> str:
    return f"{line} {RNG.random()}"


def by_global_of_a_global(line: str) -> str:
    return by_global(line)


def by_file(line: str) -> str:
    print(line, file=OUT)
    return line


def by_lock(line: str) -> str:
    with LOCK:
        return line


def by_default(line: str, lock: Any = LOCK) -> str:
    return line if lock else ""


class Shop:
    """A user's object around a connection."""

    def __init__(self) -> None:
        self.connection = socket.socket()

    def lookup(self) -> Callable[[str], str]:
        return lambda line: f"{line} {self.connection}"

    def method(self, line: str) -> str:
        return f"{line} {self.connection}"


def by_closure() -> Callable[[str], str]:
    lock = threading.Lock()

    def locked(line: str) -> str:
        with lock:
            return line

    return locked


@pytest.fixture
def shop() -> Iterator[Shop]:
    made = Shop()
    yield made
    made.connection.close()


def topology(tmp: Path, function: Callable[[str], str]) -> Topology:
    t = Topology("shop")
    lines = t.stream("lines", MemorySource("lines", [b"a"]))
    lines.map(function, "line", schema="line string", name="look-up").into(MemorySink("kept", staging=tmp))
    return t


def refused(t: Topology) -> TopologyError:
    with pytest.raises(TopologyError, match="can't be sent to Spark's workers") as raised:
        require_shippable(compile_topology(t, Guarantee.EXACTLY_ONCE))
    return raised.value


CASES: list[tuple[Callable[[str], str], str, str]] = [
    (by_global, "by_global (test_shipping.py:", "its global 'RNG' (SystemRandom): NotImplementedError"),
    (
        by_global_of_a_global,
        "by_global_of_a_global (test_shipping.py:",
        "its global 'by_global', its global 'RNG' (System",
    ),
    (by_file, "by_file (test_shipping.py:", "its global 'OUT'"),
    (by_lock, "by_lock (test_shipping.py:", "its global 'LOCK' (lock): TypeError"),
    (by_default, "by_default (test_shipping.py:", "default 0 of its parameters (lock)"),
    (by_closure(), "locked (test_shipping.py:", "'lock' of the function around it (lock)"),
    (functools.partial(by_default, lock=LOCK), "by_default (test_shipping.py:", "(lock)"),
]


@pytest.mark.parametrize(("function", "named", "held"), CASES, ids=lambda value: getattr(value, "__name__", None))
def test_the_function_and_what_it_holds_are_named(
    function: Callable[[str], str], named: str, held: str, tmp_path: Path
) -> None:
    error = refused(topology(tmp_path, function))
    for part in ("component 'look-up'", named, held, "Make it inside the function"):
        assert part in error.message
    assert error.details["component"] == "look-up"


def test_a_lambda_around_self_is_named_with_the_attribute(shop: Shop, tmp_path: Path) -> None:
    error = refused(topology(tmp_path, shop.lookup()))
    assert "'self' of the function around it, its attribute 'connection' (socket)" in error.message


def test_a_method_is_named_with_the_attribute(shop: Shop, tmp_path: Path) -> None:
    error = refused(topology(tmp_path, shop.method))
    assert "the object whose method it is, its attribute 'connection' (socket)" in error.message


class Locked(BasicBolt):
    streams = "line string"

    def __init__(self) -> None:
        self.held = [threading.Lock()]

    def execute(self, tuple_: Tuple, emit: Emit) -> None:
        emit(tuple_["line"])


def test_a_bolt_is_named_with_the_attribute(tmp_path: Path) -> None:
    t = Topology("shop")
    lines = t.spout("lines", MemorySource("lines", [b"a"]))
    t.sink(MemorySink("kept", staging=tmp_path), t.bolt("lock", Locked(), lines.shuffle()))
    assert "bolt Locked can't be sent to Spark's workers: its attribute 'held', its item 0 (lock)" in refused(t).message


class Prepared(BasicBolt):
    """The way that the error names."""

    streams = "line string"

    def prepare(self, context: BoltContext) -> None:
        self.rng = random.SystemRandom()

    def execute(self, tuple_: Tuple, emit: Emit) -> None:
        emit(tuple_["line"])


def test_what_is_made_in_prepare_is_taken(tmp_path: Path) -> None:
    t = Topology("shop")
    lines = t.spout("lines", MemorySource("lines", [b"a"]))
    t.sink(MemorySink("kept", staging=tmp_path), t.bolt("ready", Prepared(), lines.shuffle()))
    data = require_shippable(compile_topology(t, Guarantee.EXACTLY_ONCE))
    assert unpickled(data)


class Adding(CombinerAggregator):
    result = "long"

    def __init__(self) -> None:
        self.lock = threading.Lock()

    def init(self, line: str) -> int:
        return len(line)

    def combine(self, one: int, other: int) -> int:
        return one + other

    def zero(self) -> int:
        return 0


def test_an_aggregate_is_named_with_the_attribute(tmp_path: Path) -> None:
    t = Topology("shop")
    lines = t.stream("lines", MemorySource("lines", [b"a"]))
    made = lines.group_by("line").agg(n=Adding().over("line"))
    made.into(MemorySink("kept", staging=tmp_path))
    assert "aggregate Adding can't be sent to Spark's workers: its attribute 'lock' (lock)" in refused(t).message


def test_the_inline_engine_refuses_it_before_it_opens_anything(tmp_path: Path) -> None:
    """So a test finds it, before production does."""
    settings = Settings(home=tmp_path / "home", database_url="postgresql://nobody@127.0.0.1:1/none")
    with pytest.raises(TopologyError, match="its global 'RNG'"):
        run(topology(tmp_path, by_global), settings=settings, engine="inline")
