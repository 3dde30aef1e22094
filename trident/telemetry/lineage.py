"""Tells of batches: one in so many seconds with the sums of those between, and every one that fails.

The id of a batch's run comes from the topology's incarnation and the txid alone: it is the same in every attempt.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from importlib.metadata import version
from typing import Any, Final

import attr
from openlineage.client.event_v2 import InputDataset, Job, OutputDataset, Run, RunEvent, RunState
from openlineage.client.facet_v2 import RunFacet, error_message_run, job_type_job, parent_run
from openlineage.client.generated.dataset_version_dataset import DatasetVersionDatasetFacet
from openlineage.client.generated.output_statistics_output_dataset import OutputStatisticsOutputDatasetFacet
from openlineage.client.generated.schema_dataset import SchemaDatasetFacet, SchemaDatasetFacetFields

from stormproof.core.base.clock import Clock
from stormproof.core.base.dataset import DatasetName
from stormproof.core.base.message import Guarantee
from stormproof.core.contract.source import Slice
from stormproof.trident.terms.observers import CommittedBatch, Observer
from stormproof.trident.terms.transaction_states import AttemptOutcome, TxnCause, TxnState

PRODUCER: Final = f"urn:stormproof:{version('stormproof')}"
NAMESPACE: Final = uuid.UUID("6f1c0f6e-6a86-5f39-9b8e-2d7a3b6f4c51")
"""Of the ids of runs; never changed, else a replay would tell of another run."""


@attr.define
class StormproofRunFacet(RunFacet):
    """What only Stormproof knows of a run; its schema is `trident/telemetry/StormproofRunFacet.json`."""

    txid: int
    incarnation: str
    epoch: int
    guarantee: str
    attempts: int
    suppressed: list[str]
    messages: int
    firstTxid: int  # noqa: N815 - as OpenLineage writes names
    batches: int

    @staticmethod
    def _get_schema() -> str:
        return "urn:stormproof:openlineage:StormproofRunFacet:1#/$defs/StormproofRunFacet"


@dataclass(frozen=True, slots=True)
class OutputTable:
    """A sink's table: its name, and the columns that it gets."""

    dataset: DatasetName
    columns: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True, slots=True)
class WrittenToSink:
    """What a run wrote to one sink; `suppressed`: the sink held it already."""

    rows: int
    bytes: int
    version: str | None = None
    suppressed: bool = False


@dataclass(frozen=True, slots=True)
class Told:
    """One topology's run of a driver, and what it reads and writes."""

    namespace: str
    topology: str
    incarnation: str
    epoch: int
    guarantee: str
    streaming: bool
    inputs: tuple[DatasetName, ...]
    outputs: Mapping[str, OutputTable]


@dataclass(frozen=True, slots=True)
class Batch:
    """A batch to tell of; `first_txid` and `batches` are of those that it sums up, too."""

    txid: int
    attempts: int = 1
    messages: int = 0
    written: Mapping[str, WrittenToSink] = field(default_factory=dict[str, WrittenToSink])
    first_txid: int | None = None
    batches: int = 1
    error: str = ""


def run_id(incarnation: str, txid: int) -> str:
    """The id of a batch's run: the same in every attempt, in every epoch, and after every crash."""
    return str(uuid.uuid5(NAMESPACE, f"{incarnation}/{txid}"))


def driver_run_id(incarnation: str, epoch: int) -> str:
    """The id of a driver's own run, the parent of its batches'."""
    return str(uuid.uuid5(NAMESPACE, f"{incarnation}/epoch/{epoch}"))


def event_of(told: Told, batch: Batch, state: RunState, at: datetime) -> RunEvent:
    """The event that a batch's run began, or ended in this way."""
    facets: dict[str, Any] = {
        "parent": _by_us(
            parent_run.ParentRunFacet,
            run=parent_run.Run(runId=driver_run_id(told.incarnation, told.epoch)),
            job=parent_run.Job(namespace=told.namespace, name=f"{told.topology}.driver"),
        ),
        "stormproof": _by_us(
            StormproofRunFacet,
            txid=batch.txid,
            incarnation=told.incarnation,
            epoch=told.epoch,
            guarantee=told.guarantee,
            attempts=batch.attempts,
            suppressed=sorted(sink for sink, one in batch.written.items() if one.suppressed),
            messages=batch.messages,
            firstTxid=batch.txid if batch.first_txid is None else batch.first_txid,
            batches=batch.batches,
        ),
    }
    if batch.error:
        facets["errorMessage"] = _by_us(
            error_message_run.ErrorMessageRunFacet, message=batch.error, programmingLanguage="PYTHON"
        )
    processing = "STREAMING" if told.streaming else "BATCH"
    job_type = _by_us(job_type_job.JobTypeJobFacet, processingType=processing, integration="STORMPROOF", jobType="JOB")
    ended = state is not RunState.START
    return RunEvent(
        eventType=state,
        eventTime=at.isoformat(),
        producer=PRODUCER,
        run=Run(runId=run_id(told.incarnation, batch.txid), facets=facets),
        job=Job(namespace=told.namespace, name=told.topology, facets={"jobType": job_type}),
        inputs=[InputDataset(namespace=one.namespace, name=one.name) for one in told.inputs],
        outputs=[_output(one, batch.written.get(sink) if ended else None) for sink, one in told.outputs.items()],
    )


def _by_us(facet: Callable[..., Any], **fields: Any) -> Any:
    """A facet with its producer, for which type checkers know no parameter."""
    return facet(producer=PRODUCER, **fields)


def _output(output: OutputTable, written: WrittenToSink | None) -> OutputDataset:
    facets: dict[str, Any] = {}
    output_facets: dict[str, Any] = {}
    if output.columns:
        facets["schema"] = _by_us(SchemaDatasetFacet, fields=_fields(output.columns))
    if written is not None:
        if written.version is not None:
            facets["version"] = _by_us(DatasetVersionDatasetFacet, datasetVersion=written.version)
        output_facets["outputStatistics"] = _by_us(
            OutputStatisticsOutputDatasetFacet, rowCount=written.rows, size=written.bytes
        )
    return OutputDataset(
        namespace=output.dataset.namespace, name=output.dataset.name, facets=facets, outputFacets=output_facets
    )


def _fields(columns: Sequence[tuple[str, str]]) -> list[SchemaDatasetFacetFields]:
    return [SchemaDatasetFacetFields(name=name, type=type_) for name, type_ in columns]


@dataclass(eq=False)
class LineageReporter(Observer):
    """Makes events of what a run's steps tell. `emit` takes each at once; `merged` is told of each batch that is summed up.

    A run that was begun is always ended, unless its driver dies: then recovery ends it, under the same id.
    """

    told: Told
    emit: Callable[[Any], None]
    clock: Clock
    interval_s: float
    error_texts: bool = False
    merged: Callable[[], None] = lambda: None
    _sent_s: float | None = None
    _opened: dict[int, datetime] = field(default_factory=dict[int, datetime])
    _begun: set[int] = field(default_factory=set[int])
    _attempts: dict[int, int] = field(default_factory=dict[int, int])
    _sums: Batch | None = None

    def opened(self, txid: int, guarantee: Guarantee, slice_: Slice) -> None:
        """See `Observer.opened`."""
        self._opened[txid] = self.clock.now()
        if self._is_due():
            self._begin(txid)

    def attempt_ended(self, txid: int, attempt: int, outcome: AttemptOutcome) -> None:
        """See `Observer.attempt_ended`."""
        self._attempts[txid] = attempt + 1

    def committed(self, batch: CommittedBatch) -> None:
        """See `Observer.committed`."""
        written = {
            sink: WrittenToSink(end.rows - end.rejected_rows, end.bytes, end.version, end.suppressed)
            for sink, end in batch.sinks.items()
        }
        attempts = self._attempts.get(batch.txid, 1)
        self._sums = summed(self._sums, Batch(batch.txid, attempts, batch.messages, written))
        # What an earlier driver opened was perhaps begun there: it is ended here.
        if batch.txid in self._begun or batch.txid not in self._opened or self._is_due():
            self._complete()
        else:
            self.merged()
        self._forget(batch.txid)

    def given_up(self, txid: int, state: TxnState, cause: TxnCause, reason: str) -> None:
        """See `Observer.given_up`. The reason may quote a message: it is told where that was asked for."""
        self._fail(Batch(txid, self._attempts.get(txid, 1), error=self._said(cause, reason)), RunState.ABORT)
        self._forget(txid)

    def blocked(self, txid: int, sink: str, cause: TxnCause, reason: str) -> None:
        """See `Observer.blocked`."""
        self._fail(Batch(txid, self._attempts.get(txid, 1), error=self._said(cause, reason)), RunState.FAIL)

    def close(self) -> None:
        """Tell of what was summed up and not told yet."""
        if self._sums is not None:
            self._complete()

    def _said(self, cause: TxnCause, reason: str) -> str:
        return f"{cause.value}: {reason}" if self.error_texts and reason else cause.value

    def _is_due(self) -> bool:
        return self._sent_s is None or self.clock.monotonic_s() - self._sent_s >= self.interval_s

    def _begin(self, txid: int) -> None:
        self._sent_s = self.clock.monotonic_s()
        self._begun.add(txid)
        at = self._opened.get(txid) or self.clock.now()
        self.emit(event_of(self.told, Batch(txid), RunState.START, at))

    def _complete(self) -> None:
        assert self._sums is not None
        batch, self._sums = self._sums, None
        self._fail(batch, RunState.COMPLETE)

    def _fail(self, batch: Batch, state: RunState) -> None:
        if batch.txid not in self._begun:
            self._begin(batch.txid)
        self.emit(event_of(self.told, batch, state, self.clock.now()))
        self._begun.discard(batch.txid)

    def _forget(self, txid: int) -> None:
        self._opened.pop(txid, None)
        self._attempts.pop(txid, None)
        self._begun.discard(txid)


def summed(sums: Batch | None, batch: Batch) -> Batch:
    """A batch with the sums of those before it that were not told of; its versions are the newest."""
    if sums is None:
        return batch
    written = dict(batch.written)
    for sink, before in sums.written.items():
        now = written.get(sink)
        written[sink] = (
            before
            if now is None
            else replace(
                now,
                rows=before.rows + now.rows,
                bytes=before.bytes + now.bytes,
                suppressed=before.suppressed or now.suppressed,
            )
        )
    return replace(
        batch,
        messages=sums.messages + batch.messages,
        written=written,
        first_txid=sums.txid if sums.first_txid is None else sums.first_txid,
        batches=sums.batches + batch.batches,
    )
