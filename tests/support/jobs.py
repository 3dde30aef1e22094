"""One job, run by any engine over lines of text: what came of it, row by row, and the acker's verdict."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from stormproof.core.base.message import Guarantee, MessageFailure
from stormproof.core.contract.sink import SinkWriter, files_of
from stormproof.core.contract.source import Lease, Limit, SliceReader
from stormproof.core.engine.protocol import Engine
from stormproof.core.graph.plan import compile_topology
from stormproof.core.graph.topology import TopologyGraph
from stormproof.core.pending.memory import MemorySliceReader
from stormproof.core.pending.rows import expectation_of
from stormproof.core.source.memory import MemorySource
from stormproof.core.task.job import Job
from stormproof.core.tracking.verdict import JobReport, mismatches
from stormproof.sinks.contract.protocol import SinkIdentity
from stormproof.sinks.prepare.staging import prepared_batches
from stormproof.sinks.stores.memory import MemorySink

SEED = 42
FIRST_ID = 100


@dataclass(frozen=True)
class Ran:
    report: JobReport
    rows: Mapping[str, list[dict[str, object]]]
    mismatches: tuple[str, ...]

    def sorted(self, sink: str) -> list[tuple[object, ...]]:
        """A sink's rows as tuples, sorted."""
        return sorted(tuple(row.values()) for row in self.rows[sink])

    def failed(self) -> dict[int, str]:
        """The failed messages by their place in the input, with reason and component."""
        return {f.id - FIRST_ID: f"{f.reason} at {f.component}" for f in self.report.failures}

    def late(self) -> dict[int, str]:
        """The same of those that failed late."""
        return {f.id - FIRST_ID: f"{f.reason} at {f.component}" for f in self.report.late}

    def lost(self) -> list[int]:
        """The places of the messages whose own verdict was not "complete"."""
        return sorted(f.id - FIRST_ID for f in self.report.lost)


def source(*payloads: bytes, schema: str = "line string") -> MemorySource:
    return MemorySource("lines", payloads, schema=schema)


def readers_of(payloads: Sequence[bytes], parts: int = 2) -> tuple[SliceReader, ...]:
    ids = [FIRST_ID + i for i in range(len(payloads))]
    return tuple(MemorySliceReader(tuple(ids[p::parts]), tuple(payloads[p::parts])) for p in range(parts))


def run_job(
    engine: Engine,
    topology: TopologyGraph,
    payloads: Sequence[bytes],
    staging: Path,
    *,
    readers: tuple[SliceReader, ...] | None = None,
    tracked: bool = True,
    excluded: frozenset[int] = frozenset(),
    per_message: bool = False,
    named_max: int | None = None,
    wrap: Callable[[SinkWriter], SinkWriter] = lambda writer: writer,
) -> Ran:
    """Run one attempt of a topology whose sinks are memory sinks with this staging folder."""
    plan = compile_topology(topology, Guarantee.EXACTLY_ONCE)
    sinks = [sink for sink in topology.sinks if isinstance(sink, MemorySink)]
    writers = {
        s.name: wrap(s.open(SinkIdentity(topology.name, "life", s.name), plan.sinks[s.name], epoch=1).writer())
        for s in sinks
    }
    readers = readers or readers_of(payloads, engine.parallelism)
    messages = len(payloads)
    job = Job(
        *(plan, readers, writers, "life", 1, 1, SEED, tracked, excluded, per_message),
        messages=messages,
        named_max=named_max,
    )
    report = engine.run(job)
    rows = {
        s.name: [row for b in prepared_batches(str(staging), files_of(report.files, s.name)) for row in b.to_pylist()]
        for s in sinks
    }
    ids = [FIRST_ID + i for i in range(len(payloads)) if FIRST_ID + i not in excluded]
    return Ran(report, rows, mismatches(report, expectation_of(ids, SEED), tracked=tracked))


@dataclass(frozen=True)
class Batch:
    """All messages of a topology's spouts, run as one batch. Messages go by the ids that their sources show."""

    report: JobReport
    rows: Mapping[str, list[dict[str, object]]]
    mismatches: tuple[str, ...]
    failed: Mapping[str, str]
    late: Mapping[str, frozenset[str]]
    lost: frozenset[str]
    together: frozenset[frozenset[str]]

    def sorted(self, sink: str) -> list[tuple[object, ...]]:
        """A sink's rows as tuples, sorted."""
        return sorted((tuple(row.values()) for row in self.rows[sink]), key=repr)


def run_all(
    engine: Engine,
    topology: TopologyGraph,
    staging: Path,
    *,
    tracked: bool = True,
    per_message: bool = False,
    excluded: frozenset[int] = frozenset(),
    wrap: Callable[[SinkWriter], SinkWriter] = lambda writer: writer,
) -> Batch:
    """Open everything that is in the spouts' sources as one slice, and run one attempt of it.

    The sinks are memory sinks with this staging folder; a message of one of several spouts is shown as `spout:id`.
    """
    plan = compile_topology(topology, Guarantee.AT_LEAST_ONCE)
    source_ = topology.source
    source_.subscribe("tests", 1)
    slice_ = source_.open(Lease("life/1", 1), Limit(1_000_000), SEED)
    assert slice_ is not None
    sinks = [sink for sink in topology.sinks if isinstance(sink, MemorySink)]
    writers = {
        s.name: wrap(s.open(SinkIdentity(topology.name, "life", s.name), plan.sinks[s.name], epoch=1).writer())
        for s in sinks
    }
    readers = source_.readers(slice_, engine.parallelism)
    messages = slice_.expected.messages
    job = Job(plan, readers, writers, "life", 1, 1, SEED, tracked, excluded, per_message, messages=messages)
    report = engine.run(job)
    expected = source_.expect(slice_, SEED, excluded) if excluded else slice_.expected

    def shown(failures: Iterable[MessageFailure]) -> list[tuple[str, str]]:
        return [(source_.shown_id(f.id, f.origin), f"{f.reason} at {f.component}") for f in failures]

    late: dict[str, set[str]] = {}
    for id_, what in shown(report.late):
        late.setdefault(id_, set()).add(what)
    return Batch(
        report,
        {
            s.name: [
                row for b in prepared_batches(str(staging), files_of(report.files, s.name)) for row in b.to_pylist()
            ]
            for s in sinks
        },
        mismatches(report, expected, tracked=tracked, per_message=per_message),
        dict(shown(report.failures)),
        {id_: frozenset(whats) for id_, whats in late.items()},
        frozenset(id_ for id_, _ in shown(report.lost)),
        frozenset(frozenset(source_.shown_id(id_, 0) for id_ in pair) for pair in report.together.tolist()),
    )
