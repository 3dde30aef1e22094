"""Emit, ack, fail and reset_timeout from elsewhere than a bolt's task: refused by name, and the run ends with that name."""

from __future__ import annotations

import asyncio
import os
import pickle
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from threading import Thread

import pyarrow as pa
import pytest

from stormproof import BasicBolt, Bolt, BoltContext, MemorySink, MemorySource, Topology, Tuple
from stormproof.core.base.errors import TasksBroken, UsageError
from stormproof.core.bolt.api import Emit
from stormproof.core.bolt.collector import Collector
from stormproof.core.bolt.runner import BoltRunner
from stormproof.testing import simulate

STREAMS = {"default": pa.schema([("word", pa.string())])}
ROWS = pa.record_batch({"word": ["a", "b"]})
REFUSED = r"bolt 'me' called .* from a thread or a fork of its own"


class Calls(Bolt):
    """Calls a function with the collector and the tuple, then acks unless that is the function's own."""

    streams = "word string"

    def __init__(self, call: Callable[[Collector, Tuple], object], *, acks: bool = True) -> None:
        self.call, self.acks = call, acks

    def execute(self, tuple: Tuple, /) -> None:
        self.call(self.collector, tuple)
        if self.acks:
            self.collector.ack(tuple)


def running(bolt: Bolt | BasicBolt) -> BoltRunner:
    return BoltRunner("me", bolt, STREAMS, {}, BoltContext("me"))


def in_a_thread(call: Callable[[], object]) -> BaseException | None:
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(call).exception()  # which the bolt does not look at


@pytest.mark.parametrize(
    "call",
    [
        lambda collector, tuple: collector.emit("x", anchors=tuple),
        lambda collector, tuple: collector.emit("x", anchors=[tuple]),
        lambda collector, tuple: collector.emit("x"),
        lambda collector, tuple: collector.ack(tuple),
        lambda collector, tuple: collector.fail(tuple),
        lambda collector, tuple: collector.reset_timeout(tuple),
    ],
    ids=["emit", "emit to several", "emit unanchored", "ack", "fail", "reset_timeout"],
)
def test_a_call_from_another_thread_is_refused_even_where_nobody_sees_its_error(
    call: Callable[[Collector, Tuple], object], caplog: pytest.LogCaptureFixture
) -> None:
    errors: list[BaseException | None] = []
    it = running(Calls(lambda collector, tuple: errors.append(in_a_thread(lambda: call(collector, tuple)))))
    with pytest.raises(TasksBroken, match=REFUSED):
        it.run(ROWS, "split", "default")
    assert [type(error) for error in errors] == [UsageError] * 2
    assert len(caplog.records) == 1


def test_a_basic_bolts_emit_is_refused_in_another_thread() -> None:
    class Threads(BasicBolt):
        def execute(self, tuple: Tuple, emit: Emit, /) -> None:
            in_a_thread(lambda: emit(tuple["word"]))

    with pytest.raises(TasksBroken, match=REFUSED):
        running(Threads()).run(ROWS, "split", "default")


def test_a_thread_that_comes_when_the_task_is_over_is_refused(caplog: pytest.LogCaptureFixture) -> None:
    kept: list[Collector] = []
    it = running(Calls(lambda collector, tuple: kept.append(collector)))
    it.run(ROWS, "split", "default")
    it.finish()
    assert isinstance(in_a_thread(lambda: kept[0].emit("late")), UsageError)
    assert "the call had no effect" in caplog.text


def test_a_fork_is_refused() -> None:
    def fork(collector: Collector, tuple: Tuple) -> None:
        child = os.fork()
        if not child:
            try:
                collector.emit("x", anchors=tuple)
            except UsageError:
                os._exit(7)
            os._exit(0)
        statuses.append(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))

    statuses: list[int] = []
    it = running(Calls(fork))
    assert len(it.run(ROWS, "split", "default").acked) == 2  # the parent is not troubled
    assert statuses == [7, 7]


def test_a_collector_does_not_leave_its_task() -> None:
    errors: list[BaseException] = []

    def send(collector: Collector, tuple: Tuple) -> None:
        with pytest.raises(UsageError, match="bolt 'me': what emits and acks belongs to its task") as error:
            pickle.dumps(collector)
        errors.append(error.value)

    running(Calls(send)).run(ROWS, "split", "default")
    assert len(errors) == 2


def test_asyncio_in_the_tasks_thread_is_served() -> None:
    async def work(collector: Collector, tuple: Tuple) -> None:
        await asyncio.sleep(0)
        collector.emit(tuple["word"], anchors=tuple)

    it = running(Calls(lambda collector, tuple: asyncio.run(work(collector, tuple))))
    assert it.run(ROWS, "split", "default").emitted["default"].rows.num_rows == 2


def topology() -> Topology:
    def start(collector: Collector, tuple: Tuple) -> None:
        thread = Thread(target=lambda: in_a_thread(lambda: collector.ack(tuple)))
        thread.start()
        thread.join()

    t = Topology("threads")
    lines = t.spout("lines", MemorySource("lines", [b"a", b"b"], schema="word string"))
    t.sink(MemorySink("out"), t.bolt("me", Calls(start, acks=False), lines.shuffle()))
    return t


def test_a_run_and_a_simulation_end_with_the_name() -> None:
    with pytest.raises(TasksBroken, match=REFUSED):
        simulate(topology(), ["a", "b"])
