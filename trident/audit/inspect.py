"""Opens a sink for inspection by the ledger's description of it; and tells what each sink holds of a batch.

That is told by the ledger, and where it does not say, by the sink's own record in its store. `status`, `audit behind`,
`audit txn`, `audit message` and the page all say it by this.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import closing
from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum
from functools import partial
from typing import TypeAlias

from stormproof.core.base.errors import CannotTell, StormproofError
from stormproof.core.contract.sink import SinkInput
from stormproof.core.postgres.database import Database
from stormproof.sinks.contract import registry
from stormproof.sinks.contract.protocol import Held, Sink, SinkIdentity, SinkSession
from stormproof.sinks.contract.registry import register_sink
from stormproof.sinks.prepare.staging import Misfits
from stormproof.trident.audit.ledger import TopologyRow
from stormproof.trident.ledger.sink_records import SinkBinding
from stormproof.trident.ledger.tables import SinkWork, Txn
from stormproof.trident.terms.transaction_states import SinkOutcome, TxnState


def register_states() -> None:
    """Register the states that can be opened without their topology's code; may be called again."""
    for kind, module in (("delta-map", "delta"), ("postgres-map", "postgres")):
        register_sink(kind, f"stormproof.trident.state.{module}:described")


SinkOpener: TypeAlias = Callable[[SinkIdentity, SinkBinding], SinkSession]
"""Opens a read-only session of a sink."""


def opener_for(ledger_database: Database) -> SinkOpener:
    """An opener for every registered kind of sink, by the ledger's descriptions."""
    return partial(open_for_inspection, ledger_database=ledger_database)


def open_for_inspection(identity: SinkIdentity, binding: SinkBinding, ledger_database: Database) -> SinkSession:
    """A read-only session: it creates nothing and fences no driver.

    Raises:
        CannotTell: the ledger has no description, or one of a kind that is not registered.
        SinkRefused: the table is gone or cannot be what was written to.
        StoreUnavailable: it cannot be reached.
    """
    sink, input_ = described_sink(binding, ledger_database)
    return sink.inspect(identity, input_)


def described_sink(binding: SinkBinding, ledger_database: Database) -> tuple[Sink, SinkInput]:
    """A sink made from the ledger's description, and its input. The merge functions of a map are not in the description.

    Raises:
        CannotTell: the ledger has no description, or one of a kind that is not registered.
    """
    register_states()
    return registry.described_sink(binding.sink, binding.target, binding.description, ledger_database)


def committer_of(binding: SinkBinding, ledger_database: Database) -> str | None:
    """Who writes to a sink's table, where that depends on the table; see `Sink.committed_by`."""
    try:
        sink, input_ = described_sink(binding, ledger_database)
    except CannotTell:
        return None
    return sink.committed_by(input_)


class Has(StrEnum):
    """Whether a sink holds a batch; append-only."""

    HAS = "has_it"
    HAS_NOT = "has_it_not"
    NOT_ASKED = "not_asked"
    """The ledger does not say, and the store did not tell."""


@dataclass(frozen=True, slots=True)
class Holding:
    """What a sink holds of a batch. `at` is the commit's own time, by the sink's store; None: the store does not say."""

    sink: str
    target: str
    has: Has
    at: datetime | None = None
    rejected: int = 0
    """Rows that its table refused, and that it holds the batch without."""
    why: str | None = None
    """Why it was not asked, or has it not."""
    version: int | None = None
    """The table's version that has it, where the ledger knows it."""


class Holdings:
    """Tells what the sinks of a topology hold. A store is asked only where the ledger does not say, and once.

    No store is asked for a batch that a driver is committing (`driver_answers`): what it told would be old at once. Without
    an `opener` none is asked at all.
    """

    def __init__(
        self, row: TopologyRow, sinks: Iterable[SinkBinding], opener: SinkOpener | None, *, driver_answers: bool
    ) -> None:
        self._row = row
        self._bindings = {binding.sink: binding for binding in sinks}
        self._opener = opener
        self.driver_answers = driver_answers
        self._last = dict[str, Held | None]()
        self._failed = dict[str, StormproofError]()

    def of(self, txn: Txn, work: SinkWork) -> Holding:
        """What a sink holds of a batch; of what its table refused only the number of rows."""
        binding = self._bindings.get(work.sink)
        told = partial(Holding, work.sink, "" if binding is None else binding.target)
        if work.outcome is SinkOutcome.SKIPPED:
            return told(Has.HAS_NOT, why="an operator gave its rows up there")
        if work.committed_at is not None:
            return told(Has.HAS, work.committed_at, version=work.version)
        if self._opener is None:
            return told(Has.NOT_ASKED, why=f"see: stormproof audit txn {self._row.name} {txn.txid}")
        if self.driver_answers and txn.state in (TxnState.OPEN, TxnState.PREPARED):
            return told(Has.NOT_ASKED, why="a driver is committing it")
        try:
            return told(*self._asked(txn.txid, work))
        except (StormproofError, OSError) as error:
            return told(Has.NOT_ASKED, why=str(error))

    def of_message(self, txn: Txn, work: SinkWork) -> Holding:
        """What a sink holds of one message of a batch, whose rejects are on record once it is committed."""
        found = self.of(txn, work)
        rejected = found.rejected or work.left_out or Misfits.of(work.files)
        if found.has is not Has.HAS or txn.state is TxnState.COMMITTED or not rejected:
            return found
        why = "it has the batch, without rows that it rejected: of which messages is on record once the batch is committed"
        return Holding(work.sink, found.target, Has.NOT_ASKED, why=why)

    def _asked(self, txid: int, work: SinkWork) -> tuple[Has, datetime | None, int, str | None]:
        """The fields of a `Holding` by the sink's own record."""
        held = self._held(work.sink)
        if held is not None and held.txid > txid:
            return self._before_the_last(txid, work.sink)
        if held is None or held.txid < txid:
            return Has.HAS_NOT, None, 0, None
        if held.digest not in (None, work.digest):
            return Has.HAS_NOT, None, 0, f"by its record txid {txid} is of another content"
        return Has.HAS, held.at, held.rejected, None

    def _held(self, sink: str) -> Held | None:
        """The last batch of a sink, by its store."""
        if sink in self._failed:
            raise self._failed[sink]
        if sink not in self._last:
            try:
                with closing(self._open(sink)) as session:
                    if not session.tells_position:
                        raise CannotTell("it keeps no record of the txids that it took", sink=sink)
                    self._last[sink] = session.held()
            except StormproofError as error:
                self._failed[sink] = error
                raise
        return self._last[sink]

    def _before_the_last(self, txid: int, sink: str) -> tuple[Has, datetime | None, int, str | None]:
        with closing(self._open(sink)) as session:
            report = session.evidence(txid, txid)
        for entry in report.entries:
            return (Has.HAS_NOT if entry.gone else Has.HAS), entry.at, entry.rejected, entry.problem
        if report.truncated:
            raise CannotTell("its own record does not reach back so far", sink=sink)
        return Has.HAS_NOT, None, 0, None

    def _open(self, sink: str) -> SinkSession:
        assert self._opener is not None
        if sink not in self._bindings:
            raise CannotTell(f"the ledger knows no table behind sink {sink!r}", sink=sink)
        return self._opener(SinkIdentity(self._row.name, self._row.incarnation, sink), self._bindings[sink])
