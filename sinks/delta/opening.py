"""How a Delta table is opened: torn log entries are put aside, a missing table is made, its folders are synced, and it is
claimed; and who writes to it.

Who has claimed a table, also before anything is committed to it, one property of the table for each life says. It outlives
the log's retention, and a change of properties conflicts with every other one: where two lives claim a table at the same
instant, one of them has to look again.

One commits at a time to a table to which Spark writes (`alone`). Spark's log store for local disks looks whether a version's
entry is there, and then renames its own into place, which overwrites: another writer's commit in between would be lost
without an error. So whoever of us commits holds a lock on one file in its log's folder. Spark's JVM takes the lock itself
and not its driver: a JVM outlives a driver that is killed, and its commit may still land. Writers that are not ours do not
know of the lock.
"""

from __future__ import annotations

import fcntl
import json
import os
import tempfile
import threading
from collections.abc import Callable, Collection, Generator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from functools import cached_property, partial
from typing import Any, Final, TypeAlias

from deltalake import DeltaTable, Schema
from deltalake.exceptions import DeltaError, TableNotFoundError

from stormproof.core.base.clock import Clock, SystemClock
from stormproof.core.base.errors import SinkRefused, StoreUnavailable
from stormproof.core.contract.sink import SinkInput, SinkMode
from stormproof.core.storage.files import files_at
from stormproof.core.storage.protocol import is_url
from stormproof.sinks.contract.protocol import SinkIdentity, SinkProblem
from stormproof.sinks.delta import object_store, power_loss, versions
from stormproof.sinks.delta.features import AskedCommitter, Committer, TableFacts, choose, refusal
from stormproof.sinks.delta.log import DeltaLog, Label
from stormproof.sinks.delta.power_loss import put_torn_aside
from stormproof.sinks.delta.rewrite import restore
from stormproof.sinks.delta.spark import SparkCommitter
from stormproof.sinks.delta.statistics import WITH_STATISTICS, by_delta_rs, narrowed
from stormproof.sinks.delta.table import CHECKPOINT_INTERVAL, committer_of
from stormproof.sinks.delta.versions import NewestTable, TableHead


class Committers:
    """Who writes rows of one kind to one table; `asked` is what the user said."""

    def __init__(self, log: DeltaLog, where: str, input_: SinkInput, asked: AskedCommitter) -> None:
        self._log = log
        self._where = where
        self._input = input_
        self._asked: AskedCommitter = asked
        self._clock = SystemClock()
        self._chosen: tuple[tuple[str, int], Committer] | None = None

    @cached_property
    def spark(self) -> SparkCommitter:
        """Spark, where it writes to the table."""
        return SparkCommitter(self._log, self._where)

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
        """Keep others of us from committing meanwhile, where Spark writes to the table."""
        jvm = self.spark.start()._jvm if committer is Committer.SPARK else None  # pyright: ignore[reportPrivateUsage]
        return alone(self._log, self._where, self._clock, jvm)

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
            versions.add_files(table, [], label.for_delta_rs())

    def restore(self, committer: Committer, table: DeltaTable, version: int, metadata: Mapping[str, str]) -> None:
        """RESTORE the table to a version, in a version with this metadata."""
        if committer is Committer.SPARK:
            self.spark.restore(version, metadata)
        else:
            restore(self._log, table, version, metadata)


# ---- claims

CLAIM_TRIES_MAX: Final = 20
"""How often we look again because another writer changed the table's properties between our look and our change."""

_PREFIX: Final = "stormproof.claim."
_CLAIMED: Final = "claimed"
_RELEASED: Final = "released"
"""The two values of a life's property. A released one stays, since delta-rs cannot remove a property."""


def properties_of(identity: SinkIdentity) -> Mapping[str, str]:
    """The properties with which a table is made for this life."""
    return {_name(identity): _CLAIMED}


def is_claimed_by(table: DeltaTable, identity: SinkIdentity) -> bool:
    """Whether this life has claimed the table."""
    return table.metadata().configuration.get(_name(identity)) == _CLAIMED


def other_claims(table: DeltaTable, identity: SinkIdentity) -> tuple[str, ...]:
    """The other lives that have claimed the table."""
    properties = table.metadata().configuration.items()
    return identity.other_lives(
        name.removeprefix(_PREFIX) for name, value in properties if value == _CLAIMED and name.startswith(_PREFIX)
    )


class Claims:
    """The claims on one table, seen by one life."""

    def __init__(
        self,
        log: DeltaLog,
        newest: NewestTable,
        identity: SinkIdentity,
        where: str,
        committers: Committers,
    ) -> None:
        self._log = log
        self._newest = newest
        self._identity = identity
        self._where = where
        self._committers = committers

    def put(self, accepted: Collection[str]) -> tuple[str, ...]:
        """Claim the table for this life; where lives that are not `accepted` have claimed it, they are returned instead.

        Raises:
            StoreUnavailable: the table cannot be changed, or other writers keep changing its properties.
        """
        for _ in range(CLAIM_TRIES_MAX):
            table = self._newest.load()
            if is_claimed_by(table, self._identity):
                power_loss.sync_version(self._log, table.version())
                return ()
            strangers = tuple(life for life in other_claims(table, self._identity) if life not in accepted)
            if strangers:
                return strangers
            self._write(table, _CLAIMED)
        raise self._contended()

    def release(self) -> bool:
        """Take this life's claim back; whether there was one. Raises as `put`."""
        for _ in range(CLAIM_TRIES_MAX):
            table = self._newest.load()
            if not is_claimed_by(table, self._identity):
                return False
            if self._write(table, _RELEASED):
                return True
        raise self._contended()

    def _write(self, table: DeltaTable, value: str) -> bool:
        """Whether it was written, in a version of its own; False: another writer's change came first."""
        seen = table.version()  # before anything else loads the newest version, which brings `table` up to date
        try:
            with self._committers.alone(self._committers.of(self._newest.head())):
                if self._newest.load().version() != seen:
                    return False
                self.set_property(table, _name(self._identity), value)
        except FileExistsError:
            return False
        except (DeltaError, OSError, ValueError) as error:
            raise StoreUnavailable(f"{self._where}: the table cannot be claimed: {versions.shown(error)}") from error
        return True

    def set_property(self, table: DeltaTable, name: str, value: str) -> None:
        """Set a property of the table, in the version behind the one that is loaded; the caller keeps others of us out.

        Raises:
            FileExistsError: another writer's version came first.
            OSError, ValueError: the table cannot be changed.
        """
        by = self._committers.of(self._newest.head())
        try:
            if by is Committer.SPARK:
                self._committers.spark.set_property(name, value)
            else:
                power_loss.sync_tail(self._log, table.version())
                entry = self._entry(table, {name: value})
                self._log.files.put_new(self._log.entry_path(table.version() + 1), entry)
        finally:
            self._newest.forget()
        power_loss.sync_version(self._log, self._newest.load().version())

    def _entry(self, table: DeltaTable, parameters: Mapping[str, str]) -> bytes:
        """The log entry that sets our property, and changes nothing else.

        Not by delta-rs: with a property it adds features to the table's protocol, which older readers then refuse.
        """
        metadata = table.metadata()
        told: dict[str, object] = {
            "id": str(metadata.id),
            "name": metadata.name,
            "description": metadata.description,
            "format": self._log.file_format(table.version()),
            "schemaString": table.schema().to_json(),
            "partitionColumns": metadata.partition_columns,
            "configuration": {**metadata.configuration, **parameters},
            "createdTime": metadata.created_time,
        }
        told = {name: part for name, part in told.items() if part is not None}
        return versions.entry_of("SET TBLPROPERTIES", {"properties": json.dumps(parameters)}, [{"metaData": told}], {})

    def _contended(self) -> StoreUnavailable:
        return StoreUnavailable(f"{self._where}: other writers keep changing the table's properties; try again")


def _name(identity: SinkIdentity) -> str:
    return _PREFIX + identity.application_id


@contextmanager
def opening(where: str, log: DeltaLog, mode: SinkMode) -> Generator[str]:
    """Around code that opens the table: turns errors of delta-rs and of the file system into ours, which name `where`.

    Raises:
        SinkRefused: there is no table, or it has a feature that delta-rs cannot read.
        StoreUnavailable: it cannot be opened.
    """
    try:
        with versions.panics_as_errors():
            yield where
    except TableNotFoundError as error:
        raise SinkRefused(
            f"{where}: there is no Delta table: {versions.shown(error)}", problem=SinkProblem.TABLE_GONE
        ) from error
    except (DeltaError, OSError) as error:
        refused = (
            choose(TableFacts(log.protocol_features(), {}, {}), mode).refused if isinstance(error, DeltaError) else ()
        )
        if refused:
            raise SinkRefused(
                f"{where}: {refusal(refused[0], mode)}", features=[found.feature.name for found in refused]
            ) from error
        raise StoreUnavailable(f"{where}: the table cannot be opened: {versions.shown(error)}") from error


def prepare_table(
    path: str,
    identity: SinkIdentity,
    input_: SinkInput,
    where: str,
    *,
    create: bool,
    partitions: Sequence[str] = (),
    settings: Mapping[str, str] | None = None,
) -> None:
    """Put a torn log entry aside, make the table if it is missing and `create`, and sync its folders.

    A table that is made has these `partitions`, and these `settings` among its properties.

    Raises:
        SinkRefused: the table is missing and not to be made, or a power loss took more than its newest log entry.
    """
    put_torn_aside(DeltaLog(path), where)
    if is_url(path):
        object_store.require_conditional_put(path, where)
    if not versions.is_table(path):
        if not create:
            raise SinkRefused(f"{where}: there is no Delta table", problem=SinkProblem.TABLE_GONE)
        _create(path, identity, input_, partitions, settings or {}, where)
    files_at(path).settle_folder(path)


def _create(
    path: str,
    identity: SinkIdentity,
    input_: SinkInput,
    partitions: Sequence[str],
    settings: Mapping[str, str],
    where: str,
) -> None:
    files, log = files_at(path), DeltaLog(path)
    refused = choose(TableFacts.of_new(input_, partitions, settings), input_.mode).refused
    if refused:
        raise SinkRefused(f"{where}: {refusal(refused[0], input_.mode)}", features=[f.feature.name for f in refused])
    files.make_folder(path)
    ours = {"delta.checkpointInterval": str(CHECKPOINT_INTERVAL), **settings, **properties_of(identity)}
    if input_.is_by_key and (columns := narrowed(input_.schema, partitions, ours, by_delta_rs)) is not None:
        ours[WITH_STATISTICS] = columns
    try:
        with tempfile.TemporaryDirectory(prefix="stormproof-make-") as folder:
            DeltaTable.create(
                folder,
                Schema.from_arrow(input_.schema.empty_table().schema),
                partition_by=[*partitions],
                configuration=ours,
                raise_if_key_not_exists=False,
            )
            entry = _first_entry(folder)
    except DeltaError as error:
        if versions.may_pass(error) or not (settings or partitions):
            raise
        raise SinkRefused(
            f"{where}: delta-rs cannot make such a table: {versions.shown(error)}; make it with Spark, or name other "
            "properties and partitions"
        ) from error
    files.make_folder(log.folder)
    with suppress(FileExistsError):  # another one made it
        files.put_new(log.entry_path(0), entry)
    files.sync(log.entry_path(0))
    files.sync_folder(log.folder)
    files.sync_folder(path)


def _first_entry(folder: str) -> bytes:
    """The log entry of the table that delta-rs made in a folder, with a protocol by which every reader can read it.

    Where its protocol lists features, delta-rs leaves out that of NOT NULL, without which Spark does not read the table. It
    lists that of variants, which no table of ours has, beside deletion vectors.
    """
    with open(DeltaLog(folder).entry_path(0), "rb") as made:
        actions = [json.loads(line) for line in made]
    protocol = next(action["protocol"] for action in actions if "protocol" in action)
    if "writerFeatures" in protocol:
        protocol["writerFeatures"] = sorted({*protocol["writerFeatures"], "invariants"} - {"variantType"})
        protocol["readerFeatures"] = sorted({*protocol["readerFeatures"]} - {"variantType"})
    return versions.entry_of("CREATE TABLE", {}, [action for action in actions if "commitInfo" not in action], {})


# ---- one commit at a time

LOCK_NAME: Final = ".stormproof-commit"
"""The file that is locked; readers of a log ignore such names. It is made when Spark first writes, or when a table with
keys is first compacted, and stays.
"""

WAIT_S: Final = 30.0

_POLL_S: Final = 0.02

IN_PROCESS: Final[dict[tuple[int, str], threading.Lock]] = {}
"""A lock of a file is a process's: between threads it does nothing, and letting it go in one lets it go in all.
By process id: a fork has a copy, which may be locked for ever.
"""

LetGo: TypeAlias = Callable[[], None]


@contextmanager
def alone(log: DeltaLog, where: str, clock: Clock, jvm: Any | None = None) -> Generator[None]:
    """Hold the lock; without a `jvm` only where the file is there.

    Raises:
        StoreUnavailable: another process has held it for `WAIT_S`; nothing was written.
    """
    if not log.files.is_local:  # Spark commits to no such table, and a store refuses the second of two entries
        yield
        return
    # One name for one lock, by whatever path the table is reached.
    path = os.path.join(os.path.realpath(log.folder), LOCK_NAME)
    if jvm is None and not os.path.exists(path):
        yield
        return
    take = partial(_by_us if jvm is None else partial(_by_jvm, jvm), path)
    with IN_PROCESS.setdefault((os.getpid(), path), threading.Lock()):
        let_go = _taken(take, path, where, clock)
        try:
            yield
        finally:
            let_go()


def make_lock(log: DeltaLog) -> None:
    """Have all of us take the lock from now on, also where delta-rs commits."""
    if not log.files.is_local:
        return
    os.close(os.open(os.path.join(log.folder, LOCK_NAME), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666))


def _taken(take: Callable[[], LetGo | None], path: str, where: str, clock: Clock) -> LetGo:
    until_s = clock.monotonic_s() + WAIT_S
    while (let_go := take()) is None:
        if clock.monotonic_s() >= until_s:
            raise StoreUnavailable(
                f"{where}: another process has been committing to the table for {WAIT_S:.0f} s: a driver that was paused, "
                f"the JVM of one that was killed, or a long compaction; nothing was written. Find it with: fuser -v {path}",
                path=path,
            )
        clock.sleep(_POLL_S)
    return let_go


def _by_us(path: str) -> LetGo | None:
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    try:
        fcntl.lockf(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError):
        os.close(fd)
        return None
    return lambda: os.close(fd)


def _by_jvm(jvm: Any, path: str) -> LetGo | None:
    file = jvm.java.io.RandomAccessFile(path, "rw")
    if file.getChannel().tryLock() is None:
        file.close()
        return None
    close: LetGo = file.close
    return close
