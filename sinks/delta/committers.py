"""The two committers of a Delta table behind one face: who is to write, alone where Spark does, and how rows are undone."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager

from deltalake import DeltaTable

from stormproof.core.base.clock import SystemClock
from stormproof.core.base.errors import SinkRefused
from stormproof.core.contract.sink import SinkInput, SinkMode
from stormproof.sinks.delta.delta_rs import adopt_files
from stormproof.sinks.delta.features import AskedCommitter, Committer, TableFacts, choose
from stormproof.sinks.delta.log import DeltaLog, Label
from stormproof.sinks.delta.newest_version import TableHead
from stormproof.sinks.delta.rewrite import restore
from stormproof.sinks.delta.spark import SparkCommitter, alone, make_lock
from stormproof.sinks.delta.table import committer_of


class Committers:
    """Who writes rows of one kind to one table; `asked` is what the user said."""

    def __init__(self, log: DeltaLog, where: str, input_: SinkInput, asked: AskedCommitter) -> None:
        self._log = log
        self._where = where
        self._input = input_
        self._asked: AskedCommitter = asked
        self._clock = SystemClock()
        self._chosen: tuple[tuple[str, int], Committer] | None = None
        self.spark = SparkCommitter(log, where, self._clock)

    def of(self, table: TableHead) -> Committer:
        """Who is to write to a version of the table. Its features are looked at once a version."""
        at = str(table.metadata().id), table.version()
        if self._chosen is None or self._chosen[0] != at:
            self._chosen = at, self.require_served(committer_of(table, self._input, self._asked))
        return self._chosen[1]

    def of_files(self, table: DeltaTable) -> Committer:
        """Who is to rewrite the table's files: what an upsert needs Spark for, this does, too."""
        if self._asked == "spark":
            return Committer.SPARK
        choice = choose(TableFacts.of(table), SinkMode.UPSERT)
        return self.require_served(Committer.SPARK if choice.refused else choice.committer)

    def require_served(self, committer: Committer) -> Committer:
        """The committer, if it reaches the table.

        Raises:
            SinkRefused: Spark is to write to a table in an object store.
        """
        if committer is Committer.SPARK and not self._log.files.is_local:
            raise SinkRefused(
                f"{self._where}: the table has features that only Spark writes (docs/delta.md), and Spark commits to "
                "tables in local folders alone; use a table without them"
            )
        return committer

    def alone(self, committer: Committer) -> AbstractContextManager[None]:
        """Keep others of us from committing meanwhile, where Spark writes to the table; see `exclusion`."""
        return self.spark.alone() if committer is Committer.SPARK else alone(self._log, self._where, self._clock)

    def alone_with_lock(self, committer: Committer) -> AbstractContextManager[None]:
        """The same; by delta-rs, too, the lock is made where it is missing, if commits could lose against this one.

        An append reads nothing of the table: it and a rewriting of files cannot lose against each other.
        """
        if committer is Committer.DELTA_RS and self._input.is_by_key:
            make_lock(self._log)
        return self.alone(committer)

    def put_label(self, committer: Committer, table: DeltaTable, label: Label) -> None:
        """Write a version that holds the label alone."""
        if committer is Committer.SPARK:
            self.spark.append(self.spark.no_rows(self._input.schema.names), label)
        else:
            adopt_files(table, [], label.for_delta_rs())

    def restore(self, committer: Committer, table: DeltaTable, version: int, metadata: Mapping[str, str]) -> None:
        """RESTORE the table to a version, in a version with this metadata."""
        if committer is Committer.SPARK:
            self.spark.restore(version, metadata)
        else:
            restore(self._log, table, version, metadata)
