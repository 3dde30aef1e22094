"""A Delta table's log, read from its JSON entries: our transactions, and the files that each version added and removed; what
a commit of ours says of itself there (`Label`); and the live files: their sizes and `add` actions, how their paths are
spelled, the values of their partitions. A `remove` that spells a path otherwise removes nothing.
"""

from __future__ import annotations

import base64
import itertools
import json
import os
import re
import time
import uuid
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, BinaryIO, Final
from urllib.parse import unquote, urlsplit

import pyarrow as pa
import pyarrow.parquet as pq
from deltalake import CommitProperties, DeltaTable, Transaction

from stormproof.core.base.arrow import pc
from stormproof.core.base.errors import SinkRefused
from stormproof.core.contract.sink import PreparedFile
from stormproof.core.storage.files import files_at
from stormproof.core.storage.protocol import Files
from stormproof.sinks.contract.protocol import PreparedTransaction
from stormproof.sinks.rows.content import Totals

APPLICATION: Final = "stormproof.application"
TXID: Final = "stormproof.txid"
DIGEST: Final = "stormproof.digest"
ROWS: Final = "stormproof.rows"
EPOCH: Final = "stormproof.epoch"
CHECKED: Final = "stormproof.checked"
SUPERSEDED: Final = "stormproof.superseded"
REJECTED: Final = "stormproof.rejected"
REINSTATED: Final = "stormproof.reinstated"
REFUSED: Final = "stormproof.refused"
FILES: Final = "stormproof.files"
TOTALS: Final = "stormproof.totals"
"""Keys of the commit's own metadata; Delta keeps them beside `operation` in `commitInfo`."""

UNDOES: Final = "stormproof.undoes"
UNDONE_VERSION: Final = "stormproof.undone.version"
UNDONE_HOLDS: Final = "stormproof.undone.holds"
"""Keys of a RESTORE of our own: the application and version whose commit it undoes, and the txid that is then the last."""

GIVEN_UP: Final = "stormproof.given_up"
"""Key of a version that keeps out a transaction: its txid. It is an undo, too, of nothing; see `DeltaSession.keep_out`."""

COMPACTS: Final = "stormproof.compacts"
"""Key of a compaction of our own, with the application that asked for it. It holds no txid and changes no row."""


LAST_CHECKPOINT: Final = "_last_checkpoint"
"""The file beside the entries that names the last checkpoint; whoever makes one writes it."""

REPAIRS: Final = "stormproof.repairs"
"""Key of a repair, with the application that asked for it. It holds no txid."""

REMOVED: Final = "stormproof.removed"
"""Key of a version of ours that removed rows of a table by key, which were there twice: their number."""

IN_COMMIT: Final = "inCommitTimestamp"
"""Key of an entry's own time, which grows from version to version where a table asks for it."""

_METRICS: Final = (
    ("num_source_rows", ("num_target_rows_inserted", "num_target_rows_updated")),
    ("numSourceRows", ("numTargetRowsInserted", "numTargetRowsUpdated")),
)
"""The metrics of a MERGE: its rows, and those of the table that they changed. First by delta-rs, then by Spark."""


def now_ms() -> int:
    """The time of day as the log has it."""
    return time.time_ns() // 1_000_000


OF_TIME: Final = -1
"""Stands for the version of a RESTORE that names a time."""


@dataclass(frozen=True, slots=True)
class OurCommit:
    """A transaction of ours in a log entry."""

    version: int
    txid: int
    digest: str
    rows: int
    epoch: int
    checked: bool
    superseded: int = 0
    """Rows that changed nothing: by the commit's metadata before the MERGE, and by the MERGE's own metrics."""
    rejected: int = 0
    reinstated: int = 0
    """As in `Evidence`."""
    refused: str = ""
    """The rejected rows, as `judge.refused_rows` reads them."""
    files: tuple[PreparedFile, ...] = ()
    """The files that were written in place of prepared ones, without the rejected rows."""
    totals: Totals | None = None
    """What a table by key holds since, by the record of its commits; None: it is not on record."""
    at: datetime | None = None
    """The log entry's time."""


@dataclass(frozen=True, slots=True)
class Undo:
    """A RESTORE of our own, which undoes a commit whose files were lost; `holds` is the last txid from then on."""

    version: int
    holds: int | None


@dataclass(frozen=True, slots=True)
class AddedFile:
    """A file that a version added."""

    path: str
    bytes: int
    rows: int | None
    has_deletions: bool = False
    """Whether a deletion vector deletes rows of it."""
    deletion_file: str | None = None
    """The file of that vector, where it is not in the log itself."""
    deleted: int = 0
    """How many rows that vector deletes."""


@dataclass(frozen=True, slots=True)
class LogEntry:
    """One version: its `commitInfo`, and the files that it added and removed."""

    version: int
    info: dict[str, Any]
    added: tuple[AddedFile, ...] = ()
    removed: tuple[tuple[str, bool], ...] = ()
    """Each as (path, whether data changed): OPTIMIZE removes files without a change of data."""
    changes: tuple[str, ...] = ()
    """The files of its change data feed."""
    changes_table: bool = False
    """Whether it changed the table's columns, properties or features."""

    @property
    def operation(self) -> str:
        """The operation that wrote this version, by Delta's name."""
        return str(self.info.get("operation", "unknown"))

    def ours(self, application: str) -> OurCommit | None:
        """The transaction of this application that it holds; None where it is another writer's."""
        if self.info.get(APPLICATION) != application:
            return None
        return OurCommit(
            version=self.version,
            txid=int(self.info[TXID]),
            digest=str(self.info[DIGEST]),
            rows=int(self.info[ROWS]),
            epoch=int(self.info.get(EPOCH, 0)),
            checked=self.info.get(CHECKED) != "false",
            superseded=int(self.info.get(SUPERSEDED, 0)) + self._unmerged,
            rejected=int(self.info.get(REJECTED, 0)),
            reinstated=int(self.info.get(REINSTATED, 0)),
            refused=str(self.info.get(REFUSED, "")),
            files=tuple(PreparedFile(**file) for file in json.loads(str(self.info.get(FILES, "[]")))),
            totals=self._totals,
            at=self._at,
        )

    @property
    def _at(self) -> datetime | None:
        ms = self.info.get(IN_COMMIT) or self.info.get("timestamp")
        return datetime.fromtimestamp(ms / 1000, UTC) if isinstance(ms, int) else None

    @property
    def _totals(self) -> Totals | None:
        """The label has the rows before the commit, whose own metrics have those that it inserted; Spark's may count some
        twice, where a task ran again.
        """
        totals = Totals.of_text(self.info.get(TOTALS))
        inserted = (self.info.get("operationMetrics") or {}).get(_METRICS[0][1][0], 0)
        return None if totals is None else totals.with_rows(None if self.is_by_spark else int(inserted))

    @property
    def _unmerged(self) -> int:
        """The rows of a MERGE that neither were inserted nor updated one; delta-rs and Spark name them differently."""
        metrics: dict[str, Any] = self.info.get("operationMetrics") or {}
        for given, changed in _METRICS:
            if given in metrics:
                return int(metrics[given]) - sum(int(metrics.get(name, 0)) for name in changed)
        return 0

    @property
    def is_by_spark(self) -> bool:
        """Whether Spark wrote it."""
        return str(self.info.get("engineInfo", "")).startswith("Apache-Spark")

    @property
    def is_stormproofs(self) -> bool:
        """Whether a topology wrote it, be it this one or another."""
        return APPLICATION in self.info or UNDOES in self.info or REPAIRS in self.info

    def compacts(self, application: str) -> bool:
        """Whether it is a compaction for this application."""
        return self.info.get(COMPACTS) == application

    @property
    def changes_rows(self) -> bool:
        """Whether it removed or changed rows that were there before."""
        return any(data_change for _, data_change in self.removed)

    @property
    def changes_content(self) -> bool:
        """Whether the table has other rows since, as far as the entry says."""
        return REPAIRS not in self.info and (self.changes_rows or bool(self.added and not self.removed))

    def undo(self, application: str) -> Undo | None:
        """The commit of this application that it undoes, where it is a RESTORE of our own."""
        if self.info.get(UNDOES) != application:
            return None
        holds = str(self.info.get(UNDONE_HOLDS, ""))
        return Undo(int(self.info[UNDONE_VERSION]), int(holds) if holds else None)

    def given_up(self, application: str) -> int | None:
        """The txid of this application that it keeps out."""
        return int(self.info[GIVEN_UP]) if GIVEN_UP in self.info and self.info.get(UNDOES) == application else None

    @property
    def restored_to(self) -> int | None:
        """The version that another writer's RESTORE went back to, `OF_TIME` where it names a time; None for all else.

        A RESTORE of our own undoes a single commit by its version: see `undo`.
        """
        if self.operation != "RESTORE" or UNDOES in self.info:
            return None
        target = str((self.info.get("operationParameters") or {}).get("version", ""))
        return int(target) if target.isdigit() else OF_TIME


def commit_metadata(application: str, transaction: PreparedTransaction, epoch: int, *, checked: bool) -> dict[str, str]:
    """The metadata of a commit."""
    return {
        APPLICATION: application,
        TXID: str(transaction.txid),
        DIGEST: transaction.digest,
        ROWS: str(transaction.rows),
        EPOCH: str(epoch),
        CHECKED: "true" if checked else "false",
        **({SUPERSEDED: str(transaction.superseded)} if transaction.superseded else {}),
    }


def undo_metadata(application: str, undo: Undo) -> dict[str, str]:
    """The metadata of a RESTORE of our own."""
    holds = "" if undo.holds is None else str(undo.holds)
    return {UNDOES: application, UNDONE_VERSION: str(undo.version), UNDONE_HOLDS: holds}


_PART: Final = re.compile(r"(\d{20})\.checkpoint\.\d{10}\.(\d{10})\.parquet")
_BY_UUID: Final = re.compile(r"\d{20}\.checkpoint\.[0-9a-f-]{36}\.(?:json|parquet)")


@dataclass(frozen=True, slots=True)
class DeltaLog:
    """The log of the table at `table`, a folder."""

    table: str

    @property
    def files(self) -> Files:
        """What reads and writes the table's files."""
        return files_at(self.table)

    @property
    def folder(self) -> str:
        """The folder of the log."""
        return os.path.join(self.table, "_delta_log")

    def entry_path(self, version: int) -> str:
        """The file of one version."""
        return os.path.join(self.folder, f"{version:020}.json")

    def versions(self) -> list[int]:
        """The versions whose entries are still there, in order."""
        names = self.files.list(self.folder)
        return sorted(int(n[:20]) for n in names if len(n) == 25 and n.endswith(".json") and n[:20].isdigit())

    def tail(self, newest: int) -> list[int]:
        """The versions up to `newest` whose entries are there without a gap, in order. Older entries may be left over from a
        clean-up that was interrupted: they say nothing of the versions between.
        """
        there = set(self.versions())
        oldest = newest
        while oldest in there:
            oldest -= 1
        return list(range(oldest + 1, newest + 1))

    def checkpoint_path(self, version: int) -> str:
        """The file of a checkpoint of one file."""
        return os.path.join(self.folder, f"{version:020}.checkpoint.parquet")

    def checkpoints(self, *, of_all: bool = False) -> frozenset[int]:
        """The versions that have a checkpoint of one file; with `of_all` also those of several files, which Spark writes, if
        none of these is missing.
        """
        names = self.files.list(self.folder)
        whole = {name for name in names if name[20:] == ".checkpoint.parquet" or (of_all and _BY_UUID.fullmatch(name))}
        parts = Counter(found.groups() for found in map(_PART.fullmatch, names) if of_all and found)
        whole |= {version for (version, of), there in parts.items() if there == int(of)}
        return frozenset(int(name[:20]) for name in whole if name[:20].isdigit())

    def entry(self, version: int) -> LogEntry | None:
        """The whole entry; None where retention has removed it."""
        return self._read(version, whole=True)

    def protocol_features(self) -> frozenset[str]:
        """The features that the newest `protocol` action in the entries lists; for a table that delta-rs cannot open."""
        for version in reversed(self.versions()):
            with self.files.open(self.entry_path(version)) as file:
                for line in file:
                    if line.lstrip().startswith(b'{"protocol"'):
                        found = json.loads(line)["protocol"]
                        return frozenset([*found.get("readerFeatures", ()), *found.get("writerFeatures", ())])
        return frozenset()

    def file_format(self, version: int) -> dict[str, Any]:
        """The `format` of the table's metadata at a version, with its options, which delta-rs does not hand on.

        Raises:
            OSError: neither an entry nor a checkpoint has it.
        """
        names = self.files.list(self.folder)
        for at in range(version, -1, -1):
            entry, checkpoint = os.path.basename(self.entry_path(at)), f"{at:020}.checkpoint."
            for name in sorted(name for name in names if name == entry or name.startswith(checkpoint)):
                for found in self._metadata_in(os.path.join(self.folder, name)):
                    return {**found["format"], "options": dict(found["format"].get("options") or {})}
        raise OSError(f"{self.folder}: no entry and no checkpoint up to version {version} has the table's metadata")

    def _metadata_in(self, path: str) -> Iterator[dict[str, Any]]:
        """The `metaData` actions of a log entry or a checkpoint."""
        if path.endswith(".parquet"):
            with self.files.open_native(path) as opened:
                column = pq.read_table(opened, columns=["metaData"]).column("metaData")
            yield from column.drop_null().to_pylist()
            return
        with self.files.open(path) as file:
            yield from (json.loads(line)["metaData"] for line in file if line.lstrip().startswith(b'{"metaData"'))

    def back_from(self, version: int) -> Iterator[LogEntry]:
        """The entries from `version` back to the first gap, each with its `commitInfo` alone."""
        return self._until_a_gap(range(version, -1, -1))

    def on_from(self, version: int) -> Iterator[LogEntry]:
        """The entries from `version` to the newest one, each with its `commitInfo` alone."""
        return self._until_a_gap(itertools.count(version))

    def _until_a_gap(self, versions: Iterable[int]) -> Iterator[LogEntry]:
        for version in versions:
            entry = self._read(version, whole=False)
            if entry is None:
                return
            yield entry

    def local_path(self, path: str) -> str | None:
        """The path of a file that the log names; None where it is not on this machine's file systems."""
        if "://" in path or path.startswith("file:"):  # a shallow clone names its source's files in full
            return unquote(urlsplit(path).path) if path.startswith("file:") else None
        return os.path.join(self.table, path)

    def _read(self, version: int, *, whole: bool) -> LogEntry | None:
        info: dict[str, Any] = {}
        added: list[AddedFile] = []
        removed: list[tuple[str, bool]] = []
        changes: list[str] = []
        changes_table = False
        try:
            with self.files.open(self.entry_path(version)) as file:
                for line in file:
                    # Unless the whole entry is asked for, only the line with `commitInfo` is decoded.
                    if not whole and not line.lstrip().startswith(b'{"commitInfo"'):
                        continue
                    action: dict[str, Any] = json.loads(line)
                    if "commitInfo" in action:
                        info = with_user_metadata(action["commitInfo"])
                        if not whole:
                            break
                    elif "add" in action:
                        added.append(_added(action["add"]))
                    elif "metaData" in action or "protocol" in action:
                        changes_table = True
                    elif "cdc" in action:
                        changes.append(unquote(action["cdc"]["path"]))
                    elif "remove" in action:
                        removed.append(
                            (unquote(action["remove"]["path"]), bool(action["remove"].get("dataChange", True)))
                        )
        except FileNotFoundError:
            return None
        return LogEntry(version, info, tuple(added), tuple(removed), tuple(changes), changes_table)


def checksum_of(path: str) -> str:
    """The file that Hadoop keeps beside one that Spark wrote on a local disk; reading that one compares them."""
    return os.path.join(os.path.dirname(path), f".{os.path.basename(path)}.crc")


_OURS: Final = frozenset({APPLICATION, UNDOES, COMPACTS, REPAIRS})


def with_user_metadata(info: dict[str, Any]) -> dict[str, Any]:
    """A `commitInfo` with our metadata beside the rest, where delta-rs writes it. Spark has it as a text, `userMetadata`."""
    text = info.get("userMetadata")
    if not isinstance(text, str) or "stormproof." not in text:
        return info
    try:
        ours = json.loads(text)
    except ValueError:
        return info
    return {**info, **ours} if isinstance(ours, dict) and not _OURS.isdisjoint(ours) else info


def _added(action: dict[str, Any]) -> AddedFile:
    statistics = json.loads(action.get("stats") or "{}")
    vector = action.get("deletionVector")
    return AddedFile(
        unquote(action["path"]),
        int(action["size"]),
        statistics.get("numRecords"),
        bool(vector),
        None if not vector else _deletion_file(vector),
        int(vector.get("cardinality", 0)) if vector else 0,
    )


_Z85: Final = "0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ.-:+=^!/*?&<>()[]{}@%$#"
_B85: Final = "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz!#$%&()*+-;<=>?@^_`{|}~"
_UUID_CHARACTERS: Final = 20


def _deletion_file(vector: dict[str, Any]) -> str | None:
    """The path of a deletion vector's file, by the rule of Delta's protocol; None where the vector is in the log itself."""
    place, text = str(vector.get("storageType")), str(vector.get("pathOrInlineDv"))
    if place == "p":
        return unquote(text)
    if place != "u":
        return None
    prefix, encoded = text[:-_UUID_CHARACTERS], text[-_UUID_CHARACTERS:]
    name = uuid.UUID(bytes=base64.b85decode(encoded.translate(str.maketrans(_Z85, _B85))))
    return os.path.join(prefix, f"deletion_vector_{name}.bin")


COMMIT_RETRIES_MAX: Final = 15
"""How often a commit is tried again after other writers' commits. After one of our own, delta-rs gives up at once."""


@dataclass(frozen=True, slots=True)
class Label:
    """The label of one commit. `known` is the version of the identifier that the table has already. `retries`: how often
    delta-rs tries the commit again behind other writers' commits.
    """

    application: str
    version: int
    metadata: Mapping[str, str]
    known: int | None = None
    retries: int = COMMIT_RETRIES_MAX

    def for_delta_rs(self) -> CommitProperties:
        """The same as delta-rs takes it."""
        return CommitProperties(
            custom_metadata=dict(self.metadata),
            max_commit_retries=self.retries,
            app_transactions=self.identifiers(),
        )

    def identifiers(self) -> list[Transaction]:
        """The transaction identifier: one. For one without a time, the engines disagree on when it expires."""
        return [Transaction(self.application, self.version, now_ms())]


_KEPT: Final = r"^(?:[A-Za-z0-9!$&'()+,./:;=@_~-]|%(?:2[0235A]|3[CEF]|5[B-E]|60|7[BCD]|[89A-F][0-9A-F]))*$"
"""Paths that a `remove` of delta-rs repeats letter by letter. It decodes each path, and encodes all but these letters."""
_OUTSIDE: Final = r"^(?:/|[A-Za-z][A-Za-z0-9+.-]*:)"
"""Paths that are absolute, or URLs."""


def respelled_paths(table: DeltaTable, most: int = 3) -> tuple[str, ...]:
    """Paths of live files below the folder that a `remove` of delta-rs would spell otherwise, `most` of them at most."""
    paths = _paths(table)
    kept = pc.or_(pc.match_substring_regex(paths, _KEPT), _are_outside(paths))
    return tuple(paths.filter(pc.invert(kept)).slice(0, most).to_pylist())


def paths_outside(table: DeltaTable, most: int = 3) -> tuple[str, ...]:
    """Paths of live files that lead out of the table's folder, `most` of them at most."""
    paths = _paths(table)
    return tuple(paths.filter(_are_outside(paths)).slice(0, most).to_pylist())


def unzoned_values(table: DeltaTable, columns: Iterable[str], most: int = 3) -> tuple[str, ...]:
    """Values of these partition columns, timestamps, that name no zone, `most` of them at most. Spark writes them so with
    ``spark.databricks.delta.write.utcTimestampPartitionValues=false``, in the zone of its session, which is not on record.
    """
    values = {value[name] for name in columns for value in table.partitions()}
    return tuple(sorted(value for value in values if value and not value.endswith("Z")))[:most]


def _are_outside(paths: pa.ChunkedArray) -> pa.ChunkedArray:
    return pc.match_substring_regex(paths, _OUTSIDE)


def _paths(table: DeltaTable) -> pa.ChunkedArray:
    """As the log spells them."""
    return pa.chunked_array(table.get_add_actions().column("path")).cast(pa.string())


_SIDECARS: Final = "_sidecars"
_PARSED: Final = frozenset({"stats_parsed", "partitionValues_parsed"})
"""What a checkpoint has beside the parts of an `add`."""


def live_adds(log: DeltaLog, version: int) -> dict[str, dict[str, Any]]:
    """The `add` of each file at a version, by its path without escapes.

    Raises:
        SinkRefused: the log does not reach back so far.
    """
    since = max((at for at in log.checkpoints(of_all=True) if at <= version), default=-1)
    found = {unquote(add["path"]): add for add in _of_checkpoint(log, since)} if since >= 0 else {}
    for number in range(since + 1, version + 1):
        try:
            with log.files.open(log.entry_path(number)) as file:
                actions = [json.loads(line) for line in file if line.strip()]
        except FileNotFoundError:
            raise SinkRefused(f"{log.table}: version {number} is not in the log any more") from None
        for action in actions:
            if "remove" in action:
                found.pop(unquote(action["remove"]["path"]), None)
        for action in actions:
            if "add" in action:
                found[unquote(action["add"]["path"])] = action["add"]
    return found


def _of_checkpoint(log: DeltaLog, version: int) -> Iterator[dict[str, Any]]:
    for name in log.files.list(log.folder):
        if name.startswith(f"{version:020}.checkpoint."):
            yield from _adds_in(log, os.path.join(log.folder, name))


def _adds_in(log: DeltaLog, path: str) -> Iterator[dict[str, Any]]:
    with log.files.open(path) as file:
        rows = _of_parquet(file) if path.endswith(".parquet") else [json.loads(line) for line in file if line.strip()]
    for row in rows:
        add, sidecar = row.get("add"), row.get("sidecar")
        if sidecar is not None:
            yield from _adds_in(log, os.path.join(log.folder, _SIDECARS, sidecar["path"]))
        if add is not None:
            partition, tags = dict(add["partitionValues"] or ()), add.get("tags")
            parsed = _PARSED if add.get("stats") is not None else {"partitionValues_parsed"}
            plain = {name: value for name, value in add.items() if value is not None and name not in parsed}
            yield plain | {"partitionValues": partition} | ({} if tags is None else {"tags": dict(tags)})


def _of_parquet(file: BinaryIO) -> list[dict[str, Any]]:
    parquet = pq.ParquetFile(file)
    kept = [name for name in ("add", "sidecar") if name in parquet.schema_arrow.names]
    found: list[dict[str, Any]] = parquet.read(columns=kept).to_pylist()
    return found


def removal_of(add: Mapping[str, Any], at_ms: int) -> dict[str, Any]:
    """The action that removes a live file, whose rows go with it or are in another one."""
    kept = {name: add[name] for name in ("path", "partitionValues", "size", "deletionVector") if name in add}
    gone = {**kept, "deletionTimestamp": at_ms, "dataChange": True, "extendedFileMetadata": True}
    return {"remove": gone}


def live_files(table: DeltaTable) -> dict[str, int]:
    """The files that a table's newest version lists, with their sizes."""
    actions = table.get_add_actions(flatten=True)
    paths = map(unquote, actions.column("path").to_pylist())
    return dict(zip(paths, actions.column("size_bytes").to_pylist(), strict=True))
