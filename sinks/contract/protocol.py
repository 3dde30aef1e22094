"""What a sink promises: each transaction once, in txid order, with evidence of its own. The rule is `decide`.

What only some sinks support, so that a caller has to know it before it acts, is a `Supports...` of its own, for which the
caller tests with `isinstance`. An ability whose absence has a natural answer (nothing, None) is instead a method of the
protocol with that default.
"""

from __future__ import annotations

import base64
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from enum import StrEnum
from typing import Final, Protocol, runtime_checkable

from stormproof.core.base.errors import CannotTell, Json, PositionMismatch
from stormproof.core.contract.sink import PreparedFile, SinkInput, SinkSpec, SinkWriter, TableKey
from stormproof.core.postgres.database import Database
from stormproof.sinks.contract.preview import TableAction, TablePreview

PROBLEM: Final = "problem"
"""Name of the detail of a `SinkRefused` that has a `SinkProblem`."""


class SinkProblem(StrEnum):
    """What a sink lacks, where its refusal is not about the rows; append-only."""

    FILE_LOST = "file_lost"
    """A file of a prepared or committed transaction is missing, or is not as it was written."""
    TABLE_GONE = "table_gone"
    """There is no table of the sink's name."""
    TOO_MANY_REJECTS = "too_many_rejects"
    """Its table refuses the rows of more messages than may be rejected."""
    MESSAGES_UNKNOWN = "messages_unknown"
    """Its table refuses a row that stands for messages which are not known one by one, as a group's result does."""


@dataclass(frozen=True, slots=True)
class SinkIdentity:
    """The name under which a sink keeps its evidence."""

    topology: str
    incarnation: str
    sink: str

    @property
    def application_id(self) -> str:
        """The Delta transaction identifier's application id."""
        return f"stormproof/{self.topology}/{self.incarnation}/{self.sink}"

    def other_life(self, application_id: str) -> str | None:
        """The other life that an application id names: ``INCARNATION`` of this topology, ``NAME/INCARNATION`` of another.

        None for this very life, and for ids that are not Stormproof's.
        """
        match application_id.split("/"):
            case ["stormproof", topology, incarnation, *sink] if sink:
                return self.life_of(topology, incarnation)
            case _:
                return None

    def other_lives(self, application_ids: Iterable[str]) -> tuple[str, ...]:
        """The other lives that application ids name, each once and in order; see `other_life`."""
        found = {self.other_life(application_id) for application_id in application_ids}
        return tuple(sorted(life for life in found if life is not None))

    def life_of(self, topology: str, incarnation: str) -> str | None:
        """A topology's life as it is named to this one; None where it is this very life."""
        if topology != self.topology:
            return f"{topology}/{incarnation}"
        return None if incarnation == self.incarnation else incarnation


@dataclass(frozen=True, slots=True)
class PreparedTransaction:
    """What a sink is to commit: txid N, the txid PREV that it must hold now (None: none yet), and the prepared files.

    `rejects_max` is the number of messages that the sink may reject in it, if its table refuses their rows. None: one
    refused row refuses the transaction. A sink that cannot leave out rows ignores it.
    """

    txid: int
    previous: int | None
    digest: str
    rows: int
    files: tuple[PreparedFile, ...]
    rejects_max: int | None = None
    of_groups: bool = False
    """Its rows stand for all of the messages that they name. A row that the table refuses is not left out with its messages'
    other rows, which stand for further messages: it refuses the transaction, with `GroupsRefused`."""

    @property
    def superseded(self) -> int:
        """Rows that are in no file, since a file has a later one of their key."""
        return sum(file.superseded for file in self.files)


@dataclass(frozen=True, slots=True)
class Held:
    """The last transaction that a sink holds, by its own evidence. `digest` None: the evidence has expired.

    `at` is when the sink took it, by its store's clock, and `rejected` how many of its rows the table refused. They are no
    part of what is held: two are equal without them.
    """

    txid: int
    digest: str | None
    at: datetime | None = field(default=None, compare=False)
    rejected: int = field(default=0, compare=False)


class CommitOutcome(StrEnum):
    """What a commit found."""

    APPLIED = "applied"
    ALREADY_HELD = "already_held"
    """The sink held this very transaction: nothing was applied again, a duplicate was suppressed."""


@dataclass(frozen=True, slots=True)
class RefusedRow:
    """One row that the table does not get: file, row number in it, the row as JSON, and why. No SQLSTATE: not by an error of
    Postgres. A row number below 0: it is in no file of what was committed, which has nothing of its messages.

    `messages` are number and origin of each message that anchors it; none where no message does, or where a group's
    messages are not known one by one.
    """

    file: str
    row: int
    text: str
    sqlstate: str | None
    error: str
    messages: tuple[tuple[int, int], ...] = ()
    goes_with_others: bool = False
    """The table would take it: it is left out since another row of its message is refused."""


@dataclass(frozen=True, slots=True)
class CommitResult:
    """What became of a transaction at a sink, by the sink's own record: asked again after a crash, it says the same."""

    outcome: CommitOutcome
    superseded: int = 0
    """Rows of an upsert that changed nothing: the table, or the batch itself, has a later one of their key."""
    refused: tuple[RefusedRow, ...] = ()
    """Rows that the table refused one by one, with the other rows of their messages; it has all others."""
    dropped: int = 0
    """Rows that the table's own triggers dropped without an error."""
    changed: tuple[str, ...] = ()
    """What was changed of the table's columns for it (``schema_contract="evolve"``), each in a few words."""
    version: int | None = field(default=None, compare=False)
    """The table's version that has it; None: the table has no versions, or its own record of this one is gone. It is no
    part of what became of the transaction, so two results are equal without it."""
    at: datetime | None = field(default=None, compare=False)
    """When the table took it, by its store's clock; None: the store does not say. Likewise no part of what became of it."""

    @property
    def is_suppressed(self) -> bool:
        """Whether the sink held the transaction already: a duplicate was suppressed."""
        return self.outcome is CommitOutcome.ALREADY_HELD


APPLIED: Final = CommitResult(CommitOutcome.APPLIED)
"""Every row was applied."""
ALREADY_HELD: Final = CommitResult(CommitOutcome.ALREADY_HELD)
"""The sink held the transaction with all of its rows."""


@dataclass(frozen=True, slots=True)
class Evidence:
    """One transaction in a sink's own log, for the audit. `problem` names what is wrong with it there, if anything.

    `gone`: by the store's own record the table no longer holds its rows, which only a person's word can settle. `doubt` says
    why it cannot be told whether the table still holds them all.
    """

    txid: int
    digest: str
    rows: int
    problem: str | None = None
    rejected: int = 0
    """Rows that the table refused and that were given up one by one; `rows` counts the others."""

    superseded: int | None = None
    """Rows of an upsert that changed nothing, as in `CommitResult`. `rows` counts those of them that were prepared. None:
    the sink's record does not say how many."""
    superseded_about: bool = False
    """`superseded` is by figures that may count a row twice: those of Spark, where a task ran again."""

    gone: bool = False
    doubt: str | None = None
    dropped: int = 0
    """Rows that the table's own triggers dropped; `rows` counts the others."""

    reinstated: int = 0
    """Rows superseded by a later one that the table refused, which `rows` or `rejected` count beyond those prepared."""
    at: datetime | None = None
    """When the table took it, by its store's clock; None: the store does not say."""


@dataclass(frozen=True, slots=True)
class EvidenceReport:
    """A sink's own log for one identity: its table's id, its entries in log order, and the last txid by its guard.

    `truncated`: retention may have removed older entries; what is missing before the first is then "cannot tell".
    `rows_found`: the number of rows in the table, counted only as far as the entries require; None where they were not
    counted, or where their number proves nothing.
    """

    table_id: str | None
    entries: tuple[Evidence, ...]
    last_txid: int | None
    truncated: bool = False
    problems: tuple[str, ...] = ()
    looks_back: bool = False
    """Of `evidence_since`: what came since changed rows of earlier txids, so that all are to be looked at."""
    rows_found: int | None = None
    uncounted: str | None = None
    """Why a count of the table's rows would prove nothing."""


def least_rows(written: Sequence[int], *, fold: bool) -> int:
    """The least number of rows in a table to which each transaction has `written` so many: a fold adds a key only once."""
    return max(written, default=0) if fold else sum(written)


class StoreRecord(Protocol):
    """What a store itself records of one table for one life: which table it is, whose it is, and what it holds.

    An implementation inherits it. The methods without a default are its own to write.
    """

    @property
    def table_id(self) -> str:
        """What tells this table from another of the same name: it changes when the table is dropped and made again."""
        ...

    def other_incarnations(self) -> tuple[str, ...]:
        """Other lives that wrote to this very table, by the sink's own evidence, named as `SinkIdentity.other_life` does.

        Of this topology's name (its ledger was lost and made anew), and of other topologies (this one was renamed, or two
        share a table): exactly-once is a statement about one life and its table, so a person has to accept it.
        Asked once, before a table is used for the first time: its cost may grow with the table's log.
        """
        ...

    def held(self) -> Held | None:
        """The last transaction that the sink holds, read afresh."""
        ...

    def evidence(self, first: int, last: int | None) -> EvidenceReport:
        """The sink's own log of txids from `first` to `last`."""
        ...

    def evidence_since(self, first: int) -> EvidenceReport:
        """The same from txid `first` on, as cheaply as the store allows: earlier txids were looked at before."""
        return self.evidence(first, None)

    @property
    def store_key(self) -> TableKey | None:
        """Equal for two that share one store, where only the open store can tell; None: not known."""
        return None

    def claim(self, accepted: Collection[str]) -> tuple[str, ...]:
        """Mark the table in its own store as this life's, unless it is already; a store without such marks does nothing.

        Returns the lives that have marked it and are not `accepted`, named as `SinkIdentity.other_life` does; where there
        are any, nothing is marked. Of several lives that claim one table at the same instant one succeeds.
        """
        return ()

    def release(self) -> bool:
        """Remove the mark; whether there was one. The caller has checked that nothing was committed."""
        return False

    def restore_lost(self, transaction: PreparedTransaction) -> str | None:
        """Undo this transaction where the table holds it and a power loss took files of it.

        It is then committed again from its prepared files, which are checked first. Returns what was lost and done; None
        where nothing is lost, or where a store can hold no transaction without its files.

        Raises:
            SinkRefused: prepared files are missing, or later versions would be lost with it; nothing was changed.
        """
        return None


class SinkSession(StoreRecord, Protocol):
    """A sink opened by one driver for one topology: the driver's side of it.

    An implementation inherits it; what a store may do beyond it is in `sinks.contract.protocol`. One thread at a
    time calls it; with several batches in flight `commit` comes from another one than the rest.
    """

    @property
    def identity(self) -> SinkIdentity:
        """The name under which it keeps its evidence."""
        ...

    @property
    def tells_position(self) -> bool:
        """Whether `held` is the store's own word. Where it is not, the ledger alone knows which txid came last."""
        return True

    def writer(self) -> SinkWriter:
        """The executors' side."""
        ...

    def commit(self, transaction: PreparedTransaction, *, checked: bool) -> CommitResult:
        """Commit one transaction, by the table of `decide`.

        `checked` is on under exactly-once. Off (at-least-once, at-most-once), the txid is recorded as evidence, and
        what the sink held before is not compared.

        Guarantee:
            When it returns, the rows and the evidence are durable, and both or neither are there after any crash.

        Raises:
            PositionMismatch: the sink does not hold `previous`.
            SinkRefused: it refuses for good (table or column gone, a row violates a constraint, a file is missing).
            StoreUnavailable: no answer, or the answer was lost: read `held` again before acting.
            Fenced: a newer epoch holds this sink.
        """
        ...

    def keep_out(self, transaction: PreparedTransaction) -> int | None:
        """Have the store refuse this transaction from now on, also a commit of it that is still on its way: its rows are
        given up.

        Returns the version of the table from which on it is refused. None: the store has no such versions; what arrives late
        is then found, and recorded, by the next start.

        Raises:
            PositionMismatch: the sink holds it.
            SinkRefused, StoreUnavailable: nothing was written.
        """
        return None

    def sweep(self, is_dead: Callable[[int, int, str], bool]) -> int:
        """Remove prepared files of this incarnation that are dead by txid, attempt and name; returns how many."""
        ...

    def unreached(self, files: Sequence[PreparedFile]) -> Sequence[str]:
        """Which of these files, just written by tasks, are not seen from here with their size: asked before prepare.

        A sink without files has none.
        """
        return ()

    def finished(self, transaction: PreparedTransaction) -> None:
        """The ledger says `committed`: staging files of this txid may go, whichever attempt or task wrote them."""
        ...

    def close(self) -> None:
        """Let connections go; the next call, if one comes, makes them anew."""
        ...


class Sink(SinkSpec, Protocol):
    """A sink that can be opened. An implementation inherits it. `sinks.contract.registry` opens one by its name."""

    def placed(self, database: Database, staging: str) -> Sink:
        """This sink with the run's database and folder for staged files, where it names none itself."""
        ...

    def open(self, identity: SinkIdentity, input_: SinkInput, epoch: int, *, create: bool = True) -> SinkSession:
        """Connect, make the table if it is missing and `create`, and fence older epochs out.

        Raises:
            SinkRefused: the table is there and cannot hold such rows (names column and types), or is missing (with
                `problem` as `SinkProblem.TABLE_GONE`); then nothing was made.
            Fenced: a newer epoch holds this sink.
            StoreUnavailable: it cannot be reached.
        """
        ...

    def inspect(self, identity: SinkIdentity, input_: SinkInput) -> SinkSession:
        """Open for reading only (audit, status): makes nothing, fences nobody."""
        ...

    def description(self, input_: SinkInput) -> dict[str, Json]:
        """What the ledger keeps of this sink, so that the registry can open it again: its `kind`, and where its table is.
        Never a secret. Empty: only the topology's own code can open it.
        """
        return {}

    def find_table(self) -> TableKey | None:
        """Which table it has, by the store's answer; nothing is made or fenced.

        Equal where two sinks have one table, whatever they call it, also where it is not made yet; None: not known.

        Raises:
            StoreUnavailable: the store does not answer.
        """
        return self.table_key()

    def refusals(self, input_: SinkInput, database: Database | None = None) -> Sequence[str]:
        """The rules of its table that can refuse rows at a commit, each in a few words; none where there is no table yet.
        `database` is the run's, for a sink that names none itself.

        Raises:
            StoreUnavailable: the store does not answer.
            SinkRefused: the store refuses to answer.
        """
        return ()

    def committed_by(self, input_: SinkInput) -> str | None:
        """Who writes to its table, and why, in a few words, where that depends on the table; None: it does not, or the table
        cannot be read.
        """
        return None

    def preview(self, identity: SinkIdentity, input_: SinkInput, database: Database | None = None) -> TablePreview:
        """What a start would do with its table, for a dry run. Nothing is made, changed, claimed or fenced, and nothing is
        locked for longer than a query. `database` is the run's, for a sink that names none itself; None: there is none yet.

        Raises:
            StoreUnavailable: the store does not answer.
        """
        return TablePreview(TableAction.CANNOT_TELL, f"{type(self).__name__} has no preview")

    @property
    def may_lose_files(self) -> bool:
        """Whether a power loss may take files of what it committed: `retry` then asks its session (`restore_lost`)."""
        return False

    @property
    def is_new_in_process(self) -> bool:
        """Whether its rows were in another process's memory, and are lost with it: its table may be made anew."""
        return False


class CommitDecision(StrEnum):
    """What to do with a prepared transaction, given what the sink holds."""

    COMMIT = "commit"
    SKIP = "skip"


def decide(identity: SinkIdentity, transaction: PreparedTransaction, held: Held | None) -> CommitDecision:
    """Whether to commit N: the sink must hold exactly PREV; N with the same digest is done already; all else is refused.

    `last >= N` alone would not do: a number says nothing about content.

    Raises:
        PositionMismatch: the sink holds another txid, or the same one with another digest.
        CannotTell: the sink holds N, and the evidence of what it contains has expired.
    """
    n, last = transaction.txid, None if held is None else held.txid
    if last == transaction.previous:
        return CommitDecision.COMMIT
    where = f"sink {identity.sink!r} of topology {identity.topology!r}"
    inspect = f"inspect with: stormproof audit verify {identity.topology}"
    details: dict[str, Json] = {"sink": identity.sink, "txid": n, "previous": transaction.previous, "held": last}
    if held is not None and last == n:
        if held.digest == transaction.digest:
            return CommitDecision.SKIP
        if held.digest is None:
            raise CannotTell(
                f"{where} holds txid {n}, and the evidence of its content has expired; {inspect}", **details
            )
        raise PositionMismatch(
            f"{where} holds txid {n} with digest {held.digest}, the ledger prepared {transaction.digest}; {inspect}",
            **details,
        )
    raise PositionMismatch(
        f"{where} holds txid {last}, the ledger expects {transaction.previous} before txid {n}; {inspect}", **details
    )


def warning_of(found: Sequence[str]) -> str:
    """The warning, for the log and for `doctor`, that the table has rules which may refuse rows."""
    return (
        f"its table can refuse rows when they are committed ({'; '.join(found)}). A message with such a row is rejected at "
        "this sink (see: stormproof dead-letters list TOPOLOGY), up to rejects_max_share of the messages; a refused row of "
        "a group rejects the messages of that group. Better check in the topology what the table checks"
    )


@runtime_checkable
class SupportsTakeTable(Protocol):
    """A session that a person can tell to go on in the table that now has its table's name."""

    def count_rows(self, limit: int) -> int:
        """How many rows the table holds, counted no further than to `limit`."""
        ...

    def take_table(self, last: PreparedTransaction | None) -> None:
        """Make this table the sink's own, which holds `last` (None: no txid) from here on. May be repeated.

        Where the table's own record ends before `last`, an empty transaction with the txid and digest of `last` is recorded
        in place of what is missing.

        Raises:
            PositionMismatch: it holds a later txid.
        """
        ...


@runtime_checkable
class SupportsSkipRows(Protocol):
    """A session whose table refuses rows one by one: it can commit a batch without those (``ledger skip --rows``)."""

    def commit_without_refused(self, transaction: PreparedTransaction) -> CommitResult:
        """Commit all messages but those whose rows the table refuses; the result has the rows that are left out.

        A row whose messages are not known is left out alone.
        """
        ...

    def close(self) -> None:
        """Let connections go."""
        ...


@runtime_checkable
class SupportsOperate(Protocol):
    """A sink that a command can open for a batch whose driver has stopped, under that driver's epoch."""

    def operate(self, identity: SinkIdentity, input_: SinkInput, epoch: int, staging: str) -> SupportsSkipRows:
        """Open it; fences nobody."""
        ...


@dataclass(frozen=True, slots=True)
class Compaction:
    """What a compaction did: the table's version that it made (None: there was nothing to do), and how many files went and
    came. `tries`: how often it was begun, since other writers came first.
    """

    version: int | None
    removed: int
    added: int
    tries: int = 1


@dataclass(frozen=True, slots=True)
class Repair:
    """What a repair did, or would do: the version that it made (None: there was nothing to do, or it was only looked), the
    files whose statistics excluded a row, the keys that came more than once and how many of their rows went, and what was
    left, with the reason.
    """

    version: int | None
    files: Sequence[str]
    doubled_keys: int
    rows_removed: int
    left: Sequence[str]


@runtime_checkable
class SupportsUpkeep(Protocol):
    """A session whose table keeps its rows in files: many small ones of small batches, those of earlier versions until
    somebody removes them, and statistics of them, by which readers and merges pass over them.
    """

    def compact(self, target_bytes: int | None = None) -> Compaction:
        """Write the rows of files below `target_bytes` into fewer files; changes no row and no evidence.

        Raises:
            StoreUnavailable: other writers kept coming first, or the store does not answer; nothing was changed.
            SinkRefused: the table refuses it.
        """
        ...

    def vacuum(self, retained_hours: int | None = None, *, dry_run: bool = False) -> Sequence[str]:
        """Remove the files that the table let go of so many hours ago (None: as the table says), and no prepared file.
        Returns them; with `dry_run` they stay.

        Raises:
            StoreUnavailable: the store does not answer.
            SinkRefused: the files are needed still, or the table refuses it.
        """
        ...

    def repair(self, *, dry_run: bool = False) -> Repair:
        """Replace statistics that exclude a row, and leave one row of each key; with `dry_run` say only what is wrong.

        Raises:
            StoreUnavailable: other writers kept coming first, or the store does not answer; nothing was changed.
            SinkRefused: the table cannot be read, or refuses it.
        """
        ...


OTHER: Final = "other"
"""The kind of a sink that does not describe itself."""


def describe_sink(
    sink: Sink, input_: SinkInput, *, files: str | None = None, ledger_database: Database | None = None
) -> dict[str, Json]:
    """What the ledger keeps of a sink, so that it can be opened without the topology's code. Never a secret.

    A sink that does not describe itself is of kind `other`: only a caller who opens it can check its evidence. `files` is
    the folder of its prepared files. A sink in the ledger's own database is described without a database: a ledger that is
    restored on another server must not lead the audit to the old server's table.
    """
    description: dict[str, Json] = {
        "kind": OTHER,
        "mode": input_.mode.value,
        "keys": [*input_.keys],
        "folds": input_.described_folds,
        **input_.upsert_rule,
        **input_.described_lineage,
        "schema": base64.b64encode(input_.schema.serialize().to_pybytes()).decode("ascii"),
        "files": files,
        **sink.description(input_),
    }
    if ledger_database is not None and description.get("database") == ledger_database.without_password:
        description["database"] = None
    return description
