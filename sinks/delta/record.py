"""What a Delta table's log holds for one sink: its position, its evidence, and the files of its last commit."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from deltalake import DeltaTable

from stormproof.core.base.errors import PositionMismatch, SinkRefused
from stormproof.core.contract.sink import SinkInput
from stormproof.sinks.contract.protocol import (
    EvidenceReport,
    Held,
    PreparedTransaction,
    SinkIdentity,
    SinkProblem,
    StoreRecord,
)
from stormproof.sinks.delta.evidence import Position, evidence_of, find_position, lost_files, tail_since
from stormproof.sinks.delta.log import APPLICATION, DeltaLog, OurCommit, live_files
from stormproof.sinks.delta.newest_version import NewestTable, TableHead


class TableRecord(StoreRecord):
    """A Delta table's log as one sink or map reads it."""

    def __init__(self, path: str, identity: SinkIdentity, input_: SinkInput) -> None:
        self._identity = identity
        self.input = input_
        self.log = DeltaLog(path)
        self.where = f"sink {identity.sink!r} ({path})"
        self._application = identity.application_id
        self._newest = NewestTable(self.log, self.where)
        self._table_id = ""

    @property
    def identity(self) -> SinkIdentity:
        """Under what name it keeps its evidence."""
        return self._identity

    @property
    def table_id(self) -> str:
        """The table's own id, made when it is created."""
        return self._table_id

    def load(self) -> DeltaTable:
        """The table at its newest version; see `NewestTable.load`."""
        return self._newest.load()

    def head(self) -> TableHead:
        """The newest version without its files; see `NewestTable.head`."""
        return self._newest.head()

    def close(self) -> None:
        """Load the table anew the next time: there is no connection to let go."""
        self._newest.forget()

    def writers(self) -> Iterator[str]:
        """The application of each version, newest first, as far back as the log goes; empty for other writers' versions."""
        for entry in self.log.back_from(self._newest.load().version()):
            yield str(entry.info.get(APPLICATION, ""))

    def position(self, table: TableHead, *, same_table: bool) -> Position | None:
        """What the table holds for this sink; None: no txid.

        Raises:
            PositionMismatch: `same_table` is asked for, and it is another table than the one that was opened, or a RESTORE
                took its last txid's rows back.
        """
        if same_table and str(table.metadata().id) != self._table_id:
            raise PositionMismatch(
                f"{self.where}: the table is now {table.metadata().id}, it was {self._table_id} when it was opened; "
                f"inspect with: stormproof audit verify {self.identity.topology}",
                table_id=str(table.metadata().id),
                expected=self._table_id,
            )
        found = find_position(self.log, table, self._application)
        if same_table and found is not None and found.commit is not None and found.restored is not None:
            raise PositionMismatch(
                f"{self.where}: version {found.restored} restored the table to before version {found.commit.version}, "
                f"which holds txid {found.txid}: its rows are gone; inspect with: stormproof audit verify "
                f"{self.identity.topology}. RESTORE the table to version {found.restored - 1}; or give the rows up, on "
                f"record: stormproof ledger adopt-table {self.identity.topology} {self.identity.sink} --accept-loss",
                txid=found.txid,
                version=found.restored,
            )
        return found

    def other_incarnations(self) -> tuple[str, ...]:
        """Other lives that committed to the table, as far back as the log goes."""
        return self.identity.other_lives(self.writers())

    def held(self) -> Held | None:
        """The last transaction in the table's log, read afresh.

        Raises:
            PositionMismatch: a RESTORE took its rows back, or this is another table.
            SinkRefused: the table is gone.
            StoreUnavailable: it cannot be read.
        """
        position = self.position(self._newest.load(), same_table=True)
        return None if position is None else position.held

    def evidence(self, first: int, last: int | None) -> EvidenceReport:
        """What the table's log says of each txid, and of its files since."""
        return evidence_of(
            self.log,
            self._newest.load(),
            self._application,
            table_id=self._table_id,
            fold=self.input.is_by_key,
            first=first,
            last=last,
        )

    def evidence_since(self, first: int) -> EvidenceReport:
        """What the log says of the txids from `first` on, read back to the one before."""
        table = self._newest.load()
        tail = tail_since(self.log, table.version(), self._application, first)
        if tail is None:
            return replace(self.evidence(first, None), looks_back=True)
        return evidence_of(
            self.log,
            table,
            self._application,
            table_id=self._table_id,
            fold=self.input.is_by_key,
            first=first,
            last=None,
            tail=tail,
        )

    def count_rows(self, limit: int) -> int:
        """The number of rows in the newest version by the statistics of its files; `limit` where a file has none."""
        counted = self._newest.load().get_add_actions(flatten=True).column("num_records").to_pylist()
        return limit if None in counted else min(sum(counted), limit)

    def _require_live(self, position: Position | None) -> None:
        """Refuse a commit whose live files are not all on disk: a power loss may take them and leave the log."""
        if position is None or position.commit is None:
            return
        lost = self._lost_of(position.commit)
        if lost:
            way_on = (
                f"`retry` takes version {position.commit.version} back, as long as it is the newest, and merges the batch "
                "again from its prepared files"
                if self._is_copied(position.commit)
                else "put the file back"
            )
            raise SinkRefused(
                f"{self.where}: file lost: version {position.commit.version} holds txid {position.txid}, but "
                f"{'; '.join(lost[:5])}; it was lost after the commit; {way_on}",
                problem=SinkProblem.FILE_LOST,
                files=list(lost),
            )

    def _lost_of(self, commit: OurCommit) -> list[str]:
        entry = self.log.entry(commit.version)
        if entry is None:
            return []
        # Adopted files were synced before they were prepared, a committer's own only after its commit: so these are decoded.
        decode = self.log.files.is_local and self._is_copied(commit)
        return lost_files(self.log, entry, self.log.tail(self._newest.load().version()), decode=decode)

    def _is_copied(self, commit: OurCommit) -> bool:
        """Whether a committer wrote files of its own, instead of adopting the prepared ones."""
        entry = self.log.entry(commit.version)
        return self.input.is_by_key or (entry is not None and entry.is_by_spark)

    def has_adopted(self, transaction: PreparedTransaction) -> bool:
        """Whether the files of a transaction are the table's own; True where its commit is not the last one, or is gone."""
        position = self.position(self._newest.load(), same_table=False)
        if position is None or position.commit is None or position.txid != transaction.txid:
            return True
        entry = self.log.entry(position.commit.version)
        return entry is None or not {f.path for f in entry.added}.isdisjoint(f.path for f in transaction.files)

    def adopted(self) -> frozenset[str]:
        """The files that are live, or that a version still in the log has added: they are the table's, whatever the ledger
        says.
        """
        if self.input.is_by_key:
            return frozenset()
        logged = {file.path for v in self.log.versions() if (e := self.log.entry(v)) is not None for file in e.added}
        return frozenset(live_files(self._newest.load()).keys() | logged)
