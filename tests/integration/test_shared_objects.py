"""What threads and forks may do with each public object: its docstring says it, and this does it."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from support.queues import prepared_database
from support.threads import in_threads

import stormproof
from stormproof import (
    FileSource,
    IteratorSource,
    MemorySink,
    MemorySource,
    PostgresQueue,
    PostgresSink,
    Settings,
    Topology,
)
from stormproof.core.contract.source import Source
from stormproof.core.engine.inline import InlineEngine
from stormproof.core.engine.spark import SparkEngine
from stormproof.core.postgres.database import Database, connect
from stormproof.errors import UsageError
from stormproof.state import MemoryStore
from stormproof.trident.driver.coordinator import Coordinator

pytestmark = [pytest.mark.postgres, pytest.mark.sampled(0.25)]
LINES = [str(n) for n in range(60)]

SHARED = [
    *(getattr(stormproof, name) for name in ("DeltaMap", "DeltaSink", "FileSource", "IteratorSource", "MemoryMap")),
    *(getattr(stormproof, name) for name in ("MemorySink", "MemorySource", "PostgresMap", "PostgresQueue")),
    *(getattr(stormproof, name) for name in ("PostgresSink", "Settings", "Topology")),
    *(getattr(stormproof.state, name) for name in ("MemoryStore", "NonTransactionalMap", "OpaqueMap", "StateSink")),
    *(stormproof.state.TransactionalMap, stormproof.source.MicroBatches),
    *(Coordinator, Database, InlineEngine, SparkEngine),
]


@pytest.mark.parametrize("kind", SHARED)
def test_the_docstring_says_what_threads_and_forks_may_do(kind: type) -> None:
    text = " ".join((kind.__doc__ or "").split())
    assert "Threads: " in text or "Threads, forks: " in text
    assert "Forks: " in text or "Threads, forks: " in text


@pytest.fixture
def settings(database: Database, tmp_path: Path) -> Settings:
    prepared_database(database)
    return Settings(database_url=database.without_password, home=tmp_path, poll_interval_s=0.01, batch_messages=20)


def in_fork(work: Callable[[], object]) -> str | None:
    """Run in a fork; the text of its UsageError, or nothing."""
    receive, send = os.pipe()
    child = os.fork()
    if child == 0:
        said = "died"
        try:
            work()
            said = ""
        except UsageError as error:
            said = error.message
        finally:
            os.write(send, said.encode())
            os._exit(0)
    os.close(send)
    with os.fdopen(receive, "rb") as pipe:
        said = pipe.read().decode()
    os.waitpid(child, 0)
    return said or None


def counted(sink: MemorySink) -> Counter[str]:
    assert sink.store.content is not None
    return Counter(sink.store.content.column("line").to_pylist())


def run(name: str, source: Source, sink: Any, settings: Settings, guarantee: str = "exactly-once") -> None:
    topology = Topology(name)
    topology.stream("lines", source).into(sink)
    topology.run(guarantee, engine="inline", settings=settings, until_idle=True)


def of_queue(settings: Settings, folder: Path) -> Source:
    queue = PostgresQueue("lines", database=settings.resolve_database())
    queue.put([line.encode() for line in LINES])
    return queue


def of_files(settings: Settings, folder: Path) -> Source:
    for part in range(3):
        (folder / f"{part}.txt").write_text("".join(f"{line}\n" for line in LINES[part::3]))
    return FileSource(folder / "*.txt", "text")


def in_memory(settings: Settings, folder: Path) -> Source:
    return MemorySource("lines", [line.encode() for line in LINES])


@pytest.mark.parametrize("make", [of_queue, of_files, in_memory])
def test_two_topologies_on_two_threads_share_a_source(
    make: Callable[[Settings, Path], Source], settings: Settings, tmp_path: Path
) -> None:
    source, sinks = make(settings, tmp_path), [MemorySink(f"rows{n}") for n in range(2)]
    raised = in_threads(*(lambda n=n: run(f"topology{n}", source, sinks[n], settings) for n in range(2)))
    source.close()
    assert raised == []
    for sink in sinks:
        assert counted(sink) == Counter(LINES)


def test_an_iterator_serves_one_topology(settings: Settings) -> None:
    source = IteratorSource("lines", [line.encode() for line in LINES], confirm=lambda _: None)
    sink = MemorySink("rows")
    run("one", source, sink, settings, "at-least-once")
    assert counted(sink) == Counter(LINES)
    with pytest.raises(UsageError, match="an iterator gives each message once"):
        run("two", source, MemorySink("others"), settings, "at-least-once")


def test_threads_put_into_a_memory_source(settings: Settings) -> None:
    source, sink = MemorySource("lines"), MemorySink("rows")
    ids = list[range]()

    def produce(part: int) -> Callable[[], None]:
        return lambda: ids.extend(source.put([line.encode()]) for line in LINES[part::3])

    assert in_threads(*map(produce, range(3))) == []
    run("topology", source, sink, settings)
    assert counted(sink) == Counter(LINES)
    assert sorted(number for one in ids for number in one) == list(range(len(LINES)))


def test_topologies_on_two_threads_share_a_sinks_settings_and_database(settings: Settings, database: Database) -> None:
    sources = [MemorySource("lines", [line.encode() for line in LINES[n::2]]) for n in range(2)]
    raised = in_threads(
        *(lambda n=n: run(f"topology{n}", sources[n], PostgresSink(f"rows{n}"), settings) for n in range(2))
    )
    assert raised == []
    with connect(database, application_name="tests", autocommit=True) as connection:
        rows = connection.execute("select line from rows0 union all select line from rows1").fetchall()
    assert Counter(line for (line,) in rows) == Counter(LINES)


def fork_cases() -> Sequence[Any]:
    memory = MemorySource("lines", [b"m"])
    iterator = IteratorSource("lines", [b"m"])
    store, sink = MemoryStore(), MemorySink("rows")

    def commit() -> None:
        with sink.store.guard:
            pass

    return [
        pytest.param(lambda: memory.put([b"m"]), "source lines lies in the memory", id="MemorySource.put"),
        pytest.param(lambda: memory.subscribe("s", 1), "source lines lies in the memory", id="MemorySource.subscribe"),
        pytest.param(lambda: iterator.subscribe("s", 1), "lies in the memory", id="IteratorSource.subscribe"),
        pytest.param(lambda: store.multi_put({b"k": b"v"}), "a MemoryStore lies in the memory", id="MemoryStore"),
        pytest.param(commit, "a memory sink's store lies in the memory", id="MemorySink"),
    ]


@pytest.mark.parametrize(("work", "said"), fork_cases())
def test_a_fork_is_refused_what_it_would_do_to_a_copy(work: Callable[[], object], said: str) -> None:
    refused = in_fork(work)
    assert refused is not None
    assert said in refused
    work()  # the parent's own goes on


def test_a_fork_may_run_a_topology_of_its_parent(settings: Settings, database: Database, tmp_path: Path) -> None:
    queue, sink = of_queue(settings, tmp_path), PostgresSink("rows")
    assert in_fork(lambda: run("topology", queue, sink, settings)) is None
    run("topology", queue, sink, settings)
    queue.close()
    with connect(database, application_name="tests", autocommit=True) as connection:
        rows = connection.execute("select line from rows").fetchall()
    assert Counter(line for (line,) in rows) == Counter(LINES)


def test_control_a_fork_writes_to_a_copy() -> None:
    table = pa.table({"n": [1]})
    store = MemorySink("rows").store

    def write() -> None:
        store.content = table

    assert in_fork(write) is None
    assert store.content is None
